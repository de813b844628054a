"""Settings of on-policy learners."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any

from torchrl_marl.errors import ConfigError
from torchrl_marl.modules.config import (
    CriticConfig,
    NetworkConfig,
    RecurrentCriticConfig,
    TeamNetworkConfig,
    carries,
    communicates,
    delays,
    has_memory,
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
    "NeedsMemory",
    "OnBatches",
    "OnPolicyConfig",
    "RandomConfig",
    "TrainedConfig",
    "check_batch",
    "check_minibatch",
    "check_run_windows",
    "check_shards",
    "check_window",
    "check_windows",
    "finds_clusters",
    "remembers",
    "without_memory",
]


def check_minibatch(size: int, run: Any, at: str) -> None:
    """Refuses minibatches larger than a batch.

    Args:
        size (int): env steps of a minibatch.
        run (TrainConfig): the run's settings.
        at (str): what stands before the name in messages.

    Raises:
        ConfigError: it is larger.
    """
    if size > run.frames_per_batch:
        raise ConfigError(
            f"{at}minibatch_size is {size}, expected at most "
            f"frames_per_batch, {run.frames_per_batch}; "
            f"use {at}minibatch_size={run.frames_per_batch}."
        )


def check_shards(section: Any, run: Any, at: str) -> None:
    """Refuses minibatches, or windows of them, of which shards cannot give equal parts.

    Args:
        section: settings of a learner that trains on whole batches.
        run (TrainConfig): the run's settings.
        at (str): what stands before the names in messages.

    Raises:
        ConfigError: naming the next good number.
    """
    if run.distributed.asynchronous:  # whose batches are made of whatever comes
        return
    part = (run.distributed.collectors or 1) * (section.window if section.remembers else 1)
    size = section.minibatch_size
    if size % part:
        fits = -(-size // part) * part
        fits = fits if fits <= run.frames_per_batch else size // part * part
        raise ConfigError(
            f"{at}minibatch_size is {size}, expected a multiple of {part}, so that each of the "
            f"{run.distributed.collectors} distributed.collectors gives as much"
            + (f"; use {at}minibatch_size={fits}." if fits else "; use fewer.")
        )


def remembers(section: Any) -> bool:
    """Returns whether the actor or the critic of a learner carries something from step to step."""
    critic = getattr(section, "critic", None)
    return carries(section.actor) or critic is not None and carries(critic)


def finds_clusters(config: LearnerConfig) -> bool:
    """Whether networks are shared by clusters of agents that have yet to be found."""
    networks = [getattr(config, part, None) for part in ("actor", "critic")]
    return any(
        own is not None and own.sharing == "clusters" and own.sharing_index is None
        for own in networks
    )


def without_memory(section: Any, at: str) -> str:
    """Returns the settings with which an actor that carries something would carry nothing."""
    found = {"memory=none": has_memory(section.actor)}
    found["communication.delay=0"] = delays(section.actor)
    return " and ".join(f"{at}actor.{setting}" for setting, carried in found.items() if carried)


class NeedsMemory(ReadWhere):
    """A setting that is read where the actor or the critic remembers.

    Args:
        critic (bool): critics may remember, too.
    """

    def __init__(self, *, critic: bool = True) -> None:
        super().__init__("actor.memory.kind", "none", but=True)
        self.critic = critic

    def holds(self, section: Any, value_of: Any = None) -> bool:
        """Whether one of the two remembers."""
        return remembers(section)

    def in_words(self, at: str) -> str:
        """Returns the condition as it stands in a sentence."""
        critic = f" or {at}critic.memory.kind" if self.critic else ""
        delay = f"{at}actor.communication.delay is above 0"
        return f"{at}actor.memory.kind{critic} is not none, or {delay}"


def check_windows(section: Any, at: str) -> None:
    """Refuses minibatches that are no whole windows, and windows without a step to learn from.

    Args:
        section: settings of a learner with memory.
        at (str): what stands before the names in messages.

    Raises:
        ConfigError: naming the setting and the fix.
    """
    check_window("minibatch_size", section.minibatch_size, section.window, at)
    if section.burn_in >= section.window:
        raise ConfigError(
            f"{at}burn_in is {section.burn_in}, expected less than {at}window, {section.window}, "
            f"so that there are steps to learn from; use {at}burn_in={section.window // 2}."
        )


def check_run_windows(section: Any, run: Any, at: str) -> None:
    """Refuses batches of a run that are no whole windows.

    Args:
        section: settings of a learner with memory that trains on whole batches.
        run (TrainConfig): the run's settings.
        at (str): what stands before the names in messages.
    """
    num_envs = run.env.num_envs
    check_batch(math.ceil(run.frames_per_batch / num_envs), num_envs, section.window, at)


def check_window(name: str, size: int, window: int, at: str) -> None:
    """Refuses numbers of steps that are no whole windows.

    Args:
        name (str): the setting.
        size (int): its steps.
        window (int): steps of a window.
        at (str): what stands before the names in messages.

    Raises:
        ConfigError: naming the next good number, and the largest window that fits, if any does.
    """
    if size % window:
        shorter = next((steps for steps in range(window, 1, -1) if size % steps == 0), None)
        raise ConfigError(
            f"{at}{name} is {size}, expected a multiple of {at}window, {window}; use "
            f"{at}{name}={math.ceil(size / window) * window}"
            f"{f', or {at}window={shorter}' if shorter else ''}."
        )


def check_batch(steps: int, num_envs: int, window: int, at: str) -> None:
    """Refuses batches whose steps of an env are no whole windows.

    Args:
        steps (int): number T of steps of a batch.
        num_envs (int): number E of envs.
        window (int): steps of a window.
        at (str): what stands before the names in messages.

    Raises:
        ConfigError: naming the next good number of frames.
    """
    if steps % window:
        good = math.ceil(steps / window) * window
        raise ConfigError(
            f"{at}window is {window}, which does not divide a batch: {steps} steps of {num_envs} "
            f"envs; use frames_per_batch={good * num_envs}."
        )


# What an algorithm is called whose critics see more than their own agent.
_CENTRAL = {"ippo": "mappo", "iddpg": "maddpg", "itd3": "matd3", "isac": "masac"}

LearningRate = Annotated[Positive, AlsoCalled("learning_rate", "learning_rates")]
Schedule = Annotated[
    str, OneOf({"constant": "stays as it is", "linear": "falls to 0 at the end of training"})
]
Bootstrap = Annotated[
    str, OneOf({"team": "the team's (shared reward)", "agent": "each agent's own"})
]
CentralInput = Annotated[
    str,
    OneOf(
        {
            "observations": "those of all agents of the group",
            "team": "those of all agents of all groups",
            "state": "the environment's state",
        }
    ),
]


@dataclass(frozen=True)
class LearnerConfig:
    """Settings of any learner: the algorithm, by which the other settings are chosen."""

    algorithm: str = ""
    """How agents learn."""

    def check(self, at: str = "") -> None:
        """Refuses settings that do not fit together.

        Args:
            at (str): what stands before the names in messages.

        Raises:
            ConfigError: naming them.
        """

    def check_run(self, run: Any, at: str, *, own_env: bool = False) -> None:
        """Refuses what does not fit the rest of a run.

        Args:
            run (TrainConfig): the run's settings.
            at (str): what stands before the names in messages.
            own_env (bool): the caller brings an environment, so ``run.env`` is not looked at.

        Raises:
            ConfigError: naming the setting, what was found, what was expected and the fix.
        """


@dataclass(frozen=True)
class RandomConfig(LearnerConfig):
    """Actions at random, nothing is learned."""

    algorithm: str = "random"
    """How agents learn."""


@dataclass(frozen=True)
class TrainedConfig(LearnerConfig):
    """Settings of every family that trains networks.

    A group whose algorithm is of another family than ``learner``'s takes these over from there,
    where they differ from their defaults.
    """

    central_input: CentralInput = "observations"
    """What a central critic or a mixer sees."""
    gamma: Share = 0.99
    """Discount."""
    bootstrap: Bootstrap = "team"
    """Whose ends stop the return."""
    adam_eps: Positive = 1e-5
    """Adam's epsilon."""
    max_grad_norm: Positive | None = 10.0
    """Largest norm of the gradient of each group's networks; null for none."""
    normalize_observations: bool = False
    """Running mean and variance of the observations, over living agents."""
    precision: Annotated[
        str,
        OneOf(
            {
                "float32": "as they are",
                "tf32": "matrix products of the learner in TF32, on a GPU that has it",
                "bf16": "forward and backward in bfloat16, in acting as well",
            }
        ),
    ] = "float32"
    """How precisely networks compute."""
    actor: NetworkConfig = field(default_factory=NetworkConfig)
    """The actor's network."""

    @property
    def central(self) -> bool:
        """Whether critics, or a mixer, see more than their own agent."""
        return self.algorithm in _CENTRAL.values()

    def check_run(self, run: Any, at: str, *, own_env: bool = False) -> None:
        """Refuses a critic or a mixer of a state that the environment does not give."""
        central = self.central and self.central_input == "state"
        if central and not own_env and run.env.is_stateless:
            raise ConfigError(
                f"{at}central_input is 'state', but env.state is null and {run.env.library} gives "
                "none; use env.state=observations."
            )

    def _take_plain(self, **kinds: type) -> None:
        """Makes parts of other kinds, such as a plain network, those that the settings have.

        Args:
            **kinds: name of a part -> its dataclass.
        """
        for name, kind in kinds.items():
            given = getattr(self, name)
            if not isinstance(given, kind):
                object.__setattr__(self, name, kind(**vars(given)))


