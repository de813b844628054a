"""A module stack as a TensorDictModule: reads and writes dense and lazily stacked groups.

Shapes: B any batch dims, N agents, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    NestedKey,
    TensorDictBase,
    is_tensor_collection,
    unravel_key,
)
from tensordict.nn import TensorDictModuleBase, dispatch, set_skip_existing
from torch import Tensor
from torch.utils import _pytree as pytree

from torchrl_marl.modules.stacks.members import StackPart

__all__ = ["StackModule"]


class StackModule(TensorDictModuleBase):
    """A :class:`ModuleStack` that reads from a TensorDict and writes to it.

    A group whose agents differ in shape is lazily stacked: every agent's leaf is read from, and
    written to, its own TensorDict. Works inside ``TensorDictSequential`` and as the module of a
    ``ProbabilisticActor`` where the agents' outputs agree.

    Args:
        stack (ModuleStack or StackSelection): the modules.
        in_keys (sequence of NestedKey): inputs, in order.
        out_keys (sequence of NestedKey): outputs, in order.

    Keys:
        - reads: ``in_keys``, ``[*B, N, *F]``, or lazily stacked over N
        - writes: ``out_keys``, ``[*B, N, *F]``, or leaf by leaf into a lazily stacked group

    Raises:
        KeyError: an input is not there.
        ValueError: outputs that differ in shape, for a group that is not lazily stacked; another
            number of outputs than ``out_keys``.

    Examples:
        >>> from tensordict import TensorDict, lazy_stack
        >>> from torchrl_marl.modules import stack
        >>> drone, rover = torch.nn.Linear(4, 2), torch.nn.Linear(3, 2)
        >>> key, out = ("agents", "observation"), ("agents", "action")
        >>> policy = StackModule(stack([drone, rover]), [key], [out])
        >>> agents = [TensorDict({"observation": torch.zeros(5, f)}, [5]) for f in (4, 3)]
        >>> policy(TensorDict({"agents": lazy_stack(agents, -1)}, [5])).get(out).shape
        torch.Size([5, 2, 2])
    """

    def __init__(
        self,
        stack: StackPart,
        in_keys: Sequence[NestedKey],
        out_keys: Sequence[NestedKey],
    ) -> None:
        super().__init__()
        self.module = stack
        self.in_keys = [unravel_key(key) for key in in_keys]
        self.out_keys = [unravel_key(key) for key in out_keys]

    @dispatch(auto_batch_size=False)
    @set_skip_existing(None)
    def forward(
        self, tensordict: TensorDictBase, tensordict_out: TensorDictBase | None = None
    ) -> TensorDictBase:
        """Runs all agents."""
        inputs = [self._read(tensordict, _path(key)) for key in self.in_keys]
        output = self.module(*inputs)
        outputs = pytree.tree_leaves(output, is_leaf=lambda x: isinstance(x, list))
        if len(outputs) != len(self.out_keys):
            raise ValueError(
                f"the stack has {len(outputs)} outputs, expected {len(self.out_keys)}: "
                f"{self.out_keys}."
            )
        target = tensordict if tensordict_out is None else tensordict_out
        for key, value in zip(self.out_keys, outputs):
            if isinstance(value, list):
                _write_each(target, _path(key), value)
            else:
                target.set(key, value)
        return target

    def _read(self, tensordict: TensorDictBase, path: tuple[str, ...]) -> Tensor | list[Tensor]:
        """Returns a leaf, or each agent's where they are lazily stacked."""
        *group, leaf = path
        for i, part in enumerate(group):
            inner = tensordict.get(part, None)
            if not is_tensor_collection(inner):
                raise KeyError(f"the input {path} is not there: no {path[: i + 1]}.")
            tensordict = inner
        return self._read_leaf(tensordict, leaf, path)

    def _read_leaf(
        self, tensordict: TensorDictBase, leaf: str, path: tuple[str, ...]
    ) -> Tensor | list[Tensor]:
        if not isinstance(tensordict, LazyStackedTensorDict):
            value = tensordict.get(leaf, None)
            if value is None:
                raise KeyError(f"the input {path} is not there, found {sorted(tensordict.keys())}.")
            return value
        parts = [self._read_leaf(part, leaf, path) for part in tensordict.tensordicts]
        first, dim = parts[0], tensordict.stack_dim
        if isinstance(first, list):  # a batch of lazily stacked groups, as reshape makes it
            return [torch.stack(list(rows), dim) for rows in zip(*parts)]
        if first.ndim == tensordict.tensordicts[0].ndim + self.module.event_dims:
            return parts  # type: ignore[return-value]
        return torch.stack(parts, dim)  # type: ignore[arg-type]


def _path(key: Any) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else key


def _write_each(tensordict: TensorDictBase, path: tuple[str, ...], rows: list[Tensor]) -> None:
    """Writes each agent's leaf into its own TensorDict."""
    *names, leaf = path
    group = tensordict.get(tuple(names), None) if names else tensordict
    if not isinstance(group, LazyStackedTensorDict):
        raise ValueError(
            f"the outputs {path} differ in shape, {[tuple(r.shape) for r in rows]}, but their "
            "group is not lazily stacked: pad=True gives the stack outputs of one shape."
        )
    if group.stack_dim == group.ndim - 1 and len(group.tensordicts) == len(rows):
        for part, row in zip(group.tensordicts, rows):
            part.set(leaf, row)
        return
    for i, part in enumerate(group.tensordicts):
        _write_each(part, (leaf,), [row.select(group.stack_dim, i) for row in rows])
