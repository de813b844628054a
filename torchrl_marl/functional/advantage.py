"""Generalized advantage estimation, and the recursion over time that returns share.

Shapes: B any batch dims, T time, N agents. Tensors are ``[*B, T, N, 1]``, masks ``[*B, T, N]``.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from torchrl_marl.functional.statistics import fit_mask

__all__ = ["gae"]


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
    r"""Computes generalized advantage estimates for teams whose agents may die or wait.

    .. math::
        A_t = r_t + \gamma (1 - \text{terminated}_t) V(s_{t+1}) - V(s_t)
              + \gamma \lambda (1 - \text{done}_t) A_{t+1}

    With a mask, steps in which an agent does not act are transparent to it: their reward goes
    to its last own step, they are not discounted, and that step bootstraps from the agent's
    next own step. What follows an agent's end (``done`` stays True until the reset) reaches no
    step before it. The last step bootstraps from its next value, whoever acts then;
    :class:`~torchrl_marl.objectives.TeamGAE` leaves out whose turn that is not.

    Args:
        reward (Tensor): reward of the step.
        value (Tensor): value of the state in which the step was taken.
        next_value (Tensor): value of the state to which it led.
        done (Tensor): bool, the trajectory ends here. Pass the root's flags, expanded over the
            agents, to bootstrap as a team, or the agents' own to bootstrap each by itself.
        terminated (Tensor): bool, nothing follows: no bootstrap.
        gamma (float): discount.
        lmbda (float): weight of longer returns.
        mask (Tensor, optional): bool, the agent acts in this step.

    Shapes:
        - reward, value, next_value, done, terminated: ``[*B, T, N, 1]``
        - mask: ``[*B, T, N]`` or ``[*B, T, N, 1]``
        - returns: advantage and value_target, each ``[*B, T, N, 1]``, 0 where masked

    Raises:
        ValueError: shapes that differ, or flags that are not bool.

    Reference: Schulman et al., 2016, https://arxiv.org/abs/1506.02438 (eq. 16).

    Reduces to: an all-true mask gives the result without a mask; without one it is TorchRL's
    ``generalized_advantage_estimate``.

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
        from torchrl_marl import kernels  # imports Triton

        if kernels.has_gae(reward, value, next_value):
            return kernels.gae(reward, value, next_value, done, terminated, mask, gamma, lmbda)
    if mask is None:
        base, decay = _plain_recursion(reward, value, next_value, done, terminated, gamma, lmbda)
    else:
        value = _keep(value, mask)
        base, decay = _masked_recursion(
            reward, value, next_value, done, terminated, mask, gamma, lmbda
        )
    advantage = _accumulate(base, decay)
    if mask is not None:
        advantage = _keep(advantage, mask, fresh=True)
    return advantage, advantage + value


# The recursion is x_t = base_t + decay_t * x_{t+1}. On a CPU memory is its cost, so new
# tensors are changed in place.
def _plain_recursion(reward, value, next_value, done, terminated, gamma, lmbda):
    base = _keep(next_value, ~terminated).mul_(gamma).add_(reward).sub_(value)
    return base, _choose(done, 0.0, gamma * lmbda, reward)


def _masked_recursion(reward, value, next_value, done, terminated, mask, gamma, lmbda):
    # On an agent's own step x is the advantage; on a masked one, the return that the next
    # own step to the left still has to add.
    ends = done.clone()
    ends[..., -1, :, :] = True
    acts_next = torch.ones_like(mask)
    acts_next[..., :-1, :, :] = mask[..., 1:, :, :]
    after_end = torch.zeros_like(done)
    after_end[..., 1:, :, :] = done[..., :-1, :, :]
    base = _keep(next_value, (ends | acts_next) & ~terminated)
    base = base.mul_(gamma).add_(reward).sub_(value)
    # An agent's dead steps may hold any value; no earlier step reads them.
    base = _keep(base, mask | ~after_end, fresh=True)
    decay = _choose(acts_next, gamma * lmbda, 1.0, reward)
    return base, _keep(decay, ~ends, fresh=True)


def _accumulate(base: Tensor, decay: Tensor) -> Tensor:
    rows, decays = list(base.unbind(-3)), decay.unbind(-3)
    differentiable = torch.is_grad_enabled() and base.requires_grad
    for t in range(len(rows) - 2, -1, -1):
        if differentiable:
            rows[t] = torch.addcmul(rows[t], decays[t], rows[t + 1])
        else:
            rows[t].addcmul_(decays[t], rows[t + 1])
    return torch.stack(rows, -3) if differentiable else base


# On a CPU, bitwise operations are ten times faster than torch.where.
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _keep(value: Tensor, mask: Tensor, fresh: bool = False) -> Tensor:
    """Returns the value where the mask is True, 0 elsewhere; ``fresh``: in place."""
    if value.is_cuda or (torch.is_grad_enabled() and value.requires_grad):
        return torch.where(mask, value, 0.0)
    word = _WORDS[value.element_size()]
    bits, kept = value.view(word), mask.to(word).neg_()
    # The mask's memory may hold the result, unless the value's may.
    kept = bits.bitwise_and_(kept) if fresh else kept.bitwise_and_(bits)
    return kept.view(value.dtype)


def _choose(mask: Tensor, yes: float | Tensor, no: float | Tensor, like: Tensor) -> Tensor:
    """Selects one of two numbers, in another tensor's dtype."""
    if mask.is_cuda or isinstance(yes, Tensor) or isinstance(no, Tensor):
        return torch.where(mask, yes, no).to(like.dtype)
    word = _WORDS[like.element_size()]
    first, second = _as_words(yes, no, like.dtype)
    bits = mask.to(word).neg_().bitwise_and_(first ^ second).bitwise_xor_(second)
    return bits.view(like.dtype)


@functools.cache
def _as_words(yes: float, no: float, dtype: torch.dtype) -> list[int]:
    return torch.tensor([yes, no], dtype=dtype).view(_WORDS[dtype.itemsize]).tolist()


def _check_inputs(function: str, **tensors: Tensor) -> None:
    shapes = {name: x.shape for name, x in tensors.items()}
    first = tensors["reward"].shape
    if len(set(shapes.values())) > 1 or len(first) < 3 or first[-1] != 1:
        found = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
        raise ValueError(
            f"{function}: expected {_NUMBERS[len(shapes)]} tensors of one shape [*B, T, N, 1], "
            f"found {found}; expand a team's tensors over its agents."
        )
    for name in ("done", "terminated"):
        if tensors[name].dtype is not torch.bool:
            raise ValueError(
                f"{function}: {name} is {tensors[name].dtype}, expected torch.bool; call .bool()."
            )


_NUMBERS = {4: "four", 5: "five"}
