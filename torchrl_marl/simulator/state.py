"""Reads and writes a simulator's state as a TensorDict; the simulator's code is unchanged.

A simulator is any Python object. Its state has two parts. The first part is all tensors that can be
reached from the object; each is batched over E envs or shared by all envs. The second part is the
*structure*: all other attributes, such as numbers and references between objects.
"""

from __future__ import annotations

import ast
import datetime
import hashlib
import json
import pathlib
import random
import types
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from torchrl_marl.errors import SimulatorStateError

__all__ = [
    "SimulatorState",
    "attributes",
    "read_tensors",
    "slots_of_envs",
    "write_tensors",
]

Path = tuple[str, ...]
Exclude = Collection[str | Path]
"""Attributes to skip, by name anywhere or by full path."""

_OPAQUE = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.GeneratorType,
    torch.Generator,
    torch.device,
    torch.dtype,
    np.ndarray,
    np.random.Generator,
    random.Random,
    Enum,
    pathlib.PurePath,
    weakref.ref,
)
_COLLECTIONS = (dict, list, tuple, deque)
SCALARS = (int, float, bool, str, type(None))
_CONSTANTS = (
    *SCALARS,
    np.generic,
    Enum,
    complex,
    bytes,
    range,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    pathlib.PurePath,
    torch.dtype,
)
RANDOM_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class SimulatorState:
    """Layout of a simulator's tensors, with functions that read and write them.

    Args:
        probe (callable): ``probe(num_envs)`` returns a simulator with ``num_envs`` envs, after a
            reset and one step, since some tensors appear only then. It is called with 7 and with
            11 envs. The dim in which the two shapes of a tensor differ is the tensor's batch dim.
            If None, states are read and written as a whole, without batch dims.
        exclude (iterable of str or Path): attributes to skip, such as a viewer. A name skips the
            attribute in all objects; a full path skips one attribute.

    Raises:
        SimulatorStateError: if a tensor's batch dim is not the first, or a ring buffer (``deque``)
            holds a batched tensor.

    Examples:
        >>> class Counter:
        ...     def __init__(self, num_envs):
        ...         self.count = torch.zeros(num_envs)
        >>> state = SimulatorState(Counter)
        >>> counter = Counter(3)
        >>> saved = state.read(counter)
        >>> counter.count += 1
        >>> state.write(counter, saved)
        >>> counter.count
        tensor([0., 0., 0.])
    """

    PROBES = (7, 11)

    def __init__(self, probe: Callable[[int], Any] | None, exclude: Exclude = ()) -> None:
        self.exclude = frozenset(exclude)
        self.batched: tuple[Path, ...] = ()
        if probe is not None:
            small, large = (walk_simulator(probe(n), self.exclude) for n in self.PROBES)
            self.batched = tuple(p for p in small.tensors if self._is_batched(p, small, large))
        self._batched = frozenset(self.batched)

    def _is_batched(self, path: Path, small: SimulatorWalk, large: SimulatorWalk) -> bool:
        name = ".".join(path)
        if path not in large.tensors:
            raise SimulatorStateError(f"{name}: exists with 7 envs, but not with 11.")
        a, b = small.tensors[path].shape, large.tensors[path].shape
        if a == b:
            return False
        differing = [i for i, (m, n) in enumerate(zip(a, b)) if m != n]
        if len(a) != len(b) or differing != [0] or (a[0], b[0]) != self.PROBES:
            raise SimulatorStateError(
                f"{name}: shapes {tuple(a)} for 7 envs and {tuple(b)} for 11; "
                "expected the envs in the first dim."
            )
        if path in small.in_ring_buffer:
            raise SimulatorStateError(f"{name}: is an entry of a ring buffer.")
        return True

    def read(self, simulator: Any) -> TensorDict:
        """Returns a copy of the whole state.

        Returns:
            TensorDict: ``"batched"`` ``[E]`` with one leaf for each path, ``"shared"`` with the
            tensors shared by all envs, and ``"structure"`` with everything else as JSON.
        """
        walk = walk_simulator(simulator, self.exclude)
        firsts = {path: walk.tensors[path] for path in walk.first_slots().values()}
        batched = {p: x for p, x in firsts.items() if p in self._batched}
        shared = {p: x for p, x in firsts.items() if p not in self._batched}
        num_envs = next(iter(batched.values())).shape[0] if batched else 0
        return TensorDict(
            {
                "batched": TensorDict(
                    {path_name(path): x.detach().clone() for path, x in batched.items()}, [num_envs]
                ),
                "shared": TensorDict(
                    {path_name(p): x.detach().clone() for p, x in shared.items()}, []
                ),
                "structure": json.dumps(walk.structure()),
            },
            [],
        )

    def write(self, simulator: Any, state: TensorDict) -> None:
        """Restores a state from :meth:`read`, including the structure.

        Raises:
            SimulatorStateError: if the state is from another simulator or number of envs.
        """
        structure = json.loads(state["structure"])
        saved = {**dict(state["batched"].items()), **dict(state["shared"].items())}
        walk_simulator(simulator, self.exclude).restore_structure(structure)
        walk_simulator(simulator, self.exclude).write(saved, structure)


