"""A simulator takes over another one's numbers, references and shared tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from torchrl_marl.envs.simulator import SCALARS, Path, path_name, set_child, walk_simulator

__all__ = ["follow"]


def follow(
    twin: Any, leader: Any, sizes: tuple[int, int], exclude: Iterable[str | Path] = ()
) -> None:
    """Gives a twin what all envs of its leader share: settings, and which object is the goal.

    What the twin observes is then what the leader would, in the same places.

    Args:
        twin, leader: simulators built alike, of different numbers of envs.
        sizes (tuple): these numbers. What is proportional to them stays.
        exclude (iterable of str or Path): names of attributes not to enter.

    Examples:
        >>> class Race:
        ...     def __init__(self, num_envs, length):
        ...         self.num_envs, self.length = num_envs, length
        >>> twin, leader = Race(16, length=100), Race(2, length=30)
        >>> follow(twin, leader, (16, 2))
        >>> twin.num_envs, twin.length
        (16, 30)
    """
    excluded = frozenset(exclude)
    shown = walk_simulator(leader, excluded)
    wanted = shown.structure()
    walk = walk_simulator(twin, excluded)
    copies: dict[int, Tensor] = {}
    objects = {path_name(path): x for path, x in walk.objects.items()}
    for path, value in list(walk.slots()):
        new = wanted.get(path_name(path[:-1]), {}).get(path[-1])
        if path in walk.tensors and path in shown.tensors:
            x = shown.tensors[path]
            if x.shape == value.shape and x.shape[:1] != (sizes[1],):
                copies.setdefault(id(x), x.clone())
                set_child(walk.objects[path[:-1]], path[-1], copies[id(x)])
            continue
        if new is None or isinstance(value, Tensor):
            continue
        if not isinstance(value, SCALARS) and id(value) not in walk.path_of:
            continue
        new = new[0] if isinstance(new, list) else objects.get(new, value)
        if new is not value and not _is_size(value, new, sizes):
            set_child(walk.objects[path[:-1]], path[-1], new)
    for name, slots in wanted.items():
        held = getattr(objects.get(name), "__dict__", None)
        if held is not None:  # settings that a class has, and the leader has for itself
            own = {key: x[0] for key, x in slots.items() if isinstance(x, list)}
            held.update({key: x for key, x in own.items() if key not in held})


def _is_size(value: Any, other: Any, sizes: tuple[int, int]) -> bool:
    return type(value) is type(other) is int and value * sizes[1] == other * sizes[0]
