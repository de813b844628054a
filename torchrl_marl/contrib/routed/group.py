"""A group whose agents are played by several modules: which runs on which agents.

Shapes: B any batch dims, N agents of a group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeAlias, cast

from tensordict import NestedKey, TensorDictBase, is_tensor_collection
from tensordict.nn import TensorDictModuleBase
from torch import nn

from torchrl_marl.specs import GroupSpec
from torchrl_marl.specs.groups import is_lazy

__all__ = [
    "AgentTable",
    "Path",
    "Shape",
    "SpecGroup",
    "Step",
    "as_path",
    "locate",
    "make_step",
    "path_of",
    "read_agents",
]

Path: TypeAlias = tuple[str, ...]
Shape: TypeAlias = tuple[Any, ...]
UNKNOWN = "?"
# What an environment may add to a group although the specs of its agents do not say it.
GIVEN = ("mask", "action_mask", "reward", "done", "terminated", "truncated")


def as_path(key: NestedKey) -> Path:
    """Returns a key as a tuple."""
    return (key,) if isinstance(key, str) else cast(Path, key)


def path_of(module: TensorDictModuleBase, fixed: Sequence[Path] | None = None) -> Path:
    """Returns the path of a module's group, which its nested keys share; () without one.

    Args:
        module (TensorDictModuleBase): with keys from the root.
        fixed (sequence of tuple, optional): the groups that there are.
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
    """Returns the first group along a path, and its own path.

    It is the first entry that is stacked lazily or has more batch dims than the root, else the
    first; with ``exact``, it is what lies at the end.
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


@dataclass(frozen=True)
class Step:
    """One module of a policy, as a group sees it.

    Args:
        name (str): its place in the policy.
        path (tuple of str): where its group is.
        in_keys (tuple of NestedKey): what it reads, from the root.
        reads, writes (tuple of NestedKey): what of it lies in the group, seen from there.
        reads_outside, writes_outside (tuple of NestedKey): the rest, from the root.
        agents (tuple of int, optional): its route.
        width (int, optional): how many features its first layer takes.
    """

    name: str
    path: Path
    in_keys: tuple[NestedKey, ...]
    reads: tuple[NestedKey, ...]
    writes: tuple[NestedKey, ...]
    reads_outside: tuple[NestedKey, ...]
    writes_outside: tuple[NestedKey, ...]
    agents: tuple[int, ...] | None
    width: int | None


def make_step(
    name: str, module: TensorDictModuleBase, path: Path, agents: tuple[int, ...] | None
) -> Step:
    """Builds a module's :class:`Step` in the group at a path."""
    reads, reads_outside = _split(module.in_keys, path)
    writes, writes_outside = _split(module.out_keys, path)
    keys = (reads, writes, reads_outside, writes_outside)
    return Step(name, path, tuple(module.in_keys), *keys, agents, _first_width(module))


def _split(keys: Iterable[NestedKey], path: Path) -> tuple[tuple, tuple]:
    n = len(path)
    inside, outside = [], []
    for key in keys:
        names = as_path(key)
        if names[:n] == path and len(names) > n:
            inside.append(names[n] if len(names) == n + 1 else names[n:])
        else:
            outside.append(key)
    return tuple(inside), tuple(outside)


def _first_width(module: nn.Module) -> int | None:
    for layer in module.modules():
        if next(layer.parameters(recurse=False), None) is not None:
            if isinstance(layer, nn.LayerNorm):
                return layer.normalized_shape[-1]
            return getattr(layer, "in_features", None) or getattr(layer, "input_size", None)
    return None


