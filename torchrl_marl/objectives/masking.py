"""Which steps estimators and losses read and learn from, and inputs without masked slots.

Shapes: B any batch dims, N agents.
"""

from __future__ import annotations

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torch.nn import functional as F

from torchrl_marl.functional import expand_mask
from torchrl_marl.modules.memory.network import STATES
from torchrl_marl.specs import GroupSpec

__all__ = [
    "blank_masked_inputs",
    "bootstrap_mask",
    "learned_steps",
    "loss_mask",
    "loss_mask_key",
    "placeholder_action",
    "who_learns",
]


def bootstrap_mask(
    alive: Tensor, next_mask: Tensor, truncated: Tensor, terminated: Tensor
) -> Tensor:
    """Returns whose next observation is bootstrapped from: whose turn is next, or who was cut off.

    An agent cut off by a time limit, in its turn or not, has a last observation to bootstrap from.

    Shapes:
        - alive (when the step began), next_mask: ``[*B, N]``; returns ``[*B, N]``
        - truncated, terminated: ``[*B, N, 1]``
    """
    return next_mask | (alive & (truncated & ~terminated).squeeze(-1))


def loss_mask(tensordict: TensorDictBase, mask_key: NestedKey) -> Tensor:
    """Returns the steps to learn from: own turns whose outcome is in the batch; ``[*B, N]``.

    Those that an estimator of turns marked, or else all in which an agent acts.
    """
    return tensordict.get(loss_mask_key(mask_key), tensordict.get(mask_key))


def learned_steps(tensordict: TensorDictBase, group: GroupSpec) -> Tensor | None:
    """Returns the steps of a group to learn from, ``[*B, N]``; None where it is all.

    As :func:`loss_mask`, also where no agent of the group ever dies or waits.
    """
    acts = None if group.mask_key is None else tensordict.get(group.mask_key)
    return tensordict.get(group.key("loss_mask"), acts)


def who_learns(tensordict: TensorDictBase, group: GroupSpec, acts: Tensor | None) -> Tensor | None:
    """Returns the steps of ``acts`` in which the policy that learns has acted.

    Args:
        tensordict (TensorDictBase): with ``(group, "learns")`` where others act for some agents.
        group (GroupSpec): the group.
        acts (Tensor, optional): all by default.

    Shapes:
        - acts, ``(group, "learns")``, returns: ``[*B, N]``
    """
    learns = tensordict.get(group.key("learns"), None)
    if learns is None or acts is None:
        return acts if learns is None else learns
    return acts & learns


def loss_mask_key(mask_key: NestedKey) -> NestedKey:
    """Returns the key of the steps to learn from: ``loss_mask`` beside the mask."""
    return "loss_mask" if isinstance(mask_key, str) else (*mask_key[:-1], "loss_mask")


def blank_masked_inputs(
    inputs: TensorDictBase, mask_key: NestedKey | None, source: TensorDictBase
) -> TensorDictBase:
    """Puts 0 into the masked slots of networks' inputs, where 0 times NaN would be NaN.

    The agents' entries are those that stand beside their mask. The ``"state"`` is no agent's, and
    stays as it is, whatever its shape; so does what agents remember: who waits keeps it.

    Args:
        inputs (TensorDictBase): a selection, changed in place.
        mask_key (NestedKey, optional): of the mask ``[*B, N]`` in ``source``.
        source (TensorDictBase): where the mask is.
    """
    mask = None if mask_key is None else source.get(mask_key, None)
    if mask is None:
        return inputs
    beside = mask_key[:-1] if isinstance(mask_key, tuple) else ()
    for key in list(inputs.keys(True, True)):
        path = (key,) if isinstance(key, str) else key
        value = inputs.get(key)
        if path[: len(beside)] != beside or path == ("state",) or not value.is_floating_point():
            continue
        if path[-1] in STATES:
            continue
        if value.shape[: mask.ndim] != mask.shape:
            continue
        inputs.set(key, torch.where(expand_mask(mask, value), value, 0.0))
    return inputs


def placeholder_action(group: GroupSpec) -> Tensor:
    """Returns an action of which every distribution knows the log-probability."""
    if group.one_hot:
        return F.one_hot(torch.tensor(0), group.n_actions)
    if group.discrete or group.action_bounds is None:
        return torch.zeros(())
    low, high = group.action_bounds
    return (low + high) / 2
