"""Converts lazily stacked groups to padded, dense groups, and back; no data are lost.

TorchRL stacks the data of agents with different shapes lazily, but learners need one dense tensor.
Each leaf is padded with zeros to the largest shape among the agents. If an agent lacks a leaf, the
agent's whole entry is padding.

Shapes: B any batch dims, N agents of a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from tensordict import (
    LazyStackedTensorDict,
    NestedKey,
    TensorDict,
    TensorDictBase,
    is_leaf_nontensor,
)
from torch import Tensor
from torch.types import Device
from torchrl.data import Bounded, Categorical, Composite, OneHot, TensorSpec, Unbounded

__all__ = [
    "Padding",
    "agents_differ",
    "pad",
    "pad_group",
    "pad_specs",
    "paddings_of",
    "unpad",
    "unpad_group",
    "unpad_specs",
]

# Subclasses are not included, because their actions consist of several choices.
_DISCRETE_SPECS = (Categorical, OneHot)


@dataclass(frozen=True)
class Padding:
    """Padding of one leaf, given by the shape of each agent's entry.

    Args:
        shapes (tuple of tuple or None): shape of each agent's entry; None for agents without the
            leaf.

    Raises:
        ValueError: the shapes have different numbers of dims.

    Examples:
        >>> padding = Padding(((2,), (3,), None))
        >>> padding.largest, padding.mask()[0]
        ((3,), tensor([ True,  True, False]))
    """

    shapes: tuple[tuple[int, ...] | None, ...]

    def __post_init__(self) -> None:
        if len({len(shape) for shape in self.shapes if shape is not None}) > 1:
            raise ValueError(
                f"agents of one group have leaves of shapes {list(self.shapes)}, expected one "
                "number of dims; put each kind into its own group."
            )

    @cached_property
    def largest(self) -> tuple[int, ...]:
        """Padded shape: in each dim, the largest size of any agent."""
        return tuple(max(sizes) for sizes in zip(*(s for s in self.shapes if s is not None)))

    def own(self, agent: int) -> tuple[slice, ...] | None:
        """Returns the slices of an agent's entry in the padded shape; None if it lacks the leaf."""
        shape = self.shapes[agent]
        return None if shape is None else tuple(slice(size) for size in shape)

    def mask(self, device: Device = None) -> Tensor:
        """Returns a mask ``[N, *largest]`` that is False in padding."""
        mask = torch.zeros(len(self.shapes), *self.largest, dtype=torch.bool)
        for i in range(len(self.shapes)):
            if (region := self.own(i)) is not None:
                mask[_index_of_agent(i, region)] = True
        return mask.to(device)


def _index_of_agent(agent: int, region: tuple[slice, ...]) -> Any:
    return (..., agent, *region)


# ------------------------------------------------------------------------------------ tensors


def pad(values: Sequence[Tensor | None], padding: Padding, what: str = "") -> Tensor:
    """Pads the tensors of the agents with zeros, and stacks them.

    Args:
        values (sequence of Tensor or None): one tensor per agent.
        padding (Padding): padding, which gives the shapes of the values.
        what (str): name of the values in error messages.

    Shapes:
        - values: ``[*B, *own]``; returns: ``[*B, N, *largest]``

    Raises:
        ValueError: a value has a wrong shape.

    Examples:
        >>> padded = pad([torch.ones(4, 2), torch.ones(4, 3)], Padding(((2,), (3,))))
        >>> padded.shape, padded[0]
        (torch.Size([4, 2, 3]), tensor([[1., 1., 0.],
                [1., 1., 1.]]))
    """
    ndim = len(padding.largest)
    first = next(value for value in values if value is not None)
    batch = first.shape[: first.ndim - ndim]
    padded = first.new_zeros((*batch, len(values), *padding.largest))
    for i, (value, shape) in enumerate(zip(values, padding.shapes, strict=True)):
        found = None if value is None else tuple(value.shape[len(batch) :])
        if found != shape:
            raise ValueError(
                f"{what and what + ' of '}agent {i} has shape {found}, expected {shape}."
            )
        if value is not None:
            padded[_index_of_agent(i, padding.own(i) or ())] = value
    return padded


def unpad(value: Tensor, padding: Padding) -> list[Tensor | None]:
    """Returns a view of each agent's entry in a padded tensor.

    Shapes:
        - value: ``[*B, N, *largest]``; returns: N tensors ``[*B, *own]``

    Reduces to: the inverse of :func:`pad`.
    """
    regions = [padding.own(i) for i in range(len(padding.shapes))]
    return [None if r is None else value[_index_of_agent(i, r)] for i, r in enumerate(regions)]


# ------------------------------------------------------------------------------------- groups


def agents_differ(group: TensorDictBase) -> bool:
    """Returns True if the agents of a group ``[*B, N]`` are stacked lazily, not only its steps."""
    if not isinstance(group, LazyStackedTensorDict):
        return False
    return group.stack_dim == group.ndim - 1 or agents_differ(group.tensordicts[0])


