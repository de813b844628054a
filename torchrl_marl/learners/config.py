"""Settings of on-policy learners."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from torchrl_marl.errors import ConfigError
from torchrl_marl.learners.memory_config import (
    NeedsMemory,
    check_run_windows,
    check_windows,
    remembers,
)
from torchrl_marl.modules.config import (
    CriticConfig,
    NetworkConfig,
    RecurrentCriticConfig,
    TeamNetworkConfig,
    communicates,
    sharing_of,
)
from torchrl_marl.settings import (
    AlsoCalled,
    Count,
    OneOf,
    Positive,
    Range,
    ReadWhere,
    Share,
    Weight,
)

__all__ = [
    "ActorCriticConfig",
    "Bootstrap",
    "CentralInput",
    "EpsilonConfig",
    "LearnerConfig",
    "OnBatches",
    "OnPolicyConfig",
    "RandomConfig",
    "TrainedConfig",
    "check_minibatch",
    "check_shards",
    "finds_clusters",
]


def check_minibatch(size: int, run: Any, at: str) -> None:
    """Refuses a minibatch larger than a batch.

    Args:
        size (int): env steps of a minibatch.
        run (TrainConfig): settings of the run.
        at (str): prefix of the setting's name in messages.

    Raises:
        ConfigError: the minibatch is larger than a batch.
    """
    if size > run.frames_per_batch:
        raise ConfigError(
            f"{at}minibatch_size is {size}, expected at most "
            f"frames_per_batch, {run.frames_per_batch}; "
            f"use {at}minibatch_size={run.frames_per_batch}."
        )


def check_shards(section: Any, run: Any, at: str) -> None:
    """Refuses minibatches that cannot be split equally among the shards.

    With memory, the windows of a minibatch must be divisible among the shards.

    Args:
        section: settings of a learner that trains on whole batches.
        run (TrainConfig): settings of the run.
        at (str): prefix of the settings' names in messages.

    Raises:
        ConfigError: minibatches cannot be split equally; the message names the next valid size.
    """
    if run.distributed.asynchronous:  # batches hold the fragments that arrive first
        return
    part = (run.distributed.collectors or 1) * (section.window if section.remembers else 1)
    size = section.minibatch_size
    if size % part:
        fits = -(-size // part) * part
        fits = fits if fits <= run.frames_per_batch else size // part * part
        raise ConfigError(
            f"{at}minibatch_size is {size}, expected a multiple of {part}, so that the "
            f"{run.distributed.collectors} distributed.collectors contribute equally"
            + (f"; use {at}minibatch_size={fits}." if fits else "; use fewer.")
        )


def finds_clusters(config: LearnerConfig) -> bool:
    """Returns whether networks are shared by clusters of agents that are not known yet."""
    networks = [getattr(config, part, None) for part in ("actor", "critic")]
    return any(
        own is not None and own.sharing == "clusters" and own.sharing_index is None
        for own in networks
    )


# The centralized form of each independent algorithm.
_CENTRAL = {"ippo": "mappo", "iddpg": "maddpg", "itd3": "matd3", "isac": "masac"}

LearningRate = Annotated[Positive, AlsoCalled("learning_rate", "learning_rates")]
Schedule = Annotated[
    str,
    OneOf({"constant": "stays the same", "linear": "falls linearly to 0 at the end of training"}),
]
RateSchedule = Annotated[
    str,
    OneOf(
        {
            "constant": "stays the same",
            "linear": "falls linearly to 0 at the end of training",
            "kl": "falls if the policy moves too far in an epoch, and rises if it moves too little",
        }
    ),
]
Bootstrap = Annotated[
    str,
    OneOf({"team": "the team's done flag, for a shared reward", "agent": "each agent's done flag"}),
]
CentralInput = Annotated[
    str,
    OneOf(
        {
            "observations": "observations of all agents of the group",
            "team": "observations of all agents of all groups",
            "state": "the environment's state (see env.state), else the agents' own states",
            "agent_state": "each agent's own state, a privileged input of its critic",
        }
    ),
]


@dataclass(frozen=True)
class LearnerConfig:
    """Settings of any learner: the name of the algorithm, which determines the other settings."""

    algorithm: str = ""
    """Learning algorithm of the agents."""

    def check(self, at: str = "") -> None:
        """Refuses settings that contradict each other.

        Args:
            at (str): prefix of the settings' names in messages.

        Raises:
            ConfigError: contradictory settings; the message names them.
        """

    def check_run(self, run: Any, at: str, *, own_env: bool = False) -> None:
        """Refuses settings that contradict the rest of a run.

        Args:
            run (TrainConfig): settings of the run.
            at (str): prefix of the settings' names in messages.
            own_env (bool): whether the caller passes an environment; ``run.env`` is then ignored.

        Raises:
            ConfigError: contradictory settings; the message names the setting, its value, the
                expected value and the fix.
        """

    def n_updates(self, frames: int) -> int:
        """Returns the number of gradient steps for some frames of a run."""
        return 0


@dataclass(frozen=True)
class RandomConfig(LearnerConfig):
    """Random actions without learning."""

    algorithm: str = "random"
    """Learning algorithm of the agents."""


@dataclass(frozen=True)
class TrainedConfig(LearnerConfig):
    """Settings of every family that trains networks.

    A group may have an algorithm of another family than ``learner.algorithm``. It then inherits
    from ``learner`` only those of the settings below that differ from their defaults.
    """

    central_input: CentralInput = "observations"
    """Input of a central critic or a mixer."""
    gamma: Share = 0.99
    """Discount factor."""
    bootstrap: Bootstrap = "team"
    """Done flag that cuts the return: the team's or each agent's."""
    adam_eps: Positive = 1e-5
    """Adam's epsilon."""
    max_grad_norm: Positive | None = 10.0
    """Maximum gradient norm of each group's networks; null: no clipping."""
    normalize_observations: bool = False
    """Normalize observations by their running mean and variance over living agents."""
    precision: Annotated[
        str,
        OneOf(
            {
                "float32": "full precision",
                "tf32": "the learner's matrix products in TF32, on a GPU that supports it",
                "bf16": "forward and backward passes in bfloat16, in training and acting",
            }
        ),
    ] = "float32"
    """Numeric precision of the networks."""
    actor: NetworkConfig = field(default_factory=NetworkConfig)
    """The actor's network."""

    @property
    def central(self) -> bool:
        """True if a critic reads more than its agent's observation, or a mixer reads any input."""
        return self.algorithm in _CENTRAL.values()

    def check_run(self, run: Any, at: str, *, own_env: bool = False) -> None:
        """Refuses a critic or mixer that reads the state, if the environment has no state."""
        central = self.central and self.central_input == "state"
        if central and not own_env and run.env.is_stateless:
            raise ConfigError(
                f"{at}central_input is 'state', but env.state is null and {run.env.library} gives "
                "no state; use env.state=observations."
            )

    def _take_plain(self, **kinds: type) -> None:
        """Converts parts of the settings that have another class to the expected class.

        Args:
            **kinds: name of a part -> its expected dataclass.
        """
        for name, kind in kinds.items():
            given = getattr(self, name)
            if not isinstance(given, kind):
                object.__setattr__(self, name, kind(**vars(given)))


