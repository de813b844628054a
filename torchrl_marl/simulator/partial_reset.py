"""Resets of some envs by a simulator that can only reset all.

Shapes: E envs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from torchrl_marl.errors import SimulatorStateError
from torchrl_marl.simulator.env_slots import EnvSlots
from torchrl_marl.simulator.state import (
    Path,
    SimulatorState,
    SimulatorWalk,
    path_name,
    set_child,
    shared_storages,
    walk_simulator,
)

__all__ = ["RunningEnvs", "UndoWrites"]


class RunningEnvs:
    """Values of running envs, kept while a reset of all envs draws fresh starts for some.

    For a simulator without a twin: read before its reset, and put back afterwards where envs
    go on. All that a reset writes must hold the envs in its first dim.

    Args:
        simulator: about to be reset as a whole.
        num_envs (int): number E of envs.
        exclude (iterable of str or Path): what not to enter.
        slots (mapping, optional): path -> whether the first dim is the envs, as
            :func:`~torchrl_marl.simulator.state.slots_of_envs` found it. Without it, all tensors
            with E rows are taken for such.

    Examples:
        >>> class Walk:
        ...     position = None
        >>> walk = Walk()
        >>> walk.position = torch.ones(2)
        >>> running = RunningEnvs(walk, 2)
        >>> walk.position = torch.zeros(2)
        >>> running.put_back(torch.tensor([True, False]))
        >>> walk.position
        tensor([1., 0.])
    """

    def __init__(
        self,
        simulator: Any,
        num_envs: int,
        exclude: Iterable[str | Path] = (),
        slots: Mapping[Path, bool] | None = None,
    ) -> None:
        self._simulator, self._n_envs, self._exclude = simulator, num_envs, frozenset(exclude)
        self._slots = slots
        walk = walk_simulator(simulator, self._exclude)
        self._tensors = walk.tensors
        self._structure = walk.structure()
        self._versions = {id(x): x._version for x in walk.tensors.values()}
        self._copies = {
            id(x): x.detach().clone()
            for path, x in walk.tensors.items()
            if x.shape[:1] == (num_envs,) and (slots is None or slots.get(path, False))
        }

    def put_back(self, running: Tensor) -> None:
        """Restores the values of the envs where ``running`` ``[E]`` is True.

        Raises:
            SimulatorStateError: the reset wrote something that is not batched over the envs.
        """
        walk = walk_simulator(self._simulator, self._exclude)
        self._refuse_unbatched(walk)
        written = {p: x for p, x in walk.tensors.items() if self._is_written(p, x)}
        views = shared_storages(written.values())
        merged: dict[tuple[int, int], Tensor] = {}
        for path, x in written.items():
            old = self._tensors[path]
            if (id(x), id(old)) not in merged:
                rows = running.view(-1, *[1] * (x.ndim - 1))
                new = torch.where(rows, self._copies[id(old)], x)
                in_place = x is old or x.untyped_storage().data_ptr() in views
                merged[id(x), id(old)] = x.copy_(new) if in_place else new
            new = merged[id(x), id(old)]
            if new is not x:
                set_child(walk.objects[path[:-1]], path[-1], new)

    def _is_written(self, path: Path, x: Tensor) -> bool:
        old = self._tensors.get(path)
        return old is not None and (x is not old or x._version != self._versions[id(x)])

    def _refuse_unbatched(self, walk: SimulatorWalk) -> None:
        for path, old in self._tensors.items():
            name, x = path_name(path), walk.tensors.get(path)
            if x is None:
                raise SimulatorStateError(f"a reset takes {name} away from running envs.")
            if not self._is_written(path, x):
                continue
            if self._slots is not None and path not in self._slots:
                raise SimulatorStateError(
                    f"a reset writes {name}, which worlds of {SimulatorState.PROBES} envs have "
                    "not after a step, so that its batch dim is not known; make it in __init__."
                )
            batched = x.shape == old.shape and id(old) in self._copies
            if not batched or path in walk.in_ring_buffer:
                raise SimulatorStateError(
                    f"a reset writes {name}, {list(old.shape)} before and {list(x.shape)} after; "
                    f"expected a tensor with the {self._n_envs} envs in the first dim."
                )
        tensors = {path_name(path) for path in (*self._tensors, *walk.tensors)}
        after = walk.structure()
        for holder, slots in self._structure.items():
            for key, before in slots.items():
                name = f"{holder}.{key}" if holder else key
                now = after.get(holder, {}).get(key)
                if now != before and name not in tensors:
                    self._refuse_change(name, before, now)

    def _refuse_change(self, name: str, before: Any, now: Any) -> None:
        before, now = (x[0] if isinstance(x, list) else x for x in (before, now))
        raise SimulatorStateError(
            f"a reset changes {name} from {before!r} to {now!r} for all envs at once; "
            f"keep it as a tensor with the {self._n_envs} envs in the first dim."
        )


class UndoWrites:
    """Protects envs from writes while all envs are read.

    To observe may write: to a history, say, which goes on by one. What is written in place is
    seen the first time, and only this is copied later; else nothing is done to tensors.

    Args:
        simulator: to be looked at.
        state (SimulatorState): of this kind of simulator.

    Examples:
        >>> class Counter:
        ...     def __init__(self, num_envs):
        ...         self.looks = torch.zeros(num_envs)
        >>> counter = Counter(2)
        >>> unmoved = UndoWrites(counter, SimulatorState(Counter))
        >>> with unmoved.where(torch.tensor([True, False])):
        ...     counter.looks += 1
        >>> counter.looks
        tensor([0., 1.])
    """

    def __init__(self, simulator: Any, state: SimulatorState) -> None:
        self._slots = EnvSlots(simulator, state)
        self._in_place: frozenset[Path] | None = None

    @contextlib.contextmanager
    def where(self, envs: Tensor) -> Iterator[None]:
        """Undoes the writes within this context in the envs where ``envs`` ``[E]`` is True."""
        slots = self._slots
        found = {path: slots.get(path) for path in slots.paths}
        before = {path: (x, x._version) for path, x in found.items() if x is not None}
        copied = slots.paths if self._in_place is None else self._in_place
        copies = {path: before[path][0].clone() for path in copied if path in before}
        yield
        after = {path: (slots.get(path), x) for path, (x, _) in before.items()}
        in_place = {path for path, (x, version) in before.items() if x._version != version}
        written = in_place | {path for path, (new, old) in after.items() if new is not old}
        slots.merge({path: copies.get(path, before[path][0]) for path in written}, envs)
        self._in_place = frozenset(in_place | (self._in_place or frozenset()))
