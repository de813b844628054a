"""A GRU over a sequence with resets of single agents, as one operation with a manual gradient.

The graph has two nodes for any length of the sequence, so compiling 100 steps takes as long as
compiling 16. The operation projects its inputs a few steps at a time, and sums the gradients of its
weights likewise. What is read again soon then stays in a CPU's cache.

Shapes: T steps, K networks, R rows of each, F input features, H units.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchrl_marl.modules.memory.products import (
    add_gradient,
    add_product,
    apply_to_batched,
    project,
)

__all__ = ["gru", "gru_loop"]

aten = torch.ops.aten

# Steps that are prepared at once: few enough for a CPU's cache.
_STEPS_PER_CHUNK = 8


def gru(
    x: Tensor,
    state: Tensor,
    keep: Tensor,
    acts: Tensor | None,
    weight_ih: Tensor,
    bias_ih: Tensor,
    weight_hh: Tensor,
    bias_hh: Tensor,
) -> Tensor:
    r"""Computes the states of gated recurrent units after each step.

    .. math:: r, z = \sigma(V_{r,z} x + c_{r,z} + W_{r,z} h + b_{r,z}), \quad
        n = \tanh(V_n x + c_n + r (W_n h + b_n)), \quad h' = (1 - z) n + z h

    Args:
        x (Tensor): inputs.
        state (Tensor): state before the first step.
        keep (Tensor): 0 where the state is reset before a step, else 1.
        acts (Tensor, optional): bool, False where a step keeps the state unchanged: there z is 1.
            None: True everywhere.
        weight_ih, bias_ih (Tensor): parameters V and c of r, z and n, as in ``torch.nn.GRUCell``.
        weight_hh, bias_hh (Tensor): recurrent parameters W and b.

    Shapes:
        - x: ``[T, K, R, F]``; state: ``[K, R, H]``; keep, acts: ``[T, K, R, 1]``
        - weight_ih: ``[K, 3 * H, F]``; weight_hh: ``[K, 3 * H, H]``; biases: ``[K, 3 * H]``
        - returns: ``[T, K, R, H]``

    Reference: Cho et al., 2014, https://arxiv.org/abs/1406.1078. As in ``torch.nn.GRU``, r
    multiplies the recurrent product; in the paper it multiplies the state.

    Reduces to: ``torch.nn.GRU`` without resets; :func:`gru_loop`, its slow reference.

    Examples:
        >>> x, state, keep = torch.zeros(5, 1, 2, 4), torch.ones(1, 2, 3), torch.ones(5, 1, 2, 1)
        >>> bias = torch.zeros(1, 9)
        >>> weights = torch.zeros(1, 9, 4), bias, torch.zeros(1, 9, 3), bias
        >>> gru(x, state, keep, None, *weights)[:, 0, 0, 0]
        tensor([0.5000, 0.2500, 0.1250, 0.0625, 0.0312])
    """
    weights = weight_ih, bias_ih, weight_hh, bias_hh
    return _Sequence.apply(x, state, keep, acts, *weights)[0]  # type: ignore[no-untyped-call]


def gru_loop(
    x: Tensor, state: Tensor, keep: Tensor, acts: Tensor | None, *weights: Tensor
) -> Tensor:
    """Computes :func:`gru` in a loop, with autograd's gradient."""
    weight_ih, bias_ih, weight_hh, bias_hh = weights
    states = []
    for t, gates in enumerate(project(x, weight_ih, bias_ih).to(x.dtype)):
        before = state * keep[t]
        reset, update, new = gates.chunk(3, -1)
        hidden = torch.baddbmm(bias_hh.unsqueeze(1), before, weight_hh.mT).chunk(3, -1)
        reset, update = torch.sigmoid(reset + hidden[0]), torch.sigmoid(update + hidden[1])
        update = update if acts is None else torch.where(acts[t], update, 1.0)
        state = torch.lerp(torch.tanh(new + reset * hidden[2]), before, update)
        states.append(state)
    return torch.stack(states)


