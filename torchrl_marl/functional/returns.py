"""N-step returns, lambda-returns, and updates of target networks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrl_marl.functional.advantage import (
    _check_inputs,
    _ends_and_next_acting,
    _run_recursion,
    _where_numbers,
)
from torchrl_marl.functional.statistics import expand_mask, fit_mask

__all__ = ["fill_next", "n_step", "q_lambda", "soft_update_", "within_window"]


@torch.no_grad()
def soft_update_(targets: Sequence[Tensor], sources: Sequence[Tensor], tau: float | Tensor) -> None:
    r"""Moves target parameters towards the trained ones, in place.

    .. math::
        \theta' \leftarrow \theta' + \tau (\theta - \theta')

    Args:
        targets (sequence of Tensor): parameters of the target networks; they are changed in place.
        sources (sequence of Tensor): parameters of the trained networks, with the same shapes.
        tau (float or Tensor): weight of the trained parameters, 0 to 1. A scalar tensor may change
            between the replays of a graph. For hard updates, pass 1 in every k-th update, else 0.

    Raises:
        ValueError: different numbers of tensors, or different shapes.

    Reference: Lillicrap et al., 2016, https://arxiv.org/abs/1509.02971 (algorithm 1).

    Reduces to: a copy for ``tau=1``, to the bit; no change for ``tau=0``.

    Examples:
        >>> target, source = torch.zeros(2), torch.tensor([1.0, 2.0])
        >>> soft_update_([target], [source], 0.25)
        >>> target
        tensor([0.2500, 0.5000])
    """
    targets, sources = list(targets), list(sources)
    found = [tuple(x.shape) for x in targets], [tuple(x.shape) for x in sources]
    if found[0] != found[1]:
        raise ValueError(
            f"soft_update_: targets have shapes {found[0]}, sources {found[1]}, expected the same."
        )
    if isinstance(tau, Tensor):
        torch._foreach_lerp_(targets, sources, [tau.to(x.dtype) for x in targets])
    else:
        torch._foreach_lerp_(targets, sources, tau)


def within_window(ends: Tensor) -> Tensor:
    """Returns the mask of the steps of a window up to its first end.

    Args:
        ends (Tensor): bool, whether the step is the last of its window.

    Shapes:
        - ends, returns: ``[*B, L]``

    Examples:
        >>> within_window(torch.tensor([[False, True, False, True]]))
        tensor([[ True,  True, False, False]])
    """
    ended = ends.cumsum(-1)  # number of ends up to the step, inclusive
    return (ended - ends.to(ended.dtype)) == 0


def n_step(reward: Tensor, ends: Tensor, *, gamma: float | Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""Sums the discounted rewards of a window of steps, up to its first end.

    .. math::
        R = \sum_{k=0}^{m-1} \gamma^k r_k, \quad m = \min(L, 1 + \text{first } k \text{ that ends})

    The target is ``R + discount * value``, with the value after step ``length - 1``, or 0 if that
    step terminated. Other reasons to stop, such as a time limit or the last known step, are
    truncations: the sum ends, and the value is bootstrapped.

    Args:
        reward (Tensor): rewards of the steps; those after an end are ignored.
        ends (Tensor): bool, whether the step is the last of its window.
        gamma (float): discount factor.

    Shapes:
        - reward: ``[*B, L, *features]``, such as ``[*B, L, N, 1]``; ends: ``[*B, L]``
        - returns: the sum ``[*B, *features]``; ``gamma ** length``, ``[*B, 1]``; and the length
          m, ``[*B]``, of integers

    Raises:
        ValueError: ends that are not bool, or of a shape that does not fit the rewards.

    Reference: Watkins, 1989 (n-step returns); Sutton and Barto, 2018, section 7.1.

    Reduces to: the reward and ``gamma`` for a window of one step.

    Examples:
        >>> reward = torch.tensor([1.0, 2.0, 4.0]).view(1, 3, 1, 1)
        >>> ends = torch.tensor([[False, True, False]])
        >>> total, discount, length = n_step(reward, ends, gamma=0.5)
        >>> total.item(), discount.item(), length.item()
        (2.0, 0.25, 2)
    """
    if ends.dtype is not torch.bool or ends.shape != reward.shape[: ends.ndim] or ends.ndim < 1:
        raise ValueError(
            f"n_step: ends are {ends.dtype} of shape {tuple(ends.shape)}, rewards of shape "
            f"{tuple(reward.shape)}; expected torch.bool [*B, L] and [*B, L, *features]."
        )
    time = ends.ndim - 1
    within = within_window(ends)
    length = within.sum(-1)
    power = torch.arange(ends.shape[-1], dtype=reward.dtype, device=reward.device)
    weight = torch.where(within, gamma**power, 0.0)
    total = torch.where(expand_mask(within, reward), reward, 0.0)
    total = (total * expand_mask(weight, reward)).sum(time)
    return total, (gamma ** length.to(reward.dtype)).unsqueeze(-1), length


def fill_next(next_value: Tensor, known: Tensor, done: Tensor, *, gamma: float | Tensor) -> Tensor:
    r"""Replaces an unknown next value by the next known one, discounted.

    .. math::
        v_t = \begin{cases} V(s_{t+1}) & \text{if known}_t \\
              \gamma (1 - \text{done}_t) \, v_{t+1} & \text{otherwise} \end{cases}

    In the last step, and in steps with ``done``, unknown values are 0. A team has no value in
    steps in which none of its agents lives.

    Args:
        next_value (Tensor): value of the state after the step; unknown ones may be anything.
        known (Tensor): bool, whether there is a value.
        done (Tensor): bool, whether the trajectory ends.
        gamma (float): discount factor.

    Shapes:
        - next_value, done, returns: ``[*B, T, N, 1]``; known: ``[*B, T, N, 1]`` or
          ``[*B, T, 1, 1]``

    Reduces to: the identity, if all values are known.

    Examples:
        >>> value = torch.tensor([8.0, 0.0, 0.0, 4.0]).view(4, 1, 1)
        >>> never = torch.zeros(4, 1, 1, dtype=torch.bool)
        >>> fill_next(value, value > 0, never, gamma=0.5).flatten()
        tensor([8., 1., 2., 4.])
    """
    base = torch.where(known, next_value, 0.0)
    passes = ~(known | done)
    passes[..., -1, :, :] = False
    return _run_recursion(base, torch.where(passes, gamma, 0.0).to(base.dtype))


def q_lambda(
    reward: Tensor,
    next_value: Tensor,
    done: Tensor,
    terminated: Tensor,
    *,
    gamma: float | Tensor,
    lmbda: float | Tensor,
    mask: Tensor | None = None,
) -> Tensor:
    r"""Computes the lambda-returns of a rollout from the values of the greedy actions.

    .. math::
        G_t = r_t + \gamma (1 - \text{terminated}_t)
              \left[ \lambda G_{t+1} + (1 - \lambda) \max_a Q(s_{t+1}, a) \right]

    In the last step of an episode or a rollout the bracket is the greedy value alone. Masked steps
    are skipped as in :func:`~torchrl_marl.functional.gae`: their rewards are added, undiscounted,
    to the last step in which the agent acted. No reward is passed back to a step with ``done``, or
    beyond it.

    Args:
        reward (Tensor): reward of the step.
        next_value (Tensor): value of the greedy action in the state after the step.
        done (Tensor): bool, whether the trajectory of the team, or of the agent, ends.
        terminated (Tensor): bool, whether it ends without bootstrap.
        gamma (float): discount factor.
        lmbda (float): lambda of the returns.
        mask (Tensor, optional): bool, whether the agent acts in the step.

    Shapes:
        - reward, next_value, done, terminated: ``[*B, T, N, 1]``
        - mask: ``[*B, T, N]`` or ``[*B, T, N, 1]``
        - returns: ``[*B, T, N, 1]``, 0 where masked

    Raises:
        ValueError: shapes that differ, or flags that are not bool.

    Reference: Gallici et al., 2024, https://arxiv.org/abs/2407.04811 (PQN); Peng and Williams,
    1994.

    Reduces to: one-step Q-learning targets for ``lmbda=0``; the sum of discounted rewards for
    ``lmbda=1`` without truncation; the value target of :func:`~torchrl_marl.functional.gae` if
    each next value is the value of the next step.

    Examples:
        >>> reward, zero = torch.ones(1, 2, 1, 1), torch.zeros(1, 2, 1, 1, dtype=torch.bool)
        >>> value = torch.tensor([4.0, 8.0]).view(1, 2, 1, 1)
        >>> q_lambda(reward, value, zero, zero, gamma=0.5, lmbda=0.5).flatten()
        tensor([3.2500, 5.0000])
    """
    _check_inputs(
        "q_lambda", reward=reward, next_value=next_value, done=done, terminated=terminated
    )
    acts = torch.ones_like(done) if mask is None else fit_mask(mask, reward)
    ends, acts_next = _ends_and_next_acting(done, acts)
    # The value of a step without a greedy action, or after its episode, may be anything.
    bootstraps = (ends | acts_next) & ~terminated
    share = _where_numbers(ends, 1.0, 1.0 - lmbda, reward)
    base = reward + torch.where(bootstraps, gamma * share * next_value, 0.0)
    if mask is not None:
        after_end = torch.zeros_like(done)
        after_end[..., 1:, :, :] = done[..., :-1, :, :]
        base = torch.where(acts | ~after_end, base, 0.0)
    decay = torch.where(ends, 0.0, _where_numbers(acts_next, gamma * lmbda, 1.0, reward))
    returns = _run_recursion(base, decay)
    return torch.where(acts, returns, 0.0)
