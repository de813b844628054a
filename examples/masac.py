"""MASAC on VMAS balance in one file, with networks, replay buffer, loss and training loop in sight.

    python examples/masac.py
    python examples/masac.py --total-frames 60000

Three agents carry a ball on a beam to a goal, with stochastic policies. All share one actor. Two
critics read the observations and actions of all three, and the smaller value counts. In eager mode,
this program and the recipe ``vmas_balance_masac`` compute the same bits.

Reference: Haarnoja et al., 2018, https://arxiv.org/abs/1812.05905; Lowe et al., 2017,
https://arxiv.org/abs/1706.02275 (central critics).

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
from torchrl_marl.modules import (
    CriticConfig,
    Explore,
    NetworkConfig,
    make_action_critic,
    make_actor,
)
from torchrl_marl.objectives import MASACLoss


@dataclass
class Settings:
    """Settings of the run; those of the recipe."""

    total_frames: int = 300_000
    frames_per_batch: int = 6_000  # 100 steps of 60 envs
    num_envs: int = 60
    max_steps: int = 100
    capacity: int = 200_000
    learning_starts: int = 10_000  # frames with random actions
    updates_per_frame: float = 0.1
    minibatch_size: int = 256
    actor_lr: float = 3e-4
    critic_lr: float = 1e-3
    alpha_lr: float = 3e-3
    alpha_init: float = 0.05  # temperature: weight of the policy's entropy
    gamma: float = 0.99
    tau: float = 0.005
    max_grad_norm: float = 10.0
    seed: int = 0
    execution: str = "eager"


class MASAC:
    """Actor, critics, temperature, replay buffer and optimizers of one group of agents."""

    def __init__(self, env: VmasEnv, settings: Settings) -> None:
        self.settings = settings
        self.group = group = TeamSpec.from_env(env).groups["agents"]
        policy = make_actor(group, NetworkConfig(num_cells=[128, 128]))
        critics = make_action_critic(
            group, CriticConfig(num_cells=[128, 128]), centralized=True, n_critics=2
        )
        self.loss = MASACLoss(
            policy,
            critics,
            group=group,
            alpha_init=settings.alpha_init,
            bootstrap="team",
            gamma=settings.gamma,
            functional=False,
        )
        self.explore = Explore(group)  # random actions until learning starts
        self.explore.epsilon.fill_(1.0)
        self.actor = TensorDictSequential(policy, self.explore)
        pairs = self.loss.followed
        self.online = [p for network, _ in pairs for p in network.parameters()]
        self.target = [p for _, target in pairs for p in target.parameters()]
        self.acting, self.valuing = list(policy.parameters()), list(critics.parameters())
        self.optimizers = {
            "critics": torch.optim.Adam(self.valuing, settings.critic_lr, fused=True),
            "actor": torch.optim.Adam(self.acting, settings.actor_lr, fused=True),
            "alpha": torch.optim.Adam([self.loss.log_alpha], settings.alpha_lr, fused=True),
        }
        n_steps = math.ceil(settings.capacity / settings.num_envs)
        self.replay = TeamReplay(n_steps, settings.num_envs, self.loss.stored_keys)
        self.frames, self.owed = 0, 0.0

    def learn(self, batch: TensorDictBase) -> None:
        """Stores a batch ``[E, T]``, and trains."""
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
        self.explore.epsilon.fill_(0.0)

    def update(self, minibatch: TensorDictBase) -> None:
        """Takes a step of all optimizers, and moves the target networks."""
        value_loss, _ = self.loss.value_loss(minibatch)
        value_loss.backward(inputs=self.valuing)
        # The actor learns from the critics as they were before their step.
        actor_loss, metrics = self.loss.actor_loss(minibatch)
        total = actor_loss + metrics["loss_alpha"]
        total.backward(inputs=[*self.acting, self.loss.log_alpha])
        for parameters in (self.valuing, self.acting):
            torch.nn.utils.clip_grad_norm_(parameters, self.settings.max_grad_norm)
        for optimizer in self.optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        soft_update_(self.target, self.online, self.settings.tau)


def train(settings: Settings) -> MASAC:
    """Trains a team; prints the mean reward of a step in each batch."""
    torch.manual_seed(settings.seed)
    env = VmasEnv(
        "balance",
        num_envs=settings.num_envs,
        max_steps=settings.max_steps,
        n_agents=3,
        seed=settings.seed,
    )
    learner = MASAC(env, settings)
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
        learner.learn(batch)
        frames += batch.numel()
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
