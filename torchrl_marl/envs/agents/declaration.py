"""Declarations of an environment's agents, from which its specs are built.

Shapes: E envs, N agents of a group, M agents of a kind, O observation features, S state features.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from tensordict import NestedKey
from torchrl.data import Categorical, Composite, TensorSpec

from torchrl_marl.envs.agents.kinds import GroupKinds, OutputReader, batched
from torchrl_marl.errors import ConfigError, SimulatorStateError, nearest, quoted
from torchrl_marl.specs import AgentSpec, TeamSpec
from torchrl_marl.specs.agents import invalid_state_reason, n_options
from torchrl_marl.specs.stacking import pad_specs

__all__ = [
    "Declaration",
    "check_least",
    "check_snapshot",
    "check_state",
    "check_whole_numbers",
    "refuse_unknown",
]

_FLAGS = ("done", "terminated", "truncated")
_LEAVES = frozenset({"observation", "action", "mask", "action_mask", "reward", "state", *_FLAGS})


class Declaration:
    """Agents and state of an environment, their specs, and a reader of the environment's outputs.

    Args:
        owner (str): name of the environment in error messages.
        num_envs (int): number E of envs.
        kinds (dict of str to tuple of AgentSpec): kinds of agents by group.
        state (TensorSpec, optional): spec of the state, ``[S]``.
        in_turns (bool): True if agents act in turns; see :class:`~torchrl_marl.specs.TeamSpec`.

    Raises:
        ConfigError: two kinds have the same name, or the kinds of a group are incompatible.
        ValueError: a group's name is reserved.
    """

    def __init__(
        self,
        owner: str,
        num_envs: int,
        kinds: dict[str, tuple[AgentSpec, ...]] | None = None,
        state: TensorSpec | None = None,
        in_turns: bool = False,
    ) -> None:
        self.owner, self.num_envs, self.kinds, self.state = owner, num_envs, kinds or {}, state
        self.in_turns = in_turns
        self.team = TeamSpec(self.kinds, state, in_turns)
        self.groups = {
            name: GroupKinds.of(self.kinds[name], group) for name, group in self.team.groups.items()
        }
        kind_specs = {
            name: {
                kind.name: batched(_agent_specs(kind), torch.Size([kind.n_agents]))
                for kind in kinds
            }
            for name, kinds in self.kinds.items()
        }
        group_specs = {name: self._group_specs(name, specs) for name, specs in kind_specs.items()}
        self.specs = self._build_specs(group_specs)
        self.reader = OutputReader(owner, num_envs, self.groups, group_specs, kind_specs, state)

    def with_agent(self, spec: AgentSpec, group: str | None = None) -> Declaration:
        """Returns a copy of the declaration with one more kind of agent."""
        group = spec.name if group is None else group
        for name, kinds in self.kinds.items():
            if any(kind.name == spec.name for kind in kinds):
                raise ConfigError(
                    f"{self.owner}: group {name!r} already has agents named {spec.name!r}; "
                    "use another name."
                )
        kinds = (*self.kinds.get(group, ()), spec)
        _check_one_group(f"{self.owner}: group {group!r}", kinds)
        all_kinds = {**self.kinds, group: kinds}
        return Declaration(self.owner, self.num_envs, all_kinds, self.state, self.in_turns)

    def with_state(self, spec: TensorSpec) -> Declaration:
        """Returns a copy of the declaration with a state for the critic."""
        if self.state is not None:
            raise ConfigError(f"{self.owner}: a state is already registered; register one only.")
        if fault := invalid_state_reason(spec):
            raise ConfigError(f"{self.owner}: the state's spec is {fault}.")
        return Declaration(self.owner, self.num_envs, self.kinds, spec, self.in_turns)

    @property
    def n_observed(self) -> int:
        """Number of features of all agents' concatenated observations."""
        kinds = [kind for group_kinds in self.kinds.values() for kind in group_kinds]
        return sum(kind.n_agents * _n_features(kind.observation_spec) for kind in kinds)

    def _group_specs(self, name: str, kinds: dict[str, Composite]) -> Composite:
        """Returns specs ``[N]`` of the leaves that have the same spec in all kinds of a group."""
        first = next(iter(kinds.values()))
        if len(kinds) == 1:
            return first
        shared_leaves = [key for key in first.keys() if not self.groups[name].ragged(key)]
        return pad_specs(self._specs_per_agent(name, shared_leaves), f"group {name!r}")

    def _build_specs(self, groups: dict[str, Composite]) -> dict[str, Composite]:
        """Returns TorchRL's specs without batch dims; heterogeneous groups have stacked specs."""
        specs = {key: Composite() for key in ("observation", "action", "reward", "done")}
        for key in _FLAGS:
            specs["done"][key] = _flag_spec(1)
        for name, group in groups.items():
            observed = ["observation", "mask"]
            first = self.kinds[name][0]
            observed += ["action_mask"] if first.action_mask else []
            observed += ["state"] if first.state_spec is not None else []
            parts = {"observation": observed, "action": ["action"]}
            if self.groups[name].lazy:
                for part, leaves in parts.items():
                    specs[part][name] = torch.stack(self._specs_per_agent(name, leaves), 0)
            else:
                for part, leaves in parts.items():
                    specs[part][name] = _select_leaves(group, leaves)
            for part, leaves in {"reward": ["reward"], "done": list(_FLAGS)}.items():
                specs[part][name] = _select_leaves(group, leaves)
        if self.state is not None:
            specs["observation"]["state"] = self.state
        return specs

    def _specs_per_agent(self, name: str, leaves: list[str]) -> list[Composite]:
        """Returns the specs of each agent."""
        return [
            _select_leaves(_agent_specs(kind), leaves)
            for kind in self.kinds[name]
            for _ in range(kind.n_agents)
        ]


