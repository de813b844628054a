"""Checks for changed settings of a simulator, dependent resets, and tables shared by envs."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_marl.errors import SimulatorStateError
from torchrl_marl.runtime.random_state import RandomState
from torchrl_marl.simulator.state import (
    Exclude,
    Path,
    SimulatorWalk,
    as_constant,
    child,
    is_replaceable,
    is_writable,
    path_name,
    set_child,
    shared_storages,
    walk_simulator,
)

__all__ = [
    "Settings",
    "copy_settings",
    "find_dependence",
    "refuse_dependent_starts",
    "shared_tables",
    "written_by",
]

_MISSING = object()
_MUTABLE = (set, np.ndarray)


class Settings:
    """Record of a simulator's settings (constants and tensors), which detects later changes.

    Args:
        simulator: simulator whose settings may change later.
        exclude (iterable of str or Path): attributes to skip.
        moving (iterable of Path): slots that steps and resets write; these are not settings.

    Examples:
        >>> class Race:
        ...     length = torch.tensor(3.0)
        >>> race = Race()
        >>> race.length = torch.tensor(3.0)
        >>> settings = Settings(race)
        >>> race.length = torch.tensor(3.0)
        >>> settings.changed()
        False
        >>> _ = race.length.fill_(4.0)
        >>> settings.changed()
        True
    """

    def __init__(self, simulator: Any, exclude: Exclude = (), moving: Iterable[Path] = ()) -> None:
        self._exclude, moving_paths = frozenset(exclude), frozenset(moving)
        walk = walk_simulator(simulator, self._exclude)
        self._simulator = simulator
        self._tensors: list[tuple[Path, Tensor, int, Tensor]] = []
        self._constants: list[tuple[Path, Any, str | None]] = []
        # An object may override attributes of its class.
        self._known = [
            (p, x, set(vars(x))) for p, x in walk.objects.items() if hasattr(x, "__dict__")
        ]
        for path, value in walk.slots():
            if path in moving_paths:
                continue
            if isinstance(value, Tensor):
                self._tensors.append((path, value, value._version, value.detach().clone()))
            elif (constant := as_constant(value)) is not None or is_replaceable(value):
                self._constants.append((path, value, constant))

    def changed(self) -> bool:
        """Returns whether any setting has changed; reads only tensors that were written since."""
        for path, holder, known in self._known:
            new = vars(holder).keys() - known if len(vars(holder)) > len(known) else ()
            if any(not {key, (*path, key)} & self._exclude for key in new):
                return True
        holders: dict[Path, Any] = {(): self._simulator}
        for path, value, constant in self._constants:
            current = _find(holders, path)
            if current is not value or isinstance(value, _MUTABLE):
                other = type(current) is not type(value) or as_constant(current) != constant
                if other or constant is None:
                    return True
        for i, (path, x, version, saved) in enumerate(self._tensors):
            current = _find(holders, path)
            if current is x and x._version == version:
                continue
            if not isinstance(current, Tensor) or not equal(current, saved):
                return True
            self._tensors[i] = path, current, current._version, saved
        return False


def _find(holders: dict[Path, Any], path: Path) -> Any:
    """Returns the value at a path; keeps the objects on the way, by path, in ``holders``."""
    if path not in holders:
        holder = _find(holders, path[:-1])
        holders[path] = _MISSING if holder is _MISSING else _get_child(holder, path[-1])
    return holders[path]


def written_by(simulator: Any, exclude: Exclude, call: Callable[[], Any]) -> set[Path]:
    """Returns the slots of the tensors and numbers that a call writes."""
    walk = walk_simulator(simulator, exclude)
    before = {path: (x, x._version) for path, x in walk.tensors.items()}
    others = _non_tensor_slots(walk)
    call()
    after = walk_simulator(simulator, exclude)
    written = {path for path, x in after.tensors.items() if not _is_unchanged(x, before.get(path))}
    return written | {p for p, x in _non_tensor_slots(after).items() if not equal(x, others.get(p))}


def _is_unchanged(x: Tensor, before: tuple[Tensor, int] | None) -> bool:
    return before is not None and x is before[0] and x._version == before[1]


def _non_tensor_slots(walk: SimulatorWalk) -> dict[Path, Any]:
    """Returns a dict for slots without a tensor: slot -> number, or name of the object in it."""
    others: dict[Path, Any] = {}
    for path, value in walk.slots():
        constant = as_constant(value)
        if constant is not None:
            others[path] = [constant]
        elif id(value) in walk.path_of:
            others[path] = path_name(walk.path_of[id(value)])
    return others


def refuse_dependent_starts(
    simulator: Any,
    exclude: Exclude,
    random: RandomState,
    reset: Callable[[], dict[str, Tensor]],
    step: Callable[[], Any],
    refusal: type[Exception],
) -> None:
    """Raises an error if initial states depend on an env's state before the reset.

    Args:
        simulator, exclude, step: as in :func:`find_dependence`.
        random (RandomState): random state of ``reset``.
        reset (callable): as in :func:`find_dependence`, but the random numbers may differ.
        refusal (type): type of the exception.

    Raises:
        Exception: of type ``refusal``; the message names a value that depends on earlier state.
    """

    def begin() -> dict[str, Tensor]:
        random.seed(0)
        return reset()

    with RandomState(0, random.device).active():
        why = find_dependence(simulator, exclude, begin, step)
    if why is not None:
        raise refusal(f"a new start depends on the env's state before the reset: {why}")


def find_dependence(
    simulator: Any,
    exclude: Exclude,
    reset: Callable[[], dict[str, Tensor]],
    step: Callable[[], Any],
) -> str | None:
    """Returns the name of an initial value that depends on the state before a reset, or None.

    The simulator is reset from three different states, with the same random numbers each time. In
    the first state, the tensors that steps and resets write are unchanged. In the second they are
    zero, and in the third they are increased.

    Args:
        simulator: simulator, which will be modified.
        exclude (iterable of str or Path): attributes to skip.
        reset (callable): ``reset()`` resets all envs, with the same random numbers each time, and
            returns further tensors of the initial states.
        step (callable): ``step()`` makes an eager step.
    """
    moving = written_by(simulator, exclude, reset)
    first, written = _reset_values(simulator, exclude, reset)
    for vary in (torch.zeros_like, _increase):
        moving |= written_by(simulator, exclude, step)
        _modify_tensors(simulator, exclude, moving, vary)
        try:
            other, also = _reset_values(simulator, exclude, reset)
        except Exception as error:  # environments may raise anything at impossible states
            return f"a reset from another state raises {type(error).__name__}: {error}"
        written |= also
        for name in sorted(written, key=lambda name: (name[0] == "_", name)):
            if not equal(first.get(name, _MISSING), other.get(name, _MISSING)):
                return name
    return None


def _reset_values(
    simulator: Any, exclude: Exclude, reset: Callable[[], dict[str, Tensor]]
) -> tuple[dict[str, Any], set[str]]:
    """Returns the values after a reset by name, and the names of values that the reset wrote."""
    output: dict[str, Tensor] = {}
    written = written_by(simulator, exclude, lambda: output.update(reset()))
    walk = walk_simulator(simulator, exclude)
    tensors = {path: x.clone() for path, x in walk.tensors.items()}
    found = {path_name(path): x for path, x in (_non_tensor_slots(walk) | tensors).items()}
    return {**found, **output}, {*map(path_name, written), *output}


def _modify_tensors(
    simulator: Any, exclude: Exclude, moving: set[Path], vary: Callable[[Tensor], Tensor]
) -> None:
    walk = walk_simulator(simulator, exclude)
    memory = {path: x.untyped_storage().data_ptr() for path, x in walk.tensors.items()}
    views = shared_storages(walk.tensors.values())
    views -= {
        pointer
        for path, pointer in memory.items()
        if path not in moving or not is_writable(walk.tensors[path])
    }
    new: dict[int, Tensor] = {}
    for path in moving & walk.tensors.keys():
        x = walk.tensors[path]
        if id(x) not in new:
            varied = vary(x.detach()).contiguous()
            # A view remains a view if all slots that share its memory are written.
            new[id(x)] = x.detach().copy_(varied) if memory[path] in views else varied
        if memory[path] not in views:
            set_child(walk.objects[path[:-1]], path[-1], new[id(x)])


def _increase(x: Tensor) -> Tensor:
    if x.dtype == torch.bool:
        return ~x
    if x.is_floating_point() or x.is_complex() or not x.numel():
        return x + 1
    return (x + 1).clamp(max=max(int(x.max()), 1))  # on a GPU, too large an index aborts


def _get_child(holder: Any, key: str) -> Any:
    try:
        return child(holder, key)
    except LookupError:
        return _MISSING


def equal(x: Any, y: Any) -> bool:
    """Returns whether two values are equal and of the same type; NaN equals NaN."""
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        return type(x) is type(y) and bool(x == y)
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    same = x == y
    if x.is_floating_point():
        same = same | (x.isnan() & y.isnan())
    return bool(same.all())


def copy_settings(
    twin: Any,
    leader: Any,
    sizes: tuple[int, int],
    exclude: Exclude = (),
    rows: Iterable[Path] = (),
    moving: Iterable[Path] | None = None,
) -> None:
    """Copies the settings (numbers, tensors and references) of a simulator to its twin.

    The *leader* is the running simulator. After the call, if twin and leader are in equal states,
    they give the same observations.

    Args:
        twin, leader: simulators built with the same arguments, possibly for different numbers of
            envs.
        sizes (tuple): numbers of envs of twin and leader. A number is not copied if its values in
            twin and leader have the same ratio as these sizes.
        exclude (iterable of str or Path): names of attributes to skip.
        rows (iterable of Path): tensors with the envs in the first dim.
        moving (iterable of Path, optional): tensors among ``rows`` that steps write, which are not
            copied. The other ``rows`` are copied and repeated to the twin's size. If None, none
            of ``rows`` is copied.

    Raises:
        SimulatorStateError: if it is unknown whether a new tensor has the envs in its first dim.

    Examples:
        >>> class Race:
        ...     def __init__(self, num_envs, length):
        ...         self.num_envs, self.length = num_envs, length
        >>> twin, leader = Race(16, length=100), Race(2, length=30)
        >>> copy_settings(twin, leader, (16, 2))
        >>> twin.num_envs, twin.length
        (16, 30)
    """
    of_envs = frozenset(rows)
    walks = walk_simulator(twin, exclude), walk_simulator(leader, exclude)
    settings = _SettingsCopy(*walks, sizes, of_envs)
    settings.copy_slots(of_envs if moving is None else of_envs & frozenset(moving))
    settings.copy_overrides()


class _SettingsCopy:
    """Copy of a leader's settings to its twin.

    Args:
        twin, leader (SimulatorWalk): objects of both simulators.
        sizes (tuple): numbers of envs of twin and leader.
        of_envs (frozenset of Path): tensors with the envs in the first dim.
    """

    def __init__(
        self,
        twin: SimulatorWalk,
        leader: SimulatorWalk,
        sizes: tuple[int, int],
        of_envs: frozenset[Path],
    ) -> None:
        self.twin, self.leader, self.sizes, self.of_envs = twin, leader, sizes, of_envs
        self._copies: dict[int, Tensor] = {}  # tensors with several references stay shared

    def copy_slots(self, moving: frozenset[Path]) -> None:
        """Copies all values that the twin has, too, except tensors that steps write."""
        self._copy_collections()
        wanted, values = self.leader.structure(), dict(self.leader.slots())
        objects = {path_name(path): x for path, x in self.twin.objects.items()}
        for path, value in list(self.twin.slots()):
            new = wanted.get(path_name(path[:-1]), {}).get(path[-1])
            if path in self.leader.tensors and path not in moving:
                self._copy_tensor(path, value)
            elif path not in values:
                continue
            elif as_constant(values[path]) is not None:
                self._copy_constant(path, value, values[path])
            elif is_replaceable(values[path]) and not _is_bound(values[path]):
                set_child(self.twin.objects[path[:-1]], path[-1], values[path])
            elif new is not None and id(value) in self.twin.path_of:
                set_child(self.twin.objects[path[:-1]], path[-1], objects.get(new, value))

    def _copy_collections(self) -> None:
        """Gives the twin's collections of constants the length of the leader's."""
        for path, x in self.leader.objects.items():
            own: Any = self.twin.objects.get(path)
            if type(own) is not type(x) or not isinstance(x, (list, dict)) or len(own) == len(x):
                continue
            entries = [y for z in (own, x) for y in (z.values() if isinstance(z, dict) else z)]
            if all(as_constant(entry) is not None for entry in entries):
                own.clear()
                own.extend(x) if isinstance(x, list) else own.update(x)
                self.twin = walk_simulator(self.twin.objects[()], self.twin.exclude)

    def _copy_constant(self, path: Path, value: Any, x: Any) -> None:
        of_envs = isinstance(x, np.ndarray) and x.shape[:1] == (self.sizes[1],)
        if of_envs and np.shape(value)[:1] == (self.sizes[0],):
            return
        if type(value) is type(x) and as_constant(value) == as_constant(x):
            return
        if not _scales_with_envs(value, x, self.sizes):
            new = copy.copy(x) if isinstance(x, _MUTABLE) else x
            set_child(self.twin.objects[path[:-1]], path[-1], new)

    def _copy_tensor(self, path: Path, value: Any) -> None:
        x, per_env = self.leader.tensors[path], path in self.of_envs
        if not per_env and self._may_hold_envs(path, x, value):
            return
        if id(x) not in self._copies:
            row = torch.arange(self.sizes[0], device=x.device) % self.sizes[1]
            self._copies[id(x)] = x.detach()[row] if per_env else x.detach().clone()
        # A tensor with equal values is kept, so that it does not count as written.
        if not per_env or not _equal_tensors(value, self._copies[id(x)]):
            set_child(self.twin.objects[path[:-1]], path[-1], self._copies[id(x)])

    def copy_overrides(self) -> None:
        """Copies attributes of a class that an object of the leader overrides."""
        for path, holder in self.leader.objects.items():
            own = getattr(self.twin.objects.get(path), "__dict__", None)
            if own is None:
                continue
            for key, x in getattr(holder, "__dict__", {}).items():
                slot = (*path, key)
                if key in own or not self.leader.enters(slot) or slot in self.of_envs:
                    continue
                if as_constant(x) is not None:
                    own[key] = copy.copy(x) if isinstance(x, _MUTABLE) else x
                elif not isinstance(x, Tensor) or not hasattr(type(holder), key):
                    continue
                elif not self._may_hold_envs(slot, x, None):
                    own[key] = x.detach().clone()

    def _may_hold_envs(self, path: Path, x: Tensor, value: Any) -> bool:
        """Returns whether a tensor that no probe had may have the envs in its first dim."""
        n_envs, probed = self.sizes[1], bool(self.of_envs)
        if isinstance(value, Tensor):
            return x.shape != value.shape and (not probed or x.shape[:1] == (n_envs,))
        if self.sizes[0] == n_envs or x.shape[:1] != (n_envs,):
            return False
        if not probed:
            return True
        raise SimulatorStateError(
            f"{path_name(path)} was not a tensor when the environment was built, and has {n_envs} "
            "rows now, which may or may not be the envs; create it as a tensor in the constructor."
        )


def _equal_tensors(x: Any, y: Tensor) -> bool:
    return isinstance(x, Tensor) and x.dtype == y.dtype and torch.equal(x, y)


def _is_bound(x: Any) -> bool:
    """Returns whether a function may hold objects of its simulator."""
    return not isinstance(x, types.FunctionType) or x.__closure__ is not None


def _scales_with_envs(value: Any, other: Any, sizes: tuple[int, int]) -> bool:
    if type(value) is not type(other):
        return False
    if isinstance(value, tuple):
        return any(_scales_with_envs(*pair, sizes) for pair in zip(value, other))
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    return whole and value != other and value * sizes[1] == other * sizes[0]


def shared_tables(
    env: Any,
    num_envs: int,
    exclude: Exclude,
    reset: Callable[[Any], Any],
    step: Callable[[Any], TensorDictBase],
) -> list[str]:
    """Returns the names of tensors ``[E, ...]`` in which an env reads the rows of other envs.

    For the test, all rows of a tensor in a copy of the environment are set to the row of one env.
    If this changes that env's output in a step, the env reads rows of other envs.

    Args:
        env: environment to copy.
        num_envs (int): number E of envs.
        exclude (iterable of str or Path): attributes to skip.
        reset, step (callable): ``reset(env)`` and ``step(env)``, with the same random numbers each
            time; a step returns a TensorDict ``[E]``.

    Examples:
        >>> from tensordict import TensorDict
        >>> class Landmarks:
        ...     def reset(self):
        ...         self.places, self.at = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
        ...     def step(self):
        ...         distances = self.at.unsqueeze(1) - self.places
        ...         return TensorDict({"observation": distances}, [2])
        >>> environment = Landmarks()
        >>> environment.reset()
        >>> shared_tables(environment, 2, [], Landmarks.reset, Landmarks.step)
        ['places']
    """
    started = copy.deepcopy(env)
    written = written_by(started, exclude, lambda: reset(started))
    tensors = walk_simulator(started, exclude).tensors
    rows = {p: tensors[p] for p in written if p in tensors and tensors[p].shape[:1] == (num_envs,)}
    if not rows:
        return []
    expected = step(copy.deepcopy(started))
    found = {
        path_name(path)
        for path, x in rows.items()
        # Two envs are tested, since one env's row may decide alone, as in a minimum over rows.
        for env in (0, -1)
        if not _equal_tables(
            expected[env], step(_with_tensor(started, path, _repeat_row(x, env), exclude))[env]
        )
    }
    return sorted(found)


def _repeat_row(x: Tensor, env: int) -> Tensor:
    return x.detach()[env].expand_as(x).clone()


def _with_tensor(env: Any, path: Path, x: Tensor, exclude: Exclude) -> Any:
    env = copy.deepcopy(env)
    walk = walk_simulator(env, exclude)
    old = walk.tensors[path]
    for other, value in walk.tensors.items():
        if value is old:
            set_child(walk.objects[other[:-1]], other[-1], x)
    return env


def _equal_tables(x: TensorDictBase, y: TensorDictBase) -> bool:
    pairs = ((value, y.get(key)) for key, value in x.items(True, True))
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)
