"""Settings that had other names in an earlier version; the old ones are still understood."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torchrl_marl.errors import ConfigError
from torchrl_marl.schema import unfold

__all__ = ["tell_new_name", "with_new_names"]

_RENAMED = {("env", "n_envs"): "num_envs"}
"""Where an old name stood, and the new one."""


def with_new_names(settings: Mapping[str, Any], *, told: bool = True) -> dict[str, Any]:
    """Settings under today's names.

    Args:
        settings (mapping): nested, or with dotted keys, or both.
        told (bool): whether old names are warned of; not where a program wrote them.

    Returns:
        dict: nested.

    Raises:
        ConfigError: a setting under both of its names.

    Examples:
        >>> with_new_names({"env.n_envs": 8}, told=False)
        {'env': {'num_envs': 8}}
    """
    nested = unfold(settings)
    for (section, old), new in _RENAMED.items():
        own = nested.get(section)
        if not isinstance(own, dict) or old not in own:
            continue
        if new in own:
            raise ConfigError(
                f"{section}.{old} and {section}.{new} are both given, which are one setting; "
                f"use {section}.{new} alone."
            )
        if told:
            tell_new_name(f"{section}.{old}", f"{section}.{new}")
        own = dict(own)
        own[new] = own.pop(old)
        nested[section] = own
    return nested


def tell_new_name(old: str, new: str) -> None:
    """Warns that a name is going to be forgotten."""
    warnings.warn(
        f"{old} is called {new} now; the old name works in this version only.",
        FutureWarning,
        stacklevel=3,
    )
