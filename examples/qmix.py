"""QMIX on VMAS balance in one file, with networks, replay buffer, loss and training loop in sight.

    python examples/qmix.py
    python examples/qmix.py --total-frames 60000

Three agents with nine discrete actions carry a ball on a beam to a goal. All share one Q-network.
A mixer reads the observations of all three, and makes one value of their Q-values. In eager mode,
this program and the recipe ``vmas_balance_qmix`` compute the same bits.

Reference: Rashid et al., 2018, https://arxiv.org/abs/1803.11485.

Shapes: E envs, T steps of a batch, N agents, B rows of a minibatch.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictSequential

from torchrl_marl import TeamSpec
from torchrl_marl.collectors import RolloutCollector
from torchrl_marl.envs import VmasEnv
from torchrl_marl.functional import soft_update_
from torchrl_marl.learners.replay import TeamReplay
from torchrl_marl.modules import Explore, QNetworkConfig, make_mixer, make_q_actor
from torchrl_marl.objectives import ValueDecompositionLoss


@dataclass
class Settings:
    """Settings of the run; those of the recipe."""

    total_frames: int = 600_000
    frames_per_batch: int = 6_000  # 100 steps of 60 envs
    num_envs: int = 60
    max_steps: int = 100
    capacity: int = 200_000
    learning_starts: int = 10_000  # frames with random actions
    updates_per_frame: float = 0.1
    minibatch_size: int = 256
    lr: float = 3e-4
    gamma: float = 0.9
    tau: float = 0.005
    max_grad_norm: float = 10.0
    epsilon_end: float = 0.05
    annealing: float = 0.2  # fraction of the run in which epsilon falls from 1 to its end
    seed: int = 0
    execution: str = "eager"


class QMIX:
    """Q-network, mixer, loss, replay buffer and optimizer of one group of agents."""

    def __init__(self, env: VmasEnv, settings: Settings) -> None:
        self.settings = settings
        self.group = group = TeamSpec.from_env(env).groups["agents"]
        q_network = make_q_actor(group, QNetworkConfig(num_cells=[128, 128]))
        mixer = make_mixer(group, "monotonic", centralized=True)
        self.loss = ValueDecompositionLoss(
            q_network,
            mixer,
            group=group,
            double_q=True,  # the online network chooses the next action, the target values it
            bootstrap="team",
            gamma=settings.gamma,
            functional=False,
        )
        self.explore = Explore(group)
        self.explore.epsilon.fill_(1.0)
        self.actor = TensorDictSequential(q_network, self.explore)
        # Pairs of online and target parameters, of the Q-network and of the mixer.
        pairs = self.loss.followed
        self.online = [p for network, _ in pairs for p in network.parameters()]
        self.target = [p for _, target in pairs for p in target.parameters()]
        self.optimizer = torch.optim.Adam(self.online, settings.lr, fused=True)
        n_steps = math.ceil(settings.capacity / settings.num_envs)
        self.replay = TeamReplay(n_steps, settings.num_envs, self.loss.stored_keys)
        self.frames, self.owed = 0, 0.0

    def learn(self, batch: TensorDictBase, progress: float) -> None:
        """Stores a batch ``[E, T]`` that ends at a fraction ``progress`` of the run, and trains."""
        settings = self.settings
        self.loss.settle_rewards(batch)  # one reward for the team
        self.replay.extend(batch)
        self.frames += batch.numel()
        if self.frames < settings.learning_starts:
            return
        self.owed += settings.updates_per_frame * batch.numel()
        n_updates = int(self.owed)
        self.owed -= n_updates
        for rows in self.replay.rows(n_updates, settings.minibatch_size):
            self.update(self.replay.look(rows, n_step=1, gamma=settings.gamma))
        annealed = min(1.0, progress / settings.annealing)
        self.explore.epsilon.fill_(1.0 + annealed * (settings.epsilon_end - 1.0))

    def update(self, minibatch: TensorDictBase) -> None:
        """Takes a step of Adam on the TD errors, and moves the target networks."""
        loss, _ = self.loss.value_loss(minibatch)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.online, self.settings.max_grad_norm)
        self.optimizer.step()
        soft_update_(self.target, self.online, self.settings.tau)


def train(settings: Settings) -> QMIX:
    """Trains a team; prints the mean reward of a step in each batch."""
    torch.manual_seed(settings.seed)
    env = VmasEnv(
        "balance",
        num_envs=settings.num_envs,
        max_steps=settings.max_steps,
        continuous_actions=False,
        n_agents=3,
        seed=settings.seed,
    )
    learner = QMIX(env, settings)
    collector = RolloutCollector(
        env,
        learner.actor,
        frames_per_batch=settings.frames_per_batch,
        total_frames=settings.total_frames,
        execution=settings.execution,
    )
    began, frames = time.perf_counter(), 0
    for batch in collector:
        reward = batch["next", "agents", "reward"].mean().item()
        frames += batch.numel()
        learner.learn(batch, frames / settings.total_frames)
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
