"""Settings of learners that store steps or learn values."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any

from torchrl_marl.errors import ConfigError
from torchrl_marl.learners.config import (
    ActorCriticConfig,
    Bootstrap,
    CentralInput,
    EpsilonConfig,
    LearningRate,
    NeedsMemory,
    OnBatches,
    Schedule,
    TrainedConfig,
    check_unshare,
    check_windows,
    remembers,
    without_memory,
)
from torchrl_marl.modules.config import (
    AnyMixerConfig,
    CriticConfig,
    MixerConfig,
    QNetworkConfig,
    RecurrentNetworkConfig,
)
from torchrl_marl.settings import Count, OneOf, Positive, Range, ReadWhere, Share, Weight

__all__ = [
    "MIXED",
    "AnyTeamMixerConfig",
    "ExplorationConfig",
    "MixesValues",
    "OffPolicyConfig",
    "ParallelQConfig",
    "ReplayConfig",
    "ReplayLearnerConfig",
    "TeamMixerConfig",
    "ValueConfig",
]


@dataclass(frozen=True)
class ReplayConfig:
    """The steps that are kept to learn from.

    Examples:
        >>> ReplayLearnerConfig(replay=ReplayConfig(capacity=50_000, alpha=0.6)).replay.beta
        0.4
    """

    capacity: Count = 200_000
    """Env steps that are kept, of all agents; the oldest make room."""
    alpha: Share = 0.0
    """Exponent of the errors by which steps are drawn (prioritized replay); 0 draws all alike."""
    beta: Annotated[Share, ReadWhere("alpha", 0, but=True)] = 0.4
    """How much less such steps count, so that the draw does not bias what is learned; 1 in full."""
    beta_end: Annotated[Share | None, ReadWhere("alpha", 0, but=True)] = None
    """The same at the end of the run, along a line, usually 1; null: it stays as it is."""


@dataclass(frozen=True)
class ReplayLearnerConfig(TrainedConfig):
    """Settings of every family that learns from stored steps."""

    adam_eps: Positive = 1e-8
    """Adam's epsilon."""
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    """What is kept."""
    unshare_at: Share | None = None
    """Share of the run, 0 to 1, after which every agent goes on with its own copy of the networks
    that it shared, and of their targets; null for never."""
    learning_starts: Annotated[int, Range(0)] = 10_000
    """Frames with random actions before the first update."""
    updates_per_frame: Annotated[float, Range(0, 1_000, above=True)] = 0.1
    """Updates for each frame from then on; the batch that gets there counts as a whole."""
    minibatch_size: Count = 256
    """Env steps of an update, drawn from all that are kept; the agents of a step stay
    together."""
    window: Annotated[Count, NeedsMemory(critic=False)] = 16
    """Steps that a network with memory is trained on in a row, from the state that it had there
    when it acted; the steps of a minibatch are a multiple of it."""
    burn_in: Annotated[int, Range(0), NeedsMemory(critic=False)] = 0
    """Steps at the start of a window that only bring the state up to date, and are not learned
    from."""
    n_step: Count = 1
    """Rewards that are added up before the value of what follows."""
    tau: Annotated[float, Range(0, 1, above=True)] = 0.005
    """Share of the way that target networks go to the networks after each update."""

    @property
    def noisy(self) -> bool:
        """Whether continuous actions are explored by noise."""
        return False

    @property
    def remembers(self) -> bool:
        """Whether the actor carries something from step to step."""
        return remembers(self)

    def check(self, at: str = "") -> None:
        """Refuses a store that is smaller than what is drawn from it, and what has no windows."""
        super().check(at)
        check_unshare(self, at)
        if self.remembers:
            self._check_memory(at)
        for name in ("minibatch_size", "n_step"):
            value = getattr(self, name)
            if value > self.replay.capacity:
                raise ConfigError(
                    f"{at}{name} is {value}, expected at most {at}replay.capacity, "
                    f"{self.replay.capacity}; use {at}replay.capacity={value}."
                )

    def _check_memory(self, at: str) -> None:
        """Refuses what networks with memory do not have."""
        check_windows(self, at)
        plain = {"n_step": (self.n_step, 1), "replay.alpha": (self.replay.alpha, 0)}
        for name, (found, needed) in plain.items():
            if found != needed:
                raise ConfigError(
                    f"{at}{name} is {found:g}, which networks with memory do not have, whose "
                    f"windows are drawn alike and learned from step by step; use {at}{name}="
                    f"{needed}, or {without_memory(self, at)}."
                )

    def check_run(self, run: Any, at: str, *, own_env: bool = False) -> None:
        """Refuses a run in which no update would ever be made, and a store that is too small."""
        if self.learning_starts >= run.total_frames:
            raise ConfigError(
                f"{at}learning_starts is {self.learning_starts}, expected less than total_frames, "
                f"{run.total_frames}, or nothing is learned; use {at}learning_starts="
                f"{run.total_frames // 10}."
            )
        self._check_updates(run, at)
        self.check_store(None if own_env else run.env.num_envs, run.frames_per_batch, at)
        super().check_run(run, at, own_env=own_env)

    def _check_updates(self, run: Any, at: str) -> None:
        """Refuses so few updates that the first is not due by the end."""
        batch = run.frames_per_batch
        n_batches = math.ceil(run.total_frames / batch)
        frames = (n_batches - max(0, math.ceil(self.learning_starts / batch) - 1)) * batch
        if self.updates_per_frame * frames < 1:
            raise ConfigError(
                f"{at}updates_per_frame is {self.updates_per_frame:g}, expected at least "
                f"{1 / frames:.2g}, one update in the {frames:,} frames that are learned from, or "
                f"nothing is learned; use {at}updates_per_frame={0.1 if frames >= 10 else 1}."
            )

    def check_store(self, num_envs: int | None, frames_per_batch: int, at: str) -> None:
        """Refuses a store that a batch overflows, or in which n steps never lie.

        Args:
            num_envs (int, optional): number of envs, if it is known yet.
            frames_per_batch (int): env steps of a batch.
            at (str): what stands before the names in messages.

        Raises:
            ConfigError: naming the settings and the fix.
        """
        if self.replay.capacity < frames_per_batch:
            raise ConfigError(
                f"{at}replay.capacity is {self.replay.capacity}, expected at least "
                f"frames_per_batch, {frames_per_batch}; use {at}replay.capacity={frames_per_batch}."
            )
        most = self.replay.capacity // (num_envs or 1)
        for name in ("window", "n_step") if self.remembers else ("n_step",):
            if getattr(self, name) > most:
                raise ConfigError(
                    f"{at}{name} is {getattr(self, name)}, expected at most {most}, the steps of "
                    f"each of {num_envs} environments in {at}replay.capacity, "
                    f"{self.replay.capacity}; use {at}{name}={min(5, most)}."
                )


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
        self._take_plain(actor=RecurrentNetworkConfig, critic=CriticConfig)

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
        self._take_plain(actor=QNetworkConfig, mixer=TeamMixerConfig)

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


@dataclass(frozen=True)
class AnyTeamMixerConfig(AnyMixerConfig):
    """A mixer of any kind, and whose values it mixes."""

    over: Annotated[str, OneOf(MIXED), ReadWhere("kind", "none", but=True)] = "group"
    """Whose values become one."""


@dataclass(frozen=True)
class ParallelQConfig(MixesValues, OnBatches, TrainedConfig):
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
        self._take_plain(actor=QNetworkConfig)

    @property
    def central(self) -> bool:
        """Whether a mixer sees more than one agent."""
        return self.mixes == "monotonic"

    @property
    def mixes(self) -> str:
        """The kind of its mixer, a word of :data:`~torchrl_marl.modules.mixers.MIXERS`."""
        return self.mixer.kind

    def check(self, at: str = "") -> None:
        """Refuses a mixer where each agent's own end counts, and what is no whole windows."""
        super().check(at)
        self.check_ends(at, "a mixer", "mixer.kind=none")
        check_unshare(self, at)
        if self.remembers:
            check_windows(self, at)
