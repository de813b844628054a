"""Settings of networks: bodies, sharing, memory, communication."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from torchrl_marl.errors import ConfigError, nearest, quoted
from torchrl_marl.modules.registry import BODIES, SHARINGS
from torchrl_marl.settings import AlsoCalled, Count, Each, OneOf, Positive, Range, ReadWhere, Seed

__all__ = [
    "ACTIVATIONS",
    "AGENT_IDS",
    "ARCHITECTURES",
    "CHANNELS",
    "COMMUNICATIONS",
    "MEMORIES",
    "MIXERS",
    "SHARINGS",
    "AnyMixerConfig",
    "CommunicationConfig",
    "CriticCommunicationConfig",
    "CriticConfig",
    "DrawnCommunicationConfig",
    "MemoryConfig",
    "MixerConfig",
    "NetworkConfig",
    "QNetworkConfig",
    "RecurrentCriticConfig",
    "RecurrentNetworkConfig",
    "TeamNetworkConfig",
    "carries",
    "communicates",
    "delays",
    "draws",
    "gives_links",
    "has_memory",
    "sharing_of",
]

COMMUNICATIONS = {
    "none": "no communication",
    "commnet": "mean of the other agents' messages (CommNet)",
    "tarmac": "attention over the other agents' messages (TarMAC)",
    "graph": "attention as in tarmac, which also reads relative positions",
    "bicnet": "bidirectional recurrent network over the sequence of agents (BicNet)",
}
LINKS = {
    "all": "each agent hears all others",
    "env": "pairs given by the environment, as a matrix [N, N] under (group, links)",
    "ring": "each agent hears its two neighbors in agent order",
    "radius": "each agent hears the agents within the radius",
    "nearest": "each agent hears its nearest agents",
}
DISCRETE = {
    "none": "messages are continuous",
    "gumbel": "one of message_size symbols per message (straight-through Gumbel-softmax)",
    "dial": "message_size bits per message; in training, noisy continuous values (DIAL)",
}
_WITH_LINKS = ("commnet", "tarmac", "graph")
_WITH_ATTENTION = ("tarmac", "graph")


class _NeedsPosition(ReadWhere):
    """Condition for settings that matter only if communication depends on distance."""

    def __init__(self) -> None:
        super().__init__("links", "nearest", "radius")

    def holds(self, section: Any, value_of: Any = None) -> bool:
        """Returns whether links or messages depend on the distance."""
        return section.links in self.values or section.kind == "graph"

    def in_words(self, at: str) -> str:
        """Returns the condition as a phrase for an error message."""
        return f"{at}links is radius or nearest or {at}kind is graph"


@dataclass(frozen=True)
class CriticCommunicationConfig:
    """Communication between the agents of a group, between the hidden layers and the last one."""

    kind: Annotated[str, OneOf(COMMUNICATIONS)] = "none"
    """Communication method."""
    rounds: Annotated[Count, ReadWhere("kind", *_WITH_LINKS)] = 1
    """Rounds of messages per step, each with separate weights."""
    message_size: Annotated[Count, ReadWhere("kind", "none", but=True)] = 32
    """Number of features of a message. Attention keys are sent in addition. For ``bicnet``, the
    message size is the hidden size of the recurrent network."""
    key_size: Annotated[Count, ReadWhere("kind", *_WITH_ATTENTION)] = 16
    """Dimension of attention keys and queries."""
    cell: Annotated[
        str,
        OneOf({"gru": "gated recurrent units", "lstm": "long short-term memory"}),
        ReadWhere("kind", "bicnet"),
    ] = "gru"
    """Type of the recurrent cell of ``bicnet``."""
    links: Annotated[str, OneOf(LINKS), ReadWhere("kind", *_WITH_LINKS)] = "all"
    """Communication graph: pairs of agents that hear each other."""
    radius: Annotated[
        float | None, Range(0, above=True, advised=0.5), ReadWhere("links", "radius")
    ] = None
    """Communication range, in the unit of the positions; ``links: radius`` requires it."""
    nearest: Annotated[Count, ReadWhere("links", "nearest")] = 1
    """Number of nearest agents that each agent hears."""
    position: Annotated[list[int], Each(Range(0), "columns"), _NeedsPosition()] = field(
        default_factory=lambda: [0, 1]
    )
    """Observation columns that hold the agent's position."""
    across_groups: Annotated[bool, ReadWhere("kind", "none", but=True)] = False
    """Communication between agents of different groups; one learner must train these groups."""
    order: Annotated[
        str,
        OneOf({"before": "communication, then memory", "after": "memory, then communication"}),
        ReadWhere("kind", "none", but=True),
    ] = "before"
    """Order of communication and memory in the network."""

    def check(self, at: str = "") -> None:
        """Refuses communication settings that contradict each other or are incomplete.

        Raises:
            ConfigError: invalid settings; the message names them.
        """
        if not self.position and (self.kind == "graph" or self.links in ("radius", "nearest")):
            raise ConfigError(
                f"{at}position is [], expected the observation columns that hold an agent's "
                f"position, such as {at}position=[0,1]."
            )
        if self.kind != "none" and self.links == "radius" and self.radius is None:
            raise ConfigError(
                f"{at}links is 'radius', but {at}radius is null; give the communication range, "
                f"such as {at}radius=0.5."
            )