class OnBatches:
    """Mixin for the settings of families that train on each batch once, when it arrives."""

    num_epochs: int
    minibatch_size: int

    def n_updates(self, frames: int) -> int:
        """Returns the number of minibatches for some frames of a run."""
        return self.num_epochs * frames // self.minibatch_size

    @property
    def remembers(self) -> bool:
        """True if the actor or the critic carries state from step to step."""
        return remembers(self)

    def check_run(self, run: Any, at: str, *, own_env: bool = False) -> None:
        """Refuses minibatches larger than a batch, a state that the environment does not have, and
        batches that do not hold whole windows."""
        check_minibatch(self.minibatch_size, run, at)
        if self.remembers and not own_env:
            check_run_windows(self, run, at)
        check_shards(self, run, at)
        super().check_run(run, at, own_env=own_env)  # type: ignore[misc]


@dataclass(frozen=True)
class ActorCriticConfig(TrainedConfig):
    """Settings of every family that trains actors and critics."""

    critic: CriticConfig = field(default_factory=CriticConfig)
    """The critic's network."""

    def __post_init__(self) -> None:
        self._take_plain(critic=CriticConfig)

    def check(self, at: str = "") -> None:
        """Refuses settings of critics that contradict the critics' input or parameter sharing.

        Raises:
            ConfigError: contradictory settings; the message names them.
        """
        super().check(at)
        critic, sharing = self.critic, sharing_of(self.critic)
        central = _CENTRAL.get(self.algorithm, self.algorithm)
        of_agents = self.central and self.central_input in ("observations", "team")
        shared = sharing in ("group", "full")
        if critic.architecture != "mlp" and not of_agents:
            raise ConfigError(
                f"{at}critic.architecture is {critic.architecture!r}, which reads the "
                f"agents' observations; use {at}algorithm={central} and "
                f"{at}central_input=observations, or {at}critic.architecture=mlp."
            )
        if critic.value_per == "team" and self.central_input == "agent_state":
            raise ConfigError(
                f"{at}critic.value_per is 'team', but {at}central_input is 'agent_state', by which "
                f"a critic sees one agent; use {at}critic.value_per=agent."
            )
        if critic.value_per == "team" and not (self.central and shared):
            raise ConfigError(
                f"{at}critic.value_per is 'team', which needs a central critic shared by all "
                f"agents; use {at}algorithm={central} and {at}critic.sharing=group, "
                f"or {at}critic.value_per=agent."
            )
        if critic.architecture != "mlp" and communicates(critic):
            raise ConfigError(
                f"{at}critic.communication.kind is {critic.communication.kind!r}, but a critic of "
                f"architecture {critic.architecture!r} is one network over all agents; use "
                f"{at}critic.communication=none, or {at}critic.architecture=mlp."
            )
        if critic.architecture != "mlp" and not shared:
            raise ConfigError(
                f"{at}critic.sharing is {sharing!r}, but a critic of architecture "
                f"{critic.architecture!r} is one network for all agents; "
                f"use {at}critic.sharing=group."
            )


