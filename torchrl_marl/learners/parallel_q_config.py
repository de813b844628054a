"""Settings of PQN."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from torchrl_marl.learners.config import (
    Bootstrap,
    CentralInput,
    EpsilonConfig,
    LearningRate,
    Schedule,
    TrainedConfig,
    check_unshare,
)
from torchrl_marl.learners.memory_config import (
    NeedsMemory,
    check_run_windows,
    check_windows,
    remembers,
)
from torchrl_marl.learners.minibatch_config import check_minibatch, check_shards
from torchrl_marl.learners.value_config import MIXED, MixesValues
from torchrl_marl.modules.config import AnyMixerConfig, QNetworkConfig
from torchrl_marl.settings import Count, OneOf, Positive, Range, ReadWhere, Share

__all__ = ["AnyTeamMixerConfig", "ParallelQConfig"]


@dataclass(frozen=True)
class AnyTeamMixerConfig(AnyMixerConfig):
    """A mixer of any kind, and whose values it mixes."""

    over: Annotated[str, OneOf(MIXED), ReadWhere("kind", "none", but=True)] = "group"
    """Whose values become one."""


@dataclass(frozen=True)
class ParallelQConfig(MixesValues, TrainedConfig):
    """PQN: values of discrete actions, learned from each batch while it is new."""

    algorithm: str = "pqn"
    """How agents learn."""
    central_input: Annotated[CentralInput, ReadWhere("mixer.kind", "monotonic")] = "observations"
    """What the mixer sees."""
    bootstrap: Annotated[Bootstrap, ReadWhere("mixer.kind", "none")] = "team"
    """Whose ends stop the return."""
    actor: QNetworkConfig = field(
        default_factory=lambda: QNetworkConfig(activation="relu", layer_norm=True)
    )
    """The network of the values, by which agents act."""
    mixer: AnyTeamMixerConfig = field(default_factory=lambda: AnyTeamMixerConfig("sum"))
    """What makes one value of the agents'."""
    max_grad_norm: Positive | None = 1.0
    """Largest norm of the gradient of each group's networks; null for none."""
    unshare_at: Share | None = None
    """Share of the run, 0 to 1, after which every agent goes on with its own copy of the networks
    that it shared; null for never."""
    lmbda: Share = 0.65
    """Weight of longer returns in the target, Q(lambda)."""
    lr: LearningRate = 5e-4
    """Learning rate of Adam."""
    lr_schedule: Schedule = "linear"
    """Course of the learning rate."""
    num_epochs: Count = 4
    """Passes over a batch."""
    minibatch_size: Count = 400
    """Env steps of a minibatch; the agents of a step stay together."""
    window: Annotated[Count, NeedsMemory(critic=False)] = 16
    """Steps that a network with memory is trained on in a row, from the state that it had there;
    the steps of a batch and of a minibatch are multiples of it."""
    burn_in: Annotated[int, Range(0), NeedsMemory(critic=False)] = 0
    """Steps at the start of a window that only bring the state up to date, and are not learned
    from."""
    exploration: EpsilonConfig = field(
        default_factory=lambda: EpsilonConfig(epsilon_end=0.1, annealing=0.1)
    )
    """How actions are explored."""

    def __post_init__(self) -> None:
        if not isinstance(self.actor, QNetworkConfig):  # a plain network will do, too
            object.__setattr__(self, "actor", QNetworkConfig(**vars(self.actor)))

    @property
    def central(self) -> bool:
        """Whether a mixer sees more than one agent."""
        return self.mixes == "monotonic"

    @property
    def mixes(self) -> str:
        """The kind of its mixer, a word of :data:`~torchrl_marl.modules.mixers.MIXERS`."""
        return self.mixer.kind

    @property
    def remembers(self) -> bool:
        """Whether the actor carries something from step to step."""
        return remembers(self)

    def check(self, at: str = "") -> None:
        """Refuses a mixer where each agent's own end counts, and what is no whole windows."""
        super().check(at)
        self.check_ends(at, "a mixer", "mixer.kind=none")
        check_unshare(self, at)
        if self.remembers:
            check_windows(self, at)

    def check_run(self, run: Any, at: str, *, own_env: bool = False) -> None:
        """Refuses minibatches larger than a batch, and a state that the world does not give."""
        check_minibatch(self.minibatch_size, run, at)
        if self.remembers and not own_env:
            check_run_windows(self, run, at)
        check_shards(self, run, at)
        super().check_run(run, at, own_env=own_env)
