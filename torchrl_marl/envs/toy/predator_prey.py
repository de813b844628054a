"""Predators that search a grid for a prey that does not move, and can call each other.

Shapes: E envs, N predators, G cells, W cells of a window.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.nn.functional import one_hot

from torchrl_marl.envs.agents.declaration import check_least
from torchrl_marl.envs.marl_env import MarlEnv
from torchrl_marl.envs.scene import Shape, Stage
from torchrl_marl.envs.toy.roles import declare_team
from torchrl_marl.envs.toy.scenes import grid_stage, in_cell, windows
from torchrl_marl.errors import ConfigError

__all__ = ["PredatorPrey"]

MODES = ("mixed", "cooperative", "competitive")
STEP_PENALTY, PREY_REWARD = -0.05, 0.05
_BLUE, _GREEN = (0.35, 0.35, 0.75), (0.25, 0.75, 0.25)


class PredatorPrey(MarlEnv):
    """Grid environment in which all predators must reach a prey that is visible only from nearby.

    Predators and prey start in different cells. A predator moves up, right, down or left, or stays.
    Walls stop it, other predators do not. It observes each cell within ``vision``: the cell's
    index, whether the prey is there, and the number of predators there. With ``vision=0`` it
    observes only the cell in which it is. So it does not see predators in other cells, and sees the
    prey only after reaching it. A predator that has reached the prey stays there.

    The length of the episode measures how good the predators are. With communication, predators can
    divide the grid among them, and the first that finds the prey can call the others. A
    hand-written policy, in which each predator walks to the nearest unvisited cell, takes 8.9 of 20
    steps. Predators that know the prey's cell from the start take ``informed_length`` steps, here
    4.7.

    In each step a predator that has not reached the prey earns -0.05. A predator that has reached
    it earns a reward that depends on ``mode``:

    - ``mixed``: 0; the episode ends when all predators have reached the prey;
    - ``cooperative``: 0.05 times the number of predators at the prey, until the time limit;
    - ``competitive``: 0.05 divided by the number of predators at the prey, until the time limit.

    Args:
        num_envs (int): number E of parallel envs.

    Keyword Args:
        n_agents (int): number N of predators; in the paper 3 (easy), 5 (medium) or 10 (hard).
        size (int): height and width of the grid; in the paper 5 (easy), 10 (medium) or 20 (hard).
        vision (int): visible distance in each direction, in cells; in the paper 0 (easy) or 1
            (medium and hard).
        mode (str): reward at the prey: ``mixed``, ``cooperative`` or ``competitive``.
        agent_states (bool): True if each predator has its own state, which only its critic reads.
        max_steps (int, optional): time limit in steps, 20 by default; in the paper 20, 40 or 80.
        seed, device, check: as in :class:`MarlEnv`.

    Shapes:
        - ``("agents", "observation")``: ``[E, N, W * (G + 3)]``: for each cell of the window, its
          index, one-hot (index G is outside the grid), a flag for the prey, and the number of
          predators
        - ``"state"``: ``[E, N * G + G]``, the cells of the predators and of the prey
        - ``("agents", "state")``: ``[E, N, 2 * G]``, the predator's cell and the prey's

    Raises:
        ConfigError: an argument is unknown, or a number is invalid.

    Reference: Singh et al., 2019, https://arxiv.org/abs/1812.09755 (section 4.1), and the rules in
    https://github.com/IC3Net/IC3Net.

    Examples:
        >>> env = PredatorPrey(2, seed=0)
        >>> env.rollout(20)["agents", "observation"].shape
        torch.Size([2, 20, 3, 28])
        >>> round(env.informed_length, 2)
        4.68
    """

    def __init__(
        self,
        num_envs: int,
        *,
        n_agents: int = 3,
        size: int = 5,
        vision: int = 0,
        mode: str = "mixed",
        agent_states: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_envs, **{"max_steps": 20, **kwargs})
        check_least("PredatorPrey", n_agents=(n_agents, 1), size=(size, 2), vision=(vision, 0))
        if size * size <= n_agents:
            raise ConfigError(
                f"PredatorPrey: {n_agents} predators and a prey do not fit into {size * size} "
                "cells; use a larger size."
            )
        if mode not in MODES:
            raise ConfigError(
                f"PredatorPrey: mode is {mode!r}, expected one of {', '.join(MODES)}."
            )
        self.n_agents, self.size, self.mode = n_agents, size, mode
        self.agent_states = agent_states
        self.windows = windows(size, size, vision).to(self.device)
        n_cells, n_seen = self.windows.shape
        moves = [[-1, 0], [0, 1], [1, 0], [0, -1], [0, 0]]
        self.moves = torch.tensor(moves, device=self.device)
        n_state, n_own = (n_agents + 1) * n_cells, 2 * n_cells if agent_states else None
        n_seen = n_seen * (n_cells + 3)
        declare_team(self, n_agents, n_seen, len(moves), n_state, "predator", n_own)

    @property
    def informed_length(self) -> float:
        """Mean length of an episode in steps if all predators know the prey's cell.

        This is a lower bound for predators that search. It ignores the time limit.
        """
        row, column = (
            x.flatten() for x in torch.meshgrid([torch.arange(self.size)] * 2, indexing="ij")
        )
        distances = (row - row.view(-1, 1)).abs() + (column - column.view(-1, 1)).abs()  # [G, G]
        others = self.size**2 - 1
        length = 0.0
        for steps in range(2 * self.size - 1):
            counts = (
                ((distances > 0) & (distances <= steps)).sum(0).tolist()
            )  # number of cells within this many steps of the prey, by the prey's cell
            teams = math.comb(others, self.n_agents)
            p_arrived = sum(math.comb(n, self.n_agents) for n in counts) / teams / len(counts)
            length += 1 - p_arrived
        return length

    # ------------------------------------------------------------------------------ dynamics

    def _reset(self, tensordict: TensorDictBase | None) -> dict[str, Any]:
        draws = torch.rand(self.num_envs, self.size**2, device=self.device)
        cells = draws.topk(self.n_agents + 1, -1).indices
        places = torch.stack([cells // self.size, cells % self.size], -1)
        self.predators, self.prey = places[:, :-1], places[:, -1:]
        return self._observe()

    def _step(self, tensordict: TensorDictBase) -> dict[str, Any]:
        targets = self.predators + self.moves[tensordict["agents", "action"]]
        targets = targets.clamp(0, self.size - 1)
        self.predators = torch.where(self.caught.unsqueeze(-1), self.predators, targets)
        caught = self.caught
        reward = torch.where(caught, self._prey_rewards(caught), STEP_PENALTY)
        ended = caught.all(1, keepdim=True) & (self.mode == "mixed")
        return {**self._observe(reward=reward.unsqueeze(-1)), "terminated": ended}

    @property
    def caught(self) -> Tensor:
        """Mask of the predators that have reached the prey, ``[E, N]``."""
        return (self.predators == self.prey).all(-1)

    def _prey_rewards(self, caught: Tensor) -> Tensor:
        """Returns the reward of predators that have reached the prey, ``[E, 1]``."""
        n_there = caught.sum(1, keepdim=True)
        if self.mode == "cooperative":
            return PREY_REWARD * n_there
        if self.mode == "competitive":
            return PREY_REWARD / n_there.clamp_min(1)
        return torch.zeros_like(n_there, dtype=torch.float32)

    def _observe(self, **leaves: Tensor) -> dict[str, Any]:
        n_cells = self.size**2
        predators, prey = (x[..., 0] * self.size + x[..., 1] for x in (self.predators, self.prey))
        visible = self.windows[predators]  # [E, N, W]
        cell_counts = [
            one_hot(x, n_cells + 1).sum(1).float() for x in (prey, predators)
        ]  # [E, G + 1]
        rows = visible.flatten(1)
        counts = [x.gather(1, rows).view(*visible.shape, 1) for x in cell_counts]
        observation = torch.cat([one_hot(visible, n_cells + 1).float(), *counts], -1).flatten(2)
        cells = one_hot(torch.cat([predators, prey], 1), n_cells).float()  # [E, N + 1, G]
        if self.agent_states:
            agent_states = torch.cat([cells[:, :-1], cells[:, -1:].expand_as(cells[:, :-1])], -1)
            leaves = {"state": agent_states, **leaves}
        return {"agents": {"observation": observation, **leaves}, "state": cells.flatten(1)}

    # ------------------------------------------------------------------------------- drawing

    def scene(self, index: int = 0) -> list[Shape]:
        """Returns a drawing of one env, as a list of shapes that begins with the predators."""
        grid = (self.size, self.size)
        predators, prey = self.predators[index].tolist(), self.prey[index, 0].tolist()
        turns = [2 * math.pi * i / self.n_agents for i in range(self.n_agents)]
        shapes = [
            in_cell(f"predator_{i}", "agent", place, grid, _BLUE, size=0.5, turn=turn)
            for i, (place, turn) in enumerate(zip(predators, turns))
        ]
        return [*shapes, in_cell("prey", "goal", prey, grid, _GREEN, size=0.9)]

    def stage(self) -> Stage:
        """Returns the view of the grid."""
        return grid_stage("predator_prey", self.size, self.size)
