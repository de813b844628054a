"""An LSTM over a sequence with resets of single agents, as one operation with a manual gradient.

Shapes: T steps, K networks, R rows of each, H units.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchrl_marl.modules.memory.products import apply_to_batched

__all__ = ["lstm", "lstm_loop"]


def lstm(
    gates: Tensor, state: Tensor, keep: Tensor, acts: Tensor, weight: Tensor, bias: Tensor
) -> Tensor:
    r"""Computes the states of long short-term memories after each step.

    .. math:: i, f, o = \sigma(x_{i,f,o} + W_{i,f,o} h + b_{i,f,o}), \quad
        g = \tanh(x_g + W_g h + b_g), \quad c' = f c + i g, \quad h' = o \tanh(c')

    Args:
        gates (Tensor): projected inputs :math:`x` of i, f, g and o, concatenated.
        state (Tensor): h and c before the first step, concatenated.
        keep (Tensor): 0 where the state is reset before a step, else 1.
        acts (Tensor): bool, False where a step keeps the state unchanged.
        weight, bias (Tensor): recurrent parameters, as in ``torch.nn.LSTMCell``.

    Shapes:
        - gates: ``[T, K, R, 4 * H]``; state: ``[K, R, 2 * H]``; keep, acts: ``[T, K, R, 1]``
        - weight: ``[K, 4 * H, H]``; bias: ``[K, 4 * H]``; returns ``[T, K, R, 2 * H]``

    Reference: Hochreiter and Schmidhuber, 1997, https://doi.org/10.1162/neco.1997.9.8.1735.

    Reduces to: ``torch.nn.LSTM`` without resets; :func:`lstm_loop`, its slow reference.

    Examples:
        >>> gates, state = torch.zeros(2, 1, 1, 4), torch.tensor([[[0.0, 1.0]]])
        >>> keep = torch.ones(2, 1, 1, 1)
        >>> lstm(gates, state, keep, keep.bool(), torch.zeros(1, 4, 1), torch.zeros(1, 4))[..., 1:]
        tensor([[[[0.5000]]],
        <BLANKLINE>
        <BLANKLINE>
                [[[0.2500]]]])
    """
    return _Sequence.apply(gates, state, keep, acts, weight, bias)[0]  # type: ignore[no-untyped-call]


def lstm_loop(
    gates: Tensor, state: Tensor, keep: Tensor, acts: Tensor, weight: Tensor, bias: Tensor
) -> Tensor:
    """Computes :func:`lstm` in a loop, with autograd's gradient."""
    states = []
    for x, kept, own in zip(gates, keep, acts):
        before = state * kept
        h, c = before.chunk(2, -1)
        i, f, g, o = (x + torch.baddbmm(bias.unsqueeze(1), h, weight.mT)).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        state = torch.where(own, torch.cat([h, c], -1), before)
        states.append(state)
    return torch.stack(states)


class _Sequence(torch.autograd.Function):
    @staticmethod
    def forward(gates, state, keep, acts, weight, bias):  # type: ignore[no-untyped-def]
        return tuple(_forward(gates, state, keep, acts, weight, bias))

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
        _, _, keep, acts, weight, _ = inputs
        _, *kept = output
        ctx.mark_non_differentiable(*kept)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(keep, acts, weight, *kept)

    @staticmethod
    def vmap(info, in_dims, *inputs):  # type: ignore[no-untyped-def]
        networks = (1, 0, 1, 1, 0, 0)
        return apply_to_batched(_Sequence, info.batch_size, in_dims, inputs, networks=networks)

    @staticmethod
    def backward(ctx, gradient, *_: Any):  # type: ignore[no-untyped-def]
        if gradient is None:
            return (None,) * 6
        keep, acts, weight, before, gates, cell = ctx.saved_tensors
        of_gates, of_state = _backward(
            gradient.contiguous(), keep, acts, before, gates, cell, weight
        )
        rows = of_gates.movedim(0, 1).flatten(1, 2)
        h = before[..., : weight.shape[-1]].movedim(0, 1).flatten(1, 2)
        return of_gates, of_state, None, None, torch.bmm(rows.mT, h), rows.sum(1)


@torch.library.custom_op("torchrl_marl::lstm", mutates_args=())
def _forward(
    gates: Tensor, state: Tensor, keep: Tensor, acts: Tensor, weight: Tensor, bias: Tensor
) -> list[Tensor]:
    """Returns states after and before each step, the gates and the squashed cells."""
    n_steps, k, rows, width = gates.shape
    size = width // 4
    after, before = (gates.new_empty(n_steps, k, rows, 2 * size) for _ in range(2))
    cell = gates.new_empty(n_steps, k, rows, size)
    gates = gates.clone(memory_format=torch.contiguous_format)
    hidden, transposed, offset = gates.new_empty(k, rows, width), weight.mT, bias.unsqueeze(1)
    for t in range(n_steps):
        h, c = torch.mul(state, keep[t], out=before[t]).split(size, -1)
        # Not rounded by autocast, which a graph of this operation would not do either.
        own = gates[t].add_(torch.baddbmm(offset, h, transposed, out=hidden))
        own[..., : 2 * size].sigmoid_()
        own[..., 2 * size : 3 * size].tanh_()
        own[..., 3 * size :].sigmoid_()
        i, f, g, o = own.split(size, -1)
        new = after[t, ..., size:].copy_(f * c).addcmul_(i, g)
        torch.tanh(new, out=cell[t])
        torch.mul(o, cell[t], out=after[t, ..., :size])
        state = after[t].copy_(torch.where(acts[t], after[t], before[t]))
    return [after, before, gates, cell]


@_forward.register_fake
def _(gates, state, keep, acts, weight, bias):  # type: ignore[no-untyped-def]
    n_steps, k, rows, width = gates.shape
    sizes = (width // 2, width // 2, width, width // 4)
    return [gates.new_empty(n_steps, k, rows, size) for size in sizes]


@torch.library.custom_op("torchrl_marl::lstm_backward", mutates_args=())
def _backward(
    gradient: Tensor,
    keep: Tensor,
    acts: Tensor,
    before: Tensor,
    gates: Tensor,
    cell: Tensor,
    weight: Tensor,
) -> list[Tensor]:
    """Returns the gradients of the gates and of the first state."""
    n_steps, _, _, width = gradient.shape
    size = width // 2
    i, f, g, o = gates.split(size, -1)
    # The part that does not depend on the gradient, for all steps at once.
    slopes = torch.cat(
        [(1 - i) * i * g, (1 - f) * f * before[..., size:], (1 - g * g) * i, (1 - o) * o * cell], -1
    )
    through = (1 - cell * cell) * o
    of_gates, of_state = torch.empty_like(gates), torch.zeros_like(gradient[0])
    for t in range(n_steps - 1, -1, -1):
        of_state.add_(gradient[t])
        taken = torch.where(acts[t], of_state, 0.0)
        of_h, of_c = taken.split(size, -1)
        of_c = torch.addcmul(of_c, of_h, through[t])
        torch.mul(torch.cat([of_c, of_c, of_c, of_h], -1), slopes[t], out=of_gates[t])
        of_state.sub_(taken)  # the part of steps that keep the state
        of_state[..., :size].baddbmm_(of_gates[t], weight)
        of_state[..., size:].addcmul_(of_c, f[t])
        of_state.mul_(keep[t])
    return [of_gates, of_state]


@_backward.register_fake
def _(gradient, keep, acts, before, gates, cell, weight):  # type: ignore[no-untyped-def]
    return [torch.empty_like(gates), torch.empty_like(gradient[0])]
