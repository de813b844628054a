"""Checks of payoff matrices."""

from __future__ import annotations

from torch import Tensor

__all__ = ["check_matrix", "check_square"]


def check_matrix(value: Tensor, name: str) -> Tensor:
    """Returns a matrix in float64.

    Raises:
        ValueError: something else, no entry, or entries that are not finite.
    """
    if value.ndim != 2 or 0 in value.shape:
        raise ValueError(f"{name} has shape {list(value.shape)}, expected a matrix.")
    if not bool(value.isfinite().all()):
        raise ValueError(f"{name} has entries that are not finite, expected numbers.")
    return value.double()


def check_square(value: Tensor, name: str) -> Tensor:
    """Returns a square matrix in float64.

    Raises:
        ValueError: something else.
    """
    if value.ndim == 2 and value.shape[0] != value.shape[1]:
        raise ValueError(f"{name} has shape {list(value.shape)}, expected [players, players].")
    return check_matrix(value, name)
