"""Learning rates that follow the KL divergence from the collecting policy.

Shapes: G groups of all losses.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["KLRate"]

_KL_TOLERANCE_FACTOR = 2.0
_RATE_FACTOR = 1.5


class KLRate:
    """Adapts the learning rate of each group to its KL divergence.

    A rate is divided by 1.5 if the divergence is above twice the target, and multiplied by 1.5 if
    it is below half of the target. The rates are a tensor on the device, which graphs read.

    Args:
        n_groups (int): number G of groups.
        lr (float): learning rate at the start.
        target (float): target of the divergence.
        bounds (tuple of float): lowest and highest rate.
        device (torch.device): device of the rates.

    Attributes:
        values (Tensor): learning rate of each group, ``[G]``.

    Reference: ``KLAdaptiveLR`` of skrl, https://skrl.readthedocs.io.

    Examples:
        >>> rate = KLRate(2, 0.25, 0.01, (0.0, 1.0), torch.device("cpu"))
        >>> rate.adapt(torch.tensor([0.001, 0.02]), torch.tensor([True, True]))
        >>> rate.values.tolist()
        [0.375, 0.25]
    """

    def __init__(
        self,
        n_groups: int,
        lr: float,
        target: float,
        bounds: tuple[float, float],
        device: torch.device,
    ) -> None:
        self.target, self.bounds = target, bounds
        # On a CPU Adam's rate is a float64, as in torch; a GPU needs float32.
        wide = torch.float64 if device.type == "cpu" else torch.float32
        self.values = torch.full((n_groups,), lr, dtype=wide, device=device)

    @torch.no_grad()
    def adapt(self, kl: Tensor, active: Tensor) -> None:
        """Adapts the rates at the end of an epoch.

        Args:
            kl (Tensor): mean divergence of the epoch, ``[G]``; NaN changes nothing.
            active (Tensor): bool, ``[G]``, True for groups that learned in the epoch.
        """
        low, high = self.bounds
        lower, higher = (
            (self.values / _RATE_FACTOR).clamp_min(low),
            (self.values * _RATE_FACTOR).clamp_max(high),
        )
        adapted = torch.where(kl < self.target / _KL_TOLERANCE_FACTOR, higher, self.values)
        adapted = torch.where(kl > self.target * _KL_TOLERANCE_FACTOR, lower, adapted)
        self.values.copy_(torch.where(active, adapted, self.values))
