"""Checkpoints: atomic writing, checksums, and reading with a limit on memory."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickletools
import re
import struct
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from torchrl_marl.errors import CheckpointError, UserError
from torchrl_marl.learners.learner import Learner
from torchrl_marl.training.files import explain_write_errors, frames_of, open_atomically

__all__ = [
    "all_checkpoints",
    "append_checksum",
    "describe_damage",
    "explain_misfit",
    "latest_checkpoint",
    "leaves",
    "load_at",
    "load_checkpoint",
    "load_latest",
    "load_learners",
    "memory_error",
    "read_tensors",
    "read_with_checksum",
    "save_checkpoint",
    "set_aside_later",
    "unpacked_size_error",
]

_CHECKSUM_PREFIX = b"sha256:"
_CHECKSUM_LENGTH = len(_CHECKSUM_PREFIX) + 64
_CHUNK = 1 << 20


def append_checksum(file: IO[bytes]) -> None:
    """Appends a checksum to a file, computed from the file's content.

    Args:
        file (file): a zip file without a comment, open for reading and writing.
    """
    # A zip file ends with the length of its comment.
    file.seek(-2, os.SEEK_END)
    file.write(struct.pack("<H", _CHECKSUM_LENGTH))
    length = file.tell()
    file.write(_CHECKSUM_PREFIX + _checksum(file, length))


def describe_damage(path: Path) -> str | None:
    """Returns a description of a file's damage, or None if the file is undamaged.

    Files of version 0.1 have no checksum from :func:`append_checksum`; for them, the checksums of
    the entries of the zip file are checked.

    Args:
        path (Path): a zip file.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        length = max(0, file.seek(0, os.SEEK_END) - _CHECKSUM_LENGTH)
        file.seek(length)
        end = file.read()
        if end.startswith(_CHECKSUM_PREFIX):
            whole = end[len(_CHECKSUM_PREFIX) :] == _checksum(file, length)
            return None if whole else "its checksum differs"
        return _damage_of_entries(file)


def _damage_of_entries(file: IO[bytes]) -> str | None:
    try:
        with zipfile.ZipFile(file) as archive:
            if archive.comment:
                return "its checksum is broken"
            excess_size = unpacked_size_error(archive, file.seek(0, os.SEEK_END))
            if excess_size is not None:
                return excess_size
            broken = archive.testzip()
    except Exception as error:  # zipfile and zlib may raise any error on damaged fields
        return f"it is not a complete zip file ({type(error).__name__})"
    return None if broken is None else f"the checksum of its entry {broken!r} differs"


def unpacked_size_error(archive: zipfile.ZipFile, size: int) -> str | None:
    """Returns an error text if a zip file is smaller than its unpacked content, else None.

    Args:
        archive (ZipFile): the opened zip file.
        size (int): size of the file in bytes.
    """
    entries = archive.infolist()
    if any(one.compress_type != zipfile.ZIP_STORED for one in entries):
        return "its entries are compressed, expected stored ones"
    total = sum(one.file_size for one in entries)
    more = total > size
    return f"its entries have {total:,} bytes, expected at most its own {size:,}" if more else None


def _checksum(file: IO[bytes], length: int) -> bytes:
    """Returns the SHA-256 of the first ``length`` bytes as text; moves the file position there."""
    file.seek(0)
    found = hashlib.sha256()
    while length > 0:
        chunk = file.read(min(_CHUNK, length))
        if not chunk:
            break
        found.update(chunk)
        length -= len(chunk)
    return found.hexdigest().encode()


# Names that ``torch.save`` writes for tensors and containers. None of them allocates extra memory.
_ALLOWED_NAMES = re.compile(
    r"collections OrderedDict|_codecs encode|(__builtin__|builtins) set"
    r"|torch\._utils _rebuild_(tensor_v2|parameter)"
    r"|torch (\w+Storage|Size|device|b?float\d+|u?int\d+|bool|complex\d+)"
)
_SPARE_BYTES, _SPARE_VALUES = 64 << 20, 1_000_000  # in addition to the size of the file
_MEMORY_FACTOR = 4


