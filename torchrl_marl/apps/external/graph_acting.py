"""Policies for external simulators; they act on arrays, through a graph for each batch size."""

from __future__ import annotations

import bisect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_marl.capture.execution import check_execution
from torchrl_marl.capture.program import capture
from torchrl_marl.collectors.captured import fingerprint
from torchrl_marl.errors import CaptureError

__all__ = [
    "SIZES",
    "Acting",
    "GraphActing",
    "Leaves",
    "as_tensordict",
    "copy_tensors",
    "flat_leaves",
    "same_structure",
    "sizes_for",
]

Leaves = dict[tuple[str, ...], np.ndarray]
"""Dict of keys to arrays ``[n, ...]``, for n rows of a batch."""


class Acting:
    """A policy in eager execution that reads and returns arrays.

    Args:
        policy (callable): TensorDict in, TensorDict out, on the CPU.

    Shapes:
        - every array: ``[n, ...]``; an array of a group: ``[n, N, ...]``

    Examples:
        >>> acting = Acting(lambda td: td.set(("car", "action"), 2 * td["car", "observation"]))
        >>> given = {("car", "observation"): np.ones((1, 2, 1), np.float32)}
        >>> acting.act(given, ExplorationType.RANDOM)["car", "action"].tolist()
        [[[2.0], [2.0]]]
    """

    def __init__(self, policy: Callable[[TensorDictBase], TensorDictBase]) -> None:
        self.policy = policy

    def act(self, leaves: Leaves, kind: ExplorationType) -> Leaves:
        """Returns the entries that the policy writes.

        Args:
            leaves (dict): key -> the policy's input for all rows.
            kind (ExplorationType): whether actions are sampled or deterministic.
        """
        with torch.no_grad(), set_exploration_type(kind):
            acted = self.policy(as_tensordict(leaves))
        return {key: x.numpy() for key, x in flat_leaves(acted) if key not in leaves}


def as_tensordict(leaves: Mapping[tuple[str, ...], Any]) -> TensorDict:
    """Converts arrays or tensors of n rows to a TensorDict ``[n]``, with groups ``[n, N]``."""
    nested: dict[str, Any] = {}
    size = torch.Size([len(next(iter(leaves.values())))])
    for key, value in leaves.items():
        tensor = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        if len(key) == 1:
            nested[key[0]] = tensor
        else:
            nested.setdefault(key[0], {})[key[1]] = tensor
    for name, own in nested.items():
        if isinstance(own, dict):
            of_agents = torch.Size([*size, next(iter(own.values())).shape[1]])
            nested[name] = TensorDict._new_unsafe(own, batch_size=of_agents)
    return TensorDict._new_unsafe(nested, batch_size=size)


def flat_leaves(td: TensorDictBase) -> list[tuple[tuple[str, ...], Tensor]]:
    """Returns the leaves of a TensorDict by their full nested keys."""
    return [(key if isinstance(key, tuple) else (key,), x) for key, x in td.items(True, True)]


SIZES = (1, 8, 64, 256)
"""Batch sizes P of graphs; a batch is padded to the next size, and a larger one is split."""


