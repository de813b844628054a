"""Results of a run as leaves for a bitwise comparison: path -> tensor or value."""

from __future__ import annotations

import csv
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

LEFT_OUT = {
    "seconds": "the clock",
    "frames_per_second": "the clock",
    "made_by": "settings as texts, which hold the folder, and versions of packages",
    "signature": "of pickled worlds, by a key that every state folder has of its own",
}
"""Names of entries and columns that may differ between two equal runs, and why."""


def leaves(state: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every tensor, number and text of nested dicts, lists and TensorDicts, but for LEFT_OUT.

    Pickled worlds of MuJoCo are left out, too: they hold timers, and differ between equal runs.
    """
    if isinstance(state, (list, tuple)):
        state = {str(i): one for i, one in enumerate(state)}
    if isinstance(state, Mapping) or hasattr(state, "items"):
        for key, value in state.items():
            if key not in LEFT_OUT:
                yield from leaves(value, f"{path}/{key}" if path else str(key))
    elif isinstance(state, numpy.ndarray):
        yield path, torch.as_tensor(state)
    elif not is_pickle_of_mujoco(state):
        yield path, state.detach().cpu() if isinstance(state, Tensor) else state


def is_pickle_of_mujoco(leaf: Any) -> bool:
    """Whether a leaf is a pickled world of MuJoCo."""
    is_bytes = isinstance(leaf, Tensor) and leaf.dtype == torch.uint8 and leaf.ndim == 1
    return is_bytes and b"mujoco" in as_bytes(leaf)


def digest(leaf: Any) -> str:
    """A hash of a tensor's type, shape and bytes, or of a value's type and text."""
    if isinstance(leaf, Tensor):
        header = f"{leaf.dtype} {tuple(leaf.shape)} ".encode()
        return hashlib.sha256(header + as_bytes(leaf)).hexdigest()
    return hashlib.sha256(f"{type(leaf).__name__} {leaf!r}".encode()).hexdigest()


def as_bytes(tensor: Tensor) -> bytes:
    """A tensor's bits, row by row."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def leaves_of_run(folder: Path) -> dict[str, Any]:
    """All leaves of a run's folder: last checkpoints, stored players, tables and summaries."""
    found: dict[str, Any] = {}
    for file in files_of(folder):
        where = file.relative_to(folder).as_posix()
        found |= dict(leaves(content(file), where))
    return found


def files_of(folder: Path) -> list[Path]:
    """The files to compare: of every folder of checkpoints the last one, the rest as it is."""
    all_files = [file for end in ("pt", "csv", "json") for file in folder.rglob(f"*.{end}")]
    others = [file for file in all_files if file.parent.name != "checkpoints"]
    last = [max(where.glob("*.pt")) for where in folder.rglob("checkpoints")]
    return sorted(others + last)


def content(file: Path) -> Any:
    """Content of a file: a state, the rows of a table, or a summary."""
    if file.suffix == ".pt":
        return torch.load(file, map_location="cpu", weights_only=True)
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".csv":
        return list(csv.DictReader(text.splitlines()))
    return json.loads(text)


def differences(base: Mapping[str, str], head: Mapping[str, str]) -> list[tuple[str, str]]:
    """Paths whose digests are not the same, each with what is the matter."""
    found = []
    for path in dict.fromkeys([*base, *head]):
        if path not in head:
            found.append((path, "only on base"))
        elif path not in base:
            found.append((path, "only on head"))
        elif base[path] != head[path]:
            found.append((path, "differs"))
    return found


def only_moved(base: Mapping[str, str], head: Mapping[str, str]) -> bool:
    """Whether both hold the same bits, under other names."""
    return set(base) != set(head) and Counter(base.values()) == Counter(head.values())


def describe_difference(one: Any, other: Any) -> str:
    """In a few words, how two leaves differ: by how much, or what each of them is."""
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return f"{short_text(one)} on base, {short_text(other)} on head"
    if one.dtype != other.dtype or one.shape != other.shape:
        return f"{described(one)} on base, {described(other)} on head"
    changed = (one != other).sum().item()
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    apart = (one.double() - other.double()).abs().nan_to_num(nan=torch.inf)
    largest = apart.max().item()
    return f"largest difference {largest:.3g}, {changed} of {one.numel()} numbers"


def described(tensor: Tensor) -> str:
    """A tensor's type and shape."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def short_text(leaf: Any) -> str:
    """A value's text, not longer than a few words."""
    text = described(leaf) if isinstance(leaf, Tensor) else repr(leaf)
    return text if len(text) <= 40 else text[:37] + "..."
