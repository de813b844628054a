"""Builds tasks from robots of Gymnasium and partitions of Gymnasium-Robotics."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import math
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numpy as np

from torchrl_marl.envs.mujoco.columns import Columns, read_columns
from torchrl_marl.envs.mujoco.rewards import Reward
from torchrl_marl.envs.mujoco.robots import ROBOTS, Robot
from torchrl_marl.errors import ConfigError, MissingExtraError, nearest, quoted
from torchrl_marl.settings.formatting import listed

__all__ = ["Agent", "Task", "build_task", "key_of"]

_STATE = "state"
_SEGMENTS_PATTERN = r"[1-9]\d*x[1-9]\d*"  # agents x segments


@dataclass(frozen=True)
class Agent:
    """Agent of a task."""

    name: str
    columns: Columns
    """Its observation."""
    actuators: tuple[int, ...]
    """Its actuators."""


@dataclass(frozen=True)
class Task:
    """Robot with its model, its reward and its agents."""

    robot: Robot
    model: Any
    frame_skip: int
    """Steps of the physics in a step of the environment."""
    seconds: float
    """Duration of a step of the environment."""
    noise: float
    """Scale of the noise of initial states."""
    start: np.ndarray
    """Initial positions and velocities, ``[Q + V]``."""
    reward: Reward
    agents: tuple[Agent, ...]
    state: Columns
    """The state: the observation of a single agent that has all joints."""
    torques: tuple[np.ndarray, np.ndarray]
    """Least and largest action of each actuator, ``[A]``."""
    torso: int
    """Index of the torso, the body with the robot's position."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields that are read after a step, besides positions and velocities."""
        return (*self.robot.sensed, *([self.robot.place] if self.robot.place else []))

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """Number of values of positions, velocities and each of the fields."""
        import mujoco

        data = mujoco.MjData(self.model)
        return {field: getattr(data, field).size for field in ("qpos", "qvel", *self.fields)}

    @property
    def n_fields(self) -> int:
        """Number of values of all fields."""
        return sum(self.sizes[field] for field in self.fields)

    def bounds(self, agent: Agent) -> tuple[list[float], list[float]]:
        """Returns the least and largest action of an agent."""
        low, high = (bound[list(agent.actuators)].tolist() for bound in self.torques)
        return low, high


def key_of(
    robot: str, agent_conf: str | None, agent_obsk: int | None, settings: dict[str, Any]
) -> str:
    """Returns a text from which :func:`build_task` can build a task in any process.

    It contains the hash of a custom model's file, so a changed file is another task.

    Raises:
        ConfigError: a setting is not a plain value.
    """
    try:
        parts = [
            robot,
            agent_conf,
            agent_obsk,
            settings,
            _hash_model_file(settings.get("xml_file")),
        ]
        text = json.dumps(parts, sort_keys=True)
    except TypeError as error:
        raise ConfigError(f"settings of mujoco/{robot} must be plain values ({error}).") from None
    return quote(text, safe="")  # graphs in C++ hold the key, and torch does not escape quotes


def _hash_model_file(xml_file: Any) -> str | None:
    """Returns the hash of a model's file; None if it is one of Gymnasium's, or no file."""
    path = Path(xml_file).expanduser() if isinstance(xml_file, str) else None
    return hashlib.sha256(path.read_bytes()).hexdigest() if path and path.is_file() else None


@functools.cache
def build_task(key: str) -> Task:
    """Builds a task, once in a process.

    Args:
        key (str): output of :func:`key_of`.

    Raises:
        ConfigError: unknown partition or setting.
        MissingExtraError: a package is not installed.
    """
    name, agent_conf, agent_obsk, settings, _ = json.loads(unquote(key))
    robot = ROBOTS[name]
    agent_conf = robot.agent_conf if agent_conf is None else agent_conf
    mamujoco = _import_mamujoco()
    with _without_warning_file():  # upstream takes no distance as a request for a single agent
        team = _make_team(mamujoco, name, robot, agent_conf, agent_obsk or 0, settings)
    whole_robot = team.single_agent_env.unwrapped
    data, torques = whole_robot.data, whole_robot.action_space
    start = np.concatenate([whole_robot.init_qpos, whole_robot.init_qvel])

    def observe() -> dict[str, np.ndarray]:
        return {**team._get_obs(), _STATE: whole_robot._get_obs()}

    columns = read_columns(whole_robot, data, ("qpos", "qvel", *robot.sensed), observe)
    sees_whole_state = agent_obsk is None
    agents = tuple(
        Agent(
            agent,
            columns[_STATE if sees_whole_state else agent],
            tuple(joint.act_ids for joint in joints),
        )
        for agent, joints in zip(team.possible_agents, team.agent_action_partitions)
    )
    return Task(
        robot=robot,
        model=whole_robot.model,
        frame_skip=whole_robot.frame_skip,
        seconds=float(whole_robot.dt),
        noise=float(whole_robot._reset_noise_scale),
        start=start,
        reward=Reward.of(whole_robot),
        agents=agents,
        state=columns[_STATE],
        torques=(torques.low, torques.high),
        torso=whole_robot.model.body(getattr(whole_robot, "_main_body", 1)).id,
    )


