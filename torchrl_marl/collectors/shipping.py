"""Batches and weights as numpy arrays, which Ray hands over without a copy."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

__all__ = ["from_arrays", "pack", "to_arrays", "unpack"]


def to_arrays(tensors: Mapping[Any, Tensor]) -> dict[Any, tuple[np.ndarray, bool]]:
    """Returns tensors as arrays, and whether each holds ``bfloat16``, which numpy has not.

    Examples:
        >>> sent = to_arrays({"a": torch.ones(2), "b": torch.ones(2, dtype=torch.bfloat16)})
        >>> [x.dtype for x in from_arrays(sent).values()]
        [torch.float32, torch.bfloat16]
    """
    return {key: _to_array(value) for key, value in tensors.items()}


def from_arrays(arrays: Mapping[Any, tuple[np.ndarray, bool]]) -> dict[Any, Tensor]:
    """Returns the tensors of arrays. They are views: of Ray's they must not be written to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writ")
        found = {key: (torch.from_numpy(array), half) for key, (array, half) in arrays.items()}
    return {key: x.view(torch.bfloat16) if half else x for key, (x, half) in found.items()}


def pack(batch: TensorDictBase) -> dict[str, Any]:
    """Returns a TensorDict as arrays, with the batch sizes of all that is nested in it.

    Examples:
        >>> batch = TensorDict({"cars": TensorDict({"x": torch.ones(2, 3)}, [2, 3])}, [2])
        >>> unpack(pack(batch))["cars"].batch_size
        torch.Size([2, 3])
    """
    leaves = dict(batch.items(True, True))
    nested = {key: x for key, x in batch.items(True) if isinstance(x, TensorDictBase)}
    sizes = {(): tuple(batch.batch_size), **{key: tuple(x.batch_size) for key, x in nested.items()}}
    return {"leaves": to_arrays(leaves), "sizes": sizes}


def unpack(packed: Mapping[str, Any]) -> TensorDict:
    """Returns the TensorDict that :func:`pack` was given, of views as :func:`from_arrays`."""
    sizes = dict(packed["sizes"])
    batch = TensorDict({}, sizes.pop(()))
    for key, size in sizes.items():
        batch.set(key, TensorDict({}, size))
    for key, value in from_arrays(packed["leaves"]).items():
        batch.set(key, value)
    return batch


def _to_array(value: Tensor) -> tuple[np.ndarray, bool]:
    value = value.detach().cpu().contiguous()
    half = value.dtype is torch.bfloat16
    return (value.view(torch.int16) if half else value).numpy(), half