class GraphActing(Acting):
    """A policy captured as one graph per batch size; a batch is padded to the next size.

    Parameters and buffers may change in place at any time. Actions are sampled from the policy's
    distributions, but the samples depend on the padded batch size. A policy that cannot be
    captured as a graph runs eagerly, and a warning gives the reason.

    Args:
        policy (callable): TensorDict in, TensorDict out, on the CPU.
        execution ("compile" or "trace"): ``compile`` takes some seconds for each size; ``trace``
            records single operations and gives bitwise the same results as eager execution.
        sizes (sequence of int): batch sizes P, ascending.

    Reduces to: :class:`~torchrl_marl.apps.external.graph_acting.Acting`.

    Examples:
        >>> from torchrl.data import Bounded, Unbounded
        >>> from torchrl_marl import AgentSpec, TeamSpec
        >>> from torchrl_marl.modules import make_actor
        >>> team = TeamSpec([AgentSpec("car", 2, Unbounded((4,)), Bounded(-1, 1, (1,)))])
        >>> acting = GraphActing(make_actor(team.groups["car"]), execution="trace")
        >>> seen = np.zeros((3, 2, 4), np.float32)
        >>> given = {("car", "observation"): seen, ("car", "mask"): np.ones((3, 2), bool)}
        >>> acting.act(given, ExplorationType.RANDOM)["car", "action"].shape
        (3, 2, 1)
    """

    def __init__(
        self,
        policy: Callable[[TensorDictBase], TensorDictBase],
        *,
        execution: str = "compile",
        sizes: Sequence[int] = SIZES,
    ) -> None:
        super().__init__(policy)
        check_execution(execution, "cpu", "acting")
        self.execution: Any = execution
        self.sizes = tuple(sizes)
        self._graphs: dict[tuple[int, ExplorationType], _PolicyGraph] = {}
        self._fingerprint: Any = None
        self._runs_eagerly = execution == "eager"

    def prepare(self, example: Leaves, *kinds: ExplorationType) -> None:
        """Captures the graphs now, and again if the policy's modules have changed.

        Args:
            example (dict): arrays with at least one row, and with the keys of all later batches.
            *kinds (ExplorationType): exploration types to prepare.
        """
        found = fingerprint(self.policy)
        if found != self._fingerprint:
            self._graphs.clear()
            self._fingerprint = found
        for kind in kinds:
            for size in self.sizes:
                if not self._runs_eagerly:
                    self._graph_of_size(size, kind, example)

    def act(self, leaves: Leaves, kind: ExplorationType) -> Leaves:
        """Returns the entries that the policy writes."""
        n, largest = len(next(iter(leaves.values()))), self.sizes[-1]
        if n > largest:
            parts = [
                self.act({key: rows[i : i + largest] for key, rows in leaves.items()}, kind)
                for i in range(0, n, largest)
            ]
            return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
        if not self._runs_eagerly:
            graph = self._graph_of_size(self.sizes[bisect.bisect_left(self.sizes, n)], kind, leaves)
            if graph is not None:
                return graph(leaves, n)
        return super().act(leaves, kind)

    def _graph_of_size(
        self, size: int, kind: ExplorationType, example: Leaves
    ) -> _PolicyGraph | None:
        found = self._graphs.get((size, kind))
        if found is None:
            try:
                found = _PolicyGraph(self.policy, size, kind, example, self.execution)
            except CaptureError as error:
                self._runs_eagerly = True
                why = f"the serving policy cannot be captured as a graph and runs eagerly: {error}"
                warnings.warn(why, stacklevel=3)
                return None
            self._graphs[size, kind] = found
        return found


class _PolicyGraph:
    """A policy captured as a graph for one batch size."""

    def __init__(
        self, policy: Any, size: int, kind: ExplorationType, example: Leaves, execution: Any
    ) -> None:
        self._inputs = {
            key: np.repeat(example[key][:1], size, 0) for key in _keys_read_by(policy, example)
        }
        self._input_tensors = [torch.from_numpy(rows) for rows in self._inputs.values()]
        self._output_keys: list[tuple[str, ...]] = []

        def acted(*tensors: Tensor) -> list[Tensor]:
            given = as_tensordict(dict(zip(self._inputs, tensors)))
            with set_exploration_type(kind):
                found = dict(flat_leaves(policy(given)))
            self._output_keys = [key for key in found if key not in example]
            return [found[key] for key in self._output_keys]

        name = f"a policy of {size} rows"
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                self._program = capture(acted, *self._input_tensors, name=name, execution=execution)
        except CaptureError:
            raise
        except Exception as error:
            why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise CaptureError(f"it raised {why}") from error

    def __call__(self, leaves: Leaves, n: int) -> Leaves:
        for key, rows in self._inputs.items():
            rows[:n] = leaves[key]
        out = self._program.flat(self._input_tensors)
        return {key: x.numpy()[:n] for key, x in zip(self._output_keys, out)}


def _keys_read_by(policy: Any, example: Leaves) -> list[tuple[str, ...]]:
    """Returns the keys that a policy reads; all keys if it has no ``in_keys``."""
    keys = getattr(policy, "in_keys", None)
    if keys is None:
        return list(example)
    named = {key if isinstance(key, tuple) else (key,) for key in cast(list, keys)}
    masks = {(*key[:-1], "mask") for key in named}
    return [key for key in example if key in named | masks]


def sizes_for(n: int) -> tuple[int, ...]:
    """Returns the graph sizes needed for batches of up to n rows.

    Examples:
        >>> sizes_for(8), sizes_for(9)
        ((1, 8), (1, 8, 64))
    """
    return SIZES[: bisect.bisect_left(SIZES, n) + 1]


def same_structure(one: nn.Module, other: nn.Module) -> bool:
    """Returns whether the tensors of two policies have the same names, shapes and types."""
    names = [
        [(name, x.shape, x.dtype) for name, x in (*net.named_parameters(), *net.named_buffers())]
        for net in (one, other)
    ]
    return names[0] == names[1]


@torch.no_grad()
def copy_tensors(policy: nn.Module, newer: nn.Module) -> None:
    """Copies a newer policy's tensors into a policy in place; graphs of the policy stay valid."""
    mine, other = ([*net.parameters(), *net.buffers()] for net in (policy, newer))
    for own, new in zip(mine, other):
        own.copy_(new)
