"""Replaces reads and writes through boolean masks by ``where``, so shapes do not depend on data."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor

from torchrl_marl.capture.sites import where
from torchrl_marl.errors import CaptureError

__all__ = [
    "BY_ROW",
    "HARMLESS",
    "JOINING",
    "REDUCING",
    "RESHAPING",
    "MaskedRows",
    "dims_of",
    "inserted_dim",
    "writes_to_first",
]

_FULL = slice(None)


class TraceQueries(Protocol):
    """Protocol for questions about the tensors of a trace, such as whether two are equal."""

    def unrecorded(self) -> AbstractContextManager[None]:
        """Context for computations outside of the graph."""

    def depends(self, x: Tensor) -> bool:
        """Returns whether a tensor's values may differ in the next run."""

    def number(self, x: Tensor) -> int:
        """Returns the value number of a tensor; equal value numbers mean equal values."""


@dataclass(frozen=True, eq=False)
class _Tag:
    """Selection of rows by a mask.

    Args:
        mask (Tensor): bool ``[*M]``; if the rows were selected from rows that another mask had
            selected, the conjunction of both masks.
        held (int): value number of the mask when the rows were read; equal value numbers mean
            equal values.
        number: identifier of the selection; rows of the same selection correspond to each other.
        after (int): number of trailing dims of a row.
    """

    mask: Tensor
    held: int
    number: Hashable
    after: int

    def wide(self) -> Tensor:
        """Returns the mask, shaped to broadcast to the rows."""
        return self.mask.reshape(self.mask.shape + (1,) * self.after)

    def with_after(self, after: int) -> _Tag:
        """Returns a tag of the same selection for rows with the given number of trailing dims."""
        return _Tag(self.mask, self.held, self.number, after)


@dataclass(frozen=True)
class _Selection:
    """All rows that an index could select, and the mask that selects from them."""

    rows: Tensor
    tag: _Tag