@dataclass(frozen=True)
class EpsilonConfig:
    """Epsilon-greedy exploration with a linear schedule."""

    epsilon: Share = 1.0
    """Probability of a random action at the start."""
    epsilon_end: Share = 0.05
    """Probability of a random action at the end of the schedule."""
    annealing: Share = 0.2
    """Fraction of the run over which epsilon changes linearly to its final value."""

    def at(self, fraction: float) -> float:
        """Returns the probability of a random action at a fraction, 0 to 1, of the run.

        Examples:
            >>> EpsilonConfig(1.0, 0.5, annealing=0.2).at(0.1)
            0.75
        """
        share = min(1.0, fraction / self.annealing) if self.annealing else 1.0
        return self.epsilon + share * (self.epsilon_end - self.epsilon)


@dataclass(frozen=True)
class OnPolicyConfig(OnBatches, ActorCriticConfig):
    """Settings of MAPPO and IPPO: networks, advantages, losses and updates."""

    algorithm: str = "mappo"
    """Learning algorithm of the agents."""
    central_input: Annotated[
        CentralInput, ReadWhere("algorithm", "mappo", always=("agent_state",))
    ] = "observations"
    """Input of a central critic; with ``agent_state``, of every critic."""
    actor: TeamNetworkConfig = field(default_factory=TeamNetworkConfig)
    """The actor's network."""
    critic: Annotated[
        RecurrentCriticConfig, ReadWhere("algorithm", "mappo", of=("architecture", "value_per"))
    ] = field(default_factory=RecurrentCriticConfig)
    """The critic's network."""
    window: Annotated[Count, NeedsMemory()] = 16
    """Steps per training window of a network with memory. The steps of an env in a batch, and
    ``minibatch_size``, must be multiples of the window."""
    burn_in: Annotated[int, Range(0), NeedsMemory()] = 0
    """Steps at the start of a window that only refresh the hidden state, without a loss."""
    unshare_at: Annotated[Share | None, ReadWhere("algorithm", "mappo", "ippo")] = None
    """Fraction of the run after which each agent trains its own copy of shared networks; null:
    never."""
    estimator: Annotated[
        str,
        OneOf(
            {
                "gae": "generalized advantage estimation, which assumes on-policy data",
                "vtrace": "V-trace, which corrects for the policy that collected the data",
            }
        ),
    ] = "gae"
    """Estimator of advantages and value targets."""
    rho_clip: Annotated[Positive | None, ReadWhere("estimator", "vtrace")] = 1.0
    """V-trace's limit rho of the importance ratio in the value target; null: no limit."""
    c_clip: Annotated[Positive | None, ReadWhere("estimator", "vtrace")] = 1.0
    """V-trace's limit c of the importance ratio that weights later steps; null: no limit."""
    ratio: Annotated[
        str,
        OneOf({"agent": "the agent's ratio", "joint": "product over the group's acting agents"}),
        ReadWhere("estimator", "vtrace"),
    ] = "agent"
    """Importance ratio that corrects an agent's estimates."""
    lmbda: Share = 0.95
    """Lambda of GAE and V-trace: weight of longer returns in the advantage."""
    lr: LearningRate = 5e-4
    """Learning rate of Adam."""
    lr_schedule: RateSchedule = "constant"
    """Schedule of the learning rate."""
    lr_kl: Annotated[Positive, ReadWhere("lr_schedule", "kl")] = 0.008
    """Target KL divergence: above twice this value the learning rate falls, below half it rises."""
    lr_min: Annotated[Positive, ReadWhere("lr_schedule", "kl")] = 1e-6
    """Lowest learning rate."""
    lr_max: Annotated[Positive, ReadWhere("lr_schedule", "kl")] = 1e-2
    """Highest learning rate."""
    num_epochs: Count = 6
    """Number of passes over each batch."""
    minibatch_size: Count = 1200
    """Frames per minibatch. All agents of a frame are in the same minibatch."""
    clip_epsilon: Positive = 0.2
    """Clip range of the importance ratio in PPO's loss."""
    clip_value: bool = False
    """Also clip the change of the value, by ``clip_epsilon``."""
    critic_coeff: Weight = 1.0
    """Weight of the critic's loss."""
    loss_critic_type: Annotated[
        str,
        OneOf(
            {
                "huber": "quadratic up to an error of huber_delta, then linear",
                "l2": "squared error",
                "smooth_l1": "quadratic up to an error of 1, then linear",
            }
        ),
    ] = "huber"
    """Loss of the critic."""
    huber_delta: Annotated[Positive, ReadWhere("loss_critic_type", "huber")] = 10.0
    """Error at which the Huber loss changes from quadratic to linear."""
    entropy_coeff: Weight = 0.0
    """Weight of the entropy bonus."""
    entropy_schedule: Annotated[Schedule, ReadWhere("entropy_coeff", 0, but=True)] = "constant"
    """Schedule of the entropy bonus."""
    target_kl: Positive | None = None
    """KL divergence from the old policy that ends the training on a batch early; null: never."""
    normalize_advantage: Annotated[
        str,
        OneOf(
            {
                "pooled": "over all living agents together",
                "agent": "for each agent separately",
                "none": "no standardization",
            }
        ),
    ] = "pooled"
    """Standardization of the advantages."""
    value_norm: bool = True
    """Train the critic on returns normalized by their running statistics."""
    value_norm_decay: Annotated[float, Range(0, 1, below=True), ReadWhere("value_norm", True)] = (
        0.99
    )
    """EMA decay of the return statistics, per batch."""
    value_centering: Annotated[bool, ReadWhere("value_norm", True)] = False
    """Shift all values by a constant before each update, so that they agree with the targets on
    average."""

    def __post_init__(self) -> None:
        self._take_plain(actor=TeamNetworkConfig, critic=RecurrentCriticConfig)

    def check(self, at: str = "") -> None:
        """Refuses settings that contradict each other.

        Raises:
            ConfigError: contradictory settings; the message names them.
        """
        super().check(at)
        if self.algorithm in ("mappo", "ippo"):
            check_unshare(self, at)
        if self.remembers:
            check_windows(self, at)
        if self.lr_schedule == "kl" and not self.lr_min <= self.lr <= self.lr_max:
            bound = "lr_min" if self.lr < self.lr_min else "lr_max"
            raise ConfigError(
                f"{at}lr is {self.lr:g}, expected a value from {at}lr_min, {self.lr_min:g}, to "
                f"{at}lr_max, {self.lr_max:g}, with {at}lr_schedule=kl; "
                f"use {at}{bound}={self.lr:g}."
            )


def check_unshare(section: Any, at: str) -> None:
    """Refuses to un-share networks with a communication channel, or networks that are not shared.

    Args:
        section (TrainedConfig): settings with ``unshare_at``.
        at (str): prefix of the settings' names in messages.

    Raises:
        ConfigError: agents communicate, or no network of single agents is shared.
    """
    if section.unshare_at is None:
        return
    critic = getattr(section, "critic", None)
    for name in ("actor", "critic"):
        if communicates(getattr(section, name, section.actor)):
            raise ConfigError(
                f"{at}unshare_at is {section.unshare_at:g}, but agents communicate, and all share "
                f"the channel; use {at}unshare_at=null, or {at}{name}.communication=none."
            )
    of_one_agent = critic is not None and (not section.central or getattr(section, "mixed", False))
    networks = [section.actor, *([critic] if of_one_agent else [])]
    if all(sharing_of(network) == "none" for network in networks):
        raise ConfigError(
            f"{at}unshare_at is {section.unshare_at:g}, but {at}actor.sharing is 'none', which "
            f"leaves nothing to un-share; use {at}actor.sharing=group, or {at}unshare_at=null."
        )
