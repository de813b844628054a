"""Target networks that follow the trained ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["soft_update_"]


@torch.no_grad()
def soft_update_(targets: Sequence[Tensor], sources: Sequence[Tensor], tau: float | Tensor) -> None:
    r"""Moves target parameters towards the trained ones, in place.

    .. math::
        \theta' \leftarrow \theta' + \tau (\theta - \theta')

    Args:
        targets (sequence of Tensor): of the target networks; written to.
        sources (sequence of Tensor): of the trained networks, of the same shapes.
        tau (float or Tensor): share of the way, 0 to 1; a scalar tensor may change between the
            replays of a graph. Hard updates are 1 in every k-th update, else 0.

    Raises:
        ValueError: other numbers of tensors, or other shapes.

    Reference: Lillicrap et al., 2016, https://arxiv.org/abs/1509.02971 (algorithm 1).

    Reduces to: a copy for ``tau=1``, to the bit; nothing for ``tau=0``.

    Examples:
        >>> target, source = torch.zeros(2), torch.tensor([1.0, 2.0])
        >>> soft_update_([target], [source], 0.25)
        >>> target
        tensor([0.2500, 0.5000])
    """
    targets, sources = list(targets), list(sources)
    found = [tuple(x.shape) for x in targets], [tuple(x.shape) for x in sources]
    if found[0] != found[1]:
        raise ValueError(
            f"soft_update_: targets have shapes {found[0]}, sources {found[1]}, expected the same."
        )
    if isinstance(tau, Tensor):
        torch._foreach_lerp_(targets, sources, [tau.to(x.dtype) for x in targets])
    else:
        torch._foreach_lerp_(targets, sources, tau)
