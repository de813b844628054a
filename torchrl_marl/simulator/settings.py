"""A simulator's settings, and whether new starts depend on anything else.

Shapes: E envs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from torchrl_marl.random_state import RandomState
from torchrl_marl.simulator.state import (
    SCALARS,
    Path,
    SimulatorWalk,
    child,
    path_name,
    set_child,
    shared_storages,
    walk_simulator,
)

__all__ = ["Settings", "refuse_dependent_starts", "what_starts_depend_on", "written_by"]

_MISSING = object()


class Settings:
    """A simulator's present settings: numbers, and tensors, also those set in place.

    Args:
        simulator: that may be set to something else later.
        exclude (iterable of str or Path): what not to enter.
        moving (iterable of Path): what its steps and new episodes write, which is no setting.

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

    def __init__(
        self, simulator: Any, exclude: Iterable[str | Path] = (), moving: Iterable[Path] = ()
    ) -> None:
        self._exclude, moves = frozenset(exclude), frozenset(moving)
        walk = walk_simulator(simulator, self._exclude)
        self._tensors: list[tuple[Any, str, Tensor, int, Tensor]] = []
        self._numbers: list[tuple[Any, str, Any]] = []
        # An object may override what its class has.
        self._known = [(p, x, set(vars(x))) for p, x in walk.objects.items() if _is_open(x)]
        for path, value in walk.slots():
            holder = walk.objects[path[:-1]]
            if path in moves:
                continue
            if isinstance(value, Tensor):
                copy = value.detach().clone()
                self._tensors.append((holder, path[-1], value, value._version, copy))
            elif isinstance(value, SCALARS):
                self._numbers.append((holder, path[-1], value))

    def changed(self) -> bool:
        """Returns whether any setting differs; reads no values of unchanged tensors."""
        for path, holder, known in self._known:
            new = vars(holder).keys() - known if len(vars(holder)) > len(known) else ()
            if any(not {key, (*path, key)} & self._exclude for key in new):
                return True
        for holder, key, value in self._numbers:
            now = _get(holder, key)
            if now is not value and (type(now) is not type(value) or now != value):
                return True
        for i, (holder, key, x, version, copy) in enumerate(self._tensors):
            now = _get(holder, key)
            if now is x and x._version == version:
                continue
            if not isinstance(now, Tensor) or not _equal(now, copy):
                return True
            self._tensors[i] = holder, key, now, now._version, copy
        return False


def written_by(simulator: Any, exclude: Iterable[str | Path], call: Callable[[], Any]) -> set[Path]:
    """Returns the slots of tensors and numbers that a call writes."""
    excluded = frozenset(exclude)
    walk = walk_simulator(simulator, excluded)
    before = {path: (x, x._version) for path, x in walk.tensors.items()}
    others = _others(walk)
    call()
    after = walk_simulator(simulator, excluded)
    written = {path for path, x in after.tensors.items() if not _is_as(x, before.get(path))}
    return written | {p for p, x in _others(after).items() if not _equal(x, others.get(p))}


def _is_as(x: Tensor, before: tuple[Tensor, int] | None) -> bool:
    return before is not None and x is before[0] and x._version == before[1]


def _others(walk: SimulatorWalk) -> dict[Path, Any]:
    """Returns numbers, and the names of referenced objects."""
    others: dict[Path, Any] = {}
    for path, value in walk.slots():
        if isinstance(value, SCALARS):
            others[path] = [value]
        elif id(value) in walk.path_of:
            others[path] = path_name(walk.path_of[id(value)])
    return others


def refuse_dependent_starts(
    simulator: Any,
    exclude: Iterable[str | Path],
    random: RandomState,
    reset: Callable[[], dict[str, Tensor]],
    step: Callable[[], Any],
    refusal: type[Exception],
) -> None:
    """Refuses a simulator whose new starts depend on what an env had before.

    Args:
        simulator, exclude, step: as in :func:`what_starts_depend_on`.
        random (RandomState): what ``reset`` draws from.
        reset (callable): as there, with any random numbers.
        refusal (type): of the exception.

    Raises:
        Exception: the refusal, naming what a start depends on.
    """

    def begin() -> dict[str, Tensor]:
        random.seed(0)
        return reset()

    with RandomState(0, random.device).active():
        why = what_starts_depend_on(simulator, exclude, begin, step)
    if why is not None:
        raise refusal(f"a new start depends on what an env had before: {why}")