def slots_of_envs(probe: Callable[[int], Any], exclude: Exclude = ()) -> dict[Path, bool]:
    """Returns whether each tensor has the envs in its first dim; compares probes of two sizes.

    The probes have 7 and 11 envs. Tensors that one of the probes lacks are omitted. ``probe`` and
    ``exclude`` are as in :class:`SimulatorState`.
    """
    sizes = SimulatorState.PROBES
    small, large = (walk_simulator(probe(n), exclude).tensors for n in sizes)
    shapes = {path: (x.shape, large[path].shape) for path, x in small.items() if path in large}
    return {
        path: (a[:1], b[:1]) == ((sizes[0],), (sizes[1],)) and a[1:] == b[1:]
        for path, (a, b) in shapes.items()
    }


def read_tensors(simulator: Any, exclude: Exclude = ()) -> dict[Path, Tensor]:
    """Returns a copy of every tensor of a simulator, by path."""
    walk = walk_simulator(simulator, exclude)
    return {path: x.detach().clone() for path, x in walk.tensors.items()}


def write_tensors(simulator: Any, tensors: dict[Path, Tensor], exclude: Exclude = ()) -> None:
    """Writes tensors from :func:`read_tensors` to the slots that hold a tensor of equal shape."""
    walk = walk_simulator(simulator, exclude)
    first = walk.first_slots()
    copies = _Copies(walk.tensors.values())
    written: dict[int, Tensor] = {}
    for path, old in walk.tensors.items():
        saved = tensors.get(first[id(old)])
        if saved is not None and saved.shape == old.shape:
            if id(old) not in written:
                written[id(old)] = copies.of(saved, old)
            set_child(walk.objects[path[:-1]], path[-1], written[id(old)])


class SimulatorWalk:
    """All tensor slots and objects reachable from a simulator, by path."""

    def __init__(self, exclude: frozenset[str | Path] = frozenset()) -> None:
        self.exclude = exclude
        self.tensors: dict[Path, Tensor] = {}
        self.objects: dict[Path, Any] = {}
        self.path_of: dict[int, Path] = {}
        self.in_tuples: dict[Path, Tensor] = {}
        self.in_ring_buffer: set[Path] = set()

    def first_slots(self) -> dict[int, Path]:
        """Maps the id of each tensor to the first slot that holds it."""
        first: dict[int, Path] = {}
        for path, tensor in self.tensors.items():
            first.setdefault(id(tensor), path)
        return first

    def slots(self) -> Iterator[tuple[Path, Any]]:
        """Yields the path and the value of every writable attribute and entry."""
        for path, holder in self.objects.items():
            if not isinstance(holder, tuple):
                for key, value in _children(holder):
                    if self.enters((*path, key)):
                        yield (*path, key), value

    def enters(self, slot: Path) -> bool:
        """Returns whether a slot belongs to the state; False if the slot is excluded."""
        return slot[-1] not in self.exclude and slot not in self.exclude

    def structure(self) -> dict[str, dict[str, Any]]:
        """Returns a dict, object -> slots; each slot is ``[scalar]`` or the name of a reference."""
        structure: dict[str, dict[str, Any]] = {}
        first = self.first_slots()
        for path, value in self.slots():
            slots = structure.setdefault(path_name(path[:-1]), {})
            if isinstance(value, SCALARS):
                slots[path[-1]] = [value]
            elif isinstance(value, Tensor):
                if path in self.tensors:
                    slots[path[-1]] = path_name(first[id(value)])
            elif id(value) in self.path_of:
                slots[path[-1]] = path_name(self.path_of[id(value)])
        return structure

    def restore_structure(self, structure: dict[str, dict[str, Any]]) -> None:
        """Restores a structure's scalars and references; removes tensors that are not in it."""
        objects = {path_name(path): x for path, x in self.objects.items()}
        for path, value in list(self.slots()):
            holder, key = self.objects[path[:-1]], path[-1]
            saved = structure.get(path_name(path[:-1]), {}).get(key)
            if saved is None and path in self.tensors:
                delete_child(holder, key)
            elif isinstance(saved, list):
                if type(value) is not type(saved[0]) or value != saved[0]:
                    set_child(holder, key, saved[0])
            elif saved is not None and objects.get(saved, value) is not value:
                set_child(holder, key, objects[saved])

    def write(self, saved: dict[str, Tensor], structure: dict[str, dict[str, Any]]) -> None:
        """Writes saved tensors; slots that shared a tensor when it was saved share it again."""
        device = next(iter(self.tensors.values())).device
        copies = _Copies(self.tensors.values())
        written: dict[str, Tensor] = {}
        for path, holder in self.objects.items():
            if isinstance(holder, tuple):
                continue
            for key, name in structure.get(path_name(path), {}).items():
                if isinstance(name, list) or name not in saved:
                    continue
                old = self.tensors.get((*path, key))
                if old is not None and old.shape != saved[name].shape:
                    raise SimulatorStateError(
                        f"{name}: saved with shape {tuple(saved[name].shape)}, found "
                        f"{tuple(old.shape)}; restore into an environment of the same size."
                    )
                if name not in written:
                    written[name] = copies.of(saved[name].to(device), old)
                set_child(holder, key, written[name])
        missing = sorted(set(saved) - set(written))
        if missing:
            raise SimulatorStateError(
                f"the saved state has {missing[0]}, which this simulator does not have; "
                "restore into an environment that was built with the same arguments."
            )


