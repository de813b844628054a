"""Running statistics of observations and returns, over living agents only.

Shapes: B any batch dims, N agents, F features, G groups that are trained as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torchrl.modules
from torch import Tensor, nn
from torch.types import Device

from torchrl_marl.functional import masked_moments
from torchrl_marl.functional.statistics import PerGroup
from torchrl_marl.runtime.ranks import current

__all__ = ["ObservationNorm", "ValueNorm"]


class ValueNorm(torchrl.modules.PopArtValueNorm):
    r"""Running mean and variance of returns, with a mask and one update per batch.

    A critic that ends in :meth:`denormalize` is trained on normalized returns, while its output is
    in reward units; a loss divides by :meth:`scale`. Statistics are debiased exponential averages
    of each batch's mean and mean square.

    Args:
        decay (float): decay of the average per batch; 0.99 is usual with one update per batch.
        epsilon (float): smallest variance.
        membership (Tensor, optional): 1 where an agent belongs to a group; each group then has
            separate statistics.
        device (torch.device, optional): device of the statistics.

    Shapes:
        - value_target: ``[*B, N, 1]``; mask: ``[*B, N]`` or ``[*B, N, 1]``
        - membership: ``[N, G]``

    Reference: Yu et al., 2022, https://arxiv.org/abs/2103.01955 (value normalization).
    Differs from TorchRL's ``ValueNorm``: it has a mask, is the identity before the first update,
    is updated by the learner once per batch, not in each forward, and has double precision.

    Examples:
        >>> norm = ValueNorm()
        >>> norm.update(torch.tensor([[1.0], [3.0], [99.0]]), torch.tensor([True, True, False]))
        >>> norm.denormalize(torch.zeros(1)).item(), norm.scale().item()
        (2.0, 1.0)
    """

    def __init__(
        self,
        decay: float = 0.99,
        epsilon: float = 1e-5,
        membership: Tensor | None = None,
        device: Device = None,
    ) -> None:
        n_groups = 1 if membership is None else membership.shape[-1]
        super().__init__(shape=n_groups, beta=decay, epsilon=epsilon, device=device)
        # Double precision: the variance is a small difference of averages that move by small steps.
        wide: dict[str, Any] = {"device": device, "dtype": torch.float64}
        self.running_mean = torch.zeros(n_groups, **wide)
        self.running_mean_sq = torch.zeros(n_groups, **wide)
        self.debiasing_term = torch.zeros(() if membership is None else (n_groups,), **wide)
        self.per_group = PerGroup(membership, device)

    @torch.no_grad()
    def update(self, value_target: Tensor, mask: Tensor | None = None) -> None:
        """Updates the statistics with a batch; groups without a living agent do not change."""
        mean, variance = (x.double() for x in self.per_group.moments(value_target, mask))
        weight = (1.0 - self.beta) * (1.0 if mask is None else self.per_group.any(mask))
        for statistic, value in (
            (self.running_mean, mean),
            (self.running_mean_sq, variance + mean.square()),
            (self.debiasing_term, torch.ones_like(mean)),
        ):
            statistic.add_(weight * (value - statistic))

    @torch.no_grad()
    def shift(self, by: Tensor) -> None:
        """Shifts the mean and keeps the variance; nothing changes before the first update.

        Shapes:
            - by: ``[G]``, or a number
        """
        debias = torch.where(self.debiasing_term > 0, self.debiasing_term, 1.0)
        mean = self.running_mean / debias
        shifted = mean + by
        self.running_mean_sq.add_(self.debiasing_term * (shifted.square() - mean.square()))
        self.running_mean.add_(self.debiasing_term * by)

    def _running_stats(self) -> tuple[Tensor, Tensor]:
        started = self.debiasing_term > 0
        debias = torch.where(started, self.debiasing_term, 1.0)
        mean = self.running_mean / debias
        variance = (self.running_mean_sq / debias - mean.square()).clamp_min(self.epsilon)
        variance = torch.where(started, variance, 1.0)
        mean, variance = (x.to(torch.get_default_dtype()) for x in (mean, variance))
        if self.per_group.n_groups == 1:
            return mean, variance
        # Each agent's, ``[N, 1]``.
        spread = self.per_group.to_agents
        return spread(mean).unsqueeze(-1), spread(variance).unsqueeze(-1)


class ObservationNorm(nn.Module):
    """Running mean and variance of observations; its forward pass standardizes and clips.

    Learners update it once per batch: after the epochs if they are on-policy, so that actors and
    critics use the statistics of the rollout; with a replay buffer, when the batch is stored.

    Args:
        in_features (int): size F of an observation.
        clip (float): largest absolute standardized value.
        epsilon (float): added to the variance.
        kinds (sequence of int): kind of each agent; each kind then has separate statistics.
        device (torch.device, optional): device of the statistics.

    Shapes:
        - observation: ``[*B, N, F]``; mask: ``[*B, N]``

    Examples:
        >>> norm = ObservationNorm(1)
        >>> norm.update(torch.tensor([[[1.0], [3.0]]]))
        >>> norm(torch.tensor([[[3.0]]])).round(decimals=2)
        tensor([[[1.]]])
    """

    count: Tensor
    mean: Tensor
    variance: Tensor
    membership: Tensor | None
    kind_of: Tensor | None

    def __init__(
        self,
        in_features: int,
        clip: float = 10.0,
        epsilon: float = 1e-5,
        kinds: Sequence[int] = (),
        device: Device = None,
    ) -> None:
        super().__init__()
        self.clip = clip
        self.epsilon = epsilon
        # Double precision: the count grows to billions.
        wide: dict[str, Any] = {"device": device, "dtype": torch.float64}
        n_kinds = len(set(kinds))
        shape = (n_kinds, in_features) if n_kinds > 1 else (in_features,)
        of_kinds = torch.eye(n_kinds, device=device)[list(kinds)] if n_kinds > 1 else None
        self.register_buffer("membership", of_kinds, persistent=False)
        kind_of = None if of_kinds is None else of_kinds.argmax(-1)
        self.register_buffer("kind_of", kind_of, persistent=False)
        # Integers: indexing by a boolean mask would wait for the device.
        for k in range(n_kinds if n_kinds > 1 else 0):
            members = torch.tensor([i for i, kind in enumerate(kinds) if kind == k], device=device)
            self.register_buffer(f"members_{k}", members, persistent=False)
        self.register_buffer("count", torch.zeros(shape[:-1], **wide))
        self.register_buffer("mean", torch.zeros(shape, **wide))
        self.register_buffer("variance", torch.ones(shape, **wide))

    @torch.no_grad()
    def update(self, observation: Tensor, mask: Tensor | None = None) -> None:
        """Updates the statistics with a batch, using the parallel form of the running variance."""
        rows = observation.flatten(0, -3) if observation.ndim > 2 else observation.unsqueeze(0)
        if self.membership is not None and rows.shape[1] != self.membership.shape[0]:
            raise ValueError(
                f"observations of {rows.shape[1]} agents, expected {self.membership.shape[0]}."
            )
        alive = None if mask is None else mask.reshape(rows.shape[:2])
        if self.membership is None:
            self._update_kind(rows, alive, ())
            return
        for k in range(self.membership.shape[-1]):
            members = self.get_buffer(f"members_{k}")
            own = None if alive is None else alive[:, members]
            self._update_kind(rows[:, members], own, (k,))

    def _update_kind(self, rows: Tensor, alive: Tensor | None, kind: tuple[int, ...]) -> None:
        rows = rows.flatten(0, 1).to(torch.float64)
        count, mean, variance = self.count[kind], self.mean[kind], self.variance[kind]
        living = None if alive is None else alive.reshape(-1, 1).expand_as(rows)
        ranks = current()
        batch_mean, batch_variance = masked_moments(rows, living, dim=0, ranks=ranks)
        local_count = torch.full_like(count, rows.shape[0]) if alive is None else alive.sum()
        n = ranks.sum_all([local_count])[0]
        total = (count + n).clamp_min(1)
        delta = batch_mean - mean
        sum_of_squares = variance * count + batch_variance * n
        sum_of_squares = sum_of_squares + delta.square() * count * n / total
        any_alive = n > 0
        variance.copy_(torch.where(any_alive, sum_of_squares / total, variance))
        mean.add_(torch.where(any_alive, delta * n / total, 0.0))
        count.add_(n)

    def forward(self, observation: Tensor) -> Tensor:
        """Standardizes and clips observations."""
        mean, variance = self.mean.to(observation.dtype), self.variance.to(observation.dtype)
        if self.membership is not None:
            mean, variance = mean[self.kind_of], variance[self.kind_of]
        standardized = (observation - mean) * (variance + self.epsilon).rsqrt()
        return standardized.clamp(-self.clip, self.clip)