def what_starts_depend_on(
    simulator: Any,
    exclude: Iterable[str | Path],
    reset: Callable[[], dict[str, Tensor]],
    step: Callable[[], Any],
) -> str | None:
    """Returns the name of a value in new starts that depends on the state before, or None.

    The simulator is reset from several states, with the same random numbers. What steps and
    resets write is in one of them as it came, in another one zero, in a third one more.

    Args:
        simulator: one to be played with.
        exclude (iterable of str or Path): what not to enter.
        reset (callable): ``reset()`` begins episodes in all envs, with the same random numbers
            each time, and gives what else belongs to a start.
        step (callable): ``step()`` makes an eager step.
    """
    excluded = frozenset(exclude)
    moving = written_by(simulator, excluded, reset)
    first, written = _start(simulator, excluded, reset)
    for vary in (torch.zeros_like, _more):
        moving |= written_by(simulator, excluded, step)
        _vary(simulator, excluded, moving, vary)
        try:
            other, also = _start(simulator, excluded, reset)
        except Exception as error:  # worlds may raise anything at impossible states
            return f"a reset that finds another state raises {type(error).__name__}: {error}"
        written |= also
        for name in sorted(written, key=lambda name: (name[0] == "_", name)):
            if not _equal(first.get(name, _MISSING), other.get(name, _MISSING)):
                return name
    return None


def _start(
    simulator: Any, exclude: frozenset[str | Path], reset: Callable[[], dict[str, Tensor]]
) -> tuple[dict[str, Any], set[str]]:
    """Returns the state after a reset by name, and which of it the reset wrote."""
    output: dict[str, Tensor] = {}
    written = written_by(simulator, exclude, lambda: output.update(reset()))
    walk = walk_simulator(simulator, exclude)
    tensors = {path: x.clone() for path, x in walk.tensors.items()}
    found = {path_name(path): x for path, x in (_others(walk) | tensors).items()}
    return {**found, **output}, {*map(path_name, written), *output}


def _vary(
    simulator: Any,
    exclude: frozenset[str | Path],
    moving: set[Path],
    vary: Callable[[Tensor], Tensor],
) -> None:
    walk = walk_simulator(simulator, exclude)
    memory = {path: x.untyped_storage().data_ptr() for path, x in walk.tensors.items()}
    views = shared_storages(walk.tensors.values())
    views -= {
        pointer
        for path, pointer in memory.items()
        if path not in moving or _is_expanded(walk.tensors[path])
    }
    new: dict[int, Tensor] = {}
    for path in moving & walk.tensors.keys():
        x = walk.tensors[path]
        if id(x) not in new:
            varied = vary(x.detach()).contiguous()
            # A view of memory that moves as a whole remains one.
            new[id(x)] = x.detach().copy_(varied) if memory[path] in views else varied
        if memory[path] not in views:
            set_child(walk.objects[path[:-1]], path[-1], new[id(x)])


def _is_expanded(x: Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape))


def _more(x: Tensor) -> Tensor:
    if x.dtype == torch.bool:
        return ~x
    if x.is_floating_point() or x.is_complex() or not x.numel():
        return x + 1
    return (x + 1).clamp(max=max(int(x.max()), 1))  # too large an index aborts on a GPU


def _is_open(holder: Any) -> bool:
    return hasattr(holder, "__dict__")


def _get(holder: Any, key: str) -> Any:
    try:
        return child(holder, key)
    except LookupError:
        return _MISSING


def _equal(x: Any, y: Any) -> bool:
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        return type(x) is type(y) and bool(x == y)
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    same = x == y
    if x.is_floating_point():
        same = same | (x.isnan() & y.isnan())
    return bool(same.all())
