"""An arena that fails when it is ordered to, by a file in a folder; each order is carried out once.

It is given as ``env.library=path/to/failing_arena.py:FailingArena``.
"""

import os
import signal
import time
from pathlib import Path

from torchrl_marl.envs.toy import Arena
from torchrl_marl.errors import SimulatorStateError


class FailingArena(Arena):
    """Carries out the orders ``raise``, ``kill`` and ``hang``; ``always`` again and again."""

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
        """Fails."""
        if order == "raise":
            raise ValueError("the engine stumbled")
        if order == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3600)


class ForgetfulArena(FailingArena):
    """Cannot be put back to where it was."""

    def snapshot(self):
        """There is none."""
        raise SimulatorStateError("no state of the arena can be had")
