"""Matrix games, cooperative and zero-sum, with known optimal returns and equilibria.

Shapes: E envs, N agents of a group, A actions, M actions of the first side, K actions of the second
side.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torch.nn.functional import one_hot
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_marl.envs import toy
from torchrl_marl.envs.marl_env import MarlEnv
from torchrl_marl.envs.scene import Shape
from torchrl_marl.envs.toy.library import TOY_ENVIRONMENTS, class_name
from torchrl_marl.envs.toy.probabilities import action_probabilities
from torchrl_marl.envs.toy.roles import declare_players, declare_team, zero_sum_step
from torchrl_marl.envs.toy.scenes import actions_in, matrix, players, row
from torchrl_marl.errors import ConfigError, nearest
from torchrl_marl.games import Nash, nash, nash_conv

__all__ = ["TOY_ENVS", "MatrixGame", "TwoStepGame", "ZeroSum"]

PAYOFFS = {
    "climbing": [[11.0, -30.0, 0.0], [-30.0, 7.0, 6.0], [0.0, 0.0, 5.0]],
    "penalty": [[10.0, 0.0, -10.0], [0.0, 2.0, 0.0], [-10.0, 0.0, 10.0]],
    "coordination": [[10.0, 0.0], [0.0, 5.0]],
}
ZERO_SUM_PAYOFFS = {
    "rock_paper_scissors": [[0.0, -1.0, 1.0], [1.0, 0.0, -1.0], [-1.0, 1.0, 0.0]],
    "biased": [[0.0, -1.0, 2.0], [1.0, 0.0, -1.0], [-2.0, 1.0, 0.0]],
}


def _read_payoff(env: MarlEnv, payoff: Any, known: Mapping[str, list]) -> Tensor:
    """Returns as a tensor a payoff matrix that is given by its name or as nested lists."""
    if isinstance(payoff, str) and payoff not in known:
        raise ConfigError(
            f"{type(env).__name__}: unknown payoff {payoff!r}; {nearest(payoff, known)}"
            f"expected one of {sorted(known)}, or a matrix."
        )
    matrix = known[payoff] if isinstance(payoff, str) else payoff
    return torch.as_tensor(matrix, dtype=torch.float32, device=env.device)


class MatrixGame(MarlEnv):
    """One-step game in which all agents earn the entry of the payoff matrix that they choose.

    The optimal return is the largest entry, and the uniform random policy earns the mean of the
    entries. In ``climbing``, the optimal return is 11 and the random policy earns -3.44. The best
    entry of ``climbing`` is next to the worst ones, so independent learners converge to a joint
    action that is not the best.

    Args:
        num_envs (int): number E of parallel envs.

    Keyword Args:
        payoff (str or nested list): payoff matrix: ``climbing``, ``penalty``, ``coordination``, or
            nested lists with N dims of size A.
        max_steps, seed, device, check: as in :class:`MarlEnv`.

    Shapes:
        - ``("agents", "observation")``: ``[E, N, N]``, the agent's index; ``"state"``: ``[E, 1]``

    Raises:
        ConfigError: a payoff or argument is unknown.

    Reference: Claus and Boutilier, 1998, https://cdn.aaai.org/AAAI/1998/AAAI98-106.pdf.

    Examples:
        >>> env = MatrixGame(2, payoff="coordination")
        >>> env.optimal_return, env.random_return
        (10.0, 3.75)
    """

    def __init__(
        self, num_envs: int, *, payoff: str | Sequence[Any] | Tensor = "climbing", **kwargs: Any
    ) -> None:
        super().__init__(num_envs, **kwargs)
        self.payoff = _read_payoff(self, payoff, PAYOFFS)
        n, sizes = self.payoff.ndim, set(self.payoff.shape)
        if len(sizes) != 1:
            raise ConfigError(
                f"MatrixGame: payoff has shape {list(self.payoff.shape)}, expected one dim per "
                "agent, all of equal size."
            )
        declare_team(self, n, n, sizes.pop(), 1)

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
        output = self._observe()
        output["agents", "reward"] = reward.view(-1, 1, 1).repeat(1, self.payoff.ndim, 1)
        output["terminated"] = torch.ones(self.num_envs, 1, dtype=torch.bool, device=self.device)
        return output

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
        """Returns a drawing of the payoff matrix, with the chosen entry marked."""
        actions = actions_in(self, step)
        if self.payoff.ndim != 2:
            return row(self, [str(i) for i in range(self.payoff.ndim)], actions)
        chosen = None if step is None else (int(actions[0]), int(actions[1]))
        middle = -(self.payoff.shape[0] - 1) / 2
        shapes = players(self, ["", ""], [(-1.2, middle), (-middle, 1.3)])
        return shapes + matrix(self.payoff, chosen)


class TwoStepGame(MarlEnv):
    """Two-step game from the QMIX paper: a safe return of 7, or 8 if both agents coordinate.

    In the first step agent 0 chooses the payoff matrix of the second step: either all entries are
    7, or the matrix is ``[[0, 1], [1, 8]]``.
    The optimal return is 8; the uniform random policy earns 4.75.

    Args:
        num_envs (int): number E of parallel envs.

    Keyword Args:
        max_steps, seed, device, check: as in :class:`MarlEnv`.

    Shapes:
        - ``("agents", "observation")``: ``[E, 2, 5]``, the game's state and the agent's index
        - ``"state"``: ``[E, 3]``

    Raises:
        ConfigError: an argument is unknown.

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

    def __init__(self, num_envs: int, **kwargs: Any) -> None:
        super().__init__(num_envs, **kwargs)
        # Payoff matrix of each state of the game; the first step has no reward.
        matrices = [[[0.0, 0.0], [0.0, 0.0]], [[7.0, 7.0], [7.0, 7.0]], [[0.0, 1.0], [1.0, 8.0]]]
        self.payoff = torch.tensor(matrices, device=self.device)
        declare_team(self, 2, 5, 2, 3)

    def _reset(self, tensordict: TensorDictBase | None) -> TensorDict:
        self.place = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        return self._observe()

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        first, second = tensordict["agents", "action"].unbind(-1)
        reward = self.payoff[self.place, first, second]
        ended = self.place > 0
        self.place = torch.where(ended, self.place, 1 + first)
        output = self._observe()
        output["agents", "reward"] = reward.view(-1, 1, 1).repeat(1, 2, 1)
        output["terminated"] = ended.unsqueeze(-1)
        return output

    def _observe(self) -> TensorDict:
        state = one_hot(self.place, 3).float()
        identity = torch.eye(2, device=self.device).repeat(self.num_envs, 1, 1)
        observation = torch.cat([state.unsqueeze(1).expand(-1, 2, -1), identity], -1)
        return TensorDict({"agents": {"observation": observation}, "state": state}, [self.num_envs])

    # ------------------------------------------------------------------------------- drawing

    def scene(self, index: int = 0, step: TensorDictBase | None = None) -> list[Shape]:
        """Returns a drawing of both matrices; after the first step, of the chosen matrix only."""
        actions, place = actions_in(self, step), int(self.place[index])
        chosen = None if step is None else (int(actions[0]), int(actions[1]))
        shapes = players(self, ["", ""], [(-1.2, -0.5), (0.5, 1.3)])
        ended = step is not None and bool(step.get(("next", "done")).any())
        for i, left in ((1, 0.0), (2, 3.0)):
            marked = chosen if ended and place == i else None
            cells = matrix(self.payoff[i], marked, left=left, name=f"game {i}")
            shapes += [
                cell if place in (0, i) else dataclasses.replace(cell, text="") for cell in cells
            ]
        return shapes


