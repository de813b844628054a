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
    "none": "agents do not hear each other",
    "commnet": "each agent hears the mean of what the others say (CommNet)",
    "tarmac": "each agent attends to what the others say (TarMAC)",
    "graph": "as tarmac, where words also depend on how far away they are said",
    "bicnet": "a recurrent network along the agents, there and back (BicNet)",
}
LINKS = {
    "all": "everybody hears everybody",
    "env": "as the environment says in (group, links), [N, N]",
    "ring": "each agent hears the one before and the one behind",
    "radius": "each agent hears those within radius",
    "nearest": "each agent hears the nearest ones",
}
DISCRETE = {
    "none": "messages are numbers",
    "gumbel": "a message is one of message_size symbols (Gumbel-softmax, straight through)",
    "dial": "a message is message_size bits; numbers with noise in training (DIAL)",
}
_BROADCAST = ("commnet", "tarmac", "graph")
_ATTENDING = ("tarmac", "graph")


class _NeedsPosition(ReadWhere):
    """A setting that is read where it matters how far agents are apart."""

    def __init__(self) -> None:
        super().__init__("links", "nearest", "radius")

    def holds(self, section: Any, value_of: Any = None) -> bool:
        """Whether links or words depend on the distance."""
        return section.links in self.values or section.kind == "graph"

    def in_words(self, at: str) -> str:
        """Returns the condition as it stands in a sentence."""
        return f"{at}links is radius or nearest or {at}kind is graph"


@dataclass(frozen=True)
class CriticCommunicationConfig:
    """What agents of a group say to each other, between the hidden layers and the last one."""

    kind: Annotated[str, OneOf(COMMUNICATIONS)] = "none"
    """How they communicate."""
    rounds: Annotated[Count, ReadWhere("kind", *_BROADCAST)] = 1
    """How often in a step everybody speaks and listens; each round has weights of its own."""
    message_size: Annotated[Count, ReadWhere("kind", "none", but=True)] = 32
    """Numbers of a message; what an attention compares comes on top. Of ``bicnet`` the units of the
    recurrent network."""
    key_size: Annotated[Count, ReadWhere("kind", *_ATTENDING)] = 16
    """Numbers of what an attention compares: who listens for what, and who says what."""
    cell: Annotated[
        str,
        OneOf({"gru": "gated recurrent units", "lstm": "long short-term memory"}),
        ReadWhere("kind", "bicnet"),
    ] = "gru"
    """Recurrent network along the agents."""
    links: Annotated[str, OneOf(LINKS), ReadWhere("kind", *_BROADCAST)] = "all"
    """Who hears whom."""
    radius: Annotated[
        float | None, Range(0, above=True, advised=0.5), ReadWhere("links", "radius")
    ] = None
    """How far a word is heard."""
    nearest: Annotated[Count, ReadWhere("links", "nearest")] = 1
    """How many agents each one hears."""
    position: Annotated[list[int], Each(Range(0), "columns"), _NeedsPosition()] = field(
        default_factory=lambda: [0, 1]
    )
    """Columns of an agent's observation that say where it is."""
    across_groups: Annotated[bool, ReadWhere("kind", "none", but=True)] = False
    """Groups that are trained as one hear each other, too."""
    order: Annotated[
        str,
        OneOf({"before": "they hear, then remember", "after": "they remember, then speak of it"}),
        ReadWhere("kind", "none", but=True),
    ] = "before"
    """Whether they communicate before their memory or after it."""

    def check(self, at: str = "") -> None:
        """Refuses what cannot be heard.

        Raises:
            ConfigError: naming the setting.
        """
        if not self.position and (self.kind == "graph" or self.links in ("radius", "nearest")):
            raise ConfigError(
                f"{at}position is [], expected the columns of an agent's observation that say "
                f"where it is, such as {at}position=[0,1]."
            )
        if self.kind != "none" and self.links == "radius" and self.radius is None:
            raise ConfigError(
                f"{at}links is 'radius', but {at}radius is null; give how far a word is heard, "
                f"such as {at}radius=0.5."
            )


