"""Small worlds whose exact answers are known. They need no optional package.

Shapes: E envs, N agents of a group, A actions.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torch.nn.functional import one_hot
from torchrl.data import Bounded, Categorical, Unbounded

from torchrl_marl.envs.marl_env import MarlEnv
from torchrl_marl.errors import ConfigError, nearest
from torchrl_marl.specs import AgentSpec

__all__ = ["TOY_ENVS", "Arena", "MatrixGame", "TwoStepGame"]

PAYOFFS = {
    "climbing": [[11.0, -30.0, 0.0], [-30.0, 7.0, 6.0], [0.0, 0.0, 5.0]],
    "penalty": [[10.0, 0.0, -10.0], [0.0, 2.0, 0.0], [-10.0, 0.0, 10.0]],
    "coordination": [[10.0, 0.0], [0.0, 5.0]],
}


class MatrixGame(MarlEnv):
    """All agents choose once and share what the payoff matrix says.

    The optimal return is the matrix's largest entry, 11 for ``climbing``; the uniform random
    policy's is its mean, -3.44. In ``climbing`` the best joint action lies beside the worst
    ones, so learners that each go their own way settle for less.

    Args:
        num_envs (int): number E of vectorized envs.

    Keyword Args:
        payoff (str or nested list): ``climbing``, ``penalty``, ``coordination``, or one's own,
            of shape ``[A] * N``.
        max_steps, seed, device: as in :class:`MarlEnv`.

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
        max_steps: int | None = None,
        seed: int | None = None,
        device: torch.device | str | None = None,
        **unknown: Any,
    ) -> None:
        _refuse_unknown(type(self), unknown)
        super().__init__(num_envs, max_steps=max_steps, seed=seed, device=device)
        if isinstance(payoff, str) and payoff not in PAYOFFS:
            raise ConfigError(
                f"MatrixGame: unknown payoff {payoff!r}; {nearest(payoff, PAYOFFS)}"
                f"expected of {sorted(PAYOFFS)}, or a matrix."
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
        """Return of the best joint policy."""
        return self.payoff.max().item()

    @property
    def random_return(self) -> float:
        """Expected return of the uniform random policy."""
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


class TwoStepGame(MarlEnv):
    """The two-step game of the QMIX paper: a safe 7, or 8 for those who agree.

    First agent 0 chooses the second step's matrix: all sevens, or ``[[0, 1], [1, 8]]``. The
    optimal return is 8, the uniform random policy's 4.75.

    Args:
        num_envs (int): number E of vectorized envs.

    Keyword Args:
        max_steps, seed, device: as in :class:`MarlEnv`.

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
        *,
        max_steps: int | None = None,
        seed: int | None = None,
        device: torch.device | str | None = None,
        **unknown: Any,
    ) -> None:
        _refuse_unknown(type(self), unknown)
        super().__init__(num_envs, max_steps=max_steps, seed=seed, device=device)
        # By place: nothing is earned at the start.
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


class Arena(MarlEnv):
    """Every agent answers cues until its lives or its years are spent; nobody comes back.

    In each step an agent sees a cue, drawn anew, and answers it: the right one earns ``1 / N``
    for the whole team, a wrong one nothing and costs one of its ``lives``. Agent i dies after
    ``(i + 1) * years`` steps at the latest, so agents die one by one even in the best team. The
    optimal return of every agent, dead ones included, is the mean over the agents of the steps
    that they can live: 12.5 with 4 agents and 5 years. The uniform random policy's is
    ``random_return``, exact too: 0.99 with the defaults.

    With ``action_mask`` one wrong answer, drawn anew, is illegal in each step, and all are for the
    dead; an illegal answer is a wrong one. With ``continuous_actions`` cue and answer are
    numbers in [-1, 1]: an answer earns ``max(0, 1 - distance) / N``, and is wrong beyond 0.5.

    Args:
        num_envs (int): number E of vectorized envs.

    Keyword Args:
        n_agents (int): number N of agents of the team.
        n_groups (int): groups of equal size into which the team is divided.
        n_actions (int): number A of answers.
        lives (int): wrong answers of which an agent dies.
        years (int): steps by which each agent can outlive the one before.
        action_mask (bool): whether there are illegal answers.
        continuous_actions (bool): whether answers are numbers.
        max_steps, seed, device: as in :class:`MarlEnv`.

    Shapes:
        - ``("agents", "observation")``: ``[E, N, C + 2]``: cue (C is A, or 1), lives and years
          left; ``"agents_0"``, ``"agents_1"``, ... where there are groups
        - ``"state"``: ``[E, N * (C + 2)]``

    Raises:
        ConfigError: an unknown argument, or numbers that cannot be.

    Examples:
        >>> env = Arena(num_envs=2, n_agents=2, years=3, seed=0)
        >>> env.optimal_return
        4.5
        >>> env.rollout(6, break_when_any_done=False)["agents", "mask"].shape
        torch.Size([2, 6, 2])
    """

    def __init__(
        self,
        num_envs: int,
        *,
        n_agents: int = 4,
        n_groups: int = 1,
        n_actions: int = 4,
        lives: int = 3,
        years: int = 5,
        action_mask: bool = False,
        continuous_actions: bool = False,
        max_steps: int | None = None,
        seed: int | None = None,
        device: torch.device | str | None = None,
        **unknown: Any,
    ) -> None:
        _refuse_unknown(type(self), unknown)
        super().__init__(num_envs, max_steps=max_steps, seed=seed, device=device)
        self._check(n_agents, n_groups, n_actions, lives, years, action_mask, continuous_actions)
        self.n_agents, self.n_actions, self.lives_at_start = n_agents, n_actions, lives
        self.has_action_mask, self.continuous_actions = action_mask, continuous_actions
        self.spans = years * torch.arange(1, n_agents + 1, device=self.device)
        answer = Bounded(-1, 1, (1,)) if continuous_actions else Categorical(n_actions)
        seen = Unbounded((2 + (1 if continuous_actions else n_actions),))
        size = n_agents // n_groups
        for i in range(n_groups):
            kind, group = ("agent", "agents") if n_groups == 1 else (f"agent_{i}", f"agents_{i}")
            self.register_agent(
                AgentSpec(kind, size, seen, answer, action_mask=action_mask), group=group
            )
        self.register_state(Unbounded((n_agents * seen.shape[-1],)))

    @staticmethod
    def _check(n_agents, n_groups, n_actions, lives, years, action_mask, continuous_actions):
        for name, value, least in (
            ("n_agents", n_agents, 1),
            ("n_groups", n_groups, 1),
            ("n_actions", n_actions, 3 if action_mask else 2),
            ("lives", lives, 1),
            ("years", years, 1),
        ):
            if value < least:
                raise ConfigError(f"Arena: {name} is {value}, expected {least} or more.")
        if n_agents % n_groups:
            raise ConfigError(f"Arena: {n_agents} agents make no {n_groups} groups of one size.")
        if action_mask and continuous_actions:
            raise ConfigError("Arena: action_mask=True needs continuous_actions=False.")

    @property
    def _longest(self) -> list[int]:
        limit = math.inf if self.max_steps is None else self.max_steps
        return [int(min(span, limit)) for span in self.spans.tolist()]

    @property
    def optimal_return(self) -> float:
        """Return of the best joint policy."""
        return sum(self._longest) / self.n_agents

    @property
    def random_return(self) -> float:
        """Expected return of the uniform random policy (over legal answers)."""
        if self.continuous_actions:
            # Of two uniform numbers in [-1, 1], the distance d has density (2 - d) / 2.
            wrong, earned = 9 / 16, 5 / 12
        else:
            earned = 1 / (self.n_actions - self.has_action_mask)
            wrong = 1 - earned
        total = 0.0
        for span in self._longest:
            for t in range(span):
                lost = range(min(t + 1, self.lives_at_start))
                alive = sum(math.comb(t, k) * wrong**k * (1 - wrong) ** (t - k) for k in lost)
                total += alive * earned
        return total / self.n_agents

    def _reset(self, tensordict: TensorDictBase | None) -> TensorDict:
        self.lives = self.spans.new_full((self.num_envs, self.n_agents), self.lives_at_start)
        self.years = self.spans.expand(self.num_envs, -1).clone()
        return self._observe()

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        alive = self.alive
        answer = torch.cat([tensordict[name, "action"] for name in self.group_map], 1)
        earned, right = self._judge(answer)
        self.lives = self.lives - (alive & ~right).long()
        self.years = self.years - 1
        reward = torch.where(alive, earned, 0.0).mean(1, keepdim=True)
        out = self._observe()
        for name, dead in zip(self.group_map, self._split(~self.alive)):
            out[name, "reward"] = reward.unsqueeze(-1).repeat(1, dead.shape[1], 1)
            out[name, "terminated"] = dead.unsqueeze(-1)
        return out

    @property
    def alive(self) -> Tensor:
        """Which agents live, ``[E, N]``."""
        return (self.lives > 0) & (self.years > 0)

    def _judge(self, answer: Tensor) -> tuple[Tensor, Tensor]:
        """What the answers earn and whether they are right, each ``[E, N]``."""
        if self.continuous_actions:
            distance = (answer.squeeze(-1) - self.cue).abs()
            return (1 - distance).clamp_min(0.0), distance <= 0.5
        right = answer == self.cue
        return right.float(), right

    def _observe(self) -> TensorDict:
        shape, alive = (self.num_envs, self.n_agents), self.alive
        if self.continuous_actions:
            self.cue = 2 * torch.rand(shape, device=self.device) - 1
            cue = self.cue.unsqueeze(-1)
        else:
            self.cue = torch.randint(self.n_actions, shape, device=self.device)
            cue = one_hot(self.cue, self.n_actions).float()
        left = torch.stack([self.lives / self.lives_at_start, self.years / self.spans], -1)
        seen = torch.where(alive.unsqueeze(-1), torch.cat([cue, left], -1), 0.0)
        out = TensorDict({"state": seen.flatten(1)}, [self.num_envs])
        for name, rows in zip(self.group_map, self._split(seen)):
            out[name, "observation"] = rows
        if self.has_action_mask:
            legal = self._draw_legal() & alive.unsqueeze(-1)
            for name, rows in zip(self.group_map, self._split(legal)):
                out[name, "action_mask"] = rows
        return out

    def _draw_legal(self) -> Tensor:
        wrong = torch.randint(1, self.n_actions, self.cue.shape, device=self.device)
        return ~one_hot((self.cue + wrong) % self.n_actions, self.n_actions).bool()

    def _split(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.chunk(len(self.group_map), 1)


TOY_ENVS: dict[str, type[MarlEnv]] = {
    "arena": Arena,
    "matrix_game": MatrixGame,
    "two_step_game": TwoStepGame,
}


def _refuse_unknown(cls: type, unknown: dict[str, Any]) -> None:
    init = inspect.signature(cls.__init__)  # type: ignore[misc]
    known = sorted(set(init.parameters) - {"self", "unknown"})
    for name in unknown:
        raise ConfigError(
            f"{cls.__name__} has no argument {name!r}; {nearest(name, known)}"
            f"it takes {', '.join(known)}."
        )
