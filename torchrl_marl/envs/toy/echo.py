"""An environment that requires memory or communication, with a known optimal return.

Shapes: E envs, N agents, K symbols.
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
from torchrl_marl.envs.scene import Shape
from torchrl_marl.envs.toy.roles import declare_team
from torchrl_marl.envs.toy.scenes import actions_in, earned_in, row

__all__ = ["Echo"]

_NEVER_DIES = 2**31


class Echo(MarlEnv):
    """Environment in which each agent names a symbol that it, or another agent, saw earlier.

    In each step every agent sees a random symbol, and names a symbol. It earns 1 if it names the
    symbol that was seen ``lag`` steps ago by the agent ``hop`` positions after it. Nothing is
    earned in the first ``lag`` steps. ``hop=0`` requires only memory, ``lag=0`` only communication.
    Agents without the required skill can only guess, and earn ``1 / K`` per step.

    With ``late_spawn`` agent i is born after ``i * late_spawn`` steps, and with ``years`` it lives
    for ``(i + 1) * years`` steps. Positions are then counted among the agents that were alive when
    the symbol was seen. If the agent itself was not alive then, or was alone, the right answer is
    symbol 0. So the return drops if memory is stale, agents are mixed up, or dead agents send
    messages.

    Args:
        num_envs (int): number E of parallel envs.

    Keyword Args:
        n_agents (int): number N of agents.
        n_symbols (int): number K of symbols.
        lag (int): number of steps between a symbol and the answer.
        hop (int): number of positions to the agent that saw the symbol; 0 is the agent itself.
        late_spawn (int): number of steps between births; 0 if all agents are born at the reset.
        years (int): agent i lives for ``(i + 1) * years`` steps; 0 if no agent dies.
        answers (bool): True to add the right answers to the state, for critics without memory.
        max_steps (int): time limit in steps; ``max_steps - lag`` answers in an episode can earn.
        seed, device, check: as in :class:`MarlEnv`.

    Shapes:
        - ``("agents", "observation")``: ``[E, N, K + N]``, the symbol and the agent's index
        - ``"state"``: ``[E, N * K]``, all symbols; with the right answers, ``[E, 2 * N * K]``

    Raises:
        ConfigError: an argument is unknown, or a number is invalid.

    Examples:
        >>> env = Echo(2, lag=3, hop=0, max_steps=16, seed=0)
        >>> env.optimal_return, env.random_return
        (13.0, 3.25)
    """

    def __init__(
        self,
        num_envs: int,
        *,
        n_agents: int = 4,
        n_symbols: int = 4,
        lag: int = 3,
        hop: int = 1,
        late_spawn: int = 0,
        years: int = 0,
        answers: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_envs, **{"max_steps": 16, **kwargs})
        self.n_agents, self.n_symbols, self.lag, self.hop = n_agents, n_symbols, lag, hop
        self.tells = answers
        check_least("Echo", n_agents=(n_agents, 1), n_symbols=(n_symbols, 2), lag=(lag, 0))
        check_least("Echo", hop=(hop, 0), late_spawn=(late_spawn, 0), years=(years, 0))
        agents = torch.arange(n_agents, device=self.device)
        self.births = late_spawn * agents
        self.deaths = self.births + (years * (agents + 1) if years else _NEVER_DIES)
        n_state = (1 + answers) * n_agents * n_symbols
        declare_team(self, n_agents, n_symbols + n_agents, n_symbols, n_state)

    # ------------------------------------------------------------------------- known returns

    @property
    def _n_scored_answers(self) -> float:
        """Mean number of answers of an agent in an episode that can earn a reward."""
        limit = math.inf if self.max_steps is None else self.max_steps
        last = torch.where(self.deaths < _NEVER_DIES, self.deaths, math.inf).clamp_max(limit)
        return (last - self.births.clamp_min(self.lag)).clamp_min(0).mean().item()

    @property
    def optimal_return(self) -> float:
        """Return of the best joint policy."""
        return self._n_scored_answers

    @property
    def random_return(self) -> float:
        """Expected return of the uniform random policy."""
        return self._n_scored_answers / self.n_symbols

    # ------------------------------------------------------------------------------ dynamics

    def _reset(self, tensordict: TensorDictBase | None) -> dict[str, Any]:
        self.clock = torch.zeros(self.num_envs, 1, dtype=torch.int64, device=self.device)
        shape = (self.num_envs, self.n_agents, self.lag + 1)
        self.answers = torch.full(shape, -1, device=self.device)  # the next answer comes first
        return self._observe()

    def _step(self, tensordict: TensorDictBase) -> dict[str, Any]:
        right = (tensordict["agents", "action"] == self.answers[..., 0]) & self.alive
        self.clock = self.clock + 1
        dead = (self.clock >= self.deaths).unsqueeze(-1)
        return self._observe(reward=right.float().unsqueeze(-1), terminated=dead)

    @property
    def alive(self) -> Tensor:
        """Returns a mask of living agents, ``[E, N]``."""
        return (self.clock >= self.births) & (self.clock < self.deaths)

    def _observe(self, **leaves: Tensor) -> dict[str, Any]:
        n_agents, alive = self.n_agents, self.alive
        symbols = torch.randint(self.n_symbols, (self.num_envs, n_agents), device=self.device)
        answers = self._symbols_to_name(symbols).unsqueeze(-1)
        self.answers = torch.cat([self.answers[..., 1:], answers], -1)
        identity = torch.eye(n_agents, device=self.device).expand(self.num_envs, n_agents, n_agents)
        encoded_symbols = one_hot(symbols, self.n_symbols) * alive.unsqueeze(-1)
        born = (self.clock >= self.births).expand(self.num_envs, n_agents)
        agents = {
            "observation": torch.cat([encoded_symbols.float(), identity], -1),
            "mask": born,
            **leaves,
        }
        state = [encoded_symbols, self._encode_next_answers()] if self.tells else [encoded_symbols]
        return {"agents": agents, "state": torch.cat(state, -1).flatten(1).float()}

    def _encode_next_answers(self) -> Tensor:
        """Returns this step's right answers, one-hot ``[E, N, K]``; zeros where none exists."""
        answers = self.answers[..., 0]
        return one_hot(answers.clamp_min(0), self.n_symbols) * (answers >= 0).unsqueeze(-1)

    def _symbols_to_name(self, symbols: Tensor) -> Tensor:
        """Returns the symbols that the agents must name ``lag`` steps later, ``[E, N]``."""
        n_agents, alive = self.n_agents, self.alive
        answer = torch.zeros_like(symbols)
        if self.hop == 0:
            return torch.where(alive, symbols, answer)
        n_passed = torch.zeros_like(symbols)  # number of living agents passed so far
        for offset in range(1, n_agents):
            is_alive = alive.roll(-offset, 1)
            n_passed = n_passed + is_alive
            answer = torch.where(
                is_alive & (n_passed == self.hop), symbols.roll(-offset, 1), answer
            )
        return torch.where(alive, answer, 0)

    # ------------------------------------------------------------------------------- drawing

    def scene(self, index: int = 0, step: TensorDictBase | None = None) -> list[Shape]:
        """Returns a drawing of agents with their symbols; right answers above them are green."""
        seen = self._episode["given"]["agents"]["observation"][index, :, : self.n_symbols]
        symbols = seen.argmax(-1).tolist()
        inside = [
            chr(65 + symbol) if is_alive else ""
            for symbol, is_alive in zip(symbols, self.alive[index].tolist())
        ]
        answers = self.answers[index, :, 0].tolist()
        below = [f"asked: {chr(65 + symbol)}" if symbol >= 0 else "" for symbol in answers]
        said = [chr(65 + int(action)) if action else "" for action in actions_in(self, step)]
        good = [value > 0 for value in earned_in(self, step)]
        return row(self, inside, said, below, good)
