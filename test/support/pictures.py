"""Groups with image observations."""

import torch
from torchrl.data import Bounded, Categorical

from torchrl_marl import AgentSpec, TeamSpec

BYTES = Bounded(0, 255, (6, 5, 3), dtype=torch.uint8)


def picture_group(observation=BYTES, n=3, name="car"):
    spec = AgentSpec(name, n, observation, Categorical(4))
    return TeamSpec([spec]).groups[name]


def randomize_parameters(module):
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module
