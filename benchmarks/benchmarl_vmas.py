"""BenchMARL on a task of VMAS: reference side of the navigation and suite benchmarks.

Trains BenchMARL's MAPPO, or another of its algorithms, with BenchMARL's defaults (task, experiment,
algorithm and model files of the installed package) and writes a learning curve as JSON. Only the
number of frames, the logging and the task's arguments given by --set are changed. "settings" in the
result holds all effective settings.

BenchMARL 1.5.2 needs torchrl < 0.12, so this file imports nothing of the project and runs in a
separate virtual environment with these packages, installed in this order:

    pip install torch==2.13.0
    pip install torch==2.13.0 benchmarl==1.5.2 torchrl==0.11.1 tensordict==0.11.0 vmas==1.5.2

    python benchmarl_vmas.py --task balance --seed 0 --frames 600000 --out balance_seed0.json
    python benchmarl_vmas.py --task football --set ai_strength=0.3 --out football_seed0.json

The policy is evaluated before training, every --evaluate-every frames and after the last frame, in
a separate VMAS environment which has one sub-environment per episode and gets the same seed every
time; the actions are deterministic (the mode of the TanhNormal). An evaluation does not change the
random state of training, and its time is not in "seconds_training". Each point of the curve has

- episode_reward: mean over episodes and agents of the rewards summed over all steps of the horizon,
  also past an early end of the task;
- episode_reward_to_done: the same up to the end of each episode, as BenchMARL itself reports it;
- episode_length: mean number of steps to that end.

"episodes" has all three for every episode of the last evaluation. "starts" has a checksum for each
of them, the sum of the first observations, to check that another library's episodes are the same.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import platform
import random
import re
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import benchmarl.experiment.experiment as experiment_module
import numpy as np
import torch
from benchmarl.algorithms import algorithm_config_registry
from benchmarl.environments import VmasTask
from benchmarl.environments.common import TaskClass
from benchmarl.experiment import Callback, Experiment, ExperimentConfig
from benchmarl.models.mlp import MlpConfig
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl import logger as torchrl_logger
from torchrl.envs import EnvBase, step_mdp
from torchrl.envs.utils import ExplorationType, set_exploration_type
from vmas.simulator.environment import Environment

GROUP = "agents"
PACKAGES = ("benchmarl", "torchrl", "tensordict", "torch", "vmas", "numpy")


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Restore the random state on exit, including the one all VMAS environments share."""
    vmas_state = list(Environment.vmas_random_state)
    numpy_state, python_state = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        Environment.vmas_random_state[:] = vmas_state
        np.random.set_state(numpy_state)
        random.setstate(python_state)


def evaluate(
    env: EnvBase, policy: TensorDictModuleBase, seed: int, steps: int
) -> dict[str, torch.Tensor]:
    """Run one deterministic episode in every sub-environment of ``env``; a number for each."""
    with (
        preserved_random_state(),
        torch.no_grad(),
        set_exploration_type(ExplorationType.DETERMINISTIC),
    ):
        env.set_seed(seed)
        state = env.reset()
        starts = sum(state[group, "observation"].flatten(1).sum(1) for group in env.group_map)
        rewards, running = [], []
        alive = torch.ones(env.batch_size, dtype=torch.bool)
        for _ in range(steps):
            state = env.step(policy(state))
            group_rewards = [state["next", group, "reward"].squeeze(-1) for group in env.group_map]
            rewards.append(torch.cat(group_rewards, -1).mean(-1))
            running.append(alive)
            alive = alive & ~state["next", "done"].squeeze(-1)
            state = step_mdp(state)
    reward, mask = torch.stack(rewards), torch.stack(running)  # (steps, episodes)
    return {
        "episode_reward": reward.sum(0),
        "episode_reward_to_done": (reward * mask).sum(0),
        "episode_length": mask.sum(0).float(),
        "starts": starts,
    }


class Evaluation(Callback):
    """Evaluates at fixed frame counts and keeps the clock of the training between them."""

    def __init__(self, task: TaskClass, args: argparse.Namespace) -> None:
        """Evaluate on ``task`` as the command line ``args`` say."""
        super().__init__()
        self.task, self.args = task, args
        self.env: EnvBase | None = None
        self.curve: list[dict[str, float]] = []
        self.episodes: dict[str, list[float]] = {}
        self.seconds_training = self.seconds_evaluation = 0.0
        self.clock: float | None = None

    def on_setup(self) -> None:
        """Build the evaluation environment, without touching the random state of training."""
        with preserved_random_state():
            self.env = self.task.get_env_fun(
                num_envs=self.args.episodes,
                continuous_actions=self.experiment.continuous_actions,
                seed=self.args.evaluation_seed,
                device="cpu",
            )()

    def on_train_end(self, training_td: TensorDictBase, group: str) -> None:
        """Evaluate if the frames collected so far, all trained on by now, call for it."""
        frames = self.experiment.total_frames
        if frames % self.args.evaluate_every == 0 or frames >= self.args.frames:
            self.measure(frames)

    def measure(self, frames: int) -> None:
        """Add one point to the curve."""
        started = time.perf_counter()
        if self.clock is not None:
            self.seconds_training += started - self.clock
        found = evaluate(
            self.env, self.experiment.policy, self.args.evaluation_seed, self.experiment.max_steps
        )
        self.episodes = {
            name: [round(x, 4) for x in values.tolist()] for name, values in found.items()
        }
        point = {name: values.mean().item() for name, values in found.items() if name != "starts"}
        self.curve.append(
            {"frames": frames, **point, "seconds_training": round(self.seconds_training, 3)}
        )
        self.clock = time.perf_counter()
        self.seconds_evaluation += self.clock - started