def memory_error(path: Path) -> str | None:
    """Returns an error text if reading a zip file would need too much memory, else None.

    Args:
        path (Path): a zip file, which is not unpacked.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            larger = unpacked_size_error(archive, path.stat().st_size)
            if larger is not None:
                return larger
            entries = archive.infolist()
            named = [one for one in entries if one.filename.endswith("/data.pkl")]
            known = (_find_unknown_name(archive.read(one)) for one in named)
            unknown = next((name for name in known if name is not None), None)
    except OSError:
        raise
    except Exception as error:  # zipfile and pickletools may raise any error on damaged fields
        return f"it is not a complete zip file ({type(error).__name__})"
    return None if unknown is None else f"it holds {unknown!r}, expected tensors, numbers and texts"


def read_tensors(path: Path, device: torch.device | str = "cpu") -> Any:
    """Reads tensors from a file without running code; the file's size limits their memory.

    Args:
        path (Path): a file that passes :func:`memory_error`.
        device (torch.device): device of the tensors.

    Raises:
        ValueError: the tensors or containers in the file are larger than its size allows.
    """
    state = torch.load(path, map_location=device, weights_only=True)
    size = path.stat().st_size
    most = _MEMORY_FACTOR * size + _SPARE_BYTES
    total = 0
    for name, tensor in leaves(state, size + _SPARE_VALUES):
        total += tensor.numel() * tensor.element_size()
        if total > most:
            raise ValueError(
                f"its tensors up to {name} have {total:,} bytes, expected at most {most:,} in a "
                f"file of {size:,}"
            )
    return state


def read_with_checksum(path: Path, device: torch.device | str = "cpu") -> Any:
    """Reads a file without running code, after checking its checksum and size.

    Args:
        path (Path): a file with a checksum from :func:`append_checksum`, or a file of version 0.1.
        device (torch.device): device of the tensors.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is damaged or too large.
    """
    found = describe_damage(path) or memory_error(path)
    if found is not None:
        raise ValueError(found)
    try:
        return read_tensors(path, device)
    except ValueError:
        raise
    except Exception as error:  # torch may raise any error on foreign files
        why = f"torch.load raises {type(error).__name__}, expected tensors, numbers and texts"
        raise ValueError(why) from None


def leaves(value: Any, most: int | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors in nested containers, with their dotted names.

    Args:
        value: nested mappings, lists and tuples.
        most (int, optional): largest number of values to visit.

    Raises:
        ValueError: there are more than ``most`` values, for example because containers contain each
            other.
    """
    waiting, seen = [("", value)], 0
    while waiting:
        name, one = waiting.pop()
        seen += 1
        if isinstance(one, Tensor):
            yield name.removeprefix("."), one
        elif isinstance(one, Mapping):
            waiting += [(f"{name}.{key}", part) for key, part in one.items()]
        elif isinstance(one, (list, tuple)):
            waiting += [(f"{name}.{i}", part) for i, part in enumerate(one)]
        if most is not None and seen + len(waiting) > most:
            raise ValueError(f"it holds more than {most:,} values")


def _find_unknown_name(pickled: bytes) -> str | None:
    """Returns a name to which a pickle refers although tensors do not need it, or None."""
    for code, argument, _ in pickletools.genops(pickled):
        if code.name == "GLOBAL" and not _ALLOWED_NAMES.fullmatch(str(argument)):
            return str(argument).replace(" ", ".")
    return None


_FORMAT = 1
_FILE_NAME = re.compile(r"iteration_(\d+)\.pt")
_ENTRY_TYPES: dict[str, type | tuple[type, ...]] = {
    "iteration": int,
    "agent_frames": int,
    "seconds": (int, float),
    "summary": dict,
    "learners": list,
    "collector": dict,
    "tracker": dict,
    "random": dict,
}


class BrokenCheckpointError(CheckpointError):
    """A checkpoint file that is damaged, or a file that is not a checkpoint."""

    def __init__(self, path: Path, reason: str) -> None:
        earlier = [
            p.name
            for p in all_checkpoints(path.parent.parent)
            if _iteration_of(p) < _iteration_of(path)
        ]
        fix = f"delete it to resume from {earlier[-1]}" if earlier else "train the run again"
        super().__init__(f"checkpoint {str(path)!r} is broken or half-written ({reason}); {fix}.")
        self.reason = reason


def save_checkpoint(folder: Path, iteration: int, state: dict[str, Any], keep: int) -> Path:
    """Writes ``checkpoints/iteration_<n>.pt``, and keeps only the latest ``keep`` checkpoints.

    Args:
        folder (Path): folder of the run.
        iteration (int): number of the last finished iteration.
        state (dict): tensors, numbers, strings and containers of them.
        keep (int): number of checkpoints to keep, including this one.

    Raises:
        WriteError: the disk is full, or the folder is read-only; earlier checkpoints are kept.
    """
    checkpoints = folder / "checkpoints"
    path = checkpoints / f"iteration_{iteration:06d}.pt"
    with explain_write_errors(path):
        checkpoints.mkdir(parents=True, exist_ok=True)
        for stale in checkpoints.glob("*.part"):  # left behind by a killed process
            stale.unlink()
    with open_atomically(path, "w+b") as file:
        torch.save({"format": _FORMAT, **state}, file)
        append_checksum(file)
    for old in all_checkpoints(folder)[: -max(keep, 1)]:
        old.unlink()
    return path


