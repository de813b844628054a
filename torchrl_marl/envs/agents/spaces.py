"""Conversion of Gymnasium's spaces to TorchRL's specs."""

from __future__ import annotations

import math
from typing import Any

import torch
from torchrl.data import (
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    OneHot,
    TensorSpec,
    Unbounded,
)

from torchrl_marl.errors import SpecError

__all__ = ["spec_of_space"]


def spec_of_space(
    where: str, space: Any, *, action: bool = False, one_hot: bool = False
) -> TensorSpec:
    """Returns the spec of one agent's observations or actions.

    Floats are float32 whatever the world computes in; a choice is an int64.

    Args:
        where (str): whose space it is, in the message.
        space (gymnasium.Space): Box, Discrete, MultiDiscrete, MultiBinary, or a Dict of such.

    Keyword Args:
        action (bool): of actions; single numbers then have no dim of their own.
        one_hot (bool): choices are one-hot encoded.

    Raises:
        SpecError: a space that no tensor holds.

    Examples:
        >>> import gymnasium
        >>> spec_of_space("rover_0", gymnasium.spaces.Discrete(3), action=True).shape
        torch.Size([])
    """
    kind = type(space).__name__
    if kind == "Dict":
        leaves = {
            key: spec_of_space(f"{where}[{key!r}]", leaf, action=action, one_hot=one_hot)
            for key, leaf in space.spaces.items()
        }
        return Composite(leaves)
    if kind == "Discrete":
        n = int(space.n)
        if one_hot:
            return OneHot(n)
        return Categorical(n, shape=() if action else (1,))
    if kind == "MultiDiscrete":
        return MultiCategorical([int(n) for n in space.nvec.flatten()])
    if kind == "MultiBinary":
        return MultiCategorical([2] * math.prod(space.shape))
    if kind == "Box":
        return _box(space)
    raise SpecError(
        f"{where} is a {kind}, which has no fixed shape as a tensor; expected Box, Discrete, "
        "MultiDiscrete, MultiBinary or a Dict of such. Wrap the world to give one of these."
    )


def _box(space: Any) -> TensorSpec:
    shape = tuple(space.shape) or (1,)
    low, high = (torch.as_tensor(bound).reshape(shape) for bound in (space.low, space.high))
    dtype = torch.float32 if low.is_floating_point() else low.dtype
    if dtype.is_floating_point:
        low, high = low.to(dtype), high.to(dtype)
        if not bool((torch.isfinite(low) & torch.isfinite(high)).all()):
            return Unbounded(shape, dtype=dtype)
    return Bounded(low, high, shape=shape, dtype=dtype)
