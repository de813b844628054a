"""Drawings of the toy environments: agents in a row, matrices, cards, stones and grid cells.

Shapes: N agents of the team; G cells of a grid, row by row from the top; W cells of a window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_marl.envs.scene import Shape, Stage, text

__all__ = [
    "BLUE",
    "GRAY",
    "GREEN",
    "ORANGE",
    "actions_in",
    "cards",
    "earned_in",
    "grid_stage",
    "in_cell",
    "matrix",
    "names_of",
    "players",
    "row",
    "windows",
]

BLUE, ORANGE, GREEN = (0.35, 0.50, 0.80), (0.90, 0.55, 0.25), (0.35, 0.65, 0.40)
GRAY, PALE, GOLD = (0.55, 0.55, 0.55), (0.88, 0.90, 0.94), (0.98, 0.85, 0.45)
_GROUP_COLORS = (BLUE, ORANGE, GREEN, (0.60, 0.45, 0.75))
_AGENT_SPACING = 1.6
Words = Sequence[str]


def names_of(env: Any) -> list[str]:
    """Returns the names of all agents, group by group."""
    return [name for group in env.team.groups.values() for name in group.agent_names]


def actions_in(env: Any, step: TensorDictBase | None) -> list[str]:
    """Returns each agent's action in a step as a text, which is empty if it did not act.

    Args:
        env: toy environment.
        step (TensorDictBase, optional): step of one env; None before the first step.
    """
    words: list[str] = []
    for name, group in env.team.groups.items():
        if step is None:
            words += [""] * group.n_agents
            continue
        actions = step.get((name, "action"))
        texts = [_format_action(actions[i]) for i in range(group.n_agents)]
        mask = step.get((name, "mask")).reshape(-1).tolist()
        words += [word if acted else "" for word, acted in zip(texts, mask)]
    return words


def _format_action(action: Tensor) -> str:
    if action.is_floating_point():
        return " ".join(f"{x:.1f}" for x in action.reshape(-1).tolist())
    values = action.reshape(-1)
    return str(int(values) if values.numel() == 1 else int(values.int().argmax()))


def earned_in(env: Any, step: TensorDictBase | None) -> list[float]:
    """Returns the reward of each agent in a step."""
    if step is None:
        return [0.0] * len(names_of(env))
    rewards = [step.get(("next", name, "reward")).reshape(-1) for name in env.team.groups]
    return [value for own in rewards for value in own.tolist()]


def row(
    env: Any, inside: Words, above: Words = (), below: Words = (), good: Sequence[bool] = ()
) -> list[Shape]:
    """Returns shapes of all agents in a row, in the colors of their groups.

    Args:
        env: toy environment.
        inside, above, below (sequence of str): labels inside, above and below each agent.
        good (sequence of bool): True for agents whose label above is green.
    """
    names = names_of(env)
    groups = [i for i, own in enumerate(env.team.groups.values()) for _ in range(own.n_agents)]
    shapes = []
    for i, (name, group) in enumerate(zip(names, groups)):
        color, x = _GROUP_COLORS[group % len(_GROUP_COLORS)], _AGENT_SPACING * i
        shapes.append(Shape(name, "agent", "circle", x, 0.0, 0.0, color, 0.5, text=inside[i]))
    for i, name in enumerate(names):
        if above:
            color = GREEN if good and good[i] else GRAY
            shapes.append(text(f"{name} above", above[i], _AGENT_SPACING * i, 0.95, color=color))
        if below:
            shapes.append(text(f"{name} below", below[i], _AGENT_SPACING * i, -0.85, height=0.26))
    corners = [(-1.0, 1.5), (_AGENT_SPACING * (len(names) - 1) + 1.0, -1.4)]
    return shapes + [text(f"corner {i}", " ", *at) for i, at in enumerate(corners)]


def players(env: Any, words: Words, places: Sequence[tuple[float, float]]) -> list[Shape]:
    """Returns shapes of two players at their seats, with labels."""
    shapes = []
    for i, (name, (x, y)) in enumerate(zip(names_of(env), places)):
        shapes.append(
            Shape(name, "agent", "circle", x, y, 0.0, _GROUP_COLORS[i], 0.45, text=str(i + 1))
        )
    for name, word, (x, y) in zip(names_of(env), words, places):
        shapes.append(text(f"{name} says", word, x, y - 0.8, height=0.3))
    return shapes


def matrix(
    payoff: Tensor, chosen: tuple[int, ...] | None, *, left: float = 0.0, name: str = "cell"
) -> list[Shape]:
    """Returns shapes of a payoff matrix, with the chosen entry marked.

    Args:
        payoff (Tensor): payoff matrix with M rows and K columns.
        chosen (tuple of int, optional): row and column of the chosen entry.

    Keyword Args:
        left (float): x-coordinate of the left edge.
        name (str): prefix of the names of the shapes.
    """
    shapes = []
    for i, values in enumerate(payoff.tolist()):
        for j, value in enumerate(values):
            color = GOLD if chosen == (i, j) else PALE
            look: dict[str, Any] = {"length": 0.92, "width": 0.92, "text": f"{value:g}"}
            place = left + j, -float(i)
            cell = Shape(f"{name} {i} {j}", "object", "box", *place, 0.0, color, **look)
            shapes.append(cell)
    return shapes


def cards(names: Words, words: Words, places: Sequence[tuple[float, float]]) -> list[Shape]:
    """Returns shapes of cards, with labels."""
    return [
        Shape(name, "object", "box", x, y, 0.0, (1.0, 1.0, 0.97), length=0.9, width=1.2, text=word)
        for name, word, (x, y) in zip(names, words, places)
    ]


Color = tuple[float, float, float]


def windows(height: int, width: int, vision: int) -> Tensor:
    """Returns the indices of the cells visible from each cell, ``[G, W]``; G if out of the grid.

    Args:
        height (int): height of the grid.
        width (int): width of the grid.
        vision (int): visible distance in each direction, in cells; W is ``(2 * vision + 1) ** 2``.

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
    """Returns the view of a grid centered at the origin."""
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
    """Returns the shape of an entity in a cell: a circle for an agent, a box for other roles.

    Args:
        name (str): name of the entity.
        role (str): role of the entity, as in :class:`~torchrl_marl.envs.scene.Shape`.
        place (sequence of float): row and column of the cell.
        grid (tuple of int): height and width of the grid.
        color (tuple of float): RGB color, each from 0 to 1.

    Keyword Args:
        size (float): size of the entity, as a fraction of the size of a cell.
        turn (float): angle, in radians, of the entity's offset from the cell's center. Different
            angles separate entities in the same cell.
        visible (bool): False hides the entity.
    """
    (row, column), (height, width) = place, grid
    offset = (1 - size) / 2 if role == "agent" else 0.0
    circle = role == "agent"
    return Shape(
        name=name,
        role=role,
        kind="circle" if circle else "box",
        x=column + 0.5 - width / 2 + offset * math.cos(turn),
        y=height / 2 - row - 0.5 + offset * math.sin(turn),
        rotation=0.0,
        color=color,
        radius=size / 2 if circle else 0.0,
        length=0.0 if circle else size,
        width=0.0 if circle else size,
        visible=visible,
    )
