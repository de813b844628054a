"""The on-policy learner: advantage, minibatches, update.

Shapes: E envs, T steps, N agents of a group, G groups that are trained as one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, cast

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from torchrl_marl.capture import check_execution
from torchrl_marl.errors import ConfigError
from torchrl_marl.functional import masked_standardize
from torchrl_marl.joining import JoinedGroup, can_join, join
from torchrl_marl.learners.captured import CapturedUpdate, evaluate_losses, kl_of
from torchrl_marl.learners.clipping import GradientClip
from torchrl_marl.learners.config import OnPolicyConfig
from torchrl_marl.learners.stopping import KLStop
from torchrl_marl.learners.summary import refuse_non_finite, summarize
from torchrl_marl.learners.turns import warn_of_turns
from torchrl_marl.learners.unshare import unshare_networks
from torchrl_marl.modules.actors import JoinedActor, make_actor
from torchrl_marl.modules.critics import make_critic
from torchrl_marl.modules.inputs import gather_observation
from torchrl_marl.modules.normalization import ObservationNorm, ValueNorm
from torchrl_marl.modules.precision import matmul_precision, set_precision
from torchrl_marl.objectives.estimator import last_seen, learned_mask, loss_mask_key
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
        actors, critics (ModuleDict): by name of a group, or of several as one, ``"a+b"``. Actors
            act on the groups of an environment; critics of several groups read them as one.

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
        self._joined = {g.name: g for g in _joined_groups(self.groups.values(), config)}
        everyone = self.groups if team is None else team.groups
        self._seen = _seen(list(everyone.values()), config)
        self.observation_norms = nn.ModuleDict()
        self.actors = nn.ModuleDict()
        self.critics = nn.ModuleDict()
        self._losses: dict[str, MAPPOLoss] = {}
        self._clips: dict[str, GradientClip] = {}
        for name, group in self._joined.items():
            self._add(name, group, device)
        self.unshared = self._looked = False
        parameters = [p for clip in self._clips.values() for p in clip.parameters]
        # One kernel for all parameters.
        self.optimizer = torch.optim.Adam(parameters, lr=config.lr, eps=config.adam_eps, fused=True)
        self._capture()

    def _capture(self) -> None:
        """Graphs are of these networks and this optimizer; they are recorded in use."""
        device = self.optimizer.param_groups[0]["params"][0].device
        self._stop = KLStop(self._clips, self.config.target_kl, device)
        self._captured: CapturedUpdate | None = None
        if self.execution != "eager":
            self._captured = CapturedUpdate(
                self._losses, self._clips, self.optimizer, self.config, self.execution, self._stop
            )

    def _add(self, name: str, group: GroupSpec, device: torch.device | str | None) -> None:
        config = self.config
        with _told_of(group, "actor"):
            actor = make_actor(
                group, config.actor, observation_norm=self._norm_of(group, device), device=device
            )
        value_norm = None
        if config.value_norm:
            value_norm = ValueNorm(
                config.value_norm_decay, membership=group.membership, device=device
            )
        with _told_of(group, "critic"):
            critic = self._make_critic(group, value_norm, device)
        for network in (actor, critic):
            set_precision(network, config.precision)
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
            functional=False,
            device=device,
        )
        loss.make_value_estimator(gamma=config.gamma, lmbda=config.lmbda)
        of_groups = isinstance(group, JoinedGroup)
        self.actors[name] = JoinedActor(actor, group) if of_groups else actor  # type: ignore[arg-type]
        self.critics[name] = critic
        self._losses[name] = loss
        self._limit(name)

    def _limit(self, name: str) -> None:
        loss, limit = self._losses[name], self.config.max_grad_norm
        self._clips[name] = GradientClip(
            self._joined[name], self._seen, loss.actor_network, loss.critic_network, limit
        )

    def _make_critic(self, group: GroupSpec, value_norm: ValueNorm | None, device) -> nn.Module:
        config = self.config
        sees: Any = config.algorithm == "mappo"
        if sees and config.central_input == "state":
            sees = "state"
        seen = self._seen if sees is True else None
        norm = self._norm_of(group if seen is None else seen, device)
        return make_critic(
            group,
            config.critic,
            centralized=sees,
            team=seen,
            value_norm=value_norm,
            observation_norm=norm,
            device=device,
        )

    def _norm_of(self, group: GroupSpec, device: torch.device | str | None) -> Any:
        if not self.config.normalize_observations:
            return None
        if group.name not in self.observation_norms:
            self.observation_norms[group.name] = ObservationNorm(
                group.observation_dim, kinds=group.kinds, device=device
            )
        return self.observation_norms[group.name]

    @property
    def actor(self) -> nn.Module:
        """The actor, where all groups are trained as one.

        Raises:
            ValueError: there are several; ask ``actors``.
        """
        if len(self.actors) > 1:
            raise ValueError(f"this learner has the actors {list(self.actors)}; use .actors[name].")
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
        if config.unshare_at is not None and fraction >= config.unshare_at:
            self.unshare()

    def unshare(self) -> None:
        """From now on every agent has a network of its own, with the outputs that it had.

        Actors are un-shared, and critics that see what one agent sees; a critic that sees the
        whole team stays one. The optimizer goes on where it was.
        """
        if self.unshared:
            return
        networks = {
            network: self._joined[name].n_agents
            for name, loss in self._losses.items()
            for network in (loss.actor_network, loss.critic_network)
        }
        self.optimizer = unshare_networks(networks, self.optimizer)
        for name in self._losses:
            self._limit(name)
        self._capture()
        self.unshared = True

    def learn(self, batch: TensorDictBase) -> TensorDict:
        """Trains on a batch; metrics are tensors, ``(group, name)``."""
        with matmul_precision(self.config.precision):
            return self._learn(batch)

    def _learn(self, batch: TensorDictBase) -> TensorDict:
        if not self._looked:
            self._looked = True
            warn_of_turns(self.groups.values(), batch, self.config.bootstrap)
        data = self._gather(batch)
        for name, loss in self._losses.items():
            self.add_advantage(name, loss, data)
        self._scatter(data, batch)
        frames = data.select(*self._needed_keys(data)).reshape(-1)
        epochs = self._epochs if self._captured is None else self._captured.epochs
        history, finite = epochs(frames)
        for name, norm in self.observation_norms.items():
            group = self._joined.get(name, self._seen)
            observation, mask = gather_observation(cast(GroupSpec, group), data)
            cast(ObservationNorm, norm).update(observation, mask)
        lr = self.optimizer.param_groups[0]["lr"]
        counted = dict(self._stop.by_loss(self._stop.epochs))
        summary = summarize(history, self._joined, self.groups, lr=lr, epochs=counted)
        if not finite:
            refuse_non_finite(summary)
        return summary

    def _epochs(self, frames: TensorDictBase) -> tuple[dict[NestedKey, Tensor], bool]:
        """The metrics of all updates, and whether all is known to be finite."""
        rows: list[dict[NestedKey, Tensor]] = []
        self._stop.begin()
        for _ in range(self.config.num_epochs):
            self._stop.count()
            order = torch.randperm(frames.shape[0], device=frames.device)
            first = len(rows)
            for indices in order.split(self.config.minibatch_size):
                rows.append(self.update(frames[indices]))
            if self._stop.limit is not None:
                self._stop.look(torch.stack([kl_of(row, self._losses) for row in rows[first:]]))
                if bool(self._stop.all):
                    break
        return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}, False

    # ---------------------------------------------------------------------- groups as one

    def _gather(self, batch: TensorDictBase) -> TensorDictBase:
        """The batch with the groups that are trained as one."""
        joined = [group for group in self._joined.values() if isinstance(group, JoinedGroup)]
        seen = self._seen
        others = isinstance(seen, JoinedGroup) and seen.name not in self._joined
        if not joined and not others:
            return batch
        data, following = batch.copy(), batch.get("next")
        for group in joined:
            now = group.gather(batch, leaves=("action", "action_log_prob"), flags=True)
            then = group.gather(following, leaves=("reward",), flags=True)
            data.set(group.name, now.get(group.name))
            data.set(("next", group.name), then.get(group.name))
        if others:
            group = cast(JoinedGroup, seen)
            now = group.gather(batch, flags=True).get(group.name)
            then = group.gather(following, flags=True).get(group.name)
            if group.mask_key is not None:
                living = ~now.get("done").squeeze(-1)
                ends = then.get("truncated"), then.get("terminated")
                then.set("mask", last_seen(living, then.get("mask"), *ends))
            data.set(group.name, now)
            data.set(("next", group.name), then)
        return data

    def _scatter(self, data: TensorDictBase, batch: TensorDictBase) -> None:
        for group in self._joined.values():
            written = [leaf for leaf in _WRITTEN if data.get(group.key(leaf), None) is not None]
            if isinstance(group, JoinedGroup):
                group.scatter(data, batch, written)
            elif data is not batch:
                batch.update(data.select(*(group.key(leaf) for leaf in written)))

    @torch.no_grad()
    def add_advantage(self, name: str, loss: MAPPOLoss, data: TensorDictBase) -> None:
        """Estimates advantages and standardizes those of each group over the whole batch."""
        loss.value_estimator(data)
        how, group = self.config.normalize_advantage, self._joined[name]
        if how == "none":
            return
        key = loss.tensor_keys.advantage
        advantage = data.get(key)
        mask = None if group.mask_key is None else learned_mask(data, group.mask_key)
        dims = [d for d in range(advantage.ndim) if how == "pooled" or d != advantage.ndim - 2]
        parts = group.slices if isinstance(group, JoinedGroup) else (slice(None),)
        rows = [
            masked_standardize(
                advantage[..., agents, :], None if mask is None else mask[..., agents], dims
            )
            for agents in parts
        ]
        data.set(key, rows[0] if len(rows) == 1 else torch.cat(rows, -2))

    def update(self, minibatch: TensorDictBase) -> dict[NestedKey, Tensor]:
        """One step of the optimizer on all groups' losses."""
        total, metrics = evaluate_losses(self._losses, minibatch)
        self.optimizer.zero_grad(set_to_none=True)
        total.backward()
        for name, clip in self._clips.items():
            metrics[name, "grad_norm"] = clip()
        self._stop.step(self.optimizer)
        return metrics

    def _needed_keys(self, data: TensorDictBase) -> list[NestedKey]:
        keys: list[NestedKey] = []
        for name, loss in self._losses.items():
            of_loss = loss.tensor_keys
            for network in (loss.actor_network, loss.critic_network):
                keys += cast(TensorDictModuleBase, network).in_keys
            keys += [of_loss.action, of_loss.sample_log_prob, of_loss.advantage]
            keys += [of_loss.value_target, of_loss.value]
            if (mask_key := self._joined[name].mask_key) is not None:
                keys += [k for k in (mask_key, loss_mask_key(mask_key)) if k in data.keys(True)]
        return list(dict.fromkeys(keys))

    # ----------------------------------------------------------------------------- metrics

    def get_extra_state(self) -> dict[str, Any]:
        """What ``state_dict()`` holds beside networks and statistics."""
        return {"optimizer": self.optimizer.state_dict(), "unshared": self.unshared}

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Goes on from a saved state, un-shared if that was."""
        if state_dict.get("_extra_state", {}).get("unshared"):
            self.unshare()
        return super().load_state_dict(state_dict, *args, **kwargs)

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Takes the optimizer's state back."""
        self.optimizer.load_state_dict(state["optimizer"])


@contextlib.contextmanager
def _told_of(group: GroupSpec, network: str) -> Iterator[None]:
    """Names the group and the network whose settings do not fit."""
    try:
        yield
    except ConfigError as error:
        text = str(error).removeprefix(f"group {group.name!r}: ")
        raise ConfigError(f"group {group.name!r}: {network}: {text}") from None


def _joined_groups(groups: Iterable[GroupSpec], config: OnPolicyConfig) -> list[GroupSpec]:
    """As few groups as possible."""
    # A network over a set of agents would see all groups at once.
    apart = config.critic.architecture != "mlp" and config.central_input != "team"
    alike: list[list[GroupSpec]] = []
    for group in groups:
        for known in alike:
            if not apart and can_join(known[0], group):
                known.append(group)
                break
        else:
            alike.append([group])
    return [join(known) for known in alike]


def _seen(groups: list[GroupSpec], config: OnPolicyConfig) -> GroupSpec | None:
    """The agents that a critic across groups sees."""
    across = config.algorithm == "mappo" and config.central_input == "team"
    return join(groups, same_actions=False) if across else None
