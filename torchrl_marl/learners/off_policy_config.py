"""Settings of the algorithms that learn from stored steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from torchrl_marl.errors import ConfigError
from torchrl_marl.learners.config import ActorCriticConfig, CentralInput
from torchrl_marl.modules.config import CriticConfig, CriticMixerConfig
from torchrl_marl.settings import Count, OneOf, Positive, Range, ReadWhere, Share, Weight

__all__ = ["ExplorationConfig", "OffPolicyConfig", "ReplayConfig"]

_TD3 = ("itd3", "matd3")
_SAC = ("isac", "masac")


@dataclass(frozen=True)
class ReplayConfig:
    """The steps that are kept to learn from."""

    capacity: Count = 200_000
    """Env steps that are kept, of all agents; the oldest make room."""
    alpha: Share = 0.0
    """Exponent of the errors by which steps are drawn (prioritized replay); 0 draws all alike."""
    beta: Annotated[Share, ReadWhere("alpha", 0, but=True)] = 0.4
    """How much less such steps count, so that the draw does not bias what is learned; 1 in full."""


@dataclass(frozen=True)
class ExplorationConfig:
    """What is added to the actions of a policy while it collects."""

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
class OffPolicyConfig(ActorCriticConfig):
    """MADDPG, MATD3, MASAC and their independent forms: learns from stored steps."""

    algorithm: str = "maddpg"
    """How agents learn."""
    central_input: Annotated[CentralInput, ReadWhere("algorithm", "maddpg", "matd3", "masac")] = (
        "observations"
    )
    """What a central critic sees, beside the actions."""
    critic: Annotated[
        CriticConfig,
        ReadWhere("algorithm", "maddpg", "matd3", "masac", of=("architecture", "value_per")),
    ] = field(default_factory=CriticConfig)
    """The critic's network."""
    adam_eps: Positive = 1e-8
    """Adam's epsilon."""
    mixer: Annotated[
        CriticMixerConfig,
        ReadWhere("algorithm", "maddpg", "matd3", of=("kind", "hidden", "init_scale")),
    ] = field(default_factory=CriticMixerConfig)
    """What makes one value of a group of critics that see one agent each (FACMAC)."""
    actor_lr: Positive = 3e-4
    """Learning rate of the actor's Adam."""
    critic_lr: Positive = 1e-3
    """Learning rate of the critics' Adam."""
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    """What is kept."""
    exploration: Annotated[
        ExplorationConfig, ReadWhere("algorithm", *_SAC, but=True, of=("sigma", "sigma_end"))
    ] = field(default_factory=ExplorationConfig)
    """How new steps are made."""
    learning_starts: Annotated[int, Range(0)] = 10_000
    """Frames with random actions before the first update."""
    updates_per_frame: Positive = 0.1
    """Updates for each frame that is collected since then."""
    minibatch_size: Count = 256
    """Env steps of an update, drawn from all that are kept; the agents of a step stay
    together."""
    n_step: Count = 1
    """Rewards that are added up before the value of what follows."""
    tau: Annotated[float, Range(0, 1, above=True)] = 0.005
    """Share of the way that target networks go to the networks after each update."""
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

    alpha_lr: Annotated[Positive, ReadWhere("algorithm", *_SAC)] = 3e-4
    """Learning rate of the temperature's Adam."""
    alpha_init: Annotated[Positive, ReadWhere("algorithm", *_SAC)] = 1.0
    """The first temperature, the weight of the policy's entropy."""
    target_entropy: Annotated[float | None, ReadWhere("algorithm", *_SAC)] = None
    """Entropy that the temperature keeps, for each action feature from -1 to 1; of discrete actions
    as a share of that of a uniform choice of the legal ones. None: -1, and 0.5."""

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
    def soft(self) -> bool:
        """Whether the policy is stochastic, its entropy is worth something, and it has no target
        (SAC)."""
        return self.algorithm in _SAC

    def check(self, at: str = "") -> None:
        """Refuses a store that is smaller than what is drawn from it, and impossible critics."""
        super().check(at)
        self._check_mixer(at)
        for name in ("minibatch_size", "n_step"):
            value = getattr(self, name)
            if value > self.replay.capacity:
                raise ConfigError(
                    f"{at}{name} is {value}, expected at most {at}replay.capacity, "
                    f"{self.replay.capacity}; use {at}replay.capacity={value}."
                )

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

    def check_run(self, run: Any, at: str, *, own_env: bool = False) -> None:
        """Refuses a run in which no update would ever be made."""
        if self.learning_starts >= run.total_frames:
            raise ConfigError(
                f"{at}learning_starts is {self.learning_starts}, expected less than total_frames, "
                f"{run.total_frames}, or nothing is learned; use {at}learning_starts="
                f"{run.total_frames // 10}."
            )
        if not own_env:
            self._check_store(run, at)
        super().check_run(run, at, own_env=own_env)

    def _check_store(self, run: Any, at: str) -> None:
        """Refuses a store that a batch overflows, or in which n steps never lie."""
        n_envs = run.env.num_envs
        if self.replay.capacity < run.frames_per_batch:
            raise ConfigError(
                f"{at}replay.capacity is {self.replay.capacity}, expected at least "
                f"frames_per_batch, {run.frames_per_batch}; use {at}replay.capacity="
                f"{run.frames_per_batch}."
            )
        most = self.replay.capacity // n_envs
        if self.n_step > most:
            raise ConfigError(
                f"{at}n_step is {self.n_step}, expected at most {most}, the steps of each of "
                f"{n_envs} environments in {at}replay.capacity, {self.replay.capacity}; use "
                f"{at}n_step={min(5, most)}."
            )