def all_checkpoints(folder: Path) -> list[Path]:
    """Returns the checkpoints of a run, with the latest last."""
    found = (folder / "checkpoints").glob("iteration_*.pt")
    return sorted((path for path in found if _FILE_NAME.fullmatch(path.name)), key=_iteration_of)


def latest_checkpoint(folder: Path) -> Path:
    """Returns the latest complete checkpoint of a run.

    Raises:
        CheckpointError: the run has no checkpoint yet.
    """
    found = all_checkpoints(folder)
    if not found:
        raise CheckpointError(
            f"run {str(folder)!r} has no checkpoint yet; train it: torchrl-marl train --resume "
            f"{folder}, or, if it was trained and its checkpoints are lost, in another folder."
        )
    return found[-1]


def load_latest(folder: Path, *, resuming: bool = False) -> tuple[Path, dict[str, Any]]:
    """Loads the latest undamaged checkpoint of a run, and warns about damaged ones.

    Args:
        folder (Path): folder of the run.

    Keyword Args:
        resuming (bool): True if the run is trained on. Only then is a checkpoint from before the
            first frame used instead of a damaged one.

    Returns:
        Path, dict: the file, and its content with all tensors on the CPU.

    Raises:
        CheckpointError: the run has no checkpoint, only damaged ones, or only one from before the
            first frame besides damaged ones.
    """
    latest_checkpoint(folder)
    broken: dict[str, BrokenCheckpointError] = {}
    for path in reversed(all_checkpoints(folder)):
        try:
            state = load_checkpoint(path)
            _check_entries(path, state)
        except BrokenCheckpointError as error:
            broken[path.name] = error
            continue
        if broken:
            _warn_of_broken(folder, broken, path, state["collector"]["frames"], resuming)
        return path, state
    if len(broken) == 1:
        raise next(iter(broken.values()))
    names = ", ".join(f"{name} ({error.reason})" for name, error in broken.items())
    raise CheckpointError(
        f"all checkpoints of run {str(folder)!r} are broken: {names}; train the run again."
    )


def _warn_of_broken(
    folder: Path,
    broken: Mapping[str, BrokenCheckpointError],
    path: Path,
    frames: int,
    resuming: bool,
) -> None:
    """Warns that an earlier checkpoint is used; refuses one from before the first frame."""
    names = " and ".join(f"{name} ({error.reason})" for name, error in broken.items())
    what = f"run {str(folder)!r}: broken or half-written: {names}"
    if not frames and not resuming:
        raise CheckpointError(
            f"{what}; {path.name}, the previous checkpoint, was saved before the first frame, so "
            f"it is not used; to start over from it: torchrl-marl train --resume {folder}."
        )
    reached = max(frames, frames_of(folder))
    warnings.warn(
        f"{what}; {path.name}, the previous checkpoint, of {frames:,} frames is used instead, "
        f"{reached - frames:,} frames behind the run's last.",
        stacklevel=3,
    )


def load_at(folder: Path, frames: int) -> tuple[Path, dict[str, Any]]:
    """Loads the checkpoint that a run wrote at a number of frames.

    Args:
        folder (Path): folder of the run.
        frames (int): number of environment steps of the run.

    Returns:
        Path, dict: the file, and its content with all tensors on the CPU.

    Raises:
        CheckpointError: the run has no undamaged checkpoint of these frames; the message lists
            those that it has.
    """
    latest_checkpoint(folder)
    found: list[str] = []
    for path in reversed(all_checkpoints(folder)):
        with contextlib.suppress(BrokenCheckpointError):
            state = load_checkpoint(path)
            _check_entries(path, state)
            if state["collector"]["frames"] == frames:
                return path, state
            found.append(f"@{state['collector']['frames']}")
    raise CheckpointError(
        f"run {str(folder)!r} has no checkpoint of {frames} frames, expected one of "
        f"{', '.join(found[::-1])}; a run keeps the last checkpoint.keep ones."
    )