@dataclass(frozen=True)
class CommunicationConfig(CriticCommunicationConfig):
    """Communication of agents that act, who may know later what they have heard."""

    delay: Annotated[int, Range(0), ReadWhere("kind", *_BROADCAST)] = 0
    """Steps after which an actor's agents know what they have heard."""

    def check(self, at: str = "") -> None:
        """Refuses what cannot be heard, or not later.

        Raises:
            ConfigError: naming the setting.
        """
        super().check(at)
        if self.kind == "bicnet" and self.delay:
            raise ConfigError(
                f"{at}delay is {self.delay}, but {at}kind is 'bicnet', along whose agents words go "
                f"at once; use {at}delay=0, or {at}kind=commnet."
            )
        if self.kind in _BROADCAST and self.delay and self.rounds > 1:
            raise ConfigError(
                f"{at}delay is {self.delay}, but {at}rounds is {self.rounds}: in a further round "
                f"agents would speak of what they do not know yet; use {at}rounds=1, or "
                f"{at}delay=0."
            )


@dataclass(frozen=True)
class DrawnCommunicationConfig(CommunicationConfig):
    """Communication in which something may be drawn: gates, lost links, noise on messages."""

    gate: Annotated[bool, ReadWhere("kind", "none", but=True)] = False
    """Each agent decides in each step whether it speaks, as one more action (IC3Net)."""
    dropout: Annotated[float, Range(0, 1, below=True), ReadWhere("kind", *_BROADCAST)] = 0.0
    """Share of the links that is lost in each step of training."""
    discrete: Annotated[str, OneOf(DISCRETE), ReadWhere("kind", *_BROADCAST)] = "none"
    """Whether messages are symbols."""
    noise: Annotated[Positive, ReadWhere("discrete", "dial")] = 1.0
    """Standard deviation of the noise on a message in training."""
    temperature: Annotated[Positive, ReadWhere("discrete", "gumbel")] = 1.0
    """How smooth the gradient of a symbol is."""


def communicates(config: Any) -> bool:
    """Returns whether the agents of a network hear each other.

    Args:
        config (NetworkConfig): the network.
    """
    return config.communication.kind != "none"


def delays(config: Any) -> bool:
    """Returns whether the agents of a network know later what they hear.

    Args:
        config (NetworkConfig): the network.
    """
    own = config.communication  # that of a critic knows no delay
    return own.kind in _BROADCAST and getattr(own, "delay", 0) > 0


def gives_links(config: Any) -> bool:
    """Returns whether the environment says who hears whom.

    Args:
        config (NetworkConfig): the network.
    """
    return communicates(config) and config.communication.links == "env"


