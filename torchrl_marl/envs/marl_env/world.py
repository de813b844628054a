"""A world's attributes that change: saved, moved and protected.

Shapes: E envs.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from torchrl_marl.errors import SimulatorStateError, SpecError
from torchrl_marl.simulator.state import Path, SimulatorState, set_child, walk_simulator

__all__ = ["forbid_inplace_writes", "load_world", "move_world", "save_world"]

_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def save_world(owner: Any, exclude: frozenset[str | Path]) -> TensorDict:
    """Returns the tensors among an object's attributes.

    Args:
        owner: the environment.
        exclude (frozenset): attributes that are no part of the world.

    Raises:
        SimulatorStateError: a random generator among the attributes, which cannot be saved.
    """
    for path, value in walk_simulator(owner, exclude).slots():
        if isinstance(value, _GENERATORS):
            raise SimulatorStateError(
                f"{type(owner).__name__}: {'.'.join(path)} is a {type(value).__name__}; draw "
                "from torch's global functions instead, which this env seeds and saves."
            )
    return SimulatorState(None, exclude).read(owner)


def load_world(owner: Any, exclude: frozenset[str | Path], world: TensorDict) -> None:
    """Restores the tensors of :func:`save_world`."""
    SimulatorState(None, exclude).write(owner, world)


def move_world(owner: Any, exclude: frozenset[str | Path], device: torch.device) -> None:
    """Moves the tensors among an object's attributes to a device."""
    walk = walk_simulator(owner, exclude)
    moved = {id(x): x.to(device) for x in walk.tensors.values()}
    for path, x in walk.tensors.items():
        set_child(walk.objects[path[:-1]], path[-1], moved[id(x)])


@contextlib.contextmanager
def forbid_inplace_writes(episode: dict[str, Any], method: str) -> Iterator[None]:
    """Refuses in-place writes to an earlier output, which rollouts may hold."""
    leaves = list(_leaves(episode.get("given", {})))
    versions = [x._version for _, x in leaves]
    yield
    for (key, x), version in zip(leaves, versions):
        if x._version != version:
            raise SpecError(
                f"{method} writes in place to what it gave as {key!r} before; give a clone, or "
                "write x = x + y for x += y."
            )


def _leaves(nested: dict[str, Any], path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    for key, x in nested.items():
        if isinstance(x, dict):
            yield from _leaves(x, (*path, key))
        else:
            yield (*path, key), x