class _Copies:
    """Copies of saved tensors; two copies share memory if the tensors that they replace do."""

    def __init__(self, replaced: Iterable[Tensor]) -> None:
        self._shared = shared_storages(replaced)
        self._storages: dict[int, torch.UntypedStorage] = {}

    def of(self, saved: Tensor, old: Tensor | None) -> Tensor:
        pointer = None if old is None else old.untyped_storage().data_ptr()
        if old is None or pointer not in self._shared or not is_writable(old):
            return saved.clone()
        if pointer not in self._storages:
            self._storages[pointer] = old.untyped_storage().clone()
        new = old.detach().new_empty(0)
        new.set_(self._storages[pointer], old.storage_offset(), old.size(), old.stride())
        return new.copy_(saved)


def shared_storages(tensors: Iterable[Tensor]) -> set[int]:
    """Returns addresses of memory shared by tensors; such tensors must be written in place."""
    distinct = {id(x): x for x in tensors}.values()
    pointers = [x.untyped_storage().data_ptr() for x in distinct if is_writable(x)]
    count = Counter(pointers)
    return {pointer for pointer in pointers if pointer and count[pointer] > 1}


def is_writable(x: Tensor) -> bool:
    """Returns whether each element of a tensor has separate memory; False if it is expanded."""
    return all(stride or size < 2 for stride, size in zip(x.stride(), x.shape))


def walk_simulator(root: Any, exclude: Exclude = ()) -> SimulatorWalk:
    """Finds all objects of a simulator breadth first, but enters lists and dicts immediately.

    Therefore the path of an object in a list contains the index (``landmarks.0``), not the name of
    a reference that may change later (``goal``).
    """
    walk = SimulatorWalk(frozenset(exclude))
    queue: deque[tuple[Path, Any]] = deque([((), root)])
    while queue:
        path, holder = queue.popleft()
        if id(holder) in walk.path_of:
            continue
        walk.path_of[id(holder)] = path
        walk.objects[path] = holder
        containers = []
        for key, value in _children(holder):
            slot = (*path, key)
            if not walk.enters(slot):
                continue
            if isinstance(value, Tensor):
                found = walk.in_tuples if isinstance(holder, tuple) else walk.tensors
                found[slot] = value
                if isinstance(holder, deque):
                    walk.in_ring_buffer.add(slot)
            elif isinstance(value, _COLLECTIONS) or isinstance(holder, _COLLECTIONS):
                if _is_container(value):
                    containers.append((slot, value))
            elif _is_container(value):
                queue.append((slot, value))
        queue.extendleft(reversed(containers))
    return walk


