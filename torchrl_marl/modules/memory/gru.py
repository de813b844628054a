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


def gru(gates: Tensor, state: Tensor, keep: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    r"""Computes the states of gated recurrent units after each step.

    .. math:: r, z = \sigma(x_{r,z} + W_{r,z} h + b_{r,z}), \quad
        n = \tanh(x_n + r (W_n h + b_n)), \quad h' = (1 - z) n + z h

    Args:
        gates (Tensor): projected inputs :math:`x` of r, z and n, concatenated; an infinite
            :math:`x_z` keeps the state unchanged.
        state (Tensor): state before the first step.
        keep (Tensor): 0 where the state is reset before a step, else 1.
        weight, bias (Tensor): recurrent parameters, as in ``torch.nn.GRUCell``.

    Shapes:
        - gates: ``[T, K, R, 3 * H]``; state: ``[K, R, H]``; keep: ``[T, K, R, 1]``
        - weight: ``[K, 3 * H, H]``; bias: ``[K, 3 * H]``; returns ``[T, K, R, H]``

    Reference: Cho et al., 2014, https://arxiv.org/abs/1406.1078.

    Reduces to: ``torch.nn.GRU`` without resets; :func:`gru_loop`, its slow reference.

    Examples:
        >>> gates, state = torch.zeros(5, 1, 2, 9), torch.ones(1, 2, 3)
        >>> keep = torch.ones(5, 1, 2, 1)
        >>> gru(gates, state, keep, torch.zeros(1, 9, 3), torch.zeros(1, 9))[:, 0, 0, 0]
        tensor([0.5000, 0.2500, 0.1250, 0.0625, 0.0312])
    """
    return _Sequence.apply(gates, state, keep, weight, bias)[0]  # type: ignore[no-untyped-call]


def gru_loop(gates: Tensor, state: Tensor, keep: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Computes :func:`gru` in a loop, with autograd's gradient."""
    states = []
    for x, kept in zip(gates, keep):
        before = state * kept
        reset, update, new = x.chunk(3, -1)
        hidden = torch.baddbmm(bias.unsqueeze(1), before, weight.mT).chunk(3, -1)
        reset, update = torch.sigmoid(reset + hidden[0]), torch.sigmoid(update + hidden[1])
        state = torch.lerp(torch.tanh(new + reset * hidden[2]), before, update)
        states.append(state)
    return torch.stack(states)


class _Sequence(torch.autograd.Function):
    @staticmethod
    def forward(gates, state, keep, weight, bias):  # type: ignore[no-untyped-def]
        return tuple(_forward(gates, state, keep, weight, bias))

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
        _, _, keep, weight, _ = inputs
        _, *kept = output
        ctx.mark_non_differentiable(*kept)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(keep, weight, *kept)

    @staticmethod
    def backward(ctx, gradient, *_: Any):  # type: ignore[no-untyped-def]
        if gradient is None:
            return (None,) * 5
        keep, weight, before, gates, new = ctx.saved_tensors
        of_gates, of_hidden, of_state = _backward(
            gradient.contiguous(), keep, before, gates, new, weight
        )
        rows = of_hidden.movedim(0, 1).flatten(1, 2)
        of_weight = torch.bmm(rows.mT, before.movedim(0, 1).flatten(1, 2))
        return of_gates, of_state, None, of_weight, rows.sum(1)


@torch.library.custom_op("torchrl_marl::gru", mutates_args=())
def _forward(
    gates: Tensor, state: Tensor, keep: Tensor, weight: Tensor, bias: Tensor
) -> list[Tensor]:
    """Returns states after and before each step, gates, and the candidates' recurrent parts."""
    n_steps, k, rows, width = gates.shape
    size = width // 3
    after, before, new = (gates.new_empty(n_steps, k, rows, size) for _ in range(3))
    gates = gates.clone(memory_format=torch.contiguous_format)
    hidden, transposed, offset = gates.new_empty(k, rows, width), weight.mT, bias.unsqueeze(1)
    for t in range(n_steps):
        h = torch.mul(state, keep[t], out=before[t])
        if k == 1:
            torch.addmm(offset[0], h[0], transposed[0], out=hidden[0])
        else:
            torch.baddbmm(offset, h, transposed, out=hidden)
        both = gates[t, ..., : 2 * size].add_(hidden[..., : 2 * size]).sigmoid_()
        new[t].copy_(hidden[..., 2 * size :])
        candidate = gates[t, ..., 2 * size :].addcmul_(both[..., :size], new[t]).tanh_()
        state = torch.lerp(candidate, h, both[..., size:], out=after[t])
    return [after, before, gates, new]


@_forward.register_fake
def _(gates, state, keep, weight, bias):  # type: ignore[no-untyped-def]
    n_steps, k, rows, width = gates.shape
    sizes = (width // 3, width // 3, width, width // 3)
    return [gates.new_empty(n_steps, k, rows, size) for size in sizes]


@torch.library.custom_op("torchrl_marl::gru_backward", mutates_args=())
def _backward(
    gradient: Tensor, keep: Tensor, before: Tensor, gates: Tensor, new: Tensor, weight: Tensor
) -> list[Tensor]:
    """Returns the gradients of the gates, of the hidden projections, and of the first state."""
    n_steps, k, _, size = gradient.shape
    reset, update, candidate = gates.split(size, -1)
    # The part that does not depend on the gradient, for all steps at once.
    rest = 1 - update
    by_new = (1 - candidate * candidate).mul_(rest)
    by_update = (before - candidate).mul_(update).mul_(rest)
    by_reset = (1 - reset).mul_(reset).mul_(new)
    of_gates, of_hidden = torch.empty_like(gates), torch.empty_like(gates)
    of_state = torch.zeros_like(gradient[0])
    for t in range(n_steps - 1, -1, -1):
        of_state.add_(gradient[t])
        own = of_gates[t].split(size, -1)
        torch.mul(of_state, by_new[t], out=own[2])
        torch.mul(of_state, by_update[t], out=own[1])
        torch.mul(own[2], by_reset[t], out=own[0])
        of_hidden[t, ..., : 2 * size] = of_gates[t, ..., : 2 * size]
        torch.mul(own[2], reset[t], out=of_hidden[t, ..., 2 * size :])
        of_state.mul_(update[t])
        if k == 1:
            of_state[0].addmm_(of_hidden[t, 0], weight[0])
        else:
            of_state.baddbmm_(of_hidden[t], weight)
        of_state.mul_(keep[t])
    return [of_gates, of_hidden, of_state]


@_backward.register_fake
def _(gradient, keep, before, gates, new, weight):  # type: ignore[no-untyped-def]
    return [torch.empty_like(gates), torch.empty_like(gates), torch.empty_like(gradient[0])]
