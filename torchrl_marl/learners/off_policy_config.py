"""Settings of learners with a replay buffer, and of learners of action values."""

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
    OnBatches,
    Schedule,
    TrainedConfig,
    check_unshare,
)
from torchrl_marl.learners.memory_config import (
    NeedsMemory,
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
    "ActorGradientSetting",
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
    """Settings of the replay buffer.

    Examples:
        >>> ReplayLearnerConfig(replay=ReplayConfig(capacity=50_000, alpha=0.6)).replay.beta
        0.4
    """

    capacity: Count = 200_000
    """Capacity in frames, each with all agents; new frames overwrite the oldest."""
    alpha: Share = 0.0
    """Priority exponent of prioritized replay; 0 samples uniformly."""
    beta: Annotated[Share, ReadWhere("alpha", 0, but=True)] = 0.4
    """Importance-sampling exponent of prioritized replay; 1 corrects the sampling bias in full."""
    beta_end: Annotated[Share | None, ReadWhere("alpha", 0, but=True)] = None
    """Final value of beta, usually 1; beta changes to it linearly. Null: beta is constant."""


@dataclass(frozen=True)
class ReplayLearnerConfig(TrainedConfig):
    """Settings of every family that learns from a replay buffer."""

    adam_eps: Positive = 1e-8
    """Adam's epsilon."""
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    """The replay buffer."""
    unshare_at: Share | None = None
    """Fraction of the run after which each agent trains its own copy of shared networks; null:
    never."""
    learning_starts: Annotated[int, Range(0)] = 10_000
    """Frames with random actions before the first update."""
    updates_per_frame: Annotated[float, Range(0, 1_000, above=True)] = 0.1
    """Updates per frame once learning has started. Learning starts after the batch that
    reaches ``learning_starts``. All frames of this batch count."""
    minibatch_size: Count = 256
    """Frames per update, sampled from the replay buffer. All agents of a frame are in the same
    minibatch."""
    window: Annotated[Count, NeedsMemory(critic=False)] = 16
    """Steps per training window of a network with memory. ``minibatch_size`` must be a multiple of
    the window."""
    burn_in: Annotated[int, Range(0), NeedsMemory(critic=False)] = 0
    """Steps at the start of a window that only refresh the hidden state, without a loss."""
    n_step: Count = 1
    """Number of rewards in a target before it bootstraps."""
    tau: Annotated[float, Range(0, 1, above=True)] = 0.005
    """Soft-update rate of the target networks. They follow after each update; with a policy delay
    (``actor_interval``), after each update of the actors."""

    @property
    def noisy(self) -> bool:
        """True if exploration adds noise to continuous actions."""
        return False

    @property
    def remembers(self) -> bool:
        """True if the actor carries state from step to step."""
        return remembers(self)

    def check(self, at: str = "") -> None:
        """Refuses a replay buffer smaller than a minibatch, and unsupported memory."""
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
        """Refuses settings that networks with memory do not support."""
        check_windows(self, at)
        plain = {"n_step": (self.n_step, 1), "replay.alpha": (self.replay.alpha, 0)}
        for name, (found, needed) in plain.items():
            if found != needed:
                raise ConfigError(
                    f"{at}{name} is {found:g}, but networks with memory sample their windows "
                    f"uniformly and learn from one-step targets; use {at}{name}={needed}, or "
                    f"{without_memory(self, at)}."
                )

    def check_run(self, run: Any, at: str, *, own_env: bool = False) -> None:
        """Refuses a run without any update, and a replay buffer that is too small."""
        if self.learning_starts >= run.total_frames:
            raise ConfigError(
                f"{at}learning_starts is {self.learning_starts}, expected less than total_frames, "
                f"{run.total_frames}, or nothing is learned; use {at}learning_starts="
                f"{run.total_frames // 10}."
            )
        self._check_updates(run, at)
        self.check_store(None if own_env else run.env.num_envs, run.frames_per_batch, at)
        super().check_run(run, at, own_env=own_env)

    def n_updates(self, frames: int) -> int:
        """Returns the number of gradient steps for some frames after ``learning_starts``."""
        return int(self.updates_per_frame * frames)

    def _check_updates(self, run: Any, at: str) -> None:
        """Refuses settings with which the run ends before its first update."""
        batch = run.frames_per_batch
        n_batches = math.ceil(run.total_frames / batch)
        frames = (n_batches - max(0, math.ceil(self.learning_starts / batch) - 1)) * batch
        if self.updates_per_frame * frames < 1:
            raise ConfigError(
                f"{at}updates_per_frame is {self.updates_per_frame:g}, expected at least "
                f"{1 / frames:.2g}, one update in the {frames:,} frames after "
                f"{at}learning_starts, or nothing is learned; use "
                f"{at}updates_per_frame={0.1 if frames >= 10 else 1}."
            )

    def check_store(self, num_envs: int | None, frames_per_batch: int, at: str) -> None:
        """Refuses a replay buffer that is too small for a batch, a window or an n-step return.

        Args:
            num_envs (int, optional): number of envs, if known.
            frames_per_batch (int): env steps of a batch.
            at (str): prefix of the settings' names in messages.

        Raises:
            ConfigError: a buffer that is too small; the message names the settings and the fix.
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


ActorGradientSetting = Annotated[
    str,
    OneOf(
        {
            "bootstrap": "team or agent, as set in learner.bootstrap",
            "team": "the mean of the values of all agents of the group",
            "agent": "only the value of this agent",
        }
    ),
]
_TD3 = ("itd3", "matd3", "hatd3", "td3_bc")
_SAC = ("isac", "masac", "hasac")
_CENTRAL = ("maddpg", "matd3", "masac", "haddpg", "hatd3", "hasac", "td3_bc", "iql_offline")


@dataclass(frozen=True)
class ExplorationConfig:
    """Exploration: random actions, and Gaussian noise on continuous ones.

    Examples:
        >>> noise = ExplorationConfig(sigma=0.3, sigma_end=0.1, annealing=0.5)
        >>> OffPolicyConfig(exploration=noise).exploration.sigma_end
        0.1
    """

    sigma: Weight = 0.2
    """Standard deviation of the noise on continuous actions at the start, relative to half their
    range."""
    sigma_end: Weight = 0.05
    """Standard deviation of the noise at the end of the schedule."""
    epsilon: Share = 0.0
    """Probability of a random action at the start."""
    epsilon_end: Share = 0.0
    """Probability of a random action at the end of the schedule."""
    annealing: Share = 1.0
    """Fraction of the run over which sigma and epsilon change linearly to their final values."""


@dataclass(frozen=True)
class OffPolicyConfig(ReplayLearnerConfig, ActorCriticConfig):
    """Settings of MADDPG, MATD3, MASAC and their independent forms.

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
    """Learning algorithm of the agents."""
    central_input: Annotated[
        CentralInput, ReadWhere("algorithm", *_CENTRAL, always=("agent_state",))
    ] = "observations"
    """Input of a central critic, in addition to the actions; with ``agent_state``, of every
    critic."""
    actor: RecurrentNetworkConfig = field(default_factory=RecurrentNetworkConfig)
    """The actor's network."""
    critic: Annotated[
        CriticConfig,
        ReadWhere("algorithm", *_CENTRAL, of=("architecture", "value_per")),
    ] = field(default_factory=CriticConfig)
    """The critic's network."""
    mixer: Annotated[
        AnyMixerConfig,
        ReadWhere("algorithm", "maddpg", "matd3", of=("kind", "hidden", "init_scale")),
    ] = field(default_factory=AnyMixerConfig)
    """Mixer of a group's per-agent critics into one value (FACMAC)."""
    actor_lr: LearningRate = 3e-4
    """Learning rate of the actor's Adam."""
    critic_lr: LearningRate = 1e-3
    """Learning rate of the critics' Adam."""
    exploration: Annotated[
        ExplorationConfig, ReadWhere("algorithm", *_SAC, but=True, of=("sigma", "sigma_end"))
    ] = field(default_factory=ExplorationConfig)
    """Exploration while collecting."""
    actor_gradient: ActorGradientSetting = "bootstrap"
    """Value that an agent's actor maximizes."""
    saturation_coeff: Annotated[Weight, ReadWhere("algorithm", *_SAC, but=True)] = 1e-3
    """Weight of the penalty on the actor's squared outputs: values before the tanh, or logits."""
    actor_interval: Annotated[Count, ReadWhere("algorithm", *_TD3)] = 2
    """Number of critic updates per update of the actor and the target networks (policy delay)."""
    target_noise: Annotated[Weight, ReadWhere("algorithm", *_TD3)] = 0.2
    """Standard deviation of the noise on target actions, relative to half their range."""
    target_noise_clip: Annotated[Weight, ReadWhere("algorithm", *_TD3)] = 0.5
    """Bound of the noise on target actions, relative to half their range."""

    alpha_lr: Annotated[Positive, ReadWhere("algorithm", *_SAC)] = 3e-3
    """Learning rate of the temperature's Adam."""
    alpha_init: Annotated[Positive, ReadWhere("algorithm", *_SAC)] = 1.0
    """Initial temperature, which is the weight of the policy's entropy."""
    target_entropy: Annotated[float | None, Range(), ReadWhere("algorithm", *_SAC)] = None
    """Target entropy of the policy. Continuous actions: per action dim, with actions scaled to
    [-1, 1]; null: -1. Discrete actions: as a fraction of the uniform policy's entropy; null:
    0.5."""

    def __post_init__(self) -> None:
        self._take_plain(actor=RecurrentNetworkConfig, critic=CriticConfig)

    @property
    def mixed(self) -> bool:
        """True if a mixer combines the values of per-agent critics (FACMAC)."""
        return self.algorithm in ("maddpg", "matd3") and self.mixer.kind != "none"

    @property
    def twin(self) -> bool:
        """True if targets use the smaller value of two critics (TD3, SAC)."""
        return self.delayed or self.soft

    @property
    def delayed(self) -> bool:
        """True if policy updates are delayed and target actions are noisy (TD3)."""
        return self.algorithm in _TD3

    @property
    def noisy(self) -> bool:
        """True if exploration adds noise to continuous actions."""
        return not self.soft

    @property
    def soft(self) -> bool:
        """True if the policy is stochastic with an entropy bonus and no target network (SAC)."""
        return self.algorithm in _SAC

    @property
    def joint_entropy(self) -> bool:
        """True if values contain the entropy bonus of all agents of the group."""
        return False

    def check(self, at: str = "") -> None:
        """Refuses critics and mixers that contradict the other settings."""
        super().check(at)
        self._check_mixer(at)

    def _check_mixer(self, at: str) -> None:
        """Refuses a mixer together with per-agent ends, per-agent values or a central critic."""
        expected = {
            "bootstrap": (self.bootstrap, "team"),
            "central_input": (self.central_input, "observations", "state", "agent_state"),
            "actor_gradient": (self.actor_gradient, "bootstrap", "team"),
            "critic.architecture": (self.critic.architecture, "mlp"),
            "critic.value_per": (self.critic.value_per, "agent"),
        }
        for name, (found, *fitting) in expected.items() if self.mixed else ():
            if found not in fitting:
                raise ConfigError(
                    f"{at}{name} is {found!r}, but {at}mixer.kind is {self.mixer.kind!r}, which "
                    "mixes a group's per-agent critics into one value; use "
                    f"{at}{name}={fitting[0]}, or {at}mixer.kind=none."
                )


MIXED = {
    "group": "the agents of each group",
    "team": "the agents of all groups that have equal settings and a common reward",
}
_MIXERS = {"iql": "none", "vdn": "sum", "qmix": "monotonic"}


@dataclass(frozen=True)
class TeamMixerConfig(MixerConfig):
    """Settings of a mixer, and of the set of agents for which it mixes values."""

    over: Annotated[str, OneOf(MIXED)] = "group"
    """Agents mixed into one Q_tot: one group or the whole team."""


class MixesValues:
    """Mixin for the settings of families that may mix agents' values."""

    bootstrap: str
    mixer: Any

    @property
    def mixes(self) -> str:
        """Kind of the mixer, a name of :data:`~torchrl_marl.modules.config.MIXERS`."""
        raise NotImplementedError

    @property
    def mixes_team(self) -> bool:
        """True if the values of all groups are mixed into one."""
        return self.mixes != "none" and self.mixer.over == "team"

    def check_ends(self, at: str, subject: str, instead: str) -> None:
        """Refuses a mixer if the returns of agents end separately.

        Args:
            at (str): prefix of the settings' names in messages.
            subject (str): subject of the sentence: the algorithm or the mixer.
            instead (str): the family's setting without a mixer, to suggest in the message.

        Raises:
            ConfigError: returns end separately; the message names ``bootstrap`` and two fixes: its
                other value, or no mixer.
        """
        if self.bootstrap == "agent" and self.mixes != "none":
            raise ConfigError(
                f"{at}bootstrap is 'agent', but {subject} has one value for all agents, "
                f"expected 'team'; use {at}bootstrap=team, or {at}{instead}."
            )


@dataclass(frozen=True)
class ValueConfig(MixesValues, ReplayLearnerConfig):
    """Settings of IQL, VDN and QMIX: Q-learning of discrete actions with a replay buffer."""

    algorithm: str = "qmix"
    """Learning algorithm of the agents."""
    central_input: Annotated[CentralInput, ReadWhere("algorithm", "qmix")] = "observations"
    """Input of the mixer."""
    bootstrap: Annotated[Bootstrap, ReadWhere("algorithm", "iql")] = "team"
    """Done flag that cuts the return: the team's or each agent's."""
    actor: QNetworkConfig = field(default_factory=QNetworkConfig)
    """The Q-network, from which agents act."""
    lr: LearningRate = 5e-4
    """Learning rate of Adam."""
    mixer: Annotated[
        TeamMixerConfig,
        ReadWhere("algorithm", "qmix", of=("hidden", "init_scale")),
        ReadWhere("algorithm", "qmix", "vdn", of=("over",)),
    ] = field(default_factory=TeamMixerConfig)
    """Mixer of the agents' values into one."""
    exploration: EpsilonConfig = field(default_factory=EpsilonConfig)
    """Exploration while collecting."""
    double_q: bool = True
    """Double Q-learning: the online network selects the action, the target network evaluates it."""
    negative_weight: Positive = 1.0
    """Loss weight of values above their target. Below 1, values are optimistic: low targets,
    perhaps caused by unskilled teammates, count less."""

    def __post_init__(self) -> None:
        self._take_plain(actor=QNetworkConfig, mixer=TeamMixerConfig)

    @property
    def central(self) -> bool:
        """True if the mixer reads an input besides the agents' values."""
        return self.algorithm == "qmix"

    @property
    def mixes(self) -> str:
        """Kind of the mixer, a name of :data:`~torchrl_marl.modules.config.MIXERS`."""
        return _MIXERS[self.algorithm]

    def check(self, at: str = "") -> None:
        """Refuses a mixer if each agent's return ends separately, and a too small replay buffer."""
        super().check(at)
        self.check_ends(at, self.algorithm, "algorithm=iql")


@dataclass(frozen=True)
class AnyTeamMixerConfig(AnyMixerConfig):
    """Settings of a mixer of any kind, and of the set of agents for which it mixes values."""

    over: Annotated[str, OneOf(MIXED), ReadWhere("kind", "none", but=True)] = "group"
    """Agents mixed into one Q_tot: one group or the whole team."""


@dataclass(frozen=True)
class ParallelQConfig(MixesValues, OnBatches, TrainedConfig):
    """Settings of PQN: Q-learning of discrete actions from each batch, without replay."""

    algorithm: str = "pqn"
    """Learning algorithm of the agents."""
    central_input: Annotated[CentralInput, ReadWhere("mixer.kind", "monotonic")] = "observations"
    """Input of the mixer."""
    bootstrap: Annotated[Bootstrap, ReadWhere("mixer.kind", "none")] = "team"
    """Done flag that cuts the return: the team's or each agent's."""
    actor: QNetworkConfig = field(
        default_factory=lambda: QNetworkConfig(activation="relu", layer_norm=True)
    )
    """The Q-network, from which agents act."""
    mixer: AnyTeamMixerConfig = field(default_factory=lambda: AnyTeamMixerConfig("sum"))
    """Mixer of the agents' values into one."""
    max_grad_norm: Positive | None = 1.0
    """Maximum gradient norm of each group's networks; null: no clipping."""
    unshare_at: Share | None = None
    """Fraction of the run after which each agent trains its own copy of shared networks; null:
    never."""
    lmbda: Share = 0.65
    """Lambda of the Q(lambda) target: weight of longer returns."""
    lr: LearningRate = 5e-4
    """Learning rate of Adam."""
    lr_schedule: Schedule = "linear"
    """Schedule of the learning rate."""
    num_epochs: Count = 4
    """Number of passes over each batch."""
    minibatch_size: Count = 400
    """Frames per minibatch. All agents of a frame are in the same minibatch."""
    window: Annotated[Count, NeedsMemory(critic=False)] = 16
    """Steps per training window of a network with memory. The steps of an env in a batch, and
    ``minibatch_size``, must be multiples of the window."""
    burn_in: Annotated[int, Range(0), NeedsMemory(critic=False)] = 0
    """Steps at the start of a window that only refresh the hidden state, without a loss."""
    exploration: EpsilonConfig = field(
        default_factory=lambda: EpsilonConfig(epsilon_end=0.1, annealing=0.1)
    )
    """Exploration while collecting."""

    def __post_init__(self) -> None:
        self._take_plain(actor=QNetworkConfig)

    @property
    def central(self) -> bool:
        """True if the mixer reads an input besides the agents' values."""
        return self.mixes == "monotonic"

    @property
    def mixes(self) -> str:
        """Kind of the mixer, a name of :data:`~torchrl_marl.modules.mixers.MIXERS`."""
        return self.mixer.kind

    def check(self, at: str = "") -> None:
        """Refuses a mixer if each agent's return ends separately, and incomplete windows."""
        super().check(at)
        self.check_ends(at, "a mixer", "mixer.kind=none")
        check_unshare(self, at)
        if self.remembers:
            check_windows(self, at)
