"""Description of external simulators, available before anything is imported."""

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
    """Settings of the door at which external simulators are clients."""

    agents: dict[str, Any] = field(default_factory=dict)
    """Kind of agents -> ``{n, observation, action}``, such as ``{walker: {n: 3, observation: 18,
    action: 2}}``; empty: what the first client declares, which ``config.yaml`` then says."""
    state_size: Count | None = None
    """Numbers that only critics see; null: none."""
    host: str = "127.0.0.1"
    """Where to listen; any other than this machine needs a token."""
    port: Annotated[int, Range(0, 65535)] = 7777
    """Port; 0: a free one."""
    token_file: str | None = None
    """File with the token that clients prove to have; null: ``TORCHRL_MARL_TOKEN``, if set."""
    tls_certificate: str | None = None
    """File with the certificate, for TLS; null: none."""
    tls_key: str | None = None
    """File with the certificate's key; null: it is in the certificate's."""
    hold: bool = True
    """Whether clients wait during an update, so that every batch is of one policy; otherwise they
    play on with the last one."""
    max_clients: Count = 256
    """Clients that may be there."""
    grace: Positive = 10.0
    """Seconds for which the place of a client that is gone is kept; then its episode is
    truncated."""
    idle_timeout: Positive = 300.0
    """Seconds of silence after which a client is left."""
    max_message_bytes: Annotated[int, Range(256, 1 << 30)] = 1 << 20
    """Bytes that a message may have."""
    max_number: Positive = 1e6
    """The largest number, either way, that an agent may see or earn, or that a state may have: what
    is larger makes a loss infinite sooner or later, which would end the run for all."""
    patience: Positive = 30.0
    """Seconds without a step between two messages on who is waited for."""


def check_external(config: EnvConfig) -> None:
    """Refuses agents that cannot be, and a missing package.

    Raises:
        ConfigError: an unknown argument, or what is wrong with the agents.
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
    "simulators elsewhere, which are clients (docs/environments/external.md)",
    "torchrl_marl.apps.external.env:ExternalEnv",
    settings=("num_envs",),
    of_objects=(),
    states=(),
    clients=True,
    arguments="torchrl_marl.apps.external.library:ExternalArguments",
    check=check_external,
    packages=("msgpack",),
    collector="torchrl_marl.apps.external.collector:external_collector",
    declared="torchrl_marl.apps.external.collector:with_declared",
)
