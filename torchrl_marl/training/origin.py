"""Origin of a run's world: other people's code runs only with the user's consent.

The settings of a run name its world. A known library's is just made; a module of one's own is
imported, and whoever sends a run can send a module of that name with it.
"""

from __future__ import annotations

from pathlib import Path

from torchrl_marl.envs.config import EnvConfig
from torchrl_marl.envs.own.foreign import foreign_code
from torchrl_marl.errors import TrustError
from torchrl_marl.training.files import whole_file
from torchrl_marl.trust import is_own, signature

__all__ = ["SIGNATURE", "check_world", "sign_world"]

SIGNATURE = "world.signature"
"""File of a run that tells that this user had this world trained."""
_WORLD = b"world of a run"  # the text in front of the signed bytes


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
    if code is None or trust:
        return
    try:
        given = (folder / SIGNATURE).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        given = None
    if not is_own(given, _WORLD, code.encode()):
        raise TrustError(
            f"run {str(folder)!r} would import {code}, whose code then runs, and was not trained "
            "by you on this machine with that code; if you trust it, add --trust (in Python: "
            "trust=True, or torchrl_marl.trust.trusting() around it)."
        )


def sign_world(folder: Path, env: EnvConfig) -> None:
    """Signs in a run's folder that its user had this world trained.

    Raises:
        WriteError: a full disk or a read-only folder.
    """
    code = foreign_code(env)
    if code is not None:
        with whole_file(folder / SIGNATURE) as file:
            file.write(signature(_WORLD, code.encode()))
