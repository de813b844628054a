"""Start states drawn ahead, from which a graph takes one where an episode ends.

Shapes: D starts of an env, E envs, K numbers of an env.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_marl.errors import CaptureError
from torchrl_marl.random_state import RandomState
from torchrl_marl.simulator.layout import TensorDictLayout
from torchrl_marl.simulator.packing import Packing
from torchrl_marl.simulator.settings import Settings, refuse_dependent_starts, written_by
from torchrl_marl.simulator.state import Path, SimulatorState, path_name

__all__ = ["ResetPool", "begin_episodes"]

# Largest size of all starts together, and envs of a twin (CPU, GPU) that resets at once.
_NUMBERS = 2**24
_DRAWN_AT_ONCE = (2**13, 2**17)

Carry = dict[Any, Tensor]


class ResetPool:
    """Pool of fresh starts for the next D episodes of every env, drawn in batched resets.

    A twin of the environment, several times as large, is reset as a whole. What such a reset
    writes is what an env takes; everything else of a running env stays. A graph counts in
    ``used`` how many starts each env took, and never waits: if an env asks for more than D
    between two refills, its own starts come again, in the same order, and the pool says so once.

    Eager steps may wait: :class:`~torchrl_marl.simulator.reset_bank.ResetBank` draws one start for
    each env in the moment in which one is asked for. The two draw other random numbers, so one
    cannot stand for the other.

    Args:
        packing (Packing): of the running simulator; it reads the twin, too.
        simulator: the running one; settings changed on it hold for the twin.
        make_twin (callable): ``make_twin(n)`` is an environment of n envs that draws from the
            running one's random state; gives it and its simulator.
        num_envs (int): number E of envs.
        depth (int): number D of starts that are wanted: as many as episodes may end before the
            next refill. Very large states have fewer, at least 8.

    Shapes:
        - ``state``: ``[D, K, E]`` a matrix; ``carry``: ``[D, E, ...]`` an entry of the reset
        - ``written``: ``[K, 1]`` bool a matrix; ``used``: ``[E]``

    Raises:
        CaptureError: starts that depend on what an env had before; by all that refills.
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
        self._most = 0  # ends of an env between two refills
        self._used_before = 0
        self._twin: Any = None
        self._small: tuple[Any, Any] | None = None  # another twin, for trials
        self._stale = True
        self._drawn_for = ""  # the simulator's structure
        self._settings: Settings | None = None
        self._checked = False
        self.tensors: dict[str, Any] = {}

    def refill(self, n_rows: int | None = None) -> None:
        """Draws the first rows anew, or all of them."""
        if not self._checked or self.is_outdated():
            self._refuse_dependence()
        n_rows = self.depth if n_rows is None or not self.tensors else min(n_rows, self.depth)
        drawn = [self._draw() for _ in range(0, n_rows, self._at_once)]
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
        self._used_before, self._stale = 0, False
        self._note_settings()

    def is_outdated(self) -> bool:
        """Returns whether the running simulator's settings differ from those of the starts."""
        return self._settings is not None and self._settings.changed()

    def _note_settings(self) -> None:
        moving = self._packing.written | self._written
        self._settings = Settings(self._simulator, self._packing.exclude, moving)

    def _refuse_dependence(self) -> None:
        """Refuses dependent starts: resets a small twin from several states."""
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

        with base._on_its_own(random):
            refuse_dependent_starts(
                simulator, self._packing.exclude, random, reset, step, CaptureError
            )
        self._checked = True

    def _draw(self) -> list[Tensor]:
        """Draws starts for every env, ``[n, K, E]`` and ``[n, E, ...]``."""
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
        """Discards the remaining starts, as after a new seed."""
        self._stale = True

    def keep_to(self, structure: str) -> None:
        """Discards starts that were drawn in another structure of the simulator.

        Args:
            structure (str): as :meth:`CapturedSimulator.structure` returns it.
        """
        if structure != self._drawn_for:
            self.empty()
            self._drawn_for = structure

    @property
    def is_stale(self) -> bool:
        """Returns whether the starts are discarded, and :meth:`prepare` draws all anew."""
        return self._stale

    def forget_twin(self) -> None:
        """Discards the twin; the next starts get a new one."""
        self._twin = self._small = None

    def prepare(self) -> None:
        """Refills starts that may run out; waits for the device, so between rollouts."""
        if self._stale or self.is_outdated():
            self.refill()
            return
        if self._settings is None:  # saved starts
            self._note_settings()
        # On a CPU nothing waits; elsewhere the copy is asynchronous.
        used = int(self.tensors["used"].max().cpu())
        self._most = max(self._most, used - self._used_before)
        self._used_before = used
        if used > self.depth and not self._warned:
            self._warned = True
            warnings.warn(
                f"an env ended {used} times between two refills of the {self.depth} starts that "
                "were drawn ahead for it: some of its episodes started alike. Shorter batches "
                "are refilled more often.",
                stacklevel=2,
            )
        if used + min(self._most, self.depth) > self.depth:
            self.refill(used)

    def state_dict(self) -> dict[str, Any]:
        """Returns the remaining starts, and the structure in which they were drawn."""
        return {"pool": self._starts(), "drawn_for": self._drawn_for}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores saved starts; without any, fresh ones are drawn."""
        self._load_starts(state.get("pool", {}))
        self._drawn_for = state.get("drawn_for", "")

    def _starts(self) -> dict[str, Any]:
        """Returns tensors and one text."""
        if self._stale or self.is_outdated():
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
        self._settings = None  # those present when it continues
        if not state:
            self._stale = True
            return
        about = json.loads(state["about"])
        self.depth, self._most = about["depth"], about["most"]
        self._used_before, self._stale = about["used_before"], False
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
    """Puts new starts where episodes ended: tensor maths, for use inside and outside of graphs.

    Args:
        ended (Tensor): bool ``[E]``.
        state (list of Tensor): of the running envs, ``[K, E]`` a matrix, shared tensors last.
        carry (dict): what the next step reads, ``[E, ...]`` an entry; where the pool has none,
            it begins with zeros.
        pool (dict): ``ResetPool.tensors``.

    Returns:
        tuple: state, carry and how many starts each env took.
    """
    row = pool["used"] % pool["state"][0].shape[0]
    fresh = [
        torch.where(ended & written, _pick(starts, row, -1), matrix)
        for matrix, starts, written in zip(state, pool["state"], pool["written"])
    ]
    starts = pool["carry"]
    following = {
        key: torch.where(
            _wide(ended, x, 0), _pick(starts[key], row, 0) if key in starts else x.new_zeros(()), x
        )
        for key, x in carry.items()
    }
    return [*fresh, *state[len(fresh) :]], following, pool["used"] + ended


def _pick(starts: Tensor, row: Tensor, dim: int) -> Tensor:
    """Returns each env's row out of ``[D, ...]``, by the dim of the envs."""
    index = _wide(row, starts[0], dim).expand_as(starts[0])
    return starts.gather(0, index.unsqueeze(0)).squeeze(0)


def _wide(x: Tensor, like: Tensor, dim: int) -> Tensor:
    """Reshapes ``[E]`` with dims of size 1, so that it broadcasts along a dim of another tensor."""
    shape = [1] * like.ndim
    shape[dim] = -1
    return x.view(shape)
