"""What a policy may do, read off what it did: the way to a game's exact answer.

Shapes: R copies of a situation, B any batch dims, N agents, A actions.
"""

from __future__ import annotations

from tensordict import TensorDictBase
from torch import Tensor
from torch.nn.functional import one_hot

__all__ = ["chances"]


def chances(acted: TensorDictBase, group: str, n_actions: int) -> Tensor:
    """Returns the probability of each action of a group.

    Args:
        acted (TensorDictBase): copies of a situation, the policy's actions drawn in each.
        group (str): the group's name.
        n_actions (int): number A of actions.

    Shapes:
        - acted: ``[R, *B]``; returns ``[*B, N, A]``, float64, sums to 1

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
    rest = (1 - known.sum(-1, keepdim=True)).clamp_min(0)
    return known + unseen * rest / unseen.sum(-1, keepdim=True).clamp_min(1)
