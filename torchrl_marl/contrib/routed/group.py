"""A group served by several modules: routing, reading and writing.

Shapes: B any batch dims, N agents of a group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeAlias, cast

import torch
from tensordict import (
    LazyStackedTensorDict,
    NestedKey,
    TensorDict,
    TensorDictBase,
    is_tensor_collection,
)
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModuleBase,
)
from torch import Tensor

from torchrl_marl.modules.stacks.storage import input_width
from torchrl_marl.specs import GroupSpec
from torchrl_marl.specs.groups import is_lazy

__all__ = [
    "AgentTable",
    "DataGroup",
    "Path",
    "SpecGroup",
    "Step",
    "as_path",
    "locate",
    "path_of",
    "read_agents",
]

Path: TypeAlias = tuple[str, ...]
Shape: TypeAlias = tuple[Any, ...]
PROBABILISTIC = (ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential)
UNKNOWN = "?"
# Entries that an environment may add to a group without a spec.
GIVEN = ("mask", "action_mask", "reward", "done", "terminated", "truncated")


def as_path(key: NestedKey) -> Path:
    """Returns a key as a tuple."""
    return (key,) if isinstance(key, str) else cast(Path, key)


def path_of(module: TensorDictModuleBase, fixed: Sequence[Path] | None = None) -> Path:
    """Returns the path of the group that a module's nested keys share; () if there is none.

    Args:
        module (TensorDictModuleBase): module whose keys start at the root.
        fixed (sequence of tuple, optional): paths of the known groups.
    """
    keys = [as_path(key) for key in (*module.in_keys, *module.out_keys)]
    if fixed is not None:
        own = [path for path in fixed if any(key[: len(path)] == path for key in keys)]
        return own[0] if len(own) == 1 else ()
    nested = [key[:-1] for key in keys if len(key) > 1]
    shared = nested[0] if nested else ()
    for other in nested:
        while shared != other[: len(shared)]:
            shared = shared[:-1]
    return shared


def locate(
    root: TensorDictBase, path: Path, exact: bool = False
) -> tuple[Path, TensorDictBase] | None:
    """Returns the first group along a path, and its path.

    It is the first entry that is lazily stacked or has more batch dims than the root; if there is
    none, it is the first entry along the path. With ``exact``, it is the entry at the end of the
    path.
    """
    if not path:
        return ((), root) if is_lazy(root) else None
    found = None
    data: Any = root
    for i, name in enumerate(path):
        data = data.get(name, None)
        if not is_tensor_collection(data):
            return None if exact else found
        if exact and i + 1 < len(path):
            continue
        if is_lazy(data) or data.ndim > root.ndim:
            return path[: i + 1], data
        found = found or (path[: i + 1], data)
    return found


class Step:
    """One module of a policy, with its keys in a group.

    Args:
        name (str): position in the policy.
        module (TensorDictModuleBase): module whose keys start at the root.
        path (tuple of str): path of the module's group.
        agents (tuple of int, optional): agents of the module's route.

    Attributes:
        reads, writes (list of NestedKey): its keys in the group, relative to it.
        reads_outside, writes_outside (list of NestedKey): its other keys, from the root.
        width (int, optional): number of input features of its first layer.
    """

    def __init__(
        self, name: str, module: TensorDictModuleBase, path: Path, agents: tuple[int, ...] | None
    ) -> None:
        self.name, self.module, self.path, self.agents = name, module, path, agents
        self.reads, self.reads_outside = _split(module.in_keys, path)
        self.writes, self.writes_outside = _split(module.out_keys, path)
        self.probabilistic = isinstance(module, PROBABILISTIC)
        layers = (
            m for m in module.modules() if next(m.parameters(recurse=False), None) is not None
        )
        self.width = next(map(input_width, layers), None)


def _split(keys: Iterable[NestedKey], path: Path) -> tuple[list[NestedKey], list[NestedKey]]:
    n = len(path)
    inside: list[NestedKey] = []
    outside: list[NestedKey] = []
    for key in keys:
        names = as_path(key)
        if names[:n] == path and len(names) > n:
            inside.append(names[n] if len(names) == n + 1 else names[n:])
        else:
            outside.append(key)
    return inside, outside


def read_agents(name: str, agents: Any, spec: GroupSpec | None) -> tuple[int, ...] | None:
    """Returns the indices of the agents on a module's route; None without a route.

    Args:
        name (str): the module's position in the policy.
        agents (int, str or sequence of them, optional): indices, names or patterns.
        spec (GroupSpec, optional): specs of the group.

    Raises:
        ValueError: no agents, unknown agents, or an agent that is given twice.
    """
    if agents is None:
        return None
    found: list[int] = []
    for agent in [agents] if isinstance(agents, (int, str)) else agents:
        if not isinstance(agent, str):
            found.append(int(agent))
            continue
        if spec is None:
            raise ValueError(
                f"module {name} has a route to {agent!r}, but only specs know names; give "
                "group=GroupSpec or TeamSpec, or indices."
            )
        named = [i for i, other in enumerate(spec.agent_names) if fnmatchcase(other, agent)]
        if not named:
            raise ValueError(
                f"module {name} has a route to {agent!r}, expected agents of group "
                f"{spec.name!r}: {', '.join(spec.agent_names)}."
            )
        found += named
    last = None if spec is None else spec.n_agents - 1
    beyond = [agent for agent in found if agent < 0 or (last is not None and agent > last)]
    if not found or beyond or len(set(found)) < len(found):
        raise ValueError(
            f"module {name} has the route {found}, expected different agents from 0 to "
            f"{'N - 1' if last is None else last}."
        )
    return tuple(found)


class AgentTable:
    """Table of a group's agents: modules that run on the agents, and the agents' entries.

    Args:
        path (tuple of str): path of the group.
        n (int): number N of agents.
        spec (GroupSpec, optional): specs with the agents' names.
    """

    def __init__(self, path: Path, n: int, spec: GroupSpec | None) -> None:
        self.path = path
        self.n = n
        self.names = None if spec is None else spec.agent_names
        self.everyone = tuple(range(n))
        self.idle = set(self.everyone)
        self.writers: dict[NestedKey, dict[int, str]] = {}

    def shapes(self, leaf: NestedKey) -> Sequence[Shape | None]:
        """Returns the shape of a leaf for each agent; None if it has none."""
        raise NotImplementedError

    def key(self, leaf: NestedKey) -> NestedKey:
        """Returns a leaf's key from the root."""
        path = (*self.path, *as_path(leaf))
        return path[0] if len(path) == 1 else path

    def describe(self, agents: Sequence[int]) -> str:
        """Returns the agents of this group as a phrase for an error message."""
        who = [agent if self.names is None else self.names[agent] for agent in agents]
        return f"agent{'s' * (len(who) > 1)} {', '.join(map(str, who))} of {self}"

    def __str__(self) -> str:
        path = self.path[0] if len(self.path) == 1 else self.path
        return f"group {path!r}" if path else "the lazy stack"

    def describe_keys(self, agent: int) -> str:
        """Returns the entries of an agent as a phrase for an error message."""
        raise NotImplementedError

    # ----------------------------------------------------------------------------- routing

    def choose(self, step: Step, tolerant: bool) -> tuple[int, ...] | None:
        """Returns the agents that a module runs on; None if shapes do not determine them yet.

        Raises:
            ValueError: no agent with the module's inputs, or inputs of different shapes.
        """
        columns = [self.shapes(leaf) for leaf in step.reads]
        if step.agents is not None:
            self._check_route(step, columns)
            chosen = step.agents
        else:
            chosen = tuple(a for a in self.everyone if all(c[a] is not None for c in columns))
        if not chosen and not tolerant:
            raise ValueError(
                f"module {step.name} reads {list(step.module.in_keys)}, which no agent of {self} "
                f"has: {self.describe_keys(0)}; correct its in_keys, or set partial_tolerant=True."
            )
        if not _shapes_differ(columns, chosen):
            return chosen
        if any(UNKNOWN in (c[a] or ()) for c in columns for a in chosen):
            return step.agents
        if step.agents is None and step.width is not None:
            fitting = tuple(a for a in chosen if _total_width(columns, a) == step.width)
            if fitting and not _shapes_differ(columns, fitting):
                return fitting
        found = [f"{self.key(leaf)!r}: {_by_shape(c)}" for leaf, c in zip(step.reads, columns)]
        takes = "" if step.width is None else f" (its first layer takes {step.width} features)"
        raise ValueError(
            f"module {step.name} reads entries of agents of {self} in different shapes, found "
            f"{', '.join(found)}, expected one shape for all its agents{takes}; give it a route: "
            "(module, [0, 1])."
        )

    def _check_route(self, step: Step, columns: Sequence[Sequence[Shape | None]]) -> None:
        agents = step.agents or ()
        beyond = [agent for agent in agents if agent >= self.n]
        if beyond:
            raise ValueError(
                f"module {step.name} has a route to agents {beyond} of {self}, expected 0 to "
                f"{self.n - 1}."
            )
        for leaf, column in zip(step.reads, columns):
            lacking = [agent for agent in agents if column[agent] is None]
            if lacking:
                raise ValueError(
                    f"module {step.name} reads {self.key(leaf)!r}, but {self.describe(lacking)} "
                    f"on its route: {self.describe_keys(lacking[0])}; correct its in_keys or route."
                )

    # ----------------------------------------------------------------------------- written entries

    def record(self, step: Step, agents: Sequence[int], strict: bool = True) -> None:
        """Records the entries that a module writes for agents.

        Args:
            step (Step): the module.
            agents (sequence of int): agents that it ran on.
            strict (bool): whether to refuse entries that were written before.

        Raises:
            ValueError: another module has written the entry, and this module does not read it.
        """
        self.idle.difference_update(agents)
        for leaf in step.writes:
            writers = self.writers.setdefault(leaf, {})
            if strict and writers and leaf not in step.reads:
                twice = [agent for agent in agents if agent in writers]
                if twice:
                    raise ValueError(
                        f"modules {writers[twice[0]]} and {step.name} both write "
                        f"{self.key(leaf)!r} for {self.describe(twice)}, expected one; give each "
                        "a route: (module, [0, 1])."
                    )
            writers.update(dict.fromkeys(agents, step.name))

    def check_complete(self, actions: Iterable[NestedKey]) -> None:
        """Refuses agents without a module or without an action.

        Raises:
            ValueError: an agent has no module or no action.
        """
        if self.idle:
            idle = sorted(self.idle)
            raise ValueError(
                f"no module of this policy runs on {self.describe(idle)}: "
                f"{self.describe_keys(idle[0])}; expected a module that reads these entries, or "
                "has a route to them; or set partial_tolerant=True."
            )
        for leaf in actions:
            writers = self.writers.get(leaf, {})
            lacking = [agent for agent in self.everyone if agent not in writers]
            if writers and lacking:
                got = sorted(str(key) for key, w in self.writers.items() if lacking[0] in w)
                raise ValueError(
                    f"{self.describe(lacking)} got {', '.join(got)} but no {self.key(leaf)!r}, "
                    "expected an action for every agent; route a module that writes it to them, "
                    "or set partial_tolerant=True."
                )


