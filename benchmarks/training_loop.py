"""The whole training loop of a recipe against the same recipe written on TorchRL's classes.

    python benchmarks/training_loop.py --write

Collect, estimate advantages, update; no evaluation, no logging. Default recipe
(``vmas_balance_mappo``) with its batch, epochs, minibatches, networks and fused Adam in all rows:

- *TorchRL*: as TorchRL's own MAPPO example is written: ``torchrl.envs.VmasEnv``, ``Collector``,
  ``MultiAgentMLP``, ``ProbabilisticActor`` with ``TanhNormal``, ``MAPPOLoss`` with
  ``PopArtValueNorm`` and ``MultiAgentGAE`` once a batch, a ``TensorDictReplayBuffer`` that is
  sampled without replacement; ``StepCounter`` for the time limit, so that it truncates;
- *TorchRL, tuned*: with what makes TorchRL faster: the time limit from VMAS (which then counts as a
  termination, as in TorchRL's tutorials), plain indexing instead of the buffer, the loop instead
  of the vectorized GAE, ``functional=False``, ``use_td_params=False``, no value norm;
- *torchrl_marl*: our collector and learner in a plain loop;
- *torchrl_marl, train*: one step of ``torchrl_marl.train`` as it runs, with checks, episode
  statistics, ``metrics.csv`` and the recipe's schedules; learning rates of the others stay.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import report

if TYPE_CHECKING:
    from tensordict import TensorDictBase

    from torchrl_marl.training.config import TrainConfig

BASELINES = ("TorchRL", "TorchRL, tuned")
OURS = "torchrl_marl"
TRAIN = "torchrl_marl, train"
GROUP = "agents"


class Loop:
    """A training loop, and what its two halves take."""

    policy: Any

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {"collect": [], "learn": []}

    def iterate(self) -> None:
        """One iteration."""
        began = time.perf_counter()
        batch = self.collect()
        collected = time.perf_counter()
        self.learn(batch)
        self.seconds["collect"].append(collected - began)
        self.seconds["learn"].append(time.perf_counter() - collected)

    def collect(self) -> TensorDictBase:
        """A batch."""
        raise NotImplementedError

    def learn(self, batch: TensorDictBase) -> None:
        """Advantage, epochs, minibatches, updates."""
        raise NotImplementedError

    def close(self) -> None:
        """Frees what the loop holds."""


class OurLoop(Loop):
    """The library's parts in a plain loop."""

    def __init__(self, config: TrainConfig) -> None:
        from torchrl_marl import TeamSpec
        from torchrl_marl.collectors import RolloutCollector
        from torchrl_marl.collectors.team import TeamPolicy
        from torchrl_marl.envs import make_env
        from torchrl_marl.learners import build_learners

        super().__init__()
        env = make_env(config.env, seed=config.seed)
        [self.learner] = build_learners(TeamSpec.from_env(env), config.learner)
        self.policy = TeamPolicy(self.learner.actors.values())
        self.collector = RolloutCollector(
            env, self.policy, frames_per_batch=config.frames_per_batch
        )

    def collect(self) -> TensorDictBase:
        return self.collector.rollout()

    def learn(self, batch: TensorDictBase) -> None:
        self.learner.learn(batch)


class TrainLoop(Loop):
    """What ``torchrl_marl.train`` repeats."""

    def __init__(self, config: TrainConfig) -> None:
        from torchrl_marl.config import load_config
        from torchrl_marl.training.trainer import Training

        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        overrides = {
            "folder": str(Path(self.folder.name) / "run"),
            "logging.progress": False,
            "checkpoint.every_iterations": 0,
            "threads": None,
        }
        self.training = Training.start(load_config(config, overrides), None)
        self.policy = self.training.policy

    def iterate(self) -> None:
        self.training.step()

    def close(self) -> None:
        self.training.close()
        self.folder.cleanup()


