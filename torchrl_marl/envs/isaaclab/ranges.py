"""Ranges for actions of unbounded spaces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrl.data import Bounded, Composite, TensorSpec, Unbounded

from torchrl_marl.envs.agents.spaces import spec_of_space
from torchrl_marl.errors import ConfigError, SpecError, nearest

__all__ = ["ActionRanges", "Range"]

Range = float | Mapping[str, float] | None


@dataclass(frozen=True)
class ActionRanges:
    """Scale and clip of actions of unbounded spaces, by agent.

    A space that a task declares by a number, as ``action_spaces = {"cart": 1}``, is unbounded.

    Args:
        scale (float or mapping, optional): policies act in [-1, 1], the task gets this times as
            much. One number, or by agent or group.
        clip (float or mapping, optional): policies draw from a normal, the task gets no more
            than this, either way.

    Raises:
        ConfigError: what is no range.
    """

    scale: Range = None
    clip: Range = None

    def __post_init__(self) -> None:
        for what, entry in self.__dict__.items():
            values = entry.values() if isinstance(entry, Mapping) else [entry]
            for value in values if entry is not None else ():
                number = isinstance(value, (int, float)) and not isinstance(value, bool)
                if not (number and value > 0):
                    raise ConfigError(f"action_{what} is {value!r}, expected a number above 0.")

    def check_names(self, groups: Mapping[str, Sequence[str]]) -> None:
        """Refuses ranges for unknown agents and groups."""
        known = {*groups, *(name for names in groups.values() for name in names)}
        for what, entry in self.__dict__.items():
            for name in entry if isinstance(entry, Mapping) else ():
                if name not in known:
                    raise ConfigError(
                        f"action_{what}: {name!r} is no agent and no group; "
                        f"{nearest(name, known)}expected one of {sorted(known)}."
                    )

    def of(self, name: str, group: str) -> tuple[float | None, float | None]:
        """Returns scale and clip of an agent."""
        scale, clip = (
            entry.get(name, entry.get(group)) if isinstance(entry, Mapping) else entry
            for entry in (self.scale, self.clip)
        )
        return scale, clip

    def spec(self, name: str, group: str, space: Any) -> TensorSpec:
        """Returns the spec of an agent's actions, ``[A]``.

        Raises:
            ConfigError: an unbounded space without a range, or with two.
            SpecError: a space that no tensor holds.
        """
        where = f"the action space of {name!r}"
        spec = spec_of_space(where, space, action=True)
        if isinstance(spec, Composite):
            raise SpecError(f"{where} is a Dict, expected Box, Discrete or MultiDiscrete.")
        spec = spec if spec.ndim < 2 else spec.reshape(-1)
        if not isinstance(spec, Unbounded):
            return spec
        scale, clip = self.of(name, group)
        if (scale is None) == (clip is None):
            raise ConfigError(
                f"{where} is unbounded and has {'no range' if scale is None else 'two ranges'}; "
                "give either action_scale=1.0 (policies act in [-1, 1], the task gets this times "
                "as much) or action_clip=1.0 (policies draw from a normal, the task gets no more "
                f"than this), or one by agent or group, such as {{{name!r}: 1.0}}."
            )
        return spec if scale is None else Bounded(-1, 1, spec.shape, dtype=spec.dtype)