class SpecGroup(AgentTable):
    """A group of which only the specs are known.

    Args:
        path (tuple of str): path of the group.
        spec (GroupSpec): its specs.
    """

    def __init__(self, path: Path, spec: GroupSpec) -> None:
        super().__init__(path, spec.n_agents, spec)
        self.spec = spec

    def shapes(self, leaf: NestedKey) -> Sequence[Shape | None]:
        """Returns the shape of a leaf for each agent; unknown for entries written by a module."""
        members = self.spec.members
        own: list[Shape | None] = [(UNKNOWN,)] * self.n
        if members is not None and leaf not in GIVEN:
            leaves = [member.get(leaf, None) for member in members]
            own = [None if found is None else tuple(found.shape) for found in leaves]
        written = self.writers.get(leaf, {})
        return [(UNKNOWN, written[a]) if a in written else own[a] for a in self.everyone]

    def describe_keys(self, agent: int) -> str:
        """Returns the entries of an agent as a phrase for an error message."""
        members = self.spec.members
        if members is None:
            return "its specs do not mention it"
        keys = {str(key) for key in members[agent].keys(True, True)}
        return f"{self.describe([agent])} has {', '.join(sorted(keys - {'action'}))}"


def _shapes_differ(columns: Sequence[Sequence[Shape | None]], agents: Sequence[int]) -> bool:
    return any(column[agent] != column[agents[0]] for column in columns for agent in agents[1:])