class _Sequence(torch.autograd.Function):
    @staticmethod
    def forward(x, state, keep, acts, *weights):  # type: ignore[no-untyped-def]
        return tuple(_forward(x, state, keep, acts, *weights))

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
        _, *kept = output
        ctx.mark_non_differentiable(*kept)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, *kept)

    @staticmethod
    def vmap(info, in_dims, *inputs):  # type: ignore[no-untyped-def]
        networks = (1, 0, 1, 1, 0, 0, 0, 0)
        return apply_to_batched(_Sequence, info.batch_size, in_dims, inputs, networks=networks)

    @staticmethod
    def backward(ctx, gradient, *_: Any):  # type: ignore[no-untyped-def]
        if gradient is None:
            return (None,) * 8
        inputs, kept = ctx.saved_tensors[:8], ctx.saved_tensors[8:]
        if torch.is_grad_enabled():  # the gradient will itself be differentiated
            of_x, of_state, *of_weights = _gradient_of_loop(gradient, *inputs)
            return of_x, of_state, None, None, *of_weights
        x, _, keep, _, weight_ih, _, weight_hh, _ = inputs
        needs_x = ctx.needs_input_grad[0]
        of_x, of_state, *of_weights = _backward(
            gradient.contiguous(), x, keep, weight_ih, weight_hh, *kept, needs_x
        )
        return of_x if needs_x else None, of_state, None, None, *of_weights


def _gradient_of_loop(
    gradient: Tensor, x: Tensor, state: Tensor, keep: Tensor, acts: Tensor | None, *weights: Tensor
) -> tuple[Tensor, ...]:
    def loop(x: Tensor, state: Tensor, *weights: Tensor) -> Tensor:
        return gru_loop(x, state, keep, acts, *weights)

    _, *pull_back = torch.func.vjp(loop, x, state, *weights)
    return pull_back[0](gradient)


@torch.library.custom_op("torchrl_marl::gru", mutates_args=())
def _forward(
    x: Tensor,
    state: Tensor,
    keep: Tensor,
    acts: Tensor | None,
    weight_ih: Tensor,
    bias_ih: Tensor,
    weight_hh: Tensor,
    bias_hh: Tensor,
) -> list[Tensor]:
    """Returns states after and before each step, gates, and the candidates' recurrent parts."""
    (n_steps, k, rows, _), size = x.shape, state.shape[-1]
    after, before, new = (x.new_empty(n_steps, k, rows, size) for _ in range(3))
    gates = x.new_empty(n_steps, k, rows, 3 * size)
    # r and z have one sum of biases. The recurrent bias of n is within the product with r.
    bias_both, bias_new = bias_hh.split([2 * size, size], -1)
    bias_ih = (bias_ih + F.pad(bias_both, (0, size))).unsqueeze(1)
    weight_both, weight_new = weight_hh.split([2 * size, size], 1)
    bias_new, idle = bias_new.unsqueeze(1), None if acts is None else ~acts
    for t in range(n_steps):
        if t % _STEPS_PER_CHUNK == 0:
            chunk = slice(t, t + _STEPS_PER_CHUNK)
            add_product(bias_ih, x[chunk], weight_ih, out=gates[chunk])
        h = torch.mul(state, keep[t], out=before[t])
        both, candidate = gates[t].split([2 * size, size], -1)
        add_product(both, h, weight_both, out=both)
        reset, update = both.sigmoid_().split(size, -1)
        if idle is not None:
            update.masked_fill_(idle[t], 1.0)
        add_product(bias_new, h, weight_new, out=new[t])
        candidate.addcmul_(reset, new[t]).tanh_()
        state = torch.lerp(candidate, h, update, out=after[t])
    return [after, before, gates, new]


@_forward.register_fake
def _(x, state, keep, acts, weight_ih, bias_ih, weight_hh, bias_hh):  # type: ignore[no-untyped-def]
    size = state.shape[-1]
    return [x.new_empty(*x.shape[:-1], width) for width in (size, size, 3 * size, size)]


