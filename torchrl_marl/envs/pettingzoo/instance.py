"""One copy of a PettingZoo environment, with its own random state. Imports no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchrl_marl.envs.pettingzoo.agent_rows import (
    AgentSlot,
    PartViews,
    Row,
    action_readers,
    number,
    part_of,
    spaces_of,
    write,
)
from torchrl_marl.envs.pettingzoo.drawing import drawn
from torchrl_marl.envs.pettingzoo.lifecycle import LifeCycle, check_agents, flag_of
from torchrl_marl.envs.pettingzoo.parts import flat_mask
from torchrl_marl.envs.pettingzoo.pickling import pickled, unpickled
from torchrl_marl.envs.pettingzoo.rng import OwnRandom
from torchrl_marl.errors import ConfigError, SpecError, UserError

__all__ = ["CopyPlan", "OneCopy", "ParallelCopy", "TurnCopy", "declared_limit"]

# Most steps of an episode in environments without a known time limit; more are an error.
ENDLESS = 10_000
_LIMITS = ("max_cycles", "max_steps", "max_num_steps", "_max_episode_steps", "max_episode_steps")

StepOutput = tuple[dict, dict, dict, dict, dict]


@dataclass(frozen=True)
class CopyPlan:
    """Settings shared by all copies of an environment, which can be sent to other processes.

    Args:
        name (str): name of the environment in messages.
        slots (sequence of AgentSlot): where each agent's data are stored.
        max_steps (int, optional): time limit of an episode, in steps.
        infos (mapping): group -> keys of its infos.
        state (bool): True to write the environment's ``state()``.
        respawns (bool): True if agents that were removed may appear again.
    """

    name: str
    slots: Sequence[AgentSlot]
    max_steps: int | None
    infos: Mapping[str, Sequence[str]]
    state: bool
    respawns: bool = False


class OneCopy(ABC):
    """One copy of an environment; it resets and steps, and writes the results to its row.

    Args:
        make (callable): function that returns the environment.
        plan (CopyPlan): settings shared by all copies.
        seed (int): random seed with which the environment is built.
    """

    in_turns = False

    def __init__(self, make: Callable[[], Any], plan: CopyPlan, seed: int = 0) -> None:
        self._random = OwnRandom(seed)
        with self._random.active(look=True):
            self.env = make()
        self.plan, self.slots = plan, plan.slots
        self.agents = [slot.spaces.agent for slot in plan.slots]
        self._agent_ids = frozenset(self.agents)
        self.life, self.steps = LifeCycle.of(self.agents, plan.respawns), 0
        self._limit = declared_limit(self.env, len(self.agents) if self.in_turns else 1)
        self._spaces: dict[Any, tuple[Any, Any]] = {}
        self._row: Row | None = None
        self._watched = False
        self._last_picture: np.ndarray | str | None = None

    # ------------------------------------------------------------ parallel and AEC environments

    @abstractmethod
    def _reset(self, seed: int | None) -> tuple[dict, dict]:
        """Resets the environment; returns observations and infos."""

    @abstractmethod
    def _step_env(self) -> StepOutput:
        """Steps the environment; returns observations, rewards, both done flags and infos."""

    @abstractmethod
    def _next_agents(self, observations: Mapping[Any, Any]) -> Collection[Any]:
        """Returns the agents that act next."""

    # ------------------------------------------------------------------------------ life cycle

    def begin(self, row: Row, seed: int | None) -> None:
        """Begins an episode and writes its first observations; without a given seed, draws one."""
        self._bind_row(row)
        self._last_picture = None
        if seed is not None:
            self._random.seed(seed)
        with self._random.active(look=True):
            self._begin_episode(seed)

    def play(self, row: Row) -> None:
        """Makes a step and writes its result; resets the environment if the episode ended."""
        self._bind_row(row)
        with self._random.active():
            if self.steps == 0:
                self._copy_part(self._begun_part, self._after_part, True)
            output = self._step_env()
            self.steps += 1
            over, changed = self._write_step(*output)
        if self._watched:
            self._last_picture = drawn(self.env, self.plan.name)
        if over:
            with self._random.active(look=True):
                self._begin_episode(None)
        else:
            self._copy_part(self._after_part, self._begun_part, changed)

    def _begin_episode(self, seed: int | None) -> None:
        observations, infos = self._reset(self._random.seed_of_episode() if seed is None else seed)
        self.steps, self.life = 0, LifeCycle.of(self.agents, self.plan.respawns)
        self._check_names(self.env.agents, observations)
        self._check_spaces(infos)
        for view in self._begun_part.fields.values():
            view[...] = 0
        self.life.advance(self.env.agents, {}, {})
        self.life.choose(self._next_agents(observations), self.in_turns)
        self._write(self._begun_part, observations, infos)
        self._write_flags(self._begun_part)

    def _write_step(
        self, observations: dict, rewards: dict, terminated: dict, truncated: dict, infos: dict
    ) -> tuple[bool, bool]:
        """Writes a step's result; returns whether the episode ended and whether flags changed."""
        changed, alive, life, present = False, True, self.life, self.env.agents
        earns = life.earns  # as it is at the start of the step
        self._check_names(present, observations, rewards, terminated, truncated)
        unchanged = life.all_act and observations.keys() == self._agent_ids == set(present)
        if not (unchanged and _all_false(terminated) and _all_false(truncated)):
            cut_off = self._limit is not None and self.steps >= self._limit
            changed, alive = life.advance(present, terminated, truncated, cut_off)
            changed = life.choose(self._next_agents(observations), self.in_turns) or changed
        over, view = not alive or self.steps == self.plan.max_steps, self._after_part
        self._write(view, observations, infos)
        try:
            for agent, reward_view, earns_reward in zip(self.agents, view.rewards, earns):
                reward_view[0] = rewards.get(agent, 0.0) if earns_reward else 0.0
        except (TypeError, ValueError):
            self._write_array_rewards(rewards, earns)
        if over:
            ended = life.close()
            self._write_flags(view)
            view.root[:, 0] = True, ended, not ended
        elif changed:
            self._write_flags(view)
        elif self.steps >= ENDLESS:
            self._refuse_endless()
        view.ended[0] = over
        return over, changed

    # ----------------------------------------------------------------------------------- rows

    def _bind_row(self, row: Row) -> None:
        """Makes the views of a row, unless they exist already."""
        if row is self._row:
            return
        self._row = row
        self._after_part = PartViews(row, "after", self.slots)
        self._begun_part = PartViews(row, "begun", self.slots)
        self._actions = action_readers(row, self.slots)
        self._groups = {
            group: [i for i, slot in enumerate(self.slots) if slot.group == group]
            for group in self._after_part.masks
        }

    @staticmethod
    def _copy_part(source: PartViews, target: PartViews, flags: bool) -> None:
        """Copies all data but rewards to another part of the row; flags only if asked to."""
        for old, new in zip(source.data, target.data):
            new[...] = old
        for old, new in zip(source.all_flags if flags else (), target.all_flags):
            new[...] = old

    def _write(self, view: PartViews, observations: Mapping, infos: Mapping) -> None:
        """Writes the agents' observations and infos."""
        life = self.life
        for i, agent in enumerate(self.agents):
            if life.left[i]:
                view.write_no_observation(i)
            elif (observation := observations.get(agent)) is not None:
                spaces = self.slots[i].spaces
                if spaces.wrapped:
                    observation = part_of(observation, "observation", agent)
                view.write_observation(i, agent, observation)
            if (mask := view.action_masks[i]) is not None:
                self._write_action_mask(mask, i, observations, infos)
            elif "action_mask" in (infos.get(agent) or ()):
                raise SpecError(
                    f"agent {agent!r} has an action mask in its infos, but no agent had one in "
                    "the first reset; let the environment return it in reset as well."
                )
        for group, keys in self.plan.infos.items():
            for key in keys:
                values = [number(infos.get(self.agents[i]), key) for i in self._groups[group]]
                view.infos[group][key][:] = values
        if self.plan.state:
            write(view.fields["state"], np.ravel(self.env.state()), "the environment's state")

    def _write_action_mask(
        self, mask: np.ndarray, i: int, observations: Mapping, infos: Mapping
    ) -> None:
        agent, legal = self.agents[i], None
        if self.life.acts[i]:
            source = observations if self.slots[i].spaces.masked == "observation" else infos
            legal = (source.get(agent) or {}).get("action_mask")
        if legal is None:
            mask[...] = True  # any action is legal for inactive agents
        else:
            legal = flat_mask(legal, self.slots[i].spaces.action)
            write(mask, legal, f"the action mask of agent {agent!r}")

    def _write_array_rewards(self, rewards: Mapping, earns: Sequence[bool]) -> None:
        """Writes rewards that are not plain numbers, such as arrays of one element."""
        for agent, reward_view, earns_reward in zip(self.agents, self._after_part.rewards, earns):
            reward = rewards.get(agent, 0.0) if earns_reward else 0.0
            write(reward_view, np.ravel(reward), f"the reward of agent {agent!r}")

    def _write_flags(self, view: PartViews) -> None:
        life = self.life
        for group, indices in self._groups.items():
            terminated = [life.terminated[i] for i in indices]
            truncated = [life.truncated[i] for i in indices]
            view.flags[group][..., 0] = (
                [a or b for a, b in zip(terminated, truncated)],
                terminated,
                truncated,
            )
            view.masks[group][:] = [life.acts[i] for i in indices]

    # ---------------------------------------------------------------------------------- checks

    def _check_names(self, *named: Collection) -> None:
        """Raises an error if observations, rewards or flags name an unknown agent."""
        if not all(map(self._agent_ids.issuperset, named)):
            parts = ("agents", "observations", "rewards", "terminations", "truncations")
            check_agents(self.agents, dict(zip(parts, named)))

    def _check_spaces(self, infos: Mapping) -> None:
        """Raises an error if the spaces are not the same as in the first episode."""
        for slot in self.slots:
            declared = slot.spaces
            agent = declared.agent
            spaces = self.env.observation_space(agent), self.env.action_space(agent)
            known = self._spaces.get(agent)
            if known is not None and all(a is b for a, b in zip(known, spaces)):
                continue
            found = spaces_of(self.env, agent, infos)
            if (found.observation, found.action) != (declared.observation, declared.action):
                raise SpecError(
                    f"the spaces of agent {agent!r} are {found.observation} and "
                    f"{found.action} in a new episode, expected {declared.observation} and "
                    f"{declared.action} as in the first; pad the environment's spaces to one size."
                )
            self._spaces[agent] = spaces

    def _refuse_endless(self) -> None:
        """Raises an error for a long episode without a known time limit."""
        if self.plan.max_steps is not None:
            return
        if self._limit is None or self.steps > self._limit * len(self.agents):
            raise ConfigError(
                f"an episode did not end in {self.steps} steps; set the time limit max_steps for "
                "an environment that never ends."
            )

    # -------------------------------------------------------------------------- save and close

    def save(self) -> bytes:
        """Returns the whole state of the copy.

        Raises:
            UserError: if the environment cannot be pickled.
        """
        try:
            return pickled((self.env, self._random, self.steps, self.life))
        except Exception as error:
            raise UserError(
                f"the environment cannot be pickled ({type(error).__name__}: {error}); "
                "a resumed run starts new episodes."
            ) from error

    def load(self, state: bytes) -> None:
        """Restores a state that :meth:`save` returned."""
        self.env, self._random, self.steps, self.life = unpickled(state)
        self._spaces = {}

    def watch(self, on: bool) -> None:
        """Turns drawing on or off; if on, all steps are drawn, including the last of an episode."""
        self._watched, self._last_picture = on, None

    def draw(self) -> np.ndarray | str:
        """Returns a picture of the environment; after the end of an episode, of its last state."""
        return drawn(self.env, self.plan.name) if self._last_picture is None else self._last_picture

    def close(self) -> None:
        """Closes the environment."""
        self.env.close()


