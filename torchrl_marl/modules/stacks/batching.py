"""Runs the members of a stack as few batched calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils import _pytree as pytree

from torchrl_marl.modules.stacks.matmul import Call, Pads
from torchrl_marl.modules.stacks.storage import (
    Bucket,
    call_with,
    has_hooks,
    input_width,
    keep_assigned,
)

__all__ = ["EXECUTORS", "Batching", "Place", "choose_executor", "run", "run_chosen"]

EXECUTORS = ("matmul", "vmap", "loop")


def run(bucket: Bucket, members: Sequence[int], copies: int, dim: int, inputs: Any) -> Any:
    """Runs the given members of one structure, each for the same number of agents.

    Args:
        bucket (Bucket): the structure.
        members (sequence of int): indices of K members.
        copies (int): number n of agents per member.
        dim (int): agent dim of inputs and outputs; agents are ordered by member.
        inputs (sequence): positional inputs, pytrees of tensors.
    """
    every = len(members) == bucket.n_members
    values = bucket.read(None if every else members)
    pads = bucket.pads(_device_of(inputs), members) if bucket.padded else None
    output = _run_executor(bucket, values, (len(members), copies), dim, inputs, pads)
    bucket.write_back(members, values)
    return output


def run_chosen(bucket: Bucket, chosen: Tensor, dim: int, inputs: Any) -> Any:
    """Runs some agents of a structure in which agent k has member k; outputs of others are 0.

    Args:
        bucket (Bucket): the structure.
        chosen (Tensor): indices of the agents to run, ``[K]``, each at most once. It may be an
            input of a captured graph, which then serves any choice of K agents.
        dim (int): agent dim of inputs and outputs.
        inputs (sequence): positional inputs of all agents, pytrees of tensors.
    """

    def pick(x: Any) -> Any:
        return x.index_select(dim, chosen) if isinstance(x, Tensor) else x

    def place(y: Tensor) -> Tensor:
        shape = (*y.shape[:dim], bucket.n_members, *y.shape[dim + 1 :])
        return y.new_zeros(shape).index_copy(dim, chosen, y)

    stacked = bucket.stacked
    values = {n: x.index_select(0, chosen) if stacked[n] else x for n, x in bucket.read().items()}
    pads = None
    if bucket.padded:
        every = bucket.pads(_device_of(inputs), range(bucket.n_members))
        pads = tuple(None if own is None else own.index_select(0, chosen) for own in every)
    inputs = pytree.tree_map(pick, inputs)
    output = _run_executor(bucket, values, (len(chosen), 1), dim, inputs, pads)
    return pytree.tree_map(place, output)


def _device_of(inputs: Any) -> torch.device:
    return next(x.device for x in pytree.tree_leaves(inputs) if isinstance(x, Tensor))


def _run_executor(
    bucket: Bucket,
    values: dict[str, Tensor],
    shape: tuple[int, int],
    dim: int,
    inputs: Any,
    pads: Pads | None,
) -> Any:
    if bucket.executor == "matmul":
        assert bucket.plan is not None
        return bucket.plan.run(Call(values, bucket.stacked, shape, dim), inputs, pads)
    runner = run_vmap if bucket.executor == "vmap" else run_loop
    return runner(bucket, values, shape, dim, inputs)


def run_vmap(
    bucket: Bucket, values: dict[str, Tensor], shape: tuple[int, int], dim: int, inputs: Any
) -> Any:
    """Runs all agents in one call; agents of one member read its parameters without a copy."""
    members, copies = shape
    leaves, structure = pytree.tree_flatten(tuple(inputs))
    template = bucket.template

    def call(parameters: dict[str, Tensor], *own: Any) -> Any:
        args, now = pytree.tree_unflatten(list(own), structure), dict(parameters)
        output = functional_call(template, now, args, tie_weights=False)
        assigned = {n: now[n] for n in bucket.buffer_names if now[n] is not parameters[n]}
        if assigned and copies > 1:
            raise ValueError(
                f"agents share a {type(template).__name__}, whose forward assigns its buffer "
                f"{next(iter(assigned))!r}; use executor='loop'."
            )
        return output, assigned

    function: Callable[..., Any] = call
    in_dims = tuple(dim if isinstance(leaf, Tensor) else None for leaf in leaves)
    if copies > 1:
        function = vmap(function, (None, *in_dims), (dim, 0), randomness="different")
        leaves = [x.unflatten(dim, shape) if isinstance(x, Tensor) else x for x in leaves]
    if members > 1:
        stacked = {name: 0 if bucket.stacked[name] else None for name in values}
        function = vmap(function, (stacked, *in_dims), (dim, 0), randomness="different")
    else:
        values = {n: v.squeeze(0) if bucket.stacked[n] else v for n, v in values.items()}
        leaves = [leaf.squeeze(dim) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    output, assigned = function(values, *leaves)
    keep_assigned(values, assigned)
    if members == 1:
        output = pytree.tree_map(lambda y: y.unsqueeze(dim), output)
    if copies > 1:
        output = pytree.tree_map(lambda y: y.flatten(dim, dim + 1), output)
    return output


def run_loop(
    bucket: Bucket, values: dict[str, Tensor], shape: tuple[int, int], dim: int, inputs: Any
) -> Any:
    """Runs the agents in a loop: the slow reference of the other executors."""
    members, copies = shape
    leaves, structure = pytree.tree_flatten(tuple(inputs))
    n = members * copies
    agents = [leaf.unbind(dim) if isinstance(leaf, Tensor) else (leaf,) * n for leaf in leaves]
    rows = {
        name: _rows_of_members(value, bucket.stacked[name], members)
        for name, value in values.items()
    }
    outputs = []
    for agent in range(n):
        own = pytree.tree_unflatten([leaf[agent] for leaf in agents], structure)
        row = {name: tensors[agent // copies] for name, tensors in rows.items()}
        outputs.append(pytree.tree_flatten(call_with(bucket.template, row, own)))
    stacked = [torch.stack(list(parts), dim) for parts in zip(*(leaves for leaves, _ in outputs))]
    return pytree.tree_unflatten(stacked, outputs[0][1])


def _rows_of_members(value: Tensor, stacked: bool, members: int) -> Sequence[Tensor]:
    if not stacked:
        return (value,) * members
    if value.requires_grad:
        return value.unbind(0)
    # Buffers are written in place, which autograd forbids for the results of unbind.
    return [value[k] for k in range(members)]


def choose_executor(bucket: Bucket, copies: int, event_dims: int) -> str:
    """Returns the fastest executor that can run a structure; vmap is tried on zeros.

    Args:
        bucket (Bucket): the structure.
        copies (int): largest number of agents that share a member.
        event_dims (int): number of feature dims of the first input.
    """
    template = bucket.template
    if bucket.plan is not None:
        return "matmul"
    kinds = tuple(type(module) for module in template.modules())
    # vmap has no rule for the first and a slow one for the second.
    if has_hooks(template) or any(issubclass(k, nn.RNNBase | nn.RNNCellBase) for k in kinds):
        return "loop"
    if copies > 1 and any(issubclass(k, nn.modules.batchnorm._NormBase) for k in kinds):
        return "loop"
    return "vmap" if _vmap_works(bucket, copies, event_dims) else "loop"


@torch.no_grad()
def _vmap_works(bucket: Bucket, copies: int, event_dims: int) -> bool:
    """Returns whether vmap works: tried if the input's width is known, otherwise assumed."""
    widths = (input_width(module) for module in bucket.template.modules())
    width = next((width for width in widths if width is not None), None)
    if event_dims != 1 or width is None:
        return True
    values = {name: value.detach().clone() for name, value in bucket.read().items()}
    some = next(iter(values.values()))
    x = torch.zeros(3, bucket.n_members * copies, width, dtype=some.dtype, device=some.device)
    with torch.random.fork_rng(devices=[some.device] if some.is_cuda else []):
        try:
            bucket.copy_of(0)(x[:, 0])
        except Exception:
            return True  # it takes another input, so the trial shows nothing
        try:
            run_vmap(bucket, values, (bucket.n_members, copies), 1, (x,))
        except Exception:
            return False
    return True


