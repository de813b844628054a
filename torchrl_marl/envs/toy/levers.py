"""A world in which each agent must pull another lever, which takes words.

Shapes: E envs, N agents, P agents of the pool.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.nn.functional import one_hot
from torchrl.data import Categorical, Unbounded

from torchrl_marl.envs.marl_env import MarlEnv
from torchrl_marl.envs.scene import Shape
from torchrl_marl.envs.toy.scenes import actions_in, row
from torchrl_marl.errors import ConfigError
from torchrl_marl.specs import AgentSpec

__all__ = ["Levers"]


class Levers(MarlEnv):
    """Agents drawn out of a pool pull one of N levers each, and want to pull different ones.

    In each episode, of one step, N of the P agents of a pool are drawn without replacement. Each
    sees only which one it is, and all earn the share of the levers that were pulled. A team that
    talks earns 1. Without a word the best is a lever for each agent of the pool, dealt out as
    evenly as can be: ``silent_return``, 0.6740 of 5 out of 500, where uniform random actions earn
    0.6723.

    Which place an agent has in the team, it must not know: a network of its own for each place
    (``sharing: none``, ``agent_id``, a network that runs along the team) knows its lever without
    a word.

    Args:
        num_envs (int): number E of vectorized envs.

    Keyword Args:
        n_agents (int): number N of agents of a team, and of levers.
        pool (int): number P of agents from which a team is drawn.
        max_steps, seed, device, check: as in :class:`MarlEnv`; an episode has one step.

    Shapes:
        - ``("agents", "observation")``: ``[E, N, P]``, which agent of the pool one is
        - ``"state"``: ``[E, 1]``, nothing: a critic gives the mean reward

    Raises:
        ConfigError: an unknown argument, or a pool that has no team.

    Reference: Sukhbaatar et al., 2016, https://arxiv.org/abs/1605.07736 (section 4.1).
    Differs: agents are drawn without replacement; twins could not be told apart.

    Examples:
        >>> env = Levers(2, seed=0)
        >>> env.optimal_return, round(env.silent_return, 4), round(env.random_return, 4)
        (1.0, 0.674, 0.6723)
    """

    optimal_return = 1.0

    def __init__(self, num_envs: int, *, n_agents: int = 5, pool: int = 500, **kwargs: Any) -> None:
        super().__init__(num_envs, **kwargs)
        if n_agents < 2:
            raise ConfigError(f"Levers: n_agents is {n_agents}, expected 2 or more.")
        if pool < n_agents:
            raise ConfigError(
                f"Levers: pool is {pool}, expected {n_agents} or more, the agents of a team."
            )
        self.n_agents, self.pool = n_agents, pool
        self.register_agent(
            AgentSpec("agent", n_agents, Unbounded((pool,)), Categorical(n_agents)), group="agents"
        )
        self.register_state(Unbounded((1,)))

    # ------------------------------------------------------------------------- known returns

    @property
    def random_return(self) -> float:
        """Returns the expected return of the uniform random policy."""
        return 1 - (1 - 1 / self.n_agents) ** self.n_agents

    @property
    def silent_return(self) -> float:
        """Returns the expected return of the best policy that hears nothing."""
        n, pool = self.n_agents, self.pool
        teams = math.comb(pool, n)
        owners = [pool // n + (lever < pool % n) for lever in range(n)]
        return 1 - sum(math.comb(pool - own, n) for own in owners) / teams / n

    # ------------------------------------------------------------------------------ dynamics

    def _reset(self, tensordict: TensorDictBase | None) -> dict[str, Any]:
        draws = torch.rand(self.num_envs, self.pool, device=self.device)
        self.who = draws.topk(self.n_agents, -1).indices  # without replacement, in any order
        return self._observe()

    def _step(self, tensordict: TensorDictBase) -> dict[str, Any]:
        pulled = one_hot(tensordict["agents", "action"], self.n_agents).amax(1)
        reward = pulled.float().mean(-1).view(-1, 1, 1).repeat(1, self.n_agents, 1)
        out = self._observe(reward=reward)
        return {**out, "terminated": torch.ones_like(self.who[:, :1], dtype=torch.bool)}

    def _observe(self, **leaves: Tensor) -> dict[str, Any]:
        seen = one_hot(self.who, self.pool).float()
        state = seen.new_zeros(self.num_envs, 1)
        return {"agents": {"observation": seen, **leaves}, "state": state}

    # ------------------------------------------------------------------------------- drawing

    def scene(self, index: int = 0, step: TensorDictBase | None = None) -> list[Shape]:
        """Returns the agents by their numbers; above their levers, green if it is theirs alone."""
        pulled = actions_in(self, step)
        good = [word != "" and pulled.count(word) == 1 for word in pulled]
        above = [f"lever {word}" if word else "" for word in pulled]
        return row(self, list(map(str, self.who[index].tolist())), above, (), good)
