"""Settings of actors and critics."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Annotated

from torchrl_marl.errors import ConfigError, nearest, quoted
from torchrl_marl.modules.communication_config import (
    CommunicationConfig,
    CriticCommunicationConfig,
    DrawnCommunicationConfig,
    communicates,
    delays,
)
from torchrl_marl.modules.registry import BODIES, SHARINGS
from torchrl_marl.settings import AlsoCalled, Count, Each, OneOf, Positive, Range, ReadWhere, Seed

__all__ = [
    "ACTIVATIONS",
    "AGENT_IDS",
    "ARCHITECTURES",
    "CHANNELS",
    "MEMORIES",
    "MIXERS",
    "SHARINGS",
    "AnyMixerConfig",
    "CriticConfig",
    "MemoryConfig",
    "MixerConfig",
    "NetworkConfig",
    "QNetworkConfig",
    "RecurrentCriticConfig",
    "RecurrentNetworkConfig",
    "TeamNetworkConfig",
    "carries",
    "has_memory",
    "sharing_of",
]

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
    body, sharing = BODIES.find(config.body), sharing_of(config)
    found = f"{at}{part}.kind is {quoted(kind)}, but"
    if body is not None and body.body is not None:
        raise ConfigError(
            f"{found} {at}body is {quoted(config.body)}, one network over all agents, which "
            f"has none; use {at}body=mlp, or {at}{part}=none."
        )
    if sharing not in REMEMBERING:
        raise ConfigError(
            f"{found} {at}sharing is {quoted(sharing)}, which has none; use one of "
            f"{', '.join(REMEMBERING)}, or {at}{part}=none."
        )
    if not config.num_cells:
        raise ConfigError(
            f"{found} {at}num_cells is empty, and it reads a hidden layer; use {at}num_cells=[64]."
        )


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