class TorchRLLoop(Loop):
    """The same recipe on TorchRL's classes.

    Args:
        config (TrainConfig): the recipe.
        tuned (bool): with what makes it faster.
    """

    def __init__(self, config: TrainConfig, tuned: bool) -> None:
        import torch
        from torchrl.collectors import Collector
        from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement

        super().__init__()
        self.config, self.tuned = config.learner, tuned
        env = self._make_env(config)
        self._make_networks(env)
        self._make_loss()
        self.optimizer = torch.optim.Adam(
            self.loss.parameters(), lr=self.config.lr, eps=self.config.adam_eps, fused=True
        )
        self.collector = Collector(
            env, self.policy, frames_per_batch=config.frames_per_batch, total_frames=-1
        )
        self.batches = iter(self.collector)
        self.buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(config.frames_per_batch),
            sampler=SamplerWithoutReplacement(),
            batch_size=self.config.minibatch_size,
        )

    def _make_env(self, config: TrainConfig) -> Any:
        from torchrl.envs import StepCounter, TransformedEnv, VmasEnv

        settings = config.env
        env = VmasEnv(
            settings.name,
            num_envs=settings.n_envs,
            max_steps=settings.max_steps if self.tuned else None,
            seed=config.seed,
            **settings.kwargs,
        )
        return env if self.tuned else TransformedEnv(env, StepCounter(settings.max_steps))

    def _make_networks(self, env: Any) -> None:
        from tensordict.nn import TensorDictModule
        from torch import nn
        from torchrl.modules import (
            MultiAgentMLP,
            NormalParamExtractor,
            ProbabilisticActor,
            TanhNormal,
        )

        action = env.full_action_spec_unbatched[GROUP, "action"]
        settings = {
            "n_agent_inputs": env.observation_spec[GROUP, "observation"].shape[-1],
            "n_agents": env.n_agents,
            "share_params": True,
            "activation_class": nn.Tanh,
            # The faster of the two; with functional=True its values keep their graph.
            "use_td_params": not self.tuned,
        }
        cells = {name: list(getattr(self.config, name).num_cells) for name in ("actor", "critic")}
        network = MultiAgentMLP(
            n_agent_outputs=2 * action.shape[-1],
            centralized=False,
            num_cells=cells["actor"],
            **settings,
        )
        self.policy = ProbabilisticActor(
            TensorDictModule(
                nn.Sequential(network, NormalParamExtractor()),
                in_keys=[(GROUP, "observation")],
                out_keys=[(GROUP, "loc"), (GROUP, "scale")],
            ),
            in_keys=[(GROUP, "loc"), (GROUP, "scale")],
            out_keys=[(GROUP, "action")],
            distribution_class=TanhNormal,
            distribution_kwargs={
                "low": action.space.low.min().item(),
                "high": action.space.high.max().item(),
            },
            return_log_prob=True,
            log_prob_key=(GROUP, "action_log_prob"),
        )
        self.critic = TensorDictModule(
            MultiAgentMLP(
                n_agent_outputs=1, centralized=True, num_cells=cells["critic"], **settings
            ),
            in_keys=[(GROUP, "observation")],
            out_keys=[(GROUP, "state_value")],
        )

    def _make_loss(self) -> None:
        from torchrl.modules import PopArtValueNorm
        from torchrl.objectives import MAPPOLoss

        config = self.config
        self.loss = MAPPOLoss(
            self.policy,
            self.critic,
            value_norm=None if self.tuned else PopArtValueNorm(shape=1),
            clip_epsilon=config.clip_epsilon,
            critic_coeff=config.critic_coeff,
            entropy_bonus=config.entropy_coeff > 0,
            entropy_coeff=config.entropy_coeff,
            normalize_advantage_exclude_dims=(),
            functional=not self.tuned,
        )
        self.loss.set_keys(
            action=(GROUP, "action"),
            sample_log_prob=(GROUP, "action_log_prob"),
            value=(GROUP, "state_value"),
            reward=(GROUP, "reward"),
            advantage=(GROUP, "advantage"),
            value_target=(GROUP, "value_target"),
        )
        self.loss.make_value_estimator(
            gamma=config.gamma, lmbda=config.lmbda, vectorized=not self.tuned
        )

    def collect(self) -> TensorDictBase:
        return next(self.batches)

    def learn(self, batch: TensorDictBase) -> None:
        import torch

        with torch.no_grad():
            if self.tuned:
                self.loss.value_estimator(batch)
            else:
                self.loss.value_estimator(
                    batch,
                    params=self.loss.critic_network_params,
                    target_params=self.loss.target_critic_network_params,
                )
        minibatches = self._minibatches if self.tuned else self._minibatches_from_buffer
        for minibatch in minibatches(batch):
            losses = self.loss(minibatch)
            total = sum(losses[key] for key in losses.keys() if key.startswith("loss_"))
            self.optimizer.zero_grad()
            total.backward()
            torch.nn.utils.clip_grad_norm_(self.loss.parameters(), self.config.max_grad_norm)
            self.optimizer.step()
        self.collector.update_policy_weights_()

    def _minibatches_from_buffer(self, batch: TensorDictBase):
        self.buffer.extend(batch.reshape(-1))
        for _ in range(self.config.num_epochs):
            for _ in range(batch.numel() // self.config.minibatch_size):
                yield self.buffer.sample()

    def _minibatches(self, batch: TensorDictBase):
        import torch

        names = ("observation", "action", "action_log_prob", "advantage", "value_target")
        frames = batch.select(*((GROUP, name) for name in names)).reshape(-1)
        for _ in range(self.config.num_epochs):
            for indices in torch.randperm(frames.shape[0]).split(self.config.minibatch_size):
                yield frames[indices]

    def close(self) -> None:
        self.collector.shutdown()


def make_loops(config: TrainConfig) -> dict[str, Loop]:
    """All candidates, each from the same seed."""
    import torch

    made: dict[str, Loop] = {}
    for name in (*BASELINES, OURS, TRAIN):
        torch.manual_seed(config.seed)
        if name in BASELINES:
            made[name] = TorchRLLoop(config, tuned=name == "TorchRL, tuned")
        else:
            made[name] = {OURS: OurLoop, TRAIN: TrainLoop}[name](config)
    return made


def mean_returns(config: TrainConfig, loops: dict[str, Loop], episodes: int) -> dict[str, float]:
    """What each policy earns by its likeliest actions, on the same episodes."""
    from torchrl_marl import TeamSpec
    from torchrl_marl.envs import make_env
    from torchrl_marl.training.evaluation import evaluate

    env = make_env(config.env, seed=1, n_envs=episodes)
    team = TeamSpec.from_env(env)
    return {
        name: evaluate(env, loop.policy, team, episodes=episodes, seed=1)["return_mean"]
        for name, loop in loops.items()
    }


def measure(args: argparse.Namespace) -> list[list[str]]:
    """A row for every candidate."""
    from torchrl_marl.config import load_config

    overrides = {"env.n_envs": 8, "frames_per_batch": 160, "learner.minibatch_size": 80}
    config = load_config(args.recipe, overrides if args.quick else {})
    loops = make_loops(config)
    episodes = 8 if args.quick else 200
    before = mean_returns(config, loops, episodes)
    timings = report.alternate(
        {name: loop.iterate for name, loop in loops.items()},
        args.rounds,
        seconds=args.seconds,
        warmup=2,
    )
    after = mean_returns(config, loops, episodes)
    rows = []
    for name, loop in loops.items():
        seconds = timings.median(name)
        rows.append(
            [
                name,
                f"{config.frames_per_batch / seconds:,.0f}",
                *(timings.ratio_text(name, baseline) for baseline in BASELINES),
                *(_median_ms(loop.seconds[half]) for half in ("collect", "learn")),
                f"{before[name]:.1f} to {after[name]:.1f}",
                timings.rounds(),
            ]
        )
        loop.close()
    return rows


def _median_ms(seconds: list[float]) -> str:
    return f"{1e3 * sorted(seconds)[len(seconds) // 2]:.0f}" if seconds else ""


def main() -> None:
    """Measures and reports."""
    parser = report.parser(__doc__)
    parser.add_argument("--recipe", default="vmas_balance_mappo")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=180.0, help="longest, for the rounds")
    args = parser.parse_args()
    if args.quick:
        args.write = False
        args.rounds = 2
    header = ["", "frames/s", "times TorchRL", "times TorchRL, tuned", "collect, ms", "learn, ms"]
    header += ["return, untrained to last", "rounds"]
    measured = report.for_each_number_of_threads(measure, args.threads, args)
    report.publish(
        "training_loop",
        f"The training loop of {args.recipe}",
        [
            (report.count_of(n, "thread"), report.markdown_table(header, rows))
            for n, rows in measured.items()
        ],
        {"recipe": args.recipe},
        __doc__.split("\n\n", 2)[2]
        + """
        The loops alternate in one process, one iteration each in random order every round; frames/s
        are from the median time of an iteration, "times" is the median (and the quartiles) of the
        rounds' ratios. All four learn for the same number of iterations (the rounds and two before
        them); "return" is the mean of 200 episodes by the likeliest actions.""",
        write=args.write,
    )


if __name__ == "__main__":
    main()
