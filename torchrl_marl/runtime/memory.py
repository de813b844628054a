"""Device memory, and checks of large allocations."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from torchrl_marl.errors import ConfigError

if TYPE_CHECKING:
    from torch.types import Device

__all__ = ["format_bytes", "is_out_of_memory", "memory_of", "refuse_too_large"]

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")  # limit of a container


def memory_of(device: Device) -> int | None:
    """Returns a device's total memory in bytes; None if unknown.

    Examples:
        >>> memory_of("cpu") > 10**8
        True
    """
    if str(device).startswith("cuda"):
        import torch

        return torch.cuda.get_device_properties(device).total_memory
    try:
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        limit = _CGROUP_LIMIT.read_text().strip() if _CGROUP_LIMIT.is_file() else "max"
    except (AttributeError, OSError, ValueError):
        return None
    return min(there, int(limit)) if limit.isdecimal() else there


def refuse_too_large(size: int, device: Device, what: str, fix: str) -> None:
    """Raises before an allocation that exceeds a device's memory.

    Args:
        size (int): lower bound of the allocation in bytes.
        device (torch.device): device of the allocation.
        what (str): subject of the message.
        fix (str): fix, at the end of the message.

    Raises:
        ConfigError: the allocation exceeds the device's memory; the message names the sizes of
            both.
    """
    there = memory_of(device)
    if there is not None and size > there:
        raise ConfigError(
            f"{what} takes {format_bytes(size)} at least, but {str(device)!r} has "
            f"{format_bytes(there)} of memory; {fix}."
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error of torch, numpy or Python means out of memory."""
    signs = ("out of memory", "can't allocate memory", "cannot allocate memory", "bad_alloc")
    return isinstance(error, MemoryError) or any(sign in str(error).lower() for sign in signs)


def format_bytes(size: int) -> str:
    """Formats a number of bytes.

    Examples:
        >>> format_bytes(512), format_bytes(4_000_000_000_000)
        ('512 B', '4.0 TB')
    """
    units = ["B", "kB", "MB", "GB", "TB", "PB"]
    power = min((len(str(size)) - 1) // 3, len(units) - 1)
    if power == 0:
        return f"{size} B"
    tenths = size // (1000**power // 10)
    return f"{tenths // 10:,}.{tenths % 10} {units[power]}"
