"""Resets only some envs of a simulator: in place, or from a bank of new initial states."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchrl_marl.errors import SimulatorStateError
from torchrl_marl.runtime.random_state import RandomState
from torchrl_marl.simulator.settings import (
    Settings,
    copy_settings,
    refuse_dependent_starts,
    written_by,
)
from torchrl_marl.simulator.state import (
    SCALARS,
    Exclude,
    Path,
    SimulatorState,
    SimulatorWalk,
    as_constant,
    child,
    path_name,
    set_child,
    shared_storages,
    walk_simulator,
)

__all__ = ["EnvSlots", "ResetBank", "RunningEnvs", "UndoWrites", "random_draws"]


class EnvSlots:
    """Batched tensors of a simulator; each access looks the tensors up by path again."""

    def __init__(self, simulator: Any, state: SimulatorState) -> None:
        self.simulator = simulator
        self.exclude = state.exclude
        self.paths = state.batched

    @functools.cached_property
    def views(self) -> frozenset[Path]:
        """Slots that share memory with another slot."""
        found = {path: x for path in self.paths if (x := self.get(path)) is not None}
        shared = shared_storages(found.values())
        return frozenset(p for p, x in found.items() if x.untyped_storage().data_ptr() in shared)

    def get(self, path: Path) -> Tensor | None:
        """Returns the tensor at a path; None if the simulator currently has none there."""
        try:
            return child(self._parent_object(path), path[-1])
        except LookupError:
            return None

    def _parent_object(self, path: Path) -> Any:
        holder = self.simulator
        for key in path[:-1]:
            holder = child(holder, key)
        return holder

    def merge(self, values: dict[Path, Any], envs: Tensor) -> None:
        """Writes values of the envs in a mask; tensors that share memory continue to share it."""
        merged: dict[tuple[int, int], Tensor] = {}
        found = {path: self.get(path) for path in values}
        old = {p: x for p, x in found.items() if x is not None and values[p] is not None}
        shared = shared_storages(old.values())
        for path, x in old.items():
            both = id(x), id(values[path])
            if both not in merged:
                # A view of another slot's memory must remain a view.
                in_place = path in self.views or x.untyped_storage().data_ptr() in shared
                merged[both] = _write_rows(x, values[path], envs, in_place)
            if merged[both] is not x:
                set_child(self._parent_object(path), path[-1], merged[both])


def _write_rows(x: Tensor, values: Tensor, envs: Tensor, in_place: bool) -> Tensor:
    """Returns a tensor with new values in the rows where ``envs`` ``[E]`` is True."""
    new = torch.where(envs.view(-1, *[1] * (x.ndim - 1)), values, x)
    return x.copy_(new) if in_place else new


class RunningEnvs:
    """Saved values of running envs, for simulators that can only reset all envs at once.

    The values are saved before the reset, and then written back for the envs that have not ended.
    All tensors that a reset writes must have the envs in their first dim.

    Args:
        simulator: simulator that will be reset.
        num_envs (int): number E of envs.
        exclude (iterable of str or Path): attributes to skip.
        slots (mapping, optional): path of a tensor -> whether its first dim is the envs, from
            :func:`~torchrl_marl.simulator.state.slots_of_envs`. By default this is assumed of all
            tensors with E rows.

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
        exclude: Exclude = (),
        slots: Mapping[Path, bool] | None = None,
    ) -> None:
        self._simulator, self._n_envs, self._exclude = simulator, num_envs, frozenset(exclude)
        self._slots = slots
        walk = walk_simulator(simulator, self._exclude)
        self._tensors = walk.tensors
        self._structure = walk.structure()
        self._others = _other_values(walk)
        self._versions = {id(x): x._version for x in walk.tensors.values()}
        self._copies = {
            id(x): x.detach().clone()
            for path, x in walk.tensors.items()
            if x.shape[:1] == (num_envs,) and (slots is None or slots.get(path, False))
        }

    def put_back(self, running: Tensor) -> None:
        """Restores the values of the envs where ``running`` ``[E]`` is True.

        Raises:
            SimulatorStateError: if the reset wrote a tensor that is not batched over the envs.
        """
        walk = walk_simulator(self._simulator, self._exclude)
        self._refuse_unbatched(walk)
        written = {p: x for p, x in walk.tensors.items() if self._is_written(p, x)}
        views = shared_storages(written.values())
        merged: dict[tuple[int, int], Tensor] = {}
        for path, x in written.items():
            old = self._tensors[path]
            if (id(x), id(old)) not in merged:
                in_place = x is old or x.untyped_storage().data_ptr() in views
                merged[id(x), id(old)] = _write_rows(x, self._copies[id(old)], running, in_place)
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
                raise SimulatorStateError(f"a reset removes {name}, which running envs need.")
            if not self._is_written(path, x):
                continue
            if self._slots is not None and path not in self._slots:
                raise SimulatorStateError(
                    f"a reset writes {name}, which environments of {SimulatorState.PROBES} envs "
                    "do not have after a step, so that its batch dim is unknown; create it in "
                    "__init__."
                )
            batched = x.shape == old.shape and id(old) in self._copies
            if not batched or path in walk.in_ring_buffer:
                raise SimulatorStateError(
                    f"a reset writes {name}, {list(old.shape)} before and {list(x.shape)} after; "
                    f"expected a tensor with the {self._n_envs} envs in the first dim."
                )
        others = _other_values(walk)
        for name in sorted({*self._others, *others}):
            if self._others.get(name) != others.get(name):
                raise SimulatorStateError(
                    f"a reset changes {name} for all envs at once; store it as a tensor with the "
                    f"{self._n_envs} envs in the first dim, in an attribute, list or dict."
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
            f"store it as a tensor with the {self._n_envs} envs in the first dim."
        )


