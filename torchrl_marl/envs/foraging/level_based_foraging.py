"""Level-based foraging: players collect food that a single one may be too weak to take.

Shapes: E envs, N players, F pieces of food, G cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import Categorical, Unbounded

from torchrl_marl.envs.agents.declaration import check_least
from torchrl_marl.envs.marl_env import MarlEnv
from torchrl_marl.envs.scene import Shape, Stage
from torchrl_marl.envs.toy.scenes import BLUE, GREEN, grid_stage, in_cell
from torchrl_marl.errors import ConfigError
from torchrl_marl.specs import AgentSpec

__all__ = ["LevelBasedForaging"]

GROUP = "agent"
MOVES = ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1), (0, 0))
LOAD = 5


class LevelBasedForaging(MarlEnv):
    """Environment in which players collect food that a single one may be too weak to take (LBF).

    Players and food have levels. The actions are: nothing, up, down, left, right and load. Players
    that load next to a piece of food take it if their levels sum to at least its level. Players
    that want the same cell stay where they are. An episode is terminated when all food is taken,
    and truncated at the time limit.

    A player that takes food earns the food's level, times its share in the sum of the levels of
    those who load. Rewards are divided by the total level of all food, so a team earns at most 1.

    Rules, observations and rewards are those of the package ``lbforaging`` 2.0.0.

    Args:
        num_envs (int): number E of parallel envs.

    Keyword Args:
        players (int): number N of players.
        field_size (pair of int): height and width of the field, in cells.
        max_num_food (int): number F of pieces of food. If they do not fit, there are fewer.
        sight (int, optional): visible distance in each direction, in cells; None: the whole field.
        force_coop (bool): True if each piece of food has its highest level. By default this is the
            sum of the levels of all players, or of the three weakest.
        min_player_level, max_player_level (int or list): range of the levels of players, or of each
            of them, in random order.
        min_food_level (int or list): lowest level of food, or of each piece.
        max_food_level (int or list, optional): highest level of food; None: the sum of the three
            lowest levels of players.
        normalize_reward (bool): False: a player earns its own level times that of the food.
        observe_agent_levels (bool): True if the levels of players are visible.
        penalty (float): cost of loading food that is too heavy.
        common_reward (bool): True if each player earns the sum of all rewards.
        max_steps (int, optional): time limit in steps, 50 by default.
        seed, device, check: as in :class:`MarlEnv`.

    Shapes:
        - ``("agent", "observation")``: ``[E, N, 3 * F + 3 * N]``: row, column and level of food and
          players within sight, first the food, then oneself, then others; -1, -1 and 0 if there is
          none. Rows and columns count from the upper left corner of the visible part.

    Raises:
        ConfigError: an argument is unknown, or a number is invalid.

    Reference: Papoudakis et al., 2021, https://arxiv.org/abs/2006.07869, and the rules in
    https://github.com/semitable/lb-foraging. Differs: the time limit truncates; the initial cells
    do not depend on the episode before; food is placed without a limit of 1,000 attempts.

    Examples:
        >>> env = LevelBasedForaging(4, players=3, field_size=(10, 10), max_num_food=3, seed=0)
        >>> env.reset()["agent", "observation"].shape
        torch.Size([4, 3, 18])
    """

    def __init__(
        self,
        num_envs: int,
        *,
        players: int = 2,
        field_size: Sequence[int] = (8, 8),
        max_num_food: int = 2,
        sight: int | None = None,
        force_coop: bool = False,
        min_player_level: int | Sequence[int] = 1,
        max_player_level: int | Sequence[int] = 2,
        min_food_level: int | Sequence[int] = 1,
        max_food_level: int | Sequence[int] | None = None,
        normalize_reward: bool = True,
        observe_agent_levels: bool = True,
        penalty: float = 0.0,
        common_reward: bool = False,
        max_steps: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_envs, max_steps=50 if max_steps is None else max_steps, **kwargs)
        self.height, self.width = _read_field_size(field_size)
        self.n_agents, self.n_foods = players, max_num_food
        self.sight = max(field_size) if sight is None else sight
        self.force_coop, self.penalty, self.common_reward = force_coop, penalty, common_reward
        self.normalize_reward = normalize_reward
        self.observe_agent_levels = observe_agent_levels
        self._check_arguments(field_size)
        self.lowest = self._read_levels("min_player_level", min_player_level, players)
        self.highest = self._read_levels("max_player_level", max_player_level, players)
        self.lightest = self._read_levels("min_food_level", min_food_level, max_num_food)
        self.heaviest = None
        if max_food_level is not None:
            self.heaviest = self._read_levels("max_food_level", max_food_level, max_num_food)
        self._check_levels()
        self.moves = torch.tensor(MOVES, device=self.device)
        self.inner, self.near = (x.to(self.device) for x in _food_cells(self.height, self.width))
        others = [[i, *(j for j in range(players) if j != i)] for i in range(players)]
        self.self_first = torch.tensor(others, device=self.device)
        n_seen = 3 * max_num_food + (3 if observe_agent_levels else 2) * players
        spec = AgentSpec(GROUP, players, Unbounded((n_seen,)), Categorical(len(MOVES)))
        self.register_agent(spec)

    def _check_arguments(self, field_size: Sequence[int]) -> None:
        name = type(self).__name__
        check_least(name, players=(self.n_agents, 1), max_num_food=(self.n_foods, 1))
        check_least(name, field_size=(min(field_size), 3), sight=(self.sight, 1))
        if self.height * self.width <= self.n_agents:
            raise ConfigError(
                f"{name}: {self.n_agents} players do not fit into {self.height}x{self.width} "
                "cells; use a larger field_size."
            )
        inner = (self.height - 2) * (self.width - 2)
        if not isinstance(self.n_foods, int) or self.n_foods > inner:
            raise ConfigError(
                f"{name}: max_num_food is {self.n_foods}, expected a whole number up to {inner}, "
                f"the inner cells of {self.height}x{self.width}."
            )

    def _read_levels(self, name: str, levels: int | Sequence[int], n: int) -> Tensor:
        levels = [levels] * n if isinstance(levels, int) else list(levels)
        if len(levels) != n or min(levels) < 1:
            raise ConfigError(
                f"{type(self).__name__}: {name} is {levels}, expected a level of 1 or more, or a "
                f"list of {n}."
            )
        return torch.tensor(levels, device=self.device)

    def _check_levels(self) -> None:
        ranges = {"player": (self.lowest, self.highest)}
        if self.heaviest is not None:
            ranges["food"] = self.lightest, self.heaviest
        elif not self.force_coop:  # food may be as light as the weakest players together are strong
            ranges["food"] = self.lightest, self.lowest.sort().values[:3].sum()
        for kind, (low, high) in ranges.items():
            if (low > high).any():
                raise ConfigError(
                    f"{type(self).__name__}: min_{kind}_level is {low.tolist()}, expected at most "
                    f"{high.tolist()}, the highest; lower it."
                )

    # ------------------------------------------------------------------------------ dynamics

    def _reset(self, tensordict: TensorDictBase | None) -> dict[str, Any]:
        n_cells = self.height * self.width
        draws = torch.rand(self.num_envs, n_cells, device=self.device)
        cells = draws.topk(self.n_agents, -1).indices
        self.positions = self._cell_coordinates(cells)
        self.levels = _draw_levels(*self._shuffle_levels(self.lowest, self.highest))
        self._place_food(cells)
        self.total = self.food_levels.sum(1, keepdim=True)
        return self._observe()

    def _place_food(self, players: Tensor) -> None:
        """Places the food, one piece after the other, in cells without food nearby."""
        heaviest = self.heaviest
        if heaviest is None:
            heaviest = self.levels.sort(1).values[:, :3].sum(1, keepdim=True)
            heaviest = heaviest.expand(-1, self.n_foods)
        lightest = heaviest if self.force_coop else self.lightest
        levels = _draw_levels(*self._shuffle_levels(lightest, heaviest))
        free = self.inner.repeat(self.num_envs, 1).scatter(1, players, False)
        cells, placed = [], []
        for _ in range(self.n_foods):
            draws = torch.rand(free.shape, device=self.device).masked_fill(~free, -1.0)
            best_draw, cell = draws.max(1)
            cells.append(cell)
            placed.append(best_draw >= 0)
            free = free & ~self.near[cell]
        level = torch.where(torch.stack(placed, 1), levels, 0)
        cell = torch.where(level > 0, torch.stack(cells, 1), self.height * self.width)
        cell, order = cell.sort(1)  # food is observed row by row
        self.foods, self.food_levels = self._cell_coordinates(cell), level.gather(1, order)

    def _shuffle_levels(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Returns ranges of levels in random order, ``[E, *]``."""
        draws = torch.rand(self.num_envs, low.shape[-1], device=self.device)
        order = draws.argsort(1)
        low, high = (x.expand(self.num_envs, -1).gather(1, order) for x in (low, high))
        return low, high

    def _cell_coordinates(self, cells: Tensor) -> Tensor:
        """Returns rows and columns of cells, ``[*, 2]``."""
        return torch.stack([cells // self.width, cells % self.width], -1)

    def _step(self, tensordict: TensorDictBase) -> dict[str, Any]:
        action = tensordict[GROUP, "action"]
        self._move_players(action)
        reward = self._take_food(action == LOAD)
        if self.common_reward:
            reward = reward.sum(1, keepdim=True).expand_as(reward)
        output = self._observe(reward=reward.unsqueeze(-1))
        return {**output, "terminated": (self.food_levels == 0).all(1, keepdim=True)}

    def _move_players(self, action: Tensor) -> None:
        target = self.positions + self.moves[action]
        size = torch.tensor([self.height, self.width], device=self.device)
        inside = ((target >= 0) & (target < size)).all(-1)
        is_taken = (self.food_levels == 0).unsqueeze(1)
        free = ((target.unsqueeze(2) != self.foods.unsqueeze(1)).any(-1) | is_taken).all(-1)
        target = torch.where((inside & free).unsqueeze(-1), target, self.positions)
        rivals = (target.unsqueeze(2) == target.unsqueeze(1)).all(-1).sum(-1, keepdim=True)
        self.positions = torch.where(rivals == 1, target, self.positions)

    def _take_food(self, loads: Tensor) -> Tensor:
        """Takes food away; returns each player's reward, ``[E, N]``."""
        # Food is never two cells apart, so a player is next to one piece at most.
        distance = (self.positions.unsqueeze(2) - self.foods.unsqueeze(1)).abs().sum(-1)
        food = self.food_levels.unsqueeze(1)
        loading = loads.unsqueeze(-1) & (distance == 1) & (food > 0)  # [E, N, F]
        level = self.levels.unsqueeze(-1)
        strength = (loading * level).sum(1, keepdim=True)
        taken = loading & (strength >= food)
        divisor = strength * self.total.unsqueeze(-1) if self.normalize_reward else 1
        rewards = torch.where(taken, level * food / divisor, -self.penalty)
        self.food_levels = torch.where(taken.any(1), 0, self.food_levels)
        return torch.where(loading, rewards, 0.0).sum(-1)

    def _observe(self, **leaves: Tensor) -> dict[str, Any]:
        corner = (self.positions - self.sight).clamp_min(0).unsqueeze(2)  # [E, N, 1, 2]
        food, level = self.foods.unsqueeze(1), self.food_levels.unsqueeze(1)
        distance = (food - self.positions.unsqueeze(2)).abs().amax(-1)
        visible = (distance <= self.sight) & (level > 0)
        parts = [_pack_visible(food - corner, level, visible)]
        order = self.self_first.flatten()
        player, level = (
            x[:, order].unflatten(1, self.self_first.shape) for x in (self.positions, self.levels)
        )
        relative_position = player - corner
        # As in the original, one sees further at the upper and left border.
        visible = ((relative_position >= 0) & (relative_position <= 2 * self.sight)).all(-1)
        players = _pack_visible(relative_position, level, visible)
        parts.append(players if self.observe_agent_levels else players[..., :2])
        observation = torch.cat([x.flatten(2) for x in parts], -1).float()
        return {GROUP: {"observation": observation, **leaves}}

    # ------------------------------------------------------------------------------- drawing

    def scene(self, index: int = 0) -> list[Shape]:
        """Returns a drawing of one env: players and food, with their levels."""
        grid = (self.height, self.width)
        places = zip(self.positions[index].tolist(), self.levels[index].tolist())
        shapes = [
            replace(in_cell(f"agent_{i}", "agent", place, grid, BLUE), text=str(level))
            for i, (place, level) in enumerate(places)
        ]
        places = zip(self.foods[index].tolist(), self.food_levels[index].tolist())
        for i, (place, level) in enumerate(places):
            shape = in_cell(f"food_{i}", "goal", place, grid, GREEN, visible=level > 0)
            shapes.append(replace(shape, text=str(level)))
        return shapes

    def stage(self) -> Stage:
        """Returns the view of the field."""
        return grid_stage("level_based_foraging", self.height, self.width)


def _read_field_size(field_size: Any) -> tuple[int, int]:
    """Returns height and width; raises an error for anything else."""
    if isinstance(field_size, str) or not isinstance(field_size, Sequence) or len(field_size) != 2:
        raise ConfigError(
            f"LevelBasedForaging: field_size is {field_size!r}, expected height and width, such as "
            "[8, 8]."
        )
    return field_size[0], field_size[1]


def _draw_levels(low: Tensor, high: Tensor) -> Tensor:
    """Returns integers from ``low`` to ``high``, each equally likely."""
    draws = torch.rand(low.shape, device=low.device)
    return low + (draws * (high - low + 1)).long()


def _pack_visible(position: Tensor, level: Tensor, visible: Tensor) -> Tensor:
    """Returns positions and levels of visible entities first, padded by -1, -1 and 0.

    Shapes:
        - position: ``[E, N, K, 2]``; level, visible: ``[E, N, K]``; level also ``[E, 1, K]``
        - returns: ``[E, N, K, 3]``
    """
    values = torch.cat([position, level.expand(visible.shape).unsqueeze(-1)], -1)
    n_slots = visible.shape[-1]
    slot = torch.where(visible, visible.cumsum(-1) - 1, n_slots)  # the last slot is dropped
    empty = values.new_tensor([-1, -1, 0]).expand(*visible.shape[:-1], n_slots + 1, 3)
    packed = empty.scatter(-2, slot.unsqueeze(-1).expand_as(values), values)
    return packed[..., :n_slots, :]


def _food_cells(height: int, width: int) -> tuple[Tensor, Tensor]:
    """Returns the cells where food may be, ``[G]``, and those too near to some food, ``[G, G]``.

    Food is never at the border. No other food is in the cells around it, or two steps away in a
    line.
    """
    cells = torch.arange(height * width)
    row, column = cells // width, cells % width
    inner = (row > 0) & (row < height - 1) & (column > 0) & (column < width - 1)
    rows, columns = ((x - x.unsqueeze(1)).abs() for x in (row, column))
    same_line = (rows == 0) | (columns == 0)
    return inner, (rows.maximum(columns) <= 1) | (same_line & (rows + columns <= 2))
