"""A critic that returns its observation."""

import torch
from tensordict.nn import TensorDictModule
from torch import nn


class Echo(nn.Module):
    """The value is the observation, or 0 for masked agents."""

    def __init__(self, raised_by=0.0):
        super().__init__()
        self.raised_by = raised_by

    def forward(self, observation, mask):
        return torch.where(mask.unsqueeze(-1), observation, 0.0) + self.raised_by


def make_echo(group, raised_by=0.0):
    keys = [("car", "observation"), ("car", "mask")]
    return TensorDictModule(Echo(raised_by), keys, [("car", "state_value")])
