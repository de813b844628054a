"""Specs of a PettingZoo environment; fields of its copies' rows, and the rows as tensors.

Shapes: E copies, N agents of a group, M agents of a kind, S state features.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchrl.data import Composite, OneHot, TensorSpec, Unbounded

from torchrl_marl.envs.agents.declaration import Declaration
from torchrl_marl.envs.agents.kinds import GroupKinds
from torchrl_marl.envs.agents.spaces import action_spec_of, spec_of_space
from torchrl_marl.envs.pettingzoo.agent_rows import (
    AgentSlot,
    AgentSpaces,
    Leaf,
    field_of,
)
from torchrl_marl.envs.pettingzoo.parts import has_parts
from torchrl_marl.errors import ConfigError, NonFiniteError, SpecError
from torchrl_marl.specs import AgentSpec

__all__ = ["RowTensors", "declared", "row_fields", "slots_of", "specs_of"]


_LEAVES = ("observation", "action_mask", "action")


def declared(
    owner: str,
    num_envs: int,
    groups: Mapping[str, Sequence[AgentSpaces]],
    one_hot: bool,
    state: int | str | None = None,
    in_turns: bool = False,
) -> Declaration:
    """Returns the declaration of an environment from the spaces of its agents.

    Args:
        owner (str): name of the environment in messages.
        num_envs (int): number E of copies.
        groups (mapping): group -> spaces of the group's agents.
        one_hot (bool): True to encode discrete actions as one-hot vectors.
        state (int or "observations", optional): number S of features of the state;
            ``"observations"`` if the state is the concatenated observations; None without a state.
        in_turns (bool): True if agents act in turns.

    Raises:
        SpecError: if values of a space are not tensors of a fixed shape.
        ConfigError: if agents cannot be in one group.
    """
    declaration = Declaration(owner, num_envs, in_turns=in_turns)
    used_names: set[str] = set()
    for group, agents in groups.items():
        # Consecutive agents with equal spaces are one kind.
        kinds = [list(kind) for _, kind in groupby(agents, AgentSpaces.kind)]
        for kind in kinds:
            name = group if len(kinds) == 1 else _kind_name(kind, used_names)
            used_names.add(name)
            try:
                spec = _agent_spec(name, kind, one_hot)
                declaration = declaration.with_agent(spec, group)
            except SpecError:
                raise
            except ValueError as error:
                reason = str(error).removeprefix(f"{owner}: ")
                raise ConfigError(f"{owner}: {reason}") from error
    if state == "observations":
        state = declaration.n_observed
    return declaration if state is None else declaration.with_state(Unbounded((int(state),)))


def _kind_name(kind: Sequence[AgentSpaces], used_names: set[str]) -> str:
    first = str(kind[0].agent)
    prefix = re.sub(r"[_-]?\d+$", "", first)
    return prefix if prefix and prefix not in used_names and len(kind) > 1 else first


def _agent_spec(name: str, agents: Sequence[AgentSpaces], one_hot: bool) -> AgentSpec:
    first = agents[0]
    observation_spec = spec_of_space(f"the observation of {first.agent!r}", first.observation)
    where = f"the action of {first.agent!r}"
    if has_parts(first.action):
        from torchrl_marl.envs.pettingzoo.hybrid import hybrid_spec_of

        action = hybrid_spec_of(where, first.action)
    else:
        action = action_spec_of(where, first.action, one_hot=one_hot)
    action = action if action.ndim < 2 else action.reshape(action.shape.numel())
    names = tuple(str(agent.agent) for agent in agents)
    mask = first.masked is not None
    return AgentSpec(
        name, len(agents), observation_spec, action, action_mask=mask, agent_names=names
    )


def slots_of(
    declaration: Declaration, groups: Mapping[str, Sequence[AgentSpaces]]
) -> list[AgentSlot]:
    """Returns the positions in a row of each declared agent's data, in the order of the groups."""
    slots = []
    for name, agents in groups.items():
        kinds = declaration.groups[name]
        for kind, rows in kinds.slices.items():
            observation_spec = declaration.reader.kind_specs[name][kind]["observation"]
            owner = {leaf: kind if _is_stored_by_kind(kinds, leaf) else "" for leaf in _LEAVES}
            fields = {leaf: field_of(name, own, leaf) for leaf, own in owner.items()}
            for i, spaces in zip(range(rows.start, rows.stop), agents[rows]):
                places = {leaf: i - rows.start if own else i for leaf, own in owner.items()}
                leaves = tuple(
                    Leaf(
                        path,
                        "/".join((fields["observation"], *path)),
                        _smallest_value(spaces.observation, path),
                    )
                    for path, _ in _iterate_leaves(observation_spec)
                )
                slots.append(AgentSlot(spaces, name, i, leaves, fields, places))
    return slots


