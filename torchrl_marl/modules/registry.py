"""Registry of bodies and ways of sharing, by their name in the settings. Imports no torch.

A new entry needs a builder and one line in a table of this module. :func:`register_body`,
:func:`register_sharing` and entry points of installed packages add external entries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

from torchrl_marl.errors import ConfigError, nearest, quoted
from torchrl_marl.settings.registry import Registry, import_object

__all__ = [
    "BODIES",
    "SHARINGS",
    "Body",
    "DescribedRegistry",
    "Sharing",
    "body_of",
    "register_body",
    "register_sharing",
]

Maker = Callable[..., Any] | str


@dataclass(frozen=True)
class Body:
    """A body of actors and critics: description and builder.

    Args:
        meaning (str): one line of help.
        network (callable, or ``"module:name"``): builds one agent's network, as
            :func:`~torchrl_marl.modules.bodies.make_mlp` does; ``sharing`` decides which agents
            share it.
        body (callable, or ``"module:name"``): builds a network over all agents at once, which may
            let them communicate. ``body(group, out_features, config, *, gain, device)`` returns a
            module of the signature stated in :mod:`~torchrl_marl.modules.bodies`.
    """

    meaning: str
    network: Maker | None = None
    body: Maker | None = None

    @property
    def make_network(self) -> Callable[..., Any] | None:
        """The builder of one agent's network; None for a body over all agents."""
        return _checked(_import_maker(self.network), "make_own_network")

    @property
    def make_body(self) -> Callable[..., Any] | None:
        """The builder of a body over all agents; None for networks of single agents."""
        return _checked(_import_maker(self.body), "make_own_body")


@dataclass(frozen=True)
class Sharing:
    """A way in which agents share networks: description and builder.

    Args:
        meaning (str): one line of help.
        way (callable, or ``"module:name"``): takes a
            :class:`~torchrl_marl.modules.sharing.builder.NetworkBuilder` and returns the networks
            of all agents as one module.
        needs_index (bool): whether it reads ``sharing_index``.
    """

    meaning: str
    way: Maker
    needs_index: bool = False

    @property
    def make(self) -> Callable[..., Any]:
        """The function that builds the networks."""
        way = _import_maker(self.way)
        assert way is not None
        return way


_BODY_MODULE, _SHARING_MODULE = "torchrl_marl.modules.bodies", "torchrl_marl.modules.sharing.ways"


T = TypeVar("T", Body, Sharing)


class DescribedRegistry(Registry[T]):
    """Registry of entries with a one-line description: bodies and ways of sharing."""

    def of(self, word: str) -> T:
        """Returns the entry of a name that is known to exist."""
        found = self.find(word)
        assert found is not None
        return found


_BUILT_IN_BODIES = {
    "mlp": Body("a multi-layer perceptron", network=f"{_BODY_MODULE}:make_mlp"),
    "cnn": Body(
        "convolutions over images, then a multi-layer perceptron",
        network=f"{_BODY_MODULE}:make_cnn",
    ),
    "simba": Body(
        "residual blocks with layer norms, one for each hidden layer (SimBa)",
        network=f"{_BODY_MODULE}:make_simba",
    ),
}
BODIES = DescribedRegistry("body", Body, "torchrl_marl.bodies", _BUILT_IN_BODIES)
"""All bodies."""

_BUILT_IN_SHARINGS = {
    "none": Sharing("a network for each agent", f"{_SHARING_MODULE}:none"),
    "full": Sharing("one network for all agents", f"{_SHARING_MODULE}:full"),
    "group": Sharing(
        "a network for each group and each kind of agent in it", f"{_SHARING_MODULE}:group"
    ),
    "trunk": Sharing(
        "shared hidden layers, a last layer for each agent", f"{_SHARING_MODULE}:trunk"
    ),
    "agent_id": Sharing(
        "one network for all agents, which also reads the agent's id", f"{_SHARING_MODULE}:agent_id"
    ),
    "masks": Sharing(
        "one network for all agents, with a pruning mask for each agent (SNP)",
        f"{_SHARING_MODULE}:masks",
    ),
    "clusters": Sharing(
        "a network for each cluster of agents, found before training (SePS)",
        f"{_SHARING_MODULE}:index",
        needs_index=True,
    ),
    "index": Sharing(
        "one network per index in sharing_index", f"{_SHARING_MODULE}:index", needs_index=True
    ),
}
SHARINGS = DescribedRegistry("sharing", Sharing, "torchrl_marl.sharings", _BUILT_IN_SHARINGS)
"""All ways of sharing."""


def body_of(config: Any) -> Body:
    """Returns the body that a network's settings name.

    Raises:
        ConfigError: an unknown name.
    """
    body = BODIES.find(config.body)
    if body is None:
        raise ConfigError(
            f"body is {quoted(config.body)}; {nearest(str(config.body), BODIES.names())}"
            f"expected one of {', '.join(BODIES.names())}."
        )
    return body


def register_body(
    word: str, meaning: str, *, network: Maker | None = None, body: Maker | None = None
) -> None:
    """Registers an external body for ``actor.body`` and ``critic.body``.

    Args:
        word (str): its name in the settings.
        meaning, network, body: as in :class:`Body`; either a network or a body.

    Raises:
        ConfigError: both builders or neither, or a name that is taken.
    """
    if (network is None) == (body is None):
        raise ConfigError(
            f"body {word!r} has {'no maker' if body is None else 'two makers'}, expected one: "
            "network=, of one agent's network, or body=, of a network over all agents."
        )
    BODIES.add(word, Body(meaning, network, body))


def register_sharing(word: str, meaning: str, way: Maker, *, needs_index: bool = False) -> None:
    """Registers an external way of sharing for ``actor.sharing`` and ``critic.sharing``.

    Args:
        word (str): its name in the settings.
        meaning, way, needs_index: as in :class:`Sharing`.

    Raises:
        ConfigError: a name that is taken.
    """
    SHARINGS.add(word, Sharing(meaning, way, needs_index))


def _import_maker(maker: Maker | None) -> Callable[..., Any] | None:
    if not isinstance(maker, str):
        return maker
    return import_object("a body or a way of sharing", maker)


def _checked(make: Callable[..., Any] | None, name: str) -> Callable[..., Any] | None:
    """Returns a builder that checks its networks; builders of this package need no check."""
    if make is None or getattr(make, "__module__", "").startswith("torchrl_marl."):
        return make
    return partial(getattr(import_module(_BODY_MODULE), name), make)
