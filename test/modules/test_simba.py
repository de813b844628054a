"""SimBa: by hand, in every kind of sharing, with memory, and in captured updates of learners."""

import math

import pytest
import torch
from learner_twins import EXACT, assert_same_learning
from pictures import picture_group, randomize_parameters
from support.tiers import second_tier_cases
from torch import nn
from torchrl.data import Unbounded

from torchrl_marl import TeamSpec
from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.envs import with_memory
from torchrl_marl.envs.toy import Arena
from torchrl_marl.errors import ConfigError
from torchrl_marl.learners.algorithms import ALGORITHMS
from torchrl_marl.learners.build import build_learners
from torchrl_marl.modules import (
    CriticConfig,
    MemoryConfig,
    ModuleStack,
    NetworkConfig,
    RecurrentCriticConfig,
    RecurrentNetworkConfig,
    make_actor,
    make_critic,
)
from torchrl_marl.modules.bodies import make_simba
from torchrl_marl.modules.build import make_agent_network
from torchrl_marl.modules.inputs import Features
from torchrl_marl.modules.sharing import share
from torchrl_marl.modules.unsharing import unshare
from torchrl_marl.recipes import load_config

SIMBA = {"num_cells": [8, 8], "body": "simba"}


class Plain(nn.Module):
    """The paper's network, in modules of torch alone."""

    def __init__(self, inputs, width, n_blocks, outputs):
        super().__init__()
        self.project = nn.Linear(inputs, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(n_blocks))
        self.expand = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(n_blocks))
        self.reduce = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(n_blocks))
        self.norm = nn.LayerNorm(width)
        self.last = nn.Linear(width, outputs)

    def forward(self, x):
        x = self.project(x)
        for norm, expand, reduce in zip(self.norms, self.expand, self.reduce):
            x = x + reduce(torch.relu(expand(norm(x))))
        return self.last(self.norm(x))

    def layers(self):
        blocks = zip(self.norms, self.expand, self.reduce)
        return [self.project, *(part for block in blocks for part in block), self.norm, self.last]


def layers_of(network):
    return [m for m in network.modules() if isinstance(m, nn.Linear | nn.LayerNorm)]


def test_equals_the_network_of_the_paper():
    network, plain = make_simba(Features(5), 3, NetworkConfig([8, 8]), gain=1.0), Plain(5, 8, 2, 3)
    randomize_parameters(network)
    for own, theirs in zip(layers_of(network), plain.layers(), strict=True):
        theirs.load_state_dict(own.state_dict())
    x = torch.randn(7, 5)
    assert torch.equal(network(x), plain(x))