@contextlib.contextmanager
def _without_warning_file() -> Iterator[None]:
    """Context in which MuJoCo writes no warnings into a file of the current folder."""
    import mujoco

    mujoco.set_mju_user_warning(lambda text: None)
    try:
        yield
    finally:
        mujoco.set_mju_user_warning(None)


def _make_team(
    mamujoco: Any,
    name: str,
    robot: Robot,
    agent_conf: str,
    agent_obsk: int,
    settings: dict[str, Any],
) -> Any:
    """Returns Gymnasium-Robotics' environment."""
    partition = _read_partition(name, robot, agent_conf)
    robot_env = _make_robot(name, robot, agent_conf, settings)
    return mamujoco.parallel_env(
        robot.scenario,
        agent_conf,
        agent_obsk=agent_obsk,
        agent_factorization=partition,
        gym_env=robot_env,
    )


def _import_mamujoco() -> Any:
    try:
        from gymnasium_robotics import mamujoco_v1
    except ImportError:
        raise MissingExtraError("gymnasium_robotics", "mujoco") from None
    return mamujoco_v1


def _read_partition(name: str, robot: Robot, agent_conf: str) -> dict[str, Any] | None:
    """Returns the partition; one joint for each agent also where upstream has no such partition."""
    from gymnasium_robotics.envs.multiagent_mujoco.obsk import get_parts_and_edges

    def read_upstream(conf: str) -> dict[str, Any]:
        partition, edges, global_values = get_parts_and_edges(robot.scenario, conf)
        return {"partition": partition, "edges": edges, "globals": global_values}

    if name.startswith("manysegment") and not re.fullmatch(_SEGMENTS_PATTERN, str(agent_conf)):
        raise ConfigError(
            f"env.kwargs.agent_conf of mujoco/{name} is {quoted(agent_conf)}, expected agents x "
            f"segments; use env.kwargs.agent_conf={robot.agent_conf}."
        )
    try:
        return read_upstream(agent_conf)
    except Exception:  # upstream raises plain exceptions for unknown partitions
        upstream = read_upstream(robot.agent_conf)
    joints = sorted(
        (joint for part in upstream["partition"] for joint in part), key=_actuator_index
    )
    single = f"{len(joints)}x1"
    if agent_conf != single:
        known = [
            robot.agent_conf,
            *filter(_partition_exists(read_upstream), _even_partitions(len(joints))),
            single,
        ]
        raise ConfigError(
            f"mujoco/{name} has no partition {quoted(agent_conf)}; use "
            f"env.kwargs.agent_conf={listed(dict.fromkeys(known))}."
        )
    return {**upstream, "partition": [(joint,) for joint in joints]}


