"""Output of a VMAS scenario as one TensorDict.

Shapes: E envs, N agents of a group, S state features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torchrl.envs
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from torch import Tensor

from torchrl_marl.errors import ConfigError, SpecError
from torchrl_marl.stacking import is_lazy

if TYPE_CHECKING:
    from vmas.simulator.environment import Environment

__all__ = ["ScenarioReader", "StateOf", "action_rows", "where_reset"]

StateOf = Literal["observations"] | Callable[["Environment"], Tensor] | None


@dataclass(frozen=True)
class ScenarioReader:
    """Reader of a scenario's lists of agents, group by group.

    Args:
        groups (dict): name of a group -> places of its agents in VMAS's lists.
        lazy (dict): name of a group -> whether its agents differ, and are stacked lazily.
        state ("observations" or callable, optional): what a central critic sees.
        info (bool): whether infos are read.
        device (torch.device, optional): what the TensorDicts say.

    Shapes:
        - ``(group, "observation")``: ``[E, N, O]``; ``(group, "reward")``: ``[E, N, 1]``
        - ``done``, ``terminated``, ``truncated``: ``[E, 1]``; ``"state"``: ``[E, S]``
    """

    groups: dict[str, list[int]]
    lazy: dict[str, bool]
    state: StateOf
    info: bool
    device: torch.device | None

    def read(self, env: Environment, *, rewards: bool) -> TensorDict:
        """Returns the output of a step, or of a reset without ``rewards``."""
        found = env._get_from_scenario(
            get_observations=True, get_rewards=rewards, get_infos=self.info, get_dones=True
        )
        observations, *found = found
        earned = found.pop(0) if rewards else None
        terminated, truncated, *infos = found
        source: dict[str, Any] = {
            "done": (terminated | truncated).unsqueeze(-1),
            "terminated": terminated.unsqueeze(-1),
            "truncated": (truncated & ~terminated).unsqueeze(-1),
        }
        known = infos[0] if infos else [{}] * len(observations)
        for group, places in self.groups.items():
            pack = self._stack_lazily if self.lazy[group] else self._stack_densely
            source[group] = pack(
                [observations[i] for i in places],
                None if earned is None else [earned[i] for i in places],
                [known[i] for i in places],
                torch.Size([env.num_envs]),
            )
        if self.state is not None:
            source["state"] = self.central_state(env, observations)
        size = torch.Size([env.num_envs])
        return TensorDict._new_unsafe(source, batch_size=size, device=self.device)

    def central_state(self, env: Environment, observations: Sequence[Any]) -> Tensor:
        """Returns the input of a central critic, ``[E, S]``."""
        if not callable(self.state):
            return torch.cat([row for x in observations for row in _rows(x)], -1)
        state = self.state(env)
        if state.ndim != 2 or state.shape[0] != env.num_envs:
            raise ConfigError(
                f"VmasEnv: state(...) gave shape {tuple(state.shape)}, "
                f"expected [{env.num_envs}, S]."
            )
        return state

    def _stack_densely(self, observations, rewards, infos, size: torch.Size) -> TensorDictBase:
        size = torch.Size((*size, len(observations)))
        source = {"observation": _stack(observations, size)}
        if rewards is not None:
            source["reward"] = torch.stack([reward.reshape(-1, 1) for reward in rewards], 1)
        if infos[0]:
            source["info"] = _stack([_floats(info) for info in infos], size)
        return TensorDict._new_unsafe(source, batch_size=size, device=self.device)

    def _stack_lazily(self, observations, rewards, infos, size: torch.Size) -> TensorDictBase:
        members = []
        for i, observation in enumerate(observations):
            source = {"observation": _entry(observation, size)}
            if rewards is not None:
                source["reward"] = _entry(rewards[i], size)
            if infos[i]:
                source["info"] = _entry(_floats(infos[i]), size)
            members.append(TensorDict(source, size, self.device))
        # Lazily even where observations agree: actions do not.
        return LazyStackedTensorDict(*members, stack_dim=1)


def where_reset(reset: Tensor, new: TensorDictBase, old: TensorDictBase) -> TensorDictBase:
    """Selects new rows where ``reset`` ``[E]`` is True, and old ones elsewhere."""
    if isinstance(new, LazyStackedTensorDict) and isinstance(old, LazyStackedTensorDict):
        pairs = zip(new.tensordicts, old.tensordicts)
        return LazyStackedTensorDict(*[where_reset(reset, *pair) for pair in pairs], stack_dim=1)
    source: dict[str, Any] = {}
    for key, x in new.items():
        before = old.get(key, None)
        if isinstance(x, TensorDictBase):
            source[key] = x if before is None else where_reset(reset, x, before)
        else:
            rows = reset.view(-1, *[1] * (x.ndim - 1))
            source[key] = x if before is None else torch.where(rows, x, before)
    return TensorDict._new_unsafe(source, batch_size=new.batch_size, device=new.device)


def action_rows(
    env: torchrl.envs.VmasEnv, tensordict: TensorDictBase, group: str
) -> Sequence[Tensor]:
    """Returns each agent's action as VMAS takes it, ``[E, A]`` or ``[E]``.

    Raises:
        SpecError: a group without actions.
    """
    entry = tensordict.get(group)
    lazy = is_lazy(entry)
    rows = [member.get("action", None) for member in entry.unbind(1)] if lazy else []
    action = rows[0] if lazy else entry.get("action", None)
    if action is None:
        raise SpecError(
            f"VmasEnv.step: group {group!r} has no action, expected {(group, 'action')!r}; "
            "the policy must act for every group."
        )
    if not lazy:
        return env.read_action(action, group=group)
    one_hot = not (env.continuous_actions or env.categorical_actions)
    return [row.int().argmax(-1) for row in rows] if one_hot else rows


def _floats(info: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: x.to(torch.float32) for key, x in info.items()}


def _entry(x: Any, size: torch.Size) -> Any:
    """Returns one agent's entry: a tensor with at least one feature, or a TensorDict of such."""
    if isinstance(x, Tensor):
        return x.unsqueeze(-1) if x.ndim == 1 else x
    return TensorDict({key: _entry(value, size) for key, value in x.items()}, size)


def _stack(entries: Sequence[Any], size: torch.Size) -> Any:
    """Stacks the agents' entries in dim 1: tensors ``[E, ...]``, or dicts of such."""
    if isinstance(entries[0], Tensor):
        return torch.stack([_entry(x, size) for x in entries], 1)
    source = {key: _stack([entry[key] for entry in entries], size) for key in entries[0]}
    return TensorDict(source, size)


def _rows(observation: Any) -> list[Tensor]:
    if isinstance(observation, Tensor):
        return [observation.reshape(observation.shape[0], -1)]
    return [row for value in observation.values() for row in _rows(value)]
