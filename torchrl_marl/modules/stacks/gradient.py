"""Batched layers of stacked perceptrons, with a gradient written by hand.

Shapes: K distinct members, M rows of each, I input and O output features.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Layer", "Pads", "run_layers"]

aten = torch.ops.aten
# Bytes. Without a limit, 64 agents and a batch of 1024 were 0.6 times as fast as a loop over
# them on a busy machine; 1 and 2 MiB are alike, 8 too much.
CACHE = 2**20
Pads = tuple[Tensor | None, ...]


@dataclasses.dataclass(frozen=True)
class _Gradient:
    """How an activation runs in the hand-written gradient.

    Args:
        forward (callable): (settings, z) -> y; may write into z where ``of_output``.
        backward (callable): (settings, gradient, y or z) -> gradient.
        of_output (bool): the gradient follows from y, so that z need not be kept.
    """

    forward: Callable[[Any, Tensor], Tensor]
    backward: Callable[[Any, Tensor, Tensor], Tensor]
    of_output: bool = True


_GRADIENTS: dict[type, _Gradient] = {
    nn.Tanh: _Gradient(lambda m, z: z.tanh_(), lambda m, g, y: aten.tanh_backward.default(g, y)),
    nn.ReLU: _Gradient(
        lambda m, z: z.relu_(), lambda m, g, y: aten.threshold_backward.default(g, y, 0)
    ),
    nn.Sigmoid: _Gradient(
        lambda m, z: z.sigmoid_(), lambda m, g, y: aten.sigmoid_backward.default(g, y)
    ),
    nn.ELU: _Gradient(
        lambda m, z: F.elu_(z, m.alpha),
        lambda m, g, y: aten.elu_backward.default(g, m.alpha, 1, 1, True, y),
    ),
    nn.LeakyReLU: _Gradient(
        lambda m, z: F.leaky_relu_(z, m.negative_slope),
        lambda m, g, y: aten.leaky_relu_backward.default(g, y, m.negative_slope, True),
    ),
    nn.SiLU: _Gradient(
        lambda m, z: F.silu(z), lambda m, g, z: aten.silu_backward.default(g, z), False
    ),
    nn.Mish: _Gradient(
        lambda m, z: F.mish(z), lambda m, g, z: aten.mish_backward.default(g, z), False
    ),
    nn.GELU: _Gradient(
        lambda m, z: F.gelu(z, approximate=m.approximate),
        lambda m, g, z: aten.gelu_backward.default(g, z, approximate=m.approximate),
        False,
    ),
    nn.Softplus: _Gradient(
        lambda m, z: F.softplus(z, m.beta, m.threshold),
        lambda m, g, z: aten.softplus_backward.default(g, z, m.beta, m.threshold),
        False,
    ),
}


@dataclasses.dataclass(frozen=True)
class Layer:
    """A linear map and the activations behind it.

    Args:
        weight (str): name of its weight.
        bias (str, optional): name of its bias.
        activations (tuple): modules without parameters.
    """

    weight: str
    bias: str | None
    activations: tuple[nn.Module, ...] = ()

    def gradient(self) -> _Gradient | None:
        """Returns the activation's hand-written gradient."""
        return _GRADIENTS[type(self.activations[0])] if self.activations else None

    def has_gradient(self) -> bool:
        """Returns whether the activations behind have a hand-written gradient."""
        if not self.activations:
            return True
        first = self.activations[0]
        # With such a parameter, y does not tell on which side of 0 z was.
        two_sided = getattr(first, "alpha", 1.0) > 0 and getattr(first, "negative_slope", 1.0) > 0
        return len(self.activations) == 1 and type(first) in _GRADIENTS and two_sided


def run_layers(
    layers: Sequence[Layer], pads: Pads, x: Tensor, tensors: Sequence[Tensor | None]
) -> Tensor:
    """Runs stacked layers, ``[K, M, I] -> [K, M, O]``.

    Args:
        layers (sequence of Layer): the steps.
        pads (tuple): ``[K, 1, F]`` or None, where the input of each layer and the output of the
            last are padding.
        x (Tensor): the input.
        tensors (sequence of Tensor or None): weight ``[K, O, I]``, bias ``[K, O]``, weight, ...
    """
    if _wants_plain(x) or not all(layer.has_gradient() for layer in layers):
        return _plain(layers, pads, x, tensors)
    at_once = _members_in_cache(x, tensors)
    if at_once >= x.shape[0]:
        return _Layers.apply(layers, pads, x, *tensors)
    split = [(None,) * x.shape[0] if t is None else t.split(at_once) for t in (*pads, *tensors)]
    parts = [
        _Layers.apply(layers, own[: len(pads)], rows, *own[len(pads) :])
        for rows, own in zip(x.split(at_once), zip(*split))
    ]
    return torch.cat(parts)


