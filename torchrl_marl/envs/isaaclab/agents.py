"""Agents of an Isaac Lab task, and the ranges of their actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torchrl.data import Bounded, Composite, TensorSpec, Unbounded

from torchrl_marl.envs.agents.declaration import Declaration
from torchrl_marl.envs.agents.spaces import action_spec_of, group_agents, spec_of_space
from torchrl_marl.errors import ConfigError, SpecError, nearest
from torchrl_marl.specs import AgentSpec

__all__ = ["ActionRanges", "Agents", "Range", "declared", "groups_of"]

Range = float | Mapping[str, float] | None


@dataclass(frozen=True)
class ActionRanges:
    """Scale or clip of an agent's actions, for tasks with unbounded action spaces.

    An action space is unbounded if the task declares only its size, as in
    ``action_spaces = {"cart": 1}``.

    Args:
        scale (float or mapping, optional): factor by which actions in [-1, 1] are multiplied: one
            number for all agents, or a number by agent or group.
        clip (float or mapping, optional): largest absolute value, to which normally distributed
            actions are clipped: one number for all agents, or a number by agent or group.

    Raises:
        ConfigError: if a value is not a positive number.
    """

    scale: Range = None
    clip: Range = None

    def __post_init__(self) -> None:
        for field, entry in self.__dict__.items():
            values = entry.values() if isinstance(entry, Mapping) else [entry]
            for value in values if entry is not None else ():
                number = isinstance(value, (int, float)) and not isinstance(value, bool)
                if not (number and value > 0):
                    raise ConfigError(f"action_{field} is {value!r}, expected a number above 0.")

    def check_names(self, groups: Mapping[str, Sequence[str]]) -> None:
        """Raises an error if a range is given for an unknown agent or group."""
        known = {*groups, *(name for names in groups.values() for name in names)}
        for field, entry in self.__dict__.items():
            for name in entry if isinstance(entry, Mapping) else ():
                if name not in known:
                    raise ConfigError(
                        f"action_{field}: {name!r} is neither an agent nor a group; "
                        f"{nearest(name, known)}expected one of {sorted(known)}."
                    )

    def of(self, name: str, group: str) -> tuple[float | None, float | None]:
        """Returns the scale and the clip of an agent's actions."""
        scale, clip = (
            entry.get(name, entry.get(group)) if isinstance(entry, Mapping) else entry
            for entry in (self.scale, self.clip)
        )
        return scale, clip

    def spec(self, name: str, group: str, space: Any) -> TensorSpec:
        """Returns the spec of one agent's actions; its shape is ``[A]``.

        Raises:
            ConfigError: if an unbounded space has neither a scale nor a clip, or both.
            SpecError: if values of the space are not tensors of a fixed shape.
        """
        where = f"the action space of {name!r}"
        spec = action_spec_of(where, space)
        spec = spec if spec.ndim < 2 else spec.reshape(spec.shape.numel())
        if not isinstance(spec, Unbounded):
            return spec
        scale, clip = self.of(name, group)
        if (scale is None) == (clip is None):
            raise ConfigError(
                f"{where} is unbounded and has {'no range' if scale is None else 'two ranges'}; "
                "set either action_scale=1.0 (actions in [-1, 1] are multiplied by it) or "
                "action_clip=1.0 (normally distributed actions are clipped to it), for all or by "
                f"agent or group, such as {{{name!r}: 1.0}}."
            )
        return spec if scale is None else Bounded(-1, 1, spec.shape, dtype=spec.dtype)


def groups_of(
    env: Any, group_map: Any = None, states: Mapping[str, Any] | None = None
) -> dict[str, list[str]]:
    """Groups agents with a common name prefix and equal spaces; others are groups of one agent.

    Args:
        env (DirectMARLEnv): task with ``possible_agents`` and their spaces.
        group_map (MarlGroupMapType or mapping, optional): grouping to use instead.
        states (mapping, optional): agent -> space of its own state.

    Raises:
        ConfigError: if an agent is in no group or in two, or an id is unknown.
    """
    groups = group_agents(list(env.possible_agents), group_map)
    if group_map:
        return groups
    split: dict[str, list[str]] = {}
    for group, names in groups.items():
        first = _spaces_of_agent(env, states, names[0])
        equal = all(_spaces_of_agent(env, states, name) == first for name in names)
        split.update({group: names} if equal else {name: [name] for name in names})
    return split


