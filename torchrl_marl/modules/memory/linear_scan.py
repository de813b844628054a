"""A linear recurrence over a sequence, as one operation with a manual gradient.

Shapes: T steps, R any dims of rows, S size of a state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["linear_scan", "linear_scan_loop"]


def linear_scan(decay: Tensor, turn: Tensor | None, entered: Tensor, state: Tensor) -> Tensor:
    r"""Computes :math:`h_t = a_t h_{t-1} + b_t`, with real or complex factors.

    Args:
        decay (Tensor): :math:`a`, or its real part.
        turn (Tensor, optional): imaginary part of :math:`a`. The first half of a state is then
            its real part, the second half its imaginary part.
        entered (Tensor): :math:`b`.
        state (Tensor): state before the first step.

    Shapes:
        - entered: ``[T, *R, S]``; state: ``[*R, S]``; returns ``[T, *R, S]``
        - decay: ``[T, *R, S]``; with ``turn``, decay and turn are ``[T, *R, S / 2]``

    Reduces to: :func:`linear_scan_loop`, its slow reference.

    Examples:
        >>> linear_scan(torch.full((3, 1), 0.5), None, torch.ones(3, 1), torch.zeros(1)).flatten()
        tensor([1.0000, 1.5000, 1.7500])
    """
    turn = decay.new_empty(0) if turn is None else turn
    return _Sequence.apply(decay, turn, entered, state)  # type: ignore[no-untyped-call]


def linear_scan_loop(decay: Tensor, turn: Tensor | None, entered: Tensor, state: Tensor) -> Tensor:
    """Computes :func:`linear_scan` in a loop, with autograd's gradient."""
    states = []
    for t, b in enumerate(entered):
        if turn is None:
            state = decay[t] * state + b
        else:
            p, q = state.chunk(2, -1)
            state = b + torch.cat([decay[t] * p - turn[t] * q, turn[t] * p + decay[t] * q], -1)
        states.append(state)
    return torch.stack(states)


class _Sequence(torch.autograd.Function):
    @staticmethod
    def forward(decay, turn, entered, state):  # type: ignore[no-untyped-def]
        return _forward(decay, turn, entered, state)

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
        decay, turn, _, state = inputs
        ctx.save_for_backward(decay, turn, state, output)

    @staticmethod
    def backward(ctx, gradient: Any):  # type: ignore[no-untyped-def]
        decay, turn, state, states = ctx.saved_tensors
        of_entered, of_state = _backward(gradient.contiguous(), decay, turn)
        before = torch.cat([state.unsqueeze(0), states[:-1]])
        if not turn.numel():
            return of_entered * before, None, of_entered, of_state
        (p, q), (g, k) = before.chunk(2, -1), of_entered.chunk(2, -1)
        return g * p + k * q, k * p - g * q, of_entered, of_state


@torch.library.custom_op("torchrl_marl::linear_scan", mutates_args=())
def _forward(decay: Tensor, turn: Tensor, entered: Tensor, state: Tensor) -> Tensor:
    states = entered.clone(memory_format=torch.contiguous_format)
    half = entered.shape[-1] // 2
    for t in range(len(entered)):
        after = states[t]
        if not turn.numel():
            after.addcmul_(decay[t], state)
        else:
            (p, q), (p_after, q_after) = state.split(half, -1), after.split(half, -1)
            p_after.addcmul_(decay[t], p).addcmul_(turn[t], q, value=-1)
            q_after.addcmul_(turn[t], p).addcmul_(decay[t], q)
        state = after
    return states


@_forward.register_fake
def _(decay, turn, entered, state):  # type: ignore[no-untyped-def]
    return torch.empty_like(entered, memory_format=torch.contiguous_format)


@torch.library.custom_op("torchrl_marl::linear_scan_backward", mutates_args=())
def _backward(gradient: Tensor, decay: Tensor, turn: Tensor) -> list[Tensor]:
    """Returns the gradients of the inputs :math:`b` of each step, and of the first state."""
    of_entered = gradient.clone()
    half = gradient.shape[-1] // 2
    for t in range(len(gradient) - 1, -1, -1):
        now = of_entered[t]
        before = of_entered[t - 1] if t else torch.zeros_like(now)
        if not turn.numel():
            before.addcmul_(decay[t], now)
        else:
            (g, k), (g_before, k_before) = now.split(half, -1), before.split(half, -1)
            g_before.addcmul_(decay[t], g).addcmul_(turn[t], k)
            k_before.addcmul_(decay[t], k).addcmul_(turn[t], g, value=-1)
    return [of_entered, before]


@_backward.register_fake
def _(gradient, decay, turn):  # type: ignore[no-untyped-def]
    return [torch.empty_like(gradient), torch.empty_like(gradient[0])]
