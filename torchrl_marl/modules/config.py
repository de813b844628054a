"""Settings of actors and critics."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["NetworkConfig"]


@dataclass(frozen=True)
class NetworkConfig:
    """A multi-layer perceptron for every agent of a group."""

    num_cells: list[int] = field(default_factory=lambda: [64, 64])
    """Width of each hidden layer."""
    activation: str = "tanh"
    """``tanh``, ``relu``, ``elu``, ``gelu`` or ``silu``."""
    share_params: bool = True
    """One network for all agents of the group, or one each."""
