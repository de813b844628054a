"""Functions of torch that work row by row, and their dims."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "BY_ROW",
    "HARMLESS",
    "JOINING",
    "REDUCING",
    "RESHAPING",
    "dims_of",
    "inserted_dim",
    "writes_to_first",
]


def _named(names: str) -> frozenset[Any]:
    found = (getattr(place, n, None) for n in names.split() for place in (torch, Tensor, F))
    return frozenset(function for function in found if function is not None)


# Element by element, with broadcasting.
BY_ROW = _named(
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
REDUCING = _named(
    "sum mean prod any all amax amin max min argmax argmin norm cumsum softmax log_softmax "
    "logsumexp cumprod count_nonzero"
) | {torch.linalg.vector_norm, torch.linalg.norm}
RESHAPING = _named("unsqueeze squeeze")
JOINING = frozenset({torch.stack, torch.cat})

# Attributes whose reading has no side effect.
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
    """Returns whether the dim argument of a function refers to its output."""
    return name == "unsqueeze"


def dims_of(name: str, args: tuple, kwargs: dict[str, Any]) -> tuple | None:
    """Returns the dims along which a function works, or None for all."""
    place = 2 if name in ("norm", "vector_norm", "linalg_norm", "linalg_vector_norm") else 1
    dims = kwargs.get("dim", kwargs.get("axis", args[place] if len(args) > place else None))
    if dims is None:
        return None
    return tuple(dims) if isinstance(dims, (list, tuple)) else (dims,)
