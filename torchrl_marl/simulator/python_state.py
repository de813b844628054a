"""Python state of an object, which graphs do not carry: detects its changes, and undoes them."""

from __future__ import annotations

import contextlib
import pickle
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from torchrl_marl.errors import CaptureError
from torchrl_marl.simulator.state import (
    Exclude,
    Path,
    SimulatorWalk,
    as_constant,
    attributes,
    delete_child,
    path_name,
    set_child,
    walk_simulator,
)

__all__ = ["PythonState", "watched"]

# Classes and modules of these packages keep nothing that a step changes.
_LIBRARIES = frozenset(
    ("builtins", "abc", "collections", "dataclasses", "enum", "functools", "random", "types")
    + ("typing", "numpy", "tensordict", "torch", "torchrl", "torchrl_marl", "vmas")
)
_COLLECTIONS = (dict, list, deque)
_MOST_ENTRIES = 1000  # of a collection in a class or module

Content = tuple[Any, Callable[[], Any]]
"""A value that can be compared, and a function that writes the content back."""


class PythonState:
    """Record of what an object holds, apart from the values of its tensors.

    The record includes collections, arrays, random generators, variables of functions, and the
    attributes of the classes and modules of the object's code. For networks it leaves out the
    caches of this package's modules, whose content a graph may repeat.

    Args:
        root: the object, such as a simulator or a network.
        exclude (iterable of str or Path): attributes to skip.
        tensors (bool): True for networks: a tensor or an object has changed if another one replaces
            it, and the values of tensors are restored, too.

    Raises:
        CaptureError: if an attribute of a simulator is an iterator, whose state cannot be read.

    Examples:
        >>> class Game:
        ...     def __init__(self):
        ...         self.seen = {1, 2}
        >>> game = Game()
        >>> state = PythonState(game)
        >>> game.seen.add(3)
        >>> state.changed()
        'seen'
        >>> state.restore()
        >>> game.seen
        {1, 2}
    """

    def __init__(self, root: Any, exclude: Exclude = (), *, tensors: bool = False) -> None:
        self._root, self._exclude, self._replaced = root, frozenset(exclude), tensors
        self._walk = walk_simulator(root, self._exclude)
        self._drawn = _random_states()
        if not tensors:  # TorchRL's networks keep iterators that only their constructors read
            _refuse_iterators(self._walk)
        self._spaces = [*_namespaces(self._walk)]
        self._marks = self._read_marks(self._walk)
        holders = [(p, x) for p, x in self._walk.objects.items() if self._records(self._walk, p)]
        self._variables = [(s, name, x) for s in self._spaces for name, x in _variables(s)]
        collections = [((), x) for *_, x in self._variables if isinstance(x, _COLLECTIONS)]
        self._holders = [(path, x, _entries(x)) for path, x in (*holders, *collections)]
        values = [*(x for _, x in self._walk.slots()), *(x for *_, x in self._variables)]
        contents = [own for x in values if (own := _content(x)) is not None]
        self._write_back = [write for _, write in contents]
        held = {**self._walk.in_tuples, **(self._walk.tensors if tensors else {})}
        self._values = [(x, x._version, x.detach().clone()) for x in held.values()]

    def _read_marks(self, walk: SimulatorWalk) -> dict[str, Any]:
        slots = [(path, x) for path, x in walk.slots() if self._records(walk, path[:-1])]
        marks = {path_name(path): _mark(x, self._replaced) for path, x in slots}
        in_tuples = [(p, x) for p, x in walk.in_tuples.items() if self._records(walk, p[:-1])]
        marks |= {path_name(path): (id(x), x._version) for path, x in in_tuples}
        for space in self._spaces:
            name = getattr(space, "__qualname__", space.__name__)
            marks |= {f"{name}.{key}": _variable_mark(x) for key, x in _variables(space)}
        return {name: mark for name, mark in marks.items() if mark is not None}

    def _records(self, walk: SimulatorWalk, path: Path) -> bool:
        """Returns whether the content of the object or collection at a path is recorded."""
        if not self._replaced:
            return True
        while path and isinstance(walk.objects[path], (*_COLLECTIONS, tuple)):
            path = path[:-1]
        return type(walk.objects[path]).__module__.partition(".")[0] != "torchrl_marl"

    def changed(self) -> str | None:
        """Returns the name of a value that has changed, or None."""
        now = self._read_marks(walk_simulator(self._root, self._exclude))
        names = sorted({*self._marks, *now})
        return next((name for name in names if self._marks.get(name) != now.get(name)), None)

    def refuse_changes(self, what: str, fix: str) -> None:
        """Raises an error if a value or a global random state has changed.

        Args:
            what (str): what has made the change, for the message.
            fix (str): how to avoid it, for the message.

        Raises:
            CaptureError: a value or a random state has changed; the message names it.
        """
        changed = self.changed()
        if changed is not None:
            raise CaptureError(f"{what} changes {changed}, which a graph does not carry; {fix}")
        if _random_states() != self._drawn:
            raise CaptureError(
                "random numbers of numpy or Python are not captured; draw them from torch"
            )

    @torch.no_grad()
    def restore(self) -> None:
        """Undoes all changes; writes in place to tensors only if they were recorded."""
        for path, holder, saved in self._holders:
            if isinstance(holder, _COLLECTIONS):
                _refill(holder, saved)
            elif not isinstance(holder, tuple):
                self._restore_attributes(path, holder, saved)
        for write in self._write_back:
            write()
        for x, version, saved in self._values:
            if x._version != version:
                x.copy_(saved)
        for space, name, x in self._variables:
            if vars(space).get(name) is not x:
                setattr(space, name, x)

    def _restore_attributes(self, path: tuple, holder: Any, saved: dict[str, Any]) -> None:
        current = dict(attributes(holder))
        for key in {*current, *saved}:
            if not self._walk.enters((*path, key)) or current.get(key, ...) is saved.get(key, ...):
                continue
            if key in saved:
                set_child(holder, key, saved[key])
            else:
                delete_child(holder, key)


