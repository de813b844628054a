"""Environment of MuJoCo robots with joints as agents, all envs in one batch.

Shapes: E envs, N agents, with Q positions, V velocities and A actuators.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from itertools import groupby
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Bounded, Unbounded

from torchrl_marl.envs.agents.declaration import check_least
from torchrl_marl.envs.marl_env import MarlEnv
from torchrl_marl.envs.mujoco.build import Agent, Task, build_task, key_of
from torchrl_marl.envs.mujoco.columns import Columns
from torchrl_marl.envs.mujoco.engines import SCALES, advance, engine_of
from torchrl_marl.envs.mujoco.robots import ROBOTS
from torchrl_marl.envs.ranges import read_known_ranges
from torchrl_marl.envs.scene import Picture, Stage
from torchrl_marl.errors import (
    ConfigError,
    MissingExtraError,
    SimulatorStateError,
    nearest,
    quoted,
)
from torchrl_marl.specs import AgentSpec

__all__ = ["MujocoEnv"]

GROUP = "agent"


class MujocoEnv(MarlEnv):
    """Environment of a MuJoCo robot with joints as agents (MaMuJoCo).

    Models, partitions, observations and rewards are those of Gymnasium-Robotics. With
    ``engine="c"``, a step gives the same bits. All agents earn the robot's reward, and all are
    terminated if the robot falls. Agents that follow each other are one kind if their observations
    and actions have the same sizes, and their actions the same bounds.

    The physics are float64 with ``engine="c"`` and float32 with ``engine="warp"``; observations and
    rewards are float32.

    Args:
        robot (str): ``ant``, ``halfcheetah``, ``hopper``, ``humanoid``, ``manysegmentant``,
            ``manysegmentswimmer``, ``swimmer`` or ``walker2d``.
        num_envs (int): number E of parallel envs.

    Keyword Args:
        agent_conf (str, optional): partition of the joints, such as ``"4x2"`` for 4 agents with 2
            joints each. In addition to those of Gymnasium-Robotics, each robot has a partition with
            one agent per joint, such as ``"17x1"`` of the humanoid. None: the robot's default.
        agent_obsk (int, optional): distance in joints up to which an agent observes other joints.
            None: each agent observes the whole state, as in HARL.
        engine (str): ``"c"`` is MuJoCo on as many CPU threads as torch uses; ``"warp"`` is MuJoCo
            Warp, for GPUs.
        max_steps (int, optional): time limit of an episode in steps, 1,000 by default.
        seed, device, check: as in :class:`MarlEnv`.
        **settings: arguments of Gymnasium's environment, such as ``healthy_reward``.

    Shapes:
        - ``("agent", "observation")``: ``[E, N, O]``, ``("agent", "action")``: ``[E, N, A / N]``;
          lazily stacked if the agents' sizes differ
        - ``("next", "agent", "reward")``: ``[E, N, 1]``
        - ``"state"``: ``[E, S]``, the observation of a single agent that has all joints

    With ``engine="c"``, :meth:`randomize` scales the model's ``mass``, ``friction``, ``damping``,
    ``strength`` (of the motors) and ``gravity``, separately for each env.

    Raises:
        ConfigError: unknown robot, partition or setting.
        MissingExtraError: MuJoCo or Gymnasium-Robotics is not installed.

    Reference: Peng et al., 2021, https://arxiv.org/abs/2003.06709; de Lazcano et al., 2023,
    https://robotics.farama.org/envs/MaMuJoCo; Todorov et al., 2012 (MuJoCo).

    Examples:
        >>> env = MujocoEnv("ant", 2, seed=0)
        >>> env.rollout(3)["agent", "observation"].shape
        torch.Size([2, 3, 4, 42])
    """

    def __init__(
        self,
        robot: str,
        num_envs: int,
        *,
        agent_conf: str | None = None,
        agent_obsk: int | None = 1,
        engine: str = "c",
        max_steps: int | None = None,
        seed: int | None = None,
        device: torch.device | str | None = None,
        check: bool = False,
        **settings: Any,
    ) -> None:
        limit = 1000 if max_steps is None else max_steps
        super().__init__(num_envs, max_steps=limit, seed=seed, device=device, check=check)
        _check_arguments(robot, engine, self.device)
        if agent_obsk is not None:
            if type(agent_obsk) is not int:
                raise ConfigError(
                    f"MujocoEnv: agent_obsk is {agent_obsk!r}, expected a whole number or None."
                )
            check_least("MujocoEnv", agent_obsk=(agent_obsk, 0))
        self._kind, self._key = engine, key_of(robot, agent_conf, agent_obsk, settings)
        self._dtype = engine_of(engine, self._key).dtype
        task = build_task(self._key)
        kinds = _group_by_kind(task)
        self._seen = tuple(self._to_tensors(_stack_columns(kind)) for kind in kinds)
        self._names = tuple(kind[0].name for kind in kinds)
        self._seen_by_critic = self._to_tensors(task.state)
        order = [actuator for agent in task.agents for actuator in agent.actuators]
        self._order = torch.tensor(order, device=self.device).argsort()
        self._start = torch.tensor(task.start, dtype=self._dtype, device=self.device)
        if task.robot.place == "xipos":
            masses = torch.tensor(task.model.body_mass, dtype=self._dtype, device=self.device)
            self._weights = (masses / masses.sum()).unsqueeze(-1)
        self._declare_agents(task, kinds)
        self.register_state(Unbounded((len(task.state.where),)))
        for name in SCALES if engine == "c" else ():
            self.register_domain_parameter(name, 1.0)

    def _declare_agents(self, task: Task, kinds: list[list[Agent]]) -> None:
        for kind in kinds:
            first = kind[0]
            observation = Unbounded((len(first.columns.where),))
            low, high = map(torch.tensor, task.bounds(first))
            action = Bounded(low, high, low.shape)
            name = GROUP if len(kinds) == 1 else first.name
            names = tuple(agent.name for agent in kind)
            spec = AgentSpec(name, len(kind), observation, action, agent_names=names)
            self.register_agent(spec, group=GROUP)

    def _to_tensors(self, columns: Columns) -> tuple[Tensor, Tensor, Tensor]:
        index, low, high = (torch.as_tensor(x, device=self.device) for x in columns)
        return index, low.float(), high.float()

    @property
    def task(self) -> Task:
        """The robot's model, reward and agents."""
        return build_task(self._key)

    def randomize(self, ranges: Mapping[str, Any]) -> None:
        """Sets the ranges of the model's factors, as in :meth:`MarlEnv.randomize`.

        Args:
            ranges (mapping): name of a parameter -> number, ``[low, high]`` or
                ``[low, high, log]``.

        Raises:
            ConfigError: unknown parameter, malformed range, a mass of 0 or less, or a negative
                factor of another parameter than gravity.
        """
        read = read_known_ranges(type(self).__name__, ranges, list(self._nominal))
        for name, range in read.items():
            valid = range.low > 0 if name == "mass" else range.low >= 0 or name == "gravity"
            if not valid:
                expected = "positive ones" if name == "mass" else "0 or more"
                raise ConfigError(
                    f"{type(self).__name__}: {name} has factors from {range.low:g}, expected "
                    f"{expected}, such as {name}=[0.8,1.2]."
                )
        super().randomize(read)

    # ------------------------------------------------------------------------------ dynamics

    def _reset(self, tensordict: TensorDictBase | None) -> dict[str, Any]:
        task, options = self.task, {"dtype": self._dtype, "device": self.device}
        n_pos, n_vel = task.model.nq, task.model.nv
        positions = 2 * torch.rand(self.num_envs, n_pos, **options) - 1
        if task.robot.normal_velocities:
            velocities = torch.randn(self.num_envs, n_vel, **options)
        else:
            velocities = 2 * torch.rand(self.num_envs, n_vel, **options) - 1
        start = self._start + task.noise * torch.cat([positions, velocities], 1)
        physics = torch.cat([start, torch.zeros(self.num_envs, n_vel, **options)], 1)
        at_rest = torch.zeros(self.num_envs, task.model.nu, **options)
        self._simulate(physics, at_rest, 0)
        return self._observe()

    def _step(self, tensordict: TensorDictBase) -> dict[str, Any]:
        task, before = self.task, self._forward_position()
        kinds = self.by_kind(tensordict, GROUP).values()
        actions = torch.cat([kind["action"].flatten(1) for kind in kinds], 1)
        torques = actions[:, self._order].to(self._dtype)
        self._simulate(self.physics, torques, task.frame_skip)
        velocity = (self._forward_position() - before) / task.seconds
        qpos, qvel = self._positions_and_velocities()
        healthy = task.reward.healthy(qpos, qvel)
        reward = task.reward.earned(velocity, torques, healthy, self._read_field("cfrc_ext"))
        output = self._observe()
        output[GROUP]["reward"] = self._expand_to_agents(reward.float())
        if task.reward.terminate_when_unhealthy:
            output[GROUP]["terminated"] = self._expand_to_agents(~healthy)
        return output

    def restore(self, snapshot: TensorDict) -> None:
        """Restores a snapshot of an environment that was built with the same arguments.

        Raises:
            SimulatorStateError: the snapshot's models are scaled, but this environment is not
                randomized; or as in :meth:`MarlEnv.restore`.
        """
        shared = snapshot.get(("world", "shared"), {})
        scales = [shared.get(f"_domain.{name}", None) for name in SCALES]
        if not self._ranges and any(x is not None and bool((x != 1).any()) for x in scales):
            raise SimulatorStateError(
                "the snapshot is of an environment with domain randomization; call randomize with "
                "its ranges before restore."
            )
        super().restore(snapshot)

    def _simulate(self, physics: Tensor, torques: Tensor, substeps: int) -> None:
        domain = [self._domain[name].unsqueeze(1) for name in SCALES if self._ranges]
        scales = torch.cat([physics[:, :0].float(), *domain], 1)
        self.physics, self.fields = advance(
            physics, torques, scales, self._kind, self._key, substeps
        )

    def _expand_to_agents(self, value: Tensor) -> Tensor:
        """Returns a value of the robot for each agent, ``[E, N, 1]``."""
        return value.unsqueeze(1).repeat(1, len(self.group_map[GROUP]), 1)

    def _positions_and_velocities(self) -> tuple[Tensor, Tensor]:
        model = self.task.model
        return self.physics[:, : model.nq], self.physics[:, model.nq : model.nq + model.nv]

    def _read_field(self, name: str) -> Tensor | None:
        """Returns a field that is read after a step, ``[E, *]``; None if it is not."""
        task = self.task
        if name not in task.fields:
            return None
        sizes = [task.sizes[field] for field in task.fields]
        return self.fields.split(sizes, 1)[task.fields.index(name)]

    def _forward_position(self) -> Tensor:
        """Returns the robot's forward position, ``[E, 1]``, in meters."""
        task, field = self.task, self.task.robot.place
        if field is None:
            return self.physics[:, :1]
        bodies = self._read_field(field)
        assert bodies is not None
        forward = bodies.unflatten(1, (-1, 3))[..., 0]
        # Of the torso; of the humanoid, the center of mass.
        return forward @ self._weights if field == "xipos" else forward[:, task.torso, None]

    def _observe(self) -> dict[str, Any]:
        qpos, qvel = self._positions_and_velocities()
        numbers = torch.cat([qpos, qvel, self.fields], 1).float()
        observations = [numbers[:, index].clamp(low, high) for index, low, high in self._seen]
        if len(observations) == 1:
            group: dict[str, Any] = {"observation": observations[0]}
        else:
            group = {name: {"observation": x} for name, x in zip(self._names, observations)}
        index, low, high = self._seen_by_critic
        return {GROUP: group, "state": numbers[:, index].clamp(low, high)}

    # ------------------------------------------------------------------------------- drawing

    def scene(self, index: int = 0) -> Picture:
        """Returns a picture of one env: MuJoCo's pixels, or the bodies as shapes without OpenGL."""
        from torchrl_marl.envs.mujoco.drawing import draw_robot

        return draw_robot(self.task, self._positions_and_velocities()[0][index])

    def stage(self) -> Stage:
        """Returns the view of pictures that are made of shapes."""
        from torchrl_marl.envs.mujoco.drawing import view_of

        return view_of(self.task)


