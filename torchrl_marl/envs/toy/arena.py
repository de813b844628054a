"""A small environment with births and deaths, and a known optimal return.

Shapes: E envs, N agents of the team, A answers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.nn.functional import one_hot
from torchrl.data import Bounded, Categorical, OneHot, TensorSpec, Unbounded

from torchrl_marl.envs.agents.declaration import check_least
from torchrl_marl.envs.marl_env import MarlEnv
from torchrl_marl.envs.scene import Shape
from torchrl_marl.envs.toy.scenes import actions_in, row
from torchrl_marl.errors import ConfigError
from torchrl_marl.specs import AgentSpec

__all__ = ["Arena"]


class Arena(MarlEnv):
    """Environment in which agents answer cues until their lives or years are used up.

    In each step an agent sees a random cue, which is the index of the right answer, and answers. A
    right answer earns ``1 / N`` for every agent; a wrong one costs one of the agent's ``lives``.
    Agent i dies after ``(i + 1) * years`` steps at the latest, so agents die one by one even if all
    answers are right. The optimal return is the same for every agent, dead or alive: the longest
    possible lifetime in steps, averaged over the agents. It is 12.5 with 4 agents and 5 years. The
    expected return of the uniform random policy, ``random_return``, is also exact: 0.99 with the
    defaults.

    Options:

    - ``action_mask``: in each step one randomly chosen wrong answer is illegal; for dead agents
      all answers are illegal. An illegal answer counts as wrong.
    - ``continuous_actions``: cue and answer are numbers in [-1, 1]. An answer earns
      ``max(0, 1 - distance) / N``, and is wrong if its distance from the cue is above 0.5.
    - ``hybrid_actions``: cue and answer are an index and a number. The number earns only if the
      index is right.
    - ``late_spawn``: agent i is born after ``i * late_spawn`` steps.
    - ``respawn``: an agent without lives comes back after ``respawn`` steps, with all its lives,
      until its years are used up. The episode ends with the years of the last agent.
    - ``n_agents=[2, 6]``: each episode draws the number of agents from 2 to 6; the other slots of
      the 6 stay empty. A right answer then earns 1 divided by this number.
    - ``kinds=2``: the second half of a group are novices, which have only ``A // 2`` possible
      answers.

    Args:
        num_envs (int): number E of parallel envs.

    Keyword Args:
        n_agents (int or pair of int): number N of agents of the team, or the least and the largest
            number, N.
        n_groups (int): number of groups of equal size.
        n_actions (int): number A of answers.
        lives (int): number of wrong answers after which an agent dies.
        years (int): number of steps by which agent i + 1 can outlive agent i.
        late_spawn (int): number of steps between births; 0 if all agents are born at the reset.
        respawn (int): number of steps that an agent without lives misses; 0 if it stays dead.
        kinds (int): number of kinds of agents: 1, or 2 for heterogeneous groups.
        action_mask (bool): True if some answers are illegal.
        continuous_actions (bool): True if answers are numbers.
        hybrid_actions (bool): True if an answer is an index and a number.
        categorical_actions (bool): True if an answer is an index, False for a one-hot vector.
        max_steps, seed, device, check: as in :class:`MarlEnv`.

    Shapes:
        - ``("agents", "observation")``: ``[E, N, C + 2]``: the cue (C = A, C = 1 for a number,
          or C = A + 1 for both), and the fractions of lives and steps that are left. Several groups
          are called ``"agents_0"``, ``"agents_1"``, ...
        - ``"state"``: ``[E, N * (C + 2)]``

    Raises:
        ConfigError: an argument is unknown, or a number is invalid.

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
        n_agents: int | Sequence[int] = 4,
        n_groups: int = 1,
        n_actions: int = 4,
        lives: int = 3,
        years: int = 5,
        late_spawn: int = 0,
        respawn: int = 0,
        kinds: int = 1,
        action_mask: bool = False,
        continuous_actions: bool = False,
        hybrid_actions: bool = False,
        categorical_actions: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_envs, **kwargs)
        self.numbers = self._read_team_sizes(n_agents)
        n_agents = self.numbers[-1]
        self.n_agents, self.n_actions, self.n_kinds = n_agents, n_actions, kinds
        self.lives_at_start, self.has_action_mask = lives, action_mask
        self.continuous_actions, self.hybrid_actions = continuous_actions, hybrid_actions
        self.categorical_actions = categorical_actions
        self.respawn, self.respawns = respawn, respawn > 0
        self._check_arguments(n_groups, years, late_spawn)
        agents = torch.arange(n_agents, device=self.device)
        self.spans, self.births = years * (agents + 1), late_spawn * agents
        size = n_agents // n_groups
        n_novices = size // 2 * (kinds - 1)
        self.choices = torch.full_like(agents, n_actions)
        for i in range(n_groups):
            suffix = "" if n_groups == 1 else f"_{i}"
            self._register_kind(f"agent{suffix}", size - n_novices, n_actions, f"agents{suffix}")
            if n_novices:
                self._register_kind(f"novice{suffix}", n_novices, n_actions // 2, f"agents{suffix}")
                self.choices[(i + 1) * size - n_novices : (i + 1) * size] = n_actions // 2
        self.register_state(Unbounded((n_agents * (self._cue_size(n_actions) + 2),)))

    def _register_kind(self, name: str, n_agents: int, n_actions: int, group: str) -> None:
        answer: TensorSpec = Categorical(n_actions)
        if self.hybrid_actions:
            from torchrl_marl.specs import Hybrid

            answer = Hybrid([n_actions], Bounded(-1, 1, (1,)))
        elif self.continuous_actions:
            answer = Bounded(-1, 1, (1,))
        elif not self.categorical_actions:
            answer = OneHot(n_actions)
        observation = Unbounded((self._cue_size(n_actions) + 2,))
        mask = self.has_action_mask
        self.register_agent(AgentSpec(name, n_agents, observation, answer, action_mask=mask), group)

    def _cue_size(self, n_actions: int) -> int:
        return 1 if self.continuous_actions else n_actions + self.hybrid_actions

    @staticmethod
    def _read_team_sizes(n_agents: int | Sequence[int]) -> range:
        """Returns the numbers of agents that an episode may have."""
        given = [n_agents, n_agents] if isinstance(n_agents, int) else list(n_agents)
        if len(given) != 2 or given[0] > given[1]:
            raise ConfigError(
                f"Arena: n_agents is {given}, expected a number, or the least and the largest "
                "number, such as [2, 6]."
            )
        check_least("Arena", n_agents=(given[0], 1))
        return range(given[0], given[1] + 1)

    def _check_arguments(self, n_groups: int, years: int, late_spawn: int) -> None:
        masked = self.has_action_mask
        check_least("Arena", n_groups=(n_groups, 1))
        check_least("Arena", n_actions=(self.n_actions, (3 if masked else 2) * self.n_kinds))
        check_least("Arena", lives=(self.lives_at_start, 1), years=(years, 1))
        check_least("Arena", late_spawn=(late_spawn, 0), respawn=(self.respawn, 0))
        if self.n_agents % n_groups:
            raise ConfigError(
                f"Arena: n_agents is {self.n_agents}, expected a multiple of n_groups, {n_groups}."
            )
        if self.n_kinds not in (1, 2) or self.n_agents // n_groups < self.n_kinds:
            raise ConfigError(
                f"Arena: kinds is {self.n_kinds}, expected 1, or 2 in groups of 2 or more."
            )
        if len(self.numbers) > 1 and n_groups * self.n_kinds > 1:
            raise ConfigError(
                "Arena: n_agents is a pair, expected one number with several groups or kinds."
            )
        if self.continuous_actions and (masked or self.n_kinds > 1):
            raise ConfigError("Arena: action_mask and kinds=2 need continuous_actions=False.")
        others = masked or self.n_kinds > 1 or not self.categorical_actions
        if self.hybrid_actions and (others or self.continuous_actions):
            raise ConfigError(
                "Arena: hybrid_actions=True needs the defaults of action_mask, kinds, "
                "continuous_actions and categorical_actions."
            )

    # ------------------------------------------------------------------------- known returns

    @property
    def _max_lifetimes(self) -> list[int]:
        limit = math.inf if self.max_steps is None else self.max_steps
        lifetimes = zip(self.births.tolist(), self.spans.tolist())
        return [int(min(span, max(limit - birth, 0))) for birth, span in lifetimes]

    @property
    def optimal_return(self) -> float:
        """Return of the best joint policy."""
        return self._average_over_team_sizes(self._max_lifetimes)

    def _average_over_team_sizes(self, returns: Sequence[float]) -> float:
        """Returns the mean over the agents of a team, averaged over all numbers of agents."""
        return sum(sum(returns[:n]) / n for n in self.numbers) / len(self.numbers)

    @property
    def random_return(self) -> float:
        """Expected return of the policy that chooses legal answers uniformly at random."""
        returns = []
        for span, n_actions in zip(self._max_lifetimes, self.choices.tolist()):
            # The distance d of two uniform numbers in [-1, 1] has density (2 - d) / 2.
            p_wrong, earned = 9 / 16, 5 / 12
            if self.hybrid_actions:
                p_wrong, earned = 1 - (1 - p_wrong) / n_actions, earned / n_actions
            elif not self.continuous_actions:
                earned = 1 / (n_actions - self.has_action_mask)
                p_wrong = 1 - earned
            returns.append(earned * sum(self._survival_probabilities(span, p_wrong)))
        return self._average_over_team_sizes(returns)

    def _survival_probabilities(self, span: int, p_wrong: float) -> Iterator[float]:
        """Yields the probability that an agent is alive in each step."""
        alive = [1.0] + [0.0] * (self.lives_at_start - 1)  # by number of lost lives
        respawning = [0.0] * self.respawn  # by number of missed steps
        for _ in range(span):
            yield sum(alive)
            died = p_wrong * alive[-1]
            lost_life = [0.0, *(p_wrong * probability for probability in alive[:-1])]
            alive = [
                (1 - p_wrong) * probability + arrived
                for probability, arrived in zip(alive, lost_life)
            ]
            if respawning:
                alive[0] += respawning[-1]
                respawning = [died, *respawning[:-1]]

    # ------------------------------------------------------------------------------ dynamics

    def _reset(self, tensordict: TensorDictBase | None) -> dict[str, Any]:
        self.lives = self.spans.new_full((self.num_envs, self.n_agents), self.lives_at_start)
        self.years = self.spans.expand(self.num_envs, -1).clone()
        self.waits = self.births.expand(self.num_envs, -1).clone()
        self.away = torch.zeros_like(self.lives)
        self.size = self.spans.new_full((self.num_envs, 1), self.n_agents)
        if len(self.numbers) > 1:
            least, most = self.numbers[0], self.numbers[-1]
            self.size = torch.randint_like(self.size, least, most + 1)
            exists = torch.arange(self.n_agents, device=self.device) < self.size
            self.lives, self.years = self.lives * exists, self.years * exists
        return self._observe()

    def _step(self, tensordict: TensorDictBase) -> dict[str, Any]:
        alive = self.alive
        rewards, right = self._score_answers(self._read_answers(tensordict))
        self.lives = self.lives - (alive & ~right).long()
        self.years = self.years - (self.waits == 0).long()
        self.waits = (self.waits - 1).clamp_min(0)
        if self.respawns:
            self._respawn_agents(killed=alive & (self.lives <= 0))
        reward = torch.where(alive, rewards, 0.0)
        if len(self.numbers) > 1:
            reward = reward * (self.n_agents / self.size)
        reward = reward.mean(1, keepdim=True).expand_as(rewards)
        dead = (self.lives <= 0) | (self.years <= 0)
        output = self._observe(reward=reward.unsqueeze(-1), terminated=dead.unsqueeze(-1))
        if self.respawns:
            output["terminated"] = (self.years <= 0).all(1, keepdim=True)
        return output

    def _respawn_agents(self, killed: Tensor) -> None:
        """Counts down the steps that dead agents miss, and then restores their lives."""
        self.lives = torch.where(self.away == 1, self.lives_at_start, self.lives)
        self.away = torch.where(killed, self.respawn, (self.away - 1).clamp_min(0))

    @property
    def alive(self) -> Tensor:
        """Returns a mask of living agents, ``[E, N]``."""
        return (self.lives > 0) & (self.years > 0) & (self.waits == 0)

    def _read_answers(self, tensordict: TensorDictBase) -> Tensor:
        """Returns the answers of all agents, ``[E, N]``; hybrid ones ``[E, N, 2]``."""
        kinds = [x for name in self.group_map for x in self.by_kind(tensordict, name).values()]
        answers = [kind["action"] for kind in kinds]
        if self.continuous_actions:
            answers = [x.squeeze(-1) for x in answers]
        elif not self.categorical_actions:
            answers = [x.long().argmax(-1) for x in answers]
        return torch.cat(answers, 1)

    def _score_answers(self, answer: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the rewards ``[E, N]`` of the answers, and a mask ``[E, N]`` of right answers."""
        if self.hybrid_actions:
            is_right, distance = answer[..., 0] == self.cue, (answer[..., 1] - self.level).abs()
            return is_right * (1 - distance).clamp_min(0.0), is_right & (distance <= 0.5)
        if self.continuous_actions:
            distance = (answer - self.cue).abs()
            return (1 - distance).clamp_min(0.0), distance <= 0.5
        is_right = answer == self.cue
        return is_right.float(), is_right

    def _observe(self, **leaves: Tensor) -> dict[str, Any]:
        alive = self.alive
        cue = self._draw_cues()
        remaining = torch.stack([self.lives / self.lives_at_start, self.years / self.spans], -1)
        observation = torch.where(alive.unsqueeze(-1), torch.cat([cue, remaining], -1), 0.0)
        leaves |= {"observation": observation, "mask": alive}
        if self.has_action_mask:
            leaves["action_mask"] = self._draw_action_mask() & alive.unsqueeze(-1)
        output: dict[str, Any] = {"state": observation.flatten(1)}
        for group, kind, agents, n_actions in self._kind_slices():
            kind_leaves = {key: x[:, agents] for key, x in leaves.items()}
            if n_actions < self.n_actions:
                kind_leaves["observation"] = torch.cat(
                    [observation[:, agents, :n_actions], observation[:, agents, -2:]], -1
                )
                if self.has_action_mask:
                    kind_leaves["action_mask"] = kind_leaves["action_mask"][..., :n_actions]
            output.setdefault(group, {}).update(
                kind_leaves if self.n_kinds == 1 else {kind: kind_leaves}
            )
        return output

    def _kind_slices(self) -> Iterator[tuple[str, str, slice, int]]:
        """Yields for each kind: group, name, slice of the agents, and number of its answers."""
        start = 0
        for group, kinds in self.group_kinds.items():
            for kind, n_agents in zip(kinds.names, kinds.sizes):
                novice = kind.startswith("novice")
                yield (group, kind, slice(start, start + n_agents), self.n_actions // (1 + novice))
                start += n_agents

    def _draw_cues(self) -> Tensor:
        shape = (self.num_envs, self.n_agents)
        if self.continuous_actions:
            self.cue = 2 * torch.rand(shape, device=self.device) - 1
            return self.cue.unsqueeze(-1)
        # A multiple of every kind's number of answers, so that all answers are equally likely.
        multiple = math.lcm(self.n_actions, self.n_actions // self.n_kinds)
        self.cue = torch.randint(multiple, shape, device=self.device) % self.choices
        cue = one_hot(self.cue, self.n_actions).float()
        if not self.hybrid_actions:
            return cue
        self.level = 2 * torch.rand(shape, device=self.device) - 1
        return torch.cat([cue, self.level.unsqueeze(-1)], -1)

    def _draw_action_mask(self) -> Tensor:
        multiple = math.lcm(self.n_actions - 1, self.n_actions // self.n_kinds - 1)
        offsets = torch.randint(multiple, self.cue.shape, device=self.device)
        illegal = (self.cue + 1 + offsets % (self.choices - 1)) % self.choices
        return ~one_hot(illegal, self.n_actions).bool()

    # ------------------------------------------------------------------------------- drawing

    def scene(self, index: int = 0, step: TensorDictBase | None = None) -> list[Shape]:
        """Returns a drawing of the agents with their cues; above each agent is its last answer."""
        alive, cue = self.alive[index].tolist(), self.cue[index].tolist()
        cues = [f"{x:.1f}" if self.continuous_actions else str(x) for x in cue]
        if self.hybrid_actions:
            cues = [f"{x}, {y:.1f}" for x, y in zip(cue, self.level[index].tolist())]
        inside = [label if is_alive else "" for label, is_alive in zip(cues, alive)]
        counts = zip(alive, self.lives[index].tolist(), self.years[index].tolist())
        below = [
            f"{n_lives}♥, {years} left" if is_alive else "" for is_alive, n_lives, years in counts
        ]
        return row(self, inside, actions_in(self, step), below)
