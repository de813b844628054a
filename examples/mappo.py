"""MAPPO on VMAS balance in one file, with networks, loss and training loop in sight.

    python examples/mappo.py
    python examples/mappo.py --total-frames 96000

Three agents carry a ball on a beam to a goal. They act on their own observations, and share one
network. The critic reads the observations of all three. In eager mode, this program and the recipe
``vmas_balance_mappo`` compute the same bits.

Reference: Yu et al., 2022, https://arxiv.org/abs/2103.01955.

Shapes: E envs, T steps of a batch, N agents, F = E * T frames.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tensordict import TensorDictBase
from torchrl.objectives import ValueEstimators

from torchrl_marl import TeamSpec
from torchrl_marl.collectors import RolloutCollector
from torchrl_marl.envs import VmasEnv
from torchrl_marl.functional import masked_standardize
from torchrl_marl.modules import CriticConfig, NetworkConfig, ValueNorm, make_actor, make_critic
from torchrl_marl.objectives import MAPPOLoss


@dataclass
class Settings:
    """Settings of the run; those of the recipe."""

    total_frames: int = 1_008_000
    frames_per_batch: int = 9_600  # 100 steps of 96 envs
    num_envs: int = 96
    max_steps: int = 100
    num_epochs: int = 6
    minibatch_size: int = 1_200
    lr: float = 1e-3
    gamma: float = 0.99
    lmbda: float = 0.95
    seed: int = 0
    execution: str = "eager"


class MAPPO:
    """Actor, critic, loss and optimizer of one group of agents."""

    def __init__(self, env: VmasEnv, settings: Settings) -> None:
        self.settings = settings
        # What the networks need to know of the environment: keys, shapes and masks.
        self.group = group = TeamSpec.from_env(env).groups["agents"]
        self.actor = make_actor(group, NetworkConfig())
        # The critic learns returns divided by a running scale. The loss undoes it.
        self.critic = make_critic(
            group, CriticConfig(), centralized=True, value_norm=ValueNorm(decay=0.99)
        )
        self.loss = MAPPOLoss(
            self.actor,
            self.critic,
            group=group,
            bootstrap="team",
            clip_epsilon=0.2,
            critic_coeff=1.0,
            loss_critic_type="huber",
            huber_delta=10.0,
            entropy_bonus=False,
            entropy_coeff=0.0,
            normalize_advantage=False,  # done once, over the whole batch
            functional=False,
        )
        self.loss.make_value_estimator(
            ValueEstimators.GAE, gamma=settings.gamma, lmbda=settings.lmbda
        )
        parameters = [*self.actor.parameters(), *self.critic.parameters()]
        self.optimizer = torch.optim.Adam(parameters, settings.lr, eps=1e-5, fused=True)

    def learn(self, batch: TensorDictBase, progress: float) -> None:
        """Trains on a batch ``[E, T]``, after a fraction ``progress`` of the run."""
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = self.settings.lr * (1.0 - progress)
        self.add_advantage(batch)
        frames = batch.reshape(-1)
        for indices in self.minibatches(len(frames)):
            self.update(frames[indices])

    @torch.no_grad()
    def add_advantage(self, batch: TensorDictBase) -> None:
        """Writes advantages, standardized over the batch, and the critic's targets."""
        self.loss.value_estimator(batch)
        key = self.group.key("advantage")  # ("agents", "advantage"), [E, T, N, 1]
        batch[key] = masked_standardize(batch[key])

    def minibatches(self, n_frames: int) -> Iterator[torch.Tensor]:
        """Yields the indices of minibatches; each epoch visits all frames in random order."""
        for _ in range(self.settings.num_epochs):
            yield from torch.randperm(n_frames).split(self.settings.minibatch_size)

    def update(self, minibatch: TensorDictBase) -> None:
        """Takes a step of Adam on the losses of actor and critic."""
        losses = self.loss(minibatch)
        total = sum(value for name, value in losses.items() if name.startswith("loss_"))
        self.optimizer.zero_grad()
        total.backward()
        self.optimizer.step()


def train(settings: Settings) -> MAPPO:
    """Trains a team; prints the mean reward of a step in each batch."""
    torch.manual_seed(settings.seed)
    env = VmasEnv(
        "balance",
        num_envs=settings.num_envs,
        max_steps=settings.max_steps,
        n_agents=3,
        seed=settings.seed,
    )
    learner = MAPPO(env, settings)
    collector = RolloutCollector(
        env,
        learner.actor,
        frames_per_batch=settings.frames_per_batch,
        total_frames=settings.total_frames,
        execution=settings.execution,
    )
    began, frames = time.perf_counter(), 0
    for batch in collector:
        learner.learn(batch, frames / settings.total_frames)
        frames += batch.numel()
        reward = batch["next", "agents", "reward"].mean().item()
        speed = frames / (time.perf_counter() - began)
        print(f"{frames:9,} frames   reward {reward:7.3f}   {speed:7,.0f} frames/s")
    return learner


def main() -> None:
    """Reads settings from the command line, and trains."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in vars(Settings()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    train(Settings(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
