"""Heterogeneous teams, their observations, and the sizes of their networks."""

import torch
from tensordict import TensorDict

from torchrl_marl.modules import NetworkConfig
from torchrl_marl.specs.joining import join

H = 8


def random_inputs(team, *batch, seed=0, alive=0.7):
    """Random padded observations of a team, with random masks."""
    generator = torch.Generator().manual_seed(seed)
    td = TensorDict({}, batch)
    for name, group in team.groups.items():
        n, o = group.n_agents, group.observation_dim
        observations = torch.randn(*batch, n, o, generator=generator)
        own = torch.ones(n, o) if group.observation_mask is None else group.observation_mask
        leaves = {"observation": observations * own}
        leaves["mask"] = torch.rand(*batch, n, generator=generator) < alive
        if group.action_mask_key is not None:
            legal = torch.rand(*batch, n, group.n_actions, generator=generator) < 0.6
            legal[..., 0] = True
            own = group.action_padding
            leaves["action_mask"] = legal if own is None else legal & own
        td[name] = TensorDict(leaves, [*batch, n])
    if team.state_spec is not None:
        td["state"] = torch.randn(*batch, 7, generator=generator)
    return td


def randomize_parameters(module, seed=5):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return module


def joined_of(team, **kwargs):
    return join(tuple(team.groups.values()), **kwargs)


def mlp_size(i, o):
    return i * H + H + H * o + o


def config_with(sharing, n_agents, cls=NetworkConfig, **kwargs):
    index = [i % 2 for i in range(n_agents)] if sharing in ("index", "clusters") else None
    return cls([H], sharing=sharing, sharing_index=index, **kwargs)


def size_of(sharing, inputs, outputs, n_agents, n_kinds):
    """Parameters of agents' networks, stored padded to the widest."""
    return {
        "none": n_agents * mlp_size(inputs, outputs),
        "full": mlp_size(inputs, outputs),
        "group": n_kinds * mlp_size(inputs, outputs),
        "trunk": inputs * H + H + n_agents * (H * outputs + outputs),
        "agent_id": mlp_size(inputs + n_agents, outputs),
        "masks": mlp_size(inputs, outputs),
        "clusters": 2 * mlp_size(inputs, outputs),
        "index": 2 * mlp_size(inputs, outputs),
    }[sharing]


SHARINGS = ("none", "full", "group", "trunk", "agent_id", "masks", "clusters", "index")


def n_parameters(module):
    return sum(p.numel() for p in module.parameters())
