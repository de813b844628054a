"""The on-policy learner: advantage, minibatches, update.

Shapes: E envs, T steps, N agents of a group, G groups that are trained as one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from torchrl_marl.capture import check_execution
from torchrl_marl.learners.block import Block
from torchrl_marl.learners.captured import make_updates
from torchrl_marl.learners.clipping import GradientClip
from torchrl_marl.learners.config import OnPolicyConfig
from torchrl_marl.learners.networks import (
    ObservationNorms,
    build_actor,
    build_critic,
    must_stay_apart,
    seen_by_critics,
)
from torchrl_marl.learners.stopping import KLStop
from torchrl_marl.learners.summary import refuse_non_finite, summarize
from torchrl_marl.learners.turns import warn_of_turns
from torchrl_marl.learners.unshare import unshare_networks
from torchrl_marl.learners.updates import minibatch_keys, shuffled_epochs
from torchrl_marl.modules.joined_actor import GroupActors
from torchrl_marl.modules.precision import matmul_precision
from torchrl_marl.objectives.masking import loss_mask
from torchrl_marl.objectives.ppo import MAPPOLoss
from torchrl_marl.specs import GroupSpec, TeamSpec

__all__ = ["OnPolicyLearner"]

_WRITTEN = ("advantage", "value_target", "state_value", "loss_mask")


class OnPolicyLearner(nn.Module):
    """MAPPO or IPPO for one or more groups of equal settings, with one optimizer.

    Groups with actions of one type are trained as one: their agents side by side, padded, in one
    batched call of actor, critic and loss. Each group keeps statistics, means and limits of
    its own, so that it learns as it would alone.

    ``state_dict()`` holds everything that resuming needs, the optimizer's state included.

    Args:
        groups (mapping of name to GroupSpec): the groups that it trains.
        config (OnPolicyConfig): how.
        team (TeamSpec, optional): all groups of the environment, for a critic across groups.
        device (torch.device, optional): of networks and optimizer.
        execution ("eager", "compile" or "cudagraph"): operation by operation; or each update,
            from the minibatch to Adam, as one compiled graph, which a GPU may replay.

    Attributes:
        actors (GroupActors): by group; groups that are trained as one act as one, too.
        critics (ModuleDict): by name of a group, or of several as one, ``"a+b"``, which it reads
            side by side.

    Shapes:
        - batch: ``[E, T]``, heterogeneous groups padded

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

    per_agent = False
    """Whether each agent's policy has means, limits and a stop of its own, and not each group's."""
    make_stop = KLStop
    """What ends the epochs of a batch."""

    def __init__(
        self,
        groups: Mapping[str, GroupSpec],
        config: OnPolicyConfig,
        *,
        team: TeamSpec | None = None,
        device: torch.device | str | None = None,
        execution: str = "eager",
    ) -> None:
        super().__init__()
        if execution != "trace":  # for tests: a graph, run operation by operation
            check_execution(execution, device, "OnPolicyLearner")
        self.execution = execution
        self.groups = dict(groups)
        self.config = config
        seen = seen_by_critics((self.groups if team is None else team.groups).values(), config)
        self.block = Block(self.groups, apart=must_stay_apart(config), seen=seen)
        self.observation_norms = ObservationNorms(config.normalize_observations, device)
        self.actors = GroupActors()
        self.critics = nn.ModuleDict()
        self.losses: dict[str, MAPPOLoss] = {}
        for name, group in self.block.joined.items():
            actor = build_actor(group, config, self.observation_norms, device)
            critic = build_critic(group, seen, config, self.observation_norms, device)
            self.actors.add(group, actor)
            self.critics[name] = critic
            self.losses[name] = _loss(actor, critic, group, config, device, self.per_agent)
        self.unshared = self._looked = False
        networks = [x for loss in self.losses.values() for x in _networks(loss)]
        parameters = list(dict.fromkeys(p for net in networks for p in net.parameters()))
        # One kernel for all parameters.
        self.optimizer = torch.optim.Adam(parameters, lr=config.lr, eps=config.adam_eps, fused=True)
        self._prepare_updates()

    def _prepare_updates(self) -> None:
        """Prepares updates of these networks with this optimizer."""
        config, joined = self.config, self.block.joined
        clips = {
            name: GradientClip.of_networks(
                joined[name],
                self.block.seen,
                *_networks(loss),
                config.max_grad_norm,
                self.per_agent,
            )
            for name, loss in self.losses.items()
        }
        device = self.optimizer.param_groups[0]["params"][0].device
        self.updates = make_updates(
            self.losses,
            self.optimizer,
            clips=clips,
            stop=self.make_stop(clips, config.target_kl, device),
            execution=self.execution,
        )

    @property
    def actor(self) -> nn.Module:
        """The actor of all groups, where they are trained as one.

        Raises:
            ValueError: there are several; ask ``actors``.
        """
        trained = list(self.actors.children())
        if len(trained) > 1:
            raise ValueError(f"this learner has the actors {list(self.actors)}; use .actors[name].")
        return trained[0]

    def set_progress(self, fraction: float) -> None:
        """Moves the schedules to a fraction, 0 to 1, of the run."""
        config = self.config
        if config.lr_schedule == "linear":
            for parameters in self.optimizer.param_groups:
                parameters["lr"] = config.lr * (1.0 - fraction)
        if config.entropy_schedule == "linear":
            for loss in self.losses.values():
                loss.entropy_coeff.fill_(config.entropy_coeff * (1.0 - fraction))
        if config.unshare_at is not None and fraction >= config.unshare_at:
            self.unshare()

    def unshare(self) -> None:
        """Gives every agent a network of its own from now on, with the outputs that it had.

        Actors are un-shared, and critics that see what one agent sees; a critic that sees the
        whole team stays one. The optimizer goes on where it was.
        """
        if self.unshared:
            return
        sizes = {
            network: self.block.joined[name].n_agents
            for name, loss in self.losses.items()
            for network in _networks(loss)
        }
        self.optimizer = unshare_networks(sizes, self.optimizer)
        self._prepare_updates()
        self.unshared = True

    def learn(self, batch: TensorDictBase) -> TensorDict:
        """Trains on a batch; metrics are tensors, ``(group, name)``."""
        with matmul_precision(self.config.precision):
            self._warn_once(batch)
            data = self.block.gather(batch)
            self.add_advantage(data)
            self.block.scatter(data, batch, _WRITTEN)
            frames = data.select(*minibatch_keys(self.losses.values()), strict=False).reshape(-1)
            metrics = self._train(frames)
            self.observation_norms.update_all(data)
            return metrics

    def _train(self, frames: TensorDictBase) -> TensorDict:
        """Trains on the frames of a batch, ``[F]``, with what the losses read."""
        history, finite = self.updates.run(frames, self._epochs(len(frames)))
        stop = self.updates.stop
        return self._summary(history, finite, dict(stop.by_loss(stop.epochs)))

    @torch.no_grad()
    def add_advantage(self, data: TensorDictBase) -> None:
        """Estimates advantages, and standardizes those of each group over the whole batch."""
        excluded = {"none": None, "pooled": (), "agent": (-2,)}[self.config.normalize_advantage]
        for name, loss in self.losses.items():
            loss.value_estimator(data)
            if excluded is None:
                continue
            key, mask_key = loss.tensor_keys.advantage, self.block.joined[name].mask_key
            mask = None if mask_key is None else loss_mask(data, mask_key)
            data.set(key, loss.per_group.standardize(data.get(key), mask, excluded))

    def _epochs(self, n_frames: int) -> Any:
        config, device = self.config, self.updates.device
        return shuffled_epochs(
            n_frames, config.minibatch_size, n_epochs=config.num_epochs, device=device
        )

    def _summary(
        self, history: Mapping[Any, torch.Tensor], finite: bool, epochs: Mapping[str, torch.Tensor]
    ) -> TensorDict:
        lr = self.optimizer.param_groups[0]["lr"]
        summary = summarize(history, self.block.joined, self.groups, lr=lr, epochs=epochs)
        if not finite:
            refuse_non_finite(summary)
        return summary

    def _warn_once(self, batch: TensorDictBase) -> None:
        if not self._looked:
            self._looked = True
            warn_of_turns(self.groups.values(), batch, self.config.bootstrap)

    # ------------------------------------------------------------------------------- state

    def get_extra_state(self) -> dict[str, Any]:
        """What ``state_dict()`` holds beside networks and statistics."""
        return {"optimizer": self.optimizer.state_dict(), "unshared": self.unshared}

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Goes on from a saved state, un-shared if that was so."""
        if state_dict.get("_extra_state", {}).get("unshared"):
            self.unshare()
        return super().load_state_dict(state_dict, *args, **kwargs)

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Takes the optimizer's state back."""
        self.optimizer.load_state_dict(state["optimizer"])


def _loss(
    actor: Any,
    critic: Any,
    group: GroupSpec,
    config: OnPolicyConfig,
    device: torch.device | str | None,
    per_agent: bool,
) -> MAPPOLoss:
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
        normalize_advantage=False,  # done over the whole batch
        per_agent=per_agent,
        functional=False,
        device=device,
    )
    loss.make_value_estimator(gamma=config.gamma, lmbda=config.lmbda)
    return loss


def _networks(loss: MAPPOLoss) -> tuple[Any, Any]:
    return loss.actor_network, loss.critic_network
