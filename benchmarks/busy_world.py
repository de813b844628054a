"""Environment in which each step takes a set number of milliseconds of Python for each copy.

It stands for simulators that step copies one by one. Use it as
``env.library=benchmarks/busy_world.py:BusyArena``.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

from tensordict import TensorDictBase

from torchrl_marl.envs.toy import Arena


class BusyArena(Arena):
    """The arena, which computes for a while in every step.

    Args:
        num_envs (int): number E of copies.

    Keyword Args:
        milliseconds (float): of one core, for each copy and step.
        orders (str, optional): folder; if it has a file ``raise``, the environment removes the
            file and raises an error.
        **kwargs: as in :class:`Arena`.
    """

    def __init__(
        self, num_envs: int, *, milliseconds: float = 2.0, orders: str = "", **kwargs: Any
    ) -> None:
        self.milliseconds, self.orders = milliseconds, orders
        super().__init__(num_envs, **kwargs)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        if self.orders:
            with contextlib.suppress(FileNotFoundError):
                (Path(self.orders) / "raise").unlink()
                raise RuntimeError("the engine stumbled")
        # Of this thread's own time: a core that is shared makes the step longer.
        end = time.thread_time() + self.num_envs * self.milliseconds / 1e3
        while time.thread_time() < end:
            pass
        return super()._step(tensordict)
