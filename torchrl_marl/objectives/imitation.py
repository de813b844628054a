"""Loss of behavior cloning.

Shapes: B any batch dims, N agents, A action features, G groups that are trained as one.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor

from torchrl_marl.objectives.off_policy import OffPolicyLoss
from torchrl_marl.objectives.recorded import RecordedActions
from torchrl_marl.specs import GroupSpec

__all__ = ["ImitationLoss"]


class ImitationLoss(OffPolicyLoss):
    r"""Behavior cloning: the negative log-probability of recorded actions.

    .. math::
        L_\mu = -\log \pi(a \mid o)

    for every agent that acts. A squashed normal gives the bounds of its actions probability 0.
    Recorded actions are therefore moved inwards, by 0.5 % of their range at most. Before, noise may
    be added to continuous ones, so that the policy's standard deviation does not become smaller.

    Args:
        actor_network (TensorDictModule): stochastic policy, such as
            :func:`~torchrl_marl.modules.make_actor`.

    Keyword Args:
        group (GroupSpec): sets every key.
        noise (float): standard deviation of the noise on recorded continuous actions, relative to
            half their range; for unbounded ones, in their units.
        **kwargs: as for :class:`OffPolicyLoss`: ``functional``.

    Shapes:
        - action: ``[*B, N, A]``, ``[*B, N]`` or one-hot; every output: a scalar, or ``[G]``

    Keys:
        - reads: the actor's inputs, action, masks; priority_weight, if present
        - writes: ``(group, "td_error")`` ``[*B, N, 1]``, the size of the loss of each agent, by
          which prioritized replay samples; returns ``loss_actor``, ``log_prob``

    Reference: Pomerleau, 1991, https://doi.org/10.1162/neco.1991.3.1.88.

    Reduces to: cross-entropy for discrete actions.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import Categorical, Unbounded
        >>> from torchrl_marl import AgentSpec, TeamSpec
        >>> from torchrl_marl.modules import make_actor
        >>> car = TeamSpec([AgentSpec("car", 3, Unbounded((4,)), Categorical(2))]).groups["car"]
        >>> loss = ImitationLoss(make_actor(car), group=car)
        >>> acted = {"observation": torch.zeros(5, 3, 4), "action": torch.ones(5, 3).long()}
        >>> steps = TensorDict({"car": acted | {"mask": torch.ones(5, 3).bool()}}, [5])
        >>> loss(steps)["loss_actor"].round(decimals=1)  # about log 2, before training
        tensor(0.7000, grad_fn=<RoundBackward1>)
    """

    with_target = ()
    out_keys = ["loss_actor", "log_prob"]

    def __init__(
        self,
        actor_network: TensorDictModule,
        *,
        group: GroupSpec,
        noise: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(actor_network, None, group=group, **kwargs)
        device = next(actor_network.parameters()).device
        self.recorded = RecordedActions(group, device, noise)

    @property
    def read_keys(self) -> list[NestedKey]:
        """Entries that the loss reads."""
        return [*self.actor_network.in_keys, self.tensor_keys.action]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Returns the loss and metrics of a minibatch."""
        loss, metrics = self.actor_loss(tensordict)
        return TensorDict({"loss_actor": loss, **metrics}, [])

    def actor_loss(
        self, tensordict: TensorDictBase, turn: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss, and metrics; writes the loss of each agent.

        Args:
            tensordict (TensorDictBase): a minibatch.
            turn (Tensor, optional): agents that learn now, ``[N]``; None for all.
        """
        dense = self.group.dense(tensordict)
        data = self.inputs(dense)
        action = self.recorded(data.get(self.tensor_keys.action))
        log_prob = self.distribution(data).log_prob(action).unsqueeze(-1)
        mask = self.acts_in_turn(dense, turn)
        if mask is not None:
            log_prob = torch.where(mask.unsqueeze(-1), log_prob, 0.0)
        self.group.write(tensordict, "td_error", log_prob.detach().abs())
        loss = -self.per_group.mean(self.weighted(dense, log_prob), mask)
        return loss, {"log_prob": self.per_group.mean(log_prob.detach(), mask)}