def test_block_by_hand():
    """(3, -1) standardized is (1, -1). The hidden units are 1, 3 and, after the ReLU, 0."""
    network = make_simba(Features(2), 1, NetworkConfig([2]), gain=1.0)
    project, norm, expand, reduce, last_norm, last = layers_of(network)
    with torch.no_grad():
        project.weight.copy_(torch.eye(2))
        expand.weight.zero_()
        expand.weight[0, 0], expand.weight[1, 1], expand.weight[2, 0] = 1.0, 1.0, -5.0
        reduce.weight.zero_()
        reduce.weight[0, 0], reduce.weight[1, 1] = 2.0, 2.0
        last.weight.copy_(torch.tensor([[10.0, 1.0]]))
        norm.weight[1] = -3.0  # so that the second number is 3
    # (3, -1) + 2 (1, 3) = (5, 5), and standardized again (0, 0)
    x = torch.tensor([[3.0, -1.0]])
    torch.testing.assert_close(network[1](x), torch.tensor([[5.0, 5.0]]), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(network(x), torch.zeros(1, 1), rtol=0, atol=0.1)
    reduce.weight.data[1, 1] = 0.0  # (5, -1), and standardized (1, -1)
    torch.testing.assert_close(network(x), torch.tensor([[9.0]]), rtol=1e-4, atol=1e-4)


def test_initialization_of_the_paper():
    network = make_simba(Features(64), 4, NetworkConfig([256]), gain=0.01)
    project, norm, expand, reduce, _, last = layers_of(network)
    torch.testing.assert_close(project.weight.mT @ project.weight, torch.eye(64))
    torch.testing.assert_close(last.weight @ last.weight.mT, 1e-4 * torch.eye(4))
    for layer in (expand, reduce):
        deviation = math.sqrt(2 / layer.in_features)
        assert layer.weight.std().item() == pytest.approx(deviation, rel=0.01)
    assert all(not layer.bias.any() for layer in (project, norm, expand, reduce, last))
    assert bool((norm.weight == 1).all())


@pytest.mark.parametrize(
    ("cells", "sizes"),
    [
        ([], [(5, 3)]),
        ([5], [(5, 5), (5, 20), (20, 5), (5, 3)]),
        ([8, 4], [(5, 8), (8, 32), (32, 8), (8, 4), (4, 16), (16, 4), (4, 3)]),
    ],
)
def test_widths(cells, sizes):
    """Projections are at the start and where the width changes."""
    network = make_simba(Features(5), 3, NetworkConfig(cells), gain=1.0)
    linears = [m for m in network.modules() if isinstance(m, nn.Linear)]
    assert [(m.in_features, m.out_features) for m in linears] == sizes


@pytest.mark.parametrize("sharing", ["none", "full", "group", "trunk", "agent_id", "index"])
def test_every_kind_of_sharing(sharing):
    """Outputs equal a loop over the agents' modules; unsharing keeps them."""
    index = [0, 1, 0] if sharing == "index" else None
    config = NetworkConfig(**SIMBA, sharing=sharing, sharing_index=index)
    network = share(make_simba, [Features(5)] * 3, [2] * 3, [0, 0, 1], config, gain=1.0)
    randomize_parameters(network)
    features = torch.randn(7, 3, 5)
    expected = features
    for step in network:
        if isinstance(step, ModuleStack):
            rows = [step[i].detach()(expected[:, i]) for i in range(3)]
            expected = torch.stack(rows, 1)
        else:
            expected = step(expected)
    torch.testing.assert_close(network(features), expected)
    own, _ = unshare(network, 3)
    torch.testing.assert_close(own(features), network(features))


def test_agents_of_different_widths():
    config = NetworkConfig(**SIMBA, sharing="none")
    inputs = [Features(5), Features(5), Features(3)]
    network = randomize_parameters(
        share(make_simba, inputs, [2, 2, 1], [0, 0, 1], config, gain=1.0)
    )
    features = torch.randn(7, 3, 5)
    other = features.clone()
    other[:, 2, 3:] = torch.nan  # padding
    assert torch.equal(network(features), network(other))
    assert not network(features)[:, 2, 1].any()


def test_sharing_by_masks_without_mlp_raises():
    with pytest.raises(ConfigError, match=r"sharing is 'masks'.*use body=mlp"):
        make_actor(picture_group(Unbounded((5,))), NetworkConfig(**SIMBA, sharing="masks"))


def test_set_critics_with_simba_raise():
    with pytest.raises(ConfigError, match="body is 'simba'; use architecture=mlp or body=mlp"):
        make_critic(picture_group(Unbounded((5,))), CriticConfig(**SIMBA, architecture="attention"))


@pytest.mark.parametrize("sharing", ["none", "group", "trunk"])
def test_encoder_before_a_memory_ends_in_a_norm(sharing):
    """The last hidden layer is standardized for every agent: mean 0 and variance 1."""
    memory = MemoryConfig("gru", size=6)
    config = RecurrentNetworkConfig(**SIMBA, sharing=sharing, memory=memory)
    network = make_agent_network(picture_group(Unbounded((5,))), 2, config, gain=1.0)
    hidden, _ = network.encoder(torch.randn(7, 3, 5))
    assert hidden.shape == (7, 3, 8)
    torch.testing.assert_close(hidden.mean(-1), torch.zeros(7, 3), rtol=0, atol=1e-5)
    torch.testing.assert_close(hidden.var(-1, False), torch.ones(7, 3), rtol=0, atol=1e-2)


# ------------------------------------------------------------------------------------ learners

PPO = {"num_epochs": 2, "minibatch_size": 20}
STORED = {"learning_starts": 0, "minibatch_size": 16, "updates_per_frame": 0.05}
WINDOWS = {"window": 5, "minibatch_size": 20}
CASES = {
    "mappo": PPO,
    "happo, with memory": PPO | WINDOWS,
    "masac": STORED,
    "matd3": STORED,
    "hasac": STORED,
    "hatd3, with memory": STORED | WINDOWS | {"burn_in": 1},
}


def config_of(case):
    algorithm, *memory = case.split(", ")
    sharing = "none" if algorithm.startswith("ha") else "group"
    cell = MemoryConfig("gru" if memory else "none", size=6)
    actor = RecurrentNetworkConfig(**SIMBA, sharing=sharing, memory=cell)
    critic = RecurrentCriticConfig if algorithm in ("mappo", "happo") else CriticConfig
    own = {"memory": cell} if critic is RecurrentCriticConfig else {}
    schema = ALGORITHMS.schema(algorithm)
    return schema(algorithm, actor=actor, critic=critic(**SIMBA, **own), **CASES[case])


def trained(case, execution):
    env = Arena(4, n_agents=3, years=3, lives=2, seed=0, continuous_actions=True)
    torch.manual_seed(0)
    [learner] = build_learners(TeamSpec.from_env(env), config_of(case), execution=execution)
    policy = TeamPolicy(learner.actors.values())
    collector = RolloutCollector(with_memory(env, policy), policy, frames_per_batch=40)
    return [learner], [learner.learn(collector.rollout()) for _ in range(2)]


@pytest.mark.parametrize(
    "case", ["mappo", *second_tier_cases("compiled", *(case for case in CASES if case != "mappo"))]
)
def test_captured_updates_equal_eager_ones(case):
    assert_same_learning(*(trained(case, how) for how in ("eager", "trace")), **EXACT)


# ------------------------------------------------------------------------------------ settings


def test_setting_an_activation_raises():
    with pytest.raises(ConfigError, match="read only where learner.actor.body is not simba"):
        load_config("toy_arena_mappo", ["learner.actor.body=simba", "learner.actor.activation=elu"])


@pytest.mark.parametrize("recipe", ["pettingzoo_ant_matd3", "jaxmarl_smax_3m_mappo"])
def test_recipes_with_an_activation_accept_simba(recipe):
    actor = load_config(recipe, ["learner.actor.body=simba"]).learner.actor
    assert (actor.body, actor.activation) == ("simba", "tanh")


def test_algorithms_with_another_default_activation_accept_simba():
    words = ["learner=pqn", "env.continuous_actions=false", "learner.actor.body=simba"]
    assert load_config("toy_arena_mappo", words).learner.actor.body == "simba"
