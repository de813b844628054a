"""Packing of a simulator's state into a few matrices, and a pool of new initial states."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDict, TensorDictBase
from torch import Tensor

from torchrl_marl.errors import CaptureError
from torchrl_marl.runtime.random_state import RandomState
from torchrl_marl.simulator.settings import Settings, refuse_dependent_starts, written_by
from torchrl_marl.simulator.state import (
    Path,
    SimulatorState,
    child,
    path_name,
    set_child,
    walk_simulator,
)

__all__ = ["Packing", "ResetPool", "TensorDictLayout", "begin_episodes", "put_back"]


@dataclass(frozen=True)
class _Slot:
    """All paths in a simulator that hold the same tensor, with the tensor's shape and dtype."""

    paths: tuple[Path, ...]
    shape: torch.Size  # shape without the dim of the envs
    dtype: torch.dtype


class Packing:
    """Packing of a simulator's tensors into matrices ``[K, E]``, one per dtype.

    The values of all envs are contiguous in memory, so an operation on all envs is fast. To give
    new initial states to some envs, one ``torch.where`` per matrix suffices. Tensors that all envs
    share are not packed, and follow the matrices.

    Args:
        simulator: the simulator, after a reset and a step.
        state (SimulatorState): layout of the simulator's state.
        shared (iterable of Path): tensors that all envs share and that a step writes.
        apart (iterable of Path): slots that now hold the same tensor as another slot, but may hold
            a different tensor after a step.
        written (iterable of Path): all slots that a step writes.

    Attributes:
        n_numbers (int): number K of values per env, summed over all matrices.
        paths (frozenset of Path): paths of all slots.

    Shapes:
        - a state: a list of ``[K, E]``, one per dtype, followed by the shared tensors
    """

    def __init__(
        self,
        simulator: Any,
        state: SimulatorState,
        shared: Iterable[Path] = (),
        apart: Iterable[Path] = (),
        written: Iterable[Path] = (),
    ) -> None:
        self.exclude = state.exclude
        self.batched = frozenset(state.batched)
        self.written = frozenset(written)
        self.apart = frozenset(apart)
        walk = walk_simulator(simulator, state.exclude)
        self.shared = tuple(_group_shared(walk, shared, frozenset()))
        slots = []
        for paths in _group_shared(walk, state.batched, self.apart):
            x = walk.tensors[paths[0]]
            slots.append(_Slot(paths, x.shape[1:], x.dtype))
        if not slots:
            raise CaptureError("the simulator has no tensor with the envs in the first dim")
        self.device = walk.tensors[slots[0].paths[0]].device
        self.dtypes = sorted({slot.dtype for slot in slots}, key=str)
        self._slots = [[s for s in slots if s.dtype == dtype] for dtype in self.dtypes]
        self._sizes = [[s.shape.numel() for s in slots] for slots in self._slots]
        self.n_numbers = sum(map(sum, self._sizes))
        self.paths: frozenset[Path] = frozenset().union(
            *(slot.paths for slot in slots), *self.shared
        )

    def read(self, simulator: Any) -> list[Tensor]:
        """Returns a copy of the state.

        Raises:
            CaptureError: if a tensor is missing or has another shape than before.
        """
        find = _TensorFinder(simulator)
        state = []
        for slots in self._slots:
            rows = [_as_matrix_rows(slot, find.get(slot.paths[0])) for slot in slots]
            # A compiled ``cat`` of one slot would keep the slot's layout; graphs need a fixed one.
            own = rows[0].clone(memory_format=torch.contiguous_format)
            state.append(torch.cat(rows) if len(rows) > 1 else own)
        return state + [find.get(paths[0]).clone().contiguous() for paths in self.shared]

    def name(self, i: int, x: Tensor, y: Tensor) -> str:
        """Returns the first slot in which two matrices of a state differ."""
        if i >= len(self._slots):
            return path_name(self.shared[i - len(self._slots)][0])
        row = int((x != y).any(1).nonzero()[0])
        ends = torch.tensor(self._sizes[i]).cumsum(0)
        return path_name(self._slots[i][int((ends <= row).sum())].paths[0])

    def write(self, simulator: Any, state: Sequence[Tensor]) -> None:
        """Writes copies of a state into the simulator's slots."""
        find = _TensorFinder(simulator)
        for slots, sizes, matrix in zip(self._slots, self._sizes, state):
            for slot, rows in zip(slots, matrix.split(sizes)):
                # A simulator may call ``view``, so each env's values must be contiguous.
                x = rows.view(*slot.shape, matrix.shape[-1]).movedim(-1, 0)
                find.set(slot.paths, x.clone(memory_format=torch.contiguous_format))
        for paths, x in zip(self.shared, state[len(self._slots) :]):
            find.set(paths, x.clone())

    def rows_of(self, written: frozenset[Path], device: torch.device) -> list[Tensor]:
        """Returns masks of each matrix's rows that belong to slots with a path in ``written``.

        Shapes:
            - returns: ``[K, 1]`` bool per matrix
        """
        rows = []
        for slots, sizes in zip(self._slots, self._sizes):
            flags = [not written.isdisjoint(slot.paths) for slot in slots]
            rows.append(torch.tensor(flags).repeat_interleave(torch.tensor(sizes)))
        return [x.unsqueeze(-1).to(device) for x in rows]

    def __len__(self) -> int:
        """Returns the number of matrices, without the shared tensors."""
        return len(self._slots)


