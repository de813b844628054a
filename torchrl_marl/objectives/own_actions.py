"""Values of an agent's own actions, with the other agents' actions held fixed.

Shapes: B any batch dims, N agents, A action features, C copies of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_marl.functional.statistics import PerGroup
from torchrl_marl.specs import GroupSpec

__all__ = ["ActorGradient", "ValuesOfChoices", "ValuesOfMovedActions", "draw_one_hot"]

ActorGradient = Literal["group", "agent", "all"]
Values = Callable[[TensorDictBase], Tensor]


class ValuesOfMovedActions(nn.Module):
    """Values that each agent's action can change, with others' actions detached.

    Args:
        group (GroupSpec): group that acts.
        actor_gradient ("group", "agent" or "all"): values that an action should increase, as in
            :class:`~torchrl_marl.objectives.MADDPGLoss`.
        device (torch.device, optional): device of the indices.

    Raises:
        ValueError: an unknown ``actor_gradient``.
    """

    moves: Tensor | None
    copy_of: Tensor  # unless it is "all"

    def __init__(
        self, group: GroupSpec, actor_gradient: str, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.key, self.mask_key, self.whose = group.action_key, group.mask_key, actor_gradient
        self.per_group = PerGroup(group.membership, device)
        for name, value in zip(("moves", "copy_of"), _assign_copies(group, actor_gradient)):
            value = None if value is None else value.to(device)
            self.register_buffer(name, value, persistent=False)

    def forward(
        self, data: TensorDictBase, action: Tensor, values: Values, turn: Tensor | None = None
    ) -> Tensor:
        """Returns the values, ``[*B, N, 1]``.

        Args:
            data (TensorDictBase): critics' inputs except actions, ``[*B]``.
            action (Tensor): actions with a gradient, ``[*B, N, A]``.
            values (callable): returns the values ``[*B, N, 1]`` of a step with actions.
            turn (Tensor, optional): agents that learn now, at most one of each group, ``[N]``. All
                other actions are detached. Values to increase that belong to a group are then its
                mean over the agents that act.
        """
        if turn is None:
            return self._evaluate(data, action, values)
        moved = torch.where(turn.unsqueeze(-1), action, action.detach())
        value = self._evaluate(data, moved, values)
        if self.whose == "agent":
            return value
        mask = None if self.mask_key is None else data.get(self.mask_key)
        acts = torch.ones_like(value) if mask is None else mask.unsqueeze(-1).to(value.dtype)
        acts = acts.squeeze(-1)
        total = self.per_group.sum(torch.where(acts > 0, value.squeeze(-1), 0.0))
        mean = self.per_group.to_agents(total / self.per_group.sum(acts).clamp_min(1.0))
        return mean.unsqueeze(-1).expand_as(value)

    def _evaluate(self, data: TensorDictBase, action: Tensor, values: Values) -> Tensor:
        if self.moves is None:
            return values(data.copy().set(self.key, action))
        actions_of_step, n_copies = action.unsqueeze(-3), len(self.moves)
        moved = torch.where(self.moves.unsqueeze(-1), actions_of_step, actions_of_step.detach())
        value = values(_copy_step(data, self.key, n_copies).set(self.key, moved))[..., 0]
        return value.gather(-2, self.copy_of.expand(*value.shape[:-2], 1, -1)).transpose(-2, -1)


class ValuesOfChoices(nn.Module):
    """Values of every discrete action of every agent, with others' sampled actions fixed.

    A step is copied for each action of each agent of a team; members of a population choose in
    parallel. If groups are apart, there are as many copies as the largest group needs, since agents
    of different groups choose in parallel, too.

    Args:
        group (GroupSpec): group that acts.
        actor_gradient ("group", "agent" or "all"): value that a choice should increase. With
            ``"all"`` no agent's value depends on others' actions, and each action needs one copy
            only.
        device (torch.device, optional): device of the indices.
        apart (bool): whether no value depends on the actions of another group.

    Shapes (in addition to those of the module): M agents with separate copies: those of a team, or
    of the largest group if groups are apart.
    """

    mine: Tensor
    actions: Tensor
    place: Tensor | None
    of_group: Tensor  # unless it is "all"

    def __init__(
        self,
        group: GroupSpec,
        actor_gradient: str,
        device: torch.device | str | None = None,
        *,
        apart: bool = False,
    ) -> None:
        super().__init__()
        self.key, self.mask_key, self.whose = group.action_key, group.mask_key, actor_gradient
        self.per_group = PerGroup(group.membership, device)
        owner, n_agents = list(group.group_index), group.n_agents
        in_group = [i - owner.index(k) for i, k in enumerate(owner)]
        place = in_group if apart else [i % _agents_per_team(group) for i in range(n_agents)]
        n_own = max(place) + 1
        mine = F.one_hot(torch.tensor(place), n_own).T  # [M, N]
        buffers: dict[str, Tensor | None] = {
            "mine": mine.bool(),
            "actions": torch.eye(group.n_actions),
        }
        buffers |= {"place": None, "of_group": torch.tensor(owner)}
        if n_own < n_agents:
            buffers["place"] = torch.tensor(place)
        for name, value in buffers.items():
            value = None if value is None else value.to(device)
            self.register_buffer(name, value, persistent=False)

    def forward(
        self, data: TensorDictBase, drawn: Tensor, values: Values, own: bool = False
    ) -> Tensor:
        """Returns the values, ``[*B, N, A]``.

        Args:
            data (TensorDictBase): critics' inputs except actions, ``[*B]``.
            drawn (Tensor): sampled actions, ``[*B, N, A]``, one-hot.
            values (callable): returns the values ``[*B, N, 1]`` of a step with actions.
            own (bool): whether to return each agent's own value for any ``actor_gradient``.
        """
        n_agents, n_actions = drawn.shape[-2:]
        if self.whose == "all":  # [*B, A, N, A]: all agents take the same action
            chosen = self.actions.unsqueeze(-2).expand(*drawn.shape[:-2], -1, n_agents, -1)
            value = values(_copy_step(data, self.key, n_actions).set(self.key, chosen))
            return value[..., 0].transpose(-2, -1)
        n_own = len(self.mine)
        mine = self.mine.reshape(n_own, 1, n_agents, 1)
        others = drawn.unsqueeze(-3).unsqueeze(-3)  # [*B, 1, 1, N, A]
        chosen = torch.where(mine, self.actions.unsqueeze(-2), others).flatten(-4, -3)
        value = values(_copy_step(data, self.key, n_own * n_actions).set(self.key, chosen))
        value = value[..., 0].unflatten(-2, (n_own, n_actions))  # [*B, M, A, whose value]
        if own or self.whose == "agent":
            if self.place is None:
                return value.diagonal(dim1=-3, dim2=-1).transpose(-2, -1)
            return self._pick_for_agents(
                value, torch.arange(n_agents, device=value.device), self.place
            )
        return self._group_mean_of_choices(
            value, None if self.mask_key is None else data.get(self.mask_key)
        )

    def _group_mean_of_choices(self, value: Tensor, mask: Tensor | None) -> Tensor:
        """Returns, for each choosing agent, the mean value of the acting agents of its group."""
        acts = torch.ones_like(value[..., :1, :1, :]) if mask is None else mask[..., None, None, :]
        count = self.per_group.sum(acts.to(value.dtype)).clamp_min(1.0)
        means = self.per_group.sum(torch.where(acts > 0, value, 0.0)) / count  # [*B, M, A, G]
        if self.per_group.membership is None:
            return means[..., 0]
        if self.place is not None:
            return self._pick_for_agents(means, self.of_group, self.place)
        membership = self.per_group.membership.unsqueeze(-2)
        return torch.where(membership > 0, means, 0.0).sum(-1)

    def _pick_for_agents(self, values: Tensor, index: Tensor, place: Tensor) -> Tensor:
        """Picks one of K values for each agent's choices, ``[*B, M, A, K]`` to ``[*B, N, A]``."""
        rows = values.movedim(-1, -3).flatten(-3, -2)  # [*B, K * M, A]
        return rows.index_select(-2, index * len(self.mine) + place)