def _members_in_cache(x: Tensor, tensors: Sequence[Tensor | None]) -> int:
    """Returns how many members to run at once on a CPU, for a layer's output to fit the cache."""
    if x.device.type != "cpu":
        return x.shape[0]
    widest = max(weight.shape[1] for weight in tensors[::2] if weight is not None)
    each = max(1, CACHE // max(1, x.shape[1] * widest * x.element_size()))
    return each * torch.get_num_threads()


def _wants_plain(x: Tensor) -> bool:
    """Returns whether a compiler, function transform or autocast needs plain operations."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch.is_autocast_enabled(x.device.type)
        or torch.autograd.forward_ad._current_level >= 0
    )


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return torch.bmm(x, weight.mT)
    return torch.baddbmm(bias.unsqueeze(1), x, weight.mT)


def _plain(
    layers: Sequence[Layer], pads: Pads, x: Tensor, tensors: Sequence[Tensor | None]
) -> Tensor:
    x = x if pads[0] is None else x.masked_fill(pads[0], 0.0)
    for layer, pad, weight, bias in zip(layers, pads[1:], tensors[::2], tensors[1::2]):
        assert weight is not None
        x = _linear(x, weight, bias)
        for activation in layer.activations:
            x = activation(x)
        x = x if pad is None else x.masked_fill(pad, 0.0)
    return x


class _Layers(torch.autograd.Function):
    """Stacked layers with a gradient written by hand.

    Autograd's own gives the weights' gradient transposed and copies it; it also makes more
    operations. At 16 agents and a batch of 8 this is 1.4 times faster.
    """

    @staticmethod
    def forward(ctx, layers, pads, x, *tensors):  # type: ignore[no-untyped-def]
        h = x if pads[0] is None else x.masked_fill(pads[0], 0.0)
        kept = []
        for layer, pad, weight, bias in zip(layers, pads[1:], tensors[::2], tensors[1::2]):
            z, gradient = _linear(h, weight, bias), layer.gradient()
            y = z if gradient is None else gradient.forward(layer.activations[0], z)
            y = y if pad is None else y.masked_fill_(pad, 0.0)
            kept += [h, h if gradient is None else y if gradient.of_output else z]
            h = y
        ctx.layers, ctx.pads = layers, pads
        ctx.save_for_backward(x, *tensors, *kept)
        return h

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        n = len(ctx.layers)
        x, *saved = ctx.saved_tensors
        tensors, kept = saved[: 2 * n], saved[2 * n :]
        needs = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():  # a gradient of the gradient is asked for
            return None, None, *_differentiable(ctx, needs, x, tensors, g)
        gradients: list[Tensor | None] = []
        for i in reversed(range(n)):
            layer, pad, gradient = ctx.layers[i], ctx.pads[i + 1], ctx.layers[i].gradient()
            g = g if pad is None else g.masked_fill(pad, 0.0)
            if gradient is not None:
                g = gradient.backward(layer.activations[0], g, kept[2 * i + 1])
            gradients.append(g.sum(1) if needs[2 * i + 2] else None)
            gradients.append(torch.bmm(g.mT, kept[2 * i]) if needs[2 * i + 1] else None)
            if not any(needs[: 2 * i + 1]):
                break
            g = torch.bmm(g, tensors[2 * i])
        else:
            g = g if ctx.pads[0] is None else g.masked_fill(ctx.pads[0], 0.0)
            return None, None, g, *reversed(gradients)
        gradients += [None] * (2 * n - len(gradients))
        return None, None, None, *reversed(gradients)


def _differentiable(ctx, needs, x, tensors, g):  # type: ignore[no-untyped-def]
    """Returns the same gradient by autograd, which can be differentiated further."""
    wanted = [t for t, need in zip((x, *tensors), needs) if need]
    y = _plain(ctx.layers, ctx.pads, x, tensors)
    found = iter(torch.autograd.grad(y, wanted, g, create_graph=True))
    return [next(found) if need else None for need in needs]
