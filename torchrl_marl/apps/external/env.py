"""Environment that receives its steps from external simulators."""

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

__all__ = ["ExternalEnv", "print_notice"]

with warnings.catch_warnings():  # in a notebook without ipywidgets
    warnings.simplefilter("ignore")
    from tqdm.auto import tqdm


def print_notice(text: str) -> None:
    """Prints a message above a progress bar."""
    tqdm.write(f"torchrl_marl: {text}.", file=sys.stderr)


_POLL_SECONDS = 0.1  # between two checks for Ctrl-C


class ExternalEnv(DeclaredEnv):
    """Environment of external simulators: clients that send observations and receive actions.

    It has specs and groups like any environment, but it cannot be stepped: the clients decide when
    a step happens. :class:`~torchrl_marl.apps.external.ExternalCollector` collects their steps into
    batches. Without ``agents``, the environment waits until the first client declares them.

    Args:
        name (str): name of the environment, for messages.

    Keyword Args:
        num_envs (int): number E of rows in a batch; each row is a fragment of one client's steps.
        seed (int, optional): ignored, since each simulator seeds itself.
        device (torch.device): device of the batches and the policy.
        **arguments: fields of :class:`~torchrl_marl.apps.external.library.ExternalArguments`.

    Attributes:
        server (ActionServer): server that answers the clients.
        hold (bool): whether clients wait during an update.
        patience (float): seconds between two printed messages about slow clients.

    Raises:
        ConfigError: invalid agents, a port in use, or a host without a token.
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
            given = self._wait_for_declaration()
        given.check_size(settings.max_message_bytes)
        self.declared = given
        super().__init__(device=torch.device(device), batch_size=(num_envs,))
        self.is_closed = False
        self._set_declaration(given.declaration(name, num_envs))

    def _wait_for_declaration(self) -> Declared:
        """Waits for the first client, and returns the agents that it declares."""
        self.open("a client that declares its agents")
        began = since = time.monotonic()
        try:
            while self.server.declared is None:
                self.listener.raise_error()
                time.sleep(_POLL_SECONDS)
                if time.monotonic() - since > self.patience:
                    since = time.monotonic()
                    waited = f"{since - began:.0f} s"
                    print_notice(f"has waited {waited} for a first client at {self.address}")
        except BaseException:
            self.listener.close()
            raise
        return self.server.declared

    @property
    def listener(self) -> Listener:
        """The listener, once the port is open."""
        assert self._listener is not None, "open() comes first"
        return self._listener

    @property
    def address(self) -> str:
        """Host and port for clients."""
        return f"{self.listener.host}:{self.listener.port}"

    def open(self, waits_for: str = "clients") -> None:
        """Opens the port and prints the address; a second call does nothing.

        Args:
            waits_for (str): what the environment waits for, as words for the printed message.
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
        print_notice(f"listens at {self.address} and waits for {waits_for}")

    def waiting_message(self, seconds: float, ready: int, needed: int) -> str:
        """Returns a text about slow clients: the time waited, and each client's last message."""
        now, clients = self.server.clock(), list(self.server.clients.values())
        late = sorted((one for one in clients if not one.busy), key=lambda one: one.last_message)
        texts = [f"{one.describe()}, {now - one.last_message:.0f} s ago" for one in late[:3]]
        names = "; ".join(texts) or "clients"
        more = f" and {len(late) - 3} more" if len(late) > 3 else ""
        count = "1 client is" if len(clients) == 1 else f"{len(clients)} clients are"
        return (
            f"has waited {seconds:.0f} s at {self.address} with {ready} of {needed} fragments; "
            f"{count} connected, waits for {names}{more}"
        )

    def counts(self) -> dict[str, int]:
        """Returns the numbers of clients, reconnects, duplicates and refusals, as metrics."""
        names = ("reconnects", "duplicates", "late", "truncated", "refused")
        own = {name: self.server.counts[name] for name in names}
        return {
            f"server/{name}": n for name, n in {"clients": len(self.server.clients), **own}.items()
        }

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self._raise_not_steppable()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self._raise_not_steppable()

    def _raise_not_steppable(self) -> Any:
        raise ConfigError(
            "an external environment has no step or reset: its clients own the clock; "
            "collect with ExternalCollector, or serve the run."
        )

    def _set_seed(self, seed: int | None) -> None:
        """Does nothing, since each simulator seeds itself."""

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Closes the port."""
        if self._listener is not None:
            self._listener.close()
        super().close(raise_if_closed=raise_if_closed)


def tls_context(certificate: str | None, key: str | None) -> ssl.SSLContext | None:
    """Returns the TLS context of a server, or None without a certificate.

    Raises:
        ConfigError: a file cannot be read, or is not a certificate or a key.
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
            f"({error.strerror or error}); give a PEM file and its key."
        ) from None
    return context
