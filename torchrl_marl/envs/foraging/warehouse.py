"""Robotic warehouse: robots carry requested shelves to a goal, and back.

Shapes: E envs, N agents, S shelves, G cells, W visible cells.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.nn.functional import one_hot
from torchrl.data import Categorical, Unbounded

from torchrl_marl.envs.agents.declaration import check_least
from torchrl_marl.envs.foraging.moves import moving, set_order
from torchrl_marl.envs.marl_env import MarlEnv
from torchrl_marl.envs.scene import Shape, Stage
from torchrl_marl.envs.toy.scenes import BLUE, GRAY, GREEN, ORANGE, grid_stage, in_cell, windows
from torchrl_marl.errors import ConfigError
from torchrl_marl.specs import AgentSpec

__all__ = ["REWARDS", "Warehouse"]

GROUP = "agent"
FORWARD, LEFT, RIGHT, TOGGLE = 1, 2, 3, 4
UP, DOWN, WEST, EAST = 0, 1, 2, 3
_LEFT_TURNS, _RIGHT_TURNS = (WEST, EAST, DOWN, UP), (EAST, WEST, UP, DOWN)
REWARDS = ("individual", "global", "two_stage")


class Warehouse(MarlEnv):
    """Environment in which robots carry requested shelves to a goal, and back (RWARE).

    The actions are: nothing, forward, turn left, turn right, and load or unload. Robots drive below
    shelves, but not with a shelf below another one. They load the shelf above them, and unload
    anywhere but on the highways. If several robots want the same cell, only one of them moves
    (:func:`~torchrl_marl.envs.foraging.moves.moving`). A requested shelf that reaches one of the
    two goals is delivered; another shelf is then requested at random. Episodes are truncated at the
    time limit.

    Rules, observations and rewards are those of the package ``rware`` 2.0.0 with its flattened
    observations and without messages.

    Args:
        num_envs (int): number E of parallel envs.

    Keyword Args:
        n_agents (int): number N of robots.
        shelf_rows, shelf_columns (int): blocks of shelves; the number of columns is odd. Each block
            has two columns of shelves.
        column_height (int): height of a block, in shelves.
        request_queue_size (int): number of requested shelves.
        sensor_range (int): visible distance in each direction, in cells.
        reward_type (str): ``individual``: 1 for a robot that delivers; ``global``: 1 for all;
            ``two_stage``: 0.5 for a robot that delivers, and 0.5 when it unloads that shelf.
        normalised_coordinates (bool): True if a robot's column and row are observed from 0 to 1.
        common_reward (bool): True if each robot earns the sum of all rewards.
        max_steps (int, optional): time limit in steps, 500 by default.
        seed, device, check: as in :class:`MarlEnv`.

    Shapes:
        - ``("agent", "observation")``: ``[E, N, 8 + 7 * W]``: the robot's column, row, load,
          heading (one-hot: up, down, left, right) and whether it is on a highway; and for each
          visible cell whether there is a robot, its heading, whether there is a shelf, and whether
          that is requested

    Raises:
        ConfigError: an argument is unknown, or a number is invalid.

    Reference: Papoudakis et al., 2021, https://arxiv.org/abs/2006.07869, and the rules in
    https://github.com/semitable/robotic-warehouse. Differs: the time limit truncates.

    Examples:
        >>> env = Warehouse(4, n_agents=2, request_queue_size=2, seed=0)
        >>> env.reset()["agent", "observation"].shape
        torch.Size([4, 2, 71])
    """

    def __init__(
        self,
        num_envs: int,
        *,
        n_agents: int = 2,
        shelf_rows: int = 1,
        shelf_columns: int = 3,
        column_height: int = 8,
        request_queue_size: int = 2,
        sensor_range: int = 1,
        reward_type: str = "individual",
        normalised_coordinates: bool = False,
        common_reward: bool = False,
        max_steps: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_envs, max_steps=500 if max_steps is None else max_steps, **kwargs)
        sizes = {"shelf_rows": (shelf_rows, 1), "column_height": (column_height, 1)}
        sizes |= {"shelf_columns": (shelf_columns, 3), "sensor_range": (sensor_range, 1)}
        check_least("Warehouse", n_agents=(n_agents, 1), **sizes)
        self.n_agents, self.reward_type = n_agents, reward_type
        self.common_reward, self.normalised = common_reward, normalised_coordinates
        self.height, self.width = (column_height + 1) * shelf_rows + 2, 3 * shelf_columns + 1
        self.n_requests = request_queue_size
        highway = _highway_cells(self.height, self.width, column_height)
        self._check_arguments(shelf_columns, int((~highway).sum()))
        self._make_tables(highway)
        self.around = windows(self.height, self.width, sensor_range).to(self.device)
        n_seen = 8 + 7 * self.around.shape[1]
        spec = AgentSpec(GROUP, n_agents, Unbounded((n_seen,)), Categorical(5))
        self.register_agent(spec)

    def _check_arguments(self, shelf_columns: int, n_shelves: int) -> None:
        if shelf_columns % 2 == 0:
            raise ConfigError(
                f"Warehouse: shelf_columns is {shelf_columns}, expected an odd number."
            )
        if self.reward_type not in REWARDS:
            raise ConfigError(
                f"Warehouse: reward_type is {self.reward_type!r}, expected one of "
                f"{', '.join(REWARDS)}."
            )
        if self.n_agents > self.height * self.width:
            raise ConfigError(
                f"Warehouse: {self.n_agents} robots do not fit into {self.height}x{self.width} "
                "cells; use a larger warehouse."
            )
        if not 1 <= self.n_requests < n_shelves:
            raise ConfigError(
                f"Warehouse: request_queue_size is {self.n_requests}, expected 1 to "
                f"{n_shelves - 1}, fewer than there are shelves."
            )

    def _make_tables(self, highway: Tensor) -> None:
        """Makes the lookup tables: cells ahead, turned headings, and features of a cell."""
        height, width = self.height, self.width
        self.highway = highway.to(self.device)
        self.homes = (~highway).nonzero().flatten().to(self.device)
        middle = (height - 1) * width + width // 2
        self.goals = (middle - 1, middle)
        cells = torch.arange(height * width)
        row, column = cells // width, cells % width
        up, down = (row - 1).clamp_min(0), (row + 1).clamp_max(height - 1)
        left, right = (column - 1).clamp_min(0), (column + 1).clamp_max(width - 1)
        ahead = [up * width + column, down * width + column, row * width + left]
        self.ahead = torch.stack([*ahead, row * width + right], 1).to(self.device)
        self.swapped = set_order(height, width).to(self.device)
        turns = [[UP, UP, left, right, UP] for left, right in zip(_LEFT_TURNS, _RIGHT_TURNS)]
        for heading, turn in enumerate(turns):
            turn[0] = turn[FORWARD] = turn[TOGGLE] = heading
        self.turned = torch.tensor(turns, device=self.device)
        # Features of a cell, by robot (none, or its heading) and shelf (none, or requested).
        robot = torch.tensor([[0, 1, 0, 0, 0], *([1, *x] for x in torch.eye(4).tolist())])
        shelf = torch.tensor([[0, 0], [1, 0], [1, 1]])
        features = torch.cat([robot.repeat(3, 1), shelf.repeat_interleave(5, 0)], 1)
        self.seen = features.float().to(self.device)

    # ------------------------------------------------------------------------------ dynamics

    def _reset(self, tensordict: TensorDictBase | None) -> dict[str, Any]:
        shape, n_shelves = (self.num_envs, self.n_agents), len(self.homes)
        draws = torch.rand(self.num_envs, self.height * self.width, device=self.device)
        self.cells = draws.topk(self.n_agents, -1).indices
        self.heading = torch.randint(4, shape, device=self.device)
        self.carried = torch.full_like(self.cells, n_shelves)  # S: no shelf
        self.delivers = torch.zeros_like(self.cells, dtype=torch.bool)
        self.shelves = self.homes.repeat(self.num_envs, 1)
        draws = torch.rand(self.num_envs, n_shelves, device=self.device)
        first = draws.topk(self.n_requests, -1).indices
        self.requested = torch.zeros_like(draws, dtype=torch.bool).scatter(1, first, True)
        return self._observe()

    def _step(self, tensordict: TensorDictBase) -> dict[str, Any]:
        action = tensordict[GROUP, "action"]
        loaded = self._write_to_grid(
            self.shelves, torch.arange(1, len(self.homes) + 1, device=self.device)
        )
        self._move_robots(action == FORWARD, loaded > 0)
        self.heading = self.turned[self.heading, action]
        reward = self._load_and_unload(action == TOGGLE, loaded) + self._deliver_shelves()
        if self.common_reward:
            reward = reward.sum(1, keepdim=True).expand_as(reward)
        return self._observe(reward=reward.unsqueeze(-1))

    def _write_to_grid(self, cells: Tensor, values: Tensor) -> Tensor:
        """Returns a grid with values in cells and 0 elsewhere, ``[E, G + 1]``; G is outside."""
        zeros = cells.new_zeros(self.num_envs, self.height * self.width + 1)
        return zeros.scatter(1, cells, values.expand_as(cells))

    def _move_robots(self, forward: Tensor, shelf: Tensor) -> None:
        """Moves robots forward, with their shelves."""
        target = self.ahead[self.cells, self.heading]
        carries = self.carried < len(self.homes)
        makes_room = (target.unsqueeze(2) == self.cells.unsqueeze(1)) & carries.unsqueeze(1)
        blocked = carries & shelf.gather(1, target) & ~makes_room.any(-1)
        target = torch.where(forward & ~blocked, target, self.cells)
        moves = moving(self.cells, target, self.heading, self.swapped)
        self.cells = torch.where(moves, target, self.cells)
        padding = torch.zeros_like(self.shelves[:, :1])  # takes what robots without a shelf write
        shelves = torch.cat([self.shelves, padding], 1).scatter(1, self.carried, self.cells)
        self.shelves = shelves[:, :-1]

    def _load_and_unload(self, toggles: Tensor, shelf: Tensor) -> Tensor:
        """Loads and unloads shelves; returns the reward of the second stage, ``[E, N]``."""
        n_shelves = len(self.homes)
        shelf_number = shelf.gather(1, self.cells)  # 1 + the shelf's index
        is_empty = self.carried == n_shelves
        loads = toggles & is_empty & (shelf_number > 0)
        unloads = toggles & ~is_empty & ~self.highway[self.cells]
        carried = torch.where(loads, shelf_number - 1, self.carried)
        self.carried = torch.where(unloads, n_shelves, carried)
        returned = unloads & self.delivers
        self.delivers = self.delivers & ~unloads
        return 0.5 * returned.float()

    def _deliver_shelves(self) -> Tensor:
        """Replaces requests that have been delivered; returns the rewards, ``[E, N]``."""
        reward = torch.zeros(self.cells.shape, device=self.device)
        draws = torch.rand(self.num_envs, len(self.goals), device=self.device)
        for i, goal in enumerate(self.goals):
            padding = torch.zeros_like(self.requested[:, :1])
            is_requested = torch.cat([self.requested, padding], 1).gather(1, self.carried)
            delivers = is_requested & (self.cells == goal)
            self._request_new_shelf(delivers, draws[:, i])
            if self.reward_type == "two_stage":
                reward = reward + 0.5 * delivers
                self.delivers = self.delivers | delivers
            else:
                is_shared = self.reward_type == "global"
                reward = reward + (delivers.any(1, keepdim=True) if is_shared else delivers).float()
        return reward

    def _request_new_shelf(self, delivers: Tensor, draw: Tensor) -> None:
        """Requests another shelf in place of a delivered one, each equally likely."""
        n_shelves = len(self.homes)
        rank = (draw * (n_shelves - self.n_requests)).long().unsqueeze(1)
        is_new = ~self.requested & ((~self.requested).cumsum(1) == rank + 1)
        shelf = torch.where(delivers, self.carried, n_shelves).amin(1, keepdim=True)
        is_delivered = shelf == torch.arange(n_shelves, device=self.device)
        requested = (self.requested | is_new) & ~is_delivered
        self.requested = torch.where(delivers.any(1, keepdim=True), requested, self.requested)

    def _observe(self, **leaves: Tensor) -> dict[str, Any]:
        shelf = self._write_to_grid(self.shelves, 1 + self.requested.long())
        robot = self._write_to_grid(self.cells, 1 + self.heading)
        around = self.around[self.cells]
        cell_codes = (robot + 5 * shelf).gather(1, around.flatten(1)).view(around.shape)
        column, row = self.cells % self.width, self.cells // self.width
        if self.normalised:
            column, row = column / (self.width - 1), row / (self.height - 1)
        columns = [column, row, self.carried < len(self.homes)]
        parts = [torch.stack([x.float() for x in columns], -1), one_hot(self.heading, 4).float()]
        parts += [self.highway[self.cells].unsqueeze(-1).float(), self.seen[cell_codes].flatten(2)]
        return {GROUP: {"observation": torch.cat(parts, -1), **leaves}}

    # ------------------------------------------------------------------------------- drawing

    def scene(self, index: int = 0) -> list[Shape]:
        """Returns a drawing of one env; requested shelves are orange, loaded robots smaller."""
        grid = (self.height, self.width)
        robots = zip(self.cells[index].tolist(), self.carried[index].tolist())
        shapes = [
            in_cell(f"agent_{i}", "agent", divmod(cell, self.width), grid, BLUE, size=size)
            for i, (cell, shelf) in enumerate(robots)
            for size in (0.7 if shelf == len(self.homes) else 0.4,)
        ]
        shelves = zip(self.shelves[index].tolist(), self.requested[index].tolist())
        for i, (cell, is_requested) in enumerate(shelves):
            color = ORANGE if is_requested else GRAY
            place = divmod(cell, self.width)
            shapes.append(in_cell(f"shelf_{i}", "object", place, grid, color, size=0.85))
        for i, cell in enumerate(self.goals):
            place = divmod(cell, self.width)
            shapes.append(in_cell(f"goal_{i}", "goal", place, grid, GREEN, size=1.0))
        return shapes

    def stage(self) -> Stage:
        """Returns the view of the grid."""
        return grid_stage("warehouse", self.height, self.width)


def _highway_cells(height: int, width: int, column_height: int) -> Tensor:
    """Returns True for the cells that have no shelf, ``[G]``."""
    cells = torch.arange(height * width)
    row, column = cells // width, cells % width
    middle = (column == width // 2 - 1) | (column == width // 2)
    queue = middle & (row > height - column_height - 3)
    lanes = (column % 3 == 0) | (row % (column_height + 1) == 0)
    return lanes | queue | (row == height - 1)