def load_checkpoint(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Reads a checkpoint after checking its checksum.

    Raises:
        CheckpointError: the file is damaged or incomplete, or from another version.
    """
    try:
        state = read_with_checksum(path, device)
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint {str(path)!r}; check the path.") from None
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {str(path)!r} cannot be read ({error.strerror}); allow it to be read."
        ) from None
    except ValueError as error:
        raise BrokenCheckpointError(path, str(error)) from None
    if not isinstance(state, dict) or not isinstance(state.get("format"), int):
        raise BrokenCheckpointError(path, f"it holds {_describe(state)}, expected a run's state")
    if state["format"] != _FORMAT:
        raise CheckpointError(
            f"checkpoint {str(path)!r} has format {state['format']}, expected {_FORMAT}; "
            "it was written by another version of torchrl_marl."
        )
    wrong = _first_non_finite(state.get("learners"), "learners")
    if wrong is not None:
        raise BrokenCheckpointError(path, f"{wrong} is not finite")
    return state


def load_learners(learners: Sequence[Learner], states: Sequence[dict[str, Any]]) -> None:
    """Loads the learners' states from a checkpoint.

    Raises:
        CheckpointError: groups or networks differ from those of the checkpoint.
    """
    try:
        for learner, state in zip(learners, states, strict=True):
            settings = _param_groups(learner)
            learner.load_state_dict(state)
            if _element_types(_param_groups(learner)) != _element_types(settings):
                raise ValueError("other settings of the optimizer")
            _check_moments(getattr(learner, "optimizer", None))
    except UserError:
        raise
    except Exception:  # torch may raise any error on a foreign state
        raise CheckpointError(
            "the checkpoint does not fit the run's config.yaml or environment: other groups or "
            "networks of another size; restore those that it was trained with."
        ) from None


@contextlib.contextmanager
def explain_misfit(path: Path) -> Iterator[None]:
    """Context that turns errors into the message that a checkpoint does not fit the run.

    Raises:
        CheckpointError: any error occurs in the context; the message names the file and the error.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise CheckpointError(
            f"checkpoint {str(path)!r} does not fit the run's config.yaml or environment ({what}); "
            "restore those that it was trained with."
        ) from error


def set_aside_later(path: Path) -> None:
    """Renames damaged checkpoints that are newer than the checkpoint from which a run resumes.

    Otherwise the damaged checkpoints would count as the latest ones, and the checkpoints that the
    resumed run writes would be removed instead.
    """
    for later in all_checkpoints(path.parent.parent):
        if _iteration_of(later) > _iteration_of(path):
            with explain_write_errors(later):
                later.replace(later.with_name(f"{later.name}.broken"))


def _iteration_of(path: Path) -> int:
    found = _FILE_NAME.fullmatch(path.name)
    return -1 if found is None else int(found[1])


def _check_entries(path: Path, state: Mapping[str, Any]) -> None:
    for name, kind in _ENTRY_TYPES.items():
        if not isinstance(state.get(name), kind):
            found = _describe(state.get(name)) if name in state else "nothing"
            raise BrokenCheckpointError(path, f"its entry {name!r} holds {found}")
    if not isinstance(state["collector"].get("frames"), int):
        raise BrokenCheckpointError(path, "its entry 'collector' holds no number of frames")


def _describe(value: Any) -> str:
    if isinstance(value, dict):
        keys = ", ".join(map(repr, list(value)[:3]))
        return f"a dict of {len(value)} entries ({keys}...)" if value else "an empty dict"
    return f"a {type(value).__name__}"


def _first_non_finite(value: Any, name: str) -> str | None:
    """Returns the dotted name of a tensor that holds NaN or infinity, or None."""
    names = (key for key, tensor in leaves(value) if not _is_finite(tensor))
    found = next(names, None)
    return None if found is None else f"{name}.{found}"


def _is_finite(tensor: Tensor) -> bool:
    """Returns whether a tensor is finite; checks only its minimum and maximum, to avoid a copy."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
        return True
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    distinct = real[tuple(0 if step == 0 else slice(None) for step in real.stride())]
    return all(bool(torch.isfinite(extreme)) for extreme in torch.aminmax(distinct))


def _param_groups(learner: Learner) -> list[dict[str, Any]]:
    """Returns the settings of a learner's optimizer, if it has one."""
    optimizer = getattr(learner, "optimizer", None)
    return [] if optimizer is None else optimizer.state_dict()["param_groups"]


def _check_moments(optimizer: torch.optim.Optimizer | None) -> None:
    """Refuses moments with shapes other than the parameters'; optimizers do not check this."""
    state = {} if optimizer is None else optimizer.state
    for parameter, moments in state.items():
        for moment in moments.values():
            if moment.shape not in ((), parameter.shape) or not moment.is_floating_point():
                raise ValueError("moments of other parameters")


def _element_types(value: Any) -> Any:
    """Returns a value with every element replaced by a description of its type."""
    if isinstance(value, dict):
        return {key: _element_types(part) for key, part in value.items()}
    return (
        [_element_types(part) for part in value]
        if isinstance(value, (list, tuple))
        else type(value)
    )
