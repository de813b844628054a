"""Settings of learners from recorded actions: behavior cloning, TD3+BC, implicit Q-learning."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from torchrl_marl.errors import ConfigError
from torchrl_marl.learners.config import Bootstrap, CentralInput, EpsilonConfig, LearningRate
from torchrl_marl.learners.off_policy_config import (
    ActorGradientSetting,
    ExplorationConfig,
    OffPolicyConfig,
    ReplayLearnerConfig,
)
from torchrl_marl.modules.config import RecurrentNetworkConfig
from torchrl_marl.settings import Count, Positive, Range, ReadWhere, Share, Weight

__all__ = ["ImitationConfig", "ImplicitQConfig", "TD3BCConfig"]

_NOT_IN_BC = ReadWhere("algorithm", "bc", but=True)


@dataclass(frozen=True)
class ImitationConfig(ReplayLearnerConfig):
    """Settings of behavior cloning.

    Examples:
        >>> config = ImitationConfig()
        >>> config.algorithm, config.learning_starts, config.exploration.epsilon
        ('bc', 0, 0.0)
    """

    algorithm: str = "bc"
    """Learning algorithm of the agents."""
    central_input: Annotated[CentralInput, _NOT_IN_BC] = "observations"
    """Input of a central critic or a mixer."""
    gamma: Annotated[Share, _NOT_IN_BC] = 0.99
    """Discount factor."""
    bootstrap: Annotated[Bootstrap, _NOT_IN_BC] = "team"
    """Done flag that cuts the return: the team's or each agent's."""
    n_step: Annotated[Count, _NOT_IN_BC] = 1
    """Number of rewards in a target before it bootstraps."""
    tau: Annotated[float, Range(0, 1, above=True), _NOT_IN_BC] = 0.005
    """Soft-update rate of the target networks."""
    actor: RecurrentNetworkConfig = field(default_factory=RecurrentNetworkConfig)
    """The actor's network."""
    lr: LearningRate = 1e-3
    """Learning rate of Adam."""
    action_noise: Weight = 0.1
    """Standard deviation of the noise on recorded continuous actions, relative to half their range.
    The policy's standard deviation stays above it, so that MAPPO can start from it."""
    learning_starts: Annotated[int, Range(0)] = 0
    """Frames before the first update."""

    def __post_init__(self) -> None:
        self._take_plain(actor=RecurrentNetworkConfig)

    @property
    def exploration(self) -> EpsilonConfig:
        """Exploration: none."""
        return EpsilonConfig(0.0, 0.0)

    def check_run(self, run: Any, at: str, *, own_env: bool = False) -> None:
        """Refuses a run without actions to copy."""
        if run.data.folder is None and run.data.expert is None:
            raise ConfigError(
                f"{at}algorithm is {self.algorithm!r}, which copies actions, but there are none to "
                "copy; use data.folder=FOLDER with a dataset of `torchrl-marl record`, or "
                "data.expert=heuristic."
            )
        super().check_run(run, at, own_env=own_env)


@dataclass(frozen=True)
class TD3BCConfig(OffPolicyConfig):
    """Settings of TD3 with behavior cloning.

    Examples:
        >>> config = TD3BCConfig()
        >>> config.twin, config.delayed, config.central, config.bc_alpha
        (True, True, True, 2.5)
    """

    algorithm: str = "td3_bc"
    """Learning algorithm of the agents."""
    bc_alpha: Positive = 2.5
    """Weight of the critic's value, scaled to a mean size of 1, relative to the distance from the
    recorded actions."""
    learning_starts: Annotated[int, Range(0)] = 0
    """Frames before the first update."""
    exploration: ExplorationConfig = field(default_factory=lambda: ExplorationConfig(0.0, 0.0))
    """Exploration while collecting."""

    @property
    def central(self) -> bool:
        """True, since critics read more than their agent's observation."""
        return True

    def check_run(self, run: Any, at: str, *, own_env: bool = False) -> None:
        """Refuses a run without a dataset."""
        _check_dataset(run, at, self.algorithm)
        super().check_run(run, at, own_env=own_env)


_EXPLORATION = ("sigma", "sigma_end", "epsilon", "epsilon_end", "annealing")
_NOT_IN_IQL = ReadWhere("algorithm", "iql_offline", but=True)


@dataclass(frozen=True)
class ImplicitQConfig(OffPolicyConfig):
    """Settings of implicit Q-learning.

    Examples:
        >>> config = ImplicitQConfig()
        >>> config.twin, config.noisy, config.expectile, config.beta
        (True, False, 0.7, 3.0)
    """

    algorithm: str = "iql_offline"
    """Learning algorithm of the agents."""
    expectile: Annotated[float, Range(0.5, 1, below=True)] = 0.7
    """Expectile of the recorded actions' values that estimates the state value: 0.5 is their mean,
    near 1 their best."""
    beta: Weight = 3.0
    """Weight of advantages in the policy's loss; 0 is behavior cloning."""
    action_noise: Weight = 0.1
    """Standard deviation of the noise on recorded continuous actions, relative to half their range.
    The policy's standard deviation stays above it."""
    learning_starts: Annotated[int, Range(0)] = 0
    """Frames before the first update."""
    exploration: Annotated[
        ExplorationConfig,
        ReadWhere("algorithm", "iql_offline", but=True, of=_EXPLORATION),
    ] = field(default_factory=lambda: ExplorationConfig(0.0, 0.0))
    """Exploration while collecting."""
    actor_gradient: Annotated[ActorGradientSetting, _NOT_IN_IQL] = "bootstrap"
    """Value that an agent's actor maximizes."""
    saturation_coeff: Annotated[Weight, _NOT_IN_IQL] = 1e-3
    """Weight of the penalty on the actor's squared outputs: values before the tanh, or logits."""
    value_norm = False

    @property
    def central(self) -> bool:
        """True, since critics read more than their agent's observation."""
        return True

    @property
    def twin(self) -> bool:
        """True, since values use the smaller of two critics."""
        return True

    @property
    def noisy(self) -> bool:
        """False, since actors do not explore."""
        return False

    def check_run(self, run: Any, at: str, *, own_env: bool = False) -> None:
        """Refuses a run without a dataset."""
        _check_dataset(run, at, self.algorithm)
        super().check_run(run, at, own_env=own_env)


def _check_dataset(run: Any, at: str, algorithm: str) -> None:
    """Refuses a run without a dataset, in which the policy would copy its own actions."""
    if run.data.folder is None:
        raise ConfigError(
            f"{at}algorithm is {algorithm!r}, which learns from recorded steps, but there are "
            "none; use data.folder=FOLDER with a dataset of `torchrl-marl record`."
        )
