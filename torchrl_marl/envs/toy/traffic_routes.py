"""Roads of the traffic junction, and the ways over them.

Shapes: A places of arrival, R routes, L cells of the longest route.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["DIFFICULTIES", "Difficulty", "Routes", "make_routes"]

Cell = tuple[int, int]
DOWN, LEFT, UP, RIGHT = (1, 0), (0, -1), (-1, 0), (0, 1)
_CLOCKWISE = (DOWN, LEFT, UP, RIGHT)
_TURNS = {"straight": 0, "right": 1, "left": -1}


class Difficulty(NamedTuple):
    """What the original calls easy, medium and hard."""

    size: int
    """Height and width of the grid."""
    capacity: int
    """Cars that are on the roads at most."""
    arrival_rate: float
    """Chance of a car at each place of arrival in a step."""
    max_steps: int
    """The time limit."""
    n_agents: int
    """Cars that may come in an episode."""


DIFFICULTIES = {
    "easy": Difficulty(7, 5, 0.3, 20, 15),
    "medium": Difficulty(14, 10, 0.2, 40, 40),
    "hard": Difficulty(18, 20, 0.05, 80, 60),
}


class Routes(NamedTuple):
    """Every way from an arrival to an exit, as cells of the grid."""

    cells: Tensor
    """``[R, L]``, row by row from the top; -1 behind the end."""
    lengths: Tensor
    """``[R]``."""
    of_arrival: Tensor
    """``[A, R / A]``, the routes that begin there."""


def make_routes(difficulty: str, size: int) -> Routes:
    """Returns the routes over the roads of a grid.

    ``easy``: one junction of two one-way roads, no turns. ``medium``: one junction of two roads of
    two lanes, straight, right or left. ``hard``: four such junctions; who has passed two, goes
    straight on. Cars drive on the right.

    Args:
        difficulty (str): one of :data:`DIFFICULTIES`.
        size (int): height and width of the grid.

    Examples:
        >>> [len(make_routes(name, level.size).cells) for name, level in DIFFICULTIES.items()]
        [2, 12, 56]
    """
    roads = _Roads(difficulty, size)
    routes = [roads.drive_from(*start) for start in roads.arrivals]
    cells = [torch.tensor([r * size + c for r, c in route]) for own in routes for route in own]
    return Routes(
        torch.nn.utils.rnn.pad_sequence(cells, batch_first=True, padding_value=-1),
        torch.tensor([len(route) for route in cells]),
        torch.arange(len(cells)).view(len(routes), -1),
    )


class _Roads:
    """Lanes of a grid by heading, and the routes along them."""

    def __init__(self, difficulty: str, size: int) -> None:
        self.size, self.n_junctions = size, {"easy": 1, "medium": 1, "hard": 2}[difficulty]
        self.turns = ("straight",) if difficulty == "easy" else tuple(_TURNS)
        # First lane of each road; the same for rows and columns.
        self.roads = {
            "easy": [size // 2],
            "medium": [size // 2 - 1],
            "hard": [size // 3 - 2, 2 * size // 3],
        }[difficulty]
        second = 0 if difficulty == "easy" else 1
        self.lanes = {DOWN: 0, LEFT: 0, UP: second, RIGHT: second}
        self.headings = (DOWN, RIGHT) if difficulty == "easy" else _CLOCKWISE
        self.crossed = {road + lane for road in self.roads for lane in (0, second)}

    @property
    def arrivals(self) -> list[tuple[Cell, Cell]]:
        """Returns the first cell and the heading of each lane."""
        found = []
        for heading in self.headings:
            start = 0 if 1 in heading else self.size - 1
            for road in self.roads:
                lane = road + self.lanes[heading]
                found.append(((start, lane) if heading[0] else (lane, start), heading))
        return found

    def drive_from(self, cell: Cell, heading: Cell) -> list[list[Cell]]:
        """Returns the routes from a place of arrival."""
        return [route for route, _ in self._drive([cell], heading, self.n_junctions)]

    def _drive(self, route: list[Cell], heading: Cell, left: int) -> list[tuple[list[Cell], int]]:
        """Returns the routes that go on so, with ``left`` more junctions to decide at."""
        while not self._ends(route[-1], heading):
            ahead = _next(route[-1], heading)
            if left and self._is_junction(ahead) and not self._is_junction(route[-1]):
                ways = [self._turned([*route, ahead], heading, turn) for turn in self.turns]
                return [way for begun in ways for way in self._drive(*begun, left - 1)]
            route = [*route, ahead]
        return [(route, left)]

    def _turned(self, route: list[Cell], heading: Cell, turn: str) -> tuple[list[Cell], Cell]:
        """Returns the route over a junction, whose first cell is the last of the route."""
        if turn == "straight":
            return [*route, _next(route[-1], heading)], heading
        if turn == "left":
            route = [*route, _next(route[-1], heading)]
        turned = _CLOCKWISE[(_CLOCKWISE.index(heading) + _TURNS[turn]) % 4]
        return [*route, _next(route[-1], turned)], turned

    def _is_junction(self, cell: Cell) -> bool:
        return cell[0] in self.crossed and cell[1] in self.crossed

    def _ends(self, cell: Cell, heading: Cell) -> bool:
        return not all(0 <= x < self.size for x in _next(cell, heading))


def _next(cell: Cell, heading: Cell) -> Cell:
    return cell[0] + heading[0], cell[1] + heading[1]