class ZeroSum(MarlEnv):
    """One-step zero-sum game: the first side earns an entry of the payoff, the second its negative.

    In ``rock_paper_scissors`` the equilibrium is uniform, and repeated best responses never reach
    it. In ``biased`` rock against scissors pays double. Its equilibrium is 1/4 rock, 1/2 paper and
    1/4 scissors.

    Args:
        num_envs (int): number E of parallel envs.

    Keyword Args:
        payoff (str or nested list): the first side's payoff matrix: ``rock_paper_scissors``,
            ``biased``, or nested lists ``[M, K]``.
        max_steps, seed, device, check: as in :class:`MarlEnv`; an episode has one step.

    Shapes:
        - ``("first", "observation")``, ``("second", "observation")``: ``[E, 1, 1]``,
          constant; ``"state"``: ``[E, 1]``

    Raises:
        ConfigError: a payoff or argument is unknown.

    Reference: von Neumann, 1928, https://doi.org/10.1007/BF01448847.

    Examples:
        >>> env = ZeroSum(2, payoff="biased")
        >>> [round(x, 4) for x in env.nash.row.tolist()]
        [0.25, 0.5, 0.25]
        >>> round(env.nash_conv((torch.tensor([0.0, 1, 0]), env.nash.column)), 4)
        1.0
    """

    def __init__(
        self,
        num_envs: int,
        *,
        payoff: str | Sequence[Any] | Tensor = "rock_paper_scissors",
        **kwargs: Any,
    ) -> None:
        super().__init__(num_envs, **kwargs)
        self.payoff = _read_payoff(self, payoff, ZERO_SUM_PAYOFFS)
        if self.payoff.ndim != 2 or min(self.payoff.shape) < 2:
            raise ConfigError(
                f"ZeroSum: payoff has shape {list(self.payoff.shape)}, expected [M, K] with two or "
                "more actions per side."
            )
        declare_players(self, 1, self.payoff.shape, 1)

    # ------------------------------------------------------------------------- exact answers

    @property
    def nash(self) -> Nash:
        """Equilibrium with the largest entropy, and the first side's return at this equilibrium."""
        return nash(self.payoff)

    @property
    def optimal_return(self) -> float:
        """The first side's return at the equilibrium."""
        return self.nash.value.item()

    @property
    def random_return(self) -> float:
        """The first side's expected return if both sides play uniformly at random."""
        return self.payoff.mean().item()

    def strategies(
        self, policy: Callable[[TensorDictBase], TensorDictBase], copies: int = 1000
    ) -> tuple[Tensor, Tensor]:
        """Returns each side's action probabilities, which one call of the policy determines.

        The probabilities of all sampled actions are exact; see
        :func:`~.probabilities.action_probabilities`.

        Args:
            policy (callable): policy of both sides.
            copies (int): number of actions sampled in the call.

        Shapes:
            - returns: ``[M]`` and ``[K]``, float64
        """
        inputs = {"observation": torch.ones(copies, 1, 1, device=self.device)}
        inputs["mask"] = torch.ones(copies, 1, dtype=torch.bool, device=self.device)
        groups = {name: TensorDict(inputs, [copies, 1]) for name in self.group_map}
        with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
            output = policy(TensorDict(groups, [copies], device=self.device))
        first, second = (
            action_probabilities(output, name, n).squeeze(0)
            for name, n in zip(groups, self.payoff.shape)
        )
        return first, second

    def nash_conv(
        self, policy: Callable[[TensorDictBase], TensorDictBase] | tuple[Tensor, Tensor]
    ) -> float:
        """Returns the NashConv: how much the sides gain in total if each plays a best response.

        It is 0 at an equilibrium.

        Args:
            policy (callable or pair of Tensor): policy of both sides, or their action
                probabilities.
        """
        first, second = policy if isinstance(policy, tuple) else self.strategies(policy)
        return nash_conv(self.payoff, first, second).item()

    # ------------------------------------------------------------------------------ dynamics

    def _reset(self, tensordict: TensorDictBase | None) -> dict[str, Any]:
        return self._observe()

    def _step(self, tensordict: TensorDictBase) -> dict[str, Any]:
        first, second = (tensordict[name, "action"].squeeze(-1) for name in self.group_map)
        ended = torch.ones(self.num_envs, 1, dtype=torch.bool, device=self.device)
        return zero_sum_step(self._observe(), self.payoff[first, second], ended)

    def _observe(self) -> dict[str, Any]:
        ones = torch.ones(self.num_envs, 1, device=self.device)
        groups: dict[str, Any] = {n: {"observation": ones.unsqueeze(1)} for n in self.group_map}
        return {**groups, "state": ones}

    # ------------------------------------------------------------------------------- drawing

    def scene(self, index: int = 0, step: TensorDictBase | None = None) -> list[Shape]:
        """Returns a drawing of the first side's payoff matrix, with the chosen entry marked."""
        actions = actions_in(self, step)
        chosen = None if step is None else (int(actions[0]), int(actions[1]))
        shapes = players(self, ["", ""], [(-1.2, -1.0), (1.0, 1.3)])
        return shapes + matrix(self.payoff, chosen)


TOY_ENVS: dict[str, type[MarlEnv]] = {
    name: getattr(toy, class_name(name)) for name in TOY_ENVIRONMENTS
}
"""Classes of the toy environments, by the name that follows ``toy/``."""
