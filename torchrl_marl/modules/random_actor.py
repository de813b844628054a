"""Agents that act at random: opponents and baselines.

Shapes: B any batch dims, N agents, A action features.
"""

from __future__ import annotations

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torchrl.data import Bounded

from torchrl_marl.specs import GroupSpec
from torchrl_marl.specs.checks import check_action_mask, check_rows

__all__ = ["RandomActor"]


class RandomActor(TensorDictModuleBase):
    """Uniform random actions for a group, legal ones where there are action masks.

    Unbounded continuous actions are drawn from a standard normal.

    Args:
        group (GroupSpec): who acts.
        device (torch.device, optional): of the actions.

    Shapes:
        - action: ``[*B, N, A]``, ``[*B, N]`` or one-hot ``[*B, N, n_actions]``

    Keys:
        - reads: ``group.action_mask_key``
        - writes: ``group.action_key``

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import Bounded, Unbounded
        >>> from torchrl_marl import AgentSpec, TeamSpec
        >>> team = TeamSpec([AgentSpec("prey", 3, Unbounded((4,)), Bounded(-1, 1, (2,)))])
        >>> td = TensorDict({"prey": {"observation": torch.zeros(5, 3, 4)}}, [5])
        >>> RandomActor(team.groups["prey"])(td)["prey", "action"].shape
        torch.Size([5, 3, 2])
    """

    own: Tensor | None
    low: Tensor | None
    high: Tensor | None

    def __init__(self, group: GroupSpec, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.group = group
        self.in_keys: list[NestedKey] = [group.action_mask_key] if group.action_mask_key else []
        self.out_keys: list[NestedKey] = [group.action_key]
        spec = group.padded_spec["action"]
        if not group.discrete and not spec.dtype.is_floating_point:
            raise ValueError(
                f"group {group.name!r}: {type(spec).__name__} actions are not drawn here, "
                "expected Bounded, Unbounded, Categorical or OneHot."
            )
        bounds = group.action_bounds if isinstance(spec, Bounded) else None
        for name, value in (
            ("own", group.action_padding),
            ("low", None if bounds is None else bounds[0]),
            ("high", None if bounds is None else bounds[1]),
        ):
            value = None if value is None else value.to(device)
            self.register_buffer(name, value, persistent=False)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Draws."""
        self.group.write(tensordict, "action", self.draw(tensordict))
        return tensordict

    def draw(self, tensordict: TensorDictBase) -> Tensor:
        """Returns dense actions, and writes nothing."""
        own = self.group.data(tensordict)
        check_rows(self.group, own, tensordict.batch_size)
        shape = torch.Size((*tensordict.batch_size, self.group.n_agents))
        return self._discrete(own, shape) if self.group.discrete else self._continuous(own, shape)

    def _continuous(self, own: TensorDictBase, shape: torch.Size) -> Tensor:
        shape = torch.Size((*shape, self.group.action_dim))
        if self.low is None or self.high is None:
            action = torch.randn(shape, device=own.device)
            return action if self.own is None else torch.where(self.own, action, 0.0)
        return self.low + (self.high - self.low) * torch.rand(shape, device=self.low.device)

    def _discrete(self, own: TensorDictBase, shape: torch.Size) -> Tensor:
        group, n = self.group, self.group.n_actions
        legal = None if group.action_mask_key is None else own.get("action_mask")
        if legal is None:
            legal = torch.ones((*shape, n), dtype=torch.bool, device=own.device)
        else:
            check_action_mask(group, legal, shape[:-1])
        legal = legal if self.own is None else legal & self.own
        # Agents without a legal action do not act: any will do.
        legal = legal | ~legal.any(-1, keepdim=True)
        legal = legal if self.own is None else legal & self.own
        action = torch.multinomial(legal.float().flatten(0, -2), 1).view(shape)
        dtype = group.padded_spec["action"].dtype
        return nn.functional.one_hot(action, n).to(dtype) if group.one_hot else action.to(dtype)
