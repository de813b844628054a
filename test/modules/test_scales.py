"""Initial standard deviations, and state-independent ones in every kind of sharing."""

import math

import pytest
import torch
from exported import check_players_alone
from shared_networks import SETTINGS
from tensordict import TensorDict
from torchrl.data import Bounded, Categorical, Unbounded

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.envs.toy import Arena
from torchrl_marl.errors import ConfigError
from torchrl_marl.modules import MemoryConfig, TeamNetworkConfig, make_actor
from torchrl_marl.modules.registry import BODIES, register_body
from torchrl_marl.modules.unsharing import unshare
from torchrl_marl.specs import Hybrid

N_SCALES = {"none": 4, "full": 1, "group": 2, "trunk": 4, "agent_id": 1, "embedding": 1}
N_SCALES |= {"masks": 1, "clusters": 2, "index": 2}
"""Number of scales for each action of four agents of two kinds, as in sharing_index."""


def config_of(way="none", **settings):
    chosen = {"num_cells": [8], "sharing": way} | SETTINGS[way] | settings
    return TeamNetworkConfig(**chosen, state_independent_scale=True)


def group_of(*actions, kinds=False):
    """Four agents; those of the first of two kinds observe two numbers and the others three."""
    widths = (2, 3) if kinds or len(actions) == 2 else (3,)
    agents = [
        AgentSpec(f"kind{i}_", 4 // len(widths), Unbounded((width,)), action)
        for i, (width, action) in enumerate(zip(widths, actions * 2))
    ]
    return TeamSpec({"a": agents}).groups["a"]


def batch_of(group, seed=0, rows=5):
    generator = torch.Generator().manual_seed(seed)
    width = group.observation_dim
    observation = torch.randn(rows, group.n_agents, width, generator=generator)
    mask = torch.ones(rows, group.n_agents, dtype=torch.bool)
    return TensorDict({group.name: {"observation": observation, "mask": mask}}, [rows])


def scales_of(module):
    return [p for name, p in module.named_parameters() if name.split(".")[-1] == "scale"]


def set_scales(actor, start=0.5):
    """Raw values 0.5, 0.6, 0.7, ... in the order of networks and actions."""
    with torch.no_grad():
        for scale in scales_of(actor):
            scale.copy_(start + 0.1 * torch.arange(scale.numel()).view(scale.shape))
    return actor


@pytest.mark.parametrize("kinds", [False, True])
@pytest.mark.parametrize("way", SETTINGS)
def test_each_network_has_separate_scales(way, kinds):
    group = group_of(Unbounded((2,)), kinds=kinds)
    n = 1 if way == "group" and not kinds else N_SCALES[way]
    actor = set_scales(make_actor(group, config_of(way)))
    assert sum(scale.numel() for scale in scales_of(actor)) == 2 * n
    first, second = (actor(batch_of(group, seed))[group.name] for seed in (0, 1))
    assert not torch.equal(first["loc"], second["loc"])
    assert torch.equal(first["scale"], second["scale"])
    # The numbers of the networks: by kind, or by the index 1, 0, 1, 1.
    index = {4: [0, 1, 2, 3], 1: [0, 0, 0, 0], 2: [1, 0, 1, 1]}[n]
    index = [0, 0, 1, 1] if way == "group" and kinds else index
    raw = torch.tensor([[0.5 + 0.1 * (2 * k + i) for i in range(2)] for k in index])
    # Softplus, moved such that 0 gives 1, and at least 0.01.
    expected = 0.01 + (1 + (raw + math.log(math.exp(0.99) - 1)).exp()).log()
    torch.testing.assert_close(first["scale"], expected.expand(5, 4, 2))


def test_initial_policy_by_hand():
    """Standard deviations of 1: at its mean an action of two numbers has density 1 / (2 pi)."""
    group = group_of(Unbounded((2,)))
    actor, batch = make_actor(group, config_of()), batch_of(group)
    distribution = actor.get_dist(batch)
    density = distribution.log_prob(distribution.mean)
    torch.testing.assert_close(density, torch.full((5, 4), -math.log(2 * math.pi)))
    # One standard deviation away in one number costs 1/2; its gradient by the raw value is
    # (1 - 1) softplus' = 0 there, and -softplus' = -(1 - exp(-0.99)) for the number at its mean.
    away = distribution.mean.detach() + torch.tensor([1.0, 0.0])
    distribution.log_prob(away).sum().backward()
    (scale,) = scales_of(actor)
    expected = torch.tensor([0.0, -5 * (1 - math.exp(-0.99))]).expand(4, 2)
    torch.testing.assert_close(scale.grad, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("parameters", [False, True])
@pytest.mark.parametrize("action", [Bounded(-1, 1, (2,)), Hybrid([3], Bounded(-1, 1, (2,)))])
def test_initial_scale_setting(action, parameters):
    group = group_of(action)
    config = TeamNetworkConfig([8], initial_scale=0.3, state_independent_scale=parameters)
    scale = make_actor(group, config)(batch_of(group))["a", "scale"]
    tolerance = 1e-6 if parameters else 0.01  # the last layer is small at the start, and not 0
    torch.testing.assert_close(scale, torch.full((5, 4, 2), 0.3), rtol=0, atol=tolerance)


def test_scale_gradient_stays_with_its_agent():
    group = group_of(Bounded(-1, 1, (2,)))
    actor = make_actor(group, config_of())
    log_prob = actor(batch_of(group))[group.name, "action_log_prob"]
    log_prob[:, 2].sum().backward()
    (scale,) = scales_of(actor)
    assert scale.grad.ne(0).any(-1).tolist() == [False, False, True, False]


@pytest.mark.parametrize("way", SETTINGS)
def test_unsharing_keeps_outputs_and_scales(way):
    group = group_of(Unbounded((2,)), kinds=True)
    actor = set_scales(make_actor(group, config_of(way)))
    network = actor[0].module.network
    alone, origins = unshare(network, 4)
    features = torch.randn(6, 4, 3)
    torch.testing.assert_close(alone(features), network(features)[0], rtol=1e-6, atol=1e-6)
    parameters = dict(alone.named_parameters())
    assert origins.keys() == parameters.keys()
    assert sum(scale.numel() for scale in scales_of(alone)) == 8


def test_hybrid_actions_keep_their_logits():
    group = group_of(Hybrid([3], Bounded(-1, 1, (2,))))
    acted = make_actor(group, config_of())(batch_of(group))[group.name]
    assert acted["logits"].shape == (5, 4, 3)
    assert torch.equal(acted["scale"], torch.ones(5, 4, 2))


def test_agents_with_fewer_actions_are_padded():
    group = group_of(Bounded(-1, 1, (2,)), Bounded(-1, 1, (1,)))
    actor = make_actor(group, config_of())
    actor(batch_of(group))["a", "action_log_prob"].sum().backward()
    (scale,) = scales_of(actor)
    assert scale.grad.ne(0).tolist() == [[True, True]] * 2 + [[True, False]] * 2


def test_discrete_actions_have_no_scales():
    group = group_of(Categorical(3))
    assert scales_of(make_actor(group, config_of())) == []


def test_scales_do_not_depend_on_the_memory():
    group = group_of(Unbounded((2,)))
    actor = set_scales(make_actor(group, config_of("trunk", memory=MemoryConfig("gru", 4))))
    batch = batch_of(group)
    batch[group.name].update(
        {"hidden": torch.zeros(5, 4, 4), "is_init": torch.ones(5, 4, 1, dtype=torch.bool)}
    )
    scale = actor(batch)["a", "scale"]
    assert torch.equal(scale, scale[:1].expand(5, 4, 2))
    assert len(scale.unique()) == 8


@pytest.mark.parametrize("way", ["full", "none", "trunk"])
def test_exported_agents_act_the_same(way):
    env = Arena(2, n_agents=4, continuous_actions=True, max_steps=12, seed=0)
    found = check_players_alone(env, make_actor, config=config_of(way, initial_scale=0.4))
    assert (found.differ, found.largest < 1e-5) == (0, True)


@pytest.mark.parametrize("scale", [0, -1.0, 0.01, math.inf, math.nan, "x"])
def test_invalid_initial_scales_raise(scale):
    with pytest.raises(ConfigError, match="initial_scale is .*, expected a number above 0.01"):
        make_actor(group_of(Unbounded((2,))), TeamNetworkConfig(initial_scale=scale))


def test_state_independent_scale_with_team_body_raises():
    class Whole(torch.nn.Linear):
        def forward(self, features, mask, context):
            return super().forward(features), None

    def make_body(group, out_features, config, *, gain, device):
        return Whole(group.observation_dim, out_features)

    register_body("whole", "one network over all", body=make_body)
    try:
        group = group_of(Unbounded((2,)))
        with pytest.raises(ConfigError, match="state_independent_scale is true, .*body is 'whole'"):
            make_actor(group, config_of(body="whole"))
    finally:
        BODIES.remove("whole")
