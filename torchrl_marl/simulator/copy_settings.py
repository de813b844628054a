"""Copies a simulator's settings to another one: numbers, references and tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from torchrl_marl.errors import SimulatorStateError
from torchrl_marl.simulator.state import SCALARS, Path, path_name, set_child, walk_simulator

__all__ = ["copy_settings"]


def copy_settings(
    twin: Any,
    leader: Any,
    sizes: tuple[int, int],
    exclude: Iterable[str | Path] = (),
    rows: Iterable[Path] = (),
    moving: Iterable[Path] | None = None,
) -> None:
    """Copies a leader's settings to its twin: numbers, tensors, and references.

    What the twin observes is then what the leader would, in the same places.

    Args:
        twin, leader: simulators built alike, of different numbers of envs.
        sizes (tuple): these numbers. What is proportional to them stays.
        exclude (iterable of str or Path): names of attributes not to enter.
        rows (iterable of Path): tensors with the envs in the first dim.
        moving (iterable of Path, optional): which of them are no settings, since steps write
            them; a twin's row i is else one of the leader's. None leaves all of them.

    Raises:
        SimulatorStateError: a new tensor of which it is not known whether it holds the envs.

    Examples:
        >>> class Race:
        ...     def __init__(self, num_envs, length):
        ...         self.num_envs, self.length = num_envs, length
        >>> twin, leader = Race(16, length=100), Race(2, length=30)
        >>> copy_settings(twin, leader, (16, 2))
        >>> twin.num_envs, twin.length
        (16, 30)
    """
    excluded, of_envs = frozenset(exclude), frozenset(rows)
    shown = walk_simulator(leader, excluded)
    wanted = shown.structure()
    walk = walk_simulator(twin, excluded)
    copies: dict[int, Tensor] = {}
    objects = {path_name(path): x for path, x in walk.objects.items()}
    moves = of_envs if moving is None else of_envs & frozenset(moving)
    for path, value in list(walk.slots()):
        new = wanted.get(path_name(path[:-1]), {}).get(path[-1])
        if path in shown.tensors and path not in moves:
            x = shown.tensors[path]
            if path not in of_envs and _may_hold_envs(path, x, value, sizes, bool(of_envs)):
                continue
            if id(x) not in copies:
                row = torch.arange(sizes[0], device=x.device) % sizes[1]
                copies[id(x)] = x.detach()[row] if path in of_envs else x.detach().clone()
            # Unchanged values count as written by no call.
            if path not in of_envs or not _same(value, copies[id(x)]):
                set_child(walk.objects[path[:-1]], path[-1], copies[id(x)])
        elif isinstance(new, list):
            if not _is_size(value, new[0], sizes):
                set_child(walk.objects[path[:-1]], path[-1], new[0])
        elif new is not None and id(value) in walk.path_of:
            set_child(walk.objects[path[:-1]], path[-1], objects.get(new, value))
    for path, holder in shown.objects.items():  # what a class has, and the leader for itself
        own = getattr(walk.objects.get(path), "__dict__", None)
        if own is None:
            continue
        for key, x in getattr(holder, "__dict__", {}).items():
            slot = (*path, key)
            if key in own or not shown.enters(slot) or slot in of_envs:
                continue
            if isinstance(x, SCALARS):
                own[key] = x
            elif not isinstance(x, Tensor) or not hasattr(type(holder), key):
                continue
            elif not _may_hold_envs(slot, x, None, sizes, bool(of_envs)):
                own[key] = x.detach().clone()


def _may_hold_envs(path: Path, x: Tensor, value: Any, sizes: tuple[int, int], probed: bool) -> bool:
    """Returns whether a leader's tensor may hold a value per env, though no probe showed it."""
    if isinstance(value, Tensor):
        return x.shape != value.shape and (not probed or x.shape[:1] == (sizes[1],))
    if sizes[0] == sizes[1] or x.shape[:1] != (sizes[1],):
        return False
    if not probed:
        return True
    raise SimulatorStateError(
        f"{path_name(path)} was no tensor when the world was made, and has {sizes[1]} rows now: it "
        "is not known whether these are the envs; make it a tensor in the constructor."
    )


def _same(x: Any, y: Tensor) -> bool:
    return isinstance(x, Tensor) and x.dtype == y.dtype and torch.equal(x, y)


def _is_size(value: Any, other: Any, sizes: tuple[int, int]) -> bool:
    return type(value) is type(other) is int and value * sizes[1] == other * sizes[0]
