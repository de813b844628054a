"""Loss of MASAC and ISAC: soft actor-critic for a team, with a centralized or local critic.

Shapes: B any batch dims, N agents, A action features or actions, K critics, G groups.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from torchrl_marl.objectives.off_policy import OffPolicyLoss
from torchrl_marl.objectives.own_actions import (
    ActorGradient,
    ValuesOfChoices,
    ValuesOfMovedActions,
    draw_one_hot,
)
from torchrl_marl.specs import GroupSpec

__all__ = ["MASACLoss"]


class Policy(NamedTuple):
    """Sampled actions of a policy, with log-probabilities of these or of all discrete actions.

    Shapes:
        - action: ``[*B, N, A]``; log_prob: ``[*B, N, 1]``, or ``[*B, N, A]`` for discrete actions
        - prob: ``[*B, N, A]`` for discrete actions, else None; target_entropy: ``[*B, N, 1]``, or a
          shape that broadcasts to it
    """

    action: Tensor
    log_prob: Tensor
    prob: Tensor | None
    target_entropy: Tensor

    def mean(self, value: Tensor) -> Tensor:
        """Returns the mean over an agent's discrete actions, ``[*B, N, 1]``."""
        return value if self.prob is None else (self.prob * value).sum(-1, keepdim=True)


