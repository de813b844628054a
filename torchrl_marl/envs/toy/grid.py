"""Worlds on a grid: what is seen from a cell, and how a grid is drawn.

Shapes: G cells, row by row from the top; W cells of a window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from torchrl_marl.envs.scene import Shape, Stage

__all__ = ["grid_stage", "in_cell", "windows"]

Color = tuple[float, float, float]


def windows(height: int, width: int, vision: int) -> Tensor:
    """Returns the cells that are seen from each cell, ``[G, W]``; G is what lies outside.

    Args:
        height (int): of the grid.
        width (int): of the grid.
        vision (int): how far is seen in each direction; W is ``(2 * vision + 1) ** 2``.

    Examples:
        >>> windows(2, 2, 1)[0].view(3, 3)
        tensor([[4, 4, 4],
                [4, 0, 1],
                [4, 2, 3]])
    """
    cells = torch.arange(height * width).view(1, 1, height, width).double()
    padded = torch.nn.functional.pad(cells, [vision] * 4, value=height * width)
    return torch.nn.functional.unfold(padded, 2 * vision + 1)[0].T.long()


def grid_stage(name: str, height: int, width: int) -> Stage:
    """Returns the view of a grid, with its middle at the origin."""
    half = (width / 2, height / 2)
    return Stage(name=name, center=(0.0, 0.0), half_size=half, border=half)


def in_cell(
    name: str,
    role: Literal["agent", "object", "goal", "joint"],
    place: Sequence[float],
    grid: tuple[int, int],
    color: Color,
    *,
    size: float = 0.7,
    turn: float = 0.0,
    visible: bool = True,
) -> Shape:
    """Returns what stands in a cell: a circle, or a box where it has no agent's role.

    Args:
        name (str): of the entity.
        role (str): as in :class:`~torchrl_marl.envs.scene.Shape`.
        place (sequence of float): row and column.
        grid (tuple of int): height and width.
        color (tuple of float): red, green and blue, from 0 to 1.

    Keyword Args:
        size (float): share of the cell that is filled.
        turn (float): place on a circle round the middle, in radians: who shares a cell is seen.
        visible (bool): whether it is shown now.
    """
    (row, column), (height, width) = place, grid
    aside = (1 - size) / 2 if role == "agent" else 0.0
    circle = role == "agent"
    return Shape(
        name=name,
        role=role,
        kind="circle" if circle else "box",
        x=column + 0.5 - width / 2 + aside * math.cos(turn),
        y=height / 2 - row - 0.5 + aside * math.sin(turn),
        rotation=0.0,
        color=color,
        radius=size / 2 if circle else 0.0,
        length=0.0 if circle else size,
        width=0.0 if circle else size,
        visible=visible,
    )
