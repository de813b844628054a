"""The off-policy learner: every batch is stored, and updates are made from what is stored.

Shapes: E envs, T steps, N agents of a group, G groups that are trained as one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictSequential
from torch import Tensor, nn

from torchrl_marl.capture import check_execution
from torchrl_marl.errors import ConfigError, NonFiniteError
from torchrl_marl.learners.adam import Adam
from torchrl_marl.learners.block import Block
from torchrl_marl.learners.losses import build_loss
from torchrl_marl.learners.networks import (
    ObservationNorms,
    build_action_critic,
    build_actor,
    must_stay_apart,
    seen_by_critics,
)
from torchrl_marl.learners.off_policy_config import OffPolicyConfig
from torchrl_marl.learners.replay import Priority, TeamReplay
from torchrl_marl.learners.replay_updates import Clips, History, ReplayUpdates
from torchrl_marl.learners.turns import acts_in_turns, warn_of_turns
from torchrl_marl.modules.actors import make_actor
from torchrl_marl.modules.deterministic_actor import make_deterministic_actor
from torchrl_marl.modules.exploration import Explore
from torchrl_marl.modules.joined_actor import GroupActors
from torchrl_marl.modules.precision import matmul_precision
from torchrl_marl.objectives.maddpg import MADDPGLoss
from torchrl_marl.objectives.masac import MASACLoss
from torchrl_marl.objectives.targets import share_rewards
from torchrl_marl.specs import GroupSpec, TeamSpec

__all__ = ["OffPolicyLearner"]

_NORMS = ("grad_norm_critic", "grad_norm_actor")


class OffPolicyLearner(nn.Module):
    """MADDPG, MATD3, MASAC or their independent forms for one or more groups of equal settings.

    Groups with actions of one type are trained as one: their agents side by side, padded. A batch
    is stored whole; then so many updates follow as its frames give, each from steps drawn of all
    that is stored, the whole team's. Until ``learning_starts`` frames are stored, agents act at
    random and the metrics are NaN.

    ``state_dict()`` holds everything that resuming needs, what is stored included.

    Args:
        groups (mapping of name to GroupSpec): the groups that it trains.
        config (OffPolicyConfig): how.
        team (TeamSpec, optional): all groups of the environment, for a critic across groups.
        device (torch.device, optional): of networks and store.
        execution ("eager", "compile" or "cudagraph"): operation by operation; or each update,
            from its rows to the targets, as one compiled graph.

    Attributes:
        actors (GroupActors): by group, with their exploration.
        replay (TeamReplay or None): the store; None before the first batch.
        frames (int): env steps seen.

    Shapes:
        - batch: ``[E, T]``, heterogeneous groups padded

    Keys:
        - reads: what actors, critics and the losses read
        - writes: nothing into the batch

    Raises:
        NonFiniteError: a loss or gradient that is NaN or infinite.

    Examples:
        >>> from torchrl_marl import TeamSpec
        >>> from torchrl_marl.collectors import RolloutCollector
        >>> from torchrl_marl.envs import VmasEnv
        >>> env = VmasEnv("balance", num_envs=4, max_steps=100, seed=0)
        >>> config = OffPolicyConfig(learning_starts=0, minibatch_size=16)
        >>> learner = OffPolicyLearner(TeamSpec.from_env(env).groups, config)
        >>> batch = RolloutCollector(env, learner.actors["agents"], frames_per_batch=40).next()
        >>> metrics = learner.learn(batch)
        >>> metrics["agents", "updates"], len(learner.replay)
        (tensor(4.), 40)
    """

    def __init__(
        self,
        groups: Mapping[str, GroupSpec],
        config: OffPolicyConfig,
        *,
        team: TeamSpec | None = None,
        device: torch.device | str | None = None,
        execution: str = "eager",
    ) -> None:
        super().__init__()
        if execution != "trace":  # for tests: a graph, run operation by operation
            check_execution(execution, device, "OffPolicyLearner")
        self.groups, self.config = dict(groups), config
        seen = seen_by_critics((self.groups if team is None else team.groups).values(), config)
        apart = must_stay_apart(config)
        self.block = Block(self.groups, apart=apart, seen=seen, acted=("action",))
        self.observation_norms = ObservationNorms(config.normalize_observations, device)
        self.actors, self.critics = GroupActors(), nn.ModuleDict()
        self.explorers: list[Explore] = []
        self.losses: dict[str, MADDPGLoss | MASACLoss] = {}
        for name, group in self.block.joined.items():
            make = make_actor if config.soft else make_deterministic_actor
            actor = build_actor(group, config, self.observation_norms, device, make)
            n_critics = 2 if config.twin else 1
            critic = build_action_critic(
                group, seen, config, self.observation_norms, n_critics, device
            )
            explore = Explore(group, device=device)
            self.actors.add(group, TensorDictSequential(actor, explore))
            self.critics[name] = critic
            self.explorers.append(explore)
            self.losses[name] = build_loss(actor, critic, group, config)
        self.targets = nn.ModuleDict(
            {
                name: nn.ModuleList([getattr(loss, f"target_{x}") for x in loss.with_target])
                for name, loss in self.losses.items()
            }
        )
        if config.soft:
            alphas = {name: loss.log_alpha for name, loss in self.losses.items()}
            self.log_alphas = nn.ParameterDict(alphas)
        self.updates = self._make_updates(seen, execution)
        self.replay: TeamReplay | None = None
        self.device = None if device is None else torch.device(device)
        self.frames, self.owed, self.progress = 0, 0.0, 0.0
        self._explore()

    def _make_updates(self, seen: GroupSpec | None, execution: str) -> ReplayUpdates:
        config, losses = self.config, self.losses.values()
        actors = [p for loss in losses for p in loss.actor_network.parameters()]
        critics = [p for loss in losses for p in loss.qvalue_network.parameters()]
        limit, alphas = config.max_grad_norm, None
        if config.soft:
            alphas = Adam(self.log_alphas.values(), config.alpha_lr, config.adam_eps)
        return ReplayUpdates(
            self.losses,
            {name: Clips.of_loss(loss, seen, limit) for name, loss in self.losses.items()},
            Adam(actors, config.actor_lr, config.adam_eps),
            Adam(critics, config.critic_lr, config.adam_eps),
            minibatch_size=config.minibatch_size,
            n_step=config.n_step,
            gamma=config.gamma,
            tau=config.tau,
            interval=config.actor_interval if config.delayed else 1,
            temperatures=alphas,
            execution=execution,
        )

    def set_progress(self, fraction: float) -> None:
        """Moves the schedules to a fraction, 0 to 1, of the run."""
        self.progress = fraction
        self._explore()

    def _explore(self) -> None:
        """Fills in how actions are explored from now on."""
        settings = self.config.exploration
        share = min(1.0, self.progress / settings.annealing) if settings.annealing else 1.0
        epsilon = settings.epsilon + share * (settings.epsilon_end - settings.epsilon)
        sigma = settings.sigma + share * (settings.sigma_end - settings.sigma)
        for explore in self.explorers:
            explore.epsilon.fill_(epsilon if self.started else 1.0)
            explore.sigma.fill_(0.0 if self.config.soft else sigma)

    @property
    def started(self) -> bool:
        """Whether enough is stored to learn from."""
        return self.frames >= self.config.learning_starts

    def learn(self, batch: TensorDictBase) -> TensorDict:
        """Stores a batch and makes its updates; metrics are tensors, ``(group, name)``."""
        with matmul_precision(self.config.precision):
            batch = batch.reshape(-1, batch.shape[-1])
            self._store(batch)
            n_updates = 0
            if self.started:
                self.owed += self.config.updates_per_frame * batch.numel()
                n_updates = int(self.owed)
                self.owed -= n_updates
            history = self.updates.run(cast(TeamReplay, self.replay), n_updates)
            _refuse_non_finite(history)
            self._explore()
            return self._summary(history, n_updates)

    def _store(self, batch: TensorDictBase) -> None:
        if self.replay is None:
            self._look_at_turns(batch)
            self.replay = self._make_replay(len(batch))
        data = self.block.gather(batch)
        for loss in self.losses.values() if self.config.bootstrap == "team" else ():
            share_rewards(loss.group, data, loss.per_group)
        self.replay.extend(data)
        self.observation_norms.update_all(data)
        self.frames += batch.numel()

    def _make_replay(self, num_envs: int) -> TeamReplay:
        settings = self.config.replay
        n_steps = math.ceil(settings.capacity / num_envs)
        priority = Priority(settings.alpha, settings.beta) if settings.alpha else None
        keys = dict.fromkeys(key for loss in self.losses.values() for key in loss.in_keys)
        earn = self.config.bootstrap == "team"
        return TeamReplay(n_steps, num_envs, list(keys), priority, self.device, dead_earn=earn)

    def _look_at_turns(self, batch: TensorDictBase) -> None:
        warn_of_turns(self.groups.values(), batch, self.config.bootstrap)
        for group in self.groups.values():
            if self.config.bootstrap == "agent" and bool(acts_in_turns(group, batch)):
                raise ConfigError(
                    f"group {group.name!r}: agents act in turns or at their own pace, which "
                    f"{self.config.algorithm} does not yet credit with bootstrap=agent; use "
                    "algorithm=mappo, or bootstrap=team."
                )

    def _summary(self, history: History, n_updates: int) -> TensorDict:
        device = self.explorers[0].epsilon.device
        nothing = torch.full((), torch.nan, device=device)
        summary: dict[str, dict[str, Tensor]] = {name: {} for name in self.groups}
        for (name, loss), explore in zip(self.losses.items(), self.explorers):
            for i, group in enumerate(loss.group.groups):
                own = summary[group.name]
                for key in (*loss.out_keys, *_NORMS):
                    values = history.get((name, key))
                    mean = None if values is None else values.mean(0).reshape(-1)[i]
                    own[key] = nothing if mean is None else mean
                own["epsilon"] = explore.epsilon.clone()
                if not self.config.soft:
                    own["sigma"] = explore.sigma.clone()
                for key, number in (("updates", n_updates), ("stored", len(self.replay or ()))):
                    own[key] = torch.full((), float(number), device=device)
        return TensorDict(cast(dict[str, Any], summary), [], device=device)

    # ------------------------------------------------------------------------------- state

    def get_extra_state(self) -> dict[str, Any]:
        """What ``state_dict()`` holds beside networks and statistics."""
        updates, replay = self.updates, self.replay
        alphas = updates.temperatures
        return {
            **({} if alphas is None else {"alphas": alphas.state_dict()}),
            "actors": updates.actors.state_dict(),
            "critics": updates.critics.state_dict(),
            "updates": updates.count,
            "frames": self.frames,
            "owed": self.owed,
            "progress": self.progress,
            "replay": None if replay is None else replay.state_dict(),
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Takes it back."""
        self.updates.actors.load_state_dict(state["actors"])
        self.updates.critics.load_state_dict(state["critics"])
        if self.updates.temperatures is not None:
            self.updates.temperatures.load_state_dict(state["alphas"])
        self.updates.count, self.frames = state["updates"], state["frames"]
        self.owed, self.progress = state["owed"], state["progress"]
        if state["replay"] is not None:
            if self.replay is None:
                self.replay = self._make_replay(state["replay"]["shape"][1])
            self.replay.load_state_dict(state["replay"])


def _refuse_non_finite(history: History) -> None:
    """Waits for the device."""
    keys = [key for key in history if key[1].startswith(("loss_", "grad_norm"))]
    finite = [torch.isfinite(history[key]).all() for key in keys]
    if not keys or bool(torch.stack(finite).all()):
        return
    name, metric = next(key for key, fine in zip(keys, finite) if not bool(fine))
    raise NonFiniteError(
        f"group {name!r}: {metric} became NaN or infinite while learning; lower "
        "learner.actor_lr, learner.critic_lr or learner.max_grad_norm, or look at the "
        "rewards' scale."
    )
