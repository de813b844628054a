"""Training loops of one recipe: ours, and the same recipe on TorchRL's classes."""

from __future__ import annotations

import dataclasses
import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensordict import TensorDictBase
    from torchrl.envs import EnvBase

    from torchrl_marl.training.config import TrainConfig

GROUP = "agents"


def reset_compiler() -> None:
    """Forgets what ``torch.compile`` made, and lets it try often enough.

    TensorDict's modules share their code: at torch's limit, 8 graphs for a piece of code, the
    next module would quietly not be compiled.
    """
    import torch._dynamo

    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 64


def execution_kwargs(execution: str) -> dict[str, str]:
    """The argument that says how programs run; none where that is step by step."""
    return {} if execution == "eager" else {"execution": execution}


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
    """The library's parts in a plain loop.

    Args:
        config (TrainConfig): the recipe.
        execution (str): how simulator, rollout and update run.
        collecting (str, optional): how simulator and rollout run, where it is not the same.
    """

    def __init__(
        self, config: TrainConfig, execution: str = "eager", collecting: str | None = None
    ) -> None:
        from torchrl_marl import TeamSpec
        from torchrl_marl.collectors import RolloutCollector
        from torchrl_marl.collectors.team import TeamPolicy
        from torchrl_marl.envs import make_env
        from torchrl_marl.learners import build_learners

        super().__init__()
        env = make_env(config.env, seed=config.seed, device=config.device)
        team, learner_kwargs = TeamSpec.from_env(env), execution_kwargs(execution)
        [self.learner] = build_learners(
            team, config.learner, device=config.device, **learner_kwargs
        )
        self.policy = TeamPolicy(self.learner.actors.values())
        self.collector = RolloutCollector(
            env,
            self.policy,
            frames_per_batch=config.frames_per_batch,
            **execution_kwargs(execution if collecting is None else collecting),
        )

    def collect(self) -> TensorDictBase:
        return self.collector.rollout()

    def learn(self, batch: TensorDictBase) -> None:
        self.learner.learn(batch)

    def close(self) -> None:
        self.collector.shutdown()


class TrainLoop(Loop):
    """What ``torchrl_marl.train`` repeats."""

    def __init__(self, config: TrainConfig) -> None:
        from torchrl_marl.recipes import load_config
        from torchrl_marl.training.trainer import start_training

        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        overrides = {
            "folder": str(Path(self.folder.name) / "run"),
            "logging.progress": False,
            "checkpoint.every_iterations": 0,
            "threads": None,
        }
        self.training = start_training(load_config(config, overrides), None)
        self.policy = self.training.policy

    def iterate(self) -> None:
        self.training.step()

    def close(self) -> None:
        self.training.close()
        self.folder.cleanup()


@dataclasses.dataclass(frozen=True)
class Form:
    """How a recipe is written on TorchRL's classes."""

    tuned: bool = False
    """The time limit from VMAS, indexing for the buffer, the loop for the vectorized GAE,
    ``functional=False``, ``use_td_params=False``, no value norm."""
    fused: bool = True
    """Adam with ``fused=True``."""
    compiled: bool = False
    """``torch.compile`` for the policy and the loss, and no trajectory ids."""


