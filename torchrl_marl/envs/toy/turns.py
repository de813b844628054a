"""Small environments with known returns, in which agents take turns or act at different rates.

Shapes: E envs, N agents, A answers, S stones of the largest heap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.nn.functional import one_hot

from torchrl_marl.envs.marl_env import MarlEnv
from torchrl_marl.envs.scene import Shape
from torchrl_marl.envs.toy.roles import declare_players, declare_team, zero_sum_step
from torchrl_marl.envs.toy.scenes import GRAY, actions_in, earned_in, players, row
from torchrl_marl.errors import ConfigError

__all__ = ["Nim", "Paces"]


class Nim(MarlEnv):
    """Game in which two players take stones from a heap in turns; taking the last stone wins.

    The heap has a random number of 1 to S stones. In each move a player takes 1 to ``most`` stones.
    When the last stone is taken, the winner earns 1 and the loser -1; the loser receives its reward
    in the winner's turn. A player that leaves a multiple of ``most + 1`` stones can always win. The
    first player's return is ``optimal_return`` if both play optimally, and ``random_return`` if
    both play at random.

    Args:
        num_envs (int): number E of parallel envs.

    Keyword Args:
        stones (int): number S of stones in the largest heap.
        most (int): largest number of stones in a move.
        max_steps, seed, device, check: as in :class:`MarlEnv`.

    Shapes:
        - ``("first", "observation")``, ``("second", "observation")``: ``[E, 1, S + 1]``, the
          number of stones, one-hot; ``"action_mask"``: ``[E, 1, most]``, all False for the player
          that waits
        - ``"state"``: ``[E, S + 1]``

    Raises:
        ConfigError: an argument is unknown, or ``most`` is larger than the largest heap.

    Reference: Bouton, 1901, https://doi.org/10.2307/1967631.

    Examples:
        >>> env = Nim(2, stones=4, most=3)
        >>> env.optimal_return  # 1, 2 and 3 stones are won, 4 are lost
        0.5
    """

    in_turns = True

    def __init__(self, num_envs: int, *, stones: int = 10, most: int = 3, **kwargs: Any) -> None:
        super().__init__(num_envs, **kwargs)
        if not 1 <= most <= stones:
            raise ConfigError(f"Nim: most is {most}, expected 1 to {stones}, the largest heap.")
        self.largest, self.most = stones, most
        declare_players(self, stones + 1, (most, most), stones + 1, action_mask=True)

    @property
    def optimal_return(self) -> float:
        """The first player's return if both play optimally."""
        lost = self.largest // (self.most + 1)
        return 1 - 2 * lost / self.largest

    @property
    def random_return(self) -> float:
        """The first player's expected return if both play at random."""
        values = [-1.0]
        for n_stones in range(1, self.largest + 1):
            next_values = values[-min(n_stones, self.most) :]
            values.append(-sum(next_values) / len(next_values))
        return sum(values[1:]) / self.largest

    def _reset(self, tensordict: TensorDictBase | None) -> dict[str, Any]:
        self.heap = torch.randint(1, self.largest + 1, (self.num_envs,), device=self.device)
        self.second_moves = torch.zeros_like(self.heap, dtype=torch.bool)
        return self._observe()

    def _step(self, tensordict: TensorDictBase) -> dict[str, Any]:
        first, second = (tensordict[name, "action"].squeeze(-1) for name in self.group_map)
        takes = 1 + torch.where(self.second_moves, second, first)
        self.heap = (self.heap - takes).clamp_min(0)
        won = (self.heap == 0).float()
        first_wins = torch.where(self.second_moves, -won, won)
        self.second_moves = ~self.second_moves
        return zero_sum_step(self._observe(), first_wins, (self.heap == 0).unsqueeze(-1))

    def _observe(self) -> dict[str, Any]:
        observation = one_hot(self.heap, self.largest + 1).float()
        legal = torch.arange(self.most, device=self.device) < self.heap.unsqueeze(-1)
        output: dict[str, Any] = {"state": observation}
        for name, moves in (("first", ~self.second_moves), ("second", self.second_moves)):
            moves = moves.unsqueeze(-1)
            mask = (legal & moves).unsqueeze(1)
            output[name] = {
                "observation": observation.unsqueeze(1),
                "mask": moves,
                "action_mask": mask,
            }
        return output

    # ------------------------------------------------------------------------------- drawing

    def scene(self, index: int = 0, step: TensorDictBase | None = None) -> list[Shape]:
        """Returns a drawing of the players and the stones between them."""
        labels = [f"takes {int(action) + 1}" if action else "" for action in actions_in(self, step)]
        shapes = players(self, labels, [(-2.5, 0.0), (self.largest * 0.7 + 1.8, 0.0)])
        n_stones = int(self.heap[index])
        for i in range(self.largest):
            look: dict[str, Any] = {"radius": 0.28, "visible": i < n_stones}
            shapes.append(Shape(f"stone {i}", "object", "circle", 0.7 * i, 0.0, 0.0, GRAY, **look))
        return shapes


