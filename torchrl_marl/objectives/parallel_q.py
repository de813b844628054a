"""PQN: Q-learning from rollouts, without replay and without target networks.

Shapes: B any batch dims, T time, N agents, G groups that are trained as one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from tensordict.nn import TensorDictModule
from torch import Tensor

from torchrl_marl.errors import SpecError
from torchrl_marl.functional import fill_next, q_lambda
from torchrl_marl.objectives.estimator import estimator_keys
from torchrl_marl.objectives.flags import (
    alive_mask_of,
    bootstrap_mask_of,
    learning_mask,
    loss_mask,
    loss_mask_key,
    of_agents,
    own_reward,
    share,
    with_flags,
)
from torchrl_marl.objectives.value_decomposition import ValueDecompositionLoss
from torchrl_marl.specs import GroupSpec

__all__ = ["ParallelQLoss"]


class ParallelQLoss(ValueDecompositionLoss):
    r"""Q-learning of a group on the lambda-returns of a rollout, with a single network.

    .. math::
        L = \big(Q_{tot}(s_t, a_t) - G_t\big)^2, \qquad
        G_t = r_t + \gamma (1 - \text{terminated}_t)
              \left[ \lambda G_{t+1} + (1 - \lambda) \max_a Q_{tot}(s_{t+1}, a) \right]

    :meth:`add_targets` computes :math:`G_t` for a whole batch with the current network; the losses
    of minibatches read it. A return ends with its episode or with the batch, and a time limit is
    bootstrapped. Masks, done flags and rewards are those of :class:`ValueDecompositionLoss`.
    Without a mixer, a dead agent earns the mean reward of its group's born and living agents
    (``bootstrap="team"``), or its return ends when it dies (``"agent"``). With ``"agent"`` a
    waiting agent counts as dead, so games with turns need ``"team"``.

    Args:
        qvalue_network (TensorDictModule): writes values ``[*B, N, n_actions]``, the best action and
            its value, such as :func:`~torchrl_marl.modules.make_q_actor`.
        mixer_network (TensorDictModule, optional): as in :class:`ValueDecompositionLoss`.

    Keyword Args:
        lmbda (float): lambda of the returns.
        **kwargs: arguments of :class:`OffPolicyLoss`: ``group``, ``bootstrap``, ``gamma``,
            ``loss_function``, ``functional``.

    Shapes:
        - batch for ``add_targets``: ``[*B, T]``; minibatch for the loss: ``[*B]``
        - reward: ``[*B, T, N, 1]``, or the team's ``[*B, T, 1]``; value_target: ``[*B, T, N, 1]``
        - every output: a scalar; for a joined group ``[G]``, one for each group in it

    Keys:
        - reads: the networks' keys, action, masks, ``(group, "value_target")``; ``add_targets``
          also reads the networks' keys under ``"next"``, the next reward, done and terminated
        - writes: ``add_targets`` writes ``(group, "value_target")``, and ``(group, "loss_mask")``
          if the group has a mask; the loss returns ``loss_value``, ``pred_value``, ``target_value``

    Raises:
        ValueError: a mixer with ``bootstrap="agent"``.
        SpecError: a batch without targets.

    Reference: Gallici et al., 2024, https://arxiv.org/abs/2407.04811, algorithm 1.

    Reduces to: one-step Q-learning for ``lmbda=0``, and Monte Carlo returns for ``lmbda=1``.

    Examples:
        >>> from torchrl_marl import TeamSpec
        >>> from torchrl_marl.collectors import RolloutCollector
        >>> from torchrl_marl.envs.toy import TwoStepGame
        >>> from torchrl_marl.modules import make_mixer, make_q_actor
        >>> env = TwoStepGame(4, seed=0)
        >>> group = TeamSpec.from_env(env).groups["agents"]
        >>> loss = ParallelQLoss(make_q_actor(group), make_mixer(group, "sum"), group=group)
        >>> batch = RolloutCollector(env, loss.qvalue_network, frames_per_batch=40).next()
        >>> loss.add_targets(batch)
        >>> loss(batch)["loss_value"].shape
        torch.Size([])
    """

    @dataclass
    class _AcceptedKeys(ValueDecompositionLoss._AcceptedKeys):
        done: NestedKey = "done"
        value_target: NestedKey = "value_target"

    default_keys = _AcceptedKeys
    with_target = ()
    tensor_keys: _AcceptedKeys

    def __init__(
        self,
        qvalue_network: TensorDictModule,
        mixer_network: TensorDictModule | None = None,
        *,
        group: GroupSpec,
        lmbda: float = 0.65,
        **kwargs: Any,
    ) -> None:
        super().__init__(qvalue_network, mixer_network, group=group, **kwargs)
        self.lmbda = lmbda
        keys = estimator_keys(group, self.bootstrap)
        self.set_keys(done=keys["done"], value_target=keys["value_target"])

    @torch.no_grad()
    def add_targets(self, tensordict: TensorDictBase) -> None:
        """Writes the lambda-returns of a batch, and the mask of steps to learn from."""
        group = self.group
        data = with_flags(group, group.dense(tensordict))
        everyone = torch.ones(()).expand(*data.batch_size, group.n_agents)
        reward, next_value, terminated, learned = self.outcome(data, everyone)
        done = of_agents(data.get("next").get(self.tensor_keys.done), everyone)
        seen = bootstrap_mask_of(group, data) if group.respawns else None
        if seen is not None and self.bootstrap == "team":
            any_seen = self.to_agents(self.per_group.sum(seen.to(reward.dtype))) > 0
            next_value = fill_next(next_value, any_seen, done, gamma=self.gamma)
        own_ends = self.bootstrap == "agent" and group.mask_key is not None
        acts = data.get(group.mask_key) if own_ends else None
        target = q_lambda(
            reward, next_value, done, terminated, gamma=self.gamma, lmbda=self.lmbda, mask=acts
        )
        if learned is not None:
            target = torch.where(learned.unsqueeze(-1), target, 0.0)
            group.write(tensordict, "loss_mask", learned)
        group.write(tensordict, "value_target", target)

    def target(self, data: TensorDictBase, everyone: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the targets from ``add_targets``, and the mask of steps that have one."""
        mask_key, key = self.group.mask_key, self.tensor_keys.value_target
        target = data.get(key, None)
        if target is None:
            raise SpecError(f"the batch has no {key}; call add_targets on the whole rollout first.")
        if mask_key is None:
            return target, None
        learned = loss_mask(data, mask_key)
        return torch.where(learned.unsqueeze(-1), target, 0.0), learned

    def next_value(self, following: TensorDictBase) -> Tensor:
        """Returns the value of the best next actions."""
        with self.network("qvalue_network") as network:
            best = network(following.select(*network.in_keys)).get(self.tensor_keys.local_value)
        return self.mixture(following, best)

    def rewards(self, data: TensorDictBase, everyone: Tensor) -> Tensor:
        """Returns each agent's reward; dead agents get the living agents' mean reward, or 0."""
        reward, own = super().rewards(data, everyone), data.get("next").get(self.tensor_keys.reward)
        alive = alive_mask_of(self.group, data)
        if self.mixed or own.ndim == everyone.ndim:
            return reward
        if self.bootstrap == "agent":
            return own_reward(self.group, data, reward)
        return share(reward, alive, learning_mask(data, self.group, alive), self.per_group)

    @property
    def in_keys(self) -> list[NestedKey]:
        """Entries that the loss and ``add_targets`` read, if present."""
        ends = (self.tensor_keys.done, self.group.team_end_keys[0])
        next_keys = [unravel_key(("next", key)) for key in ends]
        return list(dict.fromkeys([*super().in_keys, *next_keys, *self.minibatch_keys]))

    @property
    def minibatch_keys(self) -> list[NestedKey]:
        """Entries of a minibatch, if present."""
        mask = self.group.mask_key
        masks = [] if mask is None else [mask, loss_mask_key(mask)]
        return list(dict.fromkeys([*self.read_keys, *masks, self.tensor_keys.value_target]))
