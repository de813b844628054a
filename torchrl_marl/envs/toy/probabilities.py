"""Action probabilities of a policy, found from sampled actions and their log-probabilities.

Shapes: R copies of a situation, B any batch dims, N agents, A actions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.nn.functional import one_hot

__all__ = ["action_probabilities", "legal_probabilities"]


def action_probabilities(
    acted: TensorDictBase, group: str, n_actions: int, legal: Tensor | None = None
) -> Tensor:
    """Returns the probability of each action of a group.

    Args:
        acted (TensorDictBase): samples of the policy in each situation.
        group (str): name of the group.
        n_actions (int): number A of actions.
        legal (Tensor, optional): mask of legal actions; all by default.

    Shapes:
        - acted: ``[R, *B]``; legal: ``[*B, N, A]``
        - returns: ``[*B, N, A]``, float64, which sums to 1 over the actions

    Keys:
        - reads: ``(group, "action")`` and ``(group, "action_log_prob")``

    The log-probability gives the exact probability of each sampled action. The remaining
    probability is divided equally among the actions that were not sampled. This is exact if there
    is only one such action. Without log-probabilities the result is the frequency of each action.
    """
    sampled = one_hot(acted[group, "action"], n_actions)
    log_prob = acted.get((group, "action_log_prob"), None)
    if log_prob is None:
        return sampled.double().mean(0)
    known = (sampled * log_prob.double().exp().unsqueeze(-1)).amax(0)
    unsampled = sampled.sum(0) == 0
    if legal is not None:
        unsampled &= legal
    rest = (1 - known.sum(-1, keepdim=True)).clamp_min(0)
    return known + unsampled * rest / unsampled.sum(-1, keepdim=True).clamp_min(1)


def legal_probabilities(
    policy: Callable[[TensorDictBase], TensorDictBase],
    rows: TensorDictBase,
    groups: Sequence[str],
    copies: int,
) -> dict[str, Tensor]:
    """Returns the probability of each of three actions under action masks.

    The probabilities are exact even if two legal actions are so rare that neither is sampled. In
    this case the policy is called again with the third action masked. This call gives the ratio of
    the probabilities of the two rare actions.

    Args:
        policy (callable): policy of all groups.
        rows (TensorDictBase): situations in which the policy acts, with action masks.
        groups (sequence of str): names of the groups.
        copies (int): number of samples of each situation, for each of the masks.

    Shapes:
        - rows: ``[B]``
        - returns: ``[B, N, 3]`` by group, float64, which sums to 1 over the actions
    """
    variants = rows.expand(4, *rows.shape).clone()
    for name in groups:
        legal = rows[name, "action_mask"]
        all_legal = legal.all(-1, keepdim=True)
        for action in range(3):
            others = legal.clone()
            others[..., action] = False
            variants[name, "action_mask"][1 + action] = torch.where(all_legal, others, legal)
    acted = policy(variants.expand(copies, *variants.shape).clone())
    return {name: _combine_probabilities(acted, variants, name) for name in groups}


def _combine_probabilities(output: TensorDictBase, variants: TensorDictBase, group: str) -> Tensor:
    """Returns the probabilities, with those of two unsampled actions from the masked calls."""
    legal = variants[group, "action_mask"]
    probabilities = action_probabilities(output, group, 3, legal)
    unmasked, likeliest = probabilities[0], probabilities[0].argmax(-1, keepdim=True)
    rest = probabilities[1:].gather(0, likeliest.expand_as(unmasked).unsqueeze(0)).squeeze(0)
    combined = (1 - unmasked.gather(-1, likeliest)) * rest
    combined = torch.where(one_hot(likeliest.squeeze(-1), 3).bool(), unmasked, combined)
    one_sampled = one_hot(output[group, "action"][:, 0], 3).amax(0).sum(-1, keepdim=True) == 1
    return torch.where(one_sampled & legal[0].all(-1, keepdim=True), combined, unmasked)
