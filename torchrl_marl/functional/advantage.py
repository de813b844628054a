"""Generalized advantage estimation, V-trace, and their recursion over time.

Shapes: B any batch dims, T time, N agents. Tensors are ``[*B, T, N, 1]``, masks ``[*B, T, N]``.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from torchrl_marl.functional.statistics import fit_mask

__all__ = ["gae", "vtrace"]


def gae(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    done: Tensor,
    terminated: Tensor,
    *,
    gamma: float | Tensor,
    lmbda: float | Tensor,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Computes generalized advantage estimates (GAE) of agents that may die or wait.

    .. math::
        A_t = r_t + \gamma (1 - \text{terminated}_t) V(s_{t+1}) - V(s_t)
              + \gamma \lambda (1 - \text{done}_t) A_{t+1}

    With a mask, an agent skips the steps in which it does not act. The rewards of skipped steps are
    added, without discount, to the last step in which the agent acted, and that step bootstraps
    from the next step in which it acts. No reward is passed back to a step with ``done``, or beyond
    it. With the agents' flags, ``done`` stays True from an agent's death until the reset, so later
    rewards do not count for that agent. The last step bootstraps from its next value, even if the
    agent does not act next; :class:`~torchrl_marl.objectives.TeamGAE` leaves out such agents.

    Args:
        reward (Tensor): reward of the step.
        value (Tensor): value of the state before the step.
        next_value (Tensor): value of the state after the step.
        done (Tensor): bool, whether the trajectory ends. To bootstrap as a team, pass the flags of
            the root TensorDict, expanded over the agents; to bootstrap each agent separately, pass
            the agents' flags.
        terminated (Tensor): bool, whether the trajectory ends without bootstrap.
        gamma (float): discount factor.
        lmbda (float): lambda of the estimator.
        mask (Tensor, optional): bool, whether the agent acts in the step.

    Shapes:
        - reward, value, next_value, done, terminated: ``[*B, T, N, 1]``
        - mask: ``[*B, T, N]`` or ``[*B, T, N, 1]``
        - returns: advantage and value_target, each ``[*B, T, N, 1]``, 0 where masked

    Raises:
        ValueError: shapes that differ, or flags that are not bool.

    Reference: Schulman et al., 2016, https://arxiv.org/abs/1506.02438 (eq. 16).

    Reduces to: TorchRL's ``generalized_advantage_estimate`` without a mask; an all-true mask
    changes nothing.

    Examples:
        >>> reward = torch.ones(1, 2, 1, 1)
        >>> zero = torch.zeros(1, 2, 1, 1)
        >>> done = torch.tensor([False, True]).view(1, 2, 1, 1)
        >>> advantage, target = gae(reward, zero, zero, done, done, gamma=0.5, lmbda=1.0)
        >>> advantage.flatten()
        tensor([1.5000, 1.0000])
    """
    _check_inputs(
        "gae",
        reward=reward,
        value=value,
        next_value=next_value,
        done=done,
        terminated=terminated,
    )
    if mask is not None:
        mask = fit_mask(mask, reward)
    if reward.is_cuda and not isinstance(gamma, Tensor) and not isinstance(lmbda, Tensor):
        from torchrl_marl.functional import kernels  # imports Triton

        if kernels.has_gae(reward, value, next_value):
            return kernels.gae(reward, value, next_value, done, terminated, mask, gamma, lmbda)
    if mask is None:
        base, decay = _plain_recursion(reward, value, next_value, done, terminated, gamma, lmbda)
    else:
        value = _zero_where_false(value, mask)
        base, decay = _masked_recursion(
            reward, value, next_value, done, terminated, mask, gamma, lmbda
        )
    advantage = _run_recursion(base, decay)
    if mask is not None:
        advantage = _zero_where_false(advantage, mask, in_place=True)
    return advantage, advantage + value


