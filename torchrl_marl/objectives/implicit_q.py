"""Loss of implicit Q-learning.

Shapes: B any batch dims, N agents, K critics, G groups that are trained as one.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictParams
from torch import Tensor

from torchrl_marl.objectives.off_policy import OffPolicyLoss
from torchrl_marl.objectives.recorded import RecordedActions
from torchrl_marl.specs import GroupSpec

__all__ = ["ImplicitQLoss"]

_MAX_ADVANTAGE_WEIGHT = 100.0


class ImplicitQLoss(OffPolicyLoss):
    r"""Implicit Q-learning: values of recorded actions only, and a policy that prefers the better.

    .. math::
        L_V = \lvert \tau - 1(u < 0) \rvert \, u^2, \qquad u = \min_k Q_k'(o, a) - V(o)

        L_Q = \sum_k \big(Q_k(o, a) - r - \gamma (1 - \mathrm{terminated}) V(o')\big)^2

        L_\mu = - \min\big(e^{\beta u}, 100\big) \log \pi(a \mid o)

    for every agent that acts. No network is evaluated for an action that was not recorded. For done
    flags and masks see :class:`OffPolicyLoss`.

    Args:
        actor_network (TensorDictModule): stochastic policy, such as
            :func:`~torchrl_marl.modules.make_actor`.
        qvalue_network (TensorDictModule): writes the values of actions, such as
            :func:`~torchrl_marl.modules.make_action_critic`.
        value_network (TensorDictModule): writes the values of steps, such as
            :func:`~torchrl_marl.modules.make_critic`.

    Keyword Args:
        group (GroupSpec): sets every key.
        expectile (float): tau, 0.5 to 1: at 0.5 V is the mean value of recorded actions, near 1
            that of the best.
        beta (float): weight of advantages in the policy's loss; 0 is behavior cloning.
        noise (float): noise on recorded actions, as for
            :class:`~torchrl_marl.objectives.ImitationLoss`.
        **kwargs: as for :class:`OffPolicyLoss`: ``bootstrap``, ``gamma``, ``loss_function``,
            ``functional``.

    Shapes:
        - every output: a scalar; for a joined group ``[G]``

    Keys:
        - reads: the networks' keys, here and under ``"next"``; action, the next reward and
          terminated, masks; discount and priority_weight, if present
        - writes: ``(group, "td_error")`` ``[*B, N, 1]``; returns ``loss_actor``, ``loss_value``,
          ``loss_state_value``, ``pred_value``, ``target_value``, ``log_prob``, ``weight``

    Reference: Kostrikov et al., 2022, https://arxiv.org/abs/2110.06169, equations 5 to 7.

    Reduces to: :class:`~torchrl_marl.objectives.ImitationLoss` of the policy with ``beta=0``. With
    ``expectile=0.5`` the values are those of the recorded policy (SARSA).

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import Bounded, Unbounded
        >>> from torchrl_marl import AgentSpec, TeamSpec
        >>> from torchrl_marl.modules import make_action_critic, make_actor, make_critic
        >>> team = TeamSpec([AgentSpec("car", 3, Unbounded((4,)), Bounded(-1, 1, (2,)))])
        >>> car = team.groups["car"]
        >>> networks = [make(car) for make in (make_actor, make_action_critic, make_critic)]
        >>> loss = ImplicitQLoss(*networks, group=car)
        >>> seen = {"observation": torch.zeros(5, 3, 4), "mask": torch.ones(5, 3).bool()}
        >>> now = seen | {"action": torch.zeros(5, 3, 2)}
        >>> then = seen | {"reward": torch.ones(5, 3, 1)}
        >>> ended = torch.ones(5, 1, dtype=torch.bool)
        >>> steps = TensorDict({"car": now, "next": {"car": then, "terminated": ended}}, [5])
        >>> loss(steps)["target_value"]  # the reward, since the episode terminates
        tensor(1.)
    """

    out_keys = [
        "loss_actor",
        "loss_value",
        "loss_state_value",
        "pred_value",
        "target_value",
        "log_prob",
        "weight",
    ]
    with_target = ("qvalue_network",)

    value_network: TensorDictModule
    value_network_params: TensorDictParams
    target_value_network_params: TensorDictParams

    def __init__(
        self,
        actor_network: TensorDictModule,
        qvalue_network: TensorDictModule,
        value_network: TensorDictModule,
        *,
        group: GroupSpec,
        expectile: float = 0.7,
        beta: float = 3.0,
        noise: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(actor_network, qvalue_network, group=group, **kwargs)
        if not 0.5 <= expectile < 1:
            raise ValueError(f"expectile is {expectile}, expected 0.5 or more, and below 1.")
        device = next(actor_network.parameters()).device
        self.expectile, self.beta = expectile, beta
        self.add_network("value_network", value_network)
        self.recorded = RecordedActions(group, device, noise)

    @property
    def read_keys(self) -> list[NestedKey]:
        """Entries that the networks read."""
        return [*super().read_keys, *self.value_network.in_keys]

    def next_value(self, following: TensorDictBase) -> Tensor:
        """Returns the value of the next step."""
        return self.state_value(following)

    def state_value(self, data: TensorDictBase) -> Tensor:
        """Returns the value of each step for each agent, ``[*B, N, 1]``."""
        with self.network("value_network") as critic:
            output = critic(data.select(*critic.in_keys, strict=False))
        return output.get(self.group.key("state_value"))

    def value_loss(self, tensordict: TensorDictBase) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the critics' loss; the loss of the values of steps is among the metrics."""
        loss, metrics = super().value_loss(tensordict)
        dense = self.group.dense(tensordict)
        advantage = self._advantage(self.inputs(dense))
        weight = torch.where(advantage > 0, self.expectile, 1 - self.expectile)
        weighted = self.weighted(dense, weight * advantage.square())
        mean = self.per_group.mean(weighted, self.acts(dense))
        return loss, {"loss_state_value": mean, **metrics}

    def _advantage(self, data: TensorDictBase) -> Tensor:
        """Returns the value of the recorded action minus that of the step, ``[*B, N, 1]``."""
        with torch.no_grad():
            value = self.values(data, target=True).amin(-1, keepdim=True)
        return value - self.state_value(data)

    def actor_loss(
        self, tensordict: TensorDictBase, turn: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the actor's loss, and metrics.

        Args:
            tensordict (TensorDictBase): a minibatch.
            turn (Tensor, optional): agents that learn now, ``[N]``; None for all.
        """
        dense = self.group.dense(tensordict)
        data = self.inputs(dense)
        with torch.no_grad():
            weight = (self.beta * self._advantage(data)).exp().clamp_max(_MAX_ADVANTAGE_WEIGHT)
        action = self.recorded(data.get(self.tensor_keys.action))
        log_prob = self.distribution(data).log_prob(action).unsqueeze(-1)
        mask = self.acts_in_turn(dense, turn)
        return -self.per_group.mean(self.weighted(dense, weight * log_prob), mask), {
            "log_prob": self.per_group.mean(log_prob.detach(), mask),
            "weight": self.per_group.mean(weight, mask),
        }
