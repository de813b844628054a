"""Parameters of custom environments that each new episode draws from ranges.

Shapes: E envs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from torchrl_marl.envs.ranges import ValueRange, read_ranges
from torchrl_marl.errors import ConfigError, nearest, quoted

__all__ = ["DomainParameters", "draw", "known_ranges"]


def draw(
    range: ValueRange, shape: Sequence[int], device: torch.device | str | None = None
) -> Tensor:
    """Draws values from a range with torch's active generator; a fixed range draws nothing.

    Examples:
        >>> draw(ValueRange(2.0, 2.0), (3,))
        tensor([2., 2., 2.])
    """
    if range.is_fixed:
        return torch.full(tuple(shape), range.low, device=device)
    low, high, share = range.low, range.high, torch.rand(tuple(shape), device=device)
    if range.log:
        return torch.exp(math.log(low) + math.log(high / low) * share).clamp(low, high)
    return low + (high - low) * share


def known_ranges(
    owner: str, ranges: Mapping[str, Any], known: Sequence[str]
) -> dict[str, ValueRange]:
    """Reads ranges of an environment's parameters.

    Args:
        owner (str): name of the environment, for messages.
        ranges (mapping): name of a parameter -> number, ``[low, high]`` or ``[low, high, log]``.
        known (sequence of str): names of the environment's parameters.

    Raises:
        ConfigError: unknown parameter or malformed range; the message names the known parameters.
    """
    for name in ranges:
        if name not in known:
            raise ConfigError(
                f"{owner} has no parameter {quoted(name)} to randomize; "
                f"{nearest(name, known)}it has {', '.join(known) or 'none'}."
            )
    return read_ranges(ranges)


class DomainParameters:
    """Part of :class:`~torchrl_marl.envs.MarlEnv` that draws an episode's parameters."""

    device: Any
    batch_size: Any
    num_envs: int
    is_spec_locked: bool
    _episode: dict[str, Any]
    _not_simulator: frozenset[Any]
    _nominal: dict[str, Tensor]
    _ranges: dict[str, ValueRange]
    _domain: dict[str, Tensor]
    _refuse_late: Callable[[str], None]

    def register_domain_parameter(
        self, name: str, nominal: float | Tensor, shape: Sequence[int] = ()
    ) -> None:
        """Adds a parameter of the simulation that can be randomized; call it in ``__init__``.

        ``self.domain[name]`` has its current values. They are the nominal value, unless
        :meth:`randomize` sets a range.

        Args:
            name (str): name of the parameter.
            nominal (float or Tensor): value without randomization.
            shape (sequence of int): shape of one env's value, such as ``(N,)`` for one value per
                agent. Each element is drawn separately.

        Raises:
            ConfigError: the parameter exists already, or ``__init__`` is over.

        Shapes:
            - ``self.domain[name]``: ``[E, *shape]``
        """
        self._refuse_late(f"parameter {name!r}")
        if name in self._nominal:
            raise ConfigError(
                f"{type(self).__name__}: parameter {name!r} is registered twice; use another name."
            )
        value = torch.as_tensor(nominal, dtype=torch.float32, device=self.device)
        self._nominal[name] = value
        self._domain[name] = value.expand(self.num_envs, *shape).clone()
        # From now on, the values are part of the simulation's state.
        self._not_simulator = self._not_simulator - {("_domain",)}

    @property
    def domain(self) -> TensorDict:
        """Values of the parameters in each env's current episode, as a TensorDict ``[E]``."""
        return TensorDict(dict(self._domain), self.batch_size, self.device)

    def randomize(self, ranges: Mapping[str, Any]) -> None:
        """Sets the ranges from which each new episode draws its parameters.

        Parameters that are not named have their nominal values. Fixed values apply immediately,
        ranges from the next reset of each env.

        Args:
            ranges (mapping): name of a parameter -> number, ``[low, high]`` or
                ``[low, high, log]``.

        Raises:
            ConfigError: unknown parameter or malformed range; the message names the known
                parameters.
        """
        self._ranges = known_ranges(type(self).__name__, ranges, list(self._nominal))
        for name, value in self._nominal.items():
            range = self._ranges.get(name)
            shape = self._domain[name].shape
            if range is None:
                self._domain[name] = value.expand(shape).clone()
            elif range.is_fixed:
                self._domain[name] = draw(range, shape, self.device)

    def _draw_domain(self) -> None:
        """Draws the parameters of new episodes in all envs."""
        for name, range in self._ranges.items():
            if not range.is_fixed:
                self._domain[name] = draw(range, self._domain[name].shape, self.device)