def vtrace(
    log_ratio: Tensor,
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    done: Tensor,
    terminated: Tensor,
    *,
    gamma: float | Tensor,
    lmbda: float | Tensor,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
    mask: Tensor | None = None,
    weigh: bool = True,
) -> tuple[Tensor, Tensor]:
    r"""Computes value targets and advantages of a policy from the steps of another (V-trace).

    With the importance ratios :math:`w_t = \pi(a_t | o_t) / \mu(a_t | o_t)` of the policy to the
    acting one, :math:`\rho_t = \min(\bar\rho, w_t)` and :math:`c_t = \lambda \min(\bar c, w_t)`:

    .. math::
        \delta_t &= r_t + \gamma (1 - \text{terminated}_t) V(s_{t+1}) - V(s_t) \\
        v_t - V(s_t) &= \rho_t \delta_t
              + \gamma (1 - \text{done}_t) c_t (v_{t+1} - V(s_{t+1})) \\
        A_t &= \rho_t \big(\delta_t
              + \gamma \lambda (1 - \text{done}_t) (v_{t+1} - V(s_{t+1}))\big)

    Masked steps are skipped as in :func:`gae`; their ratios may be anything and do not count. The
    advantage has a factor :math:`\lambda`, as in ``gae``, which the paper's advantage lacks.

    Args:
        log_ratio (Tensor): logarithm of the ratio w, per agent or of the team.
        reward, value, next_value, done, terminated (Tensor): as in :func:`gae`.
        gamma (float): discount factor.
        lmbda (float): lambda of the estimator.
        rho_clip (float): limit of the ratio that multiplies an error; it determines the fixed
            point. With 1, the targets estimate the value of a policy between the acting one and the
            given one; with infinity, the value of the given policy, with more variance.
        c_clip (float): limit of the ratio that carries errors to earlier steps. It changes the
            speed of convergence, not the fixed point.
        mask (Tensor, optional): bool, whether the agent acts in the step.
        weigh (bool): whether the advantage is multiplied by rho, as a plain policy gradient needs.
            Pass False if the loss itself has the ratio, as the loss of PPO does.

    Shapes:
        - log_ratio, reward, value, next_value, done, terminated: ``[*B, T, N, 1]``
        - mask: ``[*B, T, N]`` or ``[*B, T, N, 1]``
        - returns: advantage and value_target, each ``[*B, T, N, 1]``, 0 where masked

    Raises:
        ValueError: shapes that differ, or flags that are not bool.

    Reference: Espeholt et al., 2018, https://arxiv.org/abs/1802.01561 (eq. 1, remarks 1 and 2, and
    section 4.2).

    Reduces to: :func:`gae` if all ratios are 1 (on-policy steps) and both clips at least 1. For
    ``lmbda=1`` without a mask it is TorchRL's ``vtrace_advantage_estimate``, where ``log_pi`` is
    the policy and ``log_mu`` the acting one; TorchRL's docstring swaps them.

    Examples:
        >>> reward = torch.ones(1, 2, 1, 1)
        >>> zero = torch.zeros(1, 2, 1, 1)
        >>> done = torch.tensor([False, True]).view(1, 2, 1, 1)
        >>> half = torch.full_like(zero, 0.5).log()
        >>> advantage, target = vtrace(half, reward, zero, zero, done, done, gamma=0.5, lmbda=1.0)
        >>> advantage.flatten(), target.flatten()
        (tensor([0.6250, 0.5000]), tensor([0.6250, 0.5000]))
    """
    _check_inputs(
        "vtrace",
        reward=reward,
        log_ratio=log_ratio,
        value=value,
        next_value=next_value,
        done=done,
        terminated=terminated,
    )
    log_ratio = log_ratio.to(value.dtype)  # float64 if the environment's bounds are
    acts = None if mask is None else fit_mask(mask, reward)
    # Of one transition, which ends at the next step in which the agent acts.
    signals = reward, value, next_value, done, terminated
    delta, _ = gae(*signals, gamma=gamma, lmbda=0.0, mask=acts)
    if acts is None:
        decay = _where_numbers(done, 0.0, gamma * lmbda, reward)
    else:
        log_ratio, value = _zero_where_false(log_ratio, acts), _zero_where_false(value, acts)
        decay = _decay(done, acts, gamma, lmbda, reward)
    ratio = log_ratio.exp()
    rho, trace = ratio.clamp(max=rho_clip), ratio.clamp(max=c_clip)
    if acts is not None:
        trace = torch.where(acts, trace, 1.0)  # a waiting step passes on its next value
    correction = _run_recursion(rho * delta, decay * trace)
    following = torch.zeros_like(correction)
    following[..., :-1, :, :] = correction[..., 1:, :, :]
    advantage = delta + decay * following
    if weigh:
        advantage = rho * advantage
    if acts is not None:
        advantage, correction = (
            _zero_where_false(advantage, acts),
            _zero_where_false(correction, acts),
        )
    return advantage, correction + value


# The recursion is x_t = base_t + decay_t * x_{t+1}. On a CPU its cost is memory traffic, so new
# tensors are changed in place.
def _plain_recursion(reward, value, next_value, done, terminated, gamma, lmbda):
    base = _zero_where_false(next_value, ~terminated).mul_(gamma).add_(reward).sub_(value)
    return base, _where_numbers(done, 0.0, gamma * lmbda, reward)