@dataclass(frozen=True)
class CommunicationConfig(CriticCommunicationConfig):
    """Communication between acting agents, with an optional delay of messages."""

    delay: Annotated[int, Range(0), ReadWhere("kind", *_WITH_LINKS)] = 0
    """Delay of messages, in steps."""

    def check(self, at: str = "") -> None:
        """Refuses communication settings, including a delay, that contradict each other.

        Raises:
            ConfigError: invalid settings; the message names them.
        """
        super().check(at)
        if self.kind == "bicnet" and self.delay:
            raise ConfigError(
                f"{at}delay is {self.delay}, but {at}kind is 'bicnet', whose messages pass "
                f"along the agents within a step; use {at}delay=0, or {at}kind=commnet."
            )
        if self.kind in _WITH_LINKS and self.delay and self.rounds > 1:
            raise ConfigError(
                f"{at}delay is {self.delay}, but {at}rounds is {self.rounds}: a further round "
                f"would need messages that have not arrived yet; use {at}rounds=1, or "
                f"{at}delay=0."
            )


@dataclass(frozen=True)
class DrawnCommunicationConfig(CommunicationConfig):
    """Communication with random parts: gates, link dropout, noise on messages."""

    gate: Annotated[bool, ReadWhere("kind", "none", but=True)] = False
    """Additional action by which an agent decides in each step whether to send (IC3Net)."""
    dropout: Annotated[float, Range(0, 1, below=True), ReadWhere("kind", *_WITH_LINKS)] = 0.0
    """Share of links dropped in each training step."""
    discrete: Annotated[str, OneOf(DISCRETE), ReadWhere("kind", *_WITH_LINKS)] = "none"
    """Discretization of messages."""
    noise: Annotated[Positive, ReadWhere("discrete", "dial")] = 1.0
    """Standard deviation of the noise on messages in training."""
    temperature: Annotated[Positive, ReadWhere("discrete", "gumbel")] = 1.0
    """Temperature of the Gumbel-softmax."""


def communicates(config: Any) -> bool:
    """Returns whether the agents of a network communicate.

    Args:
        config (NetworkConfig): the network.
    """
    return config.communication.kind != "none"


def delays(config: Any) -> bool:
    """Returns whether the messages of a network are delayed.

    Args:
        config (NetworkConfig): the network.
    """
    own = config.communication  # a critic's has no delay
    return own.kind in _WITH_LINKS and getattr(own, "delay", 0) > 0


def gives_links(config: Any) -> bool:
    """Returns whether the environment gives the communication graph.

    Args:
        config (NetworkConfig): the network.
    """
    return communicates(config) and config.communication.links == "env"


def draws(config: CommunicationConfig) -> bool:
    """Returns whether communication has random parts.

    Examples:
        >>> draws(DrawnCommunicationConfig("commnet", gate=True))
        True
    """
    if config.kind == "none" or not isinstance(config, DrawnCommunicationConfig):
        return False
    return config.gate or config.dropout > 0 or config.discrete != "none"


