"""Losses of MAPPO, IPPO and HAPPO.

Shapes: B any batch dims, N agents, G groups that are trained as one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
import torchrl.objectives
from tensordict import NestedKey, TensorDict, TensorDictBase, unravel_key
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule, dispatch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torchrl.modules import set_recurrent_mode
from torchrl.objectives import ValueEstimators

from torchrl_marl.functional import expand_mask
from torchrl_marl.functional.statistics import PerGroup
from torchrl_marl.modules.distributions import sampled_entropy
from torchrl_marl.modules.memory.states import has_cells
from torchrl_marl.modules.normalization import ValueNorm
from torchrl_marl.modules.stacks.module_stack import run_only_agents
from torchrl_marl.objectives.estimator import TeamGAE, estimator_keys, policy_ratio
from torchrl_marl.objectives.flags import (
    blank_masked_actions,
    blank_masked_inputs,
    loss_mask_key,
    placeholder_action,
    valid_actions,
)
from torchrl_marl.runtime.ranks import SINGLE_PROCESS, SingleProcess, current
from torchrl_marl.specs import GroupSpec
from torchrl_marl.specs.teams import check_group

__all__ = ["COMBINE", "MAPPOLoss", "entropy_of", "explained_variance", "ratio_metrics"]

_TD_LMBDA = {ValueEstimators.TD0: 0.0, ValueEstimators.TD1: 1.0, ValueEstimators.TDLambda: 0.95}


def ratio_metrics(
    per: PerGroup,
    log_ratio: Tensor,
    clipped: Tensor,
    mask: Tensor | None,
    count: Tensor | None = None,
) -> dict[str, Tensor]:
    """Returns metrics of the importance ratio.

    Args:
        per (PerGroup): statistics per group.
        log_ratio, clipped (Tensor): log of the ratio, raw and clipped, ``[*B, N, 1]``.
        mask (Tensor, optional): bool, ``[*B, N]``.
        count (Tensor, optional): number of steps over all ranks; pass it if there are several
            ranks. Metrics that are not means then have the shape ``[*, G]``, which :data:`COMBINE`
            reduces.
    """
    ratio = log_ratio.exp()
    alive = None if mask is None else mask.reshape(log_ratio.shape)
    # In logarithms, in which a masked ratio of 0 adds nothing.
    unmasked_log_ratio = log_ratio if alive is None else log_ratio.masked_fill(~alive, -torch.inf)
    sums, largest = (
        (per.logsumexp(unmasked_log_ratio), per.logsumexp(2 * unmasked_log_ratio)),
        per.amax(unmasked_log_ratio),
    )
    single_rank = count is None
    return {
        # Schulman, 2020, http://joschu.net/blog/kl-approx.html: never negative.
        "kl_approx": per.mean(ratio - 1.0 - log_ratio, mask, count),
        "clip_fraction": per.mean((clipped != log_ratio).float(), mask, count),
        "ESS": _effective_sample_size(*sums) / per.count(log_ratio, alive)
        if single_rank
        else torch.stack(sums),
        "max_ratio": largest.exp() if single_rank else largest.unsqueeze(0),
        "mean_ratio": per.mean(ratio, mask, count),
    }


def explained_variance(
    per: PerGroup, residual: Tensor, target: Tensor, mask: Tensor | None, *, alone: bool
) -> Tensor:
    """Returns the fraction of the targets' variance that the critic explains.

    Args:
        per (PerGroup): statistics per group.
        residual, target (Tensor): value errors and targets, ``[*B, N, 1]``.
        mask (Tensor, optional): bool, ``[*B, N]``.
        alone (bool): whether there is only one rank; otherwise :data:`COMBINE` must reduce the
            result.
    """
    moments = (
        *per.moments(residual, mask, SINGLE_PROCESS),
        *per.moments(target, mask, SINGLE_PROCESS),
    )
    if alone:
        return _explained_fraction(moments[1], moments[3])
    return torch.stack([per.number(target, mask), *moments])


def entropy_of(distribution: torch.distributions.Distribution, n_samples: int) -> Tensor:
    """Returns the entropy of each action, by sampling if there is no formula.

    Each rank samples for the actions of all ranks, as a single process would, and keeps its part.

    Args:
        distribution (Distribution): distribution of actions, with batch shape ``[*B, N]``.
        n_samples (int): number of samples.
    """
    with _draw_for_all_ranks(current()):
        try:
            return distribution.entropy()
        except NotImplementedError:
            return sampled_entropy(distribution, n_samples)


class _DrawForAllRanks(TorchFunctionMode):
    """Context in which a rank draws the random numbers of all ranks and keeps its own.

    ``normal_`` and ``uniform_`` draw a tensor with a further dim 1, the ranks, and return this
    rank's part.
    """

    def __init__(self, ranks: SingleProcess) -> None:
        super().__init__()
        self.ranks = ranks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: D105
        if func not in (Tensor.normal_, Tensor.uniform_):
            return func(*args, **(kwargs or {}))
        x, *rest = args
        draws = x.new_empty(x.shape[0], self.ranks.size, *x.shape[1:])
        return x.copy_(func(draws, *rest, **(kwargs or {}))[:, self.ranks.rank])


def _draw_for_all_ranks(ranks: SingleProcess) -> contextlib.AbstractContextManager[Any]:
    return _DrawForAllRanks(ranks) if ranks.size > 1 else contextlib.nullcontext()


def _effective_sample_size(of_ratios: Tensor, of_squares: Tensor) -> Tensor:
    """Returns the effective sample size, from logs of the sums of ratios and squared ratios."""
    return (2 * of_ratios - of_squares).exp().nan_to_num()


def _explained_fraction(of_residual: Tensor, of_target: Tensor) -> Tensor:
    return 1.0 - of_residual / (of_target + 1e-8)


def _combine_ess(parts: Tensor, count: Tensor) -> Tensor:
    return _effective_sample_size(*parts.logsumexp(0)) / count


def _combine_max_ratio(parts: Tensor, count: Tensor) -> Tensor:
    return parts.amax(0)[0].exp()


def _combine_explained_variance(parts: Tensor, count: Tensor) -> Tensor:
    number, *moments = parts.unbind(1)
    return _explained_fraction(
        *(_combine_variances(number, *own) for own in (moments[:2], moments[2:]))
    )


def _combine_variances(number: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Combines the variances of R ranks, ``[R, G]``, into the variance over all ranks, ``[G]``."""
    share = number / number.sum(0).clamp_min(1)
    offset = mean - (share * mean).sum(0)
    return (share * (variance + offset.square())).sum(0)