class ParallelCopy(OneCopy):
    """Copy of a parallel environment, in which agents with an observation act in the next step."""

    def _reset(self, seed: int | None) -> tuple[dict, dict]:
        return self.env.reset(seed=seed)

    def _step_env(self) -> StepOutput:
        acts = zip(self.agents, self.life.acts, self._actions)
        return self.env.step({agent: action() for agent, acts_next, action in acts if acts_next})

    def _next_agents(self, observations: Mapping[Any, Any]) -> Collection[Any]:
        return observations


class TurnCopy(OneCopy):
    """Copy of an AEC environment, where a step is one agent's move.

    The environment accumulates an agent's rewards until the agent's next turn. The copy returns
    each reward in the step in which the agent earned it.
    """

    in_turns = True

    def _reset(self, seed: int | None) -> tuple[dict, dict]:
        self.env.reset(seed=seed)
        observations: dict[Any, Any] = {}
        self._read_observations(observations, self.env.agents)
        return observations, self.env.infos

    def _step_env(self) -> StepOutput:
        env = self.env
        mover = env.agent_selection
        self._pending_rewards()[mover] = 0  # some wrappers do not reset this entry
        known_totals, before = dict(self._pending_rewards()), list(env.agents)
        env.step(self._actions[self.agents.index(mover)]())
        observations: dict[Any, Any] = {}
        rewards: dict[Any, float] = {}
        terminated: dict[Any, bool] = {}
        truncated: dict[Any, bool] = {}
        infos = dict(env.infos)
        for _ in range(2 * len(self.agents) + 1):
            self._add_rewards(known_totals, rewards)
            ended = self._record_flags(before, terminated, truncated)
            self._read_observations(observations, ended)
            if not env.agents or env.agent_selection not in ended:
                break
            env.step(None)
        else:
            raise SpecError(
                f"agent {env.agent_selection!r} ended and is selected again "
                "after each step(None); the environment must remove it from its agents."
            )
        infos.update(env.infos)
        self._read_observations(observations, env.agents)
        return observations, rewards, terminated, truncated, infos

    def _next_agents(self, observations: Mapping[Any, Any]) -> Collection[Any]:
        mover = self.env.agent_selection
        if not self.env.agents:
            return ()
        if mover not in self.agents:
            check_agents(self.agents, {"movers (agent_selection)": [mover]})
        return (mover,)

    def _pending_rewards(self) -> dict:
        """Returns the rewards that each agent has not yet received."""
        return self.env._cumulative_rewards

    def _add_rewards(self, known_totals: dict, rewards: dict) -> None:
        """Adds the growth of each agent's accumulated reward to the agent's reward in this step."""
        for agent, total in self._pending_rewards().items():
            rewards[agent] = rewards.get(agent, 0.0) + total - known_totals.get(agent, 0)
            known_totals[agent] = total

    def _record_flags(self, before: list[Any], terminated: dict, truncated: dict) -> list[Any]:
        """Records the done flags of all agents; returns ended agents that are not yet removed."""
        env = self.env
        for agent in dict.fromkeys((*before, *env.agents)):
            is_terminated = flag_of(agent, "terminated", env.terminations.get(agent))
            is_truncated = flag_of(agent, "truncated", env.truncations.get(agent))
            terminated[agent] = terminated.get(agent, False) or is_terminated
            truncated[agent] = truncated.get(agent, False) or is_truncated
        return [agent for agent in env.agents if terminated[agent] or truncated[agent]]

    def _read_observations(self, observations: dict, agents: Collection[Any]) -> None:
        """Reads the agents' observations; skips waiting agents that cannot be observed."""
        for agent in agents:
            try:
                observations[agent] = self.env.observe(agent)
            except Exception:
                if agent == self.env.agent_selection:
                    raise


def _all_false(flags: Mapping) -> bool:
    """Returns True if all flags are False. The test is fast; any other value counts as an end."""
    return list(flags.values()).count(False) == len(flags)


def declared_limit(env: Any, n_moves: int) -> int | None:
    """Returns the time limit that an environment declares, in moves; None if it declares none.

    Args:
        env: PettingZoo environment.
        n_moves (int): number of moves per round, by which the declared limit is multiplied.
    """
    inner = getattr(env, "unwrapped", env)
    for name in _LIMITS:
        limit = getattr(inner, name, None)
        if isinstance(limit, int) and limit > 0:
            return limit * n_moves
    return None
