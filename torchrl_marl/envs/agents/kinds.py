"""Groups of several kinds of agents: their data by kind, stacked lazily or dense.

Shapes: B any batch dims, E envs, N agents of a group, M agents of a kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Composite, TensorSpec
from torchrl.data.tensor_specs import Stacked, StackedComposite

from torchrl_marl.specs import AgentSpec, GroupSpec
from torchrl_marl.stacking import Padding, is_lazy, unpad_group

__all__ = ["GroupKinds", "batched", "joined", "map_leaves"]


@dataclass(frozen=True)
class GroupKinds:
    """The kinds of agents within one group, in the order of registration.

    Args:
        names (tuple of str): the kinds.
        sizes (tuple of int): how many agents M each kind has.
        paddings (mapping): leaf -> padding, of the leaves in which the agents' shapes differ;
            the group's data are stacked lazily where there are such.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    paddings: Mapping[NestedKey, Padding]

    @classmethod
    def of(cls, kinds: Sequence[AgentSpec], group: GroupSpec) -> GroupKinds:
        """Builds the kinds of a declared group."""
        names = tuple(kind.name for kind in kinds)
        return cls(names, tuple(kind.n_agents for kind in kinds), group.paddings)

    @property
    def lazy(self) -> bool:
        """Whether the group's data are stacked lazily."""
        return bool(self.paddings)

    @property
    def slices(self) -> dict[str, slice]:
        """Kind -> its agents' places in the group."""
        ends = [sum(self.sizes[: i + 1]) for i in range(len(self.sizes))]
        places = (slice(end - n, end) for end, n in zip(ends, self.sizes))
        return dict(zip(self.names, places))

    def ragged(self, leaf: str) -> bool:
        """Returns whether a leaf, or one inside it, differs in shape between the kinds."""
        return any(leaf == (key if isinstance(key, str) else key[0]) for key in self.paddings)

    def parts(self, leaves: Mapping[str, Any], leaf: str) -> dict[str, Any]:
        """Maps kinds to their leaves ``[E, M, ...]``, or ``""`` to all agents' ``[E, N, ...]``."""
        if leaf in leaves:
            return {"": leaves[leaf]}
        return {name: leaves[name][leaf] for name in self.names}

    def acting(self, actions: Mapping[str, Any], mask: Tensor) -> dict[str, Any]:
        """Returns the actions, with zeros for agents that do not act; mask: ``[E, N]``."""
        zeroed: dict[str, Any] = {}
        for kind, action in self.parts(actions, "action").items():
            acts = mask[:, self.slices[kind]] if kind else mask
            acts = acts.view(*acts.shape, *[1] * (action.ndim - acts.ndim))
            action = torch.where(acts, action, torch.zeros_like(action))
            zeroed.update({kind: {"action": action}} if kind else {"action": action})
        return zeroed

    def split(self, group: TensorDictBase) -> dict[str, TensorDictBase]:
        """Splits a group by kind into dense data; the group may be lazy, padded or dense.

        Shapes:
            - group: ``[*B, N]``; returns ``[*B, M]`` a kind
        """
        last = group.ndim - 1
        if self.lazy and not is_lazy(group):
            group = unpad_group(group, self.paddings)
        if is_lazy(group):
            members = list(group.unbind(last))
            return {name: _stacked(members[place], last) for name, place in self.slices.items()}
        return {name: group[..., place] for name, place in self.slices.items()}

    def stacked(
        self, leaves: Mapping[str, Any], batch_size: torch.Size, device: torch.device | None
    ) -> LazyStackedTensorDict:
        """Stacks a group lazily from views.

        Args:
            leaves (mapping): kind -> its own leaves ``[E, M, ...]``, and leaves of all agents
                ``[E, N, ...]``.
            batch_size (torch.Size): ``[E]``.
            device (torch.device, optional): of the data.
        """
        shared = {key: x for key, x in leaves.items() if key not in self.names}
        members = []
        for name, place in self.slices.items():
            rows = {**map_leaves(shared, lambda x, at=place: x[:, at]), **leaves.get(name, {})}
            for i in range(place.stop - place.start):
                row = map_leaves(rows, lambda x, at=i: x[:, at])
                members.append(TensorDict(row, batch_size, device))
        return LazyStackedTensorDict(*members, stack_dim=len(batch_size))

    def written(self, group: TensorDictBase, leaves: Mapping[str, Any]) -> TensorDictBase:
        """Returns a copy of a group with new leaves, of all agents or by kind."""
        if not self.lazy:
            return group.clone(recurse=False).update(dict(leaves))
        own = self.stacked(leaves, group.batch_size[:-1], group.device).unbind(1)
        rows = [old.clone(recurse=False).update(new) for old, new in zip(group.unbind(1), own)]
        return LazyStackedTensorDict(*rows, stack_dim=1)


def _stacked(members: list[TensorDictBase], dim: int) -> TensorDictBase:
    stack = LazyStackedTensorDict.maybe_dense_stack(members, dim)
    return stack.to_tensordict() if is_lazy(stack) else stack


def map_leaves(nested: Mapping[str, Any], function: Any) -> dict[str, Any]:
    """Applies a function to every tensor of nested dicts."""
    return {
        key: map_leaves(x, function) if isinstance(x, Mapping) else function(x)
        for key, x in nested.items()
    }


def joined(values: Sequence[Any]) -> Any:
    """Concatenates leaves ``[E, M, ...]`` of the kinds, or dicts of them, to ``[E, N, ...]``."""
    if isinstance(values[0], Tensor):
        return torch.cat(list(values), 1)
    return {key: joined([value[key] for value in values]) for key in values[0]}


def batched(spec: TensorSpec, batch_size: torch.Size) -> TensorSpec:
    """Adds batch dims in front of a spec; unlike TorchRL's ``expand`` it keeps masks of choices."""
    if isinstance(spec, (Stacked, StackedComposite)):
        members = [batched(member, batch_size) for member in spec.unbind(spec.dim)]
        return torch.stack(members, spec.dim + len(batch_size))
    shape = (*batch_size, *spec.shape)
    if isinstance(spec, Composite):
        leaves = {key: batched(leaf, batch_size) for key, leaf in spec.items()}
        return Composite(leaves, shape=shape, device=spec.device)
    expanded = spec.expand(shape).clone()
    if getattr(spec, "mask", None) is not None:
        expanded.update_mask(spec.mask)  # type: ignore[attr-defined]
    return expanded
