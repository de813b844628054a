"""What follows a stored step: who is seen then, whose end it is, what it is worth.

Shapes: B any batch dims, N agents.
"""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_marl.objectives.masking import bootstrap_mask
from torchrl_marl.per_group import PerGroup
from torchrl_marl.specs import GroupSpec

__all__ = ["next_mask", "of_agents", "share_of_seen", "share_rewards"]


def next_mask(group: GroupSpec, tensordict: TensorDictBase) -> Tensor | None:
    """Returns who is seen in the next step, ``[*B, N]``; None where the group has no mask.

    Who was cut off by a time limit has a last observation; a batch without ``truncated`` flags has
    been settled so before.

    Args:
        group (GroupSpec): whose agents.
        tensordict (TensorDictBase): ``[*B]``, steps with ``"next"``.
    """
    if group.mask_key is None:
        return None
    following = tensordict.get("next")
    seen = following.get(group.mask_key)
    truncated = None if group.truncated_key is None else following.get(group.truncated_key, None)
    if truncated is None:
        return seen
    alive = group.living(tensordict)
    ends = (of_agents(x, seen) for x in (truncated, following.get(group.terminated_key)))
    return bootstrap_mask(seen if alive is None else alive, seen, *ends)


def of_agents(signal: Tensor, mask: Tensor) -> Tensor:
    """Returns a signal for every agent, ``[*B, N, 1]``, of an agent's or the team's ``[*B, 1]``."""
    signal = signal.unsqueeze(-2) if signal.ndim == mask.ndim else signal
    return signal.expand(*mask.shape, 1)


def share_of_seen(value: Tensor, seen: Tensor | None, per_group: PerGroup) -> Tensor:
    """Gives who is not seen the mean value of those of its group who are; 0 where nobody is.

    Shapes:
        - value, returns: ``[*B, N, 1]``; seen: ``[*B, N]``
    """
    if seen is None:
        return value
    rows = torch.where(seen, value.squeeze(-1), 0.0)
    count = per_group.sum(seen.to(rows.dtype)).clamp_min(1.0)
    mean = per_group.to_agents(per_group.sum(rows) / count)
    return torch.where(seen, rows, mean).unsqueeze(-1)


def share_rewards(group: GroupSpec, data: TensorDictBase, per_group: PerGroup) -> None:
    """Gives the dead what the living of their group earn on average, here in the data.

    So returns of several steps go on after a death, where the team's ends count.

    Args:
        group (GroupSpec): whose.
        data (TensorDictBase): ``[E, T]``, the group dense; its next reward is replaced.
        per_group (PerGroup): of the group.
    """
    key, alive = ("next", *group.key("reward")), group.living(data)
    reward = data.get(key, None)
    if reward is not None and alive is not None:
        data.set(key, share_of_seen(reward, alive, per_group))