def declared(
    owner: str,
    env: Any,
    groups: Mapping[str, Sequence[str]],
    ranges: ActionRanges,
    states: Mapping[str, Any] | None = None,
) -> Declaration:
    """Returns the declaration of a task: its groups of agents, and their specs.

    Args:
        owner (str): name of the task in error messages.
        env (DirectMARLEnv): the task.
        groups (mapping): group -> names of its agents.
        ranges (ActionRanges): ranges of unbounded actions.
        states (mapping, optional): agent -> space of its own state.

    Raises:
        ConfigError: if agents cannot be in one group, or actions have no range.
        SpecError: if values of a space are not tensors of a fixed shape.
    """
    ranges.check_names(groups)
    declaration = Declaration(owner, env.num_envs)
    for group, names in groups.items():
        # Consecutive agents with equal spaces are one kind.
        kinds = [list(kind) for _, kind in groupby(names, partial(_spaces_of_agent, env, states))]
        for kind in kinds:
            first = kind[0]
            where, space = f"the observation space of {first!r}", env.observation_spaces[first]
            observation = spec_of_space(where, space)
            action = ranges.spec(first, group, env.action_spaces[first])
            state = None
            if states is not None:
                state = spec_of_space(f"the state space of {first!r}", states[first])
            name, called = group if len(kinds) == 1 else first, tuple(kind)
            spec = AgentSpec(
                name, len(kind), observation, action, agent_names=called, state_spec=state
            )
            declaration = declaration.with_agent(spec, group)
    return declaration


def _spaces_of_agent(env: Any, states: Mapping[str, Any] | None, name: str) -> tuple[Any, Any, Any]:
    state = None if states is None else states[name]
    return env.observation_spaces[name], env.action_spaces[name], state