class MASACLoss(OffPolicyLoss):
    r"""Soft actor-critic for a group of agents that may die or wait.

    .. math::
        L_Q = \sum_k \big(Q_k(o, a) - r
            - \gamma (1 - \mathrm{terminated})
            (\min_k Q_k'(o', a') - \alpha \log \pi(a_i' | o_i'))\big)^2,
        \qquad L_\pi = \alpha \log \pi(a_i | o_i) - \min_k Q_k(o, a),
        \qquad L_\alpha = -\log \alpha \, (\log \pi(a_i | o_i) + \bar H_i)

    for every agent that acts, with :math:`a` and :math:`a'` sampled by the current policy. With a
    centralized critic this is MASAC, and with a critic per agent ISAC. For discrete actions the
    mean over the agent's actions is exact, while the other agents' actions are sampled, without a
    gradient. Each group has a separate temperature :math:`\alpha`, ``log_alpha``. For done flags
    and masks see :class:`OffPolicyLoss`.

    Args:
        actor_network (ProbabilisticActor): the policy, such as
            :func:`~torchrl_marl.modules.make_actor`; it has no target network.
        qvalue_network (TensorDictModule): writes values ``[*B, N, K]`` of actions, such as
            :func:`~torchrl_marl.modules.make_action_critic` with ``n_critics=2``. If actions are
            discrete, it must read them as one-hot floats.

    Keyword Args:
        actor_gradient ("group", "agent" or "all", optional): values that an action should increase:
            the mean over the agent's group, the agent's value, or the values of all agents. ``all``
            takes one pass of the critic, and is exact if no critic sees the actions of another
            group (for discrete actions: of another agent). Default: ``group`` if ``bootstrap`` is
            ``team``, else ``agent``.
        groups_apart (bool): whether no critic sees the actions of another group. Discrete actions
            of several groups are then evaluated in parallel, in fewer passes.
        joint_entropy (bool): whether an agent's value contains the entropy bonus of all agents of
            its group that act, as in HASAC; by default only its own.
        alpha_init (float): initial temperature.
        target_entropy (float, optional): target entropy of an agent. For continuous actions:
            entropy per action feature, with actions scaled to [-1, 1]; default: -1. For discrete
            actions: fraction of the entropy of a uniform choice of legal actions; default: 0.5.
        **kwargs: arguments of :class:`OffPolicyLoss`: ``group``, ``bootstrap``, ``gamma``,
            ``loss_function``, ``functional``.

    Shapes:
        - reward: ``[*B, N, 1]``, or the team's ``[*B, 1]``; discount: ``[*B, 1]``
        - every output: a scalar; for a joined group ``[G]``, one for each group in it

    Keys:
        - reads: the networks' keys, here and under ``"next"``; action, the next reward and
          terminated, masks; discount and priority_weight, if present
        - writes: ``(group, "td_error")`` ``[*B, N, 1]``; returns ``loss_actor``, ``loss_value``,
          ``loss_alpha``, ``pred_value``, ``target_value``, ``alpha``, ``entropy``

    Raises:
        ValueError: an unknown ``actor_gradient``, or a temperature of 0 or less.

    Reference: Haarnoja et al., 2018, https://arxiv.org/abs/1812.05905; Christodoulou, 2019,
    https://arxiv.org/abs/1910.07207 (discrete actions).

    Reduces to: TorchRL's ``SACLoss`` and ``DiscreteSACLoss`` for one agent that is never masked.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import Bounded, Unbounded
        >>> from torchrl_marl import AgentSpec, TeamSpec
        >>> from torchrl_marl.modules import make_action_critic, make_actor
        >>> team = TeamSpec([AgentSpec("car", 3, Unbounded((4,)), Bounded(-1, 1, (2,)))])
        >>> car = team.groups["car"]
        >>> loss = MASACLoss(make_actor(car), make_action_critic(car), group=car)
        >>> seen = {"observation": torch.zeros(5, 3, 4), "mask": torch.ones(5, 3).bool()}
        >>> now = seen | {"action": torch.zeros(5, 3, 2)}
        >>> then = seen | {"reward": torch.ones(5, 3, 1)}
        >>> ended = torch.ones(5, 1, dtype=torch.bool)
        >>> steps = TensorDict({"car": now, "next": {"car": then, "terminated": ended}}, [5])
        >>> loss(steps)["target_value"]  # the reward, since the episode terminates
        tensor(1.)
    """

    out_keys = [
        "loss_actor", "loss_value", "loss_alpha", "pred_value", "target_value", "alpha", "entropy",
    ]  # fmt: skip
    with_target = ("qvalue_network",)
    own_target: Tensor
    log_range: Tensor

    def __init__(
        self,
        actor_network: TensorDictModule,
        qvalue_network: TensorDictModule,
        *,
        group: GroupSpec,
        actor_gradient: ActorGradient | None = None,
        groups_apart: bool = False,
        joint_entropy: bool = False,
        alpha_init: float = 1.0,
        target_entropy: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(actor_network, qvalue_network, group=group, **kwargs)
        if alpha_init <= 0:
            raise ValueError(f"alpha_init is {alpha_init}, expected more than 0.")
        whose = actor_gradient or ("group" if self.bootstrap == "team" else "agent")
        device = next(qvalue_network.parameters()).device
        self.moved, self.joint_entropy = ValuesOfMovedActions(group, whose, device), joint_entropy
        choices = (
            ValuesOfChoices(group, whose, device, apart=groups_apart) if group.discrete else None
        )
        self.choices = choices
        shape = () if self.per_group.membership is None else (self.per_group.n_groups,)
        first = torch.full(shape, math.log(alpha_init), device=device)
        self.log_alpha = nn.Parameter(first)
        for name, value in zip(
            ("own_target", "log_range"), _target_entropy_and_log_range(group, target_entropy)
        ):
            self.register_buffer(name, value.to(device), persistent=False)

    @property
    def alpha(self) -> Tensor:
        """Each agent's temperature, ``[N, 1]``, or ``[1]`` for all; without a gradient."""
        return self.per_group.to_agents(self.log_alpha.detach().exp()).unsqueeze(-1)

    def next_value(self, following: TensorDictBase) -> Tensor:
        """Returns the smallest target value of the sampled next actions, with the entropy bonus."""
        policy = self._policy_actions(following)

        def values(data: TensorDictBase) -> Tensor:
            return self.values(data, target=True).amin(-1, keepdim=True)

        if self.choices is None:
            value = values(following.set(self.tensor_keys.action, policy.action))
        else:
            value = self.choices(following, policy.action, values, own=True)
        value = policy.mean(value - self.alpha * policy.log_prob)
        return (
            value - self._entropy_bonus_of_others(policy, following)
            if self.joint_entropy
            else value
        )

    def _entropy_bonus_of_others(self, policy: Policy, data: TensorDictBase) -> Tensor:
        """Returns the temperature times the log-probabilities of the group's other agents."""
        log_prob = policy.mean(policy.log_prob).squeeze(-1)
        mask = None if self.group.mask_key is None else data.get(self.group.mask_key)
        log_prob = log_prob if mask is None else torch.where(mask, log_prob, 0.0)
        others = self.to_agents(self.per_group.sum(log_prob)) - log_prob.unsqueeze(-1)
        return self.alpha * others

    def actor_loss(
        self, tensordict: TensorDictBase, turn: Tensor | None = None, others: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the actor's loss; the temperature's loss is among the metrics.

        Args:
            tensordict (TensorDictBase): a minibatch.
            turn (Tensor, optional): agents that learn now, at most one of each group, ``[N]``. The
                actor's loss is then the mean over the steps in which they act.
            others (Tensor, optional): actions of all other agents, ``[*B, N, A]``, from
                :meth:`current_actions`. Only the agents of the turn are then computed, and metrics
                are not those of the group.
        """
        dense = self.group.dense(tensordict)
        data = self.inputs(dense)
        policy = self._policy_actions_of_turn(data, turn, others)
        action = self._merge_actions(others, policy.action, turn)
        if self.choices is None:
            gain = self.moved(data, action, self._critic_values, turn)
        else:
            gain = self.choices(data, action, self._critic_values)
        loss = policy.mean(self.alpha * policy.log_prob - gain)
        mask = self.acts(dense)
        log_prob = policy.mean(policy.log_prob).detach()
        excess = self.per_group.mean(log_prob + policy.target_entropy, mask)
        return self.per_group.mean(loss, self.acts_in_turn(dense, turn)), {
            "loss_alpha": -self.log_alpha * excess,
            "alpha": self.log_alpha.detach().exp(),
            "entropy": -self.per_group.mean(log_prob, mask),
        }

    def _critic_values(self, data: TensorDictBase) -> Tensor:
        return self.values(data, detached=True).amin(-1, keepdim=True)

    def _policy_actions(self, data: TensorDictBase) -> Policy:
        with self.network("actor_network") as actor:
            dist = actor.get_dist(self.inputs_of(actor, data))
        if self.group.discrete:
            legal = dist.logits > -1e9
            log_prob = torch.where(legal, dist.logits.log_softmax(-1), 0.0)
            target = self.own_target * legal.sum(-1, keepdim=True).to(log_prob.dtype).log()
            prob = torch.where(legal, log_prob.exp(), 0.0)
            drawn = self._zero_for_waiting_agents(draw_one_hot(dist.logits).detach(), data)
            return Policy(drawn, log_prob, prob, target)
        if hasattr(dist, "rsample_and_log_prob"):  # no inverse of a squashed action
            action, log_prob = dist.rsample_and_log_prob()
        else:
            action = dist.rsample()
            log_prob = dist.log_prob(action)
        log_prob = log_prob.unsqueeze(-1) + self.log_range
        return Policy(self._zero_for_waiting_agents(action, data), log_prob, None, self.own_target)

    def _zero_for_waiting_agents(self, action: Tensor, data: TensorDictBase) -> Tensor:
        """Returns the actions; as in stored actions, they are 0 for agents that do not act."""
        mask = None if self.group.mask_key is None else data.get(self.group.mask_key)
        return action if mask is None else torch.where(mask.unsqueeze(-1), action, 0.0)


def _target_entropy_and_log_range(
    group: GroupSpec, target_entropy: float | None
) -> tuple[Tensor, Tensor]:
    """Returns each agent's target entropy, and the log of its action range relative to [-1, 1]."""
    if group.discrete:
        return torch.tensor(0.5 if target_entropy is None else target_entropy), torch.zeros(())
    per_feature = -1.0 if target_entropy is None else target_entropy
    target = per_feature * torch.tensor(group.action_dims, dtype=torch.get_default_dtype())
    if group.action_bounds is None:
        return target.unsqueeze(-1), torch.zeros(())
    low, high = group.action_bounds
    log_range, padding = ((high - low) / 2).log(), group.action_padding
    log_range = log_range if padding is None else torch.where(padding, log_range, 0.0)
    return target.unsqueeze(-1), log_range.sum(-1, keepdim=True).expand_as(target.unsqueeze(-1))
