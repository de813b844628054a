"""Hand-written GPU kernels, each with a reference in :mod:`torchrl_marl.functional`.

A kernel is a torch operator (``torch.ops.torchrl_marl``), so graphs record it as one node. Without
Triton there are no kernels, and the reference functions run on the GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

__all__ = ["gae", "has_gae"]

# Rows per program. One warp, since there are few rows and many multiprocessors.
_BLOCK = 32


def has_gae(*tensors: Tensor) -> bool:
    """Returns whether :func:`gae` can replace :func:`torchrl_marl.functional.gae`.

    Args:
        *tensors (Tensor): reward, value and next value.

    Returns:
        bool: True if Triton is installed, and all tensors are float32 on a GPU and need no
            gradient.

    Examples:
        >>> has_gae(torch.zeros(2, 3, 1))
        False
    """
    return (
        triton is not None
        and all(x.is_cuda and x.dtype is torch.float32 for x in tensors)
        and not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))
    )


@torch.library.custom_op("torchrl_marl::gae", mutates_args=())
def gae(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    done: Tensor,
    terminated: Tensor,
    mask: Tensor | None,
    gamma: float,
    lmbda: float,
) -> tuple[Tensor, Tensor]:
    """Computes :func:`torchrl_marl.functional.gae` in one launch; each env and agent has a thread.

    Shapes:
        - all tensors and the results: ``[*B, T, N, 1]``, of any strides
    """
    shape = reward.shape
    n_steps, n_agents = shape[-3], shape[-2]
    advantage, target = (torch.empty(shape, device=reward.device) for _ in range(2))
    if reward.numel() == 0:
        return advantage, target
    flags = [x.view(torch.uint8) for x in (done, terminated, done if mask is None else mask)]
    rows = [x.reshape(-1, n_steps, n_agents) for x in (reward, value, next_value, *flags)]
    n_rows = rows[0].shape[0] * n_agents
    with torch.cuda.device_of(reward):
        _gae_kernel[(triton.cdiv(n_rows, _BLOCK),)](
            advantage,
            target,
            *rows,
            *(stride for x in rows for stride in x.stride()),
            gamma,
            gamma * lmbda,
            n_rows,
            n_steps,
            n_agents,
            MASKED=mask is not None,
            BLOCK=_BLOCK,
            num_warps=1,
        )
    return advantage, target


@gae.register_fake
def _(reward, value, next_value, done, terminated, mask, gamma, lmbda):
    return tuple(torch.empty(reward.shape, device=reward.device) for _ in range(2))


# The formulas are those of advantage._masked_recursion; without a mask, agents act in every step.
# Strides of a tensor x: x_b over envs, x_t over time, x_n over agents.
def _gae_rows(
    advantage,
    target,
    reward,
    value,
    next_value,
    done,
    terminated,
    mask,
    reward_b,
    reward_t,
    reward_n,
    value_b,
    value_t,
    value_n,
    next_b,
    next_t,
    next_n,
    done_b,
    done_t,
    done_n,
    terminated_b,
    terminated_t,
    terminated_n,
    mask_b,
    mask_t,
    mask_n,
    gamma,
    decay,
    n_rows,
    n_steps,
    n_agents,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < n_rows
    b, n = row // n_agents, row % n_agents
    t = tl.zeros([BLOCK], tl.int64) + (n_steps - 1)
    following = tl.zeros([BLOCK], tl.float32)
    acts_next = inside
    done_now = tl.load(done + b * done_b + t * done_t + n * done_n, inside, other=0) != 0
    for _ in range(n_steps):
        r = tl.load(reward + b * reward_b + t * reward_t + n * reward_n, inside, other=0.0)
        v = tl.load(value + b * value_b + t * value_t + n * value_n, inside, other=0.0)
        v_next = tl.load(next_value + b * next_b + t * next_t + n * next_n, inside, other=0.0)
        address = terminated + b * terminated_b + t * terminated_t + n * terminated_n
        continues = tl.load(address, inside, other=0) == 0
        address = done + b * done_b + (t - 1) * done_t + n * done_n
        done_before = tl.load(address, inside & (t > 0), other=0) != 0
        if MASKED:
            acts = tl.load(mask + b * mask_b + t * mask_t + n * mask_n, inside, other=0) != 0
        else:
            acts = inside
        v = tl.where(acts, v, 0.0)
        base = tl.where((done_now | acts_next) & continues, v_next, 0.0) * gamma + r - v
        base = tl.where(acts | (done_before == 0), base, 0.0)
        factor = tl.where(done_now, 0.0, tl.where(acts_next, decay, 1.0))
        following = base + factor * following
        out = tl.where(acts, following, 0.0)
        result_index = (b * n_steps + t) * n_agents + n
        tl.store(advantage + result_index, out, inside)
        tl.store(target + result_index, out + v, inside)
        acts_next = acts
        done_now = done_before
        t -= 1


_gae_kernel: Any = None if triton is None else triton.jit(_gae_rows)