def _even_partitions(n_joints: int) -> list[str]:
    """Returns the names of partitions into agents with equally many joints; d is for diagonal."""
    sizes = [(n, n_joints // n) for n in range(2, n_joints) if n_joints % n == 0]
    return [f"{n}x{each}{end}" for n, each in sizes for end in ("", "d")]


def _partition_exists(read: Callable[[str], Any]) -> Callable[[str], bool]:
    """Returns a function that tells whether Gymnasium-Robotics has a partition."""

    def exists(conf: str) -> bool:
        try:
            read(conf)
        except Exception:  # upstream raises plain exceptions for unknown partitions
            return False
        return True

    return exists


def _actuator_index(joint: Any) -> int:
    return joint.act_ids


def _make_robot(name: str, robot: Robot, agent_conf: str, settings: dict[str, Any]) -> Any:
    """Returns Gymnasium's environment of one robot."""
    import gymnasium

    scenario = robot.scenario.removeprefix("ManySegment")
    known = _default_arguments(scenario)
    _check_settings(name, settings, known)
    with tempfile.TemporaryDirectory() as folder:
        arguments = settings
        if scenario != robot.scenario:
            arguments = {"xml_file": _write_segmented_model(name, agent_conf, folder), **settings}
        try:
            env: Any = gymnasium.make(f"{scenario}-v5", **arguments)
            env.unwrapped.model.body(settings.get("main_body", 1))
        except Exception as error:  # a wrong model or argument may raise anything
            arguments = settings or {"agent_conf": agent_conf}
            raise _setting_error(name, arguments, known, error) from error
    return env


def _write_segmented_model(name: str, agent_conf: str, folder: str) -> str:
    """Writes the model of a robot of several segments; returns the file's path."""
    from gymnasium_robotics.envs.multiagent_mujoco import many_segment_ant, many_segment_swimmer

    generators = {"manysegmentant": many_segment_ant, "manysegmentswimmer": many_segment_swimmer}
    agents, per_agent = agent_conf.split("x")
    path = Path(folder) / f"{name}.xml"
    generators[name].gen_asset(n_segs=int(agents) * int(per_agent), asset_path=str(path))
    return str(path)


def _default_arguments(scenario: str) -> dict[str, Any]:
    """Returns a dict: argument of Gymnasium's environment -> its default."""
    import gymnasium

    entry_point: Any = gymnasium.spec(f"{scenario}-v5").entry_point
    parameters = inspect.signature(
        gymnasium.envs.registration.load_env_creator(entry_point)
    ).parameters
    return {name: parameters[name].default for name in parameters if name not in ("self", "kwargs")}


def _check_settings(name: str, settings: dict[str, Any], known: dict[str, Any]) -> None:
    """Raises an error for values that would fail in the first step, or not be read at all."""
    for setting, value in settings.items():
        if setting == "max_episode_steps":
            raise ConfigError(
                f"mujoco/{name} does not read max_episode_steps; use env.max_steps in a recipe, "
                "and max_steps in Python."
            )
        expected = _expected_value(setting, value, known.get(setting))
        if expected is not None:
            raise ConfigError(
                f"env.kwargs.{setting} of mujoco/{name} is {quoted(value)}, expected {expected}."
            )
        if setting.startswith("include_") and not value:
            raise ConfigError(
                f"env.kwargs.{setting} of mujoco/{name} is {quoted(value)}, but agents observe "
                "parts of these numbers; leave it out."
            )


def _expected_value(setting: str, value: Any, default: Any) -> str | None:
    """Returns what a value should be instead; None if it may be right."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if setting == "frame_skip":
        return None if type(value) is int and value > 0 else "a whole number, 1 or more"
    if setting == "reset_noise_scale":
        return None if is_number and 0 <= value < math.inf else "a number, 0 or more"
    if setting == "main_body":
        return None if isinstance(value, (int, str)) else "the name or index of a body"
    if isinstance(default, bool):
        return None if isinstance(value, bool) else "true or false"
    if isinstance(default, (int, float)):
        return None if is_number and math.isfinite(value) else "a number"
    if isinstance(default, str):
        return None if isinstance(value, str) else "a text"
    if isinstance(default, tuple):
        return None if _is_interval(value) else "two numbers, the lower first"
    return None


def _is_interval(value: Any) -> bool:
    is_pair = isinstance(value, list) and len(value) == 2
    return is_pair and all(type(x) in (int, float) for x in value) and value[0] <= value[1]


def _setting_error(
    name: str, settings: dict[str, Any], known: dict[str, Any], error: Exception
) -> ConfigError:
    """Returns the error for a setting that Gymnasium's environment does not take."""
    for setting in settings if isinstance(error, TypeError) else ():
        if setting not in known:
            return ConfigError(
                f"mujoco/{name} has no argument {quoted(setting)}; "
                f"{nearest(setting, known)}expected one of {', '.join(known)}."
            )
    advice = "check these values"
    if isinstance(error, OSError):
        advice = "give xml_file an absolute path, or one that begins with ./"
    reason = " ".join(f"{type(error).__name__} {error}".split())[:300]
    return ConfigError(
        f"an argument of mujoco/{name} has a wrong value: {quoted(settings)} ({reason}); {advice}."
    )