class _TensorFinder:
    """Finds a simulator's tensors by path; looks up each object on a path only once."""

    def __init__(self, simulator: Any) -> None:
        self._holders: dict[Path, Any] = {(): simulator}

    def _holder(self, path: Path) -> Any:
        if path not in self._holders:
            self._holders[path] = child(self._holder(path[:-1]), path[-1])
        return self._holders[path]

    def get(self, path: Path) -> Tensor:
        try:
            value = child(self._holder(path[:-1]), path[-1])
        except LookupError:
            value = None
        if not isinstance(value, Tensor):
            raise CaptureError(f"the simulator has no tensor {path_name(path)} any more")
        return value

    def set(self, paths: Iterable[Path], value: Tensor) -> None:
        for path in paths:
            set_child(self._holder(path[:-1]), path[-1], value)


def put_back(simulator: Any, tensors: dict[Path, Tensor]) -> None:
    """Puts the given tensor objects (no copies) into a simulator's slots."""
    find = _TensorFinder(simulator)
    for path, x in tensors.items():
        find.set((path,), x)


def _group_shared(walk, wanted: Iterable[Path], apart: frozenset[Path]) -> list[tuple[Path, ...]]:
    """Returns groups of paths; the paths of a group hold the same tensor."""
    groups: dict[Any, list[Path]] = {}
    for path in wanted:
        if path in walk.tensors:
            key = path if path in apart else id(walk.tensors[path])
            groups.setdefault(key, []).append(path)
    return [tuple(paths) for paths in groups.values()]


def _as_matrix_rows(slot: _Slot, x: Tensor) -> Tensor:
    """Reshapes a slot's tensor ``[E, ...]`` to matrix rows ``[K, E]``."""
    if x.ndim == 0 or x.shape[1:] != slot.shape or x.dtype != slot.dtype:
        raise CaptureError(
            f"{path_name(slot.paths[0])} is {x.dtype} {list(x.shape[1:])} of an env now, "
            f"and was {slot.dtype} {list(slot.shape)}"
        )
    return x.unsqueeze(0) if x.ndim == 1 else x.reshape(x.shape[0], -1).t()


