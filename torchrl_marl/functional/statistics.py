"""Masked means and moments, of all agents or of each group.

Shapes: B any batch dims, T time, N agents, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.types import Device

from torchrl_marl.runtime.ranks import SINGLE_PROCESS, SingleProcess, current

__all__ = [
    "PerGroup",
    "expand_mask",
    "fit_mask",
    "masked_mean",
    "masked_moments",
    "masked_standardize",
]


def expand_mask(mask: Tensor, value: Tensor) -> Tensor:
    """Adds trailing dims to a mask until it broadcasts to a value.

    Examples:
        >>> expand_mask(torch.ones(4, 3, dtype=torch.bool), torch.zeros(4, 3, 2, 5)).shape
        torch.Size([4, 3, 1, 1])
    """
    return mask.reshape(mask.shape + (1,) * (value.ndim - mask.ndim))


def fit_mask(mask: Tensor, value: Tensor) -> Tensor:
    """Expands a mask to a value's shape, after a check of every dim.

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
    """Averages the elements selected by a mask; 0 if there are none.

    Args:
        value (Tensor): values to average; may hold anything, NaN included, where masked.
        mask (Tensor, optional): bool; of the value's shape, or without its trailing dims.
        dim (int or sequence of int, optional): dims of ``value`` to reduce; default: all.

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
    ranks: SingleProcess = SINGLE_PROCESS,
) -> tuple[Tensor, Tensor]:
    """Returns mean and (population) variance of the elements selected by a mask.

    Args:
        value, mask, dim: as in :func:`masked_mean`.
        keepdim (bool): whether to keep the reduced dims.
        ranks (SingleProcess): processes to reduce over, each of which has a part of the elements.

    Shapes:
        - returns: mean and variance, each with the dims that were not reduced

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
    local = torch.where(mask, value, 0.0).sum(dims, keepdim=True)
    total, count = ranks.sum_all([local, mask.sum(dims, keepdim=True)])
    count = count.clamp_min(1)
    mean = total / count
    local = torch.where(mask, value - mean, 0.0).square().sum(dims, keepdim=True)
    variance = ranks.sum_all([local])[0] / count
    if keepdim:
        return mean, variance
    return mean.squeeze(dims), variance.squeeze(dims)


