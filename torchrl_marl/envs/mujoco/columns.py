"""Finds which numbers of MuJoCo's data an observation consists of, and their limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from torchrl_marl.errors import ConfigError

__all__ = ["Columns", "read_columns"]

_HUGE_FACTOR, _LARGEST_LIMIT = 1e6, 1e3  # a limit is below the second number


class Columns(NamedTuple):
    """Observation as a choice of columns, each with its limits.

    Shapes: where, low, high: ``[O]``
    """

    where: np.ndarray
    low: np.ndarray
    high: np.ndarray


def read_columns(
    robot: Any, data: Any, fields: Sequence[str], observe: Callable[[], dict[str, np.ndarray]]
) -> dict[str, Columns]:
    """Returns the columns of each observation in the concatenated fields of MuJoCo's data.

    Gymnasium's own functions compute observations from made-up data, in which each number occurs
    once. The result shows which number is where. Huge numbers show the limits.

    Args:
        robot (MujocoEnv): Gymnasium's environment; its ``data`` are replaced.
        data (MjData): the robot's data.
        fields (sequence of str): names of the fields.
        observe (callable): returns the observations of the robot's present data, by name.

    Raises:
        ConfigError: an observation has a number that is not in the fields.
    """
    shapes = [getattr(data, field).shape for field in fields]
    sizes = [int(np.prod(shape)) for shape in shapes]
    made_up = np.random.default_rng(0).permutation(sum(sizes)) + 1.0
    made_up = made_up / (1e4 * made_up.size)  # below any limit
    parts = [x.reshape(shape) for x, shape in zip(np.split(made_up, np.cumsum(sizes)[:-1]), shapes)]

    def observed(scale: float) -> dict[str, np.ndarray]:
        robot.data = SimpleNamespace(**{f: x * scale for f, x in zip(fields, parts)})
        return observe()

    order = np.argsort(made_up)
    plain, large, small = observed(1.0), observed(1e5 * _HUGE_FACTOR), observed(-1e5 * _HUGE_FACTOR)
    columns = {}
    for name, values in plain.items():
        index = order[np.searchsorted(made_up[order], values).clip(max=made_up.size - 1)]
        if not np.array_equal(made_up[index], values):
            raise ConfigError(
                f"the observation of {name} has numbers other than {', '.join(fields)}; leave "
                "settings that change observations at their defaults."
            )
        high = np.where(large[name] < _LARGEST_LIMIT, large[name], np.inf)
        low = np.where(small[name] > -_LARGEST_LIMIT, small[name], -np.inf)
        columns[name] = Columns(index, low, high)
    return columns
