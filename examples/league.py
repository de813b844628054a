"""Self-play against past policies on Kuhn poker in one file, with the league in sight.

    python examples/league.py
    python examples/league.py --total-frames 65536 --snapshot-every 8192

Two players, first and second, share one network. In half of the games it plays both seats. In the
others a past policy, drawn from a pool, plays one seat, and only the other seat learns. So the
network must play well against all that it was, not only against what it is: fictitious self-play.
In eager mode, this program and the recipe ``toy_kuhn_ippo`` with ``league.opponents=uniform`` and
the same ``league.snapshot_every`` compute the same bits.

NashConv, printed after each batch, is 0 for perfect play and 0.917 for uniform play. It ends at
0.17 to 0.19 (seeds 0 to 2). The recipe's plain self-play ends at 0.11 to 0.14; it learns from a
third more steps. Past policies help where players forget how to beat what they no longer meet, and
Kuhn poker is too small for that. It is here because its measure is exact, and a run is short.

Reference: Heinrich et al., 2015, https://proceedings.mlr.press/v37/heinrich15.html (fictitious
self-play); de Witt et al., 2020, https://arxiv.org/abs/2011.09533 (IPPO).

Shapes: E envs, T steps of a batch, N agents of both groups (2), F = E * T frames, S slots.
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
from torchrl_marl.collectors import MatchPolicy, RolloutCollector, TeamPolicy
from torchrl_marl.envs.remember import with_players
from torchrl_marl.envs.toy import Kuhn
from torchrl_marl.learners.block import Block
from torchrl_marl.modules import CriticConfig, NetworkConfig, ValueNorm, make_actor, make_critic
from torchrl_marl.modules.joined_actor import JoinedActor
from torchrl_marl.objectives import MAPPOLoss
from torchrl_marl.objectives.flags import learned_steps


@dataclass
class Settings:
    """Settings of the run; those of the recipe."""

    total_frames: int = 327_680
    frames_per_batch: int = 4_096  # 16 steps of 256 envs
    num_envs: int = 256
    snapshot_every: int = 32_768  # frames between two stored policies
    num_epochs: int = 4
    minibatch_size: int = 1_024
    lr: float = 3e-3
    clip_epsilon: float = 0.03
    entropy_coeff: float = 0.4
    gamma: float = 1.0
    lmbda: float = 0.95
    seed: int = 0
    execution: str = "eager"


class IPPO:
    """Actor, critic, loss and optimizer of both players."""

    def __init__(self, team: TeamSpec, settings: Settings) -> None:
        self.settings = settings
        # Each player is a group, because they compete. Both are trained as one group of two agents.
        self.block = Block(team.groups)
        [self.both] = self.block.joined.values()
        actor = make_actor(self.both, NetworkConfig(sharing="full"))
        norm = ValueNorm(decay=0.99, membership=self.both.membership)  # for each player
        # Not centralized: a critic must not see the other player's card.
        self.critic = make_critic(
            self.both, CriticConfig(sharing="full"), centralized=False, value_norm=norm
        )
        self.loss = MAPPOLoss(
            actor,
            self.critic,
            group=self.both,
            bootstrap="agent",
            clip_epsilon=settings.clip_epsilon,
            critic_coeff=1.0,
            loss_critic_type="huber",
            huber_delta=10.0,
            entropy_bonus=True,
            entropy_coeff=settings.entropy_coeff,
            normalize_advantage=False,  # done once, over the whole batch
            functional=False,
        )
        self.loss.make_value_estimator(
            ValueEstimators.GAE, gamma=settings.gamma, lmbda=settings.lmbda
        )
        parameters = [*actor.parameters(), *self.critic.parameters()]
        self.optimizer = torch.optim.Adam(parameters, settings.lr, eps=1e-5, fused=True)
        self.actor = TeamPolicy([JoinedActor(actor, self.both)])

    def learn(self, batch: TensorDictBase, progress: float) -> None:
        """Trains on a batch ``[E, T]``, after a fraction ``progress`` of the run."""
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = self.settings.lr * (1.0 - progress)
        # An entropy bonus that falls to 0: first explore, then play as well as possible.
        self.loss.entropy_coeff.fill_(self.settings.entropy_coeff * (1.0 - progress))
        data = self.block.gather(batch)  # both players in one tensor, [E, T, N, ...]
        self.add_advantage(data)
        frames = data.reshape(-1)
        for indices in self.minibatches(len(frames)):
            self.update(frames[indices])

    @torch.no_grad()
    def add_advantage(self, data: TensorDictBase) -> None:
        """Writes advantages, standardized for each player, and the critic's targets."""
        self.loss.value_estimator(data)
        key = self.both.key("advantage")  # [E, T, N, 1]
        # Steps in which this player moves and is not a past policy: only these count.
        learned = learned_steps(data, self.both)
        data[key] = self.loss.per_group.standardize(data[key], learned)

    def minibatches(self, n_frames: int) -> Iterator[torch.Tensor]:
        """Yields the indices of minibatches; each epoch visits all frames in random order."""
        for _ in range(self.settings.num_epochs):
            yield from torch.randperm(n_frames).split(self.settings.minibatch_size)

    def update(self, minibatch: TensorDictBase) -> None:
        """Takes a step of Adam on the losses of actor and critic."""
        losses = self.loss(minibatch)
        total = sum(value.sum() for name, value in losses.items() if name.startswith("loss_"))
        self.optimizer.zero_grad()
        total.backward()
        self.optimizer.step()


