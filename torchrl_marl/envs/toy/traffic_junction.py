"""Traffic junction, at which cars must give way to each other."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.nn.functional import one_hot

from torchrl_marl.envs.agents.declaration import check_least
from torchrl_marl.envs.marl_env import MarlEnv
from torchrl_marl.envs.scene import Shape, Stage
from torchrl_marl.envs.toy.roles import declare_team
from torchrl_marl.envs.toy.scenes import grid_stage, in_cell, windows
from torchrl_marl.errors import ConfigError, nearest

__all__ = ["DIFFICULTIES", "Difficulty", "Routes", "TrafficJunction", "make_routes"]

Cell = tuple[int, int]
DOWN, LEFT, UP, RIGHT = (1, 0), (0, -1), (-1, 0), (0, 1)
_CLOCKWISE = (DOWN, LEFT, UP, RIGHT)
_TURNS = {"straight": 0, "right": 1, "left": -1}


class Difficulty(NamedTuple):
    """Parameters of one difficulty, as in the original environment."""

    size: int
    """Height and width of the grid."""
    capacity: int
    """Largest number of cars on the roads."""
    arrival_rate: float
    """Probability of a new car at each entry in a step."""
    max_steps: int
    """Time limit of an episode, in steps."""
    n_agents: int
    """Largest number of cars that enter in an episode."""


DIFFICULTIES = {
    "easy": Difficulty(7, 5, 0.3, 20, 15),
    "medium": Difficulty(14, 10, 0.2, 40, 40),
    "hard": Difficulty(18, 20, 0.05, 80, 60),
}


class Routes(NamedTuple):
    """All routes along the roads: R routes of at most L cells, which start at A entries."""

    cells: Tensor
    """Cell indices of each route, ``[R, L]``, counted row by row from the top; -1 after its end."""
    lengths: Tensor
    """Number of cells of each route, ``[R]``."""
    of_arrival: Tensor
    """Indices of the routes that start at each entry, ``[A, R / A]``."""


def make_routes(difficulty: str, size: int) -> Routes:
    """Returns the routes along the roads of a grid.

    ``easy`` has one junction of two one-way roads, at which cars do not turn. ``medium`` has one
    junction of two-lane roads; cars go straight, right or left. ``hard`` has four such junctions; a
    car can turn at the first two that it reaches, and goes straight at later ones. Cars drive on
    the right.

    Args:
        difficulty (str): one of :data:`DIFFICULTIES`.
        size (int): height and width of the grid.

    Examples:
        >>> [len(make_routes(name, level.size).cells) for name, level in DIFFICULTIES.items()]
        [2, 12, 56]
    """
    roads = _Roads(difficulty, size)
    routes = [roads.routes_from(*start) for start in roads.arrivals]
    cells = [
        torch.tensor([row * size + column for row, column in route])
        for entry_routes in routes
        for route in entry_routes
    ]
    return Routes(
        torch.nn.utils.rnn.pad_sequence(cells, batch_first=True, padding_value=-1),
        torch.tensor([len(route) for route in cells]),
        torch.arange(len(cells)).view(len(routes), -1),
    )


class _Roads:
    """Lanes of a grid, by the heading of the cars on them, and the routes along the lanes."""

    def __init__(self, difficulty: str, size: int) -> None:
        self.size, self.n_junctions = size, {"easy": 1, "medium": 1, "hard": 2}[difficulty]
        self.turns = ("straight",) if difficulty == "easy" else tuple(_TURNS)
        # Index of the first lane of each road; it is the same for horizontal and vertical roads.
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
        entries = []
        for heading in self.headings:
            start = 0 if 1 in heading else self.size - 1
            for road in self.roads:
                lane = road + self.lanes[heading]
                entries.append(((start, lane) if heading[0] else (lane, start), heading))
        return entries

    def routes_from(self, cell: Cell, heading: Cell) -> list[list[Cell]]:
        """Returns all routes that start at an entry."""
        return [route for route, _ in self._continue_route([cell], heading, self.n_junctions)]

    def _continue_route(
        self, route: list[Cell], heading: Cell, turns_left: int
    ) -> list[tuple[list[Cell], int]]:
        """Returns all ways to continue a route that may still turn at ``turns_left`` junctions."""
        while not self._leaves_grid(route[-1], heading):
            ahead = _next_cell(route[-1], heading)
            if turns_left and self._is_junction(ahead) and not self._is_junction(route[-1]):
                continuations = [
                    self._cross_junction([*route, ahead], heading, turn) for turn in self.turns
                ]
                return [
                    full_route
                    for continued in continuations
                    for full_route in self._continue_route(*continued, turns_left - 1)
                ]
            route = [*route, ahead]
        return [(route, turns_left)]

    def _cross_junction(
        self, route: list[Cell], heading: Cell, turn: str
    ) -> tuple[list[Cell], Cell]:
        """Extends a route across the junction that it entered; returns route and new heading."""
        if turn == "straight":
            return [*route, _next_cell(route[-1], heading)], heading
        if turn == "left":
            route = [*route, _next_cell(route[-1], heading)]
        turned = _CLOCKWISE[(_CLOCKWISE.index(heading) + _TURNS[turn]) % 4]
        return [*route, _next_cell(route[-1], turned)], turned

    def _is_junction(self, cell: Cell) -> bool:
        return cell[0] in self.crossed and cell[1] in self.crossed

    def _leaves_grid(self, cell: Cell, heading: Cell) -> bool:
        return not all(0 <= x < self.size for x in _next_cell(cell, heading))


def _next_cell(cell: Cell, heading: Cell) -> Cell:
    return cell[0] + heading[0], cell[1] + heading[1]


WAIT_PENALTY, CRASH_PENALTY = -0.01, -10.0
_BLUE, _GRAY, _RED = (0.35, 0.35, 0.75), (0.6, 0.6, 0.6), (0.9, 0.2, 0.2)


class TrafficJunction(MarlEnv):
    """Environment in which cars follow routes with gas and brake, and must not collide.

    The roads are empty at first. After each step, a car enters with probability ``arrival_rate`` at
    each entry, in the order of the entries, as long as fewer than ``capacity`` cars are on the
    roads. Its route is drawn from those that start at the entry. Gas (0) moves the car by one cell,
    and off the road at the end of its route; brake (1) keeps it in place. Cars in the same cell
    collide, but drive on afterwards. A car observes its last action, its route, and the index and
    number of cars of each cell within ``vision``.

    In each step a car earns -0.01 times the number of steps that it has spent on the roads, and -10
    in a collision. An episode *succeeds* if no cars collide (no car earns -10 or less in a step).
    In ``easy``, 29 % of the episodes succeed if all cars only use gas. With a hand-written policy,
    96 % succeed: the cars of one road give way to those of the other, and no car drives into a
    waiting car. Such a policy needs communication or vision.

    Each car is an agent, which is born at its entry and terminated at its exit. Its memory is empty
    at its birth, and absent cars send no messages. At most ``n_agents`` cars enter in an episode;
    this limit is never reached in ``easy`` and ``medium``.

    Args:
        num_envs (int): number E of parallel envs.

    Keyword Args:
        difficulty (str): ``easy`` (one junction of one-way roads, two routes), ``medium`` (one
            junction of two-way roads, with turns, 12 routes) or ``hard`` (four such junctions, 56
            routes). The defaults below are for ``easy``, ``medium`` and ``hard``.
        size (int, optional): height and width of the grid; by default 7, 14 or 18.
        capacity (int, optional): largest number of cars on the roads; by default 5, 10 or 20.
        arrival_rate (float, optional): probability of a new car at each entry in a step; by default
            0.3, 0.2 or 0.05.
        n_agents (int, optional): largest number N of cars that enter in an episode; by default 15,
            40 or 60.
        vision (int): visible distance in each direction, in cells.
        max_steps (int, optional): time limit in steps; by default 20, 40 or 80.
        seed, device, check: as in :class:`MarlEnv`.

    Shapes:
        - ``("agents", "observation")``: ``[E, N, 1 + R + W * (B + 2)]``: the last action; the
          route, one-hot; and for each of the W visible cells its index among the B cells of roads,
          one-hot (index B is no road), and its number of cars
        - ``("agents", "mask")``: ``[E, N]``, True for cars on the roads
        - ``"state"``: ``[E, 2 * R * L]``: for each of L cells of each route, the number of cars,
          and the mean number of steps that these cars have spent on the roads, divided by 10

    Raises:
        ConfigError: an argument is unknown, or a number is invalid.

    Reference: Sukhbaatar et al., 2016, https://arxiv.org/abs/1605.07736 (section 4.2), and the
    rules in https://github.com/IC3Net/IC3Net. Differs: a car that collides at its entry is not
    punished in that step, because it has not acted yet; ``arrival_rate`` does not rise in training.

    Examples:
        >>> env = TrafficJunction(2, seed=0)
        >>> td = env.rollout(20)
        >>> td["agents", "observation"].shape, td["agents", "mask"].sum(-1).max() <= 5
        (torch.Size([2, 20, 15, 18]), tensor(True))
    """

    def __init__(
        self,
        num_envs: int,
        *,
        difficulty: str = "easy",
        size: int | None = None,
        capacity: int | None = None,
        arrival_rate: float | None = None,
        n_agents: int | None = None,
        vision: int = 0,
        **kwargs: Any,
    ) -> None:
        if difficulty not in DIFFICULTIES:
            raise ConfigError(
                f"TrafficJunction: difficulty is {difficulty!r}; "
                f"{nearest(str(difficulty), DIFFICULTIES)}expected one of "
                f"{', '.join(DIFFICULTIES)}."
            )
        level = DIFFICULTIES[difficulty]
        super().__init__(num_envs, **{"max_steps": level.max_steps, **kwargs})
        self.size = level.size if size is None else size
        self.capacity = level.capacity if capacity is None else capacity
        self.arrival_rate = level.arrival_rate if arrival_rate is None else arrival_rate
        self.n_agents = level.n_agents if n_agents is None else n_agents
        self._check_arguments(difficulty, vision)
        routes = make_routes(difficulty, self.size)
        self.cells, self.lengths, self.of_arrival = (x.to(self.device) for x in routes)
        self._index_road_cells(vision)
        n_seen = 1 + len(self.cells) + self.windows.shape[1] * (self.n_road_cells + 2)
        declare_team(self, self.n_agents, n_seen, 2, 2 * self.cells.numel(), "car")

    def _check_arguments(self, difficulty: str, vision: int) -> None:
        smallest = {"easy": 3, "medium": 4, "hard": 9}[difficulty]
        check_least("TrafficJunction", size=(self.size, smallest), capacity=(self.capacity, 1))
        check_least("TrafficJunction", n_agents=(self.n_agents, 1), vision=(vision, 0))
        if difficulty == "hard" and self.size % 3:
            raise ConfigError(
                f"TrafficJunction: size is {self.size}, expected a multiple of 3 for "
                "difficulty='hard'."
            )
        if not 0 <= self.arrival_rate <= 1:
            raise ConfigError(
                f"TrafficJunction: arrival_rate is {self.arrival_rate}, expected 0 to 1."
            )

    def _index_road_cells(self, vision: int) -> None:
        """Numbers the cells of the roads; cells outside the grid count as no road."""
        n_cells = self.size**2
        on_road = torch.zeros(n_cells + 1, dtype=torch.bool, device=self.device)
        on_road[self.cells[self.cells >= 0]] = True
        self.n_road_cells = int(on_road.sum())
        self.road_cells = torch.where(on_road, on_road.cumsum(0) - 1, self.n_road_cells)
        # The last row is for absent cars.
        around = windows(self.size, self.size, vision).to(self.device)
        self.windows = torch.cat([around, torch.full_like(around[:1], n_cells)])

    # ------------------------------------------------------------------------------ dynamics

    def _reset(self, tensordict: TensorDictBase | None) -> dict[str, Any]:
        zeros = torch.zeros(self.num_envs, self.n_agents, dtype=torch.int64, device=self.device)
        self.route, self.place, self.wait = zeros, zeros.clone(), zeros.clone()
        self.came, self.gone, self.braked = zeros > 0, zeros > 0, zeros > 0
        return self._observe()

    def _step(self, tensordict: TensorDictBase) -> dict[str, Any]:
        on_road = self.alive
        self.braked = on_road & (tensordict["agents", "action"] == 1)
        self.place = self.place + (on_road & ~self.braked).long()
        self.wait = self.wait + on_road.long()
        self.gone = self.gone | (on_road & (self.place >= self.lengths[self.route]))
        self._spawn_cars()
        reward = WAIT_PENALTY * self.wait + CRASH_PENALTY * self.crashed.float()
        reward = torch.where(self.alive, reward, 0.0)
        return self._observe(reward=reward.unsqueeze(-1), terminated=self.gone.unsqueeze(-1))

    @property
    def alive(self) -> Tensor:
        """Returns a mask of cars on the roads, ``[E, N]``."""
        return self.came & ~self.gone

    @property
    def at(self) -> Tensor:
        """Returns the cell of each car, ``[E, N]``; G for absent cars."""
        place = self.place.clamp_max(self.cells.shape[1] - 1)
        return torch.where(self.alive, self.cells[self.route, place], self.size**2)

    @property
    def crashed(self) -> Tensor:
        """Mask of the cars that collide, ``[E, N]``."""
        return self.alive & (self._count_cars().gather(1, self.at) > 1)

    def _count_cars(self) -> Tensor:
        """Returns the number of cars in each cell, ``[E, G + 1]``."""
        counts = self.wait.new_zeros(self.num_envs, self.size**2 + 1)
        return counts.scatter_add(1, self.at, self.alive.long())

    def _spawn_cars(self) -> None:
        """Adds new cars in the order of their index, at most one per entry."""
        n_arrivals, n_choices = self.of_arrival.shape
        shape = (self.num_envs, n_arrivals)
        arrives = torch.rand(shape, device=self.device) < self.arrival_rate
        route_choice = torch.randint(n_choices, shape, device=self.device)
        rank = arrives.cumsum(1)  # the first new car has rank 1
        arrives = arrives & (rank <= self.capacity - self.alive.sum(1, keepdim=True))
        index = self.came.sum(1, keepdim=True) + rank - 1
        agents = torch.arange(self.n_agents, device=self.device)
        is_new = arrives.unsqueeze(1) & (index.unsqueeze(1) == agents.unsqueeze(-1))  # [E, N, A]
        route = torch.arange(n_arrivals, device=self.device) * n_choices + route_choice
        self.route = self.route + (is_new * route.unsqueeze(1)).sum(-1)
        self.came = self.came | is_new.any(-1)

    def _observe(self, **leaves: Tensor) -> dict[str, Any]:
        visible = self.windows[self.at]  # [E, N, W]
        n_cars = self._count_cars().gather(1, visible.flatten(1)).view(*visible.shape, 1)
        cell_codes = one_hot(self.road_cells[visible], self.n_road_cells + 1)
        view = torch.cat([cell_codes, n_cars], -1).flatten(2)
        parts = [self.braked.unsqueeze(-1), one_hot(self.route, len(self.cells)), view]
        observation = torch.cat([x.float() for x in parts], -1) * self.alive.unsqueeze(-1)
        # Cars that have not entered yet wait; cars that have left are terminated.
        agents = {"observation": observation, "mask": self.came, **leaves}
        return {"agents": agents, "state": self._encode_state()}

    def _encode_state(self) -> Tensor:
        n_routes, longest = self.cells.shape
        place = self.route * longest + self.place.clamp_max(longest - 1)
        zeros = torch.zeros(self.num_envs, n_routes * longest, device=self.device)
        cars = zeros.scatter_add(1, place, self.alive.float())
        steps = zeros.scatter_add(1, place, self.alive * self.wait / 10)
        return torch.cat([cars, steps / cars.clamp_min(1)], -1)

    # ------------------------------------------------------------------------------- drawing

    def scene(self, index: int = 0) -> list[Shape]:
        """Returns a drawing of one env: a list of shapes, first the cars; collisions are red."""
        grid = (self.size, self.size)
        at, crashed, alive = (x[index].tolist() for x in (self.at, self.crashed, self.alive))
        shapes = []
        for i, (cell, crash, visible) in enumerate(zip(at, crashed, alive)):
            place = divmod(cell if visible else 0, self.size)
            turn = 2 * math.pi * i / self.n_agents
            look = {"turn": turn if crash else 0.0, "visible": visible, "size": 0.6}
            shapes.append(
                in_cell(f"car_{i}", "agent", place, grid, _RED if crash else _BLUE, **look)
            )
        cells = sorted({cell for cell in self.cells.flatten().tolist() if cell >= 0})
        places = [divmod(cell, self.size) for cell in cells]
        return shapes + [
            in_cell(f"road_{i}", "goal", place, grid, _GRAY, size=1.0)
            for i, place in enumerate(places)
        ]

    def stage(self) -> Stage:
        """Returns the view of the grid."""
        return grid_stage("traffic_junction", self.size, self.size)
