"""Metrics of the clipped objective and of its critic, also of what several ranks know each.

Means need nothing of this: each rank's sum over everybody's count adds up to everybody's mean. The
others are made of a few numbers of each rank, which ``COMBINE`` makes one of.

Shapes: B any batch dims, N agents, G groups (nothing for one), R ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchrl_marl.per_group import PerGroup
from torchrl_marl.ranks import ALONE, Alone, current

__all__ = ["COMBINE", "entropy_of", "explained_variance", "ratio_metrics"]


def ratio_metrics(
    per: PerGroup,
    log_ratio: Tensor,
    clipped: Tensor,
    mask: Tensor | None,
    count: Tensor | None = None,
) -> dict[str, Tensor]:
    """Returns what the policy's ratio to the one that acted shows.

    Args:
        per (PerGroup): whose means.
        log_ratio, clipped (Tensor): logarithms of the ratio, ``[*B, N, 1]``.
        mask (Tensor, optional): bool, ``[*B, N]``.
        count (Tensor, optional): everybody's, where this is one of several ranks; what is no mean
            is then ``[*, G]`` for :data:`COMBINE`.
    """
    ratio = log_ratio.exp()
    alive = None if mask is None else mask.reshape(log_ratio.shape)
    # As logarithms, in which a masked ratio of 0 counts for nothing.
    counted = log_ratio if alive is None else log_ratio.masked_fill(~alive, -torch.inf)
    sums, largest = (per.logsumexp(counted), per.logsumexp(2 * counted)), per.amax(counted)
    alone = count is None
    return {
        # Schulman, 2020, http://joschu.net/blog/kl-approx.html: never negative.
        "kl_approx": per.mean(ratio - 1.0 - log_ratio, mask, count),
        "clip_fraction": per.mean((clipped != log_ratio).float(), mask, count),
        "ESS": _effective(*sums) / per.count(log_ratio, alive) if alone else torch.stack(sums),
        "max_ratio": largest.exp() if alone else largest.unsqueeze(0),
        "mean_ratio": per.mean(ratio, mask, count),
    }


def explained_variance(
    per: PerGroup, residual: Tensor, target: Tensor, mask: Tensor | None, *, alone: bool
) -> Tensor:
    """Returns the share of the targets' variance that the critic explains.

    Args:
        per (PerGroup): whose.
        residual, target (Tensor): ``[*B, N, 1]``.
        mask (Tensor, optional): bool, ``[*B, N]``.
        alone (bool): False: this is one of several ranks, and the result is for :data:`COMBINE`.
    """
    moments = (*per.moments(residual, mask, ALONE), *per.moments(target, mask, ALONE))
    if alone:
        return _explained(moments[1], moments[3])
    return torch.stack([per.number(target, mask), *moments])


def entropy_of(distribution: torch.distributions.Distribution, n_samples: int) -> Tensor:
    """Returns the entropy of each action, from draws where there is no formula.

    Ranks that learn as one draw for the actions of all, as one process would, and take their own.

    Args:
        distribution (Distribution): of actions ``[*B, N]``.
        n_samples (int): how many draws.
    """
    with _draws_of_all(current()):
        try:
            return distribution.entropy()
        except NotImplementedError:
            n = torch.Size([n_samples])
            if hasattr(distribution, "rsample_and_log_prob"):
                # Scored as they are drawn: near the bounds no inverse of a squashing is exact.
                return -distribution.rsample_and_log_prob(n)[1].mean(0)
            return -distribution.log_prob(distribution.rsample(n)).mean(0)


class _OwnRows(TorchFunctionMode):
    """Draws for the rows of all ranks, which lie in dim 1, and keeps one's own."""

    def __init__(self, ranks: Alone) -> None:
        super().__init__()
        self.ranks = ranks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: D105
        if func not in (Tensor.normal_, Tensor.uniform_):
            return func(*args, **(kwargs or {}))
        x, *rest = args
        everybodys = x.new_empty(x.shape[0], self.ranks.size, *x.shape[1:])
        return x.copy_(func(everybodys, *rest, **(kwargs or {}))[:, self.ranks.rank])


def _draws_of_all(ranks: Alone) -> contextlib.AbstractContextManager[Any]:
    return _OwnRows(ranks) if ranks.size > 1 else contextlib.nullcontext()


def _effective(of_ratios: Tensor, of_squares: Tensor) -> Tensor:
    """The effective number of samples, from logarithms of sums of ratios and of their squares."""
    return (2 * of_ratios - of_squares).exp().nan_to_num()


def _explained(of_residual: Tensor, of_target: Tensor) -> Tensor:
    return 1.0 - of_residual / (of_target + 1e-8)


def _combine_ess(parts: Tensor, count: Tensor) -> Tensor:
    return _effective(*parts.logsumexp(0)) / count


def _combine_max_ratio(parts: Tensor, count: Tensor) -> Tensor:
    return parts.amax(0)[0].exp()


def _combine_explained_variance(parts: Tensor, count: Tensor) -> Tensor:
    number, *moments = parts.unbind(1)
    return _explained(*(_variance_of_all(number, *own) for own in (moments[:2], moments[2:])))


def _variance_of_all(number: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Of each rank's ``[R, G]``, that of all together ``[G]``."""
    share = number / number.sum(0).clamp_min(1)
    offset = mean - (share * mean).sum(0)
    return (share * (variance + offset.square())).sum(0)


COMBINE: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ESS": _combine_ess,
    "max_ratio": _combine_max_ratio,
    "explained_variance": _combine_explained_variance,
}
"""A metric that is no mean -> what makes everybody's of each rank's ``[R, *, G]`` and the count."""