@dataclass(frozen=True)
class Agents:
    """Converts a task's tensors, one per agent, to tensors of whole groups, and back.

    Args:
        declaration (Declaration): declaration of the agents.
        device (torch.device): device of all tensors.
        shapes (dict): agent -> shape of the agent's action in the task.
        limits (dict): group -> clip and scale of the group's actions, ``[N, 1]`` each.
    """

    declaration: Declaration
    device: torch.device
    shapes: Mapping[str, tuple[int, ...]]
    limits: Mapping[str, tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, env: Any, declaration: Declaration, ranges: ActionRanges) -> Agents:
        """Builds the conversion from a task's spaces.

        Raises:
            ConfigError: if a scale or clip is given, but no action space is unbounded.
        """
        device, shapes, limits = torch.device(env.device), {}, {}
        for group in declaration.team.groups.values():
            rows = []
            for name in group.agent_names:
                space = env.action_spaces[name]
                shapes[name] = tuple(space.shape) or (1,)
                scale, clip = ranges.of(name, group.name) if _is_unbounded(space) else (None, None)
                rows.append((clip or torch.inf, scale or 1.0))
            if any(row != (torch.inf, 1.0) for row in rows):
                clips, scales = torch.tensor(rows, device=device).unsqueeze(-1).unbind(1)
                limits[group.name] = (clips, scales)
        ranges_used = any(_is_unbounded(space) for space in env.action_spaces.values())
        if ranges != ActionRanges() and not ranges_used:
            raise ConfigError(
                f"{declaration.owner}: action_scale and action_clip are for unbounded action "
                "spaces, and all of this task's are bounded; leave them out."
            )
        return cls(declaration, device, shapes, limits)

    @property
    def names(self) -> list[str]:
        """Names of all agents, in the order of the groups."""
        groups = self.declaration.team.groups.values()
        return [name for group in groups for name in group.agent_names]

    @property
    def places(self) -> dict[str, slice]:
        """Group -> slice that selects the group's agents in the list of all agents."""
        places, start = {}, 0
        for name, group in self.declaration.team.groups.items():
            places[name] = slice(start, start + group.n_agents)
            start += group.n_agents
        return places

    # ------------------------------------------------------------------------- output of a task

    def away(self, output: Mapping[str, Any]) -> Tensor | None:
        """Returns a mask ``[1, N, 1]`` of agents missing from a task's output, or None.

        Raises:
            SpecError: if the output has an agent that is not in ``possible_agents``.
        """
        names = self.names
        missing = [name not in output for name in names]
        if len(output) != len(names) - sum(missing):
            unknown = next(name for name in output if name not in names)
            raise SpecError(
                f"{self.declaration.owner} returned data of {unknown!r}, which is not among its "
                f"agents {names}; add it to possible_agents."
            )
        return torch.tensor(missing, device=self.device).view(1, -1, 1) if any(missing) else None

    def numbers(self, output: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Stacks rewards or flags of all agents, ``[E, N, 1]``; they are 0 for absent agents."""
        expected = torch.Size([self.declaration.num_envs])
        rows = []
        for name in self.names:
            row = output[name] if name in output else torch.zeros(expected, device=self.device)
            if row.shape != expected:
                raise SpecError(
                    f"{self.declaration.owner}: a reward or flag of {name!r} has shape "
                    f"{list(row.shape)}, expected {list(expected)}."
                )
            rows.append(row)
        return torch.stack(rows, 1).unsqueeze(-1).to(dtype)

    def observations(self, output: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Returns each group's observations; split by kind if shapes differ within the group.

        The tensors are copies, which share no memory with the task's buffers. Observations of
        absent agents are zeros.

        Raises:
            SpecError: if a shape differs from the declared one.
        """
        groups: dict[str, dict[str, Any]] = {}
        self._add_leaf("observation", output, groups)
        return groups

    def add_states(self, output: Mapping[str, Any], groups: dict[str, dict[str, Any]]) -> None:
        """Adds the agents' own states to the observations of each group, in the same form.

        Raises:
            SpecError: if a shape differs from the declared one.
        """
        self._add_leaf("state", output, groups)

    def _add_leaf(
        self, leaf: str, output: Mapping[str, Any], groups: dict[str, dict[str, Any]]
    ) -> None:
        for group, kinds in self.declaration.kinds.items():
            leaves = groups.setdefault(group, {})
            if self.declaration.groups[group].ragged(leaf):
                for kind in kinds:
                    values = self._stack_agents(leaf, output, kind.agent_names, kind)
                    leaves.setdefault(kind.name, {})[leaf] = values
            else:
                names = self.declaration.team.groups[group].agent_names
                leaves[leaf] = self._stack_agents(leaf, output, names, kinds[0])

    def _stack_agents(
        self, leaf: str, output: Mapping[str, Any], names: Sequence[str], kind: AgentSpec
    ) -> Any:
        rows = [output.get(name) for name in names]
        return self._stack_rows(leaf, names, rows, getattr(kind, f"{leaf}_spec"))

    def _stack_rows(
        self, what: str, names: Sequence[str], rows: Sequence[Any], spec: TensorSpec
    ) -> Any:
        if isinstance(spec, Composite):
            return {
                key: self._stack_rows(
                    what, names, [None if x is None else x[key] for x in rows], leaf
                )
                for key, leaf in spec.items()
            }
        shape = torch.Size([self.declaration.num_envs, *spec.shape])
        stacked = torch.stack(
            [self._check_row(what, *named, shape) for named in zip(names, rows)], 1
        )
        return stacked.to(spec.dtype)

    def _check_row(self, what: str, name: str, row: Tensor | None, shape: torch.Size) -> Tensor:
        if row is None:
            return torch.zeros(shape, device=self.device)
        if row.shape == shape:
            return row
        if row.shape == shape[:1] and shape[1:] == (1,):  # it is a single number
            return row.unsqueeze(-1)
        raise SpecError(
            f"{self.declaration.owner}: the {what} of {name!r} has shape {list(row.shape)}, "
            f"expected {list(shape)} as in its {what} space; correct one of the two."
        )

    # -------------------------------------------------------------------------- input of a task

    def actions(self, chosen: Mapping[str, Any], mask: Tensor) -> dict[str, Tensor]:
        """Returns each agent's action in the task's format; masked agents get zeros.

        Args:
            chosen (mapping): group -> ``"action"``, or group -> kind -> ``"action"``.
            mask (Tensor): mask of all agents, ``[E, N]``.
        """
        actions: dict[str, Tensor] = {}
        for group, agents in self.places.items():
            kinds = self.declaration.groups[group]
            acting = kinds.zero_masked_actions(chosen[group], mask[:, agents])
            names = self.declaration.team.groups[group].agent_names
            for kind, rows in kinds.parts(acting, "action").items():
                kind_slice = kinds.slices[kind] if kind else slice(None)
                if group in self.limits:
                    clip, scale = (x[kind_slice] for x in self.limits[group])
                    rows = rows.clamp(-clip, clip) * scale
                for name, row in zip(names[kind_slice], rows.unbind(1)):
                    actions[name] = row.reshape(row.shape[0], *self.shapes[name])
        return actions


def _is_unbounded(space: Any) -> bool:
    return isinstance(spec_of_space("", space, action=True), Unbounded)