class Paces(MarlEnv):
    """Environment in which agents answer cues at different rates.

    Agent i is born after ``i * late_spawn`` steps, and then answers a random cue in every
    ``paces[i]``-th step. A right answer earns ``1 / paces[i]`` in that step and in each step until
    the agent's next turn; a wrong answer earns nothing. So in each step the best team earns the
    mean of ``1 / pace`` over the agents that are born; the optimal return is the sum of these means
    over all steps. Random answers earn ``1 / A`` of the optimal return.

    Args:
        num_envs (int): number E of parallel envs.

    Keyword Args:
        paces (sequence of int): number of steps from one turn to the next, for each of the N
            agents.
        late_spawn (int): number of steps between births.
        n_actions (int): number A of answers.
        max_steps, seed, device, check: as in :class:`MarlEnv`; an episode without a time limit
            never ends.

    Shapes:
        - ``("agents", "observation")``: ``[E, N, A + 1]``: the cue, one-hot (zeros for agents
          that wait), and the number of steps until the agent's next turn, divided by its pace
        - ``"state"``: ``[E, N * (A + 1)]``

    Raises:
        ConfigError: an argument is unknown, or a number is invalid.

    Examples:
        >>> env = Paces(2, paces=(1, 2), max_steps=8)
        >>> env.optimal_return  # 8 * (1 + 1 / 2) / 2
        6.0
        >>> env.rollout(3)["agents", "mask"][0].tolist()
        [[True, True], [True, False], [True, True]]
    """

    def __init__(
        self,
        num_envs: int,
        *,
        paces: Sequence[int] = (1, 2, 3),
        late_spawn: int = 0,
        n_actions: int = 4,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_envs, **kwargs)
        if not paces or min(paces) < 1 or late_spawn < 0 or n_actions < 2:
            raise ConfigError(
                f"Paces: paces={list(paces)}, late_spawn={late_spawn}, n_actions={n_actions}; "
                "expected paces of 1 or more, late_spawn of 0 or more, n_actions of 2 or more."
            )
        self.n_actions = n_actions
        self.paces = torch.tensor(paces, device=self.device)
        self.births = late_spawn * torch.arange(len(paces), device=self.device)
        declare_team(self, len(paces), n_actions + 1, n_actions, len(paces) * (n_actions + 1))

    @property
    def optimal_return(self) -> float:
        """Return of the best policy; a step's rewards are averaged over the agents then born."""
        if self.max_steps is None:
            return math.inf
        born = self.births.unsqueeze(-1) <= torch.arange(self.max_steps, device=self.device)
        return ((born / self.paces.unsqueeze(-1)).sum(0) / born.sum(0)).sum().item()

    @property
    def random_return(self) -> float:
        """Expected return of the uniform random policy."""
        return self.optimal_return / self.n_actions

    def _reset(self, tensordict: TensorDictBase | None) -> dict[str, Any]:
        self.waits = self.births.expand(self.num_envs, -1).clone()
        self.right = torch.zeros(self.waits.shape, device=self.device)
        return self._observe()

    def _step(self, tensordict: TensorDictBase) -> dict[str, Any]:
        is_active = self.waits == 0
        is_right = (tensordict["agents", "action"] == self.cue).float()
        self.right = torch.where(is_active, is_right, self.right)
        self.waits = torch.where(is_active, self.paces, self.waits) - 1
        return self._observe(reward=(self.right / self.paces).unsqueeze(-1))

    def _observe(self, **reward: Tensor) -> dict[str, Any]:
        self.cue = torch.randint(self.n_actions, self.waits.shape, device=self.device)
        is_active = (self.waits == 0).unsqueeze(-1)
        waiting_time = (self.waits / self.paces).unsqueeze(-1)
        observation = torch.cat([one_hot(self.cue, self.n_actions) * is_active, waiting_time], -1)
        agents = {"observation": observation, "mask": is_active.squeeze(-1), **reward}
        return {"agents": agents, "state": observation.flatten(1)}

    # ------------------------------------------------------------------------------- drawing

    def scene(self, index: int = 0, step: TensorDictBase | None = None) -> list[Shape]:
        """Returns a drawing of the agents with cues and waiting times; above each is its answer."""
        waits, cue = self.waits[index].tolist(), self.cue[index].tolist()
        inside = ["" if wait else str(own) for wait, own in zip(waits, cue)]
        below = [f"in {wait}" if wait else "" for wait in waits]
        earns = [value > 0 for value in earned_in(self, step)]
        return row(self, inside, actions_in(self, step), below, earns)