def pad_group(
    group: TensorDictBase, paddings: Mapping[NestedKey, Padding] | None = None
) -> TensorDictBase:
    """Converts a lazily stacked group to a dense group; returns a dense group unchanged.

    Args:
        group (TensorDictBase): data of the group, with the agents in the last batch dim.
        paddings (mapping, optional): padding by leaf, from :func:`paddings_of`. Other leaves are
            padded to the largest shape in the data.

    Shapes:
        - group: ``[*B, N]``; leaves: from ``[*B, *own]`` per agent to ``[*B, N, *largest]``
    """
    if not isinstance(group, LazyStackedTensorDict):
        return group
    members = group.unbind(group.ndim - 1)
    keys = dict.fromkeys(key for m in members for key in m.keys(True, True, is_leaf_nontensor))
    dense = TensorDict({}, group.batch_size, device=group.device, names=_dim_names(group))
    ndim = group.ndim - 1
    for key in keys:
        values = [member.get(key, None) for member in members]
        padding = None if paddings is None else paddings.get(key)
        shapes = tuple(None if v is None else tuple(v.shape[ndim:]) for v in values)
        padding = Padding(shapes) if padding is None else padding
        if all(shape == padding.largest for shape in shapes):
            dense.set(key, torch.stack(cast(list[Tensor], values), ndim))
        else:
            dense.set(key, pad(values, padding, repr(key)))
    return dense


def unpad_group(
    group: TensorDictBase, paddings: Mapping[NestedKey, Padding]
) -> LazyStackedTensorDict:
    """Converts a dense group to a lazily stacked group; its tensors are views of the dense ones.

    Reduces to: the inverse of :func:`pad_group`.

    Examples:
        >>> paddings = {"observation": Padding(((2,), (3,)))}
        >>> dense = TensorDict({"observation": torch.ones(4, 2, 3)}, [4, 2])
        >>> lazy = unpad_group(dense, paddings)
        >>> [member["observation"].shape for member in lazy.unbind(1)]
        [torch.Size([4, 2]), torch.Size([4, 3])]
    """
    batch, names = group.shape[:-1], _dim_names(group)
    names = None if names is None else names[:-1]
    members = [
        TensorDict({}, batch, device=group.device, names=names) for _ in range(group.shape[-1])
    ]
    for key, value in group.items(True, True):
        padding = paddings.get(key)
        entries = value.unbind(len(batch)) if padding is None else unpad(value, padding)
        for member, entry in zip(members, entries):
            if entry is not None:
                member.set(key, entry)
    return LazyStackedTensorDict(*members, stack_dim=len(batch))


def _dim_names(group: TensorDictBase) -> list[str | None] | None:
    # A rollout names its dims, so a group with unnamed dims could not be written to it.
    return group.names if any(group.names) else None


# -------------------------------------------------------------------------------------- specs


def paddings_of(members: Sequence[Composite]) -> dict[NestedKey, Padding]:
    """Returns the padding of each leaf that has different shapes in different agents.

    Args:
        members (sequence of Composite): specs of each agent, without batch dims.

    Raises:
        ValueError: a leaf has different numbers of dims.
    """
    paddings = {}
    for key in _leaf_keys(members):
        leaves = [member.get(key, None) for member in members]
        shapes = tuple(None if leaf is None else tuple(leaf.shape) for leaf in leaves)
        if len(set(shapes)) > 1:
            paddings[key] = Padding(shapes)
    return paddings


def pad_specs(members: Sequence[Composite], where: str = "a group") -> Composite:
    """Pads the specs of the agents, and stacks them to one dense spec ``[N]``.

    Padded entries of bounded specs have lower and upper bound 0. Discrete actions that exist only
    as padding are masked.

    Args:
        members (sequence of Composite): specs of each agent, without batch dims.
        where (str): name of the group in error messages.

    Raises:
        ValueError: a leaf has different types or dtypes.

    Examples:
        >>> speaker = Composite(action=Bounded(-1, 1, (3,)))
        >>> listener = Composite(action=Bounded(-2, 2, (2,)))
        >>> pad_specs([speaker, listener])["action"].space.high
        tensor([[1., 1., 1.],
                [2., 2., 0.]])
    """
    paddings = paddings_of(members)
    dense = Composite(shape=(len(members),))
    for key in _leaf_keys(members):
        leaves = [member.get(key, None) for member in members]
        shape = tuple(next(leaf for leaf in leaves if leaf is not None).shape)
        padding = paddings.get(key) or Padding((shape,) * len(members))
        dense[key] = _pad_leaf_specs(leaves, padding, f"{where}: {key!r}")
    return dense


