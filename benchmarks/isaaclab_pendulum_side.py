"""One training of Isaac Lab's pendulum by ours or skrl's MAPPO: a process of isaaclab_pendulum.py.

It trains, plays the common episodes, and writes the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torchrl.envs.utils import ExplorationType, set_exploration_type

TASK, RECIPE = "Isaac-Pendulum-MARL-Direct", "isaaclab_pendulum_mappo"
ROLLOUT, PLAYED, EVALUATION_SEED = 16, 256, 10_000
JOINTS = {
    "railCartJoint": "slider_to_cart",
    "cartPoleJoint": "cart_to_pole",
    "polePoleJoint": "pole_to_pendulum",
}
GROUND = """#usda 1.0
(
    defaultPrim = "World"
    metersPerUnit = 1
    upAxis = "Z"
)
def Xform "World"
{
    def Plane "CollisionPlane" (prepend apiSchemas = ["PhysicsCollisionAPI"])
    {
        uniform token axis = "Z"
    }
}
"""
# Ours is clipped as in training; skrl trains with unbounded actions.
RANGES = {
    "ours": {"action_clip": 1.0},
    "skrl": {"action_scale": 1.0},
    "random": {"action_scale": 1.0},
}
PACKAGES = ("isaaclab", "newton", "mujoco-warp", "warp-lang", "skrl", "torch")
Act = Callable[[Any], Any]
Trained = tuple[float, float, Act]


def write_robot_files(folder: Path) -> dict[str, str]:
    """Newton's cart with two poles, with the joints' names of the task, and a plane."""
    newton = Path(next(iter(find_spec("newton").submodule_search_locations)))
    robot = (newton / "examples" / "assets" / "cartpole.usda").read_text(encoding="utf-8")
    for newton_name, task_name in JOINTS.items():
        robot = robot.replace(newton_name, task_name)
    texts = {"robot": robot, "ground": GROUND}
    for name, text in texts.items():
        (folder / f"{name}.usda").write_text(text, encoding="utf-8")
    return {name: str(folder / f"{name}.usda") for name in texts}


def train_ours(folder: Path, args: argparse.Namespace) -> Trained:
    """The recipe, with a minibatch of a whole rollout, as it is in 4,096 envs."""
    from torchrl_marl.recipes import load_config
    from torchrl_marl.training.trainer import start_training

    overrides = {"seed": args.seed, "device": "cpu", "total_frames": args.frames}
    overrides |= {"env.num_envs": args.envs, "env.kwargs.usd_path": write_robot_files(folder)}
    overrides |= {
        "frames_per_batch": ROLLOUT * args.envs,
        "learner.minibatch_size": ROLLOUT * args.envs,
    }
    overrides |= {"folder": str(folder / "run")}
    overrides |= {"logging.progress": False, "checkpoint.every_iterations": 0}
    training = start_training(load_config(RECIPE, overrides), None)
    began, cpu = time.perf_counter(), time.process_time()
    while not training.done:
        training.step()
    times = time.perf_counter() - began, time.process_time() - cpu
    training.close()
    return *times, training.run.policy


def train_skrl(folder: Path, args: argparse.Namespace) -> Trained:
    """skrl's Runner with Isaac Lab's settings for the task."""
    import isaaclab_tasks.core.pendulum as pendulum
    from skrl.envs.wrappers.torch import wrap_env
    from skrl.utils.runner.torch import Runner

    from torchrl_marl.envs.isaaclab.build import build_task

    task = build_task(
        TASK,
        num_envs=args.envs,
        seed=args.seed,
        device="cpu",
        settings={},
        usd_path=write_robot_files(folder),
    )
    settings = Path(pendulum.__file__).parent / "agents" / "skrl_marl_mappo_cfg.yaml"
    config = Runner.load_cfg_from_yaml(str(settings))
    config["seed"] = args.seed
    config["trainer"] |= {"timesteps": args.frames // args.envs, "close_environment_at_exit": False}
    config["trainer"]["disable_progressbar"] = True
    quiet = {"directory": str(folder), "write_interval": 0, "checkpoint_interval": 0}
    config["agent"]["experiment"] |= quiet
    runner = Runner(wrap_env(task, wrapper="isaaclab-multi-agent"), config)
    began, cpu = time.perf_counter(), time.process_time()
    runner.trainer.train()
    times = time.perf_counter() - began, time.process_time() - cpu
    task.close()
    return *times, deterministic_policy(runner.agent)


def deterministic_policy(agent: Any) -> Act:
    """The likeliest actions of skrl's agents."""

    def act(td: Any) -> Any:
        for name in agent.possible_agents:
            observation = agent._observation_preprocessor[name](td[name, "observation"][:, 0])
            _, outputs = agent.policies[name].act({"observations": observation}, role="policy")
            td[name, "action"] = outputs["mean_actions"].unsqueeze(1)
        return td

    agent.enable_training_mode(False)
    return act


def random_actions(folder: Path, args: argparse.Namespace) -> Trained:
    """No training."""

    def act(td: Any) -> Any:
        for name in ("cart", "pendulum"):
            td[name, "action"] = 2 * torch.rand(PLAYED, 1, 1) - 1
        return td

    return 0.0, 0.0, act


@torch.no_grad()
def play_first_episodes(act: Act, folder: Path, **ranges: float) -> dict[str, float]:
    """Return and length of the first episode of each env, with these ranges of actions."""
    from torchrl_marl.envs import make_env

    env = make_env(
        f"isaaclab/{TASK}",
        num_envs=PLAYED,
        seed=EVALUATION_SEED,
        device="cpu",
        **ranges,
        state="world",
        usd_path=write_robot_files(folder),
    )
    td, returns, steps = env.reset(), torch.zeros(PLAYED), torch.zeros(PLAYED)
    running = torch.ones(PLAYED, dtype=torch.bool)
    while running.any():
        step, td = env.step_and_maybe_reset(act(td))
        returns += running * step["next", "cart", "reward"].view(PLAYED)
        steps += running
        running &= ~step["next", "done"].view(PLAYED)
    env.close()
    return {"return": returns.mean().item(), "steps": steps.mean().item()}


def main() -> None:
    """Trains, plays and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=["ours", "skrl", "random"])
    for name in ("--seed", "--envs", "--frames"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    train = {"ours": train_ours, "skrl": train_skrl, "random": random_actions}[args.side]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        seconds, cpu, act = train(folder, args)
        load = os.getloadavg()[0]
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            result: dict[str, Any] = play_first_episodes(act, folder, **RANGES[args.side])
    result |= {"seconds": seconds, "cpu": cpu, "load": load}
    result["versions"] = {name: version(name) for name in PACKAGES}
    args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
