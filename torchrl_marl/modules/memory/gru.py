"""A GRU over a sequence with resets of single agents, as one operation with a manual gradient.

The graph has two nodes for any length of the sequence, so compiling 100 steps takes as long as
compiling 16. The operation has only the recurrent part. Inputs are projected before it, in one
matrix product over all steps. After it, each weight's gradient is one product over all steps.

Shapes: T steps, K networks, R rows of each, H units.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["gru", "gru_loop"]

# Steps of the gradient that are prepared at once: few enough for a CPU's cache. On 160 rows of 128
# units, 2 to 16 are equally fast, and all steps at once take 1.6 times as long.
_CHUNK = 8


def gru(
    gates: Tensor, state: Tensor, keep: Tensor, acts: Tensor | None, weight: Tensor, bias: Tensor
) -> Tensor:
    r"""Computes the states of gated recurrent units after each step.

    .. math:: r, z = \sigma(x_{r,z} + W_{r,z} h + b_{r,z}), \quad
        n = \tanh(x_n + r (W_n h + b_n)), \quad h' = (1 - z) n + z h

    Args:
        gates (Tensor): projected inputs :math:`x` of r, z and n, concatenated.
        state (Tensor): state before the first step.
        keep (Tensor): 0 where the state is reset before a step, else 1.
        acts (Tensor, optional): bool, False where a step keeps the state unchanged: there z is 1.
            None: True everywhere.
        weight, bias (Tensor): recurrent parameters, as in ``torch.nn.GRUCell``.

    Shapes:
        - gates: ``[T, K, R, 3 * H]``; state: ``[K, R, H]``; keep, acts: ``[T, K, R, 1]``
        - weight: ``[K, 3 * H, H]``; bias: ``[K, 3 * H]``; returns ``[T, K, R, H]``

    Reference: Cho et al., 2014, https://arxiv.org/abs/1406.1078.

    Reduces to: ``torch.nn.GRU`` without resets; :func:`gru_loop`, its slow reference.

    Examples:
        >>> gates, state = torch.zeros(5, 1, 2, 9), torch.ones(1, 2, 3)
        >>> keep = torch.ones(5, 1, 2, 1)
        >>> gru(gates, state, keep, None, torch.zeros(1, 9, 3), torch.zeros(1, 9))[:, 0, 0, 0]
        tensor([0.5000, 0.2500, 0.1250, 0.0625, 0.0312])
    """
    return _Sequence.apply(gates, state, keep, acts, weight, bias)[0]  # type: ignore[no-untyped-call]


def gru_loop(
    gates: Tensor, state: Tensor, keep: Tensor, acts: Tensor | None, weight: Tensor, bias: Tensor
) -> Tensor:
    """Computes :func:`gru` in a loop, with autograd's gradient."""
    states = []
    for t, x in enumerate(gates):
        before = state * keep[t]
        reset, update, new = x.chunk(3, -1)
        hidden = torch.baddbmm(bias.unsqueeze(1), before, weight.mT).chunk(3, -1)
        reset, update = torch.sigmoid(reset + hidden[0]), torch.sigmoid(update + hidden[1])
        update = update if acts is None else torch.where(acts[t], update, 1.0)
        state = torch.lerp(torch.tanh(new + reset * hidden[2]), before, update)
        states.append(state)
    return torch.stack(states)


class _Sequence(torch.autograd.Function):
    @staticmethod
    def forward(gates, state, keep, acts, weight, bias):  # type: ignore[no-untyped-def]
        return tuple(_forward(gates, state, keep, acts, weight, bias))

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
        _, _, keep, _, weight, _ = inputs
        _, *kept = output
        ctx.mark_non_differentiable(*kept)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(keep, weight, *kept)

    @staticmethod
    def backward(ctx, gradient, *_: Any):  # type: ignore[no-untyped-def]
        if gradient is None:
            return (None,) * 6
        keep, weight, before, gates, new = ctx.saved_tensors
        of_gates, of_new, of_state = _backward(
            gradient.contiguous(), keep, before, gates, new, weight
        )
        of_both = of_gates[..., : -of_new.shape[-1]]
        rows = [x.movedim(0, 1).flatten(1, 2) for x in (of_both, of_new)]
        inputs = before.movedim(0, 1).flatten(1, 2)
        of_weight = torch.cat([torch.bmm(x.mT, inputs) for x in rows], 1)
        of_bias = torch.cat([x.sum(1) for x in rows], -1)
        return of_gates, of_state, None, None, of_weight, of_bias