def _random_states() -> tuple:
    """Returns the states of the global generators of numpy and Python."""
    state: Any = np.random.get_state()
    return state[1].tobytes(), *state[2:], random.getstate()


@contextlib.contextmanager
def watched(root: Any) -> Iterator[None]:
    """Context in which a graph of networks is recorded; their Python state must not change.

    On exit, the networks are as before, also their tensors.

    Args:
        root: the networks, or an object that holds them.

    Raises:
        CaptureError: if a number, an object or a random state changes; the message names it.
    """
    before = PythonState(root, tensors=True)
    try:
        yield
        before.refuse_changes(
            "a call of the networks", "keep it in a buffer that is written in place"
        )
    finally:
        before.restore()


def _refuse_iterators(walk: SimulatorWalk) -> None:
    for path, x in walk.slots():
        if isinstance(x, Iterator) and not hasattr(x, "__dict__"):
            raise CaptureError(
                f"{path_name(path)} is an iterator, whose state cannot be read; keep a tensor with "
                "the envs in the first dim"
            )


def _mark(x: Any, replaced: bool = False) -> Any:
    """Returns what differs if a value has changed; None if it may change, such as a tensor."""
    text, content = as_constant(x), _content(x)
    if text is not None or content is not None:
        return text if content is None else content[0]
    return id(x) if replaced else None


def _content_of_closure(x: types.FunctionType) -> Content:
    """Returns the variables of an outer function that a function reads or writes."""
    cells = [(cell, cell.cell_contents) for cell in x.__closure__ or () if _is_assigned(cell)]

    def write() -> None:
        for cell, value in cells:
            cell.cell_contents = value

    return [as_constant(value) or id(value) for _, value in cells], write


def _is_assigned(cell: Any) -> bool:
    try:
        return cell.cell_contents is not ...
    except ValueError:
        return False


def _content(x: Any) -> Content | None:
    """Returns the content of a set, array, generator or closure; None for other values."""
    state: Any
    if isinstance(x, types.FunctionType):
        return _content_of_closure(x)
    if isinstance(x, set):
        state = frozenset(x)
        return state, lambda: _refill(x, state)
    if isinstance(x, np.ndarray) and x.dtype != object and x.flags.writeable:
        state = x.copy()
        return state.tobytes(), lambda: np.copyto(x, state)
    if isinstance(x, np.random.Generator):
        state = x.bit_generator.state
        return pickle.dumps(state), lambda: setattr(x.bit_generator, "state", state)
    if isinstance(x, np.random.RandomState):
        state = x.get_state()
        return pickle.dumps(state), lambda: x.set_state(state)
    if isinstance(x, random.Random):
        state = x.getstate()
        return state, lambda: x.setstate(state)
    if isinstance(x, torch.Generator):
        state = x.get_state()
        return state.numpy().tobytes(), lambda: x.set_state(state)
    return None


def _entries(holder: Any) -> Any:
    if isinstance(holder, dict):
        return dict(holder)
    return list(holder) if isinstance(holder, (list, deque)) else dict(attributes(holder))


def _refill(holder: Any, saved: Any) -> None:
    """Writes the entries of a collection back, unless it still has them."""
    if len(holder) == len(saved) and _has_entries(holder, saved):
        return
    holder.clear()
    if isinstance(holder, (list, deque)):
        holder.extend(saved)
    else:
        holder.update(saved)


def _has_entries(holder: Any, saved: Any) -> bool:
    if isinstance(holder, set):
        return holder == saved
    if isinstance(holder, dict):
        return all(key in holder and holder[key] is x for key, x in saved.items())
    return all(x is y for x, y in zip(holder, saved))


def _namespaces(walk: SimulatorWalk) -> Iterator[Any]:
    """Yields the user's classes of a simulator's objects, and the modules that define them."""
    kinds = dict.fromkeys(kind for x in walk.objects.values() for kind in type(x).__mro__)
    own = [kind for kind in kinds if not _is_of_library(kind)]
    yield from own
    for name in dict.fromkeys(kind.__module__ for kind in own):
        if name in sys.modules:
            yield sys.modules[name]


def _is_of_library(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _LIBRARIES


def _variables(space: Any) -> list[tuple[str, Any]]:
    """Returns the constants and small collections among the attributes of a class or module."""
    found = vars(space).items()
    return [(key, x) for key, x in found if not key.startswith("__") and _is_variable(x)]


def _is_variable(x: Any) -> bool:
    if isinstance(x, _COLLECTIONS):
        return len(x) <= _MOST_ENTRIES
    return isinstance(x, np.ndarray) or as_constant(x) is not None


def _variable_mark(x: Any) -> Any:
    if not isinstance(x, _COLLECTIONS):
        return _mark(x)
    entries = [part for item in x.items() for part in item] if isinstance(x, dict) else x
    return tuple(as_constant(part) or id(part) for part in entries)
