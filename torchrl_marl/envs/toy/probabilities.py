"""What a policy may do, read off what it did: the way to a game's exact answer.

Shapes: R copies of a situation, B any batch dims, N agents, A actions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.nn.functional import one_hot

__all__ = ["chances", "legal_probabilities"]


def chances(
    acted: TensorDictBase, group: str, n_actions: int, legal: Tensor | None = None
) -> Tensor:
    """Returns the probability of each action of a group.

    Args:
        acted (TensorDictBase): copies of a situation, the policy's actions drawn in each.
        group (str): the group's name.
        n_actions (int): number A of actions.
        legal (Tensor, optional): bool, which may be drawn; all by default.

    Shapes:
        - acted: ``[R, *B]``; legal: ``[*B, N, A]``; returns ``[*B, N, A]``, float64, sums to 1

    Keys:
        - reads: ``(group, "action")``; ``(group, "action_log_prob")``, by which an action that was
          drawn once is known exactly, and of two actions both. What was never drawn shares the
          rest. A policy that does not write it is known by its frequencies.
    """
    drawn = one_hot(acted[group, "action"], n_actions)
    log_prob = acted.get((group, "action_log_prob"), None)
    if log_prob is None:
        return drawn.double().mean(0)
    known = (drawn * log_prob.double().exp().unsqueeze(-1)).amax(0)
    unseen = drawn.sum(0) == 0
    if legal is not None:
        unseen &= legal
    rest = (1 - known.sum(-1, keepdim=True)).clamp_min(0)
    return known + unseen * rest / unseen.sum(-1, keepdim=True).clamp_min(1)


def legal_probabilities(
    policy: Callable[[TensorDictBase], TensorDictBase],
    rows: TensorDictBase,
    groups: Sequence[str],
    copies: int,
) -> dict[str, Tensor]:
    """Returns the probability of each of three actions, some of them not legal.

    Exact, as :func:`chances` is of two: where two legal actions are so rare that neither is drawn,
    the policy is also asked without the third, and they share the rest as they do there.

    Args:
        policy (callable): acts for all groups.
        rows (TensorDictBase): situations with action masks.
        groups (sequence of str): the groups' names.
        copies (int): how often each situation is in the call, with each of the masks.

    Shapes:
        - rows: ``[B]``; returns, by group, ``[B, N, 3]``, float64, sums to 1
    """
    asked = rows.expand(4, *rows.shape).clone()
    for name in groups:
        legal = rows[name, "action_mask"]
        three = legal.all(-1, keepdim=True)
        for action in range(3):
            others = legal.clone()
            others[..., action] = False
            asked[name, "action_mask"][1 + action] = torch.where(three, others, legal)
    acted = policy(asked.expand(copies, *asked.shape).clone())
    return {name: _shared(acted, asked, name) for name in groups}


def _shared(acted: TensorDictBase, asked: TensorDictBase, group: str) -> Tensor:
    legal = asked[group, "action_mask"]
    every = chances(acted, group, 3, legal)
    whole, likeliest = every[0], every[0].argmax(-1, keepdim=True)
    rest = every[1:].gather(0, likeliest.expand_as(whole).unsqueeze(0)).squeeze(0)
    shared = (1 - whole.gather(-1, likeliest)) * rest
    shared = torch.where(one_hot(likeliest.squeeze(-1), 3).bool(), whole, shared)
    alone = one_hot(acted[group, "action"][:, 0], 3).amax(0).sum(-1, keepdim=True) == 1
    return torch.where(alone & legal[0].all(-1, keepdim=True), shared, whole)
