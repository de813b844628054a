"""Gradient clipping by group, for groups that are trained as one.

Shapes: N agents of all groups, G groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.modules import ProbabilisticActor

from torchrl_marl.learners.rows import groups_served_by_rows
from torchrl_marl.modules.memory.states import STATES, state_size
from torchrl_marl.modules.networks import channels_of
from torchrl_marl.specs import GroupSpec

if TYPE_CHECKING:
    from torchrl_marl.objectives.off_policy import OffPolicyLoss

__all__ = ["GradientClip"]


class GradientClip:
    """Clips the gradient norm of each group's parameters.

    If groups are trained as one, their parameters are stacked, and each row belongs to one group or
    serves several groups. All rows that serve several groups are clipped by one common norm.

    Args:
        parameters (iterable of Parameter): parameters of all groups' networks.
        limit (float or Tensor, optional): maximum norm; None for no clipping. A tensor ``[G + 1]``
            has a limit for each group and, last, a limit for rows that serve several groups.
        n_groups (int): number G of groups.
        rows (sequence of Tensor, optional): for each row of each parameter, the index of its group,
            or G for a row that serves several groups; from :meth:`of_networks`. None if there is
            only one group.

    Attributes:
        row_groups (Tensor or None): ``rows`` of all parameters, concatenated.

    Reduces to: ``torch.nn.utils.clip_grad_norm_`` for each group, if no row serves two groups.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        limit: float | Tensor | None = None,
        *,
        n_groups: int = 1,
        rows: Sequence[Tensor] | None = None,
    ) -> None:
        self.parameters = list(dict.fromkeys(parameters))
        self.limit = float("inf") if limit is None else limit
        self.n_groups = n_groups
        self.row_groups: Tensor | None = None
        if rows is not None:
            self.sizes = [len(own) for own in rows]
            self.row_groups = torch.cat(list(rows))

    @classmethod
    def of_networks(
        cls,
        group: GroupSpec,
        input_group: GroupSpec | None,
        actor: ProbabilisticActor,
        critic: TensorDictModule,
        limit: float | None,
        per_agent: bool = False,
    ) -> GradientClip:
        """Builds the clip of an actor and a critic; finds the groups of each parameter's rows.

        Args:
            group (GroupSpec): the agents of a group, or of several groups joined into one.
            input_group (GroupSpec, optional): the agents in the input of a critic across groups.
            actor, critic (TensorDictModule): networks of the agents.
            limit (float, optional): maximum norm; None for no clipping.
            per_agent (bool): whether each agent's policy is treated as a separate group. All rows
                of the critic then count as serving several groups.
        """

        def outputs(td: TensorDict) -> Tensor:
            distribution = actor.get_dist(td)
            acts = distribution.log_prob(distribution.sample())
            return acts + critic(td).get(group.key("state_value")).squeeze(-1)

        parameters = [*actor.parameters(), *critic.parameters()]
        sizes = zip(STATES, map(state_size, (actor, critic)))
        states = {leaf: size for leaf, size in sizes if size}
        draws = sum(channel.draws for channel in channels_of(actor))
        states |= {"channel": draws} if draws else {}
        clip = cls.of_outputs(
            group,
            parameters,
            outputs,
            limit,
            input_group=input_group,
            per_agent=per_agent,
            states=states,
        )
        if per_agent and clip.row_groups is not None:
            ends = torch.tensor([0, *clip.sizes]).cumsum(0).tolist()
            of_critic = {id(p) for p in critic.parameters()}
            for p, start, end in zip(clip.parameters, ends, ends[1:]):
                if id(p) in of_critic:
                    clip.row_groups[start:end] = clip.n_groups
        return clip

    @classmethod
    def of_outputs(
        cls,
        group: GroupSpec,
        parameters: Iterable[nn.Parameter],
        outputs: Callable[[TensorDict], Tensor],
        limit: float | None,
        *,
        input_group: GroupSpec | None = None,
        per_agent: bool = False,
        states: Mapping[str, int] | None = None,
    ) -> GradientClip:
        """Builds the clip of any networks; finds the groups of each parameter's rows.

        Args:
            group (GroupSpec): the agents of a group, or of several groups joined into one.
            parameters (iterable of Parameter): parameters of the networks.
            outputs (callable): maps observations and actions, ``[B]``, to the networks' outputs,
                ``[B, N]``.
            limit (float, optional): maximum norm; None for no clipping.
            input_group (GroupSpec, optional): other agents in a network's input.
            per_agent (bool): whether each agent is treated as a separate group.
            states (mapping, optional): leaf -> width per agent, for the networks' other inputs:
                hidden states, and samples of the communication channel.
        """
        parameters = list(dict.fromkeys(parameters))
        index = tuple(range(group.n_agents)) if per_agent else group.group_index
        n_groups = max(index) + 1
        if n_groups == 1:
            return cls(parameters, limit)
        rows = groups_served_by_rows(index, group, input_group, outputs, parameters, states)
        return cls(parameters, limit, n_groups=n_groups, rows=rows)

    @classmethod
    def of_values(
        cls,
        loss: OffPolicyLoss,
        parameters: Iterable[nn.Parameter],
        limit: float | None,
        *,
        input_group: GroupSpec | None = None,
    ) -> GradientClip:
        """Builds the clip of critics or Q-networks; finds the groups of each parameter's rows.

        Args:
            loss (OffPolicyLoss): loss with the networks.
            parameters (iterable of Parameter): parameters of the networks.
            limit (float, optional): maximum norm; None for no clipping.
            input_group (GroupSpec, optional): other agents in a mixer's input.
        """
        from torchrl_marl.modules.exploration import RandomActor

        parameters = list(dict.fromkeys(parameters))
        act = RandomActor(loss.group, parameters[0].device)

        def values(td: TensorDict) -> Tensor:
            return loss.values(act(td)).sum(-1)

        return cls.of_outputs(
            loss.group, parameters, values, limit, input_group=input_group, states=loss.states
        )

    def __call__(self) -> Tensor:
        """Clips the parameters' gradients; returns the unclipped norms, a scalar or ``[G]``."""
        return self.scale([p.grad for p in self.parameters])

    @torch.no_grad()
    def scale(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Clips gradients in place; returns the unclipped norms.

        Args:
            gradients: gradients of ``parameters``; None for a parameter without one.
        """
        if self.row_groups is None:
            found = [g for g in gradients if g is not None]
            norm = nn.utils.get_total_norm(found, foreach=True)
            if isinstance(self.limit, Tensor) or not math.isinf(self.limit):
                torch._foreach_mul_(found, (self.limit / (norm + 1e-6)).clamp(max=1.0))
            return norm
        of_all = [
            torch.zeros_like(p) if g is None else g for p, g in zip(self.parameters, gradients)
        ]
        flat = [g.reshape(g.shape[0] if g.ndim else 1, -1) for g in of_all]
        squares = torch.cat([torch.linalg.vector_norm(g, dim=1) for g in flat]).square()
        norms = squares.new_zeros(self.n_groups + 1).index_add(0, self.row_groups, squares).sqrt()
        factors = (self.limit / (norms + 1e-6)).clamp(max=1.0)
        # The flat gradients are not scaled, because that of a transposed gradient is a copy.
        for gradient, factor in zip(of_all, factors[self.row_groups].split(self.sizes)):
            rows = factor.reshape(-1, *(1,) * (gradient.ndim - 1)) if gradient.ndim else factor[0]
            gradient.mul_(rows)
        own, common = norms[:-1], norms[-1:]
        return (own.square() + common.square()).sqrt()

    def rows_of(self, flags: Tensor, shared: Tensor | None = None) -> list[Tensor]:
        """Returns a mask of each parameter's rows that serve a flagged group.

        Args:
            flags (Tensor): bool, ``[G]``.
            shared (Tensor, optional): flag of the rows that serve several groups; default: True if
                any group is flagged.

        Shapes:
            - each: bool, a scalar or ``[rows, 1, ...]`` with the parameter's number of dims
        """
        return self.spread_all(flags, flags.any() if shared is None else shared)

    def spread_all(self, values: Tensor, shared: Tensor) -> list[Tensor]:
        """Returns, for each parameter, the value of each row, as :meth:`spread` does.

        Args:
            values (Tensor): a value for each group, ``[G]``.
            shared (Tensor): value of the rows that serve several groups, a scalar.
        """
        if self.row_groups is None:
            return [values[0]] * len(self.parameters)
        return self.spread(torch.cat([values, shared.unsqueeze(0)]))

    def spread(self, values: Tensor) -> list[Tensor]:
        """Returns, for each parameter, the value that belongs to each of its rows.

        Args:
            values (Tensor): a value for each group and, last, a value for rows that serve several
                groups, ``[G + 1]``.

        Shapes:
            - each: a scalar or ``[rows, 1, ...]`` with the parameter's number of dims
        """
        assert self.row_groups is not None
        return [
            rows.reshape(-1, *(1,) * (p.ndim - 1)) if p.ndim else rows[0]
            for p, rows in zip(self.parameters, values[self.row_groups].split(self.sizes))
        ]