def draws(config: CommunicationConfig) -> bool:
    """Returns whether something is drawn in the channel.

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
AGENT_IDS = {"onehot": "a column for each agent", "embedding": "a few features, learned"}
MEMORIES = {
    "none": "nothing is carried from step to step",
    "gru": "gated recurrent units",
    "lstm": "long short-term memory",
    "mingru": "gated recurrent units whose gates do not read the state",
    "lru": "linear recurrent units: complex numbers that turn and decay",
}
MIXERS = {
    "none": "each agent's value stands for itself",
    "sum": "the sum of the agents' values",
    "monotonic": "a network that rises in each agent's value, with weights made of what all see",
}
REMEMBERING = ("group", "full", "none", "index", "clusters", "trunk", "agent_id")
"""Ways of sharing that have a place for memory and communication."""
ARCHITECTURES = {
    "mlp": "a multi-layer perceptron over all agents side by side",
    "set": "the mean over a set of living agents",
    "attention": "attention over a set of living agents",
}


class _NeedsIndex(ReadWhere):
    """A setting that the ways of sharing by an index read."""

    def __init__(self) -> None:
        self.key, self.but, self.of = "sharing", False, ()

    @property
    def values(self) -> tuple[str, ...]:  # type: ignore[override]
        """The words of those ways."""
        return tuple(word for word, sharing in SHARINGS.items() if sharing.needs_index)


_WIDTHS = AlsoCalled("hidden_size", "hidden_sizes", "hidden_dim", "hidden_dims", "hidden_layers")


@dataclass(frozen=True)
class NetworkConfig:
    """A network for every agent, and who shares it."""

    num_cells: Annotated[list[int], Each(Range(1), "widths"), _WIDTHS] = field(
        default_factory=lambda: [64, 64]
    )
    """Width of each hidden layer."""
    activation: Annotated[str, OneOf(ACTIVATIONS)] = "tanh"
    """Function between the layers."""
    layer_norm: bool = False
    """Standardize the features of each hidden layer before that function."""
    body: Annotated[str, OneOf(BODIES.words)] = "mlp"
    """Kind of network between observations and outputs."""
    channels: Annotated[str | None, OneOf(CHANNELS), ReadWhere("body", "cnn")] = None
    """Where pictures have their channels; null: the smaller of the outer sizes is theirs, the last
    if they are equal."""
    sharing: Annotated[str, OneOf(SHARINGS.words)] = "group"
    """Which agents share a network."""
    sharing_index: Annotated[list[int] | None, _NeedsIndex()] = None
    """Number of each agent's network, from 0; for ``index`` and, once found, ``clusters``."""
    agent_id: Annotated[str, OneOf(AGENT_IDS), ReadWhere("sharing", "agent_id")] = "onehot"
    """How the network reads who the agent is; for ``sharing: agent_id``."""
    agent_id_size: Annotated[
        Count, ReadWhere("sharing", "agent_id"), ReadWhere("agent_id", "embedding")
    ] = 8
    """Features of the embedding."""
    mask_ratio: Annotated[float, Range(0, 1, below=True), ReadWhere("sharing", "masks")] = 0.1
    """Share of the hidden units that each agent lacks; for ``sharing: masks``."""
    mask_seed: Annotated[Seed, ReadWhere("sharing", "masks")] = 0
    """Seed of who lacks which."""
    n_clusters: Annotated[Count, ReadWhere("sharing", "clusters")] = 2
    """Number of networks; for ``sharing: clusters``."""
    clustering_frames: Annotated[Count, ReadWhere("sharing", "clusters")] = 20000
    """Frames from which the clusters are found."""
    share_params: bool | None = None
    """TorchRL's word: true is ``sharing: group``, false is ``none``; null leaves ``sharing`` as it
    is."""
    communication: CommunicationConfig = field(default_factory=CommunicationConfig)
    """What agents of a group say to each other."""

    def check(self, at: str = "") -> None:
        """Refuses ways of sharing that contradict each other or miss their index.

        Raises:
            ConfigError: naming the two settings.
        """
        try:
            sharing = sharing_of(self)
        except ConfigError as error:
            raise ConfigError(f"{at}{error}") from None
        index = self.sharing_index
        if sharing == "index" and not index:
            raise ConfigError(
                f"{at}sharing is 'index', but {at}sharing_index is null; give the number of "
                f"each agent's network, such as {at}sharing_index=[0,0,1]."
            )
        if index is not None and sorted(set(index)) != list(range(len(set(index)))):
            raise ConfigError(
                f"{at}sharing_index is {quoted(list(index))}, expected numbers from 0 without gaps."
            )
        if communicates(self):
            self.communication.check(f"{at}communication.")
            _check_parts(self, "communication", self.communication.kind, at)


@dataclass(frozen=True)
class CriticConfig(NetworkConfig):
    """A critic's network."""

    architecture: Annotated[str, OneOf(ARCHITECTURES)] = "mlp"
    """Network of a central critic."""
    value_per: Annotated[
        str, OneOf({"agent": "a value for each agent", "team": "one value for its group"})
    ] = "agent"
    """Whose value a central critic gives."""
    communication: CriticCommunicationConfig = field(  # type: ignore[assignment]
        default_factory=CriticCommunicationConfig
    )
    """What agents of a group say to each other."""

    def __post_init__(self) -> None:
        own = self.communication
        if type(own) is CommunicationConfig and not own.delay:  # as an actor has it
            known = {one.name: getattr(own, one.name) for one in fields(CriticCommunicationConfig)}
            object.__setattr__(self, "communication", CriticCommunicationConfig(**known))

    def check(self, at: str = "") -> None:
        """Refuses critics whose agents know later what they hear.

        Raises:
            ConfigError: naming the setting.
        """
        super().check(at)
        if delays(self):
            raise ConfigError(
                f"{at}communication.delay is above 0, expected 0: critics are "
                f"there in training only, where nobody waits; use {at}communication.delay=0."
            )


@dataclass(frozen=True)
class MemoryConfig:
    """What an agent carries from step to step, between the hidden layers and the last one."""

    kind: Annotated[str, OneOf(MEMORIES)] = "none"
    """What carries it."""
    size: Annotated[Count, ReadWhere("kind", "none", but=True)] = 64
    """Units of a layer of it."""
    layers: Annotated[Count, ReadWhere("kind", "none", but=True)] = 1
    """How many follow one another."""


