"""Checks that what an environment gives is finite, and that who acts has a legal action.

Shapes: E envs, T steps, N agents of a group.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_marl.errors import NonFiniteError, SpecError
from torchrl_marl.functional import expand_mask
from torchrl_marl.specs import GroupSpec, TeamSpec
from torchrl_marl.stacking import Padding

__all__ = ["check_finite"]


def check_finite(team: TeamSpec, data: TensorDictBase) -> None:
    """Refuses observations, states and rewards of living agents that are NaN or infinite.

    And agents that act without any legal action.

    Args:
        team (TeamSpec): the groups.
        data (TensorDictBase): a batch ``[E, T]``, or one step ``[E]``.

    Raises:
        NonFiniteError: naming group, key, env and step.
        SpecError: naming group, agent, env and step.
    """
    stuck = list(_stuck(team, data))
    found = [
        (group, key, _broken(value, mask, padding, data))
        for group, key, mask, padding in _checked_entries(team, data)
        if (value := data.get(key, None)) is not None and value.is_floating_point()
    ]
    wrong = [*(broken for *_, broken in found), *(x for _, x in stuck)]
    if not wrong or not bool(torch.stack([x.any() for x in wrong]).any()):
        return
    for group, key, broken in found:
        if bool(broken.any()):
            raise NonFiniteError(
                f"group {group!r}: {key!r} of the environment is NaN or infinite "
                f"({_place(broken, data)} of the batch); training stops, and the last checkpoint "
                "stays. Mend the environment."
            )
    spec, broken = next(entry for entry in stuck if bool(entry[1].any()))
    agent = spec.agent_names[int(broken.nonzero()[0, -1])]
    raise SpecError(
        f"group {spec.name!r}: agent {agent!r} acts and has no legal action "
        f"({_place(broken, data)} of the batch: its {spec.action_mask_key!r} is False everywhere, "
        f"its {spec.mask_key!r} True); make an action legal, such as a no-op, or the mask False. "
        "Training stops, and the last checkpoint stays."
    )


def _place(broken: Tensor, data: TensorDictBase) -> str:
    """Returns the first place of a batch ``[E, T]``, or of a step ``[E]``."""
    where = broken.nonzero()[0].tolist()[: data.ndim]
    return ", ".join(f"{n} {i}" for n, i in zip(("env", "step"), where))


def _stuck(team: TeamSpec, data: TensorDictBase) -> Iterator[tuple[GroupSpec, Tensor]]:
    """Yields groups with legal actions, and where their agents act and have none, ``[*B, N]``."""
    for group in team.groups.values():
        if group.action_mask_key is not None:
            stuck = ~data.get(group.action_mask_key).any(-1)
            acts = None if group.mask_key is None else data.get(group.mask_key)
            yield group, stuck if acts is None else stuck & acts


def _checked_entries(
    team: TeamSpec, data: TensorDictBase
) -> Iterator[tuple[str, NestedKey, Tensor | None, Padding | None]]:
    # What follows the last step of a batch or of an episode stands under "next" alone.
    for group in team.groups.values():
        mask_key = group.mask_key
        mask, next_mask = (
            None if mask_key is None else data.get((*place, *_as_tuple(mask_key)), None)
            for place in ((), ("next",))
        )
        for key in group.observation_keys:
            yield group.name, key, mask, _padding(group, key)
        yield group.name, ("next", *_as_tuple(group.reward_key)), group.living(data), None
        for key in group.observation_keys:
            yield group.name, ("next", *_as_tuple(key)), next_mask, _padding(group, key)
    if team.state_spec is not None:
        yield "all groups", "state", None, None
        yield "all groups", ("next", "state"), None, None


def _padding(group: GroupSpec, key: NestedKey) -> Padding | None:
    inner = _as_tuple(key)[1:]
    return group.paddings.get(inner if len(inner) > 1 else inner[0])


def _broken(
    value: Tensor, mask: Tensor | None, padding: Padding | None, data: TensorDictBase
) -> Tensor:
    """Returns where a value of an agent that is alive is not finite, of the data's shape."""
    broken = ~torch.isfinite(value)
    if padding is not None:
        broken = broken & padding.mask(value.device)
    if mask is not None and value.shape[: mask.ndim] == mask.shape:
        broken = broken & expand_mask(mask, value)
    return broken.flatten(data.ndim).any(-1) if value.ndim > data.ndim else broken


def _as_tuple(key: Any) -> tuple[str, ...]:
    return key if isinstance(key, tuple) else (key,)
