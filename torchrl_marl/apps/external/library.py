"""Settings of external simulators; importing this module imports no server code."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from torchrl_marl.envs.config import EnvConfig
from torchrl_marl.envs.libraries import Library
from torchrl_marl.errors import ConfigError, MissingExtraError, nearest, quoted
from torchrl_marl.settings import Count, Positive, Range

__all__ = ["LIBRARY", "ExternalArguments"]


@dataclass(frozen=True)
class ExternalArguments:
    """Settings of the server to which external simulators connect."""

    agents: dict[str, Any] = field(default_factory=dict)
    """Kinds of agents, ``{n, observation, action}`` each, such as ``{walker: {n: 3, observation:
    18, action: 2}}``. Empty: the first client declares them, and ``config.yaml`` records them."""
    state_size: Count | None = None
    """Features of the state, which only critics read; null: no state."""
    host: str = "127.0.0.1"
    """Host to listen on; any but this machine's own needs a token."""
    port: Annotated[int, Range(0, 65535)] = 7777
    """Port to listen on; 0: a free one."""
    token_file: str | None = None
    """File with the token of the clients; null: ``TORCHRL_MARL_TOKEN``, if set."""
    tls_certificate: str | None = None
    """Certificate file for TLS; null: no TLS."""
    tls_key: str | None = None
    """File with the certificate's key; null: the certificate file holds it."""
    hold: bool = True
    """Make clients wait during an update, so that a batch has one policy. Otherwise they continue
    with the last policy."""
    max_clients: Count = 256
    """Maximum number of clients."""
    grace: Positive = 10.0
    """Seconds for which the slot of a disconnected client is kept. Then its episode is
    truncated."""
    idle_timeout: Positive = 300.0
    """Seconds of silence after which a client is disconnected."""
    max_message_bytes: Annotated[int, Range(256, 1 << 30)] = 1 << 20
    """Maximum bytes of a message."""
    max_number: Positive = 1e6
    """Largest absolute value of observations, rewards and states. Larger ones would make a loss
    infinite, which ends the run, so their client is refused."""
    patience: Positive = 30.0
    """Seconds without a step between two messages on slow clients."""


def check_external(config: EnvConfig) -> None:
    """Raises an error if the agents are invalid or a package is missing.

    Raises:
        ConfigError: an unknown argument, or invalid agents.
        MissingExtraError: MessagePack is not installed.
    """
    if importlib.util.find_spec("msgpack") is None:
        raise MissingExtraError("msgpack", "serve")
    known = [one.name for one in fields(ExternalArguments)]
    for name in config.kwargs:
        if name not in known:
            raise ConfigError(
                f"env.kwargs has {quoted(name)}, {nearest(name, known)}expected {', '.join(known)}."
            )
    agents = config.kwargs.get("agents")
    if agents:
        from torchrl_marl.apps.external.declaration import Declared

        try:
            Declared.read(agents, config.kwargs.get("state_size"))
        except ConfigError as error:
            raise ConfigError(f"env.kwargs.agents: {error}") from None
    if config.kwargs.get("tls_key") and not config.kwargs.get("tls_certificate"):
        key = quoted(config.kwargs["tls_key"])
        raise ConfigError(f"env.kwargs.tls_key is {key}, expected tls_certificate beside it.")


LIBRARY = Library(
    "external simulators, which connect as clients (docs/environments/external.md)",
    "torchrl_marl.apps.external.env:ExternalEnv",
    settings=("num_envs",),
    of_objects=(),
    states=(),
    clients=True,
    arguments="torchrl_marl.apps.external.library:ExternalArguments",
    check=check_external,
    packages=("msgpack",),
    collector="torchrl_marl.apps.external.collector:external_collector",
    declared="torchrl_marl.apps.external.collector:with_declared_agents",
)