class TensorDictLayout:
    """Keys of a TensorDict ``[E]``, and batch sizes of its nested TensorDicts.

    Args:
        example (TensorDictBase): example of the layout.

    Raises:
        CaptureError: if a group is stacked lazily.

    Examples:
        >>> td = TensorDict({"done": torch.zeros(3, 1),
        ...                  "cats": TensorDict({"reward": torch.ones(3, 2, 1)}, [3, 2])}, [3])
        >>> nesting = TensorDictLayout(td)
        >>> nesting.keys
        [('cats', 'reward'), 'done']
        >>> nesting.build(nesting.leaves(td), [3])["cats"].batch_size
        torch.Size([3, 2])
    """

    def __init__(self, example: TensorDictBase) -> None:
        self.device = example.device
        self._batch = example.batch_size
        self.keys: list[NestedKey] = []
        # Path of a nested TensorDict -> the batch dims that it has in addition to the outer one's.
        self.inner: dict[tuple[str, ...], torch.Size] = {}
        self._enter(example, ())

    @classmethod
    def of(
        cls,
        keys: Sequence[NestedKey],
        inner: dict[tuple[str, ...], torch.Size],
        device: torch.device | None,
    ) -> TensorDictLayout:
        """Builds a layout from the attributes of another one."""
        nesting = cls(TensorDict({}, [], device=device))
        nesting.keys, nesting.inner = list(keys), dict(inner)
        return nesting

    def _enter(self, td: TensorDictBase, path: tuple[str, ...]) -> None:
        if isinstance(td, LazyStackedTensorDict):
            raise CaptureError(
                f"{'.'.join(path)!r} is stacked lazily; torchrl_marl.envs.PadAgents makes it dense"
            )
        for name in sorted(td.keys()):
            value = td.get(name)
            if isinstance(value, TensorDictBase):
                self.inner[*path, name] = value.batch_size[len(self._batch) :]
                self._enter(value, (*path, name))
            elif isinstance(value, Tensor):
                self.keys.append((*path, name) if path else name)

    def leaves(self, td: TensorDictBase) -> list[Tensor]:
        """Returns the tensors of a TensorDict with this layout."""
        return [td.get(key) for key in self.keys]

    def build(self, leaves: Sequence[Tensor], batch_size: Sequence[int]) -> TensorDict:
        """Builds a TensorDict with this layout from its tensors.

        Args:
            leaves (sequence of Tensor): tensors in the order of :attr:`keys`.
            batch_size (sequence of int): leading dims of the tensors, such as ``[E, T]``.
        """
        made: dict[tuple[str, ...], TensorDict] = {}
        for path, own in {(): (), **self.inner}.items():
            size = torch.Size((*batch_size, *own))
            made[path] = TensorDict._new_unsafe({}, batch_size=size, device=self.device)
            if path:
                made[path[:-1]]._tensordict[path[-1]] = made[path]
        for key, leaf in zip(self.keys, leaves):
            path = key if isinstance(key, tuple) else (key,)
            made[path[:-1]]._tensordict[path[-1]] = leaf
        return made[()]


# Largest number of values in a pool; largest number of envs of the pool's twin (CPU, GPU).
_NUMBERS = 2**24
_DRAWN_AT_ONCE = (2**13, 2**17)

Carry = dict[Any, Tensor]


