"""Batched matmul for stacked perceptrons and GRU cells.

Shapes: B any batch dims, K distinct members, n copies of each, A = K * n agents, M rows,
I input and O output features.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrl.modules import MLP

from torchrl_marl.modules.stacks.gradient import Layer, Pads, run_layers

__all__ = ["Executor", "GatedCell", "Perceptron"]

ELEMENTWISE = (
    nn.CELU,
    nn.ELU,
    nn.GELU,
    nn.Hardsigmoid,
    nn.Hardswish,
    nn.Hardtanh,
    nn.LeakyReLU,
    nn.LogSigmoid,
    nn.Mish,
    nn.ReLU,
    nn.ReLU6,
    nn.SELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Softplus,
    nn.Softsign,
    nn.Tanh,
)


class Executor:
    """A structure that runs as batched matmuls."""

    def run(
        self,
        values: Mapping[str, Tensor],
        stacked: Mapping[str, bool],
        pads: Pads | None,
        shape: tuple[int, int],
        dim: int,
        inputs: Sequence[Any],
    ) -> Any:
        """Runs K members with n copies each.

        Args:
            values (mapping): name -> parameter ``[K, ...]``, or unstacked.
            stacked (mapping): name -> whether it is stacked.
            pads (tuple, optional): where features are padding.
            shape (tuple): (K, n).
            dim (int): agent dim of the inputs and of the output.
            inputs (sequence): tensors with A agents at ``dim``.
        """
        raise NotImplementedError


class Perceptron(Executor):
    """Linear maps and elementwise activations in a row.

    Args:
        leading (tuple): activations before the first linear map.
        layers (tuple of Layer): the rest.
    """

    def __init__(self, leading: tuple[nn.Module, ...], layers: tuple[Layer, ...]) -> None:
        self.leading = leading
        self.layers = layers

    @staticmethod
    def plan(module: nn.Module) -> Perceptron | None:
        """Returns how a module runs; None where it is no perceptron."""
        steps = _steps(module, "")
        if steps is None:
            return None
        leading: list[nn.Module] = []
        layers: list[Layer] = []
        names: dict[int, str] = {}
        for place, step in steps:
            name = names.setdefault(id(step), place)
            if isinstance(step, nn.Linear):
                prefix = f"{name}." if name else ""
                bias = None if step.bias is None else f"{prefix}bias"
                layers.append(Layer(f"{prefix}weight", bias))
            elif layers:
                activations = (*layers[-1].activations, step)
                layers[-1] = dataclasses.replace(layers[-1], activations=activations)
            else:
                leading.append(step)
        return Perceptron(tuple(leading), tuple(layers)) if layers else None

    def signature(self) -> Hashable:
        """Returns what perceptrons of one call have in common: all but the widths."""
        return (
            tuple(map(repr, self.leading)),
            tuple((x.weight, x.bias, tuple(map(repr, x.activations))) for x in self.layers),
        )

    def width(self, shapes: Mapping[str, torch.Size], output: bool) -> int:
        """Returns input or output features of a member with these shapes."""
        return shapes[self.layers[-1].weight][0] if output else shapes[self.layers[0].weight][1]

    def pads(self, shapes: Sequence[Mapping[str, torch.Size]], device: torch.device) -> Pads:
        """Returns ``[K, 1, F]``, True at padding, before each layer and at the end; or None."""
        widths = [[s[layer.weight][1] for s in shapes] for layer in self.layers]
        widths.append([s[self.layers[-1].weight][0] for s in shapes])
        return tuple(_pad(w, device) for w in widths)

    def run(
        self,
        values: Mapping[str, Tensor],
        stacked: Mapping[str, bool],
        pads: Pads | None,
        shape: tuple[int, int],
        dim: int,
        inputs: Sequence[Any],
    ) -> Tensor:
        x = inputs[0] if len(inputs) == 1 else torch.cat(list(inputs), -1)
        for activation in self.leading:
            x = activation(x)
        pads = (None,) * (len(self.layers) + 1) if pads is None else pads
        one = shape[0] == 1
        first = 0
        # One set of parameters for all rows: no reason to touch the agent dim.
        for layer in self.layers:
            if not one and any(stacked[n] for n in (layer.weight, layer.bias) if n is not None):
                break
            weight = _only(values[layer.weight], stacked[layer.weight])
            bias = None if layer.bias is None else _only(values[layer.bias], stacked[layer.bias])
            x = F.linear(_blank(x, pads[first], one), weight, bias)
            for activation in layer.activations:
                x = activation(x)
            first += 1
        if first == len(self.layers):
            return _blank(x, pads[first], one)
        tensors = _expanded(self.layers[first:], values, stacked, shape[0])
        y = run_layers(self.layers[first:], pads[first:], _fold(x, shape, dim), tensors)
        return _unfold(y, x, dim)


class GatedCell(Executor):
    """``nn.GRUCell``: two batched matmuls and the gates."""

    @staticmethod
    def plan(module: nn.Module) -> GatedCell | None:
        """Returns how a module runs; None where it is no GRU cell."""
        return GatedCell() if type(module) is nn.GRUCell else None

    def run(
        self,
        values: Mapping[str, Tensor],
        stacked: Mapping[str, bool],
        pads: Pads | None,
        shape: tuple[int, int],
        dim: int,
        inputs: Sequence[Any],
    ) -> Tensor:
        x, hidden = inputs if len(inputs) == 2 else (inputs[0], None)
        if hidden is None:
            hidden = x.new_zeros(*x.shape[:-1], values["weight_hh"].shape[-1])
        parts = []
        for name, h in (("ih", x), ("hh", hidden)):
            bias = f"bias_{name}" if f"bias_{name}" in values else None
            linear = Perceptron((), (Layer(f"weight_{name}", bias),))
            parts.append(linear.run(values, stacked, None, shape, dim, (h,)).chunk(3, -1))
        (reset, update, new), (reset_h, update_h, new_h) = parts
        reset, update = torch.sigmoid(reset + reset_h), torch.sigmoid(update + update_h)
        new = torch.tanh(new + reset * new_h)
        return new + update * (hidden - new)


def _steps(module: nn.Module, name: str) -> list[tuple[str, nn.Module]] | None:
    """Returns linear maps and activations in order; None where something else is between."""
    if type(module) is nn.Identity:
        return []
    if type(module) is nn.Linear or type(module) in ELEMENTWISE or _is_plain_norm(module):
        return [(name, module)]
    if type(module) is not nn.Sequential and not (
        type(module) is MLP and isinstance(module.out_features, int)
    ):
        return None
    steps = []
    # Not named_children: it leaves out a module that comes twice.
    for child, part in module._modules.items():
        assert part is not None
        inner = _steps(part, f"{name}.{child}" if name else child)
        if inner is None:
            return None
        steps += inner
    return steps


def _is_plain_norm(module: nn.Module) -> bool:
    """Whether it standardizes features by themselves; their number is in its ``repr``."""
    return type(module) is nn.LayerNorm and not module.elementwise_affine


def _pad(widths: Sequence[int], device: torch.device) -> Tensor | None:
    if min(widths) == max(widths):
        return None
    own = torch.tensor(widths, device=device)[:, None, None]
    return torch.arange(max(widths), device=device) >= own


def _only(value: Tensor, stacked: bool) -> Tensor:
    # Not value[0]: its gradient is a copy into zeros, that of a squeeze a view.
    return value.squeeze(0) if stacked else value


def _blank(x: Tensor, pad: Tensor | None, one: bool) -> Tensor:
    return x if pad is None else x.masked_fill(pad[0, 0], 0.0)


def _fold(x: Tensor, shape: tuple[int, int], dim: int) -> Tensor:
    """Folds ``[*, A, *, I]`` to ``[K, n * M, I]``."""
    x = x.movedim(dim, 0) if dim else x
    return x if x.ndim == 3 and shape[1] == 1 else x.reshape(shape[0], -1, x.shape[-1])


def _unfold(y: Tensor, x: Tensor, dim: int) -> Tensor:
    """Unfolds ``[K, n * M, O]`` to the layout of the input."""
    lead = [x.shape[dim], *x.shape[:dim], *x.shape[dim + 1 : -1]]
    if len(lead) != 2 or y.shape[0] != lead[0]:
        y = y.reshape(*lead, y.shape[-1])
    return y.movedim(0, dim) if dim else y


def _expanded(
    layers: Sequence[Layer], values: Mapping[str, Tensor], stacked: Mapping[str, bool], k: int
) -> list[Tensor | None]:
    """Returns weight, bias, weight, ..., all stacked."""
    names = [name for layer in layers for name in (layer.weight, layer.bias)]
    return [
        None if n is None else values[n] if stacked[n] else values[n].expand(k, *values[n].shape)
        for n in names
    ]
