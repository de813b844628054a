"""A shard as an actor of Ray, and how its batches travel."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchrl_marl.collectors.shard import Shard, goes_on
from torchrl_marl.runtime.trust import trusting

__all__ = ["ShardActor", "from_arrays", "pack", "to_arrays", "unpack"]


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


class ShardActor:
    """Some of a run's shards, in a process of their own.

    Examples:
        >>> ShardActor().ready()
        True
    """

    def __init__(self) -> None:
        self.shards: dict[int, Shard] = {}

    def ready(self, *makers: Callable[[int], Shard]) -> bool:
        """Answers, once the process has imported what makers of shards need."""
        return True

    def process(self) -> int:
        """Returns the number of its process, for tests and tools."""
        return os.getpid()

    def make(
        self,
        makers: Mapping[int, Callable[[int], Shard]],
        lives: Mapping[int, int],
        states: Mapping[int, Mapping[str, Any]],
        trust: bool,
    ) -> dict[int, bool]:
        """Makes shards, instead of those that there are.

        Args:
            makers (mapping): number of a shard -> ``maker(life)``.
            lives (mapping): how often each has begun anew.
            states (mapping): what each is put back to, where it is known.
            trust (bool): take pickled worlds in states for one's own.

        Returns:
            dict: whether no episode of a shard is lost.
        """
        for shard in self.shards.values():
            shard.close()
        self.shards = {i: make(lives[i]) for i, make in makers.items()}
        kept = dict.fromkeys(self.shards, True)
        with trusting(trust):
            for i, state in states.items():
                kept[i] = goes_on(state) and self.shards[i].load_state_dict(state)
        return kept

    def play(self, weights: Mapping[str, Any], with_state: bool) -> list[tuple[dict, dict | None]]:
        """Returns a batch of each shard as arrays, and its state, if it is asked for."""
        given = from_arrays(weights)
        played = []
        for shard in self.shards.values():
            batch = pack(shard.rollout(given))
            played.append((batch, shard.state_dict() if with_state else None))
        return played

    def states(self) -> dict[int, dict[str, Any]]:
        """Returns the states of its shards."""
        return {i: shard.state_dict() for i, shard in self.shards.items()}

    def close(self) -> None:
        """Closes the environments."""
        for shard in self.shards.values():
            shard.close()
        self.shards = {}
