"""Small worlds whose exact answers are known. They need no optional package.

Shapes: E envs, N agents of a group, A actions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torch.nn.functional import one_hot
from torchrl.data import Categorical, Unbounded

from torchrl_marl.envs.marl_env import MarlEnv
from torchrl_marl.envs.scene import Shape
from torchrl_marl.envs.toy.arena import Arena
from torchrl_marl.envs.toy.echo import Echo
from torchrl_marl.envs.toy.kuhn import Kuhn
from torchrl_marl.envs.toy.leduc import Leduc
from torchrl_marl.envs.toy.levers import Levers, MatchingLevers
from torchrl_marl.envs.toy.predator_prey import PredatorPrey
from torchrl_marl.envs.toy.scenes import actions_in, matrix, players, row
from torchrl_marl.envs.toy.speaker_listener import SpeakerListener
from torchrl_marl.envs.toy.traffic_junction import TrafficJunction
from torchrl_marl.envs.toy.turns import Nim, Paces
from torchrl_marl.envs.toy.zero_sum import ZeroSum
from torchrl_marl.errors import ConfigError, nearest
from torchrl_marl.specs import AgentSpec

__all__ = [
    "TOY_ENVS",
    "Arena",
    "Echo",
    "Kuhn",
    "Leduc",
    "Levers",
    "MatchingLevers",
    "MatrixGame",
    "Nim",
    "Paces",
    "PredatorPrey",
    "SpeakerListener",
    "TrafficJunction",
    "TwoStepGame",
    "ZeroSum",
]

PAYOFFS = {
    "climbing": [[11.0, -30.0, 0.0], [-30.0, 7.0, 6.0], [0.0, 0.0, 5.0]],
    "penalty": [[10.0, 0.0, -10.0], [0.0, 2.0, 0.0], [-10.0, 0.0, 10.0]],
    "coordination": [[10.0, 0.0], [0.0, 5.0]],
}


class MatrixGame(MarlEnv):
    """All agents choose once and share the entry of the payoff matrix.

    The optimal return is the matrix's largest entry, 11 for ``climbing``; the uniform random
    policy's is its mean, -3.44. In ``climbing`` the best joint action lies beside the worst
    ones, so learners that each go their own way settle for less.

    Args:
        num_envs (int): number E of vectorized envs.

    Keyword Args:
        payoff (str or nested list): ``climbing``, ``penalty``, ``coordination``, or one's own,
            of shape ``[A] * N``.
        max_steps, seed, device, check: as in :class:`MarlEnv`.

    Shapes:
        - ``("agents", "observation")``: ``[E, N, N]``, which agent one is; ``"state"``: ``[E, 1]``

    Raises:
        ConfigError: an unknown payoff or argument.

    Reference: Claus and Boutilier, 1998, https://cdn.aaai.org/AAAI/1998/AAAI98-106.pdf.

    Examples:
        >>> env = MatrixGame(2, payoff="coordination")
        >>> env.optimal_return, env.random_return
        (10.0, 3.75)
    """

    def __init__(
        self,
        num_envs: int,
        *,
        payoff: str | Sequence[Any] | Tensor = "climbing",
        **kwargs: Any,
    ) -> None:
        super().__init__(num_envs, **kwargs)
        if isinstance(payoff, str) and payoff not in PAYOFFS:
            raise ConfigError(
                f"MatrixGame: unknown payoff {payoff!r}; {nearest(payoff, PAYOFFS)}"
                f"expected one of {sorted(PAYOFFS)}, or a matrix."
            )
        matrix = PAYOFFS[payoff] if isinstance(payoff, str) else payoff
        self.payoff = torch.as_tensor(matrix, dtype=torch.float32, device=self.device)
        n, sizes = self.payoff.ndim, set(self.payoff.shape)
        if len(sizes) != 1:
            raise ConfigError(
                f"MatrixGame: payoff has shape {list(self.payoff.shape)}; expected one dim an "
                "agent, all of one size."
            )
        self.register_agent(
            AgentSpec("agent", n, Unbounded((n,)), Categorical(sizes.pop())), group="agents"
        )
        self.register_state(Unbounded((1,)))

    @property
    def optimal_return(self) -> float:
        """Returns the return of the best joint policy."""
        return self.payoff.max().item()

    @property
    def random_return(self) -> float:
        """Returns the expected return of the uniform random policy."""
        return self.payoff.mean().item()

    def _reset(self, tensordict: TensorDictBase | None) -> TensorDict:
        return self._observe()

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        reward = self.payoff[tensordict["agents", "action"].unbind(-1)]
        out = self._observe()
        out["agents", "reward"] = reward.view(-1, 1, 1).repeat(1, self.payoff.ndim, 1)
        out["terminated"] = torch.ones(self.num_envs, 1, dtype=torch.bool, device=self.device)
        return out

    def _observe(self) -> TensorDict:
        identity = torch.eye(self.payoff.ndim, device=self.device)
        return TensorDict(
            {
                "agents": {"observation": identity.repeat(self.num_envs, 1, 1)},
                "state": torch.ones(self.num_envs, 1, device=self.device),
            },
            [self.num_envs],
        )

    # ------------------------------------------------------------------------------- drawing

    def scene(self, index: int = 0, step: TensorDictBase | None = None) -> list[Shape]:
        """Returns the payoff matrix, the first agent in rows; the chosen entry is marked."""
        did = actions_in(self, step)
        if self.payoff.ndim != 2:
            return row(self, [str(i) for i in range(self.payoff.ndim)], did)
        chosen = None if step is None else (int(did[0]), int(did[1]))
        middle = -(self.payoff.shape[0] - 1) / 2
        shapes = players(self, ["", ""], [(-1.2, middle), (-middle, 1.3)])
        return shapes + matrix(self.payoff, chosen)


class TwoStepGame(MarlEnv):
    """The two-step game of the QMIX paper: a safe 7, or 8 if both agents agree.

    First agent 0 chooses the second step's matrix: all sevens, or ``[[0, 1], [1, 8]]``. The
    optimal return is 8, the uniform random policy's 4.75.

    Args:
        num_envs (int): number E of vectorized envs.

    Keyword Args:
        max_steps, seed, device, check: as in :class:`MarlEnv`.

    Shapes:
        - ``("agents", "observation")``: ``[E, 2, 5]``, where one is and which agent
        - ``"state"``: ``[E, 3]``

    Raises:
        ConfigError: an unknown argument.

    Reference: Rashid et al., 2018, https://arxiv.org/abs/1803.11485 (section 5).

    Examples:
        >>> env = TwoStepGame(num_envs=2)
        >>> td = env.reset()
        >>> for _ in range(2):
        ...     td["agents", "action"] = torch.ones(2, 2, dtype=torch.int64)
        ...     td = env.step(td)["next"]
        >>> td["agents", "reward"][0].flatten(), env.optimal_return
        (tensor([8., 8.]), 8.0)
    """

    optimal_return = 8.0
    random_return = 4.75

    def __init__(
        self,
        num_envs: int,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_envs, **kwargs)
        # By state: the start has no reward.
        matrices = [[[0.0, 0.0], [0.0, 0.0]], [[7.0, 7.0], [7.0, 7.0]], [[0.0, 1.0], [1.0, 8.0]]]
        self.payoff = torch.tensor(matrices, device=self.device)
        self.register_agent(AgentSpec("agent", 2, Unbounded((5,)), Categorical(2)), group="agents")
        self.register_state(Unbounded((3,)))

    def _reset(self, tensordict: TensorDictBase | None) -> TensorDict:
        self.place = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        return self._observe()

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        first, second = tensordict["agents", "action"].unbind(-1)
        reward = self.payoff[self.place, first, second]
        ended = self.place > 0
        self.place = torch.where(ended, self.place, 1 + first)
        out = self._observe()
        out["agents", "reward"] = reward.view(-1, 1, 1).repeat(1, 2, 1)
        out["terminated"] = ended.unsqueeze(-1)
        return out

    def _observe(self) -> TensorDict:
        state = one_hot(self.place, 3).float()
        identity = torch.eye(2, device=self.device).repeat(self.num_envs, 1, 1)
        seen = torch.cat([state.unsqueeze(1).expand(-1, 2, -1), identity], -1)
        return TensorDict({"agents": {"observation": seen}, "state": state}, [self.num_envs])

    # ------------------------------------------------------------------------------- drawing

    def scene(self, index: int = 0, step: TensorDictBase | None = None) -> list[Shape]:
        """Returns both games of the second step; after the first one only that which is played."""
        did, place = actions_in(self, step), int(self.place[index])
        chosen = None if step is None else (int(did[0]), int(did[1]))
        shapes = players(self, ["", ""], [(-1.2, -0.5), (0.5, 1.3)])
        ended = step is not None and bool(step.get(("next", "done")).any())
        for i, left in ((1, 0.0), (2, 3.0)):
            there = chosen if ended and place == i else None
            cells = matrix(self.payoff[i], there, left=left, name=f"game {i}")
            shapes += [c if place in (0, i) else dataclasses.replace(c, text="") for c in cells]
        return shapes


TOY_ENVS: dict[str, type[MarlEnv]] = {
    "arena": Arena,
    "echo": Echo,
    "kuhn": Kuhn,
    "leduc": Leduc,
    "levers": Levers,
    "matching_levers": MatchingLevers,
    "matrix_game": MatrixGame,
    "nim": Nim,
    "paces": Paces,
    "predator_prey": PredatorPrey,
    "speaker_listener": SpeakerListener,
    "traffic_junction": TrafficJunction,
    "two_step_game": TwoStepGame,
    "zero_sum": ZeroSum,
}
"""Toy worlds by their names after ``toy/``."""