ACTIVATIONS = {
    "tanh": "hyperbolic tangent",
    "relu": "rectified linear unit",
    "elu": "exponential linear unit",
    "gelu": "Gaussian error linear unit",
    "silu": "sigmoid linear unit",
}
CHANNELS = {"first": "[C, H, W]", "last": "[H, W, C]"}
AGENT_IDS = {"onehot": "one column per agent", "embedding": "a few learned features"}
MEMORIES = {
    "none": "no memory",
    "gru": "gated recurrent units",
    "lstm": "long short-term memory",
    "mingru": "gated recurrent units whose gates do not read the hidden state",
    "lru": "linear recurrent units, with complex states that rotate and decay",
}
MIXERS = {
    "none": "no mixing",
    "sum": "the sum of the agents' values",
    "monotonic": "network monotonic in each agent's value; its weights depend on central_input",
}
REMEMBERING = ("group", "full", "none", "index", "clusters", "trunk", "agent_id")
"""Ways of sharing that allow memory and communication."""
ARCHITECTURES = {
    "mlp": "a multi-layer perceptron over the concatenated agents",
    "set": "mean over the living agents",
    "attention": "attention over the living agents",
}


class _NeedsIndex(ReadWhere):
    """Condition for settings that matter only if agents share networks by an index."""

    def __init__(self) -> None:
        self.key, self.but, self.of = "sharing", False, ()

    @property
    def values(self) -> tuple[str, ...]:  # type: ignore[override]
        """The ways of sharing by an index."""
        return tuple(word for word, sharing in SHARINGS.items() if sharing.needs_index)


_OTHER_NAMES_OF_WIDTHS = AlsoCalled(
    "hidden_size", "hidden_sizes", "hidden_dim", "hidden_dims", "hidden_layers"
)
_NOT_IN_SIMBA = ReadWhere("body", "simba", but=True)  # it has its own activation and norms


@dataclass(frozen=True)
class NetworkConfig:
    """Network of the agents, and how they share it."""

    num_cells: Annotated[list[int], Each(Range(1), "widths"), _OTHER_NAMES_OF_WIDTHS] = field(
        default_factory=lambda: [64, 64]
    )
    """Width of each hidden layer, or of each residual block of ``simba``."""
    activation: Annotated[str, OneOf(ACTIVATIONS), _NOT_IN_SIMBA] = "tanh"
    """Activation function of the hidden layers."""
    layer_norm: Annotated[bool, _NOT_IN_SIMBA] = False
    """Layer normalization before each activation."""
    body: Annotated[str, OneOf(BODIES.words)] = "mlp"
    """Type of the network between observations and outputs."""
    channels: Annotated[str | None, OneOf(CHANNELS), ReadWhere("body", "cnn")] = None
    """Channel dim of images. Null: the smaller of the first and the last dim; the last if they are
    equal."""
    sharing: Annotated[str, OneOf(SHARINGS.words)] = "group"
    """Parameter sharing between agents."""
    sharing_index: Annotated[list[int] | None, _NeedsIndex()] = None
    """Index of the network of each agent, from 0, such as ``[0, 0, 1]``."""
    agent_id: Annotated[str, OneOf(AGENT_IDS), ReadWhere("sharing", "agent_id")] = "onehot"
    """Encoding of the agent's id."""
    agent_id_size: Annotated[
        Count, ReadWhere("sharing", "agent_id"), ReadWhere("agent_id", "embedding")
    ] = 8
    """Number of features of the embedding."""
    mask_ratio: Annotated[float, Range(0, 1, below=True), ReadWhere("sharing", "masks")] = 0.1
    """Share of hidden units pruned for each agent."""
    mask_seed: Annotated[Seed, ReadWhere("sharing", "masks")] = 0
    """Random seed of each agent's pruning mask."""
    n_clusters: Annotated[Count, ReadWhere("sharing", "clusters")] = 2
    """Number of clusters; each has its own network."""
    clustering_frames: Annotated[Count, ReadWhere("sharing", "clusters")] = 20000
    """Frames collected to find the clusters."""
    share_params: bool | None = None
    """TorchRL's name for sharing: true means ``sharing: group``, false ``sharing: none``. Null:
    ``sharing`` decides."""
    communication: CommunicationConfig = field(default_factory=CommunicationConfig)
    """Communication between the agents of a group."""

    def check(self, at: str = "") -> None:
        """Refuses sharing settings that contradict each other, or a missing index.

        Raises:
            ConfigError: contradictory settings; the message names both.
        """
        try:
            sharing = sharing_of(self)
        except ConfigError as error:
            raise ConfigError(f"{at}{error}") from None
        index = self.sharing_index
        if sharing == "index" and not index:
            raise ConfigError(
                f"{at}sharing is 'index', but {at}sharing_index is null; give the index of "
                f"each agent's network, such as {at}sharing_index=[0,0,1]."
            )
        if index is not None and sorted(set(index)) != list(range(len(set(index)))):
            raise ConfigError(
                f"{at}sharing_index is {quoted(list(index))}, expected indices from 0 without gaps."
            )
        if communicates(self):
            self.communication.check(f"{at}communication.")
            _check_part_is_supported(self, "communication", self.communication.kind, at)