def _check_arguments(robot: str, engine: str, device: torch.device) -> None:
    if robot not in ROBOTS:
        raise ConfigError(
            f"unknown robot {quoted(robot)} of mujoco; {nearest(robot, ROBOTS)}expected one of "
            f"{', '.join(sorted(ROBOTS))}."
        )
    if engine not in ("c", "warp"):
        raise ConfigError(f"engine is {quoted(engine)}, expected c or warp.")
    if engine == "c" and device.type != "cpu":
        raise ConfigError("engine=c simulates on the CPU; use env.kwargs.engine=warp on a GPU.")
    if engine == "warp" and importlib.util.find_spec("mujoco_warp") is None:
        raise MissingExtraError("MuJoCo Warp", "warp")  # its extra has all that MuJoCo needs


def _group_by_kind(task: Task) -> list[list[Agent]]:
    """Returns the agents in kinds: those that follow each other and have the same specs."""
    specs = groupby(task.agents, lambda agent: (len(agent.columns.where), task.bounds(agent)))
    return [list(kind) for _, kind in specs]


def _stack_columns(kind: list[Agent]) -> Columns:
    """Returns the columns of a kind's agents, ``[M, O]``."""
    import numpy as np

    return Columns(*(np.stack(part) for part in zip(*(agent.columns for agent in kind))))
