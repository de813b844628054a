"""AgileRL on mpe2's simple_speaker_listener_v4: reference side of speaker_listener.py.

Trains AgileRL's IPPO, MADDPG or MATD3 with AgileRL's training function and its repository's
settings for this environment. Writes a learning curve as JSON. ``speaker_listener.py`` runs it in
AgileRL's virtual environment.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import random
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from agilerl.algorithms import IPPO, MADDPG, MATD3
from agilerl.components.replay_buffer import ReplayBuffer
from agilerl.training.train_multi_agent_off_policy import train_multi_agent_off_policy
from agilerl.training.train_multi_agent_on_policy import train_multi_agent_on_policy
from agilerl.vector import AsyncPettingZooVecEnv
from mpe2 import simple_speaker_listener_v4
from mpe2_episodes import Arrays, Episodes

PACKAGES = ("agilerl", "torch", "tensordict", "mpe2", "pettingzoo", "numpy")
EVO_STEPS = 10_000
# configs/training/ippo.yaml, multi_agent/maddpg.yaml and multi_agent/matd3.yaml of AgileRL's
# repository, which are for this environment, without evolution and torch.compile. Later versions
# of the first have a learning rate of 1e-4, ent_coef 0.05 and action_std_init 0.0, with which
# IPPO learns more slowly at first.
N_ENVS, N_STORED = 16, 100_000
OFF_POLICY: dict[str, Any] = {
    "lr_actor": 1e-4,
    "lr_critic": 1e-3,
    "learn_step": 16,
    "gamma": 0.95,
    "tau": 0.001,
    "O_U_noise": True,
    "expl_noise": 0.1,
    "mean_noise": 0.0,
    "theta": 0.15,
    "dt": 0.01,
}


def network(*head: int) -> dict[str, Any]:
    """AgileRL's settings of networks with these layers after the encoder."""
    return {
        "latent_dim": 64,
        "encoder_config": {"hidden_size": [64], "activation": "ReLU"},
        "head_config": {"hidden_size": list(head), "activation": "ReLU"},
    }


SETTINGS: dict[str, dict[str, Any]] = {
    "ippo": {
        "batch_size": 128,
        "lr": 1e-3,
        "learn_step": 2048,
        "gamma": 0.99,
        "gae_lambda": 0.95,
        "action_std_init": 0.6,
        "clip_coef": 0.2,
        "ent_coef": 0.01,
        "vf_coef": 0.5,
        "max_grad_norm": 0.5,
        "update_epochs": 4,
        "net_config": network(64),
    },
    "maddpg": {**OFF_POLICY, "batch_size": 64, "net_config": network(64, 64)},
    "matd3": {**OFF_POLICY, "batch_size": 128, "policy_freq": 2, "net_config": network(64)},
}


class Measured:
    """An algorithm; where AgileRL tests its agent, between learning, it is measured as ours is.

    Attributes:
        curve (list of dict): what was measured.
    """

    def begin(self, args: argparse.Namespace) -> None:
        """Measures before training, and starts the clock."""
        self.episodes = Episodes(args.episodes, args.evaluation_seed)
        self.every = args.evaluate_every
        self.curve: list[dict[str, float]] = []
        self.seconds = 0.0
        self.clock = time.perf_counter()
        self.test()

    def test(self, *args: Any, **kwargs: Any) -> float:
        """Adds a point to the curve when it is time for one."""
        self.seconds += time.perf_counter() - self.clock
        frames = self.metrics.steps
        if not self.curve or frames // self.every > self.curve[-1]["frames"] // self.every:
            self.curve.append({"frames": frames, **self.measure()})
        fitness = 2 * self.curve[-1]["sampled"]
        self.metrics.add_fitness(fitness)
        self.clock = time.perf_counter()
        return fitness

    def measure(self) -> dict[str, float]:
        """Returns of the same episodes by the likeliest and by drawn actions."""
        states = torch.get_rng_state(), np.random.get_state(), random.getstate()
        self.set_training_mode(False)
        point = {
            "return": self.episodes.play(self.deterministic_actions),
            "sampled": self.episodes.play(lambda observations: self.get_action(observations)[0]),
            "seconds": round(self.seconds, 1),
        }
        self.set_training_mode(True)
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
        return point

    def deterministic_actions(self, observations: Arrays) -> Arrays:
        """Returns the actions of a deterministic actor, without exploration noise."""
        return self.get_action(observations)[0]


class MeasuredIPPO(Measured, IPPO):
    """IPPO, measured."""

    def deterministic_actions(self, observations: Arrays) -> Arrays:
        """The means of the actors' normal distributions."""
        actions = {}
        for name, ready in self.preprocess_observation(observations, list(observations)).items():
            with torch.no_grad():
                self.actors[name](ready)
            actions[name] = self.actors[name].head_net.dist.mu.numpy()
        return actions


class MeasuredMADDPG(Measured, MADDPG):
    """MADDPG, measured."""


class MeasuredMATD3(Measured, MATD3):
    """MATD3, measured."""


MEASURED = {"ippo": MeasuredIPPO, "maddpg": MeasuredMADDPG, "matd3": MeasuredMATD3}


def make_env() -> Any:
    """A copy of the environment."""
    return simple_speaker_listener_v4.parallel_env(continuous_actions=True)


def train(args: argparse.Namespace) -> Any:
    """One seed."""
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    env = AsyncPettingZooVecEnv([make_env for _ in range(N_ENVS)])
    env.reset(seed=args.seed)
    settings = dict(SETTINGS[args.algorithm])
    if args.algorithm != "ippo":
        settings["vect_noise_dim"] = N_ENVS
    agent = MEASURED[args.algorithm](
        [env.single_observation_space(name) for name in env.agents],
        [env.single_action_space(name) for name in env.agents],
        agent_ids=env.agents,
        **settings,
    )
    agent.begin(args)
    positional = env, "simple_speaker_listener_v4", args.algorithm.upper(), [agent]
    steps = {"max_steps": args.frames, "evo_steps": EVO_STEPS, "verbose": False}
    if args.algorithm == "ippo":
        train_multi_agent_on_policy(*positional, **steps)
    else:
        train_multi_agent_off_policy(*positional, ReplayBuffer(max_size=N_STORED), **steps)
    return agent


def main() -> None:
    """Trains, evaluates and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithm", default="ippo", choices=list(SETTINGS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--frames", type=int, default=614_400)
    parser.add_argument("--episodes", type=int, default=200, help="episodes in each evaluation")
    parser.add_argument(
        "--evaluate-every", type=int, default=102_400, help="frames between evaluations"
    )
    parser.add_argument("--evaluation-seed", type=int, default=10_000)
    parser.add_argument("--threads", type=int, default=1, help="PyTorch's threads")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore")
    agent = train(args)
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    result = {
        "library": "agilerl",
        "versions": {"python": platform.python_version(), **versions},
        "seed": args.seed,
        "settings": {
            "num_envs": N_ENVS,
            "evo_steps": EVO_STEPS,
            "population": 1,
            **SETTINGS[args.algorithm],
        },
        "evaluation": [args.frames, args.episodes, args.evaluate_every, args.evaluation_seed],
        "curve": agent.curve,
        "seconds": round(agent.seconds, 1),
    }
    args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