class OnBatches:
    """What settings have in common of families that train on each batch while it is new."""

    minibatch_size: int

    @property
    def remembers(self) -> bool:
        """Whether the actor or the critic carries something from step to step."""
        return remembers(self)

    def check_run(self, run: Any, at: str, *, own_env: bool = False) -> None:
        """Refuses minibatches larger than a batch, a state that the environment does not give, and
        batches that are no whole windows."""
        check_minibatch(self.minibatch_size, run, at)
        if self.remembers and not own_env:
            check_run_windows(self, run, at)
        check_shards(self, run, at)
        super().check_run(run, at, own_env=own_env)  # type: ignore[misc]


@dataclass(frozen=True)
class ActorCriticConfig(TrainedConfig):
    """Settings of every family that trains actors beside critics."""

    critic: CriticConfig = field(default_factory=CriticConfig)
    """The critic's network."""

    def __post_init__(self) -> None:
        self._take_plain(critic=CriticConfig)

    def check(self, at: str = "") -> None:
        """Refuses critics that their input or their sharing makes impossible.

        Raises:
            ConfigError: naming the settings that do not fit together.
        """
        super().check(at)
        critic, sharing = self.critic, sharing_of(self.critic)
        central = _CENTRAL.get(self.algorithm, self.algorithm)
        of_agents = self.central and self.central_input != "state"
        shared = sharing in ("group", "full")
        if critic.architecture != "mlp" and not of_agents:
            raise ConfigError(
                f"{at}critic.architecture is {critic.architecture!r}, which reads the "
                f"agents' observations; use {at}algorithm={central} and "
                f"{at}central_input=observations, or {at}critic.architecture=mlp."
            )
        if critic.value_per == "team" and not (self.central and shared):
            raise ConfigError(
                f"{at}critic.value_per is 'team', which needs a central critic that no agent "
                f"has for itself; use {at}algorithm={central} and {at}critic.sharing=group, "
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
                f"{critic.architecture!r} is one network for all; "
                f"use {at}critic.sharing=group."
            )


