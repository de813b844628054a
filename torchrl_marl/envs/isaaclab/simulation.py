"""Wrapper of an Isaac Lab simulation, and the done flags of its episodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torchrl.data import TensorSpec

from torchrl_marl.envs.agents.life_cycle import GroupFlags, TeamFlags
from torchrl_marl.envs.isaaclab.agents import Agents
from torchrl_marl.errors import SpecError

__all__ = ["Ends", "IsaacSimulation", "StateOf", "Step", "present"]


@dataclass(frozen=True)
class Ends:
    """Done flags of the agents after a step, in episodes that continue and episodes that end.

    A task may clear an agent's ``terminated`` flag while the episode continues. Here the flag of
    an agent that ended stays True until the reset. Isaac Lab ends an episode only if all agents
    terminate or all time out in the same step. An episode in which some terminated and others timed
    out would never end, so :attr:`over` is also True if no agent is left or the time limit is
    reached.

    Args:
        running (GroupFlags): flags of the agents if the episode continues.
        last (GroupFlags): flags of the agents if the episode ends; agents that time out in this
            step count as alive.
        terminated (Tensor): True if the episode, once it ends, is terminated.
        over (Tensor): True if the episode must end.

    Shapes:
        - flags of ``running`` and ``last``: ``[E, N, 1]``; terminated, over: ``[E, 1]``
    """

    running: GroupFlags
    last: GroupFlags
    terminated: Tensor
    over: Tensor

    @classmethod
    def of(
        cls,
        before: GroupFlags,
        terminated: Tensor,
        timed_out: Tensor,
        limit: Tensor | None = None,
        away: Tensor | None = None,
    ) -> Ends:
        """Computes the flags from the flags before a step and the task's flags after the step.

        Args:
            before (GroupFlags): flags before the step; they are True for all agents that have
                ended since the last reset.
            terminated, timed_out (Tensor): flags from the task, ``[E, N, 1]``.
            limit (Tensor, optional): mask ``[E, 1]`` of the envs at the adapter's time limit.
            away (Tensor, optional): mask ``[1, N, 1]`` of agents that the task left out.
        """
        last = before.ended_by(terminated, None)
        running = last.ended_by(None, timed_out)
        absent = torch.zeros_like(terminated[:1]) if away is None else away
        all_terminated = (terminated | absent).all(1) | (last.terminated | absent).all(1)
        over = (running.done | absent).all(1)
        return cls(running, last, all_terminated, over if limit is None else over | limit)

    def flags(self, done: Tensor, away: Tensor | None = None) -> tuple[TeamFlags, GroupFlags]:
        """Returns the flags of the episode and of the agents, with the mask of the next step.

        Args:
            done (Tensor): mask ``[E, 1]`` of the envs that were reset.
            away (Tensor, optional): mask ``[1, N, 1]`` of agents that the task left out.
        """
        terminated = done & self.terminated
        root = TeamFlags(terminated, done & ~terminated)
        truncated = torch.where(done.unsqueeze(1), self.last.truncated, self.running.truncated)
        agents = replace(self.running, truncated=truncated).closed_by(root, None)
        return root, present(agents, away)


def present(agents: GroupFlags, away: Tensor | None) -> GroupFlags:
    """Sets the mask of agents that are absent from the task to False."""
    if away is None:
        return agents
    return replace(agents, mask=agents.mask & ~away.squeeze(-1))


StateOf = Literal["observations", "world"] | None


@dataclass(frozen=True)
class Step:
    """Output of a step.

    Args:
        seen (dict): observations by group and the states, after ended envs were reset.
        last (dict, optional): observations and states of all envs, before ended envs were reset.
            None if no env was reset, or if last observations are not read.
        was_reset (bool): True if at least one env was reset.
        reward (Tensor): rewards, ``[E, N, 1]``.
        root (TeamFlags): flags of the episodes.
        agents (GroupFlags): flags of all agents.
    """

    seen: dict[str, Any]
    last: dict[str, Any] | None
    was_reset: bool
    reward: Tensor
    root: TeamFlags
    agents: GroupFlags


class IsaacSimulation:
    """Wrapper of a ``DirectMARLEnv`` that keeps the last observations of ended episodes.

    Two methods of the instance are replaced until :meth:`close`. The new ``_get_dones`` reports
    episodes that must end as timed out. The new ``_reset_idx`` reads an episode's last observation
    and state before the reset.

    Args:
        env (DirectMARLEnv): the simulation.
        agents (Agents): converter of the tensors of the simulation's agents.
        state (str, optional): source of the critic's state, ``"world"`` or ``"observations"``. If
            the declaration has no state of the team, the task's own state is one for each agent.
        max_steps (int, optional): time limit of an episode in steps, in addition to the task's.
        terminal_observations (bool): True to read the last observations.
    """

    def __init__(
        self,
        env: Any,
        agents: Agents,
        *,
        state: StateOf,
        max_steps: int | None,
        terminal_observations: bool,
    ) -> None:
        self.env, self.agents, self.state = env, agents, state
        self.max_steps, self.terminal_observations = max_steps, terminal_observations
        self._flags_before_step: GroupFlags | None = None
        self._done_flags: Ends | None = None
        self._last_observations: dict[str, Any] | None = None
        self._any_env_was_reset = False
        _restore_methods(env)
        self._get_dones, self._reset_idx = env._get_dones, env._reset_idx
        env._get_dones, env._reset_idx = self._patched_get_dones, self._patched_reset_idx

    def close(self) -> None:
        """Closes the simulation."""
        _restore_methods(self.env)
        self.env.close()

    def living(self) -> GroupFlags:
        """Returns the flags of all agents in a new episode."""
        size = torch.Size([self.agents.declaration.num_envs])
        flags = GroupFlags.living(size, len(self.agents.names), self.agents.device)
        return present(flags, self.agents.away(self.env.obs_dict))

    def forget_actions(self) -> None:
        """Sets the task's last actions, which some tasks show, to zeros as in a new task."""
        actions = getattr(self.env, "actions", None)
        if isinstance(actions, Mapping):
            self.env.actions = tree_map(torch.zeros_like, dict(actions))

    def start(self, envs: Tensor | None) -> dict[str, Any]:
        """Resets the envs where the mask is True, or all envs without one; returns observations."""
        env = self.env
        if envs is not None:
            self._reset_idx(envs.nonzero().squeeze(-1))
            env.obs_dict = self._observe()
        else:
            env.reset()
            if not hasattr(env, "_compute_observations"):  # 2.3 resets without noise
                env.obs_dict = self._add_noise(env.obs_dict)
        return self._convert_observations(env.obs_dict)

    def step(self, actions: Mapping[str, Any], before: GroupFlags) -> Step:
        """Makes a step, and resets the envs that end.

        Args:
            actions (mapping): group -> ``"action"``, or group -> kind -> ``"action"``.
            before (GroupFlags): flags of all agents before the step.
        """
        self._flags_before_step, self._last_observations, self._any_env_was_reset = (
            before,
            None,
            False,
        )
        output = self.env.step(self.agents.actions(actions, before.mask))
        self._flags_before_step = None
        observations, rewards = output[:2]
        assert self._done_flags is not None  # every step sets it
        # A copy, since the task overwrites this buffer later.
        done = self.env.reset_buf.clone().unsqueeze(-1)
        root, agents = self._done_flags.flags(done, self.agents.away(observations))
        reward = self.agents.numbers(rewards, torch.float32)
        return Step(
            self._convert_observations(observations),
            self._last_observations,
            self._any_env_was_reset,
            reward,
            root,
            agents,
        )

    def _patched_get_dones(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Replaces the task's ``_get_dones``; reports episodes that must end as timed out."""
        terminated, time_outs = self._get_dones()
        if self._flags_before_step is None:
            return terminated, time_outs
        limit = None
        if self.max_steps is not None:
            limit = (self.env.episode_length_buf >= self.max_steps).unsqueeze(-1)
        self._done_flags = Ends.of(
            self._flags_before_step,
            self.agents.numbers(terminated, torch.bool),
            self.agents.numbers(time_outs, torch.bool),
            limit,
            self.agents.away(terminated),
        )
        over = self._done_flags.over.squeeze(-1)
        return terminated, {name: flag.bool() | over for name, flag in time_outs.items()}

    def _patched_reset_idx(self, env_ids: Any) -> None:
        """Replaces the task's ``_reset_idx``; reads the last observations before the reset."""
        in_step = self._flags_before_step is not None
        if in_step and self.terminal_observations and self._last_observations is None:
            self._last_observations = self._read_current()
        self._any_env_was_reset = True
        self._reset_idx(env_ids)

    def _read_current(self) -> dict[str, Any]:
        """Returns the current observations and state; the task's ``obs_dict`` is unchanged."""
        env, observations = self.env, self._observe()
        kept = getattr(env, "obs_dict", None)
        env.obs_dict = observations  # the task may compute its state from the observations
        try:
            return self._convert_observations(observations)
        finally:
            env.obs_dict = kept

    def _observe(self) -> dict[str, Any]:
        """Returns the task's current observations, with the noise that a step adds to them."""
        if hasattr(self.env, "_compute_observations"):  # since Isaac Lab 3.0
            return self.env._compute_observations()
        return self._add_noise(self.env._get_observations())

    def _add_noise(self, observations: dict[str, Any]) -> dict[str, Any]:
        """Adds the task's noise to observations, as a step of Isaac Lab 2.3 does."""
        if self.env.cfg.observation_noise_model:
            for name, noise in self.env._observation_noise_model.items():
                if name in observations:
                    observations[name] = noise(observations[name])
        return observations

    def _convert_observations(self, observations: Mapping[str, Any]) -> dict[str, Any]:
        converted: dict[str, Any] = self.agents.observations(observations)
        if self.state == "observations":
            rows = [x.flatten(1).float() for x in tree_leaves(converted)]
            converted["state"] = torch.cat(rows, -1)
        elif self.state == "world" and self.agents.declaration.state is None:
            self.agents.add_states(self._agent_states(observations), converted)
        elif self.state == "world":
            converted["state"] = self._world_state(self.agents.declaration.state)
        return converted

    def _agent_states(self, observations: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns a state for each agent; raises an error if one with an observation has none."""
        states, owner = self.env.state(), self.agents.declaration.owner
        if not isinstance(states, Mapping):
            raise SpecError(
                f"{owner}: its state is a {type(states).__name__}, expected a dict with a state "
                "for each agent, as in its state_space; correct one of the two."
            )
        self.agents.away(states)  # refuses unknown agents
        if missing := [name for name in observations if name not in states]:
            raise SpecError(
                f"{owner}: its state lacks {missing[0]!r}, expected one for each agent that has an "
                "observation; return it in _get_states."
            )
        return states

    def _world_state(self, spec: TensorSpec) -> Tensor:
        state = self.env.state()
        expected = (self.env.num_envs, *spec.shape)
        if not isinstance(state, Tensor) or state.shape != expected:
            found = list(state.shape) if isinstance(state, Tensor) else type(state).__name__
            raise SpecError(
                f"{self.agents.declaration.owner}: its state is {found}, expected "
                f"{list(expected)} as in its state_space; correct one of the two."
            )
        # The task may return a buffer that it overwrites later.
        return state.to(spec.dtype, copy=True)


def _restore_methods(env: Any) -> None:
    """Restores the methods of a task that an earlier wrapper replaced."""
    for name in ("_get_dones", "_reset_idx"):
        replacement = vars(env).get(name)
        if isinstance(getattr(replacement, "__self__", None), IsaacSimulation):
            delattr(env, name)
            original = getattr(replacement.__self__, name)
            # They differ if the method was already replaced before the earlier wrapper was made.
            if original != getattr(env, name):
                setattr(env, name, original)