class League:
    """The pool of past policies, and the policy that plays against them."""

    def __init__(self, policy: TeamPolicy, team: TeamSpec, settings: Settings) -> None:
        self.policy, self.n_stored = policy, 0
        quarter = settings.num_envs // 4
        # In half of the envs the policy plays both seats, in a quarter each only one of them.
        self.match = MatchPolicy(
            policy,
            team,
            seats=[{"first": [0]}, {"second": [0]}],
            envs=[settings.num_envs - 2 * quarter, quarter, quarter],
            n_slots=1 + settings.total_frames // settings.snapshot_every,
        )
        self.store()  # the untrained policy is the first opponent

    def store(self) -> None:
        """Copies the policy into the next slot; from now on each game draws one of all."""
        for players, actor in zip(self.match.players, self.policy.module):
            players.store(self.n_stored, actor)
        self.n_stored += 1
        # Probability that a seat, [2], meets the player in a slot, [S]: the same for all. Other
        # matchmakings change this line: 1.0 for the newest slot alone is plain, delayed self-play.
        self.match.chances[:, : self.n_stored] = 1.0 / self.n_stored


def nash_conv(game: Kuhn, policy: TeamPolicy) -> float:
    """Returns how much both players would gain by best responses: 0 for perfect play."""
    with torch.random.fork_rng():  # without a change of the training's random numbers
        return game.nash_conv(policy)


def train(settings: Settings) -> IPPO:
    """Trains both players; prints after each batch how far they are from perfect play."""
    torch.manual_seed(settings.seed)
    game = Kuhn(settings.num_envs, seed=settings.seed)
    env = with_players(game, ["first", "second"])  # remembers who plays, until a game ends
    team = TeamSpec.from_env(env)
    learner = IPPO(team, settings)
    league = League(learner.actor, team, settings)
    collector = RolloutCollector(
        env,
        league.match,
        frames_per_batch=settings.frames_per_batch,
        total_frames=settings.total_frames,
        execution=settings.execution,
    )
    began, frames, stored_at = time.perf_counter(), 0, 0
    for batch in collector:
        learner.learn(batch, frames / settings.total_frames)
        frames += batch.numel()
        if frames - stored_at >= settings.snapshot_every:
            league.store()
            stored_at = frames
        found = nash_conv(game, learner.actor)
        speed = frames / (time.perf_counter() - began)
        print(
            f"{frames:9,} frames   {league.n_stored:3} past policies   NashConv {found:6.3f}"
            f"   {speed:7,.0f} frames/s"
        )
    return learner


def main() -> None:
    """Reads settings from the command line, and trains."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in vars(Settings()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    train(Settings(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
