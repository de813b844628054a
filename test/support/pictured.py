"""A toy environment whose state is an image."""

import torch
from torchrl.data import Unbounded

from torchrl_marl.envs.toy import Arena


class PicturedArena(Arena):
    """An arena whose state is an image of 6 x 6 pixels."""

    def register_state(self, spec):
        super().register_state(Unbounded((6, 6, 3)))

    def _observe(self, **leaves):
        out = super()._observe(**leaves)
        rows = torch.nn.functional.pad(out["state"], (0, 108))[:, :108]
        return {**out, "state": rows.reshape(-1, 6, 6, 3)}