def _other_values(walk: SimulatorWalk) -> dict[str, Any]:
    """Returns the tensors in tuples, and the constants that a structure does not contain."""
    found: dict[str, Any] = {path_name(p): (id(x), x._version) for p, x in walk.in_tuples.items()}
    for path, value in walk.slots():
        if not isinstance(value, SCALARS) and (constant := as_constant(value)) is not None:
            found[path_name(path)] = constant
    return found


class UndoWrites:
    """Undoes writes that a computation of observations made in envs that it should not change.

    A computation of observations may write to the simulator, for example append to a history. The
    first use finds the tensors that the computation writes in place. Later uses copy only these.

    Args:
        simulator: simulator whose observations are computed.
        state (SimulatorState): layout of the simulator's state.

    Examples:
        >>> class Counter:
        ...     def __init__(self, num_envs):
        ...         self.reads = torch.zeros(num_envs)
        >>> counter = Counter(2)
        >>> undo = UndoWrites(counter, SimulatorState(Counter))
        >>> with undo.where(torch.tensor([True, False])):
        ...     counter.reads += 1
        >>> counter.reads
        tensor([0., 1.])
    """

    def __init__(self, simulator: Any, state: SimulatorState) -> None:
        self._slots = EnvSlots(simulator, state)
        self._in_place: frozenset[Path] | None = None

    @contextlib.contextmanager
    def where(self, envs: Tensor) -> Iterator[None]:
        """Context; on exit, writes made in it are undone in the envs where ``envs`` is True."""
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


