"""An arena that fails on request: by a file in a folder, which it removes.

It is used as ``env.library=path/to/failing_arena.py:FailingArena``.
"""

import os
import signal
import time
from pathlib import Path

from torchrl_marl.envs.toy import Arena
from torchrl_marl.errors import SimulatorStateError


class FailingArena(Arena):
    """Executes ``raise``, ``kill`` and ``hang`` once, and ``always`` in every step."""

    def __init__(self, num_envs, *, orders, **kwargs):
        self.orders = Path(orders)
        if (self.orders / "unbuildable").exists():
            raise ModuleNotFoundError("No module named 'engine'")
        super().__init__(num_envs, **kwargs)

    def _step(self, tensordict):
        for order in ("raise", "kill", "hang"):
            try:
                (self.orders / order).unlink()
            except FileNotFoundError:
                continue
            self.carry_out(order)
        if (self.orders / "always").exists():
            raise ValueError("the engine broke")
        return super()._step(tensordict)

    def carry_out(self, order):
        """Fails in the given way."""
        if order == "raise":
            raise ValueError("the engine stumbled")
        if order == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3600)


class ForgetfulArena(FailingArena):
    """Has no snapshots, so its state cannot be restored."""

    def snapshot(self):
        """Raises, since there is none."""
        raise SimulatorStateError("no state of the arena can be had")