class ResetPool:
    """Pool of initial states for the next D episodes of every env, drawn in batched resets.

    The initial states come from resets of a *twin*, a copy of the environment with several times as
    many envs. When an episode ends, its env takes over only the values that such a reset writes. A
    graph counts in ``used`` how many initial states each env has taken, without waiting for the
    device. If an env needs more than D initial states between two refills, its initial states are
    repeated in the same order, and a warning is given once.

    For eager steps, which may wait for the device, there is
    :class:`~torchrl_marl.simulator.resets.ResetBank`. It draws one initial state per env, when one
    is needed. Pool and bank draw different random numbers, so they are not interchangeable.

    Args:
        packing (Packing): packing of the running simulator, also used for the twin.
        simulator: the running simulator; the simulator's settings are copied to the twin.
        make_twin (callable): ``make_twin(n)`` returns a twin with n envs and its simulator. The
            twin shares the random state of the running environment.
        num_envs (int): number E of envs.
        depth (int): number D of initial states per env. It should be at least the number of
            episodes that end in an env between two refills. For very large states D is reduced,
            but not below 8.

    Shapes:
        - ``state``: ``[D, K, E]`` per matrix; ``carry``: ``[D, E, ...]`` per entry of the reset
        - ``written``: ``[K, 1]`` bool per matrix; ``used``: ``[E]``

    Attributes:
        is_stale (bool): True if the initial states were discarded; then :meth:`prepare` draws new
            ones.

    Raises:
        CaptureError: raised by refills, if an initial state depends on the env's state before the
            reset.
    """

    def __init__(
        self,
        packing: Packing,
        simulator: Any,
        make_twin: Callable[[int], tuple[Any, Any]],
        num_envs: int,
        depth: int = 32,
    ) -> None:
        self._packing = packing
        self._simulator = simulator
        self._make_twin = make_twin
        self._written: frozenset[Path] = frozenset()
        self.num_envs = num_envs
        affordable = _NUMBERS // max(1, packing.n_numbers * num_envs)
        self.depth = min(depth, max(8, affordable))
        many = _DRAWN_AT_ONCE[packing.device.type == "cuda"]
        self._at_once = min(self.depth, max(1, many // num_envs))
        self._warned = False
        self._most = 0  # largest number of episodes of an env that ended between two refills
        self._used_before = 0
        self._twin: Any = None
        self._small: tuple[Any, Any] | None = None  # a small twin, for trial resets
        self.is_stale = True
        self._drawn_for = ""  # the structure of the simulator for which the states were drawn
        self._settings: Settings | None = None
        self._checked = False
        self.tensors: dict[str, Any] = {}

    def refill(self, n_rows: int | None = None) -> None:
        """Redraws the first ``n_rows`` initial states of every env; by default all states."""
        if not self._checked or self.is_outdated():
            self._refuse_dependence()
        n_rows = self.depth if n_rows is None or not self.tensors else min(n_rows, self.depth)
        drawn = [self._draw_states() for _ in range(0, n_rows, self._at_once)]
        rows = [torch.cat(parts)[:n_rows] for parts in zip(*drawn)]
        n = len(self._packing)
        if self.tensors:
            for x, new in zip((*self.tensors["state"], *self.tensors["carry"].values()), rows):
                x[:n_rows] = new
        else:
            self.tensors = {
                "state": rows[:n],
                "carry": dict(zip(self.nesting.keys, rows[n:])),
            }
        device = self._packing.device
        self.tensors["written"] = self._packing.rows_of(self._written, device)
        self.tensors["used"] = torch.zeros(self.num_envs, dtype=torch.int64, device=device)
        self._used_before, self.is_stale = 0, False
        self._note_settings()

    def is_outdated(self) -> bool:
        """Returns whether the running simulator's settings have changed since the last refill."""
        return self._settings is not None and self._settings.changed()

    def _note_settings(self) -> None:
        moving = self._packing.written | self._written
        self._settings = Settings(self._simulator, self._packing.exclude, moving)

    def _refuse_dependence(self) -> None:
        """Raises an error if initial states of a small twin depend on states before the reset."""
        if self._small is None:
            self._small = self._make_twin(SimulatorState.PROBES[1])
        twin, simulator = self._small
        base, random = getattr(twin, "base_env", twin), RandomState(0, self._packing.device)

        def reset() -> dict[str, Tensor]:
            carry = twin.reset()
            keys = TensorDictLayout(carry).keys
            return {path_name(k if isinstance(k, tuple) else (k,)): carry.get(k) for k in keys}

        def step() -> None:
            twin.step(twin.rand_action(twin.reset()))

        with base._isolated(random):
            refuse_dependent_starts(
                simulator, self._packing.exclude, random, reset, step, CaptureError
            )
        self._checked = True

    def _draw_states(self) -> list[Tensor]:
        """Draws n initial states per env: matrices ``[n, K, E]``, and entries ``[n, E, ...]``."""
        if self._twin is None:
            self._twin, self._twin_simulator = self._make_twin(self._at_once * self.num_envs)
        getattr(self._twin, "base_env", self._twin)._follow_leader()
        simulator = self._twin_simulator
        drawn: list[TensorDictBase] = []
        written = written_by(
            simulator, self._packing.exclude, lambda: drawn.append(self._twin.reset())
        )
        self._written |= written & self._packing.batched
        carry = drawn[0]
        self.nesting = TensorDictLayout(carry)
        shape = (self._at_once, self.num_envs)
        matrices = self._packing.read(simulator)[: len(self._packing)]
        return [
            *(x.unflatten(1, shape).movedim(1, 0) for x in matrices),
            *(x.unflatten(0, shape) for x in self.nesting.leaves(carry)),
        ]

    def empty(self) -> None:
        """Discards the remaining initial states, for example after a new seed."""
        self.is_stale = True

    def discard_if_other_structure(self, structure: str) -> None:
        """Discards the initial states if they were drawn for another structure of the simulator.

        Args:
            structure (str): current structure, from :meth:`CapturedSimulator.structure`.
        """
        if structure != self._drawn_for:
            self.empty()
            self._drawn_for = structure

    def discard_twin(self) -> None:
        """Discards the twin; the next refill builds a new one."""
        self._twin = self._small = None

    def prepare(self) -> None:
        """Refills the pool before it runs out. Waits for the device; call it between rollouts."""
        if self.is_stale or self.is_outdated():
            self.refill()
            return
        if self._settings is None:  # the initial states were restored
            self._note_settings()
        # On a GPU the next line waits for the device.
        used = int(self.tensors["used"].max().cpu())
        self._most = max(self._most, used - self._used_before)
        self._used_before = used
        if used > self.depth and not self._warned:
            self._warned = True
            warnings.warn(
                f"an env ended {used} times between two refills of its {self.depth} starts, so "
                "some of its episodes had the same start. Shorter batches are refilled more often.",
                stacklevel=2,
            )
        if used + min(self._most, self.depth) > self.depth:
            self.refill(used)

    def state_dict(self) -> dict[str, Any]:
        """Returns the remaining initial states, and the structure for which they were drawn."""
        return {"pool": self._starts(), "drawn_for": self._drawn_for}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores saved initial states; without any, new ones will be drawn."""
        self._load_starts(state.get("pool", {}))
        self._drawn_for = state.get("drawn_for", "")

    def _starts(self) -> dict[str, Any]:
        """Returns the initial states as tensors, and a description in JSON; empty if outdated."""
        if self.is_stale or self.is_outdated():
            return {}
        about = {
            "depth": self.depth,
            "most": self._most,
            "used_before": self._used_before,
            "written": sorted(self._written),
            "carry": self.nesting.keys,
            "inner": list(self.nesting.inner.items()),
        }
        leaves = [*self.tensors["state"], *self.tensors["carry"].values()]
        drawn = {str(i): x.clone() for i, x in enumerate(leaves)}
        return {"about": json.dumps(about), "used": self.tensors["used"].clone(), "drawn": drawn}

    def _load_starts(self, state: dict[str, Any]) -> None:
        self._settings = None  # later read from the simulator, when the run continues
        if not state:
            self.is_stale = True
            return
        about = json.loads(state["about"])
        self.depth, self._most = about["depth"], about["most"]
        self._used_before, self.is_stale = about["used_before"], False
        self._written = self._packing.batched & {tuple(path) for path in about["written"]}
        keys = [tuple(key) if isinstance(key, list) else key for key in about["carry"]]
        inner = {tuple(path): torch.Size(size) for path, size in about["inner"]}
        self.nesting = TensorDictLayout.of(keys, inner, self._packing.device)
        device, n = self._packing.device, len(self._packing)
        leaves = [state["drawn"][str(i)].to(device).clone() for i in range(len(state["drawn"]))]
        self.tensors = {
            "state": leaves[:n],
            "carry": dict(zip(keys, leaves[n:])),
            "written": self._packing.rows_of(self._written, device),
            "used": state["used"].to(device).clone(),
        }


def begin_episodes(
    ended: Tensor, state: list[Tensor], carry: Carry, pool: dict[str, Any]
) -> tuple[list[Tensor], Carry, Tensor]:
    """Gives ended envs new initial states from the pool; can also be called inside of graphs.

    Args:
        ended (Tensor): mask of the ended envs, bool ``[E]``.
        state (list of Tensor): state of all envs, ``[K, E]`` per matrix, shared tensors last.
        carry (dict): input of the next step, ``[E, ...]`` per entry. Entries that are not in the
            pool become zero in the ended envs.
        pool (dict): ``ResetPool.tensors``.

    Returns:
        tuple: new state, new carry, and number of initial states that each env has taken.
    """
    row = pool["used"] % pool["state"][0].shape[0]
    fresh = [
        torch.where(ended & written, _select_row(starts, row, -1), matrix)
        for matrix, starts, written in zip(state, pool["state"], pool["written"])
    ]
    starts = pool["carry"]
    following = {
        key: torch.where(
            _expand_envs(ended, x, 0),
            _select_row(starts[key], row, 0) if key in starts else x.new_zeros(()),
            x,
        )
        for key, x in carry.items()
    }
    return [*fresh, *state[len(fresh) :]], following, pool["used"] + ended


def _select_row(starts: Tensor, row: Tensor, dim: int) -> Tensor:
    """Selects one of D rows for each env; ``dim`` is the dim of the envs."""
    index = _expand_envs(row, starts[0], dim).expand_as(starts[0])
    return starts.gather(0, index.unsqueeze(0)).squeeze(0)


def _expand_envs(x: Tensor, like: Tensor, dim: int) -> Tensor:
    """Reshapes ``[E]`` to broadcast with another tensor that has the envs in ``dim``."""
    shape = [1] * like.ndim
    shape[dim] = -1
    return x.view(shape)
