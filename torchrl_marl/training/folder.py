"""Run folders, which are locked on creation to prevent two runs from sharing one."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import sys
import warnings
import weakref
from datetime import datetime
from pathlib import Path

from torchrl_marl.errors import CheckpointError, ConfigError
from torchrl_marl.runtime.naming import file_name
from torchrl_marl.runtime.trust import refuse_links
from torchrl_marl.settings import to_yaml
from torchrl_marl.training.config import TrainConfig, read_run_config, seed_folders
from torchrl_marl.training.origin import SIGNATURE, signed_yaml

if sys.platform != "win32":
    import fcntl

__all__ = ["RunFolder", "check_folder", "has_checkpoint"]

_LOCK = ".lock"
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
_TABLES = ("metrics.csv", "evaluation.csv", "players.csv", "evolution.csv", "learning_curve.png")
_locked_folders: weakref.WeakSet[RunFolder] = weakref.WeakSet()


class RunFolder:
    """Run folder, locked by one training until it is released or the process ends.

    The operating system holds the lock (``flock`` on the file ``.lock``), so a killed process
    leaves no lock behind. On systems without such locks (Windows, some network drives), nothing
    prevents two trainings of the same run.

    Args:
        path (Path): an existing folder.
        kind (str): noun by which messages call the folder.
        writes (bool): whether this process writes; False for ranks other than the first.

    Raises:
        CheckpointError: another training uses the folder, or it cannot be written.
        TrustError: the folder contains a link that leads out of it.
    """

    def __init__(self, path: Path, kind: str = "run folder", *, writes: bool = True) -> None:
        self.path, self.writes = path, writes
        if not writes:
            self.release: weakref.finalize = weakref.finalize(self, str)  # no lock to release
            return
        refuse_links(path, kind)
        lock = path.absolute() / _LOCK
        try:
            descriptor = _lock_file(lock, kind)
        except OSError as error:
            raise CheckpointError(
                f"{kind} {str(path)!r} cannot be written ({error.strerror}); make it "
                "writable, or copy it to a writable place."
            ) from None
        self.release = weakref.finalize(self, _unlock, descriptor, lock)
        _locked_folders.add(self)
        with contextlib.suppress(OSError):  # the lock works even if a full disk prevents this note
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()} {platform.node()}".encode())

    @classmethod
    def new(cls, config: TrainConfig) -> RunFolder:
        """Creates and locks the folder that the settings name, or a new one under ``runs/``.

        Files of a failed start are removed.

        Raises:
            ConfigError: the folder has other content, or cannot be created.
            CheckpointError: another training uses the folder.
        """
        try:
            if config.folder is None:
                path = _make_folder_in_runs(config)
            else:
                check_folder(config)
                path = Path(config.folder)
                path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            where = config.folder or "runs"
            raise ConfigError(
                f"run folder {where!r} cannot be created ({error.strerror}); choose another "
                "folder=..."
            ) from None
        folder = cls(path)
        try:
            check_folder(config)  # again, now that no other process writes there
        except ConfigError:
            folder.release()
            raise
        folder.clear()
        return folder

    def clear(self) -> None:
        """Removes the files of a failed start, except ``config.yaml``."""
        if not self.writes:
            return
        for folder in (self.path, *seed_folders(self.path)):
            if not has_checkpoint(folder):
                for name in _TABLES:
                    (folder / name).unlink(missing_ok=True)
                for part in (*folder.glob("*.part"), *folder.glob("checkpoints/*.part")):
                    part.unlink()

    def give_up(self) -> None:
        """Releases the folder; removes it if it has only files of a failed start."""
        with contextlib.suppress(OSError):
            names = {path.name for path in self.path.iterdir()}
            if self.writes and names <= {"config.yaml", SIGNATURE, _LOCK}:
                for name in names:
                    (self.path / name).unlink()
                self.path.rmdir()
        self.release()


def check_folder(config: TrainConfig) -> None:
    """Refuses a run folder that is not empty, unless it has only files of a failed start.

    Raises:
        ConfigError: the folder exists and is not empty.
    """
    folder = Path(config.folder or "")
    if config.folder is None or not os.path.exists(
        folder
    ):  # False also for a name that is too long
        return
    if folder.is_dir():
        held = {path.name for path in folder.iterdir()} - {_LOCK, "config.yaml.part"}
        if not held or _start_failed(folder):
            return
    resume = f", or resume it: torchrl-marl train --resume {config.folder}"
    raise ConfigError(
        f"run folder {config.folder!r} exists; choose another folder=..."
        + (resume if (folder / "config.yaml").is_file() else ".")
    )


def has_checkpoint(folder: Path) -> bool:
    """Returns whether a run folder has a checkpoint."""
    return any((folder / "checkpoints").glob("iteration_*.pt"))


def _start_failed(folder: Path) -> bool:
    """Returns whether a run started in a folder and stopped before its first checkpoint.

    A ``config.yaml`` counts only if a run has written it, so a user's recipe is never replaced.
    """
    if has_checkpoint(folder) or (folder / "summary.json").exists():
        return False
    try:
        text = (folder / "config.yaml").read_text(encoding="utf-8")
        read = read_run_config(folder)
        if any((folder / name).exists() for name in read.stages):
            return False
        return text in (to_yaml(read), signed_yaml(read))
    except (CheckpointError, OSError, UnicodeDecodeError):
        return False


def _make_folder_in_runs(config: TrainConfig) -> Path:
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    name, environment = file_name(config.recipe), file_name(Path(config.env.name).stem)
    if environment not in name:
        name = f"{name}_{environment}"
    base = Path("runs") / f"{name}_seed{config.seed}_{stamp}"
    base.parent.mkdir(parents=True, exist_ok=True)
    folder, n = base, 1
    while True:
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
        n += 1
        folder = base.with_name(f"{base.name}_{n}")


def _lock_file(lock: Path, kind: str) -> int:
    """Locks a file, and returns its descriptor.

    Raises:
        CheckpointError: another process holds the lock.
    """
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | _NO_FOLLOW, 0o666)
        if _is_held_elsewhere(descriptor, lock.parent):
            owner = os.pread(descriptor, 200, 0).decode(errors="replace")
            os.close(descriptor)
            raise CheckpointError(
                f"{kind} {str(lock.parent)!r} is in use by {_describe_owner(owner)}; wait for its "
                "end, or stop it, and try again."
            )
        with contextlib.suppress(FileNotFoundError):
            same = os.path.samestat(lock.lstat(), held := os.fstat(descriptor))
            if same and held.st_nlink < 2:
                return descriptor
            if same:
                lock.unlink()  # it is a hard link, and the other file must not be changed
        os.close(descriptor)  # the previous holder has just removed it


def _unlock(descriptor: int, lock: Path) -> None:
    with contextlib.suppress(OSError):
        lock.unlink()
    os.close(descriptor)


def _is_held_elsewhere(descriptor: int, path: Path) -> bool:
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return True
        warnings.warn(
            f"run folder {str(path)!r} cannot be locked ({error.strerror}); do not start "
            "two trainings there at the same time.",
            stacklevel=5,
        )
    return False


def _describe_owner(owner: str) -> str:
    process, _, host = owner.partition(" ")
    if process == str(os.getpid()) and host == platform.node():
        return "another training of this process"
    return f"process {process} on {host}" if host else "another process"


def _release_in_child() -> None:
    # A forked process shares the lock of its parent, and may outlive it.
    for folder in list(_locked_folders):
        found = folder.release.detach()
        if found is not None:
            os.close(found[2][0])


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)