def unpad_specs(spec: Composite, paddings: Mapping[NestedKey, Padding]) -> list[Composite]:
    """Returns the specs of each agent from a padded spec.

    Reduces to: the inverse of :func:`pad_specs`.
    """
    members = [Composite() for _ in range(spec.shape[-1])]
    for key in spec.keys(True, True):
        leaf, padding = spec[key], paddings.get(key)
        shape = tuple(leaf.shape[1:])
        for i, member in enumerate(members):
            leaf_shape = shape if padding is None else padding.shapes[i]
            if leaf_shape is not None:
                member[key] = _unpad_leaf_spec(leaf, i, leaf_shape)
    return members


def _leaf_keys(members: Sequence[Composite]) -> list[NestedKey]:
    return list(dict.fromkeys(key for member in members for key in member.keys(True, True)))


def _pad_leaf_specs(
    leaves: Sequence[TensorSpec | None], padding: Padding, where: str
) -> TensorSpec:
    present = [leaf for leaf in leaves if leaf is not None]
    first = present[0]
    # torch.stack drops masks, so specs with masks are stacked without it.
    masked = type(first) in _DISCRETE_SPECS and first.mask is not None
    if len(present) == len(leaves) and all(leaf == first for leaf in present) and not masked:
        return torch.stack(present, 0)
    if len({leaf.dtype for leaf in present}) == 1:
        shape = (len(leaves), *padding.largest)
        if all(type(leaf) in _DISCRETE_SPECS for leaf in present):
            if len({type(leaf) for leaf in present}) == 1:
                return _pad_discrete_specs(leaves, shape)
        elif all(isinstance(leaf, Unbounded) for leaf in present):
            return Unbounded(shape, dtype=first.dtype, device=first.device)
        elif all(isinstance(leaf, (Bounded, Unbounded)) for leaf in present):
            low, high = (_pad_bounds(leaves, padding, side) for side in ("low", "high"))
            return Bounded(low, high, dtype=first.dtype, device=first.device)
    found = sorted({f"{type(leaf).__name__} of {leaf.dtype}" for leaf in present})
    raise ValueError(
        f"{where} is {' and '.join(found)} for agents of one group, expected one type and dtype; "
        "put each kind into its own group."
    )


def _pad_bounds(leaves: Sequence[TensorSpec | None], padding: Padding, side: str) -> Tensor:
    def bounds(leaf: TensorSpec | None) -> Tensor | None:
        if leaf is None:
            return None
        if isinstance(leaf, Bounded):
            return getattr(leaf.space, side)
        infinite = -torch.inf if side == "low" else torch.inf
        return torch.full(leaf.shape, infinite, dtype=leaf.dtype, device=leaf.device)

    return pad([bounds(leaf) for leaf in leaves], padding)


def _pad_discrete_specs(leaves: Sequence[TensorSpec | None], shape: tuple[int, ...]) -> TensorSpec:
    one_hot = isinstance(next(leaf for leaf in leaves if leaf is not None), OneHot)
    n = max(leaf.space.n for leaf in leaves if leaf is not None)
    allowed = torch.zeros(*(shape[:-1] if one_hot else shape), n, dtype=torch.bool)
    for i, leaf in enumerate(leaves):
        if leaf is not None:
            leaf_mask = leaf.mask if leaf.mask is not None else torch.tensor(True)
            allowed[i, ..., : leaf.space.n] = leaf_mask.to(allowed.device)
        else:
            allowed[i, ..., 0] = True  # one choice must be allowed, even for an unused entry
    first = next(leaf for leaf in leaves if leaf is not None)
    kind = OneHot if one_hot else Categorical
    mask = None if bool(allowed.all()) else allowed.to(first.device)
    return kind(n, shape=torch.Size(shape), dtype=first.dtype, device=first.device, mask=mask)


def _unpad_leaf_spec(leaf: TensorSpec, agent: int, shape: tuple[int, ...]) -> TensorSpec:
    options = {"dtype": leaf.dtype, "device": leaf.device}
    region = tuple(slice(size) for size in shape)
    if isinstance(leaf, Bounded):
        low, high = leaf.space.low[(agent, *region)], leaf.space.high[(agent, *region)]
        if bool(torch.isinf(low).all() & torch.isinf(high).all()):
            return Unbounded(shape, **options)
        return Bounded(low, high, **options)
    if isinstance(leaf, Unbounded):
        return Unbounded(shape, **options)
    if type(leaf) in _DISCRETE_SPECS:
        if leaf.mask is None:
            return type(leaf)(leaf.space.n, shape=shape, **options)
        n = int(leaf.mask[agent].reshape(-1, leaf.space.n).any(0).nonzero()[-1]) + 1
        leaf_mask = leaf.mask[agent][..., :n]
        return type(leaf)(
            n, shape=shape, mask=None if bool(leaf_mask.all()) else leaf_mask, **options
        )
    return leaf[agent]
