"""Value numbering: finds tensors of equal values from how they were computed."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

__all__ = ["ValueNumbers"]

_SMALL = 16


class ValueNumbers:
    """Numbers of tensors' contents: tensors of one number hold the same values.

    The same operation on the same numbers gives the same number, so a mask that is written
    twice, as in ``x[a & b] = x[a & b] + 1``, is known to be one. Whatever is written in place has
    a new number, and so have its views. Different numbers tell nothing.

    Examples:
        >>> values, x = ValueNumbers(), torch.ones(3)
        >>> a, b = x + 1, x + 1
        >>> for result in (a, b):
        ...     values.record(torch.ops.aten.add.Tensor, (x, 1), {}, result, [])
        >>> values.of(a) == values.of(b), values.of(a) == values.of(x)
        (True, False)
    """

    def __init__(self) -> None:
        self._new = itertools.count()
        self._numbers: dict[Hashable, int] = {}
        self._computed: dict[Hashable, int] = {}
        self._writes: Counter[int] = Counter()
        self._held: dict[int, torch.UntypedStorage] = {}

    def of(self, x: Tensor, constant: bool = False) -> int:
        """Returns the number of a tensor's content now; for a small ``constant``, of its text."""
        place = self._place(x)
        if place not in self._numbers:
            self._numbers[place] = next(self._new)
            if constant and x.numel() <= _SMALL:
                text = (repr(x.tolist()), x.shape, x.dtype, x.device)
                self._numbers[place] = self._computed.setdefault(text, self._numbers[place])
        return self._numbers[place]

    def record(
        self,
        func: Any,
        args: tuple,
        kwargs: dict[str, Any],
        result: Any,
        written: Iterable[Tensor],
        constants: Iterable[Tensor] = (),
    ) -> None:
        """Notes an executed operation.

        Args:
            func (OpOverload): the operation.
            args, kwargs: what it was given.
            result: what it gave.
            written (iterable of Tensor): those of its arguments that it has written to.
            constants (iterable of Tensor): those of its arguments that are the same in every run.
        """
        written = list(written)
        for x in written:
            self._writes[x.untyped_storage()._cdata] += 1
        if written or torch.Tag.nondeterministic_seeded in func.tags or "empty" in str(func):
            return
        for x in constants:
            self.of(x, constant=True)
        computation = (func, self._frozen(args), self._frozen(sorted(kwargs.items())))
        for i, x in enumerate(pytree.tree_leaves(result)):
            if isinstance(x, Tensor):
                place = self._place(x)
                if place not in self._numbers:
                    number = self._computed.setdefault((i, computation), next(self._new))
                    self._numbers[place] = number

    def _frozen(self, x: Any) -> Hashable:
        if isinstance(x, Tensor):
            return self.of(x)
        if isinstance(x, (list, tuple)):
            return tuple(map(self._frozen, x))
        return type(x), repr(x)

    def _place(self, x: Tensor) -> Hashable:
        storage = x.untyped_storage()
        self._held[storage._cdata] = storage  # so that its address is not reused
        writes = self._writes[storage._cdata]
        return storage._cdata, writes, x.storage_offset(), x.shape, x.stride(), x.dtype