@dataclass(frozen=True)
class CriticConfig(NetworkConfig):
    """Network of a critic."""

    architecture: Annotated[str, OneOf(ARCHITECTURES)] = "mlp"
    """Type of network of a central critic."""
    value_per: Annotated[
        str, OneOf({"agent": "one value per agent", "team": "one value for the whole group"})
    ] = "agent"
    """Number of values of a central critic, and of its memories: one per agent or one per group."""
    communication: CriticCommunicationConfig = field(  # type: ignore[assignment]
        default_factory=CriticCommunicationConfig
    )
    """Communication between the agents of a group."""

    def __post_init__(self) -> None:
        own = self.communication
        if type(own) is CommunicationConfig and not own.delay:  # the type of an actor's setting
            known = {one.name: getattr(own, one.name) for one in fields(CriticCommunicationConfig)}
            object.__setattr__(self, "communication", CriticCommunicationConfig(**known))

    def check(self, at: str = "") -> None:
        """Refuses delayed messages, which a critic does not need.

        Raises:
            ConfigError: invalid settings; the message names them.
        """
        super().check(at)
        if delays(self):
            raise ConfigError(
                f"{at}communication.delay is above 0, expected 0: critics are used "
                f"in training only, without delay; use {at}communication.delay=0."
            )


@dataclass(frozen=True)
class MemoryConfig:
    """Memory of an agent, between the hidden layers and the last one."""

    kind: Annotated[str, OneOf(MEMORIES)] = "none"
    """Type of the recurrent cell."""
    size: Annotated[Count, ReadWhere("kind", "none", but=True)] = 64
    """Number of units of each memory layer."""
    layers: Annotated[Count, ReadWhere("kind", "none", but=True)] = 1
    """Number of memory layers."""


@dataclass(frozen=True)
class RecurrentNetworkConfig(NetworkConfig):
    """Network with optional memory."""

    memory: MemoryConfig = field(default_factory=MemoryConfig)
    """Memory of an agent across steps."""

    def check(self, at: str = "") -> None:
        """Refuses networks that cannot have a memory.

        Raises:
            ConfigError: contradictory settings; the message names them.
        """
        super().check(at)
        if not has_memory(self):
            return
        memory = self.memory
        _check_part_is_supported(self, "memory", memory.kind, at)
        if memory.kind == "lru" and memory.size % 2:
            raise ConfigError(
                f"{at}memory.size is {memory.size}, expected an even number for 'lru'; use "
                f"{at}memory.size={memory.size + 1}."
            )


@dataclass(frozen=True)
class TeamNetworkConfig(RecurrentNetworkConfig):
    """Network with optional memory, and communication with random parts."""

    communication: DrawnCommunicationConfig = field(default_factory=DrawnCommunicationConfig)
    """Communication between the agents of a group."""
    state_independent_scale: Annotated[bool, AlsoCalled("free_log_std")] = False
    """Standard deviations of continuous actions are parameters of the network, not outputs; they do
    not depend on the observation."""
    initial_scale: Annotated[float, Range(0.01, above=True)] = 1.0
    """Standard deviation of continuous actions at the start, before they are squashed into their
    bounds."""

    def __post_init__(self) -> None:
        own = self.communication  # plain communication is accepted too
        if not isinstance(own, DrawnCommunicationConfig):
            object.__setattr__(self, "communication", DrawnCommunicationConfig(**vars(own)))


@dataclass(frozen=True)
class RecurrentCriticConfig(CriticConfig, RecurrentNetworkConfig):
    """Network of a critic with optional memory."""

    def check(self, at: str = "") -> None:
        """Refuses critics that cannot have a memory.

        Raises:
            ConfigError: contradictory settings; the message names them.
        """
        super().check(at)
        if has_memory(self) and self.architecture != "mlp":
            raise ConfigError(
                f"{at}memory.kind is {quoted(self.memory.kind)}, but {at}architecture is "
                f"{quoted(self.architecture)}, which cannot have a memory; use "
                f"{at}architecture=mlp, or {at}memory=none."
            )


