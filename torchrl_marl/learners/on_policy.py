"""The on-policy learner: advantage, minibatches, update.

Shapes: E envs, T steps, N agents of a group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from torchrl_marl.errors import NonFiniteError
from torchrl_marl.functional import masked_standardize
from torchrl_marl.learners.config import OnPolicyConfig
from torchrl_marl.modules.actors import make_actor
from torchrl_marl.modules.critics import make_critic
from torchrl_marl.modules.networks import gather_observation
from torchrl_marl.modules.normalization import ObservationNorm, ValueNorm
from torchrl_marl.objectives.ppo import MAPPOLoss
from torchrl_marl.specs import GroupSpec

__all__ = ["OnPolicyLearner"]


class OnPolicyLearner(nn.Module):
    """MAPPO or IPPO for one or more groups of equal settings, with one optimizer.

    ``state_dict()`` holds everything that resuming needs, the optimizer's state included.

    Args:
        groups (mapping of name to GroupSpec): the groups that it trains.
        config (OnPolicyConfig): how.
        device (torch.device, optional): of networks and optimizer.

    Shapes:
        - batch: ``[E, T]``

    Keys:
        - reads: what actors, critics and the losses read
        - writes: advantage, value_target and state_value of each group, into the batch

    Raises:
        NonFiniteError: a loss or gradient that is NaN or infinite.

    Examples:
        >>> from torchrl_marl import TeamSpec
        >>> from torchrl_marl.collectors import RolloutCollector
        >>> from torchrl_marl.envs import VmasEnv
        >>> env = VmasEnv("balance", num_envs=4, max_steps=100, seed=0)
        >>> learner = OnPolicyLearner(TeamSpec.from_env(env).groups, OnPolicyConfig())
        >>> batch = RolloutCollector(env, learner.actors["agents"], frames_per_batch=40).next()
        >>> metrics = learner.learn(batch)
        >>> metrics["agents", "loss_critic"].shape
        torch.Size([])
    """

    def __init__(
        self,
        groups: Mapping[str, GroupSpec],
        config: OnPolicyConfig,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.groups = dict(groups)
        self.config = config
        self.observation_norms = nn.ModuleDict()
        self.actors = nn.ModuleDict()
        self.critics = nn.ModuleDict()
        self._losses: dict[str, MAPPOLoss] = {}
        self._parameters_of: dict[str, list[nn.Parameter]] = {}
        for name, group in self.groups.items():
            self._add(name, group, device)
        parameters = [p for own in self._parameters_of.values() for p in own]
        # One kernel for all parameters; on a GPU, capturable in a graph.
        self.optimizer = torch.optim.Adam(parameters, lr=config.lr, eps=config.adam_eps, fused=True)

    def _add(self, name: str, group: GroupSpec, device: torch.device | str | None) -> None:
        config = self.config
        norm = None
        if config.normalize_observations:
            norm = ObservationNorm(group.observation_dim, device=device)
            self.observation_norms[name] = norm
        value_norm = (
            ValueNorm(config.value_norm_decay, device=device) if config.value_norm else None
        )
        sees: Any = config.algorithm == "mappo"
        if sees and config.central_input == "state":
            sees = "state"
        actor = make_actor(group, config.actor, observation_norm=norm, device=device)
        critic = make_critic(
            group,
            config.critic,
            centralized=sees,
            value_norm=value_norm,
            observation_norm=norm,
            device=device,
        )
        loss = MAPPOLoss(
            actor,
            critic,
            group=group,
            bootstrap=cast(Literal["team", "agent"], config.bootstrap),
            clip_epsilon=config.clip_epsilon,
            clip_value=config.clip_value,
            critic_coeff=config.critic_coeff,
            loss_critic_type=config.loss_critic_type,
            huber_delta=config.huber_delta,
            entropy_bonus=config.entropy_coeff > 0,
            entropy_coeff=config.entropy_coeff,
            normalize_advantage=False,  # done here, over the whole batch
            device=device,
        )
        loss.make_value_estimator(gamma=config.gamma, lmbda=config.lmbda)
        self.actors[name], self.critics[name] = actor, critic
        self._losses[name] = loss
        self._parameters_of[name] = [*actor.parameters(), *critic.parameters()]

    @property
    def actor(self) -> nn.Module:
        """The actor of the only group.

        Raises:
            ValueError: there are several groups; ask ``actors``.
        """
        if len(self.actors) > 1:
            raise ValueError(f"this learner has the groups {list(self.actors)}; use .actors[name].")
        return next(iter(self.actors.values()))

    def set_progress(self, fraction: float) -> None:
        """Moves the schedules to a fraction, 0 to 1, of the run."""
        config = self.config
        if config.lr_schedule == "linear":
            for parameters in self.optimizer.param_groups:
                parameters["lr"] = config.lr * (1.0 - fraction)
        if config.entropy_schedule == "linear":
            for loss in self._losses.values():
                loss.entropy_coeff.fill_(config.entropy_coeff * (1.0 - fraction))

    def learn(self, batch: TensorDictBase) -> TensorDict:
        """Trains on a batch; metrics are tensors, ``(group, name)``."""
        for name, loss in self._losses.items():
            self.add_advantage(name, loss, batch)
        frames = batch.select(*self._needed_keys(batch)).reshape(-1)
        count, size = frames.shape[0], self.config.minibatch_size
        history: list[dict[NestedKey, Tensor]] = []
        epochs = 0
        for _ in range(self.config.num_epochs):
            order = torch.randperm(count, device=frames.device)
            first = len(history)
            for indices in order.split(size):
                history.append(self.update(frames[indices]))
            epochs += 1
            if self._moved_too_far(history[first:]):
                break
        for name, norm in self.observation_norms.items():
            observation, mask = gather_observation(self.groups[name], batch)
            cast(ObservationNorm, norm).update(observation, mask)
        return self._summary(history, epochs)

    @torch.no_grad()
    def add_advantage(self, name: str, loss: MAPPOLoss, batch: TensorDictBase) -> None:
        """Estimates a group's advantages and standardizes them over the whole batch."""
        loss.value_estimator(batch)
        how, group = self.config.normalize_advantage, self.groups[name]
        if how == "none":
            return
        key = loss.tensor_keys.advantage
        advantage = batch.get(key)
        mask = None if group.mask_key is None else batch.get(group.mask_key)
        dims = [d for d in range(advantage.ndim) if how == "pooled" or d != advantage.ndim - 2]
        batch.set(key, masked_standardize(advantage, mask, dims))

    def update(self, minibatch: TensorDictBase) -> dict[NestedKey, Tensor]:
        """One step of the optimizer on all groups' losses."""
        metrics: dict[NestedKey, Tensor] = {}
        total: Tensor | float = 0.0
        for name, loss in self._losses.items():
            for key, value in loss(minibatch).items():
                if key.startswith("loss_"):
                    total = total + value
                metrics[name, key] = value.detach()
        self.optimizer.zero_grad(set_to_none=True)
        cast(Tensor, total).backward()
        limit = self.config.max_grad_norm
        for name, parameters in self._parameters_of.items():
            norm = nn.utils.clip_grad_norm_(
                parameters, float("inf") if limit is None else limit, foreach=True
            )
            metrics[name, "grad_norm"] = norm.detach()
        self.optimizer.step()
        return metrics

    def _needed_keys(self, batch: TensorDictBase) -> list[NestedKey]:
        keys: list[NestedKey] = []
        for name, loss in self._losses.items():
            of_loss = loss.tensor_keys
            for network in (self.actors[name], self.critics[name]):
                keys += cast(TensorDictModuleBase, network).in_keys
            keys += [of_loss.action, of_loss.sample_log_prob, of_loss.advantage]
            keys += [of_loss.value_target, of_loss.value]
            if self.groups[name].mask_key is not None:
                keys.append(self.groups[name].mask_key)
        return list(dict.fromkeys(keys))

    def _moved_too_far(self, epoch: list[dict[NestedKey, Tensor]]) -> bool:
        limit = self.config.target_kl
        if limit is None:
            return False
        kl = [metrics[name, "kl_approx"] for metrics in epoch for name in self._losses]
        return bool(torch.stack(kl).mean() > limit)

    def _summary(self, history: list[dict[NestedKey, Tensor]], epochs: int) -> TensorDict:
        device = next(iter(history[0].values())).device
        summary = TensorDict({name: {} for name in self._losses}, [], device=device)
        for key in history[0]:
            values = torch.stack([metrics[key] for metrics in history])
            summary[key] = values.max() if key[1] == "max_ratio" else values.mean()
        for name in self._losses:
            summary[name, "lr"] = torch.tensor(self.optimizer.param_groups[0]["lr"], device=device)
            summary[name, "epochs"] = torch.tensor(epochs, device=device)
        _refuse_non_finite(summary)
        return summary

    def get_extra_state(self) -> dict[str, Any]:
        """What ``state_dict()`` holds beside networks and statistics."""
        return {"optimizer": self.optimizer.state_dict()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Takes the optimizer's state back."""
        self.optimizer.load_state_dict(state["optimizer"])


def _refuse_non_finite(summary: TensorDict) -> None:
    keys = [k for k in summary.keys(True, True) if k[1].startswith("loss_") or k[1] == "grad_norm"]
    finite = torch.stack([torch.isfinite(summary[key]) for key in keys])
    if bool(finite.all()):
        return
    group, name = keys[int((~finite).nonzero()[0])]
    raise NonFiniteError(
        f"group {group!r}: {name} became NaN or infinite while learning; "
        "lower learner.lr or learner.max_grad_norm, or look at the rewards' scale."
    )
