"""Origin of a run: other people's code, machines and services only with the user's consent.

The settings of a run name its world. A known library's is just made; a module of one's own is
imported, and whoever sends a run can send a module of that name with it. They may name a cluster,
too, where to listen, and services that figures are sent to.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

from torchrl_marl.envs.config import EnvConfig
from torchrl_marl.envs.own.foreign import foreign_code
from torchrl_marl.errors import TrustError
from torchrl_marl.settings import to_yaml
from torchrl_marl.training.config import TrainConfig
from torchrl_marl.training.files import whole_file
from torchrl_marl.trust import is_own, signature

__all__ = [
    "SIGNATURE",
    "Named",
    "check_origin",
    "check_world",
    "named_by",
    "sign_run",
    "signed_yaml",
]

SIGNATURE = "world.signature"
"""File of a run that tells that this user had it trained with this world and these addresses."""
_COMMENT = "# signature "
_HERE = ("127.0.0.1", "localhost", "::1")
_FILES = ("token_file", "tls_certificate", "tls_key")
_TRUST = (
    "if you trust it, add --trust (in Python: trust=True, or torchrl_marl.trust.trusting() "
    "around it)"
)


class Named(NamedTuple):
    """What settings name outside of this package and of the run's folder."""

    key: str
    """The setting; ``env`` for the code of a world."""
    deed: str
    """What is done with it, in a sentence."""
    parts: tuple[bytes, ...]
    """What is signed."""

    @property
    def signature(self) -> str:
        """This user's signature."""
        return signature(*self.parts)

    def is_signed(self, given: Iterable[str]) -> bool:
        """Returns whether this user's signature is among those, or everything is trusted."""
        return any(is_own(one, *self.parts) for one in ["", *given])


def named_by(config: TrainConfig) -> list[Named]:
    """Returns what settings name: code of no known library, a cluster, addresses, services."""
    found = []
    code = foreign_code(config.env)
    if code is not None:
        found.append(_code(code))
    at = config.distributed
    if at.backend == "ray" and at.address is not None:
        found.append(_address("distributed.address", at.address, "connect to the Ray cluster"))
    if config.env.library == "external":
        host = config.env.kwargs.get("host")
        if host is not None and host not in _HERE:
            found.append(_address("env.kwargs.host", host, "listen at"))
        for name in _FILES:
            if file := config.env.kwargs.get(name):
                found.append(_address(f"env.kwargs.{name}", file, f"read the {name} from"))
    services = {"wandb": True, "mlflow": "MLFLOW_TRACKING_URI" in os.environ}
    for name in config.logging.backends:
        if services.get(name):
            found.append(_address("logging.backends", name, "send its figures to"))
    return found


def check_world(folder: Path, env: EnvConfig, trust: bool = False) -> None:
    """Refuses to import a world that another user's run names.

    Runs that this user trained on this machine pass, as long as the module lies where it did;
    so does everything within :func:`torchrl_marl.trust.trusting`.

    Args:
        folder (Path): the run's.
        env (EnvConfig): its world.
        trust (bool): the user says that it may.

    Raises:
        TrustError: saying what would be imported.
    """
    code = foreign_code(env)
    if code is not None and not trust:
        _refuse([_code(code)], folder / "config.yaml", f"run {str(folder)!r}")


def check_origin(
    file: Path,
    config: TrainConfig,
    *,
    given: Collection[str] = (),
    own_env: bool = False,
    only: str = "",
) -> None:
    """Refuses what the settings of another user's run name: code, clusters, addresses, services.

    Args:
        file (Path): with the settings: a run's ``config.yaml``, or a copy of one.
        config (TrainConfig): what was read, with what the user has changed.

    Keyword Args:
        given (collection of str): dotted settings that the user has given.
        own_env (bool): the user brings the environment.
        only (str): look at settings alone that begin so.

    Raises:
        TrustError: naming the setting, and what would be done.
    """
    own = (*given, *(["env"] if own_env or _chosen(given) else ()))
    named = [one for one in named_by(config) if one.key.startswith(only)]
    named = [one for one in named if one.key not in own]
    what = f"run {str(file.parent)!r}" if file.name == "config.yaml" else f"recipe {str(file)!r}"
    _refuse(named, file, what)


def _chosen(given: Collection[str]) -> bool:
    """Returns whether the user has named the world."""
    return "env.library" in given or "env.name" in given


def sign_run(folder: Path, config: TrainConfig) -> None:
    """Signs in a run's folder that its user had it trained with what its settings name.

    Raises:
        WriteError: a full disk or a read-only folder.
    """
    named = named_by(config)
    if named:
        with whole_file(folder / SIGNATURE) as file:
            file.write("\n".join(one.signature for one in named))


def signed_yaml(config: TrainConfig) -> str:
    """Returns settings as YAML; comments at its end sign what they name, if anything."""
    lines = (f"{_COMMENT}{one.signature}\n" for one in named_by(config))
    return to_yaml(config) + "".join(lines)


def _refuse(named: Iterable[Named], file: Path, what: str) -> None:
    given = _signatures(file)
    for one in named:
        if one.is_signed(given):
            continue
        if one.key == "env":
            raise TrustError(
                f"{what} would {one.deed}, whose code then runs, and was not trained by you on "
                f"this machine with that code; {_TRUST}."
            )
        raise TrustError(
            f"{what} would {one.deed}, as its {one.key} says, and was not trained by you on this "
            f"machine with that; give {one.key}=... yourself, or, {_TRUST}."
        )


def _signatures(file: Path) -> list[str]:
    """Returns the signatures in a file of settings, and in the one beside it."""
    found = []
    for path, head in ((file.parent / SIGNATURE, ""), (file, _COMMENT)):
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            continue
        found += [line.removeprefix(head) for line in lines if line.startswith(head)]
    return found


def _code(code: str) -> Named:
    return Named("env", f"import {code}", (b"world of a run", code.encode()))


def _address(key: str, value: object, deed: str) -> Named:
    parts = (b"address of a run", key.encode(), str(value).encode())
    return Named(key, f"{deed} {str(value)!r}", parts)