COMBINE: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ESS": _combine_ess,
    "max_ratio": _combine_max_ratio,
    "explained_variance": _combine_explained_variance,
}
"""Metrics that are not means -> function of the ranks' parts ``[R, *, G]`` and the count."""


class MAPPOLoss(torchrl.objectives.MAPPOLoss):
    r"""Clipped PPO for a group of agents that may die or wait.

    .. math::
        L = -\frac{1}{|M|} \sum_{(t, i) \in M} \min\big(\rho A,
        \operatorname{clip}(\rho, 1 - \epsilon, 1 + \epsilon) A\big)
        + c_V L_V - c_H H

    over the set :math:`M` of steps in which an agent acts, except those whose outcome is not in the
    batch (``loss_mask``, see :class:`TeamGAE`). Masked slots affect no loss, statistic, metric or
    gradient.

    With a centralized critic this is MAPPO, and with a local critic IPPO. The critic's loss is
    divided by the scale of its :class:`~torchrl_marl.modules.ValueNorm`, which the value estimator
    updates once per batch.

    Args:
        actor_network (ProbabilisticTensorDictSequential): the policy, such as
            :func:`~torchrl_marl.modules.make_actor`.
        critic_network (TensorDictModule): from :func:`~torchrl_marl.modules.make_critic`; gives
            values in reward units.

    Keyword Args:
        group (GroupSpec, optional): sets every key, including the mask's, so the losses of two
            groups never share a key. Without it, use ``set_keys`` and ``loss_mask_key``.
        bootstrap ("team" or "agent"): see :class:`~torchrl_marl.objectives.TeamGAE`.
        value_norm (ValueNorm, optional): running statistics of the returns; default: those of the
            critic.
        loss_critic_type (str): ``"huber"``, ``"l2"``, ``"l1"`` or ``"smooth_l1"``.
        huber_delta (float): error at which ``"huber"`` turns from quadratic to linear.
        entropy_coeff (float): weight of the entropy bonus.
        normalize_advantage (bool): whether advantages are standardized over the minibatch.
        normalize_advantage_exclude_dims (tuple of int): ``()`` pools the living agents, as the
            MAPPO authors do; ``(-2,)`` standardizes each agent separately.
        per_agent (bool): whether the actor's terms are averaged per agent, for agents with separate
            policies, as in HAPPO. The critic's terms are always per group.
        functional (bool): whether parameters are kept separately from the networks, as in TorchRL.
            If False, the networks are used directly.
        **kwargs: arguments of :class:`torchrl.objectives.ClipPPOLoss` (``clip_epsilon``,
            ``clip_value``, ``critic_coeff``, ``entropy_bonus``, ``samples_mc_entropy``,
            ``reduction``, ...).

    Attributes:
        count (Tensor, optional): divisor of means, instead of the number of steps to learn from; a
            scalar or ``[G]``. The losses of the parts of a minibatch then add up to the loss of the
            whole minibatch. So do the metrics, except those in ``combine``, which maps the name of
            each to a function that combines the parts.
        chosen (Tensor, optional): agents whose policies are evaluated, see :meth:`restricted`.
        trains_critic (bool): whether the critic's terms are computed.

    Shapes:
        - if networks have memory, the last dim of ``*B`` is time, and the hidden state of the first
          step is read
        - advantage, value_target, state_value: ``[*B, N, 1]``; action_log_prob, mask: ``[*B, N]``
        - every output: a scalar (``reduction="none"``: the losses are ``[*B, N, 1]``); for a
          joined group ``[G]``, one for each group in it; with ``per_agent`` the actor's are ``[N]``

    Keys:
        - reads: the networks' keys, action, action_log_prob, mask (and loss_mask), advantage and
          value_target (estimated if missing), state_value with ``clip_value``
        - writes: nothing; returns ``loss_objective``, ``loss_critic``, ``loss_entropy``,
          ``entropy``, ``kl_approx``, ``clip_fraction``, ``ESS``, ``max_ratio``, ``mean_ratio``,
          ``explained_variance``, ``value_clip_fraction``

    Raises:
        KeyError: a missing entry.
        ValueError: an advantage that does not fit the log-probability.

    Reference: Yu et al., 2022, https://arxiv.org/abs/2103.01955; de Witt et al., 2020,
    https://arxiv.org/abs/2011.09533 (IPPO).

    Reduces to: for one agent, ``torchrl.objectives.ClipPPOLoss``; with an all-true mask, the loss
    without a mask.

    Examples:
        >>> from torchrl.data import Bounded, Unbounded
        >>> from torchrl_marl import AgentSpec, TeamSpec
        >>> from torchrl_marl.modules import make_actor, make_critic
        >>> group = TeamSpec([AgentSpec("car", 3, Unbounded((4,)), Bounded(-1, 1, (2,)))])
        >>> group = group.groups["car"]
        >>> actor, critic = make_actor(group), make_critic(group, centralized=True)
        >>> loss = MAPPOLoss(actor, critic, group=group)
        >>> td = TensorDict({"car": {"observation": torch.zeros(5, 3, 4),
        ...                          "mask": torch.ones(5, 3, dtype=torch.bool)}}, [5])
        >>> td = actor(td).detach()
        >>> td["car", "advantage"] = td["car", "value_target"] = torch.randn(5, 3, 1)
        >>> sorted(key for key in loss(td).keys() if key.startswith("loss_"))
        ['loss_critic', 'loss_entropy', 'loss_objective']
    """

    _in_keys: list[NestedKey]
    count: Tensor | None = None
    chosen: Tensor | None
    trains_critic = True
    combine = COMBINE

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential,
        critic_network: TensorDictModule,
        *,
        group: GroupSpec | None = None,
        bootstrap: Literal["team", "agent"] = "team",
        value_norm: ValueNorm | None = None,
        loss_critic_type: str = "huber",
        huber_delta: float = 10.0,
        entropy_coeff: float = 0.01,
        normalize_advantage: bool = True,
        normalize_advantage_exclude_dims: tuple[int, ...] = (),
        per_agent: bool = False,
        functional: bool = True,
        **kwargs: Any,
    ) -> None:
        if loss_critic_type not in ("huber", "l2", "l1", "smooth_l1"):
            raise ValueError(
                f"loss_critic_type is {loss_critic_type!r}, expected huber, l2, l1 or smooth_l1."
            )
        if group is not None:
            check_group(group, type(self).__name__)
        norms = [m for m in critic_network.modules() if isinstance(m, ValueNorm)]
        super().__init__(
            actor_network,
            critic_network,
            value_norm=value_norm if value_norm is not None or not norms else norms[0],
            entropy_coeff=entropy_coeff,
            normalize_advantage=normalize_advantage,
            normalize_advantage_exclude_dims=normalize_advantage_exclude_dims,
            loss_critic_type=loss_critic_type,
            functional=functional,
            **kwargs,
        )
        networks = {"actor_network": actor_network, "critic_network": critic_network}
        self._recurrent_networks = {name for name, one in networks.items() if has_cells(one)}
        self.group = group
        self.bootstrap = bootstrap
        self.huber_delta = huber_delta
        # TorchRL keeps a tensor; reading it would wait for the device.
        self._clips_value = bool(kwargs.get("clip_value"))
        device = next((p.device for p in critic_network.parameters()), None)
        self.per_group = PerGroup(None if group is None else group.membership, device)
        self.per_policy = self.per_group
        if per_agent and group is not None and group.n_agents > 1:
            self.per_policy = PerGroup(torch.eye(group.n_agents), device)
        self.register_buffer("_placeholder_action", torch.zeros(()), persistent=False)
        self.register_buffer("_valid_actions", None, persistent=False)
        self.register_buffer("chosen", None, persistent=False)
        if group is not None:
            self._use_group(group, device)

    def _use_group(self, group: GroupSpec, device: torch.device | None) -> None:
        self.set_keys(
            action=group.action_key,
            sample_log_prob=group.key("action_log_prob"),
            **estimator_keys(group, self.bootstrap),
        )
        self.loss_mask_key = group.mask_key
        self._placeholder_action = placeholder_action(group).to(device)
        valid = valid_actions(group)
        self._valid_actions = None if valid is None else valid.to(device)

    def make_value_estimator(
        self, value_type: ValueEstimators | None = None, **hyperparams: Any
    ) -> None:
        """Builds the value estimator: :class:`TeamGAE` (default) or :class:`TeamVTrace`.

        TorchRL's TD estimators are ``TeamGAE`` too, as the advantage of TD(lambda) is GAE: lambda
        is 0 for ``TD0``, and 1 for ``TD1``. TorchRL's own know neither masks nor done flags of the
        episode; they are built for a loss without a group and a mask.
        """
        td = _TD_LMBDA if self.group is not None or self._mask_key is not None else {}
        gae = value_type in (None, ValueEstimators.GAE, ValueEstimators.MAGAE, *td)
        if not gae and value_type is not ValueEstimators.VTrace:
            super().make_value_estimator(value_type, **hyperparams)
            return
        self.value_type = ValueEstimators.MAGAE if gae else ValueEstimators.VTrace
        make: Any = TeamGAE
        if not gae:
            from torchrl_marl.objectives.vtrace import TeamVTrace

            make = partial(TeamVTrace, actor_network=self.actor_network)
        estimator = make(
            value_network=self.critic_network,
            group=self.group,
            bootstrap=self.bootstrap,
            value_norm=self.value_norm,
            **{"gamma": 0.99, "lmbda": td.get(value_type, 0.95), **hyperparams},
        )
        estimator.set_keys(
            **{
                name: getattr(self.tensor_keys, name)
                for name in ("advantage", "value_target", "value", "reward", "done", "terminated")
            }
        )
        if not gae:
            estimator.action_key = self.tensor_keys.action
            estimator.set_keys(sample_log_prob=self.tensor_keys.sample_log_prob)
        estimator.mask_key = self._mask_key
        self._value_estimator = estimator

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Returns the losses and metrics of a batch or minibatch."""
        tensordict, per, keys = self._dense(tensordict), self.per_policy, self.tensor_keys
        if tensordict.get(keys.advantage, None) is None:
            with self._ready_network("actor_network"):
                self.value_estimator(
                    tensordict,
                    params=self._cached_critic_network_params_detached,
                    target_params=self.target_critic_network_params,
                )
        mask = self._zero_unlearned_steps(tensordict)
        advantage = tensordict.get(keys.advantage)
        if self.normalize_advantage:
            exclude = self.normalize_advantage_exclude_dims
            advantage = self.per_group.standardize(advantage, mask, exclude)
        distribution, log_prob, log_ratio = self._policy_ratio(tensordict, advantage)
        terms = self._policy_terms(log_ratio, advantage, mask)
        with torch.no_grad():
            # The entropy at the actions that were taken; the bonus samples actions separately.
            terms["entropy"] = per.mean(-log_prob, mask, self.count)
        if self.entropy_bonus:
            entropy = entropy_of(distribution, self.samples_mc_entropy).unsqueeze(-1)
            terms["loss_entropy"] = self._reduce(-self.entropy_coeff * entropy, mask, per)
            terms["entropy"] = per.mean(entropy.detach(), mask, self.count)
        if self._has_critic and self.trains_critic:
            terms.update(self._critic_terms(tensordict, mask))
        return TensorDict(terms, [])

    @contextlib.contextmanager
    def restricted(self, chosen: Tensor | None, *, critic: bool) -> Iterator[None]:
        """Within the context, evaluates the policies of some agents, with or without the critic.

        The networks of the other agents do not run, and their ratios are 1.

        Args:
            chosen (Tensor, optional): indices of K different agents, ``[K]``; None for all.
            critic (bool): whether to compute the critic's terms.
        """
        self.chosen, self.trains_critic = chosen, critic
        try:
            yield
        finally:
            self.chosen, self.trains_critic = None, True

    @torch.no_grad()
    def log_ratio(self, tensordict: TensorDictBase) -> Tensor:
        """Returns the log importance ratio of the policy, ``[*B, N, 1]``; 0 where masked."""
        tensordict = self._dense(tensordict)
        mask = self._zero_unlearned_steps(tensordict)
        log_ratio = self._policy_ratio(tensordict, tensordict.get(self.tensor_keys.advantage))[2]
        return log_ratio if mask is None else log_ratio.where(expand_mask(mask, log_ratio), 0.0)

    def _set_in_keys(self) -> None:
        super()._set_in_keys()
        group = getattr(self, "group", None)
        if group is None or group.mask_key is None:
            return
        keys = [group.mask_key, ("next", group.team_end_keys[0])]
        if group.agent_done and group.truncated_key is not None:
            flags = (group.done_key, group.terminated_key, group.truncated_key)
            keys += [group.done_key, *(("next", key) for key in flags)]
        self._in_keys = list(dict.fromkeys(self._in_keys + [unravel_key(key) for key in keys]))

    @property
    def minibatch_keys(self) -> list[NestedKey]:
        """Entries of a minibatch with advantages, if present."""
        keys = self.tensor_keys
        keys_read = [*self.actor_network.in_keys]
        keys_read += self.critic_network.in_keys if self.trains_critic else []
        keys_read += [keys.action, keys.sample_log_prob, keys.advantage]
        keys_read += [keys.value_target, keys.value] if self.trains_critic else []
        keys_read += [key for key in (self._mask_key, self._learned_mask_key) if key is not None]
        return list(dict.fromkeys(keys_read))

    @property
    def _mask_key(self) -> NestedKey | None:
        key = self.loss_mask_key
        return None if key is None or key == "auto" else key

    @property
    def _learned_mask_key(self) -> NestedKey | None:
        """The key of the mask of steps to learn from; the batch need not have this entry."""
        unmasked_key = None if self.group is None else self.group.key("loss_mask")
        return unmasked_key if self._mask_key is None else loss_mask_key(self._mask_key)

    def local_count(self, minibatch: TensorDictBase) -> Tensor:
        """Returns the number of steps to learn from in a minibatch, a scalar or ``[G]``.

        The sum over the parts of one minibatch is the value to set as ``count``.
        """
        advantage = minibatch.get(self.tensor_keys.advantage)
        return self.per_group.number(advantage, self._get_learned_mask(minibatch))

    def _get_learned_mask(self, tensordict: TensorDictBase) -> Tensor | None:
        acts = None if self._mask_key is None else tensordict.get(self._mask_key)
        return (
            acts if self._learned_mask_key is None else tensordict.get(self._learned_mask_key, acts)
        )

    def _dense(self, tensordict: TensorDictBase) -> TensorDictBase:
        tensordict = tensordict.copy()
        return tensordict if self.group is None else self.group.dense(tensordict)

    def _zero_unlearned_steps(self, tensordict: TensorDictBase) -> Tensor | None:
        """Returns the mask of steps to learn from; zeroes other steps, as 0 times NaN is NaN."""
        acts = None if self._mask_key is None else tensordict.get(self._mask_key)
        learned = self._get_learned_mask(tensordict)
        if learned is not None:
            self._zero_masked_results(tensordict, learned)
        if acts is not None:
            self._zero_masked_inputs(tensordict, acts)
        return learned

    def _zero_masked_results(self, tensordict: TensorDictBase, learned: Tensor) -> None:
        keys = self.tensor_keys
        for key in (keys.sample_log_prob, keys.advantage, keys.value_target, keys.value):
            value = tensordict.get(key, None)
            if value is not None:
                tensordict.set(key, torch.where(expand_mask(learned, value), value, 0.0))

    def _zero_masked_inputs(self, tensordict: TensorDictBase, acts: Tensor) -> None:
        critics = [self.critic_network] if self.trains_critic else []
        for network in (self.actor_network, *critics):
            inputs = tensordict.select(*network.in_keys)
            tensordict.update(blank_masked_inputs(inputs, self._mask_key, tensordict))
        blank_masked_actions(tensordict, self.tensor_keys.action, acts, self._placeholder_action)

    def _policy_ratio(self, tensordict: TensorDictBase, advantage: Tensor):
        keys = self.tensor_keys
        with self._ready_network("actor_network"):
            result = policy_ratio(
                self.actor_network,
                tensordict,
                action=keys.action,
                sample_log_prob=keys.sample_log_prob,
                valid=self._valid_actions,
            )
        if result[1].shape != advantage.shape[:-1]:
            raise ValueError(
                f"log-probability {tuple(result[1].shape)} and advantage "
                f"{tuple(advantage.shape)} do not fit; expected [*B, N] and [*B, N, 1]."
            )
        if self.chosen is None:
            return result
        distribution, log_prob, log_ratio = result
        not_evaluated = torch.ones_like(log_ratio[..., 0]).index_fill(-1, self.chosen, 0.0) > 0
        return distribution, log_prob, log_ratio.masked_fill(not_evaluated.unsqueeze(-1), 0.0)

    def _policy_terms(
        self, log_ratio: Tensor, advantage: Tensor, mask: Tensor | None
    ) -> dict[str, Tensor]:
        clipped = log_ratio.clamp(*self._clip_bounds)
        gain = torch.minimum(log_ratio.exp() * advantage, clipped.exp() * advantage)
        terms = {"loss_objective": self._reduce(-gain, mask, self.per_policy)}
        with torch.no_grad():
            ratios = log_ratio.detach(), clipped.detach()
            terms.update(ratio_metrics(self.per_policy, *ratios, mask, self.count))
        return terms

    def _critic_terms(self, tensordict: TensorDictBase, mask: Tensor | None) -> dict[str, Tensor]:
        keys = self.tensor_keys
        target = tensordict.get(keys.value_target)
        old_value = tensordict.get(keys.value, None)
        with self._ready_network("critic_network"):
            value = self.critic_network(tensordict.select(*self.critic_network.in_keys))
        value = value.get(keys.value)
        if mask is not None:
            value = torch.where(expand_mask(mask, value), value, 0.0)
        scale = 1.0 if self.value_norm is None else self.value_norm.scale()
        error = self._distance(value / scale, target / scale)
        terms = {}
        if self._clips_value:
            if old_value is None:
                raise KeyError(f"clip_value needs the old value under {keys.value!r}.")
            radius = self.clip_value * scale
            clipped_value = old_value + torch.maximum(
                torch.minimum(value - old_value, radius), -radius
            )
            clipped_error = self._distance(clipped_value / scale, target / scale)
            is_clipped = (clipped_value != value).float()
            terms["value_clip_fraction"] = self.per_group.mean(is_clipped, mask, self.count)
            error = torch.maximum(error, clipped_error)
        terms["loss_critic"] = self._reduce(self.critic_coeff * error, mask, self.per_group)
        if self.log_explained_variance:
            with torch.no_grad():
                terms["explained_variance"] = explained_variance(
                    self.per_group, target - value, target, mask, alone=self.count is None
                )
        return terms

    def _distance(self, value: Tensor, target: Tensor) -> Tensor:
        if self.loss_critic_type == "huber":
            return F.huber_loss(value, target, reduction="none", delta=self.huber_delta)
        distance = {"l2": F.mse_loss, "l1": F.l1_loss, "smooth_l1": F.smooth_l1_loss}
        return distance[self.loss_critic_type](value, target, reduction="none")

    def _reduce(self, loss: Tensor, mask: Tensor | None, per: PerGroup) -> Tensor:
        if self.reduction == "mean":
            return per.mean(loss, mask, self.count)
        if mask is not None:
            loss = torch.where(expand_mask(mask, loss), loss, 0.0)
        return loss.sum() if self.reduction == "sum" else loss

    @contextlib.contextmanager
    def _ready_network(self, name: str):
        network, stateless = getattr(self, name), contextlib.nullcontext()
        if self.functional:
            params = getattr(self, f"{name}_params")
            stateless = params.to_module(network, preserve_module_state=False)
        has_memory = name in self._recurrent_networks
        evaluated_agents: Any = contextlib.nullcontext()
        if self.chosen is not None and name == "actor_network":
            evaluated_agents = run_only_agents(network, self.chosen)
        recurrent = set_recurrent_mode(True) if has_memory else contextlib.nullcontext()
        with stateless, recurrent, evaluated_agents:
            yield
