"""Isaac Lab's tasks as multi-agent environments."""

import contextlib
import gc
import sys
from types import SimpleNamespace

import pytest
from isaac import tasks
from isaac.standins import HOW, isaac_lab, source_of_isaac_lab

from torchrl_marl.envs import IsaacLabEnv

PENDULUM = "Isaac-Cart-Double-Pendulum-Direct-v0"

NAMES = [f"robot_{i}" for i in range(4)]


@contextlib.contextmanager
def isaac_stand_ins():
    """Isaac Lab's package with the tasks of this folder, on stand-ins for the simulator."""
    source = source_of_isaac_lab()
    if source is None:
        pytest.skip(HOW)
    pytest.importorskip("gymnasium")
    modules_before = set(sys.modules)
    with isaac_lab(source) as simulator:
        yield SimpleNamespace(simulator=simulator, **vars(tasks.define()))
        gc.collect()
    leftover = {name.partition(".")[0] for name in set(sys.modules) - modules_before}
    assert not leftover & {"isaaclab", "isaaclab_tasks", "omni", "pxr", "carb", "warp", "toml"}


def make_pendulum(isaac, num_envs=5, seed=0, max_steps=None, **kwargs):
    kwargs = {"action_scale": 1.0, "device": "cpu", **kwargs}
    return IsaacLabEnv(PENDULUM, num_envs=num_envs, seed=seed, max_steps=max_steps, **kwargs)


def make_robots_task(isaac, num_envs=5, **settings):
    cfg = isaac.RobotsCfg()
    cfg.scene.num_envs = num_envs
    for key, value in settings.items():
        setattr(cfg, key, value)
    return isaac.Robots(cfg)


def make_robots(isaac, num_envs=5, seed=0, max_steps=None, settings=None, **kwargs):
    task = make_robots_task(isaac, num_envs, **(settings or {}))
    kwargs = {"action_scale": 1.0, **kwargs}
    return IsaacLabEnv(task, seed=seed, max_steps=max_steps, **kwargs)


def values_of_first_env(env, n, key, group="robot"):
    """A leaf of the first env's agents over ``n`` steps."""
    td = env.rollout(n, break_when_any_done=False)["next"]
    x = td[group, key] if group else td[key]
    return x[0].reshape(n, -1).int().tolist()
