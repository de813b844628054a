"""Layer norm of perceptrons: by hand, in every kind of sharing, and where it is refused."""

import pytest
import torch
from torchrl.data import Categorical, Unbounded

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.errors import ConfigError
from torchrl_marl.modules import CriticConfig, ModuleStack, NetworkConfig, make_critic
from torchrl_marl.modules.bodies import make_mlp
from torchrl_marl.modules.inputs import Features
from torchrl_marl.modules.sharing import make_shared_mlp
from torchrl_marl.modules.unsharing import unshare


def test_layer_norm_by_hand():
    """Each hidden layer is standardized before its activation, without learned weights."""
    network = make_mlp(Features(3), 2, NetworkConfig([4], layer_norm=True), gain=1.0)
    first, _, _, last = network
    assert len(list(network.parameters())) == 4
    x = torch.randn(5, 3)
    hidden = first(x)
    centered = hidden - hidden.mean(-1, keepdim=True)
    hidden = centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(network(x), last(torch.tanh(hidden)))


@pytest.mark.parametrize("sharing", ["none", "group", "trunk", "agent_id", "masks"])
def test_every_kind_of_sharing(sharing):
    """Agents of different widths run as one batch; unsharing keeps the outputs."""
    config = NetworkConfig([8], layer_norm=True, sharing=sharing)
    network = make_shared_mlp([5, 5, 3], [2, 2, 1], [0, 0, 1], config, gain=1.0)
    stacks = [module for module in network.modules() if isinstance(module, ModuleStack)]
    assert all(b.executor == "matmul" for stack in stacks for b in stack.buckets)
    features = torch.randn(7, 3, 5)
    own, _ = unshare(network, 3)
    torch.testing.assert_close(own(features), network(features))


def test_layer_norm_in_set_critics_raises():
    group = TeamSpec([AgentSpec("car", 3, Unbounded((5,)), Categorical(4))]).groups["car"]
    config = CriticConfig([8], architecture="set", layer_norm=True)
    with pytest.raises(ConfigError, match="layer_norm is true.*use architecture=mlp"):
        make_critic(group, config)