class ResetBank:
    """Bank of new initial states of a simulator, one per env, for batched partial resets.

    The initial states are those of a *twin*, a copy of the simulator, after a reset of all the
    twin's envs. An env whose episode ends takes over its row of the twin's tensors
    (``torch.where``). Only tensors that the reset writes are taken over, so constants and the
    structure of the running simulator do not change. Each row is used once. When an env needs a
    second row, the twin is reset again.

    Args:
        state (SimulatorState): layout of the simulator's state.
        simulator: the running simulator.
        twin: simulator of the same size, after a reset and one step.
        reset (callable): ``reset(twin)`` draws new initial states for all envs.
        num_envs (int): number E of envs.
        device (torch.device): device of the simulator.

    Keyword Args:
        step (callable): ``step(twin)`` makes a step; tensors that a step writes are not
            settings.

    Raises:
        SimulatorStateError: if initial states depend on the envs' state before the reset.
    """

    def __init__(
        self,
        state: SimulatorState,
        simulator: Any,
        twin: Any,
        reset: Callable[[Any], None],
        num_envs: int,
        device: torch.device | str,
        *,
        step: Callable[[Any], Any],
    ) -> None:
        self._reset, self._step = reset, step
        self._twin = twin
        self._settings: Settings | None = None
        self._moving: set[Path] = set()
        self._checked = False
        self._running = EnvSlots(simulator, state)
        self._starts = EnvSlots(twin, state)
        self._paths: frozenset[Path] = frozenset()
        self.used = torch.ones(num_envs, dtype=torch.bool, device=device)

    def draw(self, envs: Tensor) -> None:
        """Starts new episodes in the envs where ``envs`` ``[E]`` is True."""
        if self._is_outdated():
            self.empty()
        if bool((self.used & envs).any()):
            self._refill()
        elif self._settings is None:  # the initial states were restored
            self._find_moving()
            self._note_settings()
        self.used |= envs
        starts = {path: self._starts.get(path) for path in self._paths}
        self._running.merge(starts, envs)

    def empty(self) -> None:
        """Discards the remaining initial states, for example after a new seed."""
        self.used.fill_(True)

    def _is_outdated(self) -> bool:
        return self._settings is not None and self._settings.changed()

    def _refill(self) -> None:
        running, n = self._running, len(self.used)
        if not self._moving:
            self._find_moving()
        rows, exclude = self._starts.paths, running.exclude
        copy_settings(self._twin, running.simulator, (n, n), exclude, rows, self._moving)
        if not self._checked or self._is_outdated():
            self._refuse_dependence()
        written = written_by(self._twin, exclude, lambda: self._reset(self._twin))
        self._paths = self._paths | written.intersection(rows)
        self._note_settings()
        self.used.fill_(False)

    def _note_settings(self) -> None:
        simulator, exclude = self._running.simulator, self._running.exclude
        self._settings = Settings(simulator, exclude, self._moving | self._paths)

    def _find_moving(self) -> None:
        """Finds the slots that a step of the twin writes; these are not settings."""
        twin, exclude = copy.deepcopy(self._twin), self._running.exclude
        with RandomState(0, self.used.device).active():
            self._moving = written_by(twin, exclude, lambda: self._step(twin))

    def _refuse_dependence(self) -> None:
        """Raises an error if a twin's initial states depend on the states before the reset."""
        twin, random = copy.deepcopy(self._twin), RandomState(0, self.used.device)

        def reset() -> dict[str, Tensor]:
            with random.active():
                self._reset(twin)
            return {}

        exclude, step = self._running.exclude, lambda: self._step(twin)
        refuse_dependent_starts(twin, exclude, random, reset, step, SimulatorStateError)
        self._checked = True

    def state_dict(self, state: SimulatorState) -> TensorDict:
        """Returns the remaining initial states as a TensorDict."""
        if self._is_outdated():
            self.empty()
        return TensorDict(
            {
                "twin": state.read(self._twin),
                "used": self.used.clone(),
                "paths": json.dumps(sorted(self._paths)),
            },
            [],
        )

    def load_state_dict(self, state: SimulatorState, saved: TensorDict) -> None:
        """Restores saved initial states."""
        state.write(self._twin, saved["twin"])
        self.used.copy_(saved["used"])
        self._paths = frozenset(tuple(path) for path in json.loads(saved["paths"]))
        self._settings = None  # later read from the simulator, when the run continues


def random_draws(call: Callable[[], Any]) -> list[torch.Size]:
    """Returns the shapes of the random tensors that a call draws from torch."""
    recorder = _DrawRecorder()
    with recorder:
        call()
    return recorder.shapes


class _DrawRecorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and isinstance(result, Tensor):
            self.shapes.append(result.shape)
        return result