class TorchRLLoop(Loop):
    """The same recipe on TorchRL's classes.

    Args:
        config (TrainConfig): the recipe.
        form (Form): as its example writes it, or with what makes it faster.
    """

    def __init__(self, config: TrainConfig, form: Form) -> None:
        import torch
        from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement

        super().__init__()
        self.config, self.form, self.tuned = config.learner, form, form.tuned
        self.device = torch.device(config.device)
        env = self._make_env(config)
        self._make_networks(env)
        self._make_loss()
        self.optimizer = torch.optim.Adam(
            self.loss.parameters(),
            lr=self.config.lr,
            eps=self.config.adam_eps,
            fused=True if form.fused else None,
        )
        self.collector = collector(env, self.policy, config.frames_per_batch, form)
        self.batches = iter(self.collector)
        self.buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(config.frames_per_batch, device=self.device),
            sampler=SamplerWithoutReplacement(),
            batch_size=self.config.minibatch_size,
        )

    def _make_env(self, config: TrainConfig) -> Any:
        from torchrl.envs import StepCounter, TransformedEnv, VmasEnv

        settings = config.env
        env = VmasEnv(
            settings.name,
            num_envs=settings.num_envs,
            max_steps=settings.max_steps if self.tuned else None,
            seed=config.seed,
            device=self.device,
            **settings.kwargs,
        )
        return env if self.tuned else TransformedEnv(env, StepCounter(settings.max_steps))

    def _make_networks(self, env: Any) -> None:
        from tensordict.nn import TensorDictModule

        self.policy = make_policy(env, self.config.actor.num_cells, self.tuned)
        cells, central = self.config.critic.num_cells, self.config.algorithm == "mappo"
        self.critic = TensorDictModule(
            multi_agent_mlp(env, 1, cells, self.tuned, centralized=central),
            in_keys=[(GROUP, "observation")],
            out_keys=[(GROUP, "state_value")],
        )

    def _make_loss(self) -> None:
        import torch
        from torchrl.modules import PopArtValueNorm
        from torchrl.objectives import MAPPOLoss

        config = self.config
        self.loss = MAPPOLoss(
            self.policy,
            self.critic,
            value_norm=None if self.tuned else PopArtValueNorm(shape=1, device=self.device),
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
        self.evaluate_loss = torch.compile(self.loss) if self.form.compiled else self.loss

    def collect(self) -> TensorDictBase:
        return next(self.batches)

    def learn(self, batch: TensorDictBase) -> None:
        self.add_advantage(batch)
        self.train(batch)
        self.collector.update_policy_weights_()

    def add_advantage(self, batch: TensorDictBase) -> None:
        """Estimates advantages."""
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

    def train(self, batch: TensorDictBase) -> None:
        """The epochs on a batch with advantages."""
        import torch

        minibatches = self._minibatches if self.tuned else self._minibatches_from_buffer
        for minibatch in minibatches(batch):
            losses = self.evaluate_loss(minibatch)
            total = sum(losses[key] for key in losses.keys() if key.startswith("loss_"))
            self.optimizer.zero_grad()
            total.backward()
            torch.nn.utils.clip_grad_norm_(self.loss.parameters(), self.config.max_grad_norm)
            self.optimizer.step()

    def _minibatches_from_buffer(self, batch: TensorDictBase) -> Iterator[TensorDictBase]:
        self.buffer.extend(batch.reshape(-1))
        for _ in range(self.config.num_epochs):
            for _ in range(math.ceil(batch.numel() / self.config.minibatch_size)):
                yield self.buffer.sample()

    def _minibatches(self, batch: TensorDictBase) -> Iterator[TensorDictBase]:
        import torch

        names = ("observation", "action", "action_log_prob", "advantage", "value_target")
        frames = batch.select(*((GROUP, name) for name in names)).reshape(-1)
        for _ in range(self.config.num_epochs):
            order = torch.randperm(frames.shape[0], device=self.device)
            for indices in order.split(self.config.minibatch_size):
                yield frames[indices]

    def close(self) -> None:
        self.collector.shutdown()


def multi_agent_mlp(
    env: EnvBase, n_outputs: int, cells: list[int], tuned: bool, *, centralized: bool
) -> Any:
    """TorchRL's network of all agents, with shared parameters."""
    from torch import nn
    from torchrl.modules import MultiAgentMLP

    return MultiAgentMLP(
        n_agent_inputs=env.observation_spec[GROUP, "observation"].shape[-1],
        n_agent_outputs=n_outputs,
        n_agents=env.n_agents,
        centralized=centralized,
        share_params=True,
        num_cells=list(cells),
        activation_class=nn.Tanh,
        # The faster of the two; with functional=True its values keep their graph.
        use_td_params=not tuned,
        device=env.device,
    )


def make_policy(env: EnvBase, cells: list[int], tuned: bool) -> Any:
    """TorchRL's policy for continuous actions."""
    from tensordict.nn import TensorDictModule
    from torch import nn
    from torchrl.modules import NormalParamExtractor, ProbabilisticActor, TanhNormal

    action = env.full_action_spec_unbatched[GROUP, "action"]
    network = multi_agent_mlp(env, 2 * action.shape[-1], cells, tuned, centralized=False)
    return ProbabilisticActor(
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


def collector(env: EnvBase, policy: Any, frames: int, form: Form) -> Any:
    """TorchRL's collector."""
    from torchrl.collectors import Collector

    fast = {"compile_policy": True, "trust_policy": True, "track_traj_ids": False}
    settings = fast if form.compiled else {}
    return Collector(env, policy, frames_per_batch=frames, total_frames=-1, **settings)
