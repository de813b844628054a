"""Loss of IQL, VDN and QMIX, which are Q-learning with different mixers.

Shapes: B any batch dims, N agents, G groups that are trained as one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, TensorDictParams
from tensordict.nn import TensorDictModule
from torch import Tensor

from torchrl_marl.objectives.off_policy import OffPolicyLoss
from torchrl_marl.specs import GroupSpec

__all__ = ["ValueDecompositionLoss"]


class ValueDecompositionLoss(OffPolicyLoss):
    r"""Q-learning of a group of agents that may die, with independent or mixed values.

    .. math::
        L = w \, \big(Q_{tot}(s, a) - r - \gamma \, Q_{tot}'(s', a^*)\big)^2,
        \qquad a^*_i = \arg\max_a Q_i(o_i', a)

    with :math:`w` = ``negative_weight`` if the target is below the value, else 1. Without a mixer,
    :math:`Q_{tot}` is each agent's value (IQL), with done flags and masks as in
    :class:`OffPolicyLoss`. With a mixer, a step has one value, and counts if any agent acts. Its
    reward is the mean over born and living agents. The mixer reads 0 for dead and unborn agents,
    both in the step and in the next step. The next value counts unless no agent is left or the
    episode has terminated. A joined group has a value for each group in it.

    Args:
        qvalue_network (TensorDictModule): writes values ``[*B, N, n_actions]`` and the best
            action, such as :func:`~torchrl_marl.modules.make_q_actor`.
        mixer_network (TensorDictModule, optional): mixes the chosen values into
            ``"chosen_action_value"``, such as :func:`~torchrl_marl.modules.make_mixer` or
            TorchRL's. None for IQL.

    Keyword Args:
        double_q (bool): whether the network, instead of its target, chooses the next action.
        negative_weight (float): weight w; if it is below 1, agents are optimistic about others'
            actions.
        **kwargs: arguments of :class:`OffPolicyLoss`: ``group``, ``bootstrap``, ``gamma``,
            ``loss_function``, ``functional``.

    Shapes:
        - reward: ``[*B, N, 1]``, or the team's ``[*B, 1]``; discount: ``[*B, 1]``
        - every output: a scalar; for a joined group ``[G]``, one for each group in it

    Keys:
        - reads: the networks' keys, here and under ``"next"``; action, the next reward and
          terminated, masks; discount and priority_weight, if present
        - writes: ``(group, "td_error")`` ``[*B, N, 1]``; returns ``loss_value``, ``pred_value``,
          ``target_value``

    Raises:
        ValueError: a mixer with ``bootstrap="agent"``.

    Reference: Rashid et al., 2018, https://arxiv.org/abs/1803.11485, equation 6; van Hasselt et
    al., 2016, https://arxiv.org/abs/1509.06461 (double Q); Matignon et al., 2007,
    https://doi.org/10.1109/IROS.2007.4399095, and Rashid et al., 2020,
    https://arxiv.org/abs/2006.10800 (the weight).

    Reduces to: TorchRL's ``DQNLoss`` for one agent without a mixer, and ``QMixerLoss`` without
    ``double_q``, if no agent is masked.

    Examples:
        >>> from torchrl.data import Categorical, Unbounded
        >>> from torchrl_marl import AgentSpec, TeamSpec
        >>> from torchrl_marl.modules import make_mixer, make_q_actor
        >>> car = TeamSpec([AgentSpec("car", 3, Unbounded((4,)), Categorical(2))]).groups["car"]
        >>> loss = ValueDecompositionLoss(make_q_actor(car), make_mixer(car, "sum"), group=car)
        >>> loss.out_keys
        ['loss_value', 'pred_value', 'target_value']
    """

    @dataclass
    class _AcceptedKeys(OffPolicyLoss._AcceptedKeys):
        action_value: NestedKey = "action_value"
        local_value: NestedKey = "chosen_action_value"
        global_value: NestedKey = "chosen_action_value"

    default_keys = _AcceptedKeys
    with_target: ClassVar[tuple[str, ...]] = ("qvalue_network", "mixer_network")
    tensor_keys: _AcceptedKeys
    mixer_network: TensorDictModule | None
    mixer_network_params: TensorDictParams
    target_mixer_network_params: TensorDictParams
    out_keys = ["loss_value", "pred_value", "target_value"]

    def __init__(
        self,
        qvalue_network: TensorDictModule,
        mixer_network: TensorDictModule | None = None,
        *,
        group: GroupSpec,
        double_q: bool = True,
        negative_weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        mixed = mixer_network is not None
        super().__init__(None, qvalue_network, group=group, mixed=mixed, **kwargs)
        self.double_q, self.negative_weight = double_q, negative_weight
        if mixer_network is not None:
            self.add_network("mixer_network", mixer_network)
        own = ("action_value", "chosen_action_value")
        self.set_keys(action_value=group.key(own[0]), local_value=group.key(own[1]))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Returns the loss and metrics of a minibatch."""
        loss_value, metrics = self.value_loss(tensordict)
        return TensorDict({"loss_value": loss_value, **metrics}, [])

    def next_value(self, following: TensorDictBase) -> Tensor:
        """Returns the target network's values of the best next actions."""
        with self.network("qvalue_network", target=not self.double_q) as network:
            acted = network(self.inputs_of(network, following, not self.double_q))
        best = acted.get(self.tensor_keys.action)
        return self.values(following.set(self.tensor_keys.action, best), target=True)

    def values(self, data: TensorDictBase, target: bool = False, detached: bool = False) -> Tensor:
        """Returns the values of the actions, ``[*B, N, 1]``; with a mixer, the mixed value."""
        keys, group = self.tensor_keys, self.group
        with self.network("qvalue_network", target, detached) as network:
            values = network(self.inputs_of(network, data, target)).get(keys.action_value)
        action = data.get(keys.action)
        if group.one_hot:
            chosen = (values * action).sum(-1, keepdim=True)
        else:
            chosen = values.gather(-1, action.reshape(*values.shape[:-1], 1))
        return self.mixture(data, chosen, target, detached)

    def mixture(
        self, data: TensorDictBase, chosen: Tensor, target: bool = False, detached: bool = False
    ) -> Tensor:
        """Returns the mixed value for every agent of a group; without a mixer, the given values."""
        if not self.mixed:
            return chosen
        mask_key = self.group.mask_key
        if mask_key is not None:
            chosen = torch.where(data.get(mask_key).unsqueeze(-1), chosen, 0.0)
        with self.network("mixer_network", target, detached) as mixer:
            rows = data.select(*mixer.in_keys, strict=False)
            total = mixer(rows.set(self.tensor_keys.local_value, chosen))
        return self.to_agents(total.get(self.tensor_keys.global_value))

    def distance(self, value: Tensor, target: Tensor) -> Tensor:
        """Returns the loss, times ``negative_weight`` where the target is below the value."""
        loss = super().distance(value, target)
        if self.negative_weight == 1.0:
            return loss
        return torch.where(target < value.detach(), self.negative_weight * loss, loss)

    @property
    def read_keys(self) -> list[NestedKey]:
        """Entries that the networks read, and the action."""
        mixer = self.mixer_network.in_keys if self.mixed else []  # type: ignore[union-attr]
        mixer_input = self.tensor_keys.local_value
        network_keys = [*self.qvalue_network.in_keys, *(key for key in mixer if key != mixer_input)]
        return [*network_keys, self.tensor_keys.action]