def read_settings(texts: list[str], known: dict[str, Any]) -> dict[str, Any]:
    """``["ai_strength=0.3"]`` as a dict; each is an argument that the task has."""
    settings = dict(text.split("=", 1) for text in texts)
    for name in settings:
        if name not in known:
            raise SystemExit(f"the task has no argument {name!r}, expected one of {sorted(known)}")
    return {name: json.loads(value.lower()) for name, value in settings.items()}


def to_jsonable(value: Any) -> Any:
    """``value`` as something JSON can hold."""
    if isinstance(value, dict):
        return {str(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_jsonable(item) for item in value]
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    continuous = ["mappo", "ippo", "maddpg", "iddpg", "masac", "isac"]
    parser.add_argument("--task", type=str.lower, default="navigation", help="task of VMAS")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=VALUE", help="arguments of the task"
    )
    parser.add_argument("--algorithm", choices=continuous, default="mappo")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--frames", type=int, default=600_000)
    parser.add_argument("--episodes", type=int, default=200, help="episodes in each evaluation")
    parser.add_argument(
        "--evaluate-every", type=int, default=60_000, help="frames between evaluations"
    )
    parser.add_argument("--evaluation-seed", type=int, default=10_000)
    parser.add_argument("--threads", type=int, default=1, help="PyTorch's threads")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args()
    on_policy = algorithm_config_registry[args.algorithm].on_policy()
    batch = ExperimentConfig.get_from_yaml().collected_frames_per_batch(on_policy=on_policy)
    if args.task.upper() not in VmasTask.__members__:
        parser.error(f"--task is {args.task!r}, expected one of {sorted(VmasTask.__members__)}")
    for name in ("frames", "evaluate_every"):
        if getattr(args, name) <= 0 or getattr(args, name) % batch:
            parser.error(f"--{name.replace('_', '-')} must be a positive multiple of {batch}")
    return args


def main() -> None:
    """Train, evaluate and write the result."""
    args = parse_args()
    torch.set_num_threads(args.threads)
    torchrl_logger.setLevel("WARNING")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    # BenchMARL has no setting for its progress bar.
    experiment_module.tqdm = functools.partial(experiment_module.tqdm, disable=True)

    task = VmasTask[args.task.upper()].get_from_yaml()
    task.config.update(read_settings(args.set, task.config))
    algorithm_config = algorithm_config_registry[args.algorithm].get_from_yaml()
    model_config, critic_model_config = MlpConfig.get_from_yaml(), MlpConfig.get_from_yaml()
    config = ExperimentConfig.get_from_yaml()
    overrides: dict[str, Any] = {
        "max_n_frames": args.frames,
        "evaluation": False,
        "render": False,
        "loggers": [],
        "create_json": False,
    }
    for name, value in overrides.items():
        setattr(config, name, value)
    settings = to_jsonable(
        {
            "task": f"{task.env_name()}/{task.name.lower()}",
            "task_config": task.config,
            "algorithm": args.algorithm,
            "algorithm_config": vars(algorithm_config),
            "model": "mlp",
            "model_config": vars(model_config),
            "critic_model_config": vars(critic_model_config),
            "experiment_config": vars(config),
            "experiment_config_overrides": overrides,
            "evaluation": {
                "episodes": args.episodes,
                "steps": task.config["max_steps"],
                "every_frames": args.evaluate_every,
                "seed": args.evaluation_seed,
                "exploration_type": "DETERMINISTIC",
            },
            "threads": args.threads,
        }
    )

    evaluation = Evaluation(task, args)
    with tempfile.TemporaryDirectory() as folder:
        config.save_folder = folder  # BenchMARL always writes its configuration somewhere.
        experiment = Experiment(
            task=task,
            algorithm_config=algorithm_config,
            model_config=model_config,
            critic_model_config=critic_model_config,
            seed=args.seed,
            config=config,
            callbacks=[evaluation],
        )
        evaluation.measure(frames=0)
        experiment.run()

    result = {
        "library": "benchmarl",
        "task": args.task,
        "versions": {
            "python": platform.python_version(),
            **{package: importlib.metadata.version(package) for package in PACKAGES},
        },
        "seed": args.seed,
        "settings": settings,
        "curve": evaluation.curve,
        "episodes": {k: x for k, x in evaluation.episodes.items() if k != "starts"},
        "starts": evaluation.episodes["starts"],
        "seconds_training": round(evaluation.seconds_training, 3),
        "seconds_evaluation": round(evaluation.seconds_evaluation, 3),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, indent=2)
    text = re.sub(r"\[[-0-9eE.,\s]+\]", lambda numbers: re.sub(r"\s+", " ", numbers[0]), text)
    args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