def draw_one_hot(logits: Tensor) -> Tensor:
    """Samples one-hot actions ``[*B, N, A]`` with a straight-through gradient."""
    probability = logits.softmax(-1)
    with torch.no_grad():  # a race of exponential samples; NaN raises no error here
        drawn = (probability / torch.empty_like(probability).exponential_()).argmax(-1)
    hard = F.one_hot(drawn, logits.shape[-1]).to(logits.dtype)
    return hard + probability - probability.detach()


def _copy_step(data: TensorDictBase, key: object, n_copies: int) -> TensorDictBase:
    """Returns ``[*B, C]`` copies of a step without its actions."""
    data = data.exclude(key).unsqueeze(-1)
    return data.expand(*data.shape[:-1], n_copies)


def _assign_copies(group: GroupSpec, actor_gradient: str) -> tuple[Tensor | None, Tensor | None]:
    """Returns the agents with moved actions in each copy, ``[C, N]``, and each agent's copy.

    Members of a population move in the same copies, since no value depends on another member.
    """
    if actor_gradient not in ("group", "agent", "all"):
        raise ValueError(
            f"actor_gradient is {actor_gradient!r}, expected 'group', 'agent' or 'all'."
        )
    if actor_gradient == "all":
        return None, None
    if actor_gradient == "agent":
        copy_of = torch.arange(group.n_agents) % _agents_per_team(group)
    else:
        copy_of = torch.tensor(group.group_index) % (len(group.groups) // len(set(group.teams)))
    n_copies = int(copy_of.max()) + 1
    if n_copies == 1:
        return None, None
    return F.one_hot(copy_of, n_copies).T.bool(), copy_of


def _agents_per_team(group: GroupSpec) -> int:
    """Returns the number of agents of one member of a population; without one, of all agents."""
    return group.n_agents // len(set(group.teams))
