"""Lever games, in which agents need communication or a convention to coordinate."""

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
from torchrl_marl.envs.symmetries import Labels
from torchrl_marl.envs.toy.roles import declare_team
from torchrl_marl.envs.toy.scenes import actions_in, row
from torchrl_marl.errors import ConfigError

__all__ = ["Levers", "MatchingLevers"]


class Levers(MarlEnv):
    """One-step game in which N agents from a pool must pull N different levers.

    In each episode N of the P agents of a pool are drawn without replacement. Each drawn agent
    observes only its index in the pool. The reward of all agents is the fraction of the levers that
    were pulled. A team with
    communication can earn 1. Without communication, the best policy assigns a fixed lever to each
    agent of the pool, and spreads the agents evenly over the levers. It earns ``silent_return``,
    0.6740 for 5 of 500 agents; uniform random actions earn 0.6723.

    Agents must not know their position in the team, or they would need no communication. So do not
    use ``sharing: none``, ``agent_id``, or a network that runs along the agents.

    Args:
        num_envs (int): number E of parallel envs.

    Keyword Args:
        n_agents (int): number N of agents in a team, which is also the number of levers.
        pool (int): number P of agents in the pool.
        max_steps, seed, device, check: as in :class:`MarlEnv`; an episode has one step.

    Shapes:
        - ``("agents", "observation")``: ``[E, N, P]``, the agent's index in the pool, one-hot
        - ``"state"``: ``[E, 1]``, constant, so a critic can only predict the mean reward

    Raises:
        ConfigError: an argument is unknown, or the pool is smaller than the team.

    Reference: Sukhbaatar et al., 2016, https://arxiv.org/abs/1605.07736 (section 4.1).
    Differs: agents are drawn without replacement, because duplicates could not be distinguished.

    Examples:
        >>> env = Levers(2, seed=0)
        >>> env.optimal_return, round(env.silent_return, 4), round(env.random_return, 4)
        (1.0, 0.674, 0.6723)
    """

    optimal_return = 1.0

    def __init__(self, num_envs: int, *, n_agents: int = 5, pool: int = 500, **kwargs: Any) -> None:
        super().__init__(num_envs, **kwargs)
        check_least("Levers", n_agents=(n_agents, 2))
        if pool < n_agents:
            raise ConfigError(
                f"Levers: pool is {pool}, expected {n_agents} or more, for a team of n_agents."
            )
        self.n_agents, self.pool = n_agents, pool
        declare_team(self, n_agents, pool, n_agents, 1)

    # ------------------------------------------------------------------------- known returns

    @property
    def random_return(self) -> float:
        """Expected return of the uniform random policy."""
        return 1 - (1 - 1 / self.n_agents) ** self.n_agents

    @property
    def silent_return(self) -> float:
        """Expected return of the best policy without communication."""
        n, pool = self.n_agents, self.pool
        teams = math.comb(pool, n)
        agents_per_lever = [pool // n + (lever < pool % n) for lever in range(n)]
        return 1 - sum(math.comb(pool - n_agents, n) for n_agents in agents_per_lever) / teams / n

    # ------------------------------------------------------------------------------ dynamics

    def _reset(self, tensordict: TensorDictBase | None) -> dict[str, Any]:
        draws = torch.rand(self.num_envs, self.pool, device=self.device)
        self.who = draws.topk(self.n_agents, -1).indices  # drawn without replacement
        return self._observe()

    def _step(self, tensordict: TensorDictBase) -> dict[str, Any]:
        pulled = one_hot(tensordict["agents", "action"], self.n_agents).amax(1)
        reward = pulled.float().mean(-1).view(-1, 1, 1).repeat(1, self.n_agents, 1)
        output = self._observe(reward=reward)
        return {**output, "terminated": torch.ones_like(self.who[:, :1], dtype=torch.bool)}

    def _observe(self, **leaves: Tensor) -> dict[str, Any]:
        observation = one_hot(self.who, self.pool).float()
        state = observation.new_zeros(self.num_envs, 1)
        return {"agents": {"observation": observation, **leaves}, "state": state}

    # ------------------------------------------------------------------------------- drawing

    def scene(self, index: int = 0, step: TensorDictBase | None = None) -> list[Shape]:
        """Returns a drawing of agents, each below its lever, green if no other agent pulled it."""
        pulled = actions_in(self, step)
        is_unique = [lever != "" and pulled.count(lever) == 1 for lever in pulled]
        above = [f"lever {lever}" if lever else "" for lever in pulled]
        return row(self, list(map(str, self.who[index].tolist())), above, (), is_unique)


class MatchingLevers(MarlEnv):
    """Repeated game in which two partners earn 1 if both pull the same lever.

    Each agent observes the partner's last lever. Agents that were trained together agree on a lever
    and earn ``optimal_return``, which is 8. If two agents were trained with other partners, each
    uses the lever on which it agreed with its former partner. So they match only by coincidence,
    and earn ``random_return`` on average, which is 2. An agent that guesses once and then copies a
    partner with a fixed lever earns ``adaptive_return``, 7.25. This is the best return with an
    unknown partner.

    With ``n_levers=10, rounds=1, last_lever=0.9`` it is the lever game of Other-Play. Nine levers
    pay 1 and look alike, so strangers who pull one of them match with probability 1/9. The best
    that strangers can do is to pull the last lever, ``stranger_return``.

    Args:
        num_envs (int): number E of parallel envs.

    Keyword Args:
        n_levers (int): number L of levers.
        rounds (int): number of rounds in an episode.
        last_lever (float): reward if both pull the last lever; the others pay 1.
        max_steps, seed, device, check: as in :class:`MarlEnv`.

    Shapes:
        - ``("agents", "observation")``: ``[E, 2, L]``, the partner's last lever, one-hot; zeros in
          the first step
        - ``"state"``: ``[E, 2 * L]``

    Raises:
        ConfigError: an argument is unknown, or a number is invalid.

    Reference: Hu et al., 2020, https://arxiv.org/abs/2003.02979 (the lever game; zero-shot
    coordination). Reduces to: its lever game, with ``n_levers=10, rounds=1, last_lever=0.9``.

    Examples:
        >>> env = MatchingLevers(2)
        >>> env.optimal_return, env.adaptive_return, env.random_return
        (8.0, 7.25, 2.0)
        >>> env = MatchingLevers(2, n_levers=10, rounds=1, last_lever=0.9)
        >>> env.optimal_return, env.stranger_return
        (1.0, 0.9)
    """

    def __init__(
        self,
        num_envs: int,
        *,
        n_levers: int = 4,
        rounds: int = 8,
        last_lever: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_envs, **kwargs)
        if n_levers < 2 or rounds < 1:
            raise ConfigError(
                f"MatchingLevers: n_levers is {n_levers} and rounds {rounds}, expected 2 or more "
                "levers and 1 or more rounds."
            )
        if last_lever != 1 and (rounds > 1 or n_levers < 3 or last_lever < 0):
            raise ConfigError(
                f"MatchingLevers: last_lever is {last_lever} with {n_levers} levers and {rounds} "
                "rounds, expected 0 or more, 3 or more levers and rounds=1, or last_lever=1."
            )
        self.n_levers, self.rounds, self.last_lever = n_levers, rounds, last_lever
        declare_team(self, 2, n_levers, n_levers, 2 * n_levers)

    @property
    def optimal_return(self) -> float:
        """Return of partners that always pull the same lever, the best one."""
        return self._rounds_per_episode * max(1.0, self.last_lever)

    @property
    def adaptive_return(self) -> float:
        """Best expected return with a partner that always pulls the same, unknown lever."""
        return 1 / self.n_levers + self._rounds_per_episode - 1

    @property
    def random_return(self) -> float:
        """Returns the expected return of the uniform random policy."""
        return self._rounds_per_episode * (self.n_levers - 1 + self.last_lever) / self.n_levers**2

    @property
    def stranger_return(self) -> float:
        """Best expected return of one round, for partners with the same symmetric strategy."""
        n_equal = self.n_levers - (self.last_lever != 1)
        return max(1 / n_equal, self.last_lever if n_equal < self.n_levers else 0.0)

    def symmetries(self) -> dict[str, Labels]:
        """Returns the levers that pay the same, which can be exchanged."""
        levers = list(range(self.n_levers))
        if self.last_lever != 1:
            levers[-1] = -1
        return {"agents": Labels(levers, levers)}

    @property
    def _rounds_per_episode(self) -> int:
        return self.rounds if self.max_steps is None else min(self.rounds, self.max_steps)

    def _reset(self, tensordict: TensorDictBase | None) -> dict[str, Any]:
        self.played = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        shape = (self.num_envs, 2, self.n_levers)
        self.last = torch.zeros(shape, device=self.device)
        return self._observe()

    def _step(self, tensordict: TensorDictBase) -> dict[str, Any]:
        levers = tensordict["agents", "action"]
        matches = (levers[:, 0] == levers[:, 1]).float().view(-1, 1, 1)
        if self.last_lever != 1:
            pulled_last = (levers[:, :1] == self.n_levers - 1).unsqueeze(-1)
            matches = torch.where(pulled_last, self.last_lever * matches, matches)
        self.last = one_hot(levers, self.n_levers).float()
        self.played = self.played + 1
        ended = (self.played == self.rounds).unsqueeze(-1)
        return {**self._observe(reward=matches.repeat(1, 2, 1)), "terminated": ended}

    def _observe(self, **leaves: Tensor) -> dict[str, Any]:
        partner = self.last.flip(1)
        return {"agents": {"observation": partner, **leaves}, "state": partner.flatten(1)}

    # ------------------------------------------------------------------------------- drawing

    def scene(self, index: int = 0, step: TensorDictBase | None = None) -> list[Shape]:
        """Returns a drawing of both partners; the levers above them are green if they are equal."""
        pulled = actions_in(self, step)
        above = [f"lever {lever}" if lever else "" for lever in pulled]
        inside = list(map(str, range(1, 3)))
        return row(self, inside, above, (), [pulled[0] == pulled[1]] * 2)