def _is_container(value: Any) -> bool:
    if isinstance(value, _COLLECTIONS):
        return True
    if type(value) in SCALARS or isinstance(value, _OPAQUE):  # most values are scalars
        return False
    return hasattr(value, "__dict__") or bool(_slots_of(type(value)))


# Weak, since a process may make many classes.
_known_slots: WeakKeyDictionary[type, tuple[str, ...]] = WeakKeyDictionary()


def _slots_of(kind: type) -> tuple[str, ...]:
    """Returns the attributes that classes declare in ``__slots__``, such as data classes."""
    if kind not in _known_slots:
        names = [name for parent in kind.__mro__ for name in _own_slots(parent)]
        _known_slots[kind] = tuple(x for x in names if x not in ("__dict__", "__weakref__"))
    return _known_slots[kind]


def _own_slots(kind: type) -> list[str]:
    found = vars(kind).get("__slots__", ())
    own = [found] if isinstance(found, str) else list(found)
    hidden = f"_{kind.__name__.lstrip('_')}"
    return [f"{hidden}{x}" if x.startswith("__") and not x.endswith("__") else x for x in own]


def attributes(holder: Any) -> dict[str, Any]:
    """Returns the attributes of an object, also those in ``__slots__``."""
    names = _slots_of(type(holder))
    own = getattr(holder, "__dict__", {})
    if not names:
        return own
    return {**own, **{name: getattr(holder, name) for name in names if hasattr(holder, name)}}


def _children(holder: Any) -> list[tuple[str, Any]]:
    if isinstance(holder, dict):
        return [(_key_name(i, key), value) for i, (key, value) in enumerate(holder.items())]
    if isinstance(holder, _COLLECTIONS):
        return [(str(i), value) for i, value in enumerate(holder)]
    return list(attributes(holder).items())


def child(holder: Any, key: str) -> Any:
    if isinstance(holder, dict):
        return holder[_parse_key(holder, key)]
    if isinstance(holder, _COLLECTIONS):
        return holder[int(key)]
    return attributes(holder)[key]


def set_child(holder: Any, key: str, value: Any) -> None:
    if isinstance(holder, dict):
        holder[_parse_key(holder, key)] = value
    elif isinstance(holder, (list, deque)):
        holder[int(key)] = value
    elif key in _slots_of(type(holder)):
        object.__setattr__(holder, key, value)  # also of a frozen data class
    else:
        vars(holder)[key] = value


def delete_child(holder: Any, key: str) -> None:
    if isinstance(holder, dict):
        del holder[_parse_key(holder, key)]
    elif key in _slots_of(type(holder)):
        object.__delattr__(holder, key)
    elif not isinstance(holder, _COLLECTIONS):
        del vars(holder)[key]


def _key_name(index: int, key: Any) -> str:
    """Returns a dict's key as text: a string, ``#`` with a literal, or ``@`` with an index."""
    if isinstance(key, str):
        return key
    literal = isinstance(key, SCALARS) or (
        isinstance(key, tuple) and all(isinstance(part, SCALARS) for part in key)
    )
    return f"#{key!r}" if literal else f"@{index}"


def _parse_key(holder: dict, name: str) -> Any:
    if name in holder or name[:1] not in ("#", "@"):
        return name
    return ast.literal_eval(name[1:]) if name[0] == "#" else list(holder)[int(name[1:])]


def as_constant(x: Any) -> str | None:
    """Returns a constant of Python or numpy as text; None for other values.

    Examples:
        >>> as_constant(3), as_constant({2, 1}), as_constant((1, None)), as_constant([1])
        ('3', "['1', '2']", '(1, None)', None)
    """
    if isinstance(x, (set, frozenset)):
        return repr(sorted(map(repr, x)))
    if isinstance(x, tuple):
        return repr(x) if all(isinstance(part, SCALARS) for part in x) else None
    if isinstance(x, np.ndarray) and x.dtype != object:
        digest = hashlib.sha1(x.tobytes(), usedforsecurity=False).hexdigest()
        return f"{x.dtype} {x.shape} {digest}"
    return repr(x) if isinstance(x, _CONSTANTS) else None


def is_replaceable(x: Any) -> bool:
    """Returns whether a value is a function or another object that is used, but not entered."""
    if isinstance(x, (Tensor, *RANDOM_GENERATORS)) or as_constant(x) is not None:
        return False
    return not _is_container(x)


def path_name(path: Path) -> str:
    """Returns a path as text, for names and messages."""
    return ".".join(path)
