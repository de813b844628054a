"""AgileRL's population on mpe2's speaker and listener: reference side of against_agilerl.py.

Trains a population of AgileRL's IPPO with AgileRL's training function, tournament, mutations and
its repository's settings for this environment. Writes the members' results as JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from agilerl.algorithms import IPPO
from agilerl.algorithms.core.registry import HyperparameterConfig, RLParameter
from agilerl.hpo.mutation import Mutations
from agilerl.hpo.tournament import TournamentSelection
from agilerl.training.train_multi_agent_on_policy import train_multi_agent_on_policy
from agilerl.vector import AsyncPettingZooVecEnv
from agilerl_speaker_listener import EVO_STEPS, N_ENVS, PACKAGES, SETTINGS, MeasuredIPPO, make_env
from mpe2_episodes import Episodes

# configs/training/ippo.yaml of AgileRL's repository: limits of what mutates, chances of mutations.
# IPPO has no mutation of activations: there this chance is one of no mutation.
LIMITS: dict[str, dict[str, Any]] = {
    "lr": {"min": 1e-4, "max": 1e-2},
    "batch_size": {"min": 8, "max": 1024, "dtype": int},
    "learn_step": {"min": 256, "max": 8192, "dtype": int},
}
CHANCES = {
    "no_mutation": 0.4,
    "architecture": 0.2,
    "new_layer_prob": 0.2,
    "parameters": 0.2,
    "activation": 0.2,
    "rl_hp": 0.35,
    "mutation_sd": 0.1,
}


class PopulationProgress:
    """Training time of a population, its env steps, and its members at their last test."""

    def __init__(self, members: int) -> None:
        self.members = members
        self.tested: list[tuple[float, Member]] = []
        self.frames = 0
        self.seconds, self.began = 0.0, time.perf_counter()

    def add(self, fitness: float, agent: Member) -> None:
        """Keeps a copy of a member as it is before selection and mutation, off the clock."""
        self.stop()
        if len(self.tested) == self.members:
            self.tested = []
        self.tested.append((float(fitness), agent.clone()))
        self.began = time.perf_counter()

    def stop(self) -> None:
        """Stops the clock."""
        self.seconds += time.perf_counter() - self.began

    def measure(self, episodes: Episodes) -> list[dict[str, float]]:
        """AgileRL's fitness of each member, and its return by the likeliest and drawn actions."""
        found = []
        for fitness, agent in self.tested:
            agent.episodes = episodes
            point = agent.measure()
            found.append({"fitness": fitness, **{k: point[k] for k in ("return", "sampled")}})
        return found


class Member(MeasuredIPPO):
    """IPPO that is tested as AgileRL does it."""

    progress: PopulationProgress
    seconds = 0.0

    def test(self, *args: Any, **kwargs: Any) -> float:
        """Tests it, which gives its fitness."""
        fitness = IPPO.test(self, *args, **kwargs)
        type(self).progress.add(fitness, self)
        return fitness

    def finalize_training_step(self, steps: int) -> None:
        """Counts env steps."""
        type(self).progress.frames += steps
        super().finalize_training_step(steps)


def train(args: argparse.Namespace) -> PopulationProgress:
    """One population."""
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    env = AsyncPettingZooVecEnv([make_env for _ in range(N_ENVS)])
    env.reset(seed=args.seed)
    population = Member.population(
        args.members,
        [env.single_observation_space(name) for name in env.agents],
        [env.single_action_space(name) for name in env.agents],
        agent_ids=env.agents,
        hp_config=HyperparameterConfig(**{k: RLParameter(**x) for k, x in LIMITS.items()}),
        torch_compiler=args.compile,
        **SETTINGS["ippo"],
    )
    Member.progress = PopulationProgress(args.members)
    train_multi_agent_on_policy(
        env,
        "simple_speaker_listener_v4",
        "IPPO",
        population,
        max_steps=args.frames,
        evo_steps=EVO_STEPS,
        selection_strategy=TournamentSelection(2, True, args.members),
        mutation=Mutations(**CHANCES, rand_seed=args.seed),
        verbose=False,
    )
    Member.progress.stop()
    return Member.progress


def main() -> None:
    """Trains, measures and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--frames", type=int, default=100_000, help="frames of each member")
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--evaluation-seed", type=int, default=10_000)
    parser.add_argument("--threads", type=int, default=1, help="PyTorch's threads")
    parser.add_argument("--compile", help="AgileRL's torch_compiler, such as default")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore")
    progress = train(args)
    result = {
        "versions": {"python": platform.python_version(), **{p: version(p) for p in PACKAGES}},
        "settings": {
            "num_envs": N_ENVS,
            "evo_steps": EVO_STEPS,
            "tournament_size": 2,
            "elitism": True,
            "torch_compiler": args.compile,
            **CHANCES,
            **{f"limits of {k}": [x["min"], x["max"]] for k, x in LIMITS.items()},
            **SETTINGS["ippo"],
        },
        "members": progress.measure(Episodes(args.episodes, args.evaluation_seed)),
        "frames": progress.frames,
        "seconds": progress.seconds,
    }
    args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
