"""Pure tensor maths: masked statistics and generalized advantage estimation.

Shapes: B any batch dims, T time, N agents. Tensors are ``[*B, T, N, 1]``, masks ``[*B, T, N]``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "expand_mask",
    "fit_mask",
    "gae",
    "masked_mean",
    "masked_moments",
    "masked_standardize",
]


def expand_mask(mask: Tensor, value: Tensor) -> Tensor:
    """Adds trailing dims to a mask, so that it broadcasts to a value.

    Examples:
        >>> expand_mask(torch.ones(4, 3, dtype=torch.bool), torch.zeros(4, 3, 2, 5)).shape
        torch.Size([4, 3, 1, 1])
    """
    return mask.reshape(mask.shape + (1,) * (value.ndim - mask.ndim))


def fit_mask(mask: Tensor, value: Tensor) -> Tensor:
    """Expands a mask to a value's shape, checked dim by dim.

    Raises:
        ValueError: a mask that is not bool or does not fit the value.
    """
    if mask.dtype is not torch.bool:
        raise ValueError(f"a mask is {mask.dtype}, expected torch.bool; call .bool().")
    shape = mask.shape
    if mask.shape != value.shape:
        mask = expand_mask(mask, value)
    fits = mask.ndim == value.ndim and all(
        m == v or (m == 1 and i >= len(shape))
        for i, (m, v) in enumerate(zip(mask.shape, value.shape))
    )
    if not fits:
        raise ValueError(
            f"a mask of shape {tuple(shape)} does not fit a value of shape {tuple(value.shape)}; "
            "expected the value's shape with or without its trailing dims."
        )
    return mask.expand_as(value)


def masked_mean(
    value: Tensor, mask: Tensor | None = None, dim: int | Sequence[int] | None = None
) -> Tensor:
    """Averages the elements whose mask is True; 0 where there are none.

    Args:
        value (Tensor): what to average; may hold anything, NaN included, where masked.
        mask (Tensor, optional): bool; of the value's shape, or without its trailing dims.
        dim (int or sequence of int, optional): dims of ``value`` to reduce; all by default.

    Shapes:
        - value: ``[*B, T, N, 1]`` (any shape)
        - mask: ``[*B, T, N]`` or ``[*B, T, N, 1]``

    Raises:
        ValueError: a mask that is not bool or does not fit the value.

    Examples:
        >>> masked_mean(torch.tensor([1.0, float("nan"), 3.0]), torch.tensor([True, False, True]))
        tensor(2.)
    """
    dims = _dims(value, dim)
    if mask is None:
        return value.mean(dims) if dims else value
    mask = fit_mask(mask, value)
    total = torch.where(mask, value, 0.0).sum(dims)
    return total / mask.sum(dims).clamp_min(1)


def masked_moments(
    value: Tensor,
    mask: Tensor | None = None,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns mean and (population) variance of the elements whose mask is True.

    Args:
        value, mask, dim: as in :func:`masked_mean`.
        keepdim (bool): keep the reduced dims.

    Shapes:
        - returns: mean and variance, each of the remaining dims

    Raises:
        ValueError: a mask that is not bool or does not fit the value.

    Examples:
        >>> mean, variance = masked_moments(torch.tensor([1.0, 3.0, 99.0]),
        ...                                 torch.tensor([True, True, False]))
        >>> mean.item(), variance.item()
        (2.0, 1.0)
    """
    dims = _dims(value, dim)
    mask = torch.ones_like(value, dtype=torch.bool) if mask is None else fit_mask(mask, value)
    count = mask.sum(dims, keepdim=True).clamp_min(1)
    mean = torch.where(mask, value, 0.0).sum(dims, keepdim=True) / count
    variance = torch.where(mask, value - mean, 0.0).square().sum(dims, keepdim=True) / count
    if keepdim:
        return mean, variance
    return mean.squeeze(dims), variance.squeeze(dims)


def masked_standardize(
    value: Tensor,
    mask: Tensor | None = None,
    dim: int | Sequence[int] | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Standardizes the elements whose mask is True; 0 where masked.

    Args:
        value, mask, dim: as in :func:`masked_mean`. Reducing every dim pools the agents, as
            the MAPPO authors do; leaving out -2 standardizes each agent by itself.
        eps (float): added to the standard deviation.

    Shapes:
        - returns: the value's shape

    Raises:
        ValueError: a mask that is not bool or does not fit the value.

    Reference: Yu et al., 2022, https://arxiv.org/abs/2103.01955 (advantage normalization).

    Reduces to: an all-true mask gives the result without a mask.

    Examples:
        >>> masked_standardize(torch.tensor([1.0, 3.0, 99.0]), torch.tensor([True, True, False]))
        tensor([-1.0000,  1.0000,  0.0000])
    """
    mean, variance = masked_moments(value, mask, dim, keepdim=True)
    centered = value - mean
    if mask is not None:
        centered = torch.where(fit_mask(mask, value), centered, 0.0)
    return centered / (variance.sqrt() + eps)


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
    _check_gae_inputs(reward, value, next_value, done, terminated)
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


def _check_gae_inputs(reward, value, next_value, done, terminated) -> None:
    shapes = {
        "reward": reward.shape,
        "value": value.shape,
        "next_value": next_value.shape,
        "done": done.shape,
        "terminated": terminated.shape,
    }
    if len(set(shapes.values())) > 1 or reward.ndim < 3 or reward.shape[-1] != 1:
        found = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
        raise ValueError(
            f"gae: expected five tensors of one shape [*B, T, N, 1], found {found}; "
            "expand a team's tensors over its agents."
        )
    for name, flag in (("done", done), ("terminated", terminated)):
        if flag.dtype is not torch.bool:
            raise ValueError(f"gae: {name} is {flag.dtype}, expected torch.bool; call .bool().")


def _dims(value: Tensor, dim: int | Sequence[int] | None) -> tuple[int, ...]:
    if dim is None:
        return tuple(range(value.ndim))
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    return tuple(d % value.ndim for d in dims)
