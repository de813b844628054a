"""Acting for batches of any number of rows, with arrays in and out: eagerly, or as graphs.

Shapes: n rows of a batch, P rows of a graph, P >= n.
"""

from __future__ import annotations

import bisect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.envs.utils import ExplorationType, exploration_type, set_exploration_type

from torchrl_marl.capture import capture, check_execution
from torchrl_marl.collectors.fingerprint import fingerprint
from torchrl_marl.errors import CaptureError

__all__ = ["SIZES", "Acting", "GraphActing"]

SIZES = (1, 8, 64, 256)
"""Rows of the graphs; a batch is padded to the next."""

Leaves = dict[tuple[str, ...], np.ndarray]
Policy = Callable[[TensorDictBase], TensorDictBase]


class Acting:
    """A policy that takes and gives arrays of numpy: the eager twin of :class:`GraphActing`.

    Args:
        policy (callable): TensorDict in, TensorDict out, on the CPU.

    Shapes:
        - every array: ``[n, ...]``, those of a group ``[n, N, ...]``
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def prepare(self, example: Leaves, *kinds: ExplorationType) -> None:
        """Does nothing: there are no graphs."""

    def act(self, leaves: Leaves) -> Leaves:
        """Returns what the policy writes beside what it reads."""
        given = as_tensordict(leaves)
        with torch.no_grad():
            acted = self.policy(given)
        return {key: value.numpy() for key, value in _leaves(acted) if key not in leaves}


class GraphActing(Acting):
    """A policy as a few graphs, each for so many rows; a batch is padded to the next of them.

    What its parameters and buffers hold may change in place at any time. Draws are those of the
    policy's distributions; which ones they are depends on the number of rows, padding included.

    Args:
        policy (nn.Module): on the CPU, with actors that are graphs of their inputs.
        execution ("compile" or "trace"): compiled, which takes some seconds for every size; or
            operation by operation, which gives what eager execution gives, to the bit.
        sizes (sequence of int): rows P of the graphs, ascending; larger batches are cut.

    Reduces to: :class:`Acting`.

    Examples:
        >>> from torchrl.data import Bounded, Unbounded
        >>> from torchrl_marl import AgentSpec, TeamSpec
        >>> from torchrl_marl.modules import make_actor
        >>> team = TeamSpec([AgentSpec("car", 2, Unbounded((4,)), Bounded(-1, 1, (1,)))])
        >>> acting = GraphActing(make_actor(team.groups["car"]), execution="trace")
        >>> seen = np.zeros((3, 2, 4), np.float32)
        >>> acted = acting.act({("car", "observation"): seen, ("car", "mask"): seen[..., 0] == 0})
        >>> acted["car", "action"].shape
        (3, 2, 1)
    """

    def __init__(
        self, policy: Any, *, execution: str = "compile", sizes: tuple[int, ...] = SIZES
    ) -> None:
        super().__init__(policy)
        check_execution(execution, "cpu", "acting")
        self.execution: Any = execution
        self.sizes = tuple(sizes)
        self.eager = execution == "eager"
        self._graphs: dict[tuple[int, ExplorationType | None], _Graph] = {}
        self._seen_as: Any = None

    def prepare(self, example: Leaves, *kinds: ExplorationType) -> None:
        """Makes all graphs now, instead of at the first batch of their size.

        Graphs of a policy whose modules have changed since, not only what they hold, are made anew.

        Args:
            example (dict): arrays of one row or more, of the keys of all later batches.
            *kinds (ExplorationType): how actions are chosen; by default, as now.
        """
        seen_as = fingerprint(self.policy)
        if seen_as != self._seen_as:
            self._graphs.clear()
            self._seen_as = seen_as
        one = {key: value[:1] for key, value in example.items()}
        for kind in kinds or (exploration_type(),):
            for size in self.sizes:
                if not self.eager:
                    self._graph(size, kind, one)

    def act(self, leaves: Leaves) -> Leaves:
        """Returns what the policy writes beside what it reads."""
        n, largest = len(next(iter(leaves.values()))), self.sizes[-1]
        if n > largest and not self.eager:
            parts = [
                self.act({key: value[i : i + largest] for key, value in leaves.items()})
                for i in range(0, n, largest)
            ]
            return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
        graph = None
        if not self.eager:
            size = self.sizes[bisect.bisect_left(self.sizes, n)]
            graph = self._graph(size, exploration_type(), leaves)
        return super().act(leaves) if graph is None else graph(leaves, n)

    def _graph(self, size: int, kind: ExplorationType | None, example: Leaves) -> _Graph | None:
        found = self._graphs.get((size, kind))
        if found is None:
            try:
                found = _Graph(self.policy, size, kind, example, self.execution)
            except CaptureError as error:
                self.eager = True
                why = f"a policy that answers cannot be a graph ({error}); it runs step by step."
                warnings.warn(why, stacklevel=4)
                return None
            self._graphs[size, kind] = found
        return found


class _Graph:
    """A policy as a graph of so many rows."""

    def __init__(
        self,
        policy: Policy,
        size: int,
        kind: ExplorationType | None,
        example: Leaves,
        execution: Any,
    ) -> None:
        self.written: list[tuple[str, ...]] = []
        reads = _read_by(policy, example)
        self._rows = {key: np.repeat(example[key][:1], size, axis=0) for key in reads}
        self._tensors = [torch.from_numpy(rows) for rows in self._rows.values()]

        def acted(*tensors: Tensor) -> list[Tensor]:
            given = as_tensordict(dict(zip(self._rows, tensors)))
            with set_exploration_type(kind):
                found = dict(_leaves(policy(given)))
            self.written = [key for key in found if key not in example]
            return [found[key] for key in self.written]

        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                self._program = capture(
                    acted,
                    *self._tensors,
                    name=f"a policy for {size} rows",
                    execution=execution,
                )
        except CaptureError:
            raise
        except Exception as error:
            why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise CaptureError(f"it raised {why}") from error

    def __call__(self, leaves: Leaves, n: int) -> Leaves:
        for key, rows in self._rows.items():
            rows[:n] = leaves[key]
        out = self._program.flat(self._tensors)
        return {key: value.numpy()[:n] for key, value in zip(self.written, out)}


def _read_by(policy: Any, example: Leaves) -> list[tuple[str, ...]]:
    """Returns the keys that a policy reads; all, where it does not say."""
    keys = getattr(policy, "in_keys", None)
    if keys is None:
        return list(example)
    named = {(key,) if isinstance(key, str) else tuple(key) for key in keys}
    masks = {(*key[:-1], "mask") for key in named}
    return [key for key in example if key in named | masks]


def _leaves(td: TensorDictBase) -> list[tuple[tuple[str, ...], Tensor]]:
    return [((key,) if isinstance(key, str) else key, value) for key, value in td.items(True, True)]


def as_tensordict(leaves: Mapping[tuple[str, ...], Any]) -> TensorDict:
    """Returns arrays or tensors of n rows as a TensorDict ``[n]``, groups ``[n, N]``."""
    nested: dict[str, Any] = {}
    n = 0
    for key, value in leaves.items():
        tensor = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        n = tensor.shape[0]
        if len(key) == 1:
            nested[key[0]] = tensor
        else:
            nested.setdefault(key[0], {})[key[1]] = tensor
    for name, own in nested.items():
        if isinstance(own, dict):
            n_agents = next(iter(own.values())).shape[1]
            nested[name] = TensorDict._new_unsafe(own, batch_size=torch.Size([n, n_agents]))
    return TensorDict._new_unsafe(nested, batch_size=torch.Size([n]))
