"""External simulators as an environment."""

from __future__ import annotations

import ssl
import sys
import time
import warnings
from typing import Any

import torch
from tensordict import TensorDictBase

from torchrl_marl.apps.external.declaration import Declared
from torchrl_marl.apps.external.library import ExternalArguments
from torchrl_marl.apps.external.listener import Listener, read_token
from torchrl_marl.apps.external.server import ActionServer
from torchrl_marl.envs.agents.declared_env import DeclaredEnv
from torchrl_marl.errors import ConfigError, quoted

__all__ = ["ExternalEnv", "tell"]

with warnings.catch_warnings():  # in a notebook without ipywidgets
    warnings.simplefilter("ignore")
    from tqdm.auto import tqdm


def tell(text: str) -> None:
    """Prints a message above a progress bar."""
    tqdm.write(f"torchrl_marl: {text}.", file=sys.stderr)


_LOOK = 0.1  # seconds between two looks for Ctrl-C


class ExternalEnv(DeclaredEnv):
    """Simulators elsewhere, which are clients: they say what their agents see and get actions.

    It has specs and groups as any environment, but nobody steps it: it is its clients that own
    the clock, and :class:`~torchrl_marl.collectors.ExternalCollector` that makes batches of what
    they play. Without ``agents`` it waits for the first client, which declares them.

    Args:
        name (str): of the environment, in messages.

    Keyword Args:
        num_envs (int): rows E of a batch, each some steps of one client.
        seed (int, optional): not used: environments are seeded where they run.
        device (torch.device): of batches and policy.
        **arguments: as :class:`~torchrl_marl.apps.external.library.ExternalArguments` says.

    Attributes:
        server (ActionServer): who answers.
        hold (bool): clients wait during an update.
        patience (float): seconds between two messages on who is waited for.

    Raises:
        ConfigError: agents that cannot be, a port that is taken, a host without a token.
        MissingExtraError: MessagePack is not installed.

    Examples:
        >>> agents = {"walker": {"n": 3, "observation": 18, "action": 2}}
        >>> env = ExternalEnv("game", num_envs=8, agents=agents, port=0)
        >>> env.full_action_spec["walker", "action"].shape
        torch.Size([8, 3, 2])
        >>> env.close()
    """

    def __init__(
        self,
        name: str = "external",
        *,
        num_envs: int = 1,
        seed: int | None = None,
        device: torch.device | str = "cpu",
        **arguments: Any,
    ) -> None:
        self._settings = settings = ExternalArguments(**arguments)
        self.hold, self.patience = settings.hold, settings.patience
        given = None
        if settings.agents:
            given = Declared.read(settings.agents, settings.state_size)
        self.server = ActionServer(
            given,
            token=read_token(settings.token_file),
            max_clients=settings.max_clients,
            grace=settings.grace,
            idle_timeout=settings.idle_timeout,
            max_message_bytes=settings.max_message_bytes,
            max_number=settings.max_number,
        )
        self._listener: Listener | None = None
        if given is None:
            given = self._first_declared()
        given.check_size(settings.max_message_bytes)
        self.declared = given
        super().__init__(device=torch.device(device), batch_size=(num_envs,))
        self.is_closed = False
        self._set_declaration(given.declaration(name, num_envs))

    def _first_declared(self) -> Declared:
        """Waits for a client to say what its agents are."""
        self.open("a client that declares its agents")
        began = since = time.monotonic()
        try:
            while self.server.declared is None:
                self.listener.raise_error()
                time.sleep(_LOOK)
                if time.monotonic() - since > self.patience:
                    since = time.monotonic()
                    tell(f"has waited {since - began:.0f} s for a first client at {self.address}")
        except BaseException:
            self.listener.close()
            raise
        return self.server.declared

    @property
    def listener(self) -> Listener:
        """The open door."""
        assert self._listener is not None, "open() comes first"
        return self._listener

    @property
    def address(self) -> str:
        """Where clients connect to."""
        return f"{self.listener.host}:{self.listener.port}"

    def open(self, waits_for: str = "clients") -> None:
        """Opens the door, and says where; a second time nothing happens.

        Args:
            waits_for (str): in the message.
        """
        if self._listener is not None:
            return
        settings = self._settings
        self._listener = Listener(
            self.server,
            host=settings.host,
            port=settings.port,
            ssl=tls_context(settings.tls_certificate, settings.tls_key),
        )
        tell(f"listens at {self.address} and waits for {waits_for}")

    def waited_for(self, seconds: float, ready: int, needed: int) -> str:
        """Returns who is waited for, how long, and what they last sent."""
        now, clients = self.server.clock(), list(self.server.clients.values())
        late = sorted((one for one in clients if not one.busy), key=lambda one: one.heard)
        told = [f"{one.say()}, {now - one.heard:.0f} s ago" for one in late[:3]]
        who = "; ".join(told) or "clients"
        more = f" and {len(late) - 3} more" if len(late) > 3 else ""
        here = "1 client is" if len(clients) == 1 else f"{len(clients)} clients are"
        return (
            f"has waited {seconds:.0f} s at {self.address} with {ready} of {needed} fragments; "
            f"{here} here, waits for {who}{more}"
        )

    def counts(self) -> dict[str, int]:
        """Returns the number of clients and what happened to them, as metrics."""
        names = ("reconnects", "duplicates", "late", "truncated", "refused")
        own = {name: self.server.counts[name] for name in names}
        return {
            f"server/{name}": n for name, n in {"clients": len(self.server.clients), **own}.items()
        }

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self._refuse()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self._refuse()

    def _refuse(self) -> Any:
        raise ConfigError(
            "an external simulator is stepped by itself, as a client, not from here; "
            "collect with ExternalCollector, or serve the run."
        )

    def _set_seed(self, seed: int | None) -> None:
        """Does nothing: environments are seeded where they run."""

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Closes the door."""
        if self._listener is not None:
            self._listener.close()
        super().close(raise_if_closed=raise_if_closed)


def tls_context(certificate: str | None, key: str | None) -> ssl.SSLContext | None:
    """Returns what makes a door speak TLS, or None without a certificate.

    Raises:
        ConfigError: files that cannot be read or are none.
    """
    if certificate is None:
        if key is not None:
            raise ConfigError(f"tls_key is {quoted(key)}, expected tls_certificate beside it.")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"tls_certificate is {quoted(certificate)}, which cannot be used "
            f"({error.strerror or error}); give a PEM file, and its key."
        ) from None
    return context