Place = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class BatchedCall:
    """Agents that run in one call: members of one structure, each with equally many agents.

    Args:
        bucket (int): index of the structure.
        members (tuple of int): indices of its members.
        copies (int): number of agents per member.
        agents (tuple of int): the agents, ordered by member.
    """

    bucket: int
    members: tuple[int, ...]
    copies: int
    agents: tuple[int, ...]


def batched_calls(places: Sequence[Place]) -> tuple[BatchedCall, ...]:
    """Returns the batched calls for agents; each agent's member is given as (bucket, member)."""
    agents: dict[Place, list[int]] = {}
    for agent, place in enumerate(places):
        agents.setdefault(place, []).append(agent)
    ordered = sorted(agents, key=lambda place: (place[0], len(agents[place]), place[1]))
    routes = []
    for (bucket, copies), group in groupby(ordered, lambda p: (p[0], len(agents[p]))):
        members = tuple(group)
        own = tuple(agent for place in members for agent in agents[place])
        routes.append(BatchedCall(bucket, tuple(k for _, k in members), copies, own))
    return tuple(sorted(routes, key=lambda route: route.agents[0]))


class Batching:
    """Splits agents' inputs, runs the structures and merges the outputs.

    Args:
        places (sequence of (bucket, member)): member of each agent.
        buckets (sequence of Bucket): the structures.
        event_dims (int): number of feature dims of every input.
        pad (bool): whether dense inputs and outputs are padded to the widest agent.

    Attributes:
        chosen (Tensor, optional): agents to run, see :func:`run_chosen`. It has no effect if agents
            share members or have different structures.
    """

    chosen: Tensor | None = None

    def __init__(
        self, places: Sequence[Place], buckets: Sequence[Bucket], event_dims: int, pad: bool
    ) -> None:
        self.n_agents = len(places)
        self.event_dims = event_dims
        self.pad = pad
        self.routes = batched_calls(places)
        order = [agent for route in self.routes for agent in route.agents]
        self.order: list[int] | None = None if order == sorted(order) else order
        self.inverse = sorted(range(len(order)), key=order.__getitem__)
        self.sizes = [len(route.agents) for route in self.routes]
        self.widths = [buckets[b].width(k) if event_dims == 1 else None for b, k in places]
        self.outputs = [buckets[b].width(k, output=True) for b, k in places]
        self.stored = [buckets[route.bucket].stored_width() for route in self.routes]
        stored = [buckets[b].stored_width(output=True) for b, _ in places]
        self.uneven = stored != self.outputs
        known = {width for width in self.widths if width is not None}
        self.expected = max(known) if known and (pad or len(known) == 1) else None
        self._indices_by_device: dict[torch.device, tuple[Tensor, Tensor]] = {}
        [first, *others] = self.routes
        members = tuple(range(buckets[first.bucket].n_members))
        # Statistics that a forward writes stay in one place.
        plain = next(buckets[first.bucket].buffers(), None) is None
        separate = plain and not others and first.copies == 1 and first.members == members
        self._supports_chosen = separate and self.order is None

    def __call__(self, buckets: Sequence[Bucket], inputs: tuple[Any, ...]) -> Any:
        """Runs all agents."""
        if len(inputs) == 1 and isinstance(inputs[0], Tensor):
            leaves, structure = list(inputs), None
        else:
            leaves, structure = pytree.tree_flatten(inputs, is_leaf=lambda x: isinstance(x, list))
        ragged = any(isinstance(leaf, list) for leaf in leaves)
        batch = self._check_inputs(leaves, len(inputs))
        dim = 0 if ragged else batch
        pieces = [self._split_leaf(leaf, dim) for leaf in leaves]
        outputs = []
        for i, route in enumerate(self.routes):
            own = [piece[i] for piece in pieces]
            args = own if structure is None else pytree.tree_unflatten(own, structure)
            bucket = buckets[route.bucket]
            if self.chosen is not None and self._supports_chosen:
                outputs.append(run_chosen(bucket, self.chosen, dim, args))
            else:
                outputs.append(run(bucket, route.members, route.copies, dim, args))
        return self._merge_outputs(outputs, dim, batch, ragged)

    def _check_inputs(self, leaves: Sequence[Any], n_inputs: int) -> int:
        """Checks the number of agents and their widths; returns the number of batch dims."""
        first = next((x for x in leaves if x is not None), None)
        if first is None:
            raise ValueError("a module stack needs an input, found none.")
        for leaf in leaves:
            if isinstance(leaf, list):
                n = len(leaf)
            elif leaf is None or leaf.ndim <= self.event_dims:
                n = 0
            else:
                n = leaf.shape[-1 - self.event_dims]
            if n != self.n_agents and leaf is not None:
                found = f"a list of {n}" if isinstance(leaf, list) else f"shape {list(leaf.shape)}"
                raise ValueError(
                    f"the stack has {self.n_agents} agents, found an input of {found}; expected "
                    f"[*batch, {self.n_agents}, *features] or a list of {self.n_agents} tensors."
                )
        if n_inputs == 1 and len(leaves) == 1:
            self._check_width(first)
        is_list = isinstance(first, list)
        return (first[0].ndim if is_list else first.ndim - 1) - self.event_dims

    def _check_width(self, x: Tensor | list[Tensor]) -> None:
        if isinstance(x, Tensor) and x.shape[-1] == self.expected:
            return
        for agent, width in enumerate(self.widths):
            found = (x[agent] if isinstance(x, list) else x).shape[-1]
            if self.pad and not isinstance(x, list) and width is not None:
                width = self.expected
            if width is not None and found != width:
                raise ValueError(
                    f"agent {agent} takes {width} features, found an input with {found}."
                )

    def _indices(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._indices_by_device:
            self._indices_by_device[device] = (
                torch.tensor(self.order, device=device),
                torch.tensor(self.inverse, device=device),
            )
        return self._indices_by_device[device]

    def _split_leaf(self, leaf: Any, dim: int) -> Sequence[Any]:
        """Returns, for each call, the part of a leaf that it reads."""
        if leaf is None:
            return [None] * len(self.routes)
        if isinstance(leaf, list):
            return [
                self._stack_agents([leaf[agent] for agent in route.agents], width)
                for route, width in zip(self.routes, self.stored)
            ]
        if self.order is not None:
            leaf = leaf.index_select(dim, self._indices(leaf.device)[0])
        parts = [leaf] if len(self.sizes) == 1 else leaf.split(self.sizes, dim)
        return [self._cut_padding(part, width) for part, width in zip(parts, self.stored)]

    def _stack_agents(self, tensors: list[Tensor], width: int | None) -> Tensor:
        if self.pad and width is not None:
            tensors = [_pad_features(x, width) for x in tensors]
        return torch.stack(tensors) if len(tensors) > 1 else tensors[0].unsqueeze(0)

    def _cut_padding(self, part: Tensor, width: int | None) -> Tensor:
        """Cuts the padding that only wider structures need."""
        if not self.pad or width is None or part.shape[-1] <= width:
            return part
        return part.narrow(-1, 0, width)

    def _merge_outputs(self, outputs: list[Any], dim: int, batch: int, ragged: bool) -> Any:
        """Returns all agents' outputs in order, as lists if they differ in shape."""
        if len(outputs) == 1 and self.order is None and not ragged:
            return outputs[0]
        flat = [pytree.tree_flatten(output) for output in outputs]
        if any(structure != flat[0][1] for _, structure in flat):
            raise ValueError("the members return outputs of different structures.")
        merged = [
            self._merge_leaf(list(leaves), dim, batch, ragged)
            for leaves in zip(*(leaves for leaves, _ in flat))
        ]
        return pytree.tree_unflatten(merged, flat[0][1])

    def _merge_leaf(self, leaves: list[Tensor], dim: int, batch: int, ragged: bool) -> Any:
        if self.pad and not ragged and leaves[0].ndim > dim + 1:
            width = max(leaf.shape[-1] for leaf in leaves)
            leaves = [_pad_features(leaf, width) for leaf in leaves]
        shapes = {leaf.shape[:dim] + leaf.shape[dim + 1 :] for leaf in leaves}
        if len(shapes) > 1 or (ragged and self.uneven):
            return self._merge_rows(leaves, dim)
        y = leaves[0] if len(leaves) == 1 else torch.cat(leaves, dim)
        if self.order is not None:
            y = y.index_select(dim, self._indices(y.device)[1])
        return y.movedim(0, batch) if ragged and batch else y

    def _merge_rows(self, leaves: list[Tensor], dim: int) -> list[Tensor]:
        """Returns a list of the agents' outputs without their padding."""
        rows = [row for leaf in leaves for row in leaf.unbind(dim)]
        rows = [rows[i] for i in self.inverse]
        if not self.uneven:
            return rows
        return [
            row if width is None or width == row.shape[-1] else row.narrow(-1, 0, width)
            for row, width in zip(rows, self.outputs)
        ]


def _pad_features(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