def read_agents(name: str, agents: Any, spec: GroupSpec | None) -> tuple[int, ...] | None:
    """Returns the indices of the agents on a module's route; None without one.

    Args:
        name (str): the module's place in the policy.
        agents (int, str or sequence of such, optional): indices, names or patterns.
        spec (GroupSpec, optional): who there is.

    Raises:
        ValueError: no agents, unknown ones, or one twice.
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
    """Which agents of a group a module runs on, and what each agent was given.

    Args:
        path (tuple of str): where the group is.
        n (int): number N of agents.
        spec (GroupSpec, optional): for the agents' names.
    """

    def __init__(self, path: Path, n: int, spec: GroupSpec | None) -> None:
        self.path = path
        self.n = n
        self.names = None if spec is None else spec.agent_names
        self.everyone = tuple(range(n))
        self.idle = set(self.everyone)
        self.writers: dict[NestedKey, dict[int, str]] = {}

    def shapes(self, leaf: NestedKey) -> Sequence[Shape | None]:
        """Returns each agent's own shape of a leaf; None where it has none."""
        raise NotImplementedError

    def key(self, leaf: NestedKey) -> NestedKey:
        """Returns a leaf's key from the root."""
        path = (*self.path, *as_path(leaf))
        return path[0] if len(path) == 1 else path

    def describe(self, agents: Sequence[int]) -> str:
        """Describes agents of this group, in a sentence."""
        who = [agent if self.names is None else self.names[agent] for agent in agents]
        return f"agent{'s' * (len(who) > 1)} {', '.join(map(str, who))} of {self}"

    def __str__(self) -> str:
        path = self.path[0] if len(self.path) == 1 else self.path
        return f"group {path!r}" if path else "the lazy stack"

    def describe_keys(self, agent: int) -> str:
        """Describes what an agent has, in a sentence."""
        raise NotImplementedError

    # ----------------------------------------------------------------------------- who runs

    def choose(self, step: Step, tolerant: bool) -> tuple[int, ...] | None:
        """Returns the agents that a module runs on; None where shapes do not say it yet.

        Raises:
            ValueError: no such agents, or some that cannot be.
        """
        columns = [self.shapes(leaf) for leaf in step.reads]
        if step.agents is not None:
            self._check_route(step, columns)
            chosen = step.agents
        else:
            chosen = tuple(a for a in self.everyone if all(c[a] is not None for c in columns))
        if not chosen and not tolerant:
            raise ValueError(
                f"module {step.name} reads {list(step.in_keys)}, which no agent of {self} has: "
                f"{self.describe_keys(0)}; mend its in_keys, or set partial_tolerant=True."
            )
        if not _differ(columns, chosen):
            return chosen
        if any(UNKNOWN in (c[a] or ()) for c in columns for a in chosen):
            return step.agents
        if step.agents is None and step.width is not None:
            fitting = tuple(a for a in chosen if _total_width(columns, a) == step.width)
            if fitting and not _differ(columns, fitting):
                return fitting
        found = [f"{self.key(leaf)!r}: {_by_shape(c)}" for leaf, c in zip(step.reads, columns)]
        takes = "" if step.width is None else f" (its first layer takes {step.width} features)"
        raise ValueError(
            f"module {step.name} reads what agents of {self} have in different shapes, found "
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
                    f"on its route: {self.describe_keys(lacking[0])}; mend its in_keys or route."
                )

    # -------------------------------------------------------------------- what they were given

    def note(self, step: Step, agents: Sequence[int], strict: bool = True) -> None:
        """Notes what a module writes for which agents.

        Args:
            step (Step): the module.
            agents (sequence of int): whom it ran on.
            strict (bool): refuse what was written before.

        Raises:
            ValueError: another module has given it, and this one does not read it.
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
        """Refuses agents that no module ran on, or that got no action.

        Raises:
            ValueError: there are such agents.
        """
        if self.idle:
            idle = sorted(self.idle)
            raise ValueError(
                f"no module of this policy runs on {self.describe(idle)}: "
                f"{self.describe_keys(idle[0])}; expected a module that reads that, or has a route "
                "to them; or set partial_tolerant=True."
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
        path (tuple of str): where the group is.
        spec (GroupSpec): its specs.
    """

    def __init__(self, path: Path, spec: GroupSpec) -> None:
        super().__init__(path, spec.n_agents, spec)
        self.spec = spec

    def shapes(self, leaf: NestedKey) -> Sequence[Shape | None]:
        """Returns each agent's own shape of a leaf; unknown for what a module writes."""
        members = self.spec.members
        own: list[Shape | None] = [(UNKNOWN,)] * self.n
        if members is not None and leaf not in GIVEN:
            leaves = [member.get(leaf, None) for member in members]
            own = [None if found is None else tuple(found.shape) for found in leaves]
        written = self.writers.get(leaf, {})
        return [(UNKNOWN, written[a]) if a in written else own[a] for a in self.everyone]

    def describe_keys(self, agent: int) -> str:
        """Describes what an agent has, in a sentence."""
        members = self.spec.members
        if members is None:
            return "its specs say nothing of it"
        keys = {str(key) for key in members[agent].keys(True, True)}
        return f"{self.describe([agent])} has {', '.join(sorted(keys - {'action'}))}"


def _differ(columns: Sequence[Sequence[Shape | None]], agents: Sequence[int]) -> bool:
    return any(column[agent] != column[agents[0]] for column in columns for agent in agents[1:])


def _total_width(columns: Sequence[Sequence[Shape | None]], agent: int) -> int:
    shapes = [column[agent] for column in columns]
    return sum(shape[-1] if shape else 1 for shape in shapes)


def _by_shape(column: Sequence[Shape | None]) -> str:
    shapes = dict.fromkeys(shape for shape in column if shape is not None)
    own = {shape: [a for a, other in enumerate(column) if other == shape] for shape in shapes}
    return " and ".join(f"{list(shape)} for agents {agents}" for shape, agents in own.items())