def refuse_unknown(unknown: dict[str, Any], *classes: type) -> None:
    """Raises an error for the first argument that no constructor of the given classes takes."""
    inits = (inspect.signature(cls.__init__) for cls in classes)  # type: ignore[misc]
    names = {name for init in inits for name in init.parameters}
    known = sorted(names - {"self", "args", "kwargs", "unknown"})
    for name in unknown:
        raise ConfigError(
            f"{classes[0].__name__} has no argument {name!r}; {nearest(name, known)}"
            f"it takes {', '.join(known)}."
        )


def check_whole_numbers(owner: str, numbers: Mapping[str, Any], least: int = 1) -> None:
    """Raises an error for arguments that are neither None nor whole numbers >= ``least``."""
    for name, value in numbers.items():
        whole = isinstance(value, Integral) and not isinstance(value, bool)
        if value is not None and not (whole and value >= least):
            raise ConfigError(
                f"{owner}: {name} is {value!r}, expected a whole number of at least {least}."
            )


def check_state(owner: str, state: Any) -> None:
    """Raises an error for a ``state`` other than ``"observations"``, ``"world"`` and None."""
    if state not in (None, "observations", "world"):
        raise ConfigError(f"{owner}: state is {state!r}, expected 'observations', 'world' or None.")


def check_parts(snapshot: Any, parts: Sequence[str], owner: str) -> None:
    """Raises an error for a value that is not a snapshot of such an environment.

    Args:
        snapshot (TensorDict): argument of ``restore``.
        parts (sequence of str): names that a snapshot has.
        owner (str): name of the environment, for the message.

    Raises:
        SimulatorStateError: the value lacks a part.
    """
    has = snapshot.keys() if hasattr(snapshot, "keys") else ()
    missing = [part for part in parts if part not in has]
    if missing:
        raise SimulatorStateError(
            f"{owner}.restore: found {quoted(snapshot)} without {missing[0]!r}, expected the "
            "result of snapshot()."
        )


