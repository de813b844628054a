"""Isaac Lab multi-agent tasks as TorchRL environments.

Shapes: E envs, N agents of a group, O observation features, S state features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torchrl.data import TensorSpec, Unbounded
from torchrl.envs.utils import MarlGroupMapType

from torchrl_marl.envs.agents.declaration import (
    Declaration,
    check_state,
    check_whole_numbers,
    refuse_unknown,
)
from torchrl_marl.envs.agents.declared_env import AutoResetEnv
from torchrl_marl.envs.agents.life_cycle import GroupFlags, TeamFlags, where_fresh
from torchrl_marl.envs.agents.spaces import spec_of_space
from torchrl_marl.envs.isaaclab.agents import ActionRanges, Agents, Range, declared, groups_of
from torchrl_marl.envs.isaaclab.build import build_task, check_task
from torchrl_marl.envs.isaaclab.simulation import IsaacSimulation, StateOf
from torchrl_marl.errors import ConfigError
from torchrl_marl.runtime.random_state import RandomState, offset_seed

__all__ = ["IsaacLabEnv"]


class IsaacLabEnv(AutoResetEnv):
    """Isaac Lab multi-agent task, a ``DirectMARLEnv``, with grouped agents.

    Isaac Lab 3.0 runs without Isaac Sim. For 2.3 start Isaac Sim first, as in Isaac Lab's scripts:
    ``from isaaclab.app import AppLauncher; app = AppLauncher(headless=True).app``. Isaac Lab runs
    one simulation per process. So evaluate in the environment that you train in, or close that
    environment before you build another.

    If all agents of an env terminate in a step, or all time out, Isaac Lab resets the env within
    that step, and returns the observation after the reset. Here ``("next", ...)`` holds the last
    observation and state of the episode instead. To get them, the adapter calls
    ``_get_observations`` and ``state()`` before the reset, only in steps in which an env ends. The
    episode's done flag is the task's ``reset_buf``. An agent that ends earlier stays dead until the
    reset, even if the task clears the agent's flag. In Isaac Lab an episode never ends if its
    agents end in different ways or in different steps. Here such an episode ends once no agent is
    left. It is terminated if all agents terminated, otherwise truncated.

    Args:
        env (DirectMARLEnv or str): a task that is already built, or the name of a registered one,
            such as ``"Isaac-Pendulum-MARL-Direct"`` (3.0) or
            ``"Isaac-Cart-Double-Pendulum-Direct-v0"`` (2.3).

    Keyword Args:
        num_envs (int, optional): number E of envs of a named task; if None, the task's default.
        max_steps (int, optional): time limit of an episode in steps, in addition to the task's
            limit (``episode_length_s``).
        seed (int, optional): random seed; if None, it is drawn from torch's global generator.
        device (torch.device, optional): device of a named task; if None, the task's default.
        state ("observations" or "world", optional): the critic's input: the concatenated
            observations of all agents, group by group, or the result of the task's ``state()``. If
            the task's ``state_space`` has a space for each agent, and its ``state()`` is a dict,
            then each agent has a state of its own, ``(group, "state")``.
        group_map (MarlGroupMapType or dict, optional): group -> names of its agents. By
            default agents with a common name prefix (``robot_0``, ``robot_1``) and equal spaces
            form a group.
        action_scale (float or dict, optional): factor by which actions in [-1, 1] are multiplied
            in unbounded action spaces, of which a task declares only the size. It is one number
            for all agents, or a number by agent or group.
        action_clip (float or dict, optional): instead of a scale, the largest absolute value, to
            which normally distributed actions are clipped; with ``math.inf`` nothing is clipped.
        terminal_observations (bool): False for tasks in which observations can be read only once
            per step. At the end of an episode, ``("next", ...)`` then repeats the previous
            observation.
        usd_path (str or dict, optional): file of a named task's robot on this machine, or asset
            of its scene (``"robot"``, ``"ground"``) -> file; by default Isaac Lab loads them from
            its server.
        **kwargs: settings of a named task's config, such as ``episode_length_s``.

    Shapes:
        - ``(group, "observation")``: ``[E, N, O]``; ``("next", group, "reward")``: ``[E, N, 1]``
        - ``(group, "mask")``: ``[E, N]``; ``(group, "done")``: ``[E, N, 1]``
        - ``done``, ``terminated``, ``truncated``: ``[E, 1]``
        - ``"state"``: ``[E, S]``, or ``(group, "state")``: ``[E, N, S]``

    Raises:
        ConfigError: if a task, setting, group or agent is unknown, unbounded actions have neither
            a scale nor a clip, the task has no state, a file is missing, or Isaac Lab cannot be
            imported.
        SpecError: if values of a space are not tensors of a fixed shape, or if the task's output
            does not fit its spaces.

    Reference: Mittal et al., 2023, https://arxiv.org/abs/2301.04195.

    Examples:
        >>> env = IsaacLabEnv(  # doctest: +SKIP
        ...     "Isaac-Pendulum-MARL-Direct", num_envs=64, action_scale=1.0
        ... )
        >>> env.rollout(5)["next", "cart", "reward"].shape  # doctest: +SKIP
        torch.Size([64, 5, 1, 1])
    """

    one_per_process = True

    def __init__(
        self,
        env: Any,
        *,
        num_envs: int | None = None,
        max_steps: int | None = None,
        seed: int | None = None,
        device: torch.device | str | None = None,
        state: StateOf = None,
        group_map: MarlGroupMapType | dict[str, list[str]] | None = None,
        action_scale: Range = None,
        action_clip: Range = None,
        terminal_observations: bool = True,
        usd_path: str | Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        check_whole_numbers("IsaacLabEnv", {"max_steps": max_steps})
        check_state("IsaacLabEnv", state)
        ranges = ActionRanges(action_scale, action_clip)
        seed = int(torch.randint(2**31, ())) if seed is None else seed
        if isinstance(env, str):
            owner, random = env, RandomState(offset_seed(seed), device or "cpu")
            with random.active():
                task = build_task(
                    env,
                    num_envs=num_envs,
                    seed=seed,
                    device=device,
                    settings=kwargs,
                    usd_path=usd_path,
                )
        else:
            refuse_unknown(kwargs, IsaacLabEnv)
            task = check_task(env)
            owner = type(task).__name__
            _check_built_task(task, num_envs, device, usd_path)
        states = _agent_state_spaces(owner, task) if state == "world" else None
        groups = groups_of(task, group_map, states)
        declaration = declared(owner, task, groups, ranges, states)
        spec = None if states is not None else _state_spec(task, declaration, state)
        declaration = declaration if spec is None else declaration.with_state(spec)
        super().__init__(declaration, device=task.device)
        self._agents = Agents.of(task, declaration, ranges)
        self._simulation = IsaacSimulation(
            task,
            self._agents,
            state=state,
            max_steps=max_steps,
            terminal_observations=terminal_observations,
        )
        self.max_steps, self.own_limit = max_steps, getattr(task, "max_episode_length", None)
        self._random = RandomState(offset_seed(seed), task.device)
        self._last_observations: dict[str, Any] = {}
        self._agent_flags: GroupFlags | None = None
        self._set_seed(seed)

    @property
    def task(self) -> Any:
        """Isaac Lab's environment, which this adapter wraps."""
        return self._simulation.env

    def _set_seed(self, seed: int | None) -> None:
        stream = offset_seed(0 if seed is None else seed)
        self._random.seed(stream)
        with self._random.active():  # the task seeds the global generators
            self.task.seed(stream % 2**31)
        self._simulation.forget_actions()

    # ---------------------------------------------------------------------------- reset, step

    def _start(self, fresh: Tensor | None) -> dict[str, Any]:
        with self._random.active():
            observations = self._simulation.start(fresh)
        flags = self._simulation.living()
        if fresh is not None and self._agent_flags is not None:
            observations = where_fresh(fresh, observations, self._last_observations)
            flags = _select_flags(fresh, flags, self._agent_flags)
        self._last_observations, self._agent_flags = observations, flags
        return self._make_output(observations, self._running_flags, flags)

    def _play(self, actions: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
        assert self._agent_flags is not None  # a step comes after a reset
        with self._random.active():
            step = self._simulation.step(actions, self._agent_flags)
        reward = torch.where(self._agent_flags.done, 0.0, step.reward)
        observations, flags = step.seen, step.agents
        if step.was_reset:
            ended = step.root.done.squeeze(-1)
            last = self._last_observations if step.last is None else step.last
            observations = where_fresh(ended, last, step.seen)
            flags = _select_flags(ended, self._simulation.living(), step.agents)
        after = self._make_output(observations, step.root, step.agents)
        for group, agents in self._agents.places.items():
            after[group]["reward"] = reward[:, agents]
        self._last_observations, self._agent_flags = step.seen, flags
        return after, self._make_output(step.seen, self._running_flags, flags)

    @property
    def _running_flags(self) -> TeamFlags:
        return TeamFlags.running(self.batch_size, self.device)

    def _make_output(
        self, observations: dict[str, Any], team_flags: TeamFlags, agent_flags: GroupFlags
    ) -> dict[str, Any]:
        """Returns the output of a step or reset, which includes the flags of each group."""
        output = {**observations, "done": team_flags.done, **team_flags.__dict__}
        # A copy, since users may write to the output.
        flags = {
            key: x.clone() for key, x in {**agent_flags.__dict__, "done": agent_flags.done}.items()
        }
        for group, rows in self._agents.places.items():
            output[group] = {**observations[group], **{key: x[:, rows] for key, x in flags.items()}}
        return output

    # ----------------------------------------------------------------------------- the object

    def to(self, device: torch.device | str) -> IsaacLabEnv:
        """Returns the environment unchanged; a simulation cannot move to another device.

        Raises:
            ConfigError: if the device differs from the simulation's.
        """
        if not _same_device(device, self.task.device):
            raise ConfigError(
                f"the task runs on {self.task.device}, expected {device}; set the device when it "
                "is built, in IsaacLabEnv(name, device=...) or in its cfg.sim.device."
            )
        return self

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Closes the simulation; after that, another one can be built."""
        super().close(raise_if_closed=raise_if_closed)
        self._simulation.close()


def _select_flags(envs: Tensor, new: GroupFlags, old: GroupFlags) -> GroupFlags:
    """Selects new flags where the mask ``envs`` ``[E]`` is True, and old flags elsewhere."""
    return replace(old, **where_fresh(envs, new.__dict__, old.__dict__))


def _check_built_task(
    task: Any, num_envs: int | None, device: torch.device | str | None, usd_path: Any
) -> None:
    if usd_path is not None:
        raise ConfigError(
            "usd_path is for tasks by name; set the files in the cfg of the given task before it "
            "is built."
        )
    if num_envs is not None and num_envs != task.num_envs:
        raise ConfigError(
            f"num_envs is {num_envs}, but the given task has {task.num_envs}; set "
            "cfg.scene.num_envs before it is built."
        )
    if device is not None and not _same_device(device, task.device):
        raise ConfigError(
            f"device is {device}, but the given task runs on {task.device}; set cfg.sim.device "
            "before it is built."
        )


def _same_device(first: torch.device | str, second: torch.device | str) -> bool:
    first, second = torch.device(first), torch.device(second)
    return first.type == second.type and (first.index or 0) == (second.index or 0)


def _agent_state_spaces(owner: str, task: Any) -> dict[str, Any] | None:
    """Returns the space of each agent's own state; None if the task has one state for all."""
    space: Any = getattr(task, "state_space", None)
    if type(space).__name__ != "Dict":
        return None
    spaces, names = dict(space.spaces), list(task.possible_agents)
    if set(spaces) != set(names):
        raise ConfigError(
            f"{owner}: state_space has the keys {list(spaces)}, expected its agents {names}, each "
            "with a state of its own; set a size for each agent, or one size for all."
        )
    return spaces


def _state_spec(task: Any, declaration: Declaration, state: StateOf) -> TensorSpec | None:
    if state is None:
        return None
    if state == "observations":
        return Unbounded((declaration.n_observed,))
    if not task.cfg.state_space:
        raise ConfigError(
            f"{declaration.owner} has no state (its cfg.state_space is {task.cfg.state_space!r}); "
            "set state_space=-1, which concatenates all observations, or state='observations'."
        )
    return spec_of_space(f"the state of {declaration.owner}", task.state_space)
