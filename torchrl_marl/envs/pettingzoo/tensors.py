"""The rows of all copies as tensors: actions in, nested dicts out.

Shapes: E copies, N agents of a group, S state features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchrl.data import Composite, OneHot, TensorSpec

from torchrl_marl.envs.agents.declaration import Declaration
from torchrl_marl.envs.pettingzoo.agent_rows import field_of
from torchrl_marl.envs.pettingzoo.agents import specs_of
from torchrl_marl.errors import NonFiniteError

__all__ = ["RowTensors"]

_FLAGS = ("done", "terminated", "truncated")


class RowTensors:
    """Reader and writer of the rows of all copies.

    Args:
        declaration (Declaration): of the world.
        rows (dict): field -> array ``[E, ...]``.
        state ("observations" or "world", optional): what the state is.
        infos (mapping): group -> keys of its infos.
        device (torch.device): of what is read.
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
        self._places = {
            name: list(self._places_of(name, infos.get(name, ()))) for name in self._groups
        }
        self._written = {
            field: (name, kind, isinstance(spec, OneHot))
            for name in self._groups
            for kind, spec in specs_of(declaration, name, "action")
            for field in [field_of(name, kind, "action")]
        }
        seen = [
            field for field, x in rows.items() if x.dtype.kind == "f" and "/action" not in field
        ]
        self._checked = {
            part: [field for field in seen if field.startswith(part)] for part in ("after", "begun")
        }

    def _places_of(self, group: str, infos: Sequence[str]) -> list[tuple[tuple[str, ...], str]]:
        """Returns the path in a group's dict and the field of all leaves but the flags."""
        places: list[tuple[tuple[str, ...], str]] = [(("mask",), f"{group}//mask")]
        places += [(("info", key), f"{group}//info/{key}") for key in infos]
        for leaf in ("observation", "action_mask"):
            for kind, spec in specs_of(self._declaration, group, leaf):
                path = (kind, leaf) if kind else (leaf,)
                places += _paths(path, field_of(group, kind, leaf), spec)
        return places

    def write_actions(self, actions: Mapping[str, Mapping[str, Any]]) -> None:
        """Writes actions, group -> ``"action"`` or kind -> ``"action"``."""
        for field, (group, kind, one_hot) in self._written.items():
            action = (actions[group][kind] if kind else actions[group])["action"]
            self._tensors[field].copy_(action.int().argmax(-1) if one_hot else action)

    def read(self, part: str) -> dict[str, Any]:
        """Returns the copies' output in new tensors: of ``after`` or ``begun``."""
        root = self._own(f"{part}/root").unbind(1)
        output: dict[str, Any] = dict(zip(_FLAGS, root))
        for group in self._groups:
            flags = self._own(f"{part}/{group}//flags").unbind(1)
            own: dict[str, Any] = dict(zip(_FLAGS, flags))
            for path, field in self._places[group]:
                _put(own, path, self._own(f"{part}/{field}"))
            if part == "after":
                own["reward"] = self._own(f"after/{group}//reward")
            output[group] = own
        if self._state == "world":
            output["state"] = self._own(f"{part}/state")
        elif self._state is not None:
            output["state"] = self._side_by_side(output)
        return output

    def without_rewards(self, after: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a step's result without rewards, as the start of the next step."""
        next_start = dict(after)
        for group in self._groups:
            next_start[group] = {key: x for key, x in after[group].items() if key != "reward"}
        return next_start

    def cut_off(self, before: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the result of a step in which only the episode's end happened."""
        last = dict(before)
        last["done"], last["truncated"] = (torch.ones_like(before["done"]) for _ in range(2))
        for group in self._groups:
            own = before[group]
            reward = torch.zeros(own["done"].shape, device=self._device)
            living = ~own["done"]
            ends = {"done": own["done"] | True, "truncated": own["truncated"] | living}
            last[group] = {**own, **ends, "mask": living.squeeze(-1), "reward": reward}
        return last

    def _own(self, field: str) -> Tensor:
        tensor = self._tensors[field]
        return tensor.clone() if self._device.type == "cpu" else tensor.to(self._device)

    def _side_by_side(self, output: Mapping[str, Any]) -> Tensor:
        """Concatenates the observations of all agents, ``[E, S]``."""
        leaves = [
            _get(output[group], path)
            for group in self._groups
            for path, _ in self._places[group]
            if "observation" in path[:2]
        ]
        return torch.cat([leaf.flatten(1).float() for leaf in leaves], 1)

    # ---------------------------------------------------------------------------------- checks

    def check_actions(self) -> None:
        """Refuses actions that are not finite, of agents that act.

        Raises:
            NonFiniteError: naming the copy and the agent.
        """
        for field, (group, kind, _) in self._written.items():
            actions = self.rows[field]
            if actions.dtype.kind != "f" or np.isfinite(np.add.reduce(actions, axis=None)):
                continue
            place = self._declaration.groups[group].slices[kind] if kind else slice(None)
            acts = self.rows[f"begun/{group}//mask"][:, place]
            bad = ~np.isfinite(actions).reshape(*actions.shape[:2], -1).all(-1) & acts
            for copy, agent in np.argwhere(bad)[:1].tolist():
                name = self._declaration.team.groups[group].agent_names[place][agent]
                raise NonFiniteError(
                    f"{self._declaration.owner}: the action of agent {name!r} in copy {copy} is "
                    f"{actions[copy, agent].tolist()}, expected finite numbers; look at the policy."
                )

    def check(self, part: str) -> None:
        """Refuses values that are not finite.

        Raises:
            NonFiniteError: naming the copy and the agent.
        """
        for field in self._checked[part]:
            # All numbers in one test, since every step makes it.
            if not np.isfinite(np.add.reduce(self.rows[field], axis=None)):
                self._refuse(part, field)

    def _refuse(self, part: str, field: str) -> None:
        values = self.rows[field]
        bad = ~np.isfinite(values)
        if field.endswith("/state"):
            if bad.any():
                raise NonFiniteError(
                    f"{self._declaration.owner}: the state of copy {np.argwhere(bad)[0][0]} is "
                    "not finite; correct the world."
                )
            return
        _, group, kind, leaf = field.split("/")[:4]
        bad = bad.reshape(*values.shape[:2], -1).any(-1)
        kinds = self._declaration.groups[group]
        place = kinds.slices[kind] if kind else slice(None)
        dead = self.rows[f"{part}/{group}//flags"][:, 1, place, 0]
        bad = bad & ~dead if leaf == "observation" else bad
        for copy, agent in np.argwhere(bad)[:1].tolist():
            name = self._declaration.team.groups[group].agent_names[place][agent]
            raise NonFiniteError(
                f"{self._declaration.owner}: the {leaf} of agent {name!r} in copy {copy} is "
                f"{values[copy, agent].tolist()}, expected finite numbers; correct the world."
            )


def _paths(path: tuple[str, ...], field: str, spec: TensorSpec) -> list:
    if not isinstance(spec, Composite):
        return [(path, field)]
    leaves = [_paths((*path, key), f"{field}/{key}", leaf) for key, leaf in spec.items()]
    return [place for own in leaves for place in own]


def _put(nested: dict[str, Any], path: tuple[str, ...], value: Tensor) -> None:
    for key in path[:-1]:
        nested = nested.setdefault(key, {})
    nested[path[-1]] = value


def _get(nested: Mapping[str, Any], path: tuple[str, ...]) -> Tensor:
    for key in path:
        nested = nested[key]
    return nested  # type: ignore[return-value]