def check_snapshot(snapshot_owner: str, owner: str) -> None:
    """Raises an error for a snapshot of another environment.

    Raises:
        SimulatorStateError: the snapshot is of another environment; the message names both
            environments.
    """
    if snapshot_owner != owner:
        raise SimulatorStateError(
            f"a snapshot of {snapshot_owner} does not fit {owner}; restore it into an environment "
            "built with the same arguments."
        )


def check_least(owner: str, **numbers: tuple[float, float]) -> None:
    """Raises an error for an argument that is below its minimum.

    Args:
        owner (str): name of the environment in error messages.
        **numbers: for each argument, the pair of its value and its minimum.

    Examples:
        >>> check_least("Arena", lives=(3, 1), years=(5, 1))
    """
    for name, (value, least) in numbers.items():
        if value < least:
            raise ConfigError(f"{owner}: {name} is {value}, expected {least} or more.")


def _check_one_group(where: str, kinds: Sequence[AgentSpec]) -> None:
    """Raises an error for kinds of agents that cannot be stacked in one group."""
    first = kinds[0]
    for kind in kinds:
        if len(kinds) > 1 and kind.name in _LEAVES:
            raise ConfigError(f"{where} has agents named {kind.name!r}, which is a reserved key.")
        if kind.action_mask != first.action_mask:
            raise ConfigError(
                f"{where}: {first.name!r} has action_mask={first.action_mask}, {kind.name!r} has "
                f"action_mask={kind.action_mask}, expected the same for all agents of a group."
            )
        if (kind.state_spec is None) != (first.state_spec is None):
            raise ConfigError(
                f"{where}: {_describe_state(first)}, {_describe_state(kind)}, expected the same "
                "for all agents of a group; set state_spec in all, or put each kind into its own "
                "group."
            )
        expected_specs = dict(_agent_specs(first).items(True))
        for key, found in _agent_specs(kind).items(True):
            expected = expected_specs.get(key)
            if expected is not None and _properties(found, key) != _properties(expected, key):
                raise ConfigError(
                    f"{where}: the {key} of {kind.name!r} is "
                    f"{_describe_spec(found)}, that of {first.name!r} {_describe_spec(expected)}, "
                    "expected one type, dtype and number of dims; put each kind into its own group."
                )


def _describe_state(kind: AgentSpec) -> str:
    return f"{kind.name!r} has {'no' if kind.state_spec is None else 'a'} state_spec"


def _properties(spec: TensorSpec, key: NestedKey) -> tuple:
    """Returns the properties of a spec that must be the same for all agents of a group."""
    if isinstance(spec, Composite):
        return (Composite,)
    return (type(spec), spec.dtype, spec.ndim, spec.shape if key == "reward" else None)


def _describe_spec(spec: TensorSpec) -> str:
    if isinstance(spec, Composite):
        return "a Composite"
    return f"{type(spec).__name__} {list(spec.shape)} of {spec.dtype}"


def _n_features(spec: TensorSpec) -> int:
    leaves = spec.values(True, True) if isinstance(spec, Composite) else [spec]
    return sum(leaf.shape.numel() for leaf in leaves)


def _agent_specs(kind: AgentSpec) -> Composite:
    """Returns the specs of one agent, by the names that the leaves have in the agent's group."""
    specs = {
        "observation": kind.observation_spec,
        "action": kind.action_spec,
        "mask": _flag_spec(),
        "reward": kind.reward_spec,
        **{key: _flag_spec(1) for key in _FLAGS},
    }
    if kind.action_mask:
        specs["action_mask"] = _flag_spec(n_options(kind.action_spec))
    if kind.state_spec is not None:
        specs["state"] = kind.state_spec
    return Composite(specs)


def _select_leaves(spec: Composite, keys: Sequence[str]) -> Composite:
    return Composite({key: spec[key] for key in keys}, shape=spec.shape)


def _flag_spec(*shape: int) -> TensorSpec:
    return Categorical(2, shape=shape, dtype=torch.bool)
