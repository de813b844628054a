"""Action spaces of several choices or parts, and their masks. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["flat_mask", "has_parts", "in_order", "parts_of", "sizes_of"]


def has_parts(space: Any) -> bool:
    """Returns whether an action space is a Tuple or Dict of spaces."""
    return type(space).__name__ in ("Tuple", "Dict")


def parts_of(space: Any) -> list[tuple[Any, Any]]:
    """Returns keys and spaces inside a Tuple or Dict; choices come before boxes.

    Examples:
        >>> from gymnasium.spaces import Box, Dict, Discrete
        >>> [key for key, _ in parts_of(Dict({"force": Box(-1, 1, (2,)), "gear": Discrete(3)}))]
        ['gear', 'force']
    """
    spaces = space.spaces
    parts = list(spaces.items() if isinstance(spaces, Mapping) else enumerate(spaces))
    return sorted(parts, key=lambda part: type(part[1]).__name__ == "Box")


def in_order(parts: Mapping[Any, Any], space: Any) -> Any:
    """Returns values of the parts of a Tuple or Dict space as a tuple or dict."""
    if isinstance(space.spaces, Mapping):
        return {key: parts[key] for key in space.spaces}
    return tuple(parts[i] for i in range(len(parts)))


def sizes_of(space: Any) -> list[int]:
    """Returns the number of options of each choice of a space without parts; empty for a Box.

    Examples:
        >>> from gymnasium.spaces import MultiBinary, MultiDiscrete
        >>> sizes_of(MultiDiscrete([3, 2])), sizes_of(MultiBinary(2))
        ([3, 2], [2, 2])
    """
    kind = type(space).__name__
    if kind == "Discrete":
        return [int(space.n)]
    if kind == "MultiBinary":
        return [2] * int(np.prod(space.shape))
    return np.ravel(space.nvec).tolist() if kind == "MultiDiscrete" else []


def flat_mask(legal: Any, space: Any) -> np.ndarray:
    """Returns an action mask as a vector of the options of all choices.

    Args:
        legal: the mask as a vector; or one array for each choice, as in Gymnasium's
            ``sample(mask)``: in a tuple, or in a dict for a Dict space. Masks of boxes are ignored.
        space (gymnasium.Space): the action space.

    Examples:
        >>> from gymnasium.spaces import Box, Discrete, Tuple
        >>> flat_mask((None, [1, 0, 1]), Tuple([Box(-1, 1, (2,)), Discrete(3)]))
        array([1, 0, 1])
    """
    if not isinstance(legal, (tuple, list, Mapping)):
        return np.asarray(legal)
    if not has_parts(space):
        return np.concatenate([np.ravel(part) for part in legal])
    parts = [(key, part) for key, part in parts_of(space) if type(part).__name__ != "Box"]
    return np.concatenate([np.ravel(flat_mask(legal[key], part)) for key, part in parts])