@dataclass(frozen=True)
class EpsilonConfig:
    """How often agents act at random while values of actions are learned."""

    epsilon: Share = 1.0
    """Chance with which an agent acts at random, at the start."""
    epsilon_end: Share = 0.05
    """The same at the end of the schedule."""
    annealing: Share = 0.2
    """Share of the run in which it goes from the first value to the last, along a line."""

    def at(self, fraction: float) -> float:
        """Returns the chance at a fraction, 0 to 1, of the run.

        Examples:
            >>> EpsilonConfig(1.0, 0.5, annealing=0.2).at(0.1)
            0.75
        """
        share = min(1.0, fraction / self.annealing) if self.annealing else 1.0
        return self.epsilon + share * (self.epsilon_end - self.epsilon)


@dataclass(frozen=True)
class OnPolicyConfig(OnBatches, ActorCriticConfig):
    """MAPPO or IPPO: what is trained, on which advantages, with which steps."""

    algorithm: str = "mappo"
    """How agents learn."""
    central_input: Annotated[CentralInput, ReadWhere("algorithm", "mappo")] = "observations"
    """What a central critic sees."""
    actor: TeamNetworkConfig = field(default_factory=TeamNetworkConfig)
    """The actor's network."""
    critic: Annotated[
        RecurrentCriticConfig, ReadWhere("algorithm", "mappo", of=("architecture", "value_per"))
    ] = field(default_factory=RecurrentCriticConfig)
    """The critic's network."""
    window: Annotated[Count, NeedsMemory()] = 16
    """Steps that a network with memory is trained on in a row, from the state that it had there;
    the steps of a batch and of a minibatch are multiples of it."""
    burn_in: Annotated[int, Range(0), NeedsMemory()] = 0
    """Steps at the start of a window that only bring the state up to date, and are not learned
    from."""
    unshare_at: Annotated[Share | None, ReadWhere("algorithm", "mappo", "ippo")] = None
    """Share of the run, 0 to 1, after which every agent goes on with its own copy of the networks
    that it shared; null for never."""
    estimator: Annotated[
        str,
        OneOf(
            {
                "gae": "as if the policy that learns had acted (GAE)",
                "vtrace": "corrected by how much likelier it makes what an older one did (V-trace)",
            }
        ),
    ] = "gae"
    """How advantages and what the critic learns are estimated."""
    rho_clip: Annotated[Positive | None, ReadWhere("estimator", "vtrace")] = 1.0
    """Largest ratio of the policies in what the critic learns; null for no limit."""
    c_clip: Annotated[Positive | None, ReadWhere("estimator", "vtrace")] = 1.0
    """Largest ratio by which later steps count; null for no limit."""
    ratio: Annotated[
        str,
        OneOf({"agent": "an agent's own", "joint": "the product over its group's acting agents"}),
        ReadWhere("estimator", "vtrace"),
    ] = "agent"
    """Whose ratio corrects an agent's estimates."""
    lmbda: Share = 0.95
    """Weight of longer returns in the advantage."""
    lr: LearningRate = 5e-4
    """Learning rate of Adam."""
    lr_schedule: Schedule = "constant"
    """Course of the learning rate."""
    num_epochs: Count = 6
    """Passes over a batch."""
    minibatch_size: Count = 1200
    """Env steps of a minibatch; the agents of a step stay together."""
    clip_epsilon: Positive = 0.2
    """Clip range of the probability ratio."""
    clip_value: bool = False
    """Clip the change of the value, too."""
    critic_coeff: Weight = 1.0
    """Weight of the critic's loss."""
    loss_critic_type: Annotated[
        str,
        OneOf(
            {
                "huber": "a square up to huber_delta, a line beyond",
                "l2": "squared error",
                "smooth_l1": "a square up to 1, a line beyond",
            }
        ),
    ] = "huber"
    """Loss of the critic."""
    huber_delta: Annotated[Positive, ReadWhere("loss_critic_type", "huber")] = 10.0
    """Where ``huber`` turns from a square into a line."""
    entropy_coeff: Weight = 0.0
    """Weight of the entropy bonus."""
    entropy_schedule: Annotated[Schedule, ReadWhere("entropy_coeff", 0, but=True)] = "constant"
    """Course of the entropy bonus."""
    target_kl: Positive | None = None
    """Stop the epochs of a batch at this KL divergence from the old policy; null for never."""
    normalize_advantage: Annotated[
        str,
        OneOf(
            {
                "pooled": "over all living agents",
                "agent": "over each agent's own",
                "none": "not at all",
            }
        ),
    ] = "pooled"
    """Over whom advantages are standardized."""
    value_norm: bool = True
    """The critic works in normalized returns."""
    value_norm_decay: Annotated[float, Range(0, 1, below=True), ReadWhere("value_norm", True)] = (
        0.99
    )
    """Memory of the return statistics, per batch."""
    value_centering: Annotated[bool, ReadWhere("value_norm", True)] = False
    """Before each batch shift all values to the level that its returns leave as it is."""

    def __post_init__(self) -> None:
        self._take_plain(actor=TeamNetworkConfig, critic=RecurrentCriticConfig)

    def check(self, at: str = "") -> None:
        """Refuses what does not fit together.

        Raises:
            ConfigError: naming the settings that do not fit together.
        """
        super().check(at)
        if self.algorithm in ("mappo", "ippo"):
            check_unshare(self, at)
        if self.remembers:
            check_windows(self, at)


def check_unshare(section: Any, at: str) -> None:
    """Refuses to un-share networks with a channel, or of which each agent has its own.

    Args:
        section (TrainedConfig): with ``unshare_at``.
        at (str): what stands before the names in messages.

    Raises:
        ConfigError: agents communicate, or nothing is shared by networks that see one agent.
    """
    if section.unshare_at is None:
        return
    critic = getattr(section, "critic", None)
    for name in ("actor", "critic"):
        if communicates(getattr(section, name, section.actor)):
            raise ConfigError(
                f"{at}unshare_at is {section.unshare_at:g}, but agents communicate, and a channel "
                f"belongs to all; use {at}unshare_at=null, or {at}{name}.communication=none."
            )
    of_one_agent = critic is not None and (not section.central or getattr(section, "mixed", False))
    networks = [section.actor, *([critic] if of_one_agent else [])]
    if all(sharing_of(network) == "none" for network in networks):
        raise ConfigError(
            f"{at}unshare_at is {section.unshare_at:g}, but {at}actor.sharing is 'none', so that "
            f"there is nothing to un-share; use {at}actor.sharing=group, or {at}unshare_at=null."
        )
