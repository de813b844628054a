"""What a world declares, and the check that it keeps to it.

Shapes: E envs, N agents of a group, O observation features, S state features.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import Categorical, Composite, TensorSpec

from torchrl_marl.errors import ConfigError, SpecError, nearest
from torchrl_marl.specs import AgentSpec, TeamSpec

__all__ = ["Declaration"]

_FLAGS = ("done", "terminated", "truncated")
_ENDS = ("terminated", "truncated")


class Declaration:
    """The agents and the state of a world: its specs, and a reader of what it gives.

    Args:
        owner (str): the world's name in messages.
        n_envs (int): number E of envs.
        kinds (dict of str to tuple of AgentSpec): kinds of agents by group.
        state (TensorSpec, optional): ``[S]``.

    Raises:
        ConfigError: a group of two kinds, or two kinds of one name.
        ValueError: a reserved group name.
    """

    def __init__(
        self,
        owner: str,
        n_envs: int,
        kinds: dict[str, tuple[AgentSpec, ...]] | None = None,
        state: TensorSpec | None = None,
    ) -> None:
        self.owner, self.n_envs, self.kinds, self.state = owner, n_envs, kinds or {}, state
        self.team = TeamSpec(self.kinds, state)
        self.specs = self._specs()
        self._ends = {
            key: (n_envs, *self.specs["done"][key].shape)
            for key in self.specs["done"].keys(True, True)
        }

    def with_agent(self, spec: AgentSpec, group: str | None = None) -> Declaration:
        """With one more kind of agent."""
        group = spec.name if group is None else group
        for name, kinds in self.kinds.items():
            if name == group:
                raise ConfigError(
                    f"{self.owner}: group {group!r} has {kinds[0].name!r} already; groups of two "
                    f"kinds are not implemented yet, so give {spec.name!r} a group of its own."
                )
            if any(kind.name == spec.name for kind in kinds):
                raise ConfigError(
                    f"{self.owner}: group {name!r} has agents named {spec.name!r} already; "
                    "agents need names of their own."
                )
        return Declaration(self.owner, self.n_envs, {**self.kinds, group: (spec,)}, self.state)

    def with_state(self, spec: TensorSpec) -> Declaration:
        """With what only a critic sees."""
        return Declaration(self.owner, self.n_envs, self.kinds, spec)

    def _specs(self) -> dict[str, Composite]:
        observation, action, reward, done = (Composite() for _ in range(4))
        for key in _FLAGS:
            done[key] = _flag(1)
        for name, group in self.team.groups.items():
            n, kind = group.n_agents, self.kinds[name][0]
            seen = {"observation": group.observation_spec, "mask": _flag(n)}
            if kind.action_mask:
                seen["action_mask"] = _flag(n, group.n_actions)
            rewards = torch.stack([kind.reward_spec] * n, 0)
            observation[name] = Composite(seen, shape=(n,))
            action[name] = Composite(action=group.action_spec, shape=(n,))
            reward[name] = Composite(reward=rewards, shape=(n,))
            done[name] = Composite({key: _flag(n, 1) for key in _FLAGS}, shape=(n,))
        if self.state is not None:
            observation["state"] = self.state
        return {"observation": observation, "action": action, "reward": reward, "done": done}

    # ------------------------------------------------------------------------------- reading

    def read(self, given: Any, method: str) -> dict[str, Any]:
        """What ``_reset`` or ``_step`` gave, checked, as nested dicts.

        Args:
            given: a TensorDict (or dict) in groups.
            method (str): ``"_reset"`` or ``"_step"``; only a step has rewards and ends.

        Raises:
            SpecError: a key that is missing or unknown, or a wrong shape or dtype.
        """
        where = f"{self.owner}.{method}"
        step = method == "_step"
        self._check_keys(where, (), given, set(self.team.groups), _ENDS if step else (), self.state)
        source: dict[str, Any] = {}
        if self.state is not None:
            source["state"] = self._read_leaf(where, ("state",), given, self.state)
        for key in _ENDS if step else ():
            self._read_end(where, (key,), given, source)
        for name in self.team.groups:
            source[name] = self._read_group(where, name, given[name], step)
        return source

    def _read_group(self, where: str, name: str, given: Any, step: bool) -> dict[str, Any]:
        seen = self.specs["observation"][name]
        needed = set(seen.keys()) - {"mask"}
        if step:
            needed.add("reward")
        self._check_keys(where, (name,), given, needed, ("mask", *(_ENDS if step else ())))
        source = {
            key: self._read_leaf(where, (name, key), given, seen[key])
            for key in seen.keys()
            if key in given.keys()
        }
        if step:
            spec = self.specs["reward"][name, "reward"]
            source["reward"] = self._read_leaf(where, (name, "reward"), given, spec)
            for key in _ENDS:
                self._read_end(where, (name, key), given, source)
        return source

    def _read_end(self, where: str, key: tuple[str, ...], given: Any, source: dict) -> None:
        flag = given.get(key[-1], None)
        if flag is not None:
            shape = self._ends[key if len(key) > 1 else key[0]]
            self._check_tensor(where, key, flag, shape, torch.bool)
            source[key[-1]] = flag

    def _read_leaf(self, where: str, key: tuple[str, ...], given: Any, spec: TensorSpec) -> Any:
        value = given.get(key[-1], None)
        if isinstance(spec, Composite):
            self._check_keys(where, key, value, set(spec.keys()))
            return {k: self._read_leaf(where, (*key, k), value, spec[k]) for k in spec.keys()}
        self._check_tensor(where, key, value, (self.n_envs, *spec.shape), spec.dtype)
        return value

    def read_actions(self, tensordict: TensorDictBase) -> dict[str, Tensor]:
        """Group -> its actions, checked.

        Raises:
            SpecError: a group without actions, or actions of a wrong shape.
        """
        actions = {}
        for name in self.team.groups:
            spec = self.specs["action"][name, "action"]
            value = tensordict.get((name, "action"), None)
            self._check_tensor(
                f"{self.owner}.step", (name, "action"), value, (self.n_envs, *spec.shape), None
            )
            actions[name] = value
        return actions

    def _check_keys(
        self,
        where: str,
        path: tuple[str, ...],
        given: Any,
        needed: set[str],
        optional: Iterable[str] = (),
        state: TensorSpec | None = None,
    ) -> None:
        if not isinstance(given, (TensorDictBase, Mapping)):
            what = f"{_text(path)} as a" if path else "a"
            raise SpecError(f"{where} gave {what} {type(given).__name__}, expected a TensorDict.")
        if state is not None:
            needed = {*needed, "state"}
        found = set(given.keys())
        if found >= needed and not (found - needed).difference(optional):
            return
        for key in sorted(needed - found):
            raise SpecError(
                f"{where} gave no {_text((*path, key))}; it gave {sorted(found)} there."
            )
        for key in sorted(found.difference(needed, optional)):
            known = sorted({*needed, *optional})
            raise SpecError(
                f"{where} gave {_text((*path, key))}, which was not declared; "
                f"{nearest(key, known)}expected of {known}."
            )

    def _check_tensor(
        self,
        where: str,
        key: tuple[str, ...],
        value: Any,
        shape: tuple[int, ...],
        dtype: torch.dtype | None,
    ) -> None:
        if not isinstance(value, Tensor):
            found = "nothing" if value is None else type(value).__name__
            raise SpecError(f"{where}: {_text(key)} is {found}, expected shape {list(shape)}.")
        if value.shape != shape:
            raise SpecError(
                f"{where}: {_text(key)} has shape {list(value.shape)}, expected {list(shape)}."
            )
        if dtype is not None and value.dtype != dtype:
            raise SpecError(f"{where}: {_text(key)} is {value.dtype}, expected {dtype}.")


def _text(key: tuple[str, ...]) -> str:
    return repr(key[0]) if len(key) == 1 else repr(key)


def _flag(*shape: int) -> TensorSpec:
    return Categorical(2, shape=shape, dtype=torch.bool)
