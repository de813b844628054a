"""Settings of communication."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from torchrl_marl.errors import ConfigError
from torchrl_marl.settings import Count, Each, OneOf, Positive, Range, ReadWhere

__all__ = [
    "COMMUNICATIONS",
    "CommunicationConfig",
    "CriticCommunicationConfig",
    "DrawnCommunicationConfig",
    "communicates",
    "delays",
    "draws",
    "gives_links",
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
