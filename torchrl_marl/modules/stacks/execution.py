"""How the members of a structure run: batched matmul, vmap, or one after the other.

Shapes: B any batch dims, K distinct members, n copies of each, A = K * n agents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils import _pytree as pytree

from torchrl_marl.modules.stacks.storage import Bucket, has_hooks, input_width

__all__ = ["EXECUTORS", "choose_executor", "run"]

EXECUTORS = ("matmul", "vmap", "loop")


def run(bucket: Bucket, members: Sequence[int], copies: int, dim: int, inputs: Any) -> Any:
    """Runs some members of a structure, each for as many agents.

    Args:
        bucket (Bucket): the structure.
        members (sequence of int): which K of its members.
        copies (int): number n of agents of each.
        dim (int): agent dim of inputs and outputs, both member by member.
        inputs (sequence): positional inputs, pytrees of tensors.
    """
    every = len(members) == bucket.n_members
    values = bucket.read(None if every else members)
    shape = (len(members), copies)
    if bucket.executor == "matmul":
        assert bucket.plan is not None
        pads = bucket.pads(inputs[0].device, members) if bucket.padded else None
        return bucket.plan.run(values, bucket.stacked, pads, shape, dim, inputs)
    runner = run_vmap if bucket.executor == "vmap" else run_loop
    return runner(bucket, values, shape, dim, inputs)


def run_vmap(
    bucket: Bucket, values: dict[str, Tensor], shape: tuple[int, int], dim: int, inputs: Any
) -> Any:
    """Runs all by one call; copies see unbatched parameters, so none are gathered."""
    members, copies = shape
    leaves, structure = pytree.tree_flatten(tuple(inputs))
    template = bucket.template

    def call(parameters: dict[str, Tensor], *own: Any) -> Any:
        return functional_call(
            template, parameters, pytree.tree_unflatten(list(own), structure), tie_weights=False
        )

    function: Callable[..., Any] = call
    in_dims = tuple(dim if isinstance(leaf, Tensor) else None for leaf in leaves)
    if copies > 1:
        function = vmap(function, (None, *in_dims), dim, randomness="different")
        leaves = [_split(leaf, dim, shape) for leaf in leaves]
    if members > 1:
        stacked = {name: 0 if bucket.stacked[name] else None for name in values}
        function = vmap(function, (stacked, *in_dims), dim, randomness="different")
    else:
        values = {n: v.squeeze(0) if bucket.stacked[n] else v for n, v in values.items()}
        leaves = [leaf.squeeze(dim) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    output = function(values, *leaves)
    if members == 1:
        output = pytree.tree_map(lambda y: y.unsqueeze(dim), output)
    if copies > 1:
        output = pytree.tree_map(lambda y: y.flatten(dim, dim + 1), output)
    return output


def run_loop(
    bucket: Bucket, values: dict[str, Tensor], shape: tuple[int, int], dim: int, inputs: Any
) -> Any:
    """Runs one agent after the other: the slow twin of the others."""
    members, copies = shape
    leaves, structure = pytree.tree_flatten(tuple(inputs))
    agents = [_unbind(leaf, dim, members * copies) for leaf in leaves]
    rows = {name: _rows(value, bucket.stacked[name], members) for name, value in values.items()}
    outputs = []
    for agent in range(members * copies):
        own = pytree.tree_unflatten([leaf[agent] for leaf in agents], structure)
        row = {name: tensors[agent // copies] for name, tensors in rows.items()}
        outputs.append(
            pytree.tree_flatten(functional_call(bucket.template, row, own, tie_weights=False))
        )
    stacked = [torch.stack(list(parts), dim) for parts in zip(*(leaves for leaves, _ in outputs))]
    return pytree.tree_unflatten(stacked, outputs[0][1])


def _split(leaf: Any, dim: int, shape: tuple[int, int]) -> Any:
    return leaf.unflatten(dim, shape) if isinstance(leaf, Tensor) else leaf


def _unbind(leaf: Any, dim: int, n: int) -> Sequence[Any]:
    return leaf.unbind(dim) if isinstance(leaf, Tensor) else (leaf,) * n


def _rows(value: Tensor, stacked: bool, members: int) -> Sequence[Tensor]:
    if not stacked:
        return (value,) * members
    if value.requires_grad:
        return value.unbind(0)
    # Buffers are written in place, which autograd forbids for what unbind gives.
    return [value[k] for k in range(members)]


def choose_executor(bucket: Bucket, copies: int, event_dims: int) -> str:
    """Returns the fastest executor that can run a structure; vmap is tried on zeros.

    Args:
        bucket (Bucket): the structure.
        copies (int): the largest number of agents that share a member.
        event_dims (int): feature dims of the first input.
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
    return "vmap" if _vmap_can(bucket, copies, event_dims) else "loop"


@torch.no_grad()
def _vmap_can(bucket: Bucket, copies: int, event_dims: int) -> bool:
    """Tries vmap where the width of a single input can be read off; else assumes it works."""
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
            return True  # it takes another input; nothing learned
        try:
            run_vmap(bucket, values, (bucket.n_members, copies), 1, (x,))
        except Exception:
            return False
    return True
