"""Specs of actions with several parts: Tuple and Dict spaces of choices and numbers."""

from __future__ import annotations

from typing import Any

import torch
from torchrl.data import Bounded, Categorical, MultiCategorical, TensorSpec, Unbounded

from torchrl_marl.envs.agents.spaces import spec_of_space
from torchrl_marl.envs.pettingzoo.parts import parts_of
from torchrl_marl.errors import SpecError
from torchrl_marl.specs.hybrid import Hybrid

__all__ = ["hybrid_spec_of"]


def hybrid_spec_of(where: str, space: Any) -> TensorSpec:
    """Converts a Tuple or Dict action space to the spec of one vector: first choices, then numbers.

    Args:
        where (str): name of the space in error messages.
        space (gymnasium.Space): Tuple or Dict of Discrete, MultiDiscrete, MultiBinary and Box of
            floats.

    Raises:
        SpecError: a part is of another kind.

    Examples:
        >>> from gymnasium.spaces import Box, Discrete, Tuple
        >>> hybrid_spec_of("the action of 'car'", Tuple([Box(-1, 1, (2,)), Discrete(3)])).branches
        (3,)
    """
    branches: list[int] = []
    boxes: list[TensorSpec] = []
    for key, part in parts_of(space):
        spec = spec_of_space(f"{where}[{key!r}]", part, action=True)
        if isinstance(spec, MultiCategorical):
            branches += spec.nvec.tolist()
        elif isinstance(spec, Categorical):
            branches.append(spec.space.n)
        elif isinstance(spec, (Bounded, Unbounded)) and spec.dtype.is_floating_point:
            boxes.append(spec.reshape(spec.shape.numel()))
        else:
            raise SpecError(
                f"{where}[{key!r}] is {part}, expected Discrete, MultiDiscrete, MultiBinary or a "
                "Box of floats; wrap the environment to use one of them."
            )
    if not boxes:
        return MultiCategorical(branches)
    numbers = _numbers(boxes)
    return Hybrid(branches, numbers) if branches else numbers


def _numbers(boxes: list[TensorSpec]) -> TensorSpec:
    """Joins the specs of numbers; unbounded if one of them is, as a single Box is."""
    if all(isinstance(box, Bounded) for box in boxes):
        low, high = (torch.cat([getattr(x.space, side) for x in boxes]) for side in ("low", "high"))
        return Bounded(low, high)
    return Unbounded((sum(box.shape[0] for box in boxes),))