def masked_standardize(
    value: Tensor,
    mask: Tensor | None = None,
    dim: int | Sequence[int] | None = None,
    eps: float = 1e-5,
    ranks: SingleProcess = SINGLE_PROCESS,
) -> Tensor:
    """Standardizes the elements selected by a mask; the others become 0.

    Args:
        value, mask, dim: as in :func:`masked_mean`. If every dim is reduced, agents are pooled, as
            the MAPPO authors do; if dim -2 is not reduced, each agent is standardized separately.
        eps (float): number added to the standard deviation.
        ranks (SingleProcess): as in :func:`masked_moments`.

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


class PerGroup(nn.Module):
    """Reduces over all dims except groups: to a scalar for one group, ``[G]`` for several.

    Values that are not finite affect only their group's results and gradients. Masked values have
    no effect.

    Args:
        membership (Tensor, optional): 1 where an agent belongs to a group, 0 elsewhere, from
            :attr:`GroupSpec.membership`; groups are adjacent. None: one group.
        device (torch.device, optional): device of the membership.

    Shapes:
        - membership: ``[N, G]``
        - value, mask: ``[*B, N]`` or ``[*B, N, 1]``, unless a method says otherwise

    Reduces to: the masked statistics of :mod:`torchrl_marl.functional`, applied to each group's
    agents.

    Examples:
        >>> membership = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> value = torch.tensor([[1.0, 3.0, 5.0]])
        >>> PerGroup(membership).mean(value), PerGroup().mean(value)
        (tensor([2., 5.]), tensor(3.))
    """

    membership: Tensor | None

    def __init__(self, membership: Tensor | None = None, device: Device = None) -> None:
        super().__init__()
        self.n_groups = 1 if membership is None else membership.shape[-1]
        self.sizes = [] if membership is None else (membership > 0).sum(0).tolist()
        if membership is not None and device is not None:
            membership = membership.to(device)
        self.register_buffer("membership", membership, persistent=False)

    # -------------------------------------------------------------------- agents to groups

    def sum(self, value: Tensor) -> Tensor:
        """Sums over the agents of each group, ``[*B, N]`` to ``[*B, G]``."""
        if self.membership is None:
            return value.sum(-1, keepdim=True)
        return torch.where(self.membership > 0, value.unsqueeze(-1), 0.0).sum(-2)

    def to_agents(self, value: Tensor) -> Tensor:
        """Broadcasts a value per group to its agents, ``[*B, G]`` to ``[*B, N]``.

        For a single group, the value is returned unchanged; it broadcasts to the agents.
        """
        if self.membership is None:
            return value
        return torch.where(self.membership > 0, value.unsqueeze(-2), 0.0).sum(-1)

    def one_of(self, flags: Tensor) -> Tensor:
        """Returns the index of one agent of each group, ``[N]`` to ``[G]``: a flagged one, if any.

        Examples:
            >>> membership = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
            >>> PerGroup(membership).one_of(torch.tensor([False, True, False]))
            tensor([1, 2])
        """
        rank = 1 + flags.long()
        if self.membership is None:
            return rank.argmax(-1, keepdim=True)
        return (rank.unsqueeze(-1) * self.membership).argmax(0)

    # -------------------------------------------------------------------------- statistics

    def total(self, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """Returns the sum of the elements selected by a mask, per group."""
        if self.membership is None:
            return (value if mask is None else value.where(fit_mask(mask, value), 0.0)).sum()
        rows, alive = self._as_rows(value, mask)
        return self.sum((rows if alive is None else rows.where(alive, 0.0)).sum(0))

    def mean(
        self, value: Tensor, mask: Tensor | None = None, count: Tensor | None = None
    ) -> Tensor:
        """Returns the mean of the elements selected by a mask, per group; 0 if there are none.

        Args:
            value, mask (Tensor): as in the other statistics.
            count (Tensor, optional): divisor instead of the number of elements, such as the number
                over all ranks; the ranks' results then add up to the overall mean.
        """
        if count is not None:
            return self.total(value, mask) / count
        if self.membership is None:
            return masked_mean(value, mask)
        rows, alive = self._as_rows(value, mask)
        if alive is None:
            return self.sum(rows.sum(0)) / (self.membership.sum(0) * rows.shape[0])
        number = self.sum(alive.sum(0).to(rows.dtype))
        return self.sum(torch.where(alive, rows, 0.0).sum(0)) / number.clamp_min(1)

    def moments(
        self, value: Tensor, mask: Tensor | None = None, ranks: SingleProcess | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns mean and (population) variance of the elements selected by a mask, per group.

        Args:
            value, mask (Tensor): as in the other statistics.
            ranks (SingleProcess, optional): processes to reduce over; default: all processes of the
                run.
        """
        ranks = current() if ranks is None else ranks
        if self.membership is None:
            return masked_moments(value, mask, ranks=ranks)
        rows, alive = self._as_rows(value, mask)
        count = None
        if ranks.size > 1:
            count = ranks.sum_all([self.number(rows, alive)])[0].clamp_min(1)
        mean = ranks.sum_all([self.mean(rows, alive, count)])[0]
        centered = rows - self.to_agents(mean)
        if alive is not None:
            centered = torch.where(alive, centered, 0.0)
        return mean, ranks.sum_all([self.mean(centered.square(), alive, count)])[0]

    def number(self, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """Returns the number of elements selected by a mask, per group, as a float; it may be 0."""
        counted = torch.ones_like(value) if mask is None else mask.to(value.dtype)
        return self.total(counted, None)

    def count(self, value: Tensor, mask: Tensor | None = None) -> Tensor | int:
        """Returns the number of elements selected by a mask, per group, at least 1."""
        if self.membership is None:
            return value.numel() if mask is None else mask.sum().clamp_min(1)
        rows, alive = self._as_rows(value, mask)
        alive = torch.ones_like(rows) if alive is None else alive.to(rows.dtype)
        return self.sum(alive.sum(0)).clamp_min(1)

    def any(self, mask: Tensor) -> Tensor:
        """Returns 1.0 for groups with a True element in the mask of any rank, else 0.0."""
        dtype = torch.get_default_dtype()
        if self.membership is None:
            local = mask.any().to(dtype)
        else:
            local = self.sum(self._as_rows(mask, None)[0].any(0).to(dtype))
        return (current().sum_all([local])[0] > 0).to(dtype)

    def logsumexp(self, value: Tensor) -> Tensor:
        """Returns the logarithm of the summed exponentials; minus infinity adds nothing."""
        if self.membership is None:
            return value.reshape(1, -1).logsumexp(-1)[0]
        return self._by_group(self._as_rows(value, None)[0].T.logsumexp(-1)).logsumexp(-1)

    def amax(self, value: Tensor) -> Tensor:
        """Returns the largest element."""
        if self.membership is None:
            return value.reshape(1, -1).amax(-1)[0]
        return self._by_group(self._as_rows(value, None)[0].T.amax(-1)).amax(-1)

    def standardize(
        self, value: Tensor, mask: Tensor | None = None, exclude_dims: Sequence[int] = ()
    ) -> Tensor:
        """Standardizes the elements selected by a mask, per group; the others become 0.

        With several ranks, statistics are computed over the elements of all ranks.

        Args:
            value (Tensor): values, such as advantages.
            mask (Tensor, optional): bool.
            exclude_dims (sequence of int): dims that are not pooled; ``(-2,)`` standardizes each
                agent separately.

        Shapes:
            - value, returns: ``[*B, N, 1]``; mask: ``[*B, N]``

        Reduces to: :func:`~torchrl_marl.functional.masked_standardize`, applied to each group's
        agents.
        """
        excluded = {dim % value.ndim for dim in exclude_dims}
        dims = [dim for dim in range(value.ndim) if dim not in excluded]
        ranks = current()
        if self.membership is None:
            return masked_standardize(value, mask, dims, ranks=ranks)
        values = value.split(self.sizes, -2)
        masks = [None] * self.n_groups if mask is None else mask.split(self.sizes, -1)
        groups = zip(values, masks)
        rows = [
            masked_standardize(group_value, alive, dims, ranks=ranks)
            for group_value, alive in groups
        ]
        return torch.cat(rows, -2)

    def _as_rows(self, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Returns ``[*B, N]`` or ``[*B, N, 1]`` as ``[M, N]``."""
        assert self.membership is not None
        n = self.membership.shape[0]
        if value.shape[-1] != n:
            value = value.squeeze(-1)
        if value.shape[-1] != n:
            raise ValueError(
                f"a value has shape {tuple(value.shape)}, expected [*B, {n}] or [*B, {n}, 1]."
            )
        if mask is not None:
            mask = mask if mask.ndim == value.ndim else mask.squeeze(-1)
            mask = fit_mask(mask, value).reshape(-1, n)
        return value.reshape(-1, n), mask

    def _by_group(self, of_agents: Tensor) -> Tensor:
        """Returns ``[N]`` as ``[G, N]``, with minus infinity outside each group."""
        assert self.membership is not None
        return torch.where(self.membership.T > 0, of_agents, -torch.inf)
