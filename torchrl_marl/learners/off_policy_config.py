"""Settings of MADDPG, MATD3, MASAC and their independent forms."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from torchrl_marl.errors import ConfigError
from torchrl_marl.learners.config import ActorCriticConfig, CentralInput, LearningRate
from torchrl_marl.learners.replay_config import ReplayConfig, ReplayLearnerConfig
from torchrl_marl.modules.config import AnyMixerConfig, CriticConfig, RecurrentNetworkConfig
from torchrl_marl.settings import Count, OneOf, Positive, Range, ReadWhere, Share, Weight

__all__ = ["ExplorationConfig", "OffPolicyConfig", "ReplayConfig"]

_TD3 = ("itd3", "matd3")
_SAC = ("isac", "masac")


@dataclass(frozen=True)
class ExplorationConfig:
    """What is added to the actions of a policy while it collects.

    Examples:
        >>> noise = ExplorationConfig(sigma=0.3, sigma_end=0.1, annealing=0.5)
        >>> OffPolicyConfig(exploration=noise).exploration.sigma_end
        0.1
    """

    sigma: Weight = 0.2
    """Standard deviation of Gaussian noise on continuous actions, as a share of half their
    range."""
    sigma_end: Weight = 0.05
    """The same at the end of the schedule."""
    epsilon: Share = 0.0
    """Chance with which an agent acts at random, once learning has started."""
    epsilon_end: Share = 0.0
    """The same at the end of the schedule."""
    annealing: Share = 1.0
    """Share of the run in which both go from the first value to the last, along a line."""


@dataclass(frozen=True)
class OffPolicyConfig(ReplayLearnerConfig, ActorCriticConfig):
    """MADDPG, MATD3, MASAC and their independent forms: learns from stored steps.

    Examples:
        >>> config = OffPolicyConfig("matd3", n_step=3)
        >>> config.twin, config.delayed, config.replay.capacity
        (True, True, 200000)
        >>> OffPolicyConfig(minibatch_size=512, replay=ReplayConfig(capacity=100)).check("learner.")
        Traceback (most recent call last):
            ...
        torchrl_marl.errors.ConfigError: learner.minibatch_size is 512, expected at most \
learner.replay.capacity, 100; use learner.replay.capacity=512.
    """

    algorithm: str = "maddpg"
    """How agents learn."""
    central_input: Annotated[CentralInput, ReadWhere("algorithm", "maddpg", "matd3", "masac")] = (
        "observations"
    )
    """What a central critic sees, beside the actions."""
    actor: RecurrentNetworkConfig = field(default_factory=RecurrentNetworkConfig)
    """The actor's network."""
    critic: Annotated[
        CriticConfig,
        ReadWhere("algorithm", "maddpg", "matd3", "masac", of=("architecture", "value_per")),
    ] = field(default_factory=CriticConfig)
    """The critic's network."""
    mixer: Annotated[
        AnyMixerConfig,
        ReadWhere("algorithm", "maddpg", "matd3", of=("kind", "hidden", "init_scale")),
    ] = field(default_factory=AnyMixerConfig)
    """What makes one value of a group of critics that see one agent each (FACMAC)."""
    actor_lr: LearningRate = 3e-4
    """Learning rate of the actor's Adam."""
    critic_lr: LearningRate = 1e-3
    """Learning rate of the critics' Adam."""
    exploration: Annotated[
        ExplorationConfig, ReadWhere("algorithm", *_SAC, but=True, of=("sigma", "sigma_end"))
    ] = field(default_factory=ExplorationConfig)
    """How new steps are made."""
    actor_gradient: Annotated[
        str,
        OneOf(
            {
                "bootstrap": "as `bootstrap` says",
                "team": "the mean of all values of the group",
                "agent": "the acting agent's own value",
            }
        ),
    ] = "bootstrap"
    """Which values an agent's actions are to raise."""
    saturation_coeff: Annotated[Weight, ReadWhere("algorithm", *_SAC, but=True)] = 1e-3
    """Weight of the squares of the actor's outputs before they are squashed (of its logits, where
    actions are discrete), which keeps actions off their bounds."""
    actor_interval: Annotated[Count, ReadWhere("algorithm", *_TD3)] = 2
    """Updates of the critics for one of the actor and the targets."""
    target_noise: Annotated[Weight, ReadWhere("algorithm", *_TD3)] = 0.2
    """Standard deviation of the noise on the target's next action, as a share of half the
    range."""
    target_noise_clip: Annotated[Weight, ReadWhere("algorithm", *_TD3)] = 0.5
    """Largest noise on the target's next action, as a share of half the range."""

    alpha_lr: Annotated[Positive, ReadWhere("algorithm", *_SAC)] = 3e-3
    """Learning rate of the temperature's Adam: SAC's 3e-4 for an update at every frame, of which
    there is one at every tenth."""
    alpha_init: Annotated[Positive, ReadWhere("algorithm", *_SAC)] = 1.0
    """The first temperature, the weight of the policy's entropy."""
    target_entropy: Annotated[float | None, Range(), ReadWhere("algorithm", *_SAC)] = None
    """Entropy that the temperature keeps, for each action feature from -1 to 1; of discrete actions
    as a share of that of a uniform choice of the legal ones. None: -1, and 0.5."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.actor, RecurrentNetworkConfig):  # a plain network will do, too
            object.__setattr__(self, "actor", RecurrentNetworkConfig(**vars(self.actor)))

    @property
    def mixed(self) -> bool:
        """Whether critics see one agent each, and their values are mixed (FACMAC)."""
        return self.algorithm in ("maddpg", "matd3") and self.mixer.kind != "none"

    @property
    def twin(self) -> bool:
        """Whether there are two critics, of which the smaller value counts (TD3, SAC)."""
        return self.delayed or self.soft

    @property
    def delayed(self) -> bool:
        """Whether the actor moves less often, and its target with noise (TD3)."""
        return self.algorithm in _TD3

    @property
    def noisy(self) -> bool:
        """Whether continuous actions are explored by noise."""
        return not self.soft

    @property
    def soft(self) -> bool:
        """Whether the policy is stochastic, its entropy is worth something, and it has no target
        (SAC)."""
        return self.algorithm in _SAC

    def check(self, at: str = "") -> None:
        """Refuses critics and mixers that do not fit the other settings."""
        super().check(at)
        self._check_mixer(at)

    def _check_mixer(self, at: str) -> None:
        """Refuses ends and values of one's own, and critics of all agents, under a mixer."""
        expected = {
            "bootstrap": (self.bootstrap, "team"),
            "central_input": (self.central_input, "observations", "state"),
            "actor_gradient": (self.actor_gradient, "bootstrap", "team"),
            "critic.architecture": (self.critic.architecture, "mlp"),
            "critic.value_per": (self.critic.value_per, "agent"),
        }
        for name, (found, *fitting) in expected.items() if self.mixed else ():
            if found not in fitting:
                raise ConfigError(
                    f"{at}{name} is {found!r}, but {at}mixer.kind is {self.mixer.kind!r}, which "
                    "makes one value for a group of critics that see one agent each; use "
                    f"{at}{name}={fitting[0]}, or {at}mixer.kind=none."
                )