def _is_stored_by_kind(kinds: GroupKinds, leaf: str) -> bool:
    """Returns True if a leaf has one field for each kind; False if one for the whole group."""
    return kinds.lazy if leaf == "action" else kinds.ragged(leaf)


def _iterate_leaves(spec: TensorSpec, *path: str) -> Iterator[tuple[tuple[str, ...], TensorSpec]]:
    """Yields the path and the spec of every leaf."""
    if not isinstance(spec, Composite):
        yield path, spec
        return
    for key, leaf in spec.items():
        yield from _iterate_leaves(leaf, *path, key)


def _smallest_value(space: Any, path: tuple[str, ...]) -> int | tuple[int, ...]:
    """Returns the smallest value of a discrete space, or of a leaf inside a Dict space."""
    for key in path:
        space = space.spaces[key]
    chooses = type(space).__name__ in ("Discrete", "MultiDiscrete")
    start = np.ravel(getattr(space, "start", 0)).tolist() if chooses else [0]
    return tuple(start) if any(start) else 0


def row_fields(
    declaration: Declaration, infos: Mapping[str, Sequence[str]], state: str | None
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Returns the fields of one copy's row: one set for actions, and two for outputs.

    The set ``after/`` holds the result of a step, and ``begun/`` the start of the next step.

    Args:
        declaration (Declaration): declaration of the environment.
        infos (mapping): group -> keys of its infos.
        state (str, optional): ``"world"`` if the row holds the environment's ``state()``.
    """
    fields: dict[str, tuple[tuple[int, ...], str]] = {}
    output_fields: dict[str, tuple[tuple[int, ...], str]] = {"root": ((3, 1), "bool")}
    for name, kinds in declaration.groups.items():
        n = sum(kinds.sizes)
        output_fields[f"{name}//flags"] = ((3, n, 1), "bool")
        output_fields[f"{name}//mask"] = ((n,), "bool")
        fields[f"after/{name}//reward"] = ((n, 1), "float32")
        for key in infos.get(name, ()):
            output_fields[f"{name}//info/{key}"] = ((n,), "float32")
        for leaf in _LEAVES:
            for kind, spec in specs_of(declaration, name, leaf):
                target = fields if leaf == "action" else output_fields
                for path, own in _iterate_leaves(spec):
                    target["/".join((field_of(name, kind, leaf), *path))] = _field_of_spec(own)
    if state == "world":
        assert declaration.state is not None
        output_fields["state"] = (tuple(declaration.state.shape), "float32")
    for part in ("after", "begun"):
        fields.update({f"{part}/{name}": field for name, field in output_fields.items()})
    fields["ended"] = ((1,), "bool")
    return fields


def specs_of(declaration: Declaration, group: str, leaf: str) -> Iterator[tuple[str, TensorSpec]]:
    """Yields pairs of kind and spec for a leaf; the kind ``""`` stands for the whole group."""
    kinds, reader = declaration.groups[group], declaration.reader
    owners = (
        reader.kind_specs[group] if _is_stored_by_kind(kinds, leaf) else {"": reader.specs[group]}
    )
    for kind, specs in owners.items():
        if leaf in specs.keys():
            yield kind, specs[leaf]


def _field_of_spec(spec: TensorSpec) -> tuple[tuple[int, ...], str]:
    if isinstance(spec, OneHot):
        return tuple(spec.shape[:-1]), "int64"
    return tuple(spec.shape), str(spec.dtype).removeprefix("torch.")


_FLAGS = ("done", "terminated", "truncated")


class RowTensors:
    """Reads and writes the rows of all copies as tensors.

    Args:
        declaration (Declaration): declaration of the environment.
        rows (dict): field -> array ``[E, ...]``.
        state ("observations" or "world", optional): source of the critic's state.
        infos (mapping): group -> keys of its infos.
        device (torch.device): device of the tensors that are read.
    """

    def __init__(
        self,
        declaration: Declaration,
        rows: Mapping[str, np.ndarray],
        state: str | None,
        infos: Mapping[str, Sequence[str]],
        device: torch.device,
    ) -> None:
        self._declaration, self._state, self._device = declaration, state, device
        self._tensors = {name: torch.from_numpy(array) for name, array in rows.items()}
        self.rows = rows
        self.ended = rows["ended"]
        self._groups = list(declaration.groups)
        self._leaf_fields = {
            name: list(self._leaf_fields_of(name, infos.get(name, ()))) for name in self._groups
        }
        self._action_fields = {
            field: (name, kind, isinstance(spec, OneHot))
            for name in self._groups
            for kind, spec in specs_of(declaration, name, "action")
            for field in [field_of(name, kind, "action")]
        }
        float_fields = [
            field for field, x in rows.items() if x.dtype.kind == "f" and "/action" not in field
        ]
        self._float_fields = {
            part: [field for field in float_fields if field.startswith(part)]
            for part in ("after", "begun")
        }

    def _leaf_fields_of(
        self, group: str, infos: Sequence[str]
    ) -> list[tuple[tuple[str, ...], str]]:
        """Returns the path and field of every leaf of a group, except for the done flags."""
        places: list[tuple[tuple[str, ...], str]] = [(("mask",), f"{group}//mask")]
        places += [(("info", key), f"{group}//info/{key}") for key in infos]
        for leaf in ("observation", "action_mask"):
            for kind, spec in specs_of(self._declaration, group, leaf):
                head, field = (kind, leaf) if kind else (leaf,), field_of(group, kind, leaf)
                places += [
                    ((*head, *path), "/".join((field, *path))) for path, _ in _iterate_leaves(spec)
                ]
        return places

    def write_actions(self, actions: Mapping[str, Mapping[str, Any]]) -> None:
        """Writes the actions of a dict, group -> ``"action"`` or group -> kind -> ``"action"``."""
        for field, (group, kind, one_hot) in self._action_fields.items():
            action = (actions[group][kind] if kind else actions[group])["action"]
            self._tensors[field].copy_(action.int().argmax(-1) if one_hot else action)

    def read(self, part: str) -> dict[str, Any]:
        """Returns one part (``"after"`` or ``"begun"``) of all copies' outputs, in new tensors."""
        root = self._read_field(f"{part}/root").unbind(1)
        output: dict[str, Any] = dict(zip(_FLAGS, root))
        for group in self._groups:
            flags = self._read_field(f"{part}/{group}//flags").unbind(1)
            own: dict[str, Any] = dict(zip(_FLAGS, flags))
            for path, field in self._leaf_fields[group]:
                _set_nested(own, path, self._read_field(f"{part}/{field}"))
            if part == "after":
                own["reward"] = self._read_field(f"after/{group}//reward")
            output[group] = own
        if self._state == "world":
            output["state"] = self._read_field(f"{part}/state")
        elif self._state is not None:
            output["state"] = self._concatenated(output)
        return output

    def cut_off(self, before: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the result of a step that truncates the episode and keeps the observations."""
        last = dict(before)
        last["done"], last["truncated"] = (torch.ones_like(before["done"]) for _ in range(2))
        for group in self._groups:
            own = before[group]
            reward = torch.zeros(own["done"].shape, device=self._device)
            living = ~own["done"]
            end_flags = {"done": own["done"] | True, "truncated": own["truncated"] | living}
            last[group] = {**own, **end_flags, "mask": living.squeeze(-1), "reward": reward}
        return last

    def _read_field(self, field: str) -> Tensor:
        """Returns a copy of a field on the device."""
        tensor = self._tensors[field]
        return tensor.clone() if self._device.type == "cpu" else tensor.to(self._device)

    def _concatenated(self, output: Mapping[str, Any]) -> Tensor:
        """Concatenates the observations of all agents, ``[E, S]``."""
        leaves = [
            functools.reduce(operator.getitem, path, output[group])
            for group in self._groups
            for path, _ in self._leaf_fields[group]
            if "observation" in path[:2]
        ]
        return torch.cat([leaf.flatten(1).float() for leaf in leaves], 1)

    # ---------------------------------------------------------------------------------- checks

    def check_actions(self) -> None:
        """Raises an error if an active agent's action is not finite.

        Raises:
            NonFiniteError: if an action is not finite; the message names the copy and the agent.
        """
        for field, (group, kind, _) in self._action_fields.items():
            actions = self.rows[field]
            if actions.dtype.kind != "f" or np.isfinite(np.add.reduce(actions, axis=None)):
                continue
            acts = self.rows[f"begun/{group}//mask"][:, self._rows_of_kind(group, kind)]
            self._refuse_not_finite(actions, acts, (group, kind, "action"), "check the policy")

    def check(self, part: str) -> None:
        """Raises an error if a value in a part of the output is not finite.

        Raises:
            NonFiniteError: if a value is not finite; the message names the copy and the agent.
        """
        for field in self._float_fields[part]:
            # For speed, one test covers all numbers, since it runs in every step.
            if not np.isfinite(np.add.reduce(self.rows[field], axis=None)):
                self._refuse_field(part, field)

    def _refuse_field(self, part: str, field: str) -> None:
        """Raises an error for a field that is not finite, unless only agents that are gone are."""
        values = self.rows[field]
        if field.endswith("/state"):
            if not np.isfinite(values).all():
                raise NonFiniteError(
                    f"{self._declaration.owner}: the state of copy "
                    f"{np.argwhere(~np.isfinite(values))[0][0]} is not finite; correct the "
                    "environment."
                )
            return
        _, group, kind, leaf = field.split("/")[:4]
        dead = self.rows[f"{part}/{group}//flags"][:, 1, self._rows_of_kind(group, kind), 0]
        checked = ~dead if leaf == "observation" else np.ones_like(dead)
        self._refuse_not_finite(values, checked, (group, kind, leaf), "correct the environment")

    def _refuse_not_finite(
        self, values: np.ndarray, checked: np.ndarray, key: tuple[str, str, str], fix: str
    ) -> None:
        """Raises an error if a value is not finite where ``checked`` ``[E, N]`` is True."""
        group, kind, leaf = key
        bad = ~np.isfinite(values).reshape(*values.shape[:2], -1).all(-1) & checked
        for copy, agent in np.argwhere(bad)[:1].tolist():
            names = self._declaration.team.groups[group].agent_names[
                self._rows_of_kind(group, kind)
            ]
            raise NonFiniteError(
                f"{self._declaration.owner}: the {leaf} of agent {names[agent]!r} in copy {copy} "
                f"is {values[copy, agent].tolist()}, expected finite numbers; {fix}."
            )

    def _rows_of_kind(self, group: str, kind: str) -> slice:
        """Returns the slice of a kind's agents in the group; the kind ``""`` means all agents."""
        return self._declaration.groups[group].slices[kind] if kind else slice(None)


def _set_nested(nested: dict[str, Any], path: tuple[str, ...], value: Tensor) -> None:
    for key in path[:-1]:
        nested = nested.setdefault(key, {})
    nested[path[-1]] = value
