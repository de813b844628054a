"""Lazy import of applications, on which the core does not depend."""

from __future__ import annotations

import importlib
from types import ModuleType

__all__ = ["import_application"]


def import_application(name: str) -> ModuleType:
    """Imports an application and returns its module.

    Args:
        name (str): ``export``, ``pictures`` or ``plotting``.

    Examples:
        >>> import_application("export").__name__
        'torchrl_marl.apps.export'
    """
    return importlib.import_module(f"torchrl_marl.apps.{name}")