@dataclass(frozen=True)
class QNetworkConfig(RecurrentNetworkConfig):
    """Q-network of the agents; they take the action with the highest value."""

    dueling: bool = False
    """Dueling network: the sum of a state value and the advantages of the actions."""


@dataclass(frozen=True)
class MixerConfig:
    """Mixing network, which mixes the agents' action values into one Q_tot."""

    hidden: Count = 32
    """Number of hidden units of the mixer."""
    init_scale: Positive | None = None
    """Gain of the orthogonal initialization of the mixer's hypernetworks. Null: PyTorch's default
    initialization."""


@dataclass(frozen=True)
class AnyMixerConfig:
    """Mixer of the agents' action values, or none."""

    kind: Annotated[str, OneOf(MIXERS)] = "none"
    """Type of mixer."""
    hidden: Annotated[Count, ReadWhere("kind", "monotonic")] = 32
    """Number of hidden units of the mixer."""
    init_scale: Annotated[Positive | None, ReadWhere("kind", "monotonic")] = None
    """Gain of the orthogonal initialization of the mixer's hypernetworks. Null: PyTorch's default
    initialization."""


def _check_part_is_supported(config: NetworkConfig, part: str, kind: str, at: str) -> None:
    """Refuses a memory or communication in networks that do not support it.

    Raises:
        ConfigError: contradictory settings; the message names them.
    """
    body, sharing, fault = BODIES.find(config.body), sharing_of(config), ""
    if body is not None and body.body is not None:
        fault = (
            f"body is {quoted(config.body)}, one network over all agents, which cannot have "
            f"it; use {at}body=mlp, or {at}{part}=none."
        )
    elif sharing not in REMEMBERING:
        fault = (
            f"sharing is {quoted(sharing)}, which cannot have it; use one of "
            f"{', '.join(REMEMBERING)}, or {at}{part}=none."
        )
    elif not config.num_cells:
        fault = f"num_cells is empty, and it needs a hidden layer; use {at}num_cells=[64]."
    if fault:
        raise ConfigError(f"{at}{part}.kind is {quoted(kind)}, but {at}{fault}")


def carries(config: NetworkConfig) -> bool:
    """Returns whether a network has a hidden state: of a memory or of delayed messages.

    Args:
        config (NetworkConfig): the network.

    Examples:
        >>> carries(NetworkConfig(communication=CommunicationConfig("commnet", delay=1)))
        True
    """
    return has_memory(config) or delays(config)


def has_memory(config: NetworkConfig) -> bool:
    """Returns whether a network has a memory.

    Args:
        config (NetworkConfig): the network.

    Examples:
        >>> has_memory(RecurrentNetworkConfig(memory=MemoryConfig("gru")))
        True
    """
    memory = getattr(config, "memory", None)
    return memory is not None and memory.kind != "none"


def sharing_of(config: NetworkConfig) -> str:
    """Returns the way of sharing, with ``share_params`` taken into account.

    Args:
        config (NetworkConfig): the network.

    Raises:
        ConfigError: an unknown value, or settings that contradict each other.

    Examples:
        >>> sharing_of(NetworkConfig(share_params=False))
        'none'
    """
    sharing, words = config.sharing, SHARINGS.names()
    if sharing not in words:
        raise ConfigError(
            f"sharing is {quoted(sharing)}; {nearest(str(sharing), words)}"
            f"expected one of {', '.join(words)}."
        )
    if config.share_params is not None:
        word = "group" if config.share_params else "none"
        # `group` is also the default: share_params alone decides then.
        if sharing not in ("group", word):
            raise ConfigError(
                f"share_params is {str(config.share_params).lower()}, which means sharing={word}, "
                f"but sharing is {quoted(sharing)}; leave out one of the two."
            )
        sharing = word
    if config.sharing_index is not None and not SHARINGS.of(sharing).needs_index:
        raise ConfigError(
            f"sharing_index is given, but sharing is {quoted(sharing)}; use sharing=index or leave "
            "sharing_index out."
        )
    return sharing
