"""Wraps the methods that a world's author writes into those that TorchRL calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tensordict import TensorDictBase

__all__ = ["completed"]


def completed(method: Callable[..., Any], complete: str) -> Callable[..., Any]:
    """Returns a method that calls the env's ``complete(method, tensordict)`` instead.

    A subclass's ``super()._step(...)`` is a part of the step that is under way, and runs as it is.

    Args:
        method (callable): ``_reset`` or ``_step`` of a world.
        complete (str): name of the method that completes what it returns.
    """

    @functools.wraps(method)
    def run(self: Any, tensordict: TensorDictBase | None = None, **kwargs: Any) -> Any:
        if self._inside:
            return method(self, tensordict, **kwargs)
        self._inside = True
        try:
            return getattr(self, complete)(method, tensordict, **kwargs)
        finally:
            self._inside = False

    return run
