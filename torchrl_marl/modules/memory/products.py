"""Products of rows with the weights of networks, added to given tensors; networks under ``vmap``.

Shapes: T steps (optional), K networks, R rows of each, F inputs, O outputs. One network needs no
batched product, which would be slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["add_gradient", "add_product", "apply_to_batched", "project"]


def project(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Returns each network's linear map of its rows.

    Shapes:
        - x: ``[T, K, R, F]``; weight: ``[K, O, F]``; bias: ``[K, O]``; returns ``[T, K, R, O]``
    """
    if len(weight) == 1:
        return F.linear(x, weight.squeeze(0), bias.squeeze(0))
    rows = torch.baddbmm(bias.unsqueeze(1), x.movedim(0, 1).flatten(1, 2), weight.mT)
    return rows.unflatten(1, (len(x), -1)).movedim(1, 0)


def add_product(added: Tensor | None, x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Writes ``added + x @ weight.mT``; ``added`` can be ``out`` itself, and None stands for 0.

    Shapes:
        - x: ``[K, R, F]`` or ``[T, K, R, F]``; weight: ``[K, O, F]``; out: as x, with O
        - added: ``[K, 1, O]``, or ``[K, R, O]`` without T
    """
    if len(weight) > 1 and x.dim() == 4:
        for own, y in zip(x, out):
            add_product(added, own, weight, y)
        return
    beta = 0.0 if added is None else 1.0
    if len(weight) > 1:
        torch.baddbmm(out if added is None else added, x, weight.mT, out=out, beta=beta)
        return
    x, rows, weight = x.flatten(0, -2), out.view(-1, out.shape[-1]), weight[0].mT
    if added is None or added is out:  # in place, since another view of ``out`` would be copied
        rows.addmm_(x, weight, beta=beta)
    else:
        torch.addmm(added.view(-1, added.shape[-1]), x, weight, out=rows)


def add_gradient(total: Tensor, of_rows: Tensor, x: Tensor) -> None:
    """Adds a weight's gradient, ``of_rows.mT @ x`` summed over the steps.

    Shapes:
        - of_rows: ``[T, K, R, O]``; x: ``[T, K, R, F]``; total: ``[K, O, F]``
    """
    if len(total) == 1:
        of_rows, x = (y.flatten(0, 2) for y in (of_rows, x))
        total[0].addmm_(of_rows.mT, x)
    else:
        for own, y in zip(of_rows, x):
            total.baddbmm_(own.mT, y)


def apply_to_batched(
    function: type[torch.autograd.Function],
    size: int,
    in_dims: Sequence[int | None],
    inputs: Sequence[Tensor | None],
    *,
    networks: Sequence[int],
) -> tuple[tuple[Tensor, ...], int]:
    """Applies an operation of K networks to B * K, which is what ``vmap`` over B means.

    Args:
        function (type): operation whose outputs have the networks as dim 1.
        size (int): number B.
        in_dims (sequence): dim of B in each input; None if it has none.
        inputs (sequence): the inputs of the operation.

    Keyword Args:
        networks (sequence of int): dim of K in each input, without B.

    Returns:
        tuple: the outputs, and their dim of B.
    """

    def folded(x: Tensor | None, own: int | None, place: int) -> Tensor | None:
        if x is None:
            return None
        whole = x.expand(size, *x.shape).movedim(0, place) if own is None else x.movedim(own, place)
        return whole.flatten(place, place + 1)

    outputs: Any = function.apply(*map(folded, inputs, in_dims, networks))  # type: ignore[no-untyped-call]
    return tuple(x.unflatten(1, (size, -1)) for x in outputs), 1
