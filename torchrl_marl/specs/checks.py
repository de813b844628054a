"""Checks of what a network of a group reads against the group's specs; they look at no values.

Shapes: B any batch dims, N agents of a group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_marl.errors import SpecError
from torchrl_marl.specs.groups import GroupSpec

__all__ = ["check_action_mask", "check_flags", "check_inputs", "check_rows"]


def check_inputs(group: GroupSpec, observations: Sequence[Tensor], mask: Tensor | None) -> None:
    """Checks what a network of a group reads against the group's specs; looks at no values.

    Args:
        group (GroupSpec): whose.
        observations (sequence of Tensor): its observation leaves.
        mask (Tensor, optional): where it has one.

    Shapes:
        - observations: ``[*B, N, *features]``; mask: ``[*B, N]``

    Raises:
        SpecError: naming group, key, and the shape or type that was found and expected.
    """
    for key, shape, leaf in zip(group.observation_keys, group.observation_shapes, observations):
        if leaf.shape[-len(shape) :] != shape:
            expected = f"(*batch, {', '.join(map(str, shape))})"
            if leaf.ndim >= len(shape):
                where = f": {key!r} is {tuple(leaf.shape)}, expected {expected}: it"
                group.check_number(leaf.shape[-len(shape)], where)
            _refuse(group, key, tuple(leaf.shape), expected)
    if mask is None:
        return
    ndim = observations[0].ndim - len(group.observation_shapes[0]) + 1
    if mask.dtype is not torch.bool:
        _refuse(group, group.mask_key, mask.dtype, "torch.bool")
    if mask.shape != observations[0].shape[:ndim]:
        _refuse(group, group.mask_key, tuple(mask.shape), tuple(observations[0].shape[:ndim]))


def check_rows(group: GroupSpec, own: TensorDictBase, batch: torch.Size) -> None:
    """Checks that a group's entries are of as many agents as its specs say.

    Args:
        group (GroupSpec): whose.
        own (TensorDictBase): its entries, ``[*B]`` or ``[*B, N]``.
        batch (torch.Size): the batch dims B.

    Raises:
        SpecError: another number of agents.
    """
    if own.ndim > len(batch):
        group.check_number(own.batch_size[len(batch)])


def check_action_mask(group: GroupSpec, action_mask: Tensor, batch: torch.Size) -> None:
    """Checks an action mask against the group's specs.

    Shapes:
        - action_mask: ``[*B, N, n_actions]``

    Raises:
        SpecError: naming group, key, and the shape or type that was found and expected.
    """
    key, expected = group.action_mask_key, (*batch, group.n_agents, group.n_actions)
    if action_mask.dtype is not torch.bool:
        _refuse(group, key, action_mask.dtype, "torch.bool")
    if tuple(action_mask.shape) != expected:
        _refuse(group, key, tuple(action_mask.shape), expected)


def check_flags(group: GroupSpec, source: TensorDictBase) -> None:
    """Checks that there are flags that say when agents end.

    Args:
        group (GroupSpec): whose.
        source (TensorDictBase): the group's entries, where its agents have flags of their own;
            else those of all.

    Raises:
        SpecError: naming the flag that is missing.
    """
    for name in ("done", "terminated"):
        if source.get(name, None) is None:
            raise SpecError(
                f"group {group.name!r}: the batch has no {name!r} "
                f"{'of its agents' if group.agent_done else 'of the team'}, expected one in each "
                "step and under 'next'; keep all flags that the environment gives."
            )


def _refuse(group: GroupSpec, key: object, found: object, expected: object) -> None:
    raise SpecError(
        f"group {group.name!r}: {key!r} is {found}, expected {expected}, as the specs say that "
        "the policy was built for."
    )