@dataclass(frozen=True)
class RecurrentNetworkConfig(NetworkConfig):
    """A network that may remember."""

    memory: MemoryConfig = field(default_factory=MemoryConfig)
    """What an agent carries from step to step."""

    def check(self, at: str = "") -> None:
        """Refuses networks that have no place for a memory.

        Raises:
            ConfigError: naming the settings that do not fit together.
        """
        super().check(at)
        if not has_memory(self):
            return
        memory = self.memory
        _check_parts(self, "memory", memory.kind, at)
        if memory.kind == "lru" and memory.size % 2:
            raise ConfigError(
                f"{at}memory.size is {memory.size}, expected an even number for 'lru'; use "
                f"{at}memory.size={memory.size + 1}."
            )


@dataclass(frozen=True)
class TeamNetworkConfig(RecurrentNetworkConfig):
    """A network that may remember, and between whose agents something may be drawn."""

    communication: DrawnCommunicationConfig = field(default_factory=DrawnCommunicationConfig)
    """What agents of a group say to each other."""

    def __post_init__(self) -> None:
        own = self.communication  # plain communication will do, too
        if not isinstance(own, DrawnCommunicationConfig):
            object.__setattr__(self, "communication", DrawnCommunicationConfig(**vars(own)))


@dataclass(frozen=True)
class RecurrentCriticConfig(CriticConfig, RecurrentNetworkConfig):
    """A critic's network that may remember."""

    def check(self, at: str = "") -> None:
        """Refuses critics that have no place for a memory.

        Raises:
            ConfigError: naming the settings that do not fit together.
        """
        super().check(at)
        if not has_memory(self):
            return
        for name, needed in (("architecture", "mlp"), ("value_per", "agent")):
            if getattr(self, name) != needed:
                raise ConfigError(
                    f"{at}memory.kind is {quoted(self.memory.kind)}, but {at}{name} is "
                    f"{quoted(getattr(self, name))}, which has none; use {at}{name}={needed}, or "
                    f"{at}memory=none."
                )


@dataclass(frozen=True)
class QNetworkConfig(RecurrentNetworkConfig):
    """A network of the values of actions, which is also who acts: by the highest value."""

    dueling: bool = False
    """Values have an output for what all actions have in common."""


@dataclass(frozen=True)
class MixerConfig:
    """The network that makes one value of a group of the values of its agents' actions."""

    hidden: Count = 32
    """Units of the mixer."""
    init_scale: Positive | None = None
    """Gain of an orthogonal start of the layers that make the mixer's weights; null starts them as
    PyTorch starts linear layers."""


@dataclass(frozen=True)
class AnyMixerConfig:
    """What makes one value of a group of the values of its agents' actions, if anything does."""

    kind: Annotated[str, OneOf(MIXERS)] = "none"
    """How the agents' values become one; ``none``: they do not."""
    hidden: Annotated[Count, ReadWhere("kind", "monotonic")] = 32
    """Units of the mixer."""
    init_scale: Annotated[Positive | None, ReadWhere("kind", "monotonic")] = None
    """Gain of an orthogonal start of the layers that make the mixer's weights; null starts them as
    PyTorch starts linear layers."""


def _check_parts(config: NetworkConfig, part: str, kind: str, at: str) -> None:
    """Refuses networks that have no place between hidden layers and the last one.

    Raises:
        ConfigError: naming the settings that do not fit together.
    """
    body, sharing, fault = BODIES.find(config.body), sharing_of(config), ""
    if body is not None and body.body is not None:
        fault = (
            f"body is {quoted(config.body)}, one network over all agents, which has none; use "
            f"{at}body=mlp, or {at}{part}=none."
        )
    elif sharing not in REMEMBERING:
        fault = (
            f"sharing is {quoted(sharing)}, which has none; use one of {', '.join(REMEMBERING)}, "
            f"or {at}{part}=none."
        )
    elif not config.num_cells:
        fault = f"num_cells is empty, and it reads a hidden layer; use {at}num_cells=[64]."
    if fault:
        raise ConfigError(f"{at}{part}.kind is {quoted(kind)}, but {at}{fault}")


def carries(config: NetworkConfig) -> bool:
    """Returns whether a network carries something from step to step: a memory, or messages.

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
    """Returns who shares what, with ``share_params`` heard.

    Args:
        config (NetworkConfig): the network.

    Raises:
        ConfigError: an unknown word, or settings that contradict each other.

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
        # `group` is also what nobody chose: share_params alone decides then.
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
