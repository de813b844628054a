"""Masked statistics.

Shapes: B any batch dims, T time, N agents. Tensors are ``[*B, T, N, 1]``, masks ``[*B, T, N]``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrl_marl.ranks import ALONE, Alone

__all__ = [
    "expand_mask",
    "fit_mask",
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
    ranks: Alone = ALONE,
) -> tuple[Tensor, Tensor]:
    """Returns mean and (population) variance of the elements whose mask is True.

    Args:
        value, mask, dim: as in :func:`masked_mean`.
        keepdim (bool): keep the reduced dims.
        ranks (Alone): over whose elements, each rank with its part of them.

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
    own = torch.where(mask, value, 0.0).sum(dims, keepdim=True)
    total, count = ranks.sum_all([own, mask.sum(dims, keepdim=True)])
    count = count.clamp_min(1)
    mean = total / count
    own = torch.where(mask, value - mean, 0.0).square().sum(dims, keepdim=True)
    variance = ranks.sum_all([own])[0] / count
    if keepdim:
        return mean, variance
    return mean.squeeze(dims), variance.squeeze(dims)


def masked_standardize(
    value: Tensor,
    mask: Tensor | None = None,
    dim: int | Sequence[int] | None = None,
    eps: float = 1e-5,
    ranks: Alone = ALONE,
) -> Tensor:
    """Standardizes the elements whose mask is True; 0 where masked.

    Args:
        value, mask, dim: as in :func:`masked_mean`. Reducing every dim pools the agents, as
            the MAPPO authors do; leaving out -2 standardizes each agent by itself.
        eps (float): added to the standard deviation.
        ranks (Alone): as in :func:`masked_moments`.

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
    mean, variance = masked_moments(value, mask, dim, keepdim=True, ranks=ranks)
    centered = value - mean
    if mask is not None:
        centered = torch.where(fit_mask(mask, value), centered, 0.0)
    return centered / (variance.sqrt() + eps)


def _dims(value: Tensor, dim: int | Sequence[int] | None) -> tuple[int, ...]:
    if dim is None:
        return tuple(range(value.ndim))
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    return tuple(d % value.ndim for d in dims)
