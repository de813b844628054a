"""How much likelier a policy makes actions that another one took.

Shapes: B any batch dims, N agents.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_marl.functional import expand_mask
from torchrl_marl.specs import GroupSpec

__all__ = ["blank_masked_actions", "policy_ratio", "valid_actions"]


def policy_ratio(
    actor: Any,
    tensordict: TensorDictBase,
    *,
    action: NestedKey,
    sample_log_prob: NestedKey,
    valid: Tensor | None = None,
) -> tuple[torch.distributions.Distribution, Tensor, Tensor]:
    """Returns a policy's distribution, log-probability, and log-ratio to the one that acted.

    Args:
        actor (ProbabilisticTensorDictSequential): the policy.
        tensordict (TensorDictBase): what it reads, nothing in masked slots.
        action, sample_log_prob (NestedKey): of what was done, and how likely that was.
        valid (Tensor, optional): bool, of :func:`valid_actions`.

    Shapes:
        - log-probability: ``[*B, N]``; log-ratio: ``[*B, N, 1]``

    Raises:
        KeyError: nobody wrote how likely the actions were.
        ValueError: log-probabilities of different shapes.
    """
    previous = tensordict.get(sample_log_prob, None)
    if previous is None:
        raise KeyError(_missing(sample_log_prob, tensordict))
    distribution = actor.get_dist(tensordict)
    taken = tensordict.get(action)
    if valid is not None:
        taken = torch.where(valid, taken, 0)
    log_prob = distribution.log_prob(taken)
    if previous.shape != log_prob.shape:
        raise ValueError(
            f"log-probability {tuple(log_prob.shape)} and {sample_log_prob!r} "
            f"{tuple(previous.shape)} do not fit; expected [*B, N] both."
        )
    return distribution, log_prob, (log_prob - previous).unsqueeze(-1)


def _missing(key: NestedKey, tensordict: TensorDictBase) -> str:
    """Returns that a log-probability is missing, and under which key the batch has one."""
    keys = tensordict.keys(True, True)
    leaves = {found: found if isinstance(found, str) else found[-1] for found in keys}
    near = [found for found, leaf in leaves.items() if leaf.endswith("log_prob")]
    if not near:
        return f"the batch has no {key!r}; let the actor write it."
    return (
        f"the batch has no {key!r}, but {near[0]!r}; if that is it, use "
        f"loss.set_keys(sample_log_prob={near[0]!r})."
    )


def valid_actions(group: GroupSpec | None) -> Tensor | None:
    """Returns which numbers of a padded one-hot action are an agent's own; None where all are."""
    if group is None or not group.one_hot:
        return None  # padded distributions of numbers look at an agent's own actions themselves
    return group.action_padding


def blank_masked_actions(
    tensordict: TensorDictBase, key: NestedKey, acts: Tensor, placeholder: Tensor
) -> None:
    """Puts an action of known log-probability where an agent does not act."""
    action = tensordict.get(key)
    chosen = expand_mask(acts, action)
    tensordict.set(key, torch.where(chosen, action, placeholder.to(action)))
