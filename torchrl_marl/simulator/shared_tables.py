"""Finds tables that all envs share, with as many rows as there are envs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_marl.simulator.settings import written_by
from torchrl_marl.simulator.state import Path, path_name, set_child, walk_simulator

__all__ = ["shared_tables"]


def shared_tables(
    world: Any,
    num_envs: int,
    exclude: Iterable[str | Path],
    reset: Callable[[Any], Any],
    step: Callable[[Any], TensorDictBase],
) -> list[str]:
    """Returns tensors that a reset writes with a row per env, though envs read other rows.

    Found by a step of a copy in which all rows are as one env's: to that env it should make no
    difference.

    Args:
        world: to be copied.
        num_envs (int): number E of envs.
        exclude (iterable of str or Path): what not to enter.
        reset, step (callable): ``reset(world)`` and ``step(world)``, with the same random
            numbers each time; a step gives a TensorDict ``[E]``.

    Examples:
        >>> from tensordict import TensorDict
        >>> class Landmarks:
        ...     def reset(self):
        ...         self.places, self.at = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
        ...     def step(self):
        ...         distances = self.at.unsqueeze(1) - self.places
        ...         return TensorDict({"observation": distances}, [2])
        >>> world = Landmarks()
        >>> world.reset()
        >>> shared_tables(world, 2, [], Landmarks.reset, Landmarks.step)
        ['places']
    """
    excluded = frozenset(exclude)
    started = copy.deepcopy(world)
    written = written_by(started, excluded, lambda: reset(started))
    tensors = walk_simulator(started, excluded).tensors
    rows = {p: tensors[p] for p in written if p in tensors and tensors[p].shape[:1] == (num_envs,)}
    if not rows:
        return []
    expected = step(copy.deepcopy(started))
    found = {
        path_name(path)
        for path, x in rows.items()
        # For a smallest or nearest one, a row itself may be the only one that counts.
        for env in (0, -1)
        if not _same(expected[env], step(_with(started, path, _as_row(x, env), excluded))[env])
    }
    return sorted(found)


def _as_row(x: Tensor, env: int) -> Tensor:
    return x.detach()[env].expand_as(x).clone()


def _with(world: Any, path: Path, x: Tensor, exclude: frozenset[str | Path]) -> Any:
    world = copy.deepcopy(world)
    walk = walk_simulator(world, exclude)
    old = walk.tensors[path]
    for other, value in walk.tensors.items():
        if value is old:
            set_child(walk.objects[other[:-1]], other[-1], x)
    return world


def _same(x: TensorDictBase, y: TensorDictBase) -> bool:
    pairs = ((value, y.get(key)) for key, value in x.items(True, True))
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)
