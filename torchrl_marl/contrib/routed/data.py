"""A group in a TensorDict: stacks of its agents' entries, and what is written into them.

Shapes: B any batch dims, N agents of a group, n agents of a route.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDict, TensorDictBase
from torch import Tensor

from torchrl_marl.contrib.routed.group import AgentTable, Path, Shape, Step, locate
from torchrl_marl.specs import GroupSpec

__all__ = ["DataGroup"]


class DataGroup(AgentTable):
    """A group in a TensorDict during one call; what is written stays here until :meth:`flush`.

    Args:
        root (TensorDictBase): ``[*B]``.
        path (tuple of str): where the group is in it.
        data (TensorDictBase): the group, ``[*B, N]``, dense or lazily stacked.
        spec (GroupSpec, optional): how many agents are expected, and their names.

    Raises:
        ValueError: another number of agents than the specs have.
    """

    def __init__(
        self, root: TensorDictBase, path: Path, data: TensorDictBase, spec: GroupSpec | None
    ) -> None:
        self._attach(root, data)
        super().__init__(path, self._count(), spec)
        if spec is not None and spec.n_agents != self.n:
            raise ValueError(f"{self} has {self.n} agents, but its specs {spec.n_agents}.")

    def _attach(self, root: TensorDictBase, data: TensorDictBase) -> None:
        self.data = data
        self.lazy = isinstance(data, LazyStackedTensorDict)
        self.inside = data.ndim > root.ndim  # the agents' dim is the group's alone
        self.batch_size = root.batch_size
        self.members: Sequence[TensorDictBase] = ()
        if isinstance(data, LazyStackedTensorDict):
            self.dim = data.ndim - 1 if self.inside else data.stack_dim
            own = data.stack_dim == self.dim
            self.members = data.tensordicts if own else data.unbind(self.dim)
            self.own_dim = data.ndim  # of a stack of agents: where an agent's own shape begins
        else:
            self.dim = data.ndim - 1 if self.inside else root.ndim
            self.own_dim = self.dim + 1
        self.columns: dict[NestedKey, list[Tensor | None]] = {}
        self.written: dict[NestedKey, list[tuple[tuple[int, ...], Tensor]]] = {}
        self.views: dict[tuple[int, ...], tuple[TensorDictBase, TensorDictBase, set]] = {}

    def _count(self) -> int:
        if self.lazy:
            return len(self.members)
        if self.inside:
            return self.data.batch_size[self.dim]
        leaves = (leaf for leaf in self.data.values(True, True) if leaf.ndim > self.dim)
        return next((leaf.shape[self.dim] for leaf in leaves), 0)

    # ------------------------------------------------------------------------------- reading

    def shapes(self, leaf: NestedKey) -> Sequence[Shape | None]:
        """Returns each agent's own shape of a leaf; empty placeholders do not count."""
        if self.lazy or leaf in self.written:
            start, column = self.own_dim - 1, self.column(leaf)
            found = [None if value is None else tuple(value.shape[start:]) for value in column]
        else:
            value = self.data.get(leaf, None)
            found = [None if value is None else tuple(value.shape[self.own_dim :])] * self.n
        return [None if shape is None or 0 in shape else shape for shape in found]

    def has(self, agents: Sequence[int], leaf: NestedKey) -> bool:
        """Returns whether all of these agents have an entry."""
        shapes = self.shapes(leaf)
        return all(shapes[agent] is not None for agent in agents)

    def describe_keys(self, agent: int) -> str:
        """Describes what an agent has, in a sentence."""
        keys = self.members[agent].keys() if self.lazy else self.data.keys()
        return f"{self.describe([agent])} has {', '.join(sorted(keys))}"

    def column(self, leaf: NestedKey) -> list[Tensor | None]:
        """Returns each agent's entry, as it was written last."""
        known = self.columns.get(leaf)
        if known is not None:
            return known
        if self.lazy:
            column = [member.get(leaf, None) for member in self.members]
        else:
            value = self.data.get(leaf, None)
            column = [None] * self.n if value is None else list(value.unbind(self.dim))
        for agents, value in self.written.get(leaf, ()):
            for agent, own in zip(agents, value.unbind(self.dim)):
                column[agent] = own
        self.columns[leaf] = column
        return column

    def take(self, agents: tuple[int, ...], leaf: NestedKey) -> Tensor:
        """Returns the agents' entries as one tensor.

        Shapes:
            - returns: ``[*B, n, *own]``
        """
        if not self.lazy and leaf not in self.written:
            first, n = agents[0], len(agents)
            if agents == tuple(range(first, first + n)):
                return self.data.get(leaf).narrow(self.dim, first, n)
        column = self.column(leaf)
        return torch.stack([cast(Tensor, column[agent]) for agent in agents], self.dim)

    def view(self, root: TensorDictBase, step: Step, agents: tuple[int, ...]) -> TensorDictBase:
        """Returns what a module reads of these agents and of the root, under its own keys."""
        known = self.views.get(agents)
        if known is None:
            source = {leaf: self.take(agents, leaf) for leaf in step.reads}
            known = self.views[agents] = (*self._make_view(agents, source), set(step.reads))
        view, own, have = known
        for leaf in step.reads:
            if leaf not in have:
                own.set(leaf, self.take(agents, leaf))
                have.add(leaf)
        for key in step.reads_outside:
            view.set(key, root.get(key))
        return view

    def _make_view(self, agents: tuple[int, ...], source: dict) -> tuple[TensorDict, TensorDict]:
        batch: Any = self.data.batch_size
        if self.dim < len(batch):
            batch = (*batch[: self.dim], len(agents), *batch[self.dim + 1 :])
        own = TensorDict(source, batch_size=batch, device=self.data.device)
        view, outer = own, self.batch_size if self.inside or not self.lazy else batch
        for name in reversed(self.path):
            view = TensorDict({name: view}, batch_size=outer, device=self.data.device)
        return view, own

    # ------------------------------------------------------------------------------- writing

    def write(
        self, root: TensorDictBase, step: Step, agents: tuple[int, ...], out: TensorDictBase
    ) -> None:
        """Keeps what a module wrote for these agents.

        Raises:
            ValueError: an entry without a row an agent; one outside of the group that is not of
                all agents.
        """
        self.note(step, agents)
        for key in step.writes_outside:
            if agents != self.everyone:
                raise ValueError(
                    f"module {step.name} runs on {self.describe(agents)} alone and writes {key!r}, "
                    "expected entries of the group only."
                )
            root.set(key, out.get(key))
        view, own, have = self.views[agents]
        for leaf in step.writes:
            value = out.get(self.key(leaf), None)
            if value is None:
                continue
            if value.ndim <= self.dim or value.shape[self.dim] != len(agents):
                raise ValueError(
                    f"module {step.name} wrote {self.key(leaf)!r} of shape {list(value.shape)} for "
                    f"{self.describe(agents)}, expected {len(agents)} rows in dim {self.dim}."
                )
            self.written.setdefault(leaf, []).append((agents, value))
            self.columns.pop(leaf, None)
            for _, _, other in self.views.values():
                other.discard(leaf)
            have.add(leaf)
            if out is not view:
                own.set(leaf, value)

    def flush(self, root: TensorDictBase) -> None:
        """Puts what was written into the TensorDict."""
        dense = {} if self.lazy else {leaf: self._joined(leaf) for leaf in self.written}
        if any(value is None for value in dense.values()):
            self._loosen(root)
        for leaf, parts in self.written.items():
            joined = dense.get(leaf)
            if joined is None and len(parts) == 1 and parts[0][0] == self.everyone:
                joined = parts[0][1]
            if joined is not None and getattr(self.data, "stack_dim", self.dim) == self.dim:
                self.data.set(leaf, joined)
                continue
            for agents, value in parts if joined is None else [(self.everyone, joined)]:
                for agent, own in zip(agents, value.unbind(self.dim)):
                    self.members[agent].set(leaf, own)
        self.written = {}

    def refresh(self, root: TensorDictBase) -> None:
        """Forgets what was read, since a module has written into the TensorDict."""
        found = locate(root, self.path, exact=True)
        if found is not None:
            self._attach(root, found[1])

    def _joined(self, leaf: NestedKey) -> Tensor | None:
        """Returns all agents' entries as one; None where they differ or an agent has none."""
        parts = self.written[leaf]
        if [agent for agents, _ in parts for agent in agents] == list(self.everyone):
            values = [value for _, value in parts]
            if len({(value.shape[self.own_dim :], value.dtype) for value in values}) > 1:
                return None
            return values[0] if len(values) == 1 else torch.cat(values, self.dim)
        column = self.column(leaf)
        if any(value is None for value in column):
            return None
        entries = cast(list[Tensor], column)
        agree = len({(value.shape, value.dtype) for value in entries}) == 1
        return torch.stack(entries, self.dim) if agree else None

    def _loosen(self, root: TensorDictBase) -> None:
        """Makes a dense group a lazily stacked one, since its agents differ from now on."""
        data = self.data
        if not self.inside:
            data = data.copy()
            data.batch_size = torch.Size((*self.batch_size, self.n))
        self.members = data.unbind(self.dim)
        self.data = LazyStackedTensorDict(*self.members, stack_dim=self.dim)
        root.set(self.path, self.data)
