"""Former place of :mod:`torchrl_marl.recipes` and :mod:`torchrl_marl.runs`."""

from __future__ import annotations

import warnings
from typing import Any

from torchrl_marl import recipes, runs

_PLACES = {name: module for module in (recipes, runs) for name in module.__all__}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _PLACES[name]
    warnings.warn(
        f"torchrl_marl.config.{name} is {module.__name__}.{name} now; "
        "the old name works in this version only.",
        FutureWarning,
        stacklevel=2,
    )
    return getattr(module, name)