@torch.library.custom_op("torchrl_marl::gru_backward", mutates_args=())
def _backward(
    gradient: Tensor,
    x: Tensor,
    keep: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    before: Tensor,
    gates: Tensor,
    new: Tensor,
    needs_x: bool,
) -> list[Tensor]:
    """Returns the gradients of the inputs (or nothing), the first state, weights and biases."""
    n_steps, _, _, size = gradient.shape
    of_x, of_state = x.new_empty(x.shape if needs_x else 0), torch.zeros_like(gradient[0])
    of_ih, of_hh = (x.new_zeros(x.shape) for x in (weight_ih, weight_hh))
    of_bias, of_bias_new = (x.new_zeros(len(of_hh), n * size) for n in (3, 1))
    for first in reversed(range(0, n_steps, _STEPS_PER_CHUNK)):
        chunk = slice(first, first + _STEPS_PER_CHUNK)
        factors = _gates_and_derivatives(before[chunk], gates[chunk], new[chunk])
        of_gates, of_new = _backward_over_chunk(
            gradient[chunk], of_state, keep[chunk], factors, weight_hh
        )
        add_gradient(of_ih, of_gates, x[chunk])
        add_gradient(of_hh[:, : 2 * size], of_gates[..., : 2 * size], before[chunk])
        add_gradient(of_hh[:, 2 * size :], of_new, before[chunk])
        of_bias.add_(of_gates.sum((0, 2)))
        of_bias_new.add_(of_new.sum((0, 2)))
        if needs_x:
            add_product(None, of_gates, weight_ih.mT, out=of_x[chunk])
    of_bias_hh = torch.cat([of_bias[:, : 2 * size], of_bias_new], -1)
    return [of_x, of_state, of_ih, of_bias, of_hh, of_bias_hh]


def _backward_over_chunk(
    gradient: Tensor, of_state: Tensor, keep: Tensor, factors: list[Tensor], weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns gradients of the gates and the candidates' recurrent parts; updates the state's."""
    *shape, size = gradient.shape
    of_gates, of_new = gradient.new_empty(*shape, 3 * size), torch.empty_like(gradient)
    weight_both, weight_new = (x.mT for x in weight.split([2 * size, size], 1))
    for t in reversed(range(len(gradient))):
        reset, update, by_reset, by_update, by_candidate = (x[t] for x in factors)
        of_reset, of_update, of_candidate = of_gates[t].split(size, -1)
        of_state.add_(gradient[t])
        torch.mul(of_state, by_candidate, out=of_candidate)
        torch.mul(of_state, by_update, out=of_update)
        torch.mul(of_candidate, by_reset, out=of_reset)
        torch.mul(of_candidate, reset, out=of_new[t])
        of_state.mul_(update)
        add_product(of_state, of_gates[t, ..., : 2 * size], weight_both, out=of_state)
        add_product(of_state, of_new[t], weight_new, out=of_state)
        of_state.mul_(keep[t])
    return of_gates, of_new


def _gates_and_derivatives(before: Tensor, gates: Tensor, new: Tensor) -> list[Tensor]:
    """Returns r, z, and derivatives: of n by r, and of the state by z and n, before activation."""
    reset, update, candidate = gates.chunk(3, -1)
    by_reset = aten.sigmoid_backward(new, reset)
    by_update = aten.sigmoid_backward(before - candidate, update)
    by_candidate = aten.tanh_backward(1 - update, candidate)
    return [reset, update, by_reset, by_update, by_candidate]


@_backward.register_fake
def _(gradient, x, keep, weight_ih, weight_hh, before, gates, new, needs_x):  # type: ignore[no-untyped-def]
    of_x, bias = x.shape if needs_x else (0,), weight_hh.shape[:2]
    shapes = of_x, gradient[0].shape, weight_ih.shape, bias, weight_hh.shape, bias
    return [x.new_empty(shape) for shape in shapes]