@torch.library.custom_op("torchrl_marl::gru", mutates_args=())
def _forward(
    gates: Tensor,
    state: Tensor,
    keep: Tensor,
    acts: Tensor | None,
    weight: Tensor,
    bias: Tensor,
) -> list[Tensor]:
    """Returns states after and before each step, gates, and the candidates' recurrent parts."""
    n_steps, k, rows, width = gates.shape
    size = width // 3
    after, before, new = (gates.new_empty(n_steps, k, rows, size) for _ in range(3))
    own = torch.empty_like(gates, memory_format=torch.contiguous_format)
    hidden, transposed, offset = gates.new_empty(k, rows, width), weight.mT, bias.unsqueeze(1)
    idle = None if acts is None else ~acts
    for t in range(n_steps):
        h = torch.mul(state, keep[t], out=before[t])
        if k == 1:
            torch.addmm(offset[0], h[0], transposed[0], out=hidden[0])
        else:
            torch.baddbmm(offset, h, transposed, out=hidden)
        both, x = own[t, ..., : 2 * size], gates[t]
        torch.add(x[..., : 2 * size], hidden[..., : 2 * size], out=both).sigmoid_()
        reset, update = both.split(size, -1)
        if idle is not None:
            update.masked_fill_(idle[t], 1.0)
        new[t].copy_(hidden[..., 2 * size :])
        candidate = own[t, ..., 2 * size :]
        torch.addcmul(x[..., 2 * size :], reset, new[t], out=candidate).tanh_()
        state = torch.lerp(candidate, h, update, out=after[t])
    return [after, before, own, new]


@_forward.register_fake
def _(gates, state, keep, acts, weight, bias):  # type: ignore[no-untyped-def]
    n_steps, k, rows, width = gates.shape
    sizes = (width // 3, width // 3, width, width // 3)
    return [gates.new_empty(n_steps, k, rows, size) for size in sizes]


@torch.library.custom_op("torchrl_marl::gru_backward", mutates_args=())
def _backward(
    gradient: Tensor, keep: Tensor, before: Tensor, gates: Tensor, new: Tensor, weight: Tensor
) -> list[Tensor]:
    """Returns the gradients of the gates, the candidates' recurrent parts, and the first state."""
    n_steps, k, _, size = gradient.shape
    of_gates, of_new = torch.empty_like(gates), torch.empty_like(new)
    of_state = torch.zeros_like(gradient[0])
    of_both = of_gates[..., : 2 * size]
    weight_both, weight_new = weight[:, : 2 * size], weight[:, 2 * size :]
    for t in reversed(range(n_steps)):
        if t == n_steps - 1 or t % _CHUNK == _CHUNK - 1:
            chunk = slice(t - t % _CHUNK, t + 1)
            factors = _factors(before[chunk], gates[chunk], new[chunk])
        reset, update, by_reset, by_update, by_candidate = (x[t % _CHUNK] for x in factors)
        of_reset, of_update, of_candidate = of_gates[t].split(size, -1)
        of_state.add_(gradient[t])
        torch.mul(of_state, by_candidate, out=of_candidate)
        torch.mul(of_state, by_update, out=of_update)
        torch.mul(of_candidate, by_reset, out=of_reset)
        torch.mul(of_candidate, reset, out=of_new[t])
        of_state.mul_(update)
        if k == 1:
            of_state[0].addmm_(of_both[t, 0], weight_both[0]).addmm_(of_new[t, 0], weight_new[0])
        else:
            of_state.baddbmm_(of_both[t], weight_both).baddbmm_(of_new[t], weight_new)
        of_state.mul_(keep[t])
    return [of_gates, of_new, of_state]


def _factors(before: Tensor, gates: Tensor, new: Tensor) -> list[Tensor]:
    """Returns r, z, and derivatives: of n by r, and of the state by z and n, before activation."""
    reset, update, candidate = gates.chunk(3, -1)
    rest = 1 - update
    by_reset = (1 - reset).mul_(reset).mul_(new)
    by_update = (before - candidate).mul_(update).mul_(rest)
    by_candidate = (1 - candidate * candidate).mul_(rest)
    return [reset, update, by_reset, by_update, by_candidate]


@_backward.register_fake
def _(gradient, keep, before, gates, new, weight):  # type: ignore[no-untyped-def]
    return [torch.empty_like(x) for x in (gates, new, gradient[0])]
