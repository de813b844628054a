"""Running statistics of observations and returns, over living agents only.

Shapes: B any batch dims, N agents, F features.
"""

from __future__ import annotations

from typing import Any

import torch
import torchrl.modules
from torch import Tensor, nn

from torchrl_marl.functional import masked_moments

__all__ = ["ObservationNorm", "ValueNorm"]


class ValueNorm(torchrl.modules.PopArtValueNorm):
    r"""Running mean and variance of returns, with a mask and one update a batch.

    A critic that ends in :meth:`denormalize` works in normalized returns while its output is
    in reward units; a loss divides by :meth:`scale`. Statistics are debiased exponential
    averages of each batch's mean and mean square.

    Args:
        decay (float): weight of what was; near 1 remembers long, 0.99 is usual for one update
            a batch.
        epsilon (float): smallest variance.
        device (torch.device, optional): of the statistics.

    Shapes:
        - value_target: ``[*B, N, 1]``; mask: ``[*B, N]`` or ``[*B, N, 1]``

    Reference: Yu et al., 2022, https://arxiv.org/abs/2103.01955 (value normalization).
    Differs from TorchRL's: masked, identity before the first update, updated by the learner
    once a batch and not in each forward.

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
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(shape=1, beta=decay, epsilon=epsilon, device=device)

    @torch.no_grad()
    def update(self, value_target: Tensor, mask: Tensor | None = None) -> None:
        """Takes in one batch of returns; nothing changes where nobody lives."""
        mean, variance = masked_moments(value_target, mask)
        someone = 1.0 if mask is None else mask.any().to(mean.dtype)
        weight = (1.0 - self.beta) * someone
        for statistic, value in (
            (self.running_mean, mean),
            (self.running_mean_sq, variance + mean.square()),
            (self.debiasing_term, torch.ones_like(mean)),
        ):
            statistic.add_(weight * (value - statistic))

    def _running_stats(self) -> tuple[Tensor, Tensor]:
        started = self.debiasing_term > 0
        debias = torch.where(started, self.debiasing_term, 1.0)
        mean = self.running_mean / debias
        variance = (self.running_mean_sq / debias - mean.square()).clamp_min(self.epsilon)
        return mean, torch.where(started, variance, 1.0)


class ObservationNorm(nn.Module):
    """Running mean and variance of observations; the forward standardizes and clips.

    The learner updates it once a batch, after its epochs: within a batch, actors and critics
    see the same statistics as when it was collected.

    Args:
        in_features (int): size F of an observation.
        clip (float): largest standardized value.
        epsilon (float): added to the variance.
        device (torch.device, optional): of the statistics.

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

    def __init__(
        self,
        in_features: int,
        clip: float = 10.0,
        epsilon: float = 1e-5,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.clip = clip
        self.epsilon = epsilon
        # Double precision: the count grows to billions.
        wide: dict[str, Any] = {"device": device, "dtype": torch.float64}
        self.register_buffer("count", torch.zeros((), **wide))
        self.register_buffer("mean", torch.zeros(in_features, **wide))
        self.register_buffer("variance", torch.ones(in_features, **wide))

    @torch.no_grad()
    def update(self, observation: Tensor, mask: Tensor | None = None) -> None:
        """Takes in one batch, by the parallel form of the running variance."""
        rows = observation.reshape(-1, observation.shape[-1]).to(torch.float64)
        alive = None if mask is None else mask.reshape(-1)
        mean, variance = masked_moments(
            rows, None if alive is None else alive.unsqueeze(-1).expand_as(rows), dim=0
        )
        n = torch.full_like(self.count, rows.shape[0]) if alive is None else alive.sum()
        total = (self.count + n).clamp_min(1)
        delta = mean - self.mean
        spread = self.variance * self.count + variance * n
        spread = spread + delta.square() * self.count * n / total
        some = n > 0
        self.variance.copy_(torch.where(some, spread / total, self.variance))
        self.mean.add_(torch.where(some, delta * n / total, 0.0))
        self.count.add_(n)

    def forward(self, observation: Tensor) -> Tensor:
        """Standardizes."""
        mean, variance = self.mean.to(observation.dtype), self.variance.to(observation.dtype)
        standardized = (observation - mean) * (variance + self.epsilon).rsqrt()
        return standardized.clamp(-self.clip, self.clip)