class MaskedRows:
    """Keeps track of tensors with rows selected by masks, during a trace.

    Args:
        watch (TraceQueries): tracker of tensors that depend on the inputs, and of equal tensors.
    """

    def __init__(self, watch: TraceQueries) -> None:
        self._watch = watch
        # Tensors are held, so that their ids are not reused.
        self._tags: dict[int, tuple[Tensor, _Tag]] = {}
        self._masks_of_positions: dict[int, Tensor] = {}

    # --------------------------------------------------------------------- reading and writing

    def read(self, x: Tensor, index: Any) -> Any:
        """Reads ``x[index]``."""
        parts = self._index_parts(index)
        mask = self._changing_mask(parts)
        if mask is None:
            rows = x[self._fixed_index(x, parts)]
            tag = self._tag_of(x)
            return (
                rows
                if tag is None
                else self._attach_tag(rows, tag, rows.ndim - self._n_row_dims(x))
            )
        place = self._select(x, parts, mask)
        # The layout of eager indexing, on which the rounding of norms depends.
        rows = place.rows.clone(memory_format=torch.contiguous_format)
        self._tags[id(rows)] = rows, place.tag
        return rows

    def write(self, x: Tensor, index: Any, value: Any) -> None:
        """Writes ``x[index] = value``."""
        parts = self._index_parts(index)
        mask = self._changing_mask(parts)
        if mask is None:
            static, of_x = self._fixed_index(x, parts), self._tag_of(x)
            if of_x is not None:
                target = x[static]
                of_x = of_x.with_after(target.ndim - self._n_row_dims(x))
                self._check_written(target, of_x, value)
            else:
                self.refuse(value)
            x[static] = value
            return
        place = self._select(x, parts, mask)
        target, tag = place.rows, place.tag
        self._check_written(target, tag, value)
        if not isinstance(value, Tensor):
            value = torch.full_like(target, value)
        elif self._tag_of(value) is None and value.ndim > tag.after:
            value = value.reshape(value.shape[value.ndim - tag.after :])
        target.copy_(torch.where(tag.wide(), value.to(target.dtype), target))

    def _check_written(self, target: Tensor, tag: _Tag | None, value: Any) -> None:
        """Raises an error if selected rows are written to the rows of another selection."""
        if not isinstance(value, Tensor):
            return
        own = self._tag_of(value)
        if own is None:
            if tag is not None and not _is_broadcast(value, tag.after):
                raise self.refusal("rows that do not come from the same mask are written")
        elif tag is None or own.number != tag.number:
            raise self.refusal("rows chosen by another mask are written")
        elif own.after != tag.after or value.ndim > target.ndim:
            raise self.refusal("rows of another shape are written")

    # ------------------------------------------------------------------------------ computing

    def apply(self, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Calls a function; raises an error if it would not treat selected rows one by one."""
        name = getattr(func, "__name__", str(func))
        places = self._select_positions(name, args, kwargs)
        if places is not None:
            return places
        if not self._tags:
            return func(*args, **kwargs)
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        tags = [tag for x in tensors if (tag := self._tag_of(x)) is not None]
        if not tags or func in HARMLESS:
            return func(*args, **kwargs)
        tag = tags[0]
        if any(other.number != tag.number for other in tags):
            raise self.refusal("rows chosen by two masks meet")
        if func in BY_ROW and "out" not in kwargs:
            self._check_by_row(name, tensors, tags, args)
            return self._attach_tags(func(*args, **kwargs), tag, tag.after)
        if func in JOINING and all(other.after == tag.after for other in tags):
            return self._join(func, name, args, kwargs, tensors, tag)
        if len(tensors) == 1 and func in REDUCING | RESHAPING and "out" not in kwargs:
            return self._apply_along_dims(func, name, args, kwargs, tag)
        raise self.refusal(f"{name} of rows chosen by a mask")

    def _check_by_row(self, name: str, tensors: list, tags: list, args: tuple) -> None:
        after = tags[0].after
        others = [x for x in tensors if self._tag_of(x) is None]
        if any(tag.after != after for tag in tags):
            raise self.refusal("rows of different dims chosen by a mask meet")
        if not all(_is_broadcast(x, after) for x in others):
            raise self.refusal("rows chosen by a mask meet other rows")
        if writes_to_first(name) and self._tag_of(args[0]) is None:
            raise self.refusal(f"{name} writes rows chosen by a mask to other rows")

    def _join(self, func, name, args, kwargs, tensors, tag) -> Any:
        """Applies ``torch.stack`` or ``torch.cat`` along a dim after the rows."""
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        stacks = name == "stack"
        dim = self._dim_from_end(tensors[0], tag, dim, new=stacks)
        if dim is None or any(self._tag_of(x) is None for x in tensors):
            raise self.refusal(f"{name} of rows chosen by a mask")
        return self._attach_tags(func(args[0], dim=dim), tag, tag.after + stacks)

    def _apply_along_dims(self, func, name, args, kwargs, tag) -> Any:
        x, dims = args[0], dims_of(name, args, kwargs)
        if dims is None and name in ("any", "all", "sum"):
            return self._reduce_rows(func, name, x, tag)
        new = inserted_dim(name)
        behind = [self._dim_from_end(x, tag, dim, new=new) for dim in dims or ()]
        # Eager indexing counts the rows of a mask with more dims differently.
        countable = tag.mask.ndim == 1 or all(dim < 0 for dim in dims or ())
        if not behind or None in behind or not countable:
            raise self.refusal(f"{name} over the rows that a mask chose")
        result = func(*args, **kwargs)
        first = pytree.tree_leaves(result)[0]
        return self._attach_tags(result, tag, tag.after + first.ndim - x.ndim)

    def _reduce_rows(self, func, name: str, x: Tensor, tag: _Tag) -> Tensor:
        """Reduces over all rows; rows that are not selected count as the neutral element."""
        if name == "sum" and (x.is_floating_point() or x.is_complex()):
            raise self.refusal("the sum of rows chosen by a mask, which depends on their order")
        self._check_mask_unchanged(tag)
        neutral = torch.where(tag.wide(), x, torch.full_like(x, name == "all"))
        return func(neutral)

    def _dim_from_end(self, x: Tensor, tag: _Tag, dim: Any, *, new: bool) -> int | None:
        """Returns a dim counted from the end; None if it is one of the dims that index the rows."""
        if not isinstance(dim, int):
            return None
        eager = x.ndim - tag.mask.ndim + 1 + new
        dim = dim if dim < 0 else dim - eager
        return dim if -(tag.after + new) <= dim < 0 else None

    def _select_positions(self, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Returns ``torch.where(mask)`` or ``mask.nonzero(as_tuple=True)`` as selected rows."""
        selects = (name == "where" and len(args) == 1 and not kwargs) or (
            name == "nonzero" and (kwargs.get("as_tuple") or args[1:] == (True,))
        )
        if not selects or args[0].dtype != torch.bool or args[0].ndim != 1:
            return None
        mask = args[0]
        if self._tag_of(mask) is not None or not self._watch.depends(mask):
            return None
        rows = torch.arange(len(mask), device=mask.device)
        self._tags[id(rows)] = rows, self._tag(mask, self._watch.number(mask), 0)
        self._masks_of_positions[id(rows)] = mask
        return (rows,)

    # -------------------------------------------------------------------------------- indices

    def _index_parts(self, index: Any) -> tuple:
        parts = index if isinstance(index, tuple) else (index,)
        return tuple(self._mask_of_positions(part) for part in parts)

    def _mask_of_positions(self, part: Any) -> Any:
        mask = self._masks_of_positions.get(id(part))
        if mask is None:
            return part
        tag = self._tag_of(part)
        assert tag is not None
        self._check_mask_unchanged(tag)
        return mask

    def _changing_mask(self, parts: tuple) -> int | None:
        """Returns where in an index a mask stands that changes between runs, or None."""
        masks = [i for i, part in enumerate(parts) if is_mask(part) and self._may_change(part)]
        if not masks:
            return None
        if len(masks) > 1:
            raise self.refusal("two masks in one index")
        others = parts[: masks[0]] + parts[masks[0] + 1 :]
        if not all(_is_basic(part) for part in others):
            raise self.refusal("a mask and a tensor in one index")
        return masks[0]

    def _may_change(self, mask: Tensor) -> bool:
        return self._tag_of(mask) is not None or self._watch.depends(mask)

    def _select(self, x: Tensor, parts: tuple, i: int) -> _Selection:
        mask, before, behind = parts[i], parts[:i], parts[i + 1 :]
        of_x, of_mask = self._tag_of(x), self._tag_of(mask)
        number: Hashable = self._watch.number(mask)
        chosen = mask
        if of_x is not None or of_mask is not None:
            # Rows selected from selected rows: the inner mask has one value per outer row.
            if of_x is None or of_mask is None or of_x.number != of_mask.number:
                raise self.refusal("rows chosen by a mask meet another mask")
            if of_mask.after or before or self._n_row_dims(x) != of_x.mask.ndim:
                raise self.refusal("a mask of more than the rows that a mask chose")
            self._check_mask_unchanged(of_x)
            number = of_x.number, number
            chosen = of_x.mask & mask
        rows = x[(*before, *(_FULL,) * mask.ndim, *behind)]
        if Ellipsis in [part for part in before if not isinstance(part, Tensor)]:
            after = sum(not isinstance(part, int) for part in behind)
        else:
            after = rows.ndim - mask.ndim - sum(not isinstance(part, int) for part in before)
        first = rows.ndim - after - mask.ndim
        if not mask.ndim or rows.shape[first : first + mask.ndim] != mask.shape:
            raise self.refusal(f"a mask {list(mask.shape)} for rows {list(rows.shape[first:])}")
        return _Selection(rows, self._tag(chosen, number, after))

    def _fixed_index(self, x: Tensor, parts: tuple) -> tuple:
        """Returns the index with fixed masks as positions; refuses one that cuts selected rows."""
        if any(self._tag_of(part) is not None for part in parts):
            raise self.refusal("rows chosen by a mask are used as an index")
        tag = self._tag_of(x)
        if tag is None:
            return tuple(y for part in parts for y in self._fixed_positions(part))
        if not all(_is_basic(part) for part in parts):
            raise self.refusal("rows chosen by a mask are indexed by a tensor")
        consumed = [part for part in parts if isinstance(part, (int, slice))]
        rows = x.ndim - tag.mask.ndim - tag.after + 1
        if parts and parts[0] is Ellipsis and len(consumed) <= tag.after:
            return parts
        if len(parts) < rows or any(part != _FULL for part in parts[:rows]):
            raise self.refusal("single rows of those that a mask chose are selected")
        return (*(_FULL,) * (tag.mask.ndim - 1), *parts)

    def _fixed_positions(self, part: Any) -> tuple:
        """Converts a mask that never changes to an index of fixed size."""
        if not is_mask(part) or not part.ndim:
            return (part,)
        with self._watch.unrecorded():
            return part.nonzero(as_tuple=True)

    # ----------------------------------------------------------------------------------- tags

    def refuse(self, x: Any) -> None:
        """Raises an error if a mask selected the rows of ``x``, since their number may change."""
        if self._tag_of(x) is not None:
            raise self.refusal("the rows that a mask chose are used where their number matters")

    def _check_mask_unchanged(self, tag: _Tag) -> None:
        if self._watch.number(tag.mask) != tag.held:
            raise self.refusal("a mask was changed after it chose rows")

    def _tag(self, mask: Tensor, number: Hashable, after: int) -> _Tag:
        return _Tag(mask, self._watch.number(mask), number, after)

    def _n_row_dims(self, x: Tensor) -> int:
        """Returns the number of dims of selected rows up to the last one of the mask."""
        tag = self._tag_of(x)
        return 0 if tag is None else x.ndim - tag.after

    def _attach_tag(self, rows: Tensor, tag: _Tag, after: int) -> Tensor:
        self._tags[id(rows)] = rows, tag.with_after(after)
        return rows

    def _attach_tags(self, result: Any, tag: _Tag, after: int) -> Any:
        for x in pytree.tree_leaves(result):
            if isinstance(x, Tensor):
                self._attach_tag(x, tag, after)
        return result

    def _tag_of(self, x: Any) -> _Tag | None:
        found = self._tags.get(id(x))
        return None if found is None else found[1]

    @staticmethod
    def refusal(what: str) -> CaptureError:
        """Returns an error with a message that names the line of the simulator."""
        return CaptureError(f"{what}, {where()}; use torch.where, which has fixed shapes")


def is_mask(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dtype == torch.bool


def _is_basic(part: Any) -> bool:
    return (
        part is Ellipsis
        or part is None
        or (isinstance(part, (int, slice)) and not isinstance(part, bool))
    )


def _is_broadcast(x: Tensor, after: int) -> bool:
    """Returns whether a tensor has one value for all rows: all but the last dims have size 1."""
    return math.prod(x.shape[: max(0, x.ndim - after)]) == 1


def _find_functions(names: str) -> frozenset[Any]:
    found = (getattr(place, n, None) for n in names.split() for place in (torch, Tensor, F))
    return frozenset(function for function in found if function is not None)


# Element by element, with broadcasting.
BY_ROW = _find_functions(
    """
    add sub mul div true_divide floor_divide remainder pow neg abs sign exp log sqrt square rsqrt
    sin cos tan tanh asin acos atan atan2 sigmoid relu clamp clamp_min clamp_max clip minimum
    maximum where floor ceil round trunc fmod reciprocal expm1 log1p log2 hypot deg2rad rad2deg
    logical_and logical_or logical_not logical_xor eq ne lt le gt ge isnan isinf isfinite
    nan_to_num float double half long int bool to type type_as clone detach contiguous
    zeros_like ones_like full_like rsub masked_fill lerp addcmul absolute
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __floordiv__
    __pow__ __rpow__ __neg__ __pos__ __abs__ __and__ __rand__ __or__ __ror__ __xor__ __invert__
    __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __mod__
    __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__
    add_ sub_ mul_ div_ pow_ remainder_ clamp_ clamp_min_ clamp_max_ neg_ abs_ fill_ zero_
    masked_fill_ nan_to_num_ softplus elu leaky_relu gelu silu
    """
)
REDUCING = _find_functions(
    "sum mean prod any all amax amin max min argmax argmin norm cumsum softmax log_softmax "
    "logsumexp cumprod count_nonzero"
) | {torch.linalg.vector_norm, torch.linalg.norm}
RESHAPING = _find_functions("unsqueeze squeeze")
JOINING = frozenset({torch.stack, torch.cat})

# Attributes that can be read without a side effect.
HARMLESS = frozenset(
    {
        Tensor.dtype.__get__,  # type: ignore[attr-defined]
        Tensor.device.__get__,  # type: ignore[attr-defined]
        Tensor.is_sparse.__get__,  # type: ignore[attr-defined]
        Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
        Tensor.is_floating_point,
        Tensor.is_complex,
        torch.is_floating_point,
        torch.is_complex,
        torch.is_tensor,
    }
)

_IN_PLACE = """
    __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__
"""


def writes_to_first(name: str) -> bool:
    """Returns whether a function of this name writes to its first argument."""
    return name in _IN_PLACE.split() or (name.endswith("_") and not name.endswith("__"))


def inserted_dim(name: str) -> bool:
    """Returns whether the ``dim`` of a function refers to its output."""
    return name == "unsqueeze"


def dims_of(name: str, args: tuple, kwargs: dict[str, Any]) -> tuple | None:
    """Returns the dims along which a function operates; None for all."""
    place = 2 if name in ("norm", "vector_norm", "linalg_norm", "linalg_vector_norm") else 1
    dims = kwargs.get("dim", kwargs.get("axis", args[place] if len(args) > place else None))
    if dims is None:
        return None
    return tuple(dims) if isinstance(dims, (list, tuple)) else (dims,)
