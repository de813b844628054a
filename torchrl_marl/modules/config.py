"""Settings of actors and critics."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchrl_marl.errors import ConfigError, nearest, quoted

__all__ = [
    "AGENT_IDS",
    "ARCHITECTURES",
    "SHARINGS",
    "CriticConfig",
    "NetworkConfig",
    "sharing_of",
]

SHARINGS = ("none", "full", "group", "trunk", "agent_id", "masks", "clusters", "index")
ARCHITECTURES = ("mlp", "set", "attention")
AGENT_IDS = ("onehot", "embedding")


@dataclass(frozen=True)
class NetworkConfig:
    """A multi-layer perceptron for every agent, and who shares it."""

    num_cells: list[int] = field(default_factory=lambda: [64, 64])
    """Width of each hidden layer."""
    activation: str = "tanh"
    """``tanh``, ``relu``, ``elu``, ``gelu`` or ``silu``."""
    sharing: str = "group"
    """Whose network is whose. ``none``: one for each agent; ``full``: one for all; ``group``: one
    for each group and kind; ``trunk``: hidden layers for all, a last layer for each agent;
    ``agent_id``: one for all that also reads who the agent is; ``masks``: one for all, of which
    each agent has its own hidden units (SNP); ``clusters``: one for all that behave alike, found
    before training (SePS); ``index``: as ``sharing_index`` says."""
    sharing_index: list[int] | None = None
    """Number of each agent's network, from 0; for ``index`` and, once found, ``clusters``."""
    agent_id: str = "onehot"
    """``onehot`` or ``embedding``, which is learned; for ``sharing: agent_id``."""
    agent_id_size: int = 8
    """Features of the embedding."""
    mask_ratio: float = 0.1
    """Share of the hidden units that each agent lacks; for ``sharing: masks``."""
    mask_seed: int = 0
    """Seed of who lacks which."""
    n_clusters: int = 2
    """Number of networks; for ``sharing: clusters``."""
    clustering_frames: int = 20000
    """Frames from which the clusters are found."""
    share_params: bool | None = None
    """TorchRL's word: true is ``sharing: group``, false is ``none``; null leaves it to it."""


@dataclass(frozen=True)
class CriticConfig(NetworkConfig):
    """A critic's network."""

    architecture: str = "mlp"
    """What a central critic is: an ``mlp`` over all agents side by side, or a network over a set
    of living agents, ``set`` (their mean) or ``attention``."""
    value_per: str = "agent"
    """A value for each ``agent``, or one for the ``team`` (its group)."""


def sharing_of(config: NetworkConfig) -> str:
    """Who shares what, with ``share_params`` heard.

    Args:
        config (NetworkConfig): the network.

    Raises:
        ConfigError: an unknown word, or settings that contradict each other.

    Examples:
        >>> sharing_of(NetworkConfig(share_params=False))
        'none'
    """
    sharing = config.sharing
    if sharing not in SHARINGS:
        raise ConfigError(
            f"sharing is {quoted(sharing)}; {nearest(str(sharing), SHARINGS)}"
            f"expected one of {', '.join(SHARINGS)}."
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
    if config.sharing_index is not None and sharing not in ("index", "clusters"):
        raise ConfigError(
            f"sharing_index is given, but sharing is {quoted(sharing)}; use sharing=index or leave "
            "sharing_index out."
        )
    return sharing
