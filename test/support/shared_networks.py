"""Networks for every kind of sharing, for homogeneous and heterogeneous teams."""

import pytest
import torch

from torchrl_marl.modules import ModuleStack, NetworkConfig
from torchrl_marl.modules.sharing import make_shared_mlp

CELLS = [8, 6]
N = 4
SAME = ([5] * N, [2] * N, ["a", "b", "a", "b"])
MIXED = ([5, 3, 5, 4], [2, 1, 2, 3], ["a", "b", "a", "c"])  # interleaved, all widths differ
INDEX = [1, 0, 1, 1]
SETTINGS = {
    "none": {},
    "full": {},
    "group": {},
    "trunk": {},
    "agent_id": {},
    "embedding": {"sharing": "agent_id", "agent_id": "embedding", "agent_id_size": 3},
    "masks": {"mask_ratio": 0.5},
    "clusters": {"sharing_index": INDEX},
    "index": {"sharing_index": INDEX},
}


modes = pytest.mark.parametrize("mode", SETTINGS)
teams = pytest.mark.parametrize("team", [SAME, MIXED], ids=["same", "mixed"])


def config_of(mode, **kwargs):
    return NetworkConfig(**{"num_cells": CELLS, "sharing": mode} | SETTINGS[mode] | kwargs)


def make(mode, team=SAME, *, gain=1.0, seed=0, **kwargs):
    """A network with nonzero biases."""
    torch.manual_seed(seed)
    network = make_shared_mlp(*team, config_of(mode, **kwargs), gain=gain)
    rows = [stack[i].row() for stack in stacks_of(network) for i in range(len(team[0]))]
    with torch.no_grad():
        for row in rows:  # views without padding
            for name, parameter in row.items():
                if name.endswith("bias"):
                    parameter.add_(torch.randn_like(parameter))
    return network


def features_of(team, *batch, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*batch, len(team[0]), max(team[0]), generator=generator)


def stacks_of(network):
    return [step for step in network if isinstance(step, ModuleStack)]
