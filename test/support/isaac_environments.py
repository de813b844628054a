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
def simulated():
    """Isaac Lab's package with the tasks of this folder, on stand-ins for the simulator."""
    source = source_of_isaac_lab()
    if source is None:
        pytest.skip(HOW)
    pytest.importorskip("gymnasium")
    before = set(sys.modules)
    with isaac_lab(source) as simulator:
        yield SimpleNamespace(simulator=simulator, **vars(tasks.define()))
        gc.collect()
    left = {name.partition(".")[0] for name in set(sys.modules) - before}
    assert not left & {"isaaclab", "isaaclab_tasks", "omni", "pxr", "carb", "warp", "toml"}


def pendulum(isaac, num_envs=5, seed=0, max_steps=None, **kwargs):
    kwargs = {"action_scale": 1.0, "device": "cpu", **kwargs}
    return IsaacLabEnv(PENDULUM, num_envs=num_envs, seed=seed, max_steps=max_steps, **kwargs)


def task_of_robots(isaac, num_envs=5, **settings):
    cfg = isaac.RobotsCfg()
    cfg.scene.num_envs = num_envs
    for key, value in settings.items():
        setattr(cfg, key, value)
    return isaac.Robots(cfg)


def robots(isaac, num_envs=5, seed=0, max_steps=None, settings=None, **kwargs):
    task = task_of_robots(isaac, num_envs, **(settings or {}))
    kwargs = {"action_scale": 1.0, **kwargs}
    return IsaacLabEnv(task, seed=seed, max_steps=max_steps, **kwargs)


def told(env, n, key, group="robot"):
    """A leaf of the first env's agents over ``n`` steps."""
    td = env.rollout(n, break_when_any_done=False)["next"]
    x = td[group, key] if group else td[key]
    return x[0].reshape(n, -1).int().tolist()
