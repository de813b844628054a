"""Tensors of a file, read within limits: a small file of a stranger's takes little memory.

A zip file may hold more than its size where it is compressed or where its entries overlap, a tensor
more than its storage where it is expanded, and a list more than its entries where they are shared.
"""

from __future__ import annotations

import pickletools
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchrl_marl.training.sealing import swollen

__all__ = ["excess", "leaves", "read_tensors"]

# Which ``torch.save`` writes for tensors, and what holds them. None takes more than it is given.
_KNOWN = re.compile(
    r"collections OrderedDict|_codecs encode|(__builtin__|builtins) set"
    r"|torch\._utils _rebuild_(tensor_v2|parameter)"
    r"|torch (\w+Storage|Size|device|b?float\d+|u?int\d+|bool|complex\d+)"
)
_SPARE_BYTES, _SPARE_VALUES = 64 << 20, 1_000_000  # beside what the size of a file allows
_FACTOR = 4


def excess(path: Path) -> str | None:
    """Returns why a zip file takes more memory than it has bytes, or None where it does not.

    Args:
        path (Path): a file, which is not unpacked.

    Raises:
        OSError: it cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            larger = swollen(archive, path.stat().st_size)
            if larger is not None:
                return larger
            entries = archive.infolist()
            named = [one for one in entries if one.filename.endswith("/data.pkl")]
            known = (_unknown(archive.read(one)) for one in named)
            unknown = next((name for name in known if name is not None), None)
    except OSError:
        raise
    except Exception as error:  # zipfile and pickletools may raise anything at damaged fields
        return f"it is no whole zip file ({type(error).__name__})"
    return None if unknown is None else f"it holds {unknown!r}, expected tensors, numbers and texts"


def read_tensors(path: Path, device: torch.device | str = "cpu") -> Any:
    """Reads a file that holds no more than its size allows; no code runs.

    Args:
        path (Path): a file in which :func:`excess` finds nothing.
        device (torch.device): where tensors are.

    Raises:
        ValueError: tensors or containers that are larger than the file.
    """
    state = torch.load(path, map_location=device, weights_only=True)
    size = path.stat().st_size
    most = _FACTOR * size + _SPARE_BYTES
    total = 0
    for name, tensor in leaves(state, size + _SPARE_VALUES):
        total += tensor.numel() * tensor.element_size()
        if total > most:
            raise ValueError(
                f"its tensors up to {name} have {total:,} bytes, expected at most {most:,} in a "
                f"file of {size:,}"
            )
    return state


def leaves(value: Any, most: int | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors within containers, with their dotted names.

    Args:
        value: mappings, lists and tuples, however deep.
        most (int, optional): values after which it is too many.

    Raises:
        ValueError: more values than that, as where containers hold each other.
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


def _unknown(pickled: bytes) -> str | None:
    """Returns what a pickle names that is no part of tensors, or None."""
    for code, argument, _ in pickletools.genops(pickled):
        if code.name == "GLOBAL" and not _KNOWN.fullmatch(str(argument)):
            return str(argument).replace(" ", ".")
    return None
