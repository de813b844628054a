"""Settings of IQL, VDN and QMIX."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from torchrl_marl.errors import ConfigError
from torchrl_marl.learners.config import Bootstrap, CentralInput, EpsilonConfig, LearningRate
from torchrl_marl.learners.replay_config import ReplayLearnerConfig
from torchrl_marl.modules.config import MixerConfig, QNetworkConfig
from torchrl_marl.settings import OneOf, Positive, ReadWhere

__all__ = ["MIXED", "MixesValues", "TeamMixerConfig", "ValueConfig"]

MIXED = {
    "group": "those of each group, apart from the others'",
    "team": "those of all groups of equal settings, which earn together",
}
_MIXERS = {"iql": "none", "vdn": "sum", "qmix": "monotonic"}


@dataclass(frozen=True)
class TeamMixerConfig(MixerConfig):
    """A mixer, and whose values it mixes."""

    over: Annotated[str, OneOf(MIXED)] = "group"
    """Whose values become one."""


class MixesValues:
    """What settings have in common of families whose values may be mixed."""

    bootstrap: str
    mixer: Any

    @property
    def mixes(self) -> str:
        """The kind of its mixer, a word of :data:`~torchrl_marl.modules.config.MIXERS`."""
        raise NotImplementedError

    @property
    def mixes_team(self) -> bool:
        """Whether one value is made of those of all its groups."""
        return self.mixes != "none" and self.mixer.over == "team"

    def check_ends(self, at: str, who: str, instead: str) -> None:
        """Refuses a mixer where each agent's own end counts.

        Args:
            at (str): what stands before the names in messages.
            who (str): has one value for all.
            instead (str): a setting of the family that mixes nothing.

        Raises:
            ConfigError: naming it.
        """
        if self.bootstrap == "agent" and self.mixes != "none":
            raise ConfigError(
                f"{at}bootstrap is 'agent', but {who} has one value for all agents, "
                f"expected 'team'; use {at}bootstrap=team, or {at}{instead}."
            )


@dataclass(frozen=True)
class ValueConfig(MixesValues, ReplayLearnerConfig):
    """IQL, VDN and QMIX: values of discrete actions, learned from stored steps."""

    algorithm: str = "qmix"
    """How agents learn."""
    central_input: Annotated[CentralInput, ReadWhere("algorithm", "qmix")] = "observations"
    """What the mixer sees."""
    bootstrap: Annotated[Bootstrap, ReadWhere("algorithm", "iql")] = "team"
    """Whose ends stop the return."""
    actor: QNetworkConfig = field(default_factory=QNetworkConfig)
    """The network of the values, by which agents act."""
    lr: LearningRate = 5e-4
    """Learning rate of Adam."""
    mixer: Annotated[
        TeamMixerConfig,
        ReadWhere("algorithm", "qmix", of=("hidden", "init_scale")),
        ReadWhere("algorithm", "qmix", "vdn", of=("over",)),
    ] = field(default_factory=TeamMixerConfig)
    """What makes one value of those of several agents."""
    exploration: EpsilonConfig = field(default_factory=EpsilonConfig)
    """How new steps are made."""
    double_q: bool = True
    """The next action is what the network prefers, not what its target does."""
    negative_weight: Positive = 1.0
    """Weight of the errors of values above their target; below 1 agents trust that the others will
    do better."""

    def __post_init__(self) -> None:
        for name, kind in (("actor", QNetworkConfig), ("mixer", TeamMixerConfig)):
            if not isinstance(getattr(self, name), kind):  # a plain one will do, too
                object.__setattr__(self, name, kind(**vars(getattr(self, name))))

    @property
    def central(self) -> bool:
        """Whether a mixer sees more than one agent."""
        return self.algorithm == "qmix"

    @property
    def mixes(self) -> str:
        """The kind of its mixer, a word of :data:`~torchrl_marl.modules.config.MIXERS`."""
        return _MIXERS[self.algorithm]

    def check(self, at: str = "") -> None:
        """Refuses a mixer where each agent's own end counts, and a store that is too small."""
        super().check(at)
        self.check_ends(at, self.algorithm, "algorithm=iql")
