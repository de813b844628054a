"""Value estimator with off-policy correction: a critic and V-trace.

Shapes: B any batch dims, T time, N agents.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import Tensor

from torchrl_marl.functional import expand_mask, vtrace
from torchrl_marl.modules.memory.states import over_time
from torchrl_marl.objectives.estimator import TeamGAE, policy_ratio
from torchrl_marl.objectives.flags import (
    blank_masked_actions,
    blank_masked_inputs,
    placeholder_action,
    valid_actions,
)

__all__ = ["TeamVTrace"]


class TeamVTrace(TeamGAE):
    """Advantages and value targets of a policy, from the steps of an older policy (V-trace).

    The importance ratio is computed once, when advantages of a batch are estimated, from the
    log-probabilities that the acting policy wrote. Advantages are not multiplied by it, since
    :class:`~torchrl_marl.objectives.MAPPOLoss` multiplies them by a ratio itself.

    Args:
        actor_network (ProbabilisticTensorDictSequential): the policy.
        rho_clip (float, optional): limit of the ratio that multiplies an error; None for no limit.
        c_clip (float, optional): limit of the ratio that carries errors to earlier steps; None for
            no limit.
        ratio ("agent" or "joint"): ``agent``: each agent's ratio, as in PPO's clip. ``joint``: the
            product of the ratios of all acting agents in the agent's group, which is exact for a
            team's value, but whose variance grows with the number of agents.
        **kwargs: arguments of :class:`TeamGAE`.

    Keys:
        - reads: the keys of :class:`TeamGAE` and of the actor; action and ``action_log_prob``
        - writes: the keys that :class:`TeamGAE` writes

    Reference: Espeholt et al., 2018, https://arxiv.org/abs/1802.01561.

    Reduces to: :class:`TeamGAE`, if the acting policy and the learning policy are the same.
    """

    def __init__(
        self,
        *,
        actor_network: ProbabilisticTensorDictSequential,
        rho_clip: float | None = 1.0,
        c_clip: float | None = 1.0,
        ratio: Literal["agent", "joint"] = "agent",
        **kwargs: Any,
    ) -> None:
        if ratio not in ("agent", "joint"):
            raise ValueError(f"ratio is {ratio!r}, expected 'agent' or 'joint'.")
        super().__init__(**kwargs)
        clips = ((math.inf if clip is None else clip) for clip in (rho_clip, c_clip))
        self.rho_clip, self.c_clip = clips
        self.ratio = ratio
        # In a tuple: the actor is a part of the loss, not of the estimator.
        self._actor = (actor_network,)
        self.action_key: NestedKey = "action"
        placeholder = torch.zeros(())
        if self.group is not None:
            self.action_key = self.group.action_key
            self.set_keys(sample_log_prob=self.group.key("action_log_prob"))
            placeholder = placeholder_action(self.group)
        where = next((p.device for p in actor_network.parameters()), None)
        valid = valid_actions(self.group)
        self.register_buffer("_placeholder", placeholder.to(where), persistent=False)
        valid = None if valid is None else valid.to(where)
        self.register_buffer("_valid_actions", valid, persistent=False)

    def _make_estimate(
        self, data: TensorDictBase, learned: Tensor | None, turns: Tensor | None
    ) -> Callable[..., tuple[Tensor, Tensor]]:
        gamma, lmbda = self._discount
        return partial(
            vtrace,
            self._log_ratio(data, learned),
            gamma=gamma,
            lmbda=lmbda,
            rho_clip=self.rho_clip,
            c_clip=self.c_clip,
            mask=turns,
            weigh=False,
        )

    def _log_ratio(self, data: TensorDictBase, learned: Tensor | None) -> Tensor:
        """Returns the log-ratios of the actions, 0 where the policy did not act.

        Shapes:
            - learned: ``[*B, N]``; returns ``[*B, N, 1]``
        """
        [actor], keys, data = self._actor, self.tensor_keys, data.copy()
        if self.mask_key is not None:
            inputs = data.select(*actor.in_keys, strict=False)
            data.update(blank_masked_inputs(inputs, self.mask_key, data))
            blank_masked_actions(data, self.action_key, data.get(self.mask_key), self._placeholder)
        with over_time(actor):
            log_ratio = policy_ratio(
                actor,
                data,
                action=self.action_key,
                sample_log_prob=keys.sample_log_prob,
                valid=self._valid_actions,
            )[2]
        if learned is not None:
            log_ratio = torch.where(expand_mask(learned, log_ratio), log_ratio, 0.0)
        if self.ratio == "agent":
            return log_ratio
        joint = self._sum_over_group(log_ratio.squeeze(-1))
        return joint.unsqueeze(-1).expand_as(log_ratio)
