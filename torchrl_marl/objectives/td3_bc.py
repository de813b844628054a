"""Loss of TD3 with behavior cloning.

Shapes: B any batch dims, N agents, A action features, G groups that are trained as one.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor

from torchrl_marl.objectives.maddpg import MADDPGLoss
from torchrl_marl.specs import GroupSpec

__all__ = ["TD3BCLoss"]


class TD3BCLoss(MADDPGLoss):
    r"""MATD3 whose actors stay close to the recorded actions.

    .. math::
        L_\mu = -\lambda \, Q_1(o, \mu(o)) + \lVert \mu(o) - a \rVert^2,
        \qquad \lambda = \frac{\alpha}{\overline{\lvert Q_1(o, \mu(o)) \rvert}}

    for every agent that acts. The distance is the mean over the features of an action, each
    relative to half its range. For discrete actions it is the negative log-probability of the
    recorded action. The critics' loss is that of :class:`MADDPGLoss`.

    Args:
        actor_network, qvalue_network (TensorDictModule): as for :class:`MADDPGLoss`.

    Keyword Args:
        group (GroupSpec): sets every key.
        bc_alpha (float): weight alpha of the values.
        **kwargs: as for :class:`MADDPGLoss`.

    Shapes:
        - every output: a scalar; for a joined group ``[G]``

    Keys:
        - reads, writes: as :class:`MADDPGLoss`; returns ``distance``, too

    Reference: Fujimoto and Gu, 2021, https://arxiv.org/abs/2106.06860, equations 3 and 5. For
    teams: Pan et al., 2022, https://arxiv.org/abs/2111.11188.

    Reduces to: the gradients of :class:`MADDPGLoss`, times lambda, if the actor already chooses the
    recorded actions.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import Bounded, Unbounded
        >>> from torchrl_marl import AgentSpec, TeamSpec
        >>> from torchrl_marl.modules import make_action_critic, make_deterministic_actor
        >>> team = TeamSpec([AgentSpec("car", 3, Unbounded((4,)), Bounded(-1, 1, (2,)))])
        >>> car = team.groups["car"]
        >>> loss = TD3BCLoss(make_deterministic_actor(car), make_action_critic(car), group=car)
        >>> seen = {"observation": torch.zeros(5, 3, 4), "mask": torch.ones(5, 3).bool()}
        >>> now = seen | {"action": torch.ones(5, 3, 2)}
        >>> loss.actor_loss(TensorDict({"car": now}, [5]))[1]["distance"].round(decimals=1)
        tensor(1.)
    """

    out_keys = [
        "loss_actor",
        "loss_value",
        "pred_value",
        "target_value",
        "saturation",
        "distance",
    ]

    def __init__(
        self,
        actor_network: TensorDictModule,
        qvalue_network: TensorDictModule,
        *,
        group: GroupSpec,
        bc_alpha: float = 2.5,
        **kwargs: Any,
    ) -> None:
        super().__init__(actor_network, qvalue_network, group=group, **kwargs)
        self.bc_alpha = bc_alpha

    def _step_losses(
        self, values: Tensor, dense: TensorDictBase, action: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss of each step and agent, with the values scaled and the distance."""
        distance = self._distance(dense, action)
        mean_abs_value = self.per_group.mean(values.detach().abs(), mask).reshape(-1)
        weight = self.bc_alpha / self.to_agents(mean_abs_value.clamp_min(1e-6))
        loss = distance - weight * values
        return loss, {"distance": self.per_group.mean(distance.detach(), mask)}

    def _distance(self, dense: TensorDictBase, action: Tensor) -> Tensor:
        """Returns the distance of each agent's action from the recorded one, ``[*B, N, 1]``."""
        data = self.inputs(dense)
        recorded = data.get(self.tensor_keys.action)
        if self.group.discrete:
            recorded = recorded.long() if recorded.dtype == torch.bool else recorded
            return -self.distribution(data).log_prob(recorded).unsqueeze(-1)
        half = 1.0 if self.low is None else ((self.high - self.low) / 2).clamp_min(1e-6)
        return self._mean_without_padding(((action - recorded) / half).square())