def _masked_recursion(reward, value, next_value, done, terminated, mask, gamma, lmbda):
    # In a step in which the agent acts, x is the advantage. In a masked step it is the return that
    # the last step in which the agent acted must still add.
    ends, acts_next = _ends_and_next_acting(done, mask)
    after_end = torch.zeros_like(done)
    after_end[..., 1:, :, :] = done[..., :-1, :, :]
    base = _zero_where_false(next_value, (ends | acts_next) & ~terminated)
    base = base.mul_(gamma).add_(reward).sub_(value)
    # An agent's dead steps may hold any value; no earlier step reads them.
    base = _zero_where_false(base, mask | ~after_end, in_place=True)
    return base, _decay(done, mask, gamma, lmbda, reward)


def _decay(done, mask, gamma, lmbda, like):
    """Returns the factor of the next step: 1 if the agent does not act in it; 0 at an end."""
    ends, acts_next = _ends_and_next_acting(done, mask)
    decay = _where_numbers(acts_next, gamma * lmbda, 1.0, like)
    return _zero_where_false(decay, ~ends, in_place=True)


def _ends_and_next_acting(done, mask):
    ends = done.clone()
    ends[..., -1, :, :] = True
    acts_next = torch.ones_like(mask)
    acts_next[..., :-1, :, :] = mask[..., 1:, :, :]
    return ends, acts_next


def _run_recursion(base: Tensor, decay: Tensor) -> Tensor:
    rows, decays = list(base.unbind(-3)), decay.unbind(-3)
    differentiable = torch.is_grad_enabled() and base.requires_grad
    for t in range(len(rows) - 2, -1, -1):
        if differentiable:
            rows[t] = torch.addcmul(rows[t], decays[t], rows[t + 1])
        else:
            rows[t].addcmul_(decays[t], rows[t + 1])
    return torch.stack(rows, -3) if differentiable else base


# On a CPU, bitwise operations are ten times faster than torch.where.
_INTEGER_DTYPES = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _zero_where_false(value: Tensor, mask: Tensor, in_place: bool = False) -> Tensor:
    """Returns the value where the mask is True, 0 elsewhere; with ``in_place``, in its memory."""
    if value.is_cuda or (torch.is_grad_enabled() and value.requires_grad):
        return torch.where(mask, value, 0.0)
    integer = _INTEGER_DTYPES[value.element_size()]
    bits, mask_bits = value.view(integer), mask.to(integer).neg_()
    # The mask's memory can hold the result, unless the value's can.
    mask_bits = bits.bitwise_and_(mask_bits) if in_place else mask_bits.bitwise_and_(bits)
    return mask_bits.view(value.dtype)


def _where_numbers(
    mask: Tensor, if_true: float | Tensor, if_false: float | Tensor, like: Tensor
) -> Tensor:
    """Selects one of two numbers, in another tensor's dtype."""
    if mask.is_cuda or isinstance(if_true, Tensor) or isinstance(if_false, Tensor):
        return torch.where(mask, if_true, if_false).to(like.dtype)
    integer = _INTEGER_DTYPES[like.element_size()]
    true_bits, false_bits = _bits_of_numbers(if_true, if_false, like.dtype)
    bits = mask.to(integer).neg_().bitwise_and_(true_bits ^ false_bits).bitwise_xor_(false_bits)
    return bits.view(like.dtype)


@functools.cache
def _bits_of_numbers(if_true: float, if_false: float, dtype: torch.dtype) -> list[int]:
    return (
        torch.tensor([if_true, if_false], dtype=dtype)
        .view(_INTEGER_DTYPES[dtype.itemsize])
        .tolist()
    )


def _check_inputs(function: str, **tensors: Tensor) -> None:
    shapes = {name: x.shape for name, x in tensors.items()}
    first = tensors["reward"].shape
    if len(set(shapes.values())) > 1 or len(first) < 3 or first[-1] != 1:
        found = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
        raise ValueError(
            f"{function}: expected {_NUMERALS[len(shapes)]} tensors of one shape [*B, T, N, 1], "
            f"found {found}; expand a team's tensors over its agents."
        )
    for name in ("done", "terminated"):
        if tensors[name].dtype is not torch.bool:
            raise ValueError(
                f"{function}: {name} is {tensors[name].dtype}, expected torch.bool; call .bool()."
            )


_NUMERALS = {4: "four", 5: "five", 6: "six"}
