"""A matrix game of two sides, of which one gets what the other loses.

Shapes: E envs, M actions of the first, K of the second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Categorical, Unbounded
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_marl.envs.marl_env import MarlEnv
from torchrl_marl.envs.scene import Shape
from torchrl_marl.envs.toy.chances import chances
from torchrl_marl.envs.toy.scenes import actions_in, matrix, players
from torchrl_marl.errors import ConfigError, nearest
from torchrl_marl.games import Nash, nash, nash_conv
from torchrl_marl.specs import AgentSpec

__all__ = ["ZeroSum"]

PAYOFFS = {
    "rock_paper_scissors": [[0.0, -1.0, 1.0], [1.0, 0.0, -1.0], [-1.0, 1.0, 0.0]],
    "biased": [[0.0, -1.0, 2.0], [1.0, 0.0, -1.0], [-2.0, 1.0, 0.0]],
}


class ZeroSum(MarlEnv):
    """Two sides choose at once; the first gets the payoff's entry, the second its negative.

    Who always plays what is best against the last opponent goes round in circles in
    ``rock_paper_scissors``; its equilibrium is uniform. In ``biased`` rock against scissors pays
    double, and the equilibrium is 1/4, 1/2, 1/4.

    Args:
        num_envs (int): number E of vectorized envs.

    Keyword Args:
        payoff (str or nested list): ``rock_paper_scissors``, ``biased``, or one's own, of the
            first, of shape ``[M, K]``.
        max_steps, seed, device, check: as in :class:`MarlEnv`; an episode has one step.

    Shapes:
        - ``("first", "observation")``, ``("second", "observation")``: ``[E, 1, 1]``, nothing to
          see; ``"state"``: ``[E, 1]``

    Raises:
        ConfigError: an unknown payoff or argument.

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
        if isinstance(payoff, str) and payoff not in PAYOFFS:
            raise ConfigError(
                f"ZeroSum: unknown payoff {payoff!r}; {nearest(payoff, PAYOFFS)}"
                f"expected one of {sorted(PAYOFFS)}, or a matrix."
            )
        matrix = PAYOFFS[payoff] if isinstance(payoff, str) else payoff
        self.payoff = torch.as_tensor(matrix, dtype=torch.float32, device=self.device)
        if self.payoff.ndim != 2 or min(self.payoff.shape) < 2:
            raise ConfigError(
                f"ZeroSum: payoff has shape {list(self.payoff.shape)}; expected [M, K], two or "
                "more actions of each side."
            )
        for name, n_actions in zip(("first", "second"), self.payoff.shape):
            self.register_agent(AgentSpec(name, 1, Unbounded((1,)), Categorical(n_actions)))
        self.register_state(Unbounded((1,)))

    # ------------------------------------------------------------------------- exact answers

    @property
    def nash(self) -> Nash:
        """The equilibrium of largest entropy, and the first's value in it."""
        return nash(self.payoff)

    @property
    def optimal_return(self) -> float:
        """Returns the first's return where both play best."""
        return self.nash.value.item()

    @property
    def random_return(self) -> float:
        """Returns the first's expected return where both play at random."""
        return self.payoff.mean().item()

    def strategies(
        self, policy: Callable[[TensorDictBase], TensorDictBase], copies: int = 1000
    ) -> tuple[Tensor, Tensor]:
        """Returns how often each side's actions are drawn, from one call of the policy.

        Exact for every action that some copy draws; see :func:`~.chances.chances`.

        Args:
            policy (callable): acts for both sides.
            copies (int): rows of the call.

        Shapes:
            - returns: ``[M]`` and ``[K]``, float64
        """
        seen = {"observation": torch.ones(copies, 1, 1, device=self.device)}
        seen["mask"] = torch.ones(copies, 1, dtype=torch.bool, device=self.device)
        groups = {name: TensorDict(seen, [copies, 1]) for name in self.group_map}
        with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
            acted = policy(TensorDict(groups, [copies], device=self.device))
        first, second = (
            chances(acted, name, n).squeeze(0) for name, n in zip(groups, self.payoff.shape)
        )
        return first, second

    def nash_conv(
        self, policy: Callable[[TensorDictBase], TensorDictBase] | tuple[Tensor, Tensor]
    ) -> float:
        """Returns what best responses would gain, of both sides together; 0 at an equilibrium.

        Args:
            policy (callable or pair of Tensor): or both sides' distributions over actions.
        """
        first, second = policy if isinstance(policy, tuple) else self.strategies(policy)
        return nash_conv(self.payoff, first, second).item()

    # ------------------------------------------------------------------------------ dynamics

    def _reset(self, tensordict: TensorDictBase | None) -> dict[str, Any]:
        return self._observe()

    def _step(self, tensordict: TensorDictBase) -> dict[str, Any]:
        first, second = (tensordict[name, "action"].squeeze(-1) for name in self.group_map)
        earned = self.payoff[first, second].view(-1, 1, 1)
        out = self._observe()
        out["first"]["reward"], out["second"]["reward"] = earned, -earned
        ended = torch.ones(self.num_envs, 1, dtype=torch.bool, device=self.device)
        return {**out, "terminated": ended}

    def _observe(self) -> dict[str, Any]:
        ones = torch.ones(self.num_envs, 1, device=self.device)
        groups: dict[str, Any] = {n: {"observation": ones.unsqueeze(1)} for n in self.group_map}
        return {**groups, "state": ones}

    # ------------------------------------------------------------------------------- drawing

    def scene(self, index: int = 0, step: TensorDictBase | None = None) -> list[Shape]:
        """Returns what the first earns, its choices in rows; the chosen entry is marked."""
        did = actions_in(self, step)
        chosen = None if step is None else (int(did[0]), int(did[1]))
        shapes = players(self, ["", ""], [(-1.2, -1.0), (1.0, 1.3)])
        return shapes + matrix(self.payoff, chosen)
