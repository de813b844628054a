"""Loss of MADDPG, MATD3 and their independent forms, which differ in critics and noise.

Shapes: B any batch dims, N agents, A action features, K critics, G groups that are trained as one.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor

from torchrl_marl.objectives.off_policy import OffPolicyLoss
from torchrl_marl.objectives.own_actions import ActorGradient, ValuesOfMovedActions, draw_one_hot
from torchrl_marl.specs import GroupSpec

__all__ = ["MADDPGLoss"]

_SATURATION_THRESHOLD = 0.98


class MADDPGLoss(OffPolicyLoss):
    r"""Deterministic policy gradient for a group of agents that may die or wait.

    .. math::
        L_Q = \sum_k \big(Q_k(o, a) - r
            - \gamma (1 - \mathrm{terminated}) \min_k Q_k'(o', \mu'(o') + \epsilon)\big)^2,
        \qquad L_\mu = -Q_1(o, \mu(o)) + c \, \overline{z^2}

    for every agent that acts. :math:`\overline{z^2}` is the mean square of the actor's outputs
    before squashing, or of its logits. With a centralized critic this is MADDPG, and with a critic
    per agent IDDPG. With two critics and noise :math:`\epsilon` it is MATD3 or ITD3. Discrete
    actions are sampled one-hot, with a straight-through gradient. For done flags and masks see
    :class:`OffPolicyLoss`.

    Args:
        actor_network (TensorDictModule): writes actions, such as
            :func:`~torchrl_marl.modules.make_deterministic_actor`.
        qvalue_network (TensorDictModule): writes the actions' values ``[*B, N, K]``, such as
            :func:`~torchrl_marl.modules.make_action_critic`.

    Keyword Args:
        actor_gradient ("group", "agent" or "all", optional): values that an action should increase:
            the mean over the agent's group, the agent's value, or the values of all agents. ``all``
            takes one pass of the critic, and is exact if no critic sees the actions of another
            group. Default: ``group`` if ``bootstrap`` is ``team``, else ``agent``.
        policy_noise, noise_clip (float): standard deviation and limit of the noise on the target
            actor's next action, relative to half the action range; 0 for no noise.
        saturation_coeff (float): weight c; recipes use 0.001.
        **kwargs: arguments of :class:`OffPolicyLoss`: ``group``, ``bootstrap``, ``gamma``,
            ``loss_function``, ``functional``.

    Shapes:
        - reward: ``[*B, N, 1]``, or the team's ``[*B, 1]``; discount: ``[*B, 1]``
        - every output: a scalar; for a joined group ``[G]``, one for each group in it

    Keys:
        - reads: the networks' keys, here and under ``"next"``; action, the next reward and
          terminated, masks; discount and priority_weight, if present
        - writes: ``(group, "td_error")`` ``[*B, N, 1]``; returns ``loss_actor``, ``loss_value``,
          ``pred_value``, ``target_value``, ``saturation`` (fraction of actions at their bounds, or
          of choices in which one action is nearly certain)

    Reference: Lowe et al., 2017, https://arxiv.org/abs/1706.02275; Fujimoto et al., 2018,
    https://arxiv.org/abs/1802.09477. Differs from Lowe et al.: in the actor's loss, the other
    agents' actions are those of their current policy, not the stored ones.

    Reduces to: TorchRL's ``DDPGLoss`` and ``TD3Loss`` for one agent that is never masked.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import Bounded, Unbounded
        >>> from torchrl_marl import AgentSpec, TeamSpec
        >>> from torchrl_marl.modules import make_action_critic, make_deterministic_actor
        >>> team = TeamSpec([AgentSpec("car", 3, Unbounded((4,)), Bounded(-1, 1, (2,)))])
        >>> car = team.groups["car"]
        >>> loss = MADDPGLoss(make_deterministic_actor(car), make_action_critic(car), group=car)
        >>> seen = {"observation": torch.zeros(5, 3, 4), "mask": torch.ones(5, 3).bool()}
        >>> now = seen | {"action": torch.zeros(5, 3, 2)}
        >>> then = seen | {"reward": torch.ones(5, 3, 1)}
        >>> ended = torch.ones(5, 1, dtype=torch.bool)
        >>> steps = TensorDict({"car": now, "next": {"car": then, "terminated": ended}}, [5])
        >>> loss(steps)["target_value"]  # the reward, since the episode terminates
        tensor(1.)
    """

    out_keys = ["loss_actor", "loss_value", "pred_value", "target_value", "saturation"]
    low: Tensor | None
    high: Tensor  # of bounded actions
    own: Tensor | None

    def __init__(
        self,
        actor_network: TensorDictModule,
        qvalue_network: TensorDictModule,
        *,
        group: GroupSpec,
        actor_gradient: ActorGradient | None = None,
        policy_noise: float = 0.0,
        noise_clip: float = 0.5,
        saturation_coeff: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(actor_network, qvalue_network, group=group, **kwargs)
        self.policy_noise, self.noise_clip = policy_noise, noise_clip
        self.saturation_coeff = saturation_coeff
        default_gradient = "group" if self.bootstrap == "team" else "agent"
        bounds = None if group.discrete else group.action_bounds
        low, high = (None, None) if bounds is None else bounds
        device = next(qvalue_network.parameters()).device
        self.moved = ValuesOfMovedActions(group, actor_gradient or default_gradient, device)
        for name, value in (
            ("low", low),
            ("high", high),
            ("own", group.action_padding),
        ):
            value = None if value is None else value.to(device)
            self.register_buffer(name, value, persistent=False)

    def next_value(self, following: TensorDictBase) -> Tensor:
        """Returns the smallest target value of the target actor's actions."""
        action = self._add_target_noise(self._policy_actions(following, target=True)[0])
        following.set(self.tensor_keys.action, action)
        return self.values(following, target=True).amin(-1, keepdim=True)

    def actor_loss(
        self, tensordict: TensorDictBase, turn: Tensor | None = None, others: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the actor's loss, and metrics.

        Args:
            tensordict (TensorDictBase): a minibatch.
            turn (Tensor, optional): agents that learn now, at most one of each group, ``[N]``. The
                loss is then the mean over the steps in which they act.
            others (Tensor, optional): actions of all other agents, ``[*B, N, A]``, from
                :meth:`current_actions`. Only the agents of the turn are then computed, and metrics
                are not those of the group.
        """
        dense = self.group.dense(tensordict)
        data = self.inputs(dense)
        action, outputs = self._policy_actions_of_turn(data, turn, others)
        action = self._merge_actions(others, action, turn)
        mask, values = self.acts(dense), self.moved(data, action, self._critic_values, turn)
        loss, metrics = self._step_losses(values, dense, action, mask)
        saturated = torch.zeros_like(loss)
        if outputs is not None:
            squares, saturated = self._output_penalty_and_saturation(outputs)
            loss = loss + self.saturation_coeff * squares
        metrics["saturation"] = self.per_group.mean(saturated.detach(), mask)
        return self.per_group.mean(loss, self.acts_in_turn(dense, turn)), metrics

    def _step_losses(
        self, values: Tensor, dense: TensorDictBase, action: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss of each step and agent, ``[*B, N, 1]``, and metrics.

        Args:
            values (Tensor): values that the actions should increase, ``[*B, N, 1]``.
            dense (TensorDictBase): the minibatch.
            action (Tensor): actions of the current policy, ``[*B, N, A]``.
            mask (Tensor, optional): agents that act, ``[*B, N]``; None for all.
        """
        return -values, {}

    def _critic_values(self, data: TensorDictBase) -> Tensor:
        return self.values(data, detached=True)[..., :1]

    def _policy_actions(
        self, data: TensorDictBase, target: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Returns actions, and the outputs or logits that they were computed from."""
        with self.network("actor_network", target) as actor:
            inputs = self.inputs_of(actor, data, target)
            if self.group.discrete:
                logits = actor.get_dist(inputs).logits
                return draw_one_hot(logits), logits
            output = actor(inputs)
        outputs = None if self.low is None else output.get(self.group.key("loc"), None)
        return output.get(self.tensor_keys.action), outputs

    def _add_target_noise(self, action: Tensor) -> Tensor:
        if not self.policy_noise or self.group.discrete:
            return action
        noise = (self.policy_noise * torch.randn_like(action)).clamp(
            -self.noise_clip, self.noise_clip
        )
        if self.low is None:
            return action + noise
        noisy = action + noise * (self.high - self.low) / 2
        return torch.minimum(torch.maximum(noisy, self.low), self.high)

    def _output_penalty_and_saturation(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the mean square of an agent's outputs, and the share of its saturated actions.

        A discrete choice is saturated if one action is nearly certain.
        """
        if not self.group.discrete:
            saturated = outputs.tanh().abs() > _SATURATION_THRESHOLD
            return self._mean_without_padding(outputs.square()), self._mean_without_padding(
                saturated.to(outputs.dtype)
            )
        certain = (
            (outputs.softmax(-1) > _SATURATION_THRESHOLD).any(-1, keepdim=True).to(outputs.dtype)
        )
        legal_logits = torch.where(outputs > -1e9, outputs, 0.0)
        return self._mean_without_padding(legal_logits.square()), certain

    def _mean_without_padding(self, outputs: Tensor) -> Tensor:
        if self.own is None:
            return outputs.mean(-1, keepdim=True)
        total = torch.where(self.own, outputs, 0.0).sum(-1, keepdim=True)
        return total / self.own.sum(-1, keepdim=True)