def _total_width(columns: Sequence[Sequence[Shape | None]], agent: int) -> int:
    shapes = [column[agent] for column in columns]
    return sum(shape[-1] if shape else 1 for shape in shapes)


def _by_shape(column: Sequence[Shape | None]) -> str:
    shapes = dict.fromkeys(shape for shape in column if shape is not None)
    own = {shape: [a for a, other in enumerate(column) if other == shape] for shape in shapes}
    return " and ".join(f"{list(shape)} for agents {agents}" for shape, agents in own.items())


class DataGroup(AgentTable):
    """A group in a TensorDict during one call; :meth:`flush` writes the results back.

    Args:
        root (TensorDictBase): ``[*B]``.
        path (tuple of str): path of the group.
        data (TensorDictBase): the group, ``[*B, N]``, dense or lazily stacked.
        spec (GroupSpec, optional): specs with the number of agents and their names.

    Raises:
        ValueError: a number of agents that differs from the specs.
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
        """Returns the shape of a leaf for each agent, without empty placeholders."""
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
        """Returns the entries of an agent as a phrase for an error message."""
        keys = self.members[agent].keys() if self.lazy else self.data.keys()
        return f"{self.describe([agent])} has {', '.join(sorted(keys))}"

    def column(self, leaf: NestedKey) -> list[Tensor | None]:
        """Returns the latest entry of each agent."""
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
        """Returns a module's inputs under its keys, from these agents and from the root."""
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
        """Stores the outputs of a module for these agents until :meth:`flush`.

        Raises:
            ValueError: an entry without a row per agent, or an entry outside of the group, written
                by a module that runs on some agents only.
        """
        self.record(step, agents)
        for key in step.writes_outside:
            if agents != self.everyone:
                raise ValueError(
                    f"module {step.name} runs on {self.describe(agents)} only and writes {key!r}, "
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
        """Writes the stored outputs into the TensorDict."""
        dense = {} if self.lazy else {leaf: self._joined(leaf) for leaf in self.written}
        if any(value is None for value in dense.values()):
            self._make_lazy(root)
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
        """Clears the cached inputs after a module has written into the TensorDict."""
        found = locate(root, self.path, exact=True)
        if found is not None:
            self._attach(root, found[1])

    def _joined(self, leaf: NestedKey) -> Tensor | None:
        """Returns all agents' entries as one tensor; None if they differ or an agent has none."""
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

    def _make_lazy(self, root: TensorDictBase) -> None:
        """Turns a dense group into a lazily stacked group, since its agents now differ."""
        data = self.data
        if not self.inside:
            data = data.copy()
            data.batch_size = torch.Size((*self.batch_size, self.n))
        self.members = data.unbind(self.dim)
        self.data = LazyStackedTensorDict(*self.members, stack_dim=self.dim)
        root.set(self.path, self.data)
