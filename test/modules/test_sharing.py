"""Parameter sharing: parameters of agents, gradients, invalid settings."""

import math

import pytest
import torch
from cover import pairwise
from operations import CountOperations
from samples import POISON
from shared_networks import (
    CELLS,
    INDEX,
    MIXED,
    SAME,
    SETTINGS,
    N,
    config_of,
    features_of,
    make,
    modes,
    stacks_of,
    teams,
)
from torch import nn
from torch.func import functional_call
from torch.nn.functional import pad

from torchrl_marl.errors import ConfigError
from torchrl_marl.modules import NetworkConfig
from torchrl_marl.modules.config import SHARINGS, sharing_of
from torchrl_marl.modules.sharing import AgentId, AgentMask, make_shared_mlp
from torchrl_marl.modules.unsharing import unshare

INDICES = {
    "none": [0, 1, 2, 3],
    "full": [0, 0, 0, 0],
    "group": [0, 1, 0, 1],
    "clusters": INDEX,
    "index": INDEX,
}


def by_hand(network, team, features):
    """Loop over agents, each with its own features, through ordinary modules."""
    outputs = []
    for i, (width, own) in enumerate(zip(*team[:2])):
        x = features[..., i, :width]
        for step in network:
            if isinstance(step, AgentMask):
                mask = step.mask[i]
                x = pad(x, (0, len(mask) - x.shape[-1])) * mask
            elif isinstance(step, AgentId):
                x = torch.cat([x, step.agent_id[i].expand(*x.shape[:-1], -1)], -1)
            else:
                member = step[i].detach()
                linear = next(m for m in member.modules() if isinstance(m, nn.Linear))
                x = member(pad(x, (0, linear.in_features - x.shape[-1])))
        outputs.append(pad(x[..., :own], (0, max(team[1]) - own)))
    return torch.stack(outputs, -2)


def n_parameters(in_features, out_features, cells=CELLS):
    widths = [in_features, *cells, out_features]
    return sum(a * b + b for a, b in zip(widths, widths[1:]))


@pairwise(mode=SETTINGS, team=[SAME, MIXED], batch=[(), (7,), (2, 3)])
def test_equals_the_loop_over_agents(mode, team, batch):
    network = make(mode, team)
    features = features_of(team, *batch)
    output = network(features)
    assert output.shape == (*batch, N, max(team[1]))
    torch.testing.assert_close(output, by_hand(network, team, features), rtol=1e-5, atol=1e-6)
    for i, own in enumerate(team[1]):
        assert bool((output[..., i, own:] == 0).all())
        assert bool((output[..., i, :own] != 0).all())


@modes
def test_number_of_parameters(mode):
    trunk = n_parameters(5, CELLS[1], CELLS[:1])
    expected = {
        "none": N * n_parameters(5, 2),
        "full": n_parameters(5, 2),
        "group": 2 * n_parameters(5, 2),
        "trunk": trunk + N * (CELLS[1] * 2 + 2),
        "agent_id": n_parameters(5 + N, 2),
        "embedding": n_parameters(5 + 3, 2) + N * 3,
        "masks": n_parameters(5, 2),
        "clusters": 2 * n_parameters(5, 2),
        "index": 2 * n_parameters(5, 2),
    }
    assert sum(p.numel() for p in make(mode).parameters()) == expected[mode]


def test_number_of_parameters_of_agents_that_differ():
    """A network is as wide as the widest agent that shares it, and no wider."""
    for mode, expected in {
        "none": [(5, 2), (3, 1), (5, 2), (4, 3)],
        "group": [(5, 2), (3, 1), (4, 3)],
        "index": [(3, 1), (5, 3)],
        "full": [(5, 3)],
    }.items():
        copies = make(mode, MIXED)[int(mode in ("index", "full"))].copies()
        found = [sum(p.numel() for p in module.parameters()) for module in copies]
        assert sorted(found) == sorted(n_parameters(*widths) for widths in expected)


@pairwise(mode=SETTINGS, team=[SAME, MIXED], agent=range(N))
def test_gradient_reaches_only_the_agents_parameters(mode, team, agent):
    network = make(mode, team)
    network(features_of(team, 16))[:, agent].sum().backward()
    for stack in stacks_of(network):
        (bucket,) = stack.buckets
        own = stack.places[agent][1]
        for parameter in bucket.parameters():
            assert bool((parameter.grad[own] != 0).any())
            others = [k for k in range(len(parameter)) if k != own]
            assert bool((parameter.grad[others] == 0).all())
    for step in network:
        if isinstance(step, AgentId) and step.agent_id.requires_grad:
            moved = (step.agent_id.grad != 0).any(-1)
            assert moved.tolist() == [i == agent for i in range(N)]


@pytest.mark.parametrize("mode", INDICES)
def test_agents_of_one_index_share_parameters(mode):
    (stack,) = make(mode)
    assert len({stack.places[i] for i in range(N)}) == len(set(INDICES[mode]))
    for i in range(N):
        for j in range(N):
            same = INDICES[mode][i] == INDICES[mode][j]
            assert (stack.places[i] == stack.places[j]) is same
    row = features_of(SAME, 6)[:, :1].expand(-1, N, -1)
    output = stack(row)
    equal = [bool(torch.allclose(output[:, 0], output[:, i], atol=1e-5)) for i in range(N)]
    assert equal == [k == INDICES[mode][0] for k in INDICES[mode]]


@pytest.mark.parametrize("mode", ["trunk", "agent_id", "embedding", "masks"])
def test_partial_sharing_gives_distinct_outputs(mode):
    network = make(mode)
    output = network(features_of(SAME, 6)[:, :1].expand(-1, N, -1))
    for i in range(1, N):
        assert not torch.allclose(output[:, 0], output[:, i], atol=1e-3)


@pytest.mark.parametrize("agent", range(N))
def test_one_hot_columns_get_gradients_of_their_agent_only(agent):
    network = make("agent_id")
    network(features_of(SAME, 16))[:, agent].sum().backward()
    weight = next(network.parameters()).grad[0]
    moved = (weight[:, 5:] != 0).any(0)
    assert moved.tolist() == [i == agent for i in range(N)]


@pytest.mark.parametrize(("ratio", "left"), [(0.0, CELLS), (0.25, [6, 4]), (0.99, [1, 1])])
def test_masks_disable_hidden_units(ratio, left):
    network = make("masks", mask_ratio=ratio)
    masks = [step.mask for step in network if isinstance(step, AgentMask)]
    assert [mask.sum(-1).tolist() for mask in masks] == [[n] * N for n in left]
    network(features_of(SAME, 16))[:, 1].sum().backward()
    for stack, mask in zip(stacks_of(network), masks):
        bias = stack.buckets[0].module.get_submodule("0").bias.grad[0]
        assert torch.equal(bias != 0, mask[1])


def test_masks_depend_on_mask_seed_only():
    def drawn(**kwargs):
        return [s.mask for s in make("masks", **kwargs) if isinstance(s, AgentMask)]

    first = drawn()
    for a, b in zip(first, drawn(seed=5)):
        assert torch.equal(a, b)
    assert not all(torch.equal(a, b) for a, b in zip(first, drawn(mask_seed=1)))
    # Masks are part of a checkpoint.
    network, other = make("masks"), make("masks", mask_seed=1, seed=2)
    other.load_state_dict(network.state_dict())
    features = features_of(SAME, 3)
    assert torch.equal(network(features), other(features))


@modes
@pytest.mark.parametrize("value", POISON)
def test_padding_has_no_effect(mode, value):
    network = make(mode, MIXED)
    features = features_of(MIXED, 8)
    padding = torch.arange(5) >= torch.tensor(MIXED[0]).unsqueeze(-1)
    poisoned = torch.where(padding, value, features)
    results = []
    for x in (features, poisoned):
        x = x.clone().requires_grad_()
        network.zero_grad()
        output = network(x)
        output.square().sum().backward()
        results.append([output.detach(), x.grad, *(p.grad for p in network.parameters())])
        results[-1] = [tensor.clone() for tensor in results[-1]]
    for a, b in zip(*results):
        assert torch.equal(a, b)
    assert bool((results[1][1].masked_select(padding) == 0).all())


@modes
@teams
def test_initialization_is_orthogonal_and_reproducible(mode, team):
    config = config_of(mode)
    torch.manual_seed(3)
    network = make_shared_mlp(*team, config, gain=0.01)
    torch.manual_seed(3)
    again = make_shared_mlp(*team, config, gain=0.01)
    for (name, a), b in zip(network.state_dict().items(), again.state_dict().values()):
        assert torch.equal(a, b), name
    for i in range(N):
        linears = [
            m for s in stacks_of(network) for m in s[i].detach().modules() if type(m) is nn.Linear
        ]
        assert len(linears) == len(CELLS) + 1
        for linear, gain in zip(linears, [math.sqrt(2)] * len(CELLS) + [0.01]):
            weight = linear.weight / gain
            weight = weight if weight.shape[0] <= weight.shape[1] else weight.mT
            torch.testing.assert_close(weight @ weight.mT, torch.eye(len(weight)))
            assert not linear.bias.any()


def test_separate_networks_have_different_initial_weights():
    (stack,) = make("none")
    weights = next(stack.parameters())
    assert len({tuple(row.flatten().tolist()) for row in weights}) == N


@modes
def test_number_of_operations_is_independent_of_agents(mode):
    counts = []
    for times in (2, 12):
        team = tuple(part * times for part in MIXED)
        settings = {"sharing_index": INDEX * times} if "sharing_index" in SETTINGS[mode] else {}
        network = make(mode, team, **settings)
        features = features_of(team, 3)
        network(features)
        with CountOperations() as counted:
            network(features).sum().backward()
        counts.append(counted.count)
    assert counts[0] == counts[1]


@pytest.mark.compiled
@modes
def test_compiles_as_one_graph(mode):
    torch._dynamo.reset()
    network = make(mode, MIXED)
    features = features_of(MIXED, 3)
    wanted = network(features)
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(features), wanted)


@modes
def test_vmap_over_parameter_sets(mode):
    """As in SAC, whose two critics are one network called by vmap."""
    networks = [make(mode, MIXED, seed=seed) for seed in (0, 1)]
    features = features_of(MIXED, 3)
    tensors = {
        name: torch.stack([dict(n.named_parameters())[name].detach() for n in networks])
        for name, _ in networks[0].named_parameters()
    }
    both = torch.vmap(lambda p: functional_call(networks[0], p, (features,)))(tensors)
    for output, network in zip(both, networks):
        torch.testing.assert_close(output, network(features))


@pytest.mark.parametrize("sharing", SHARINGS.names())
@pytest.mark.parametrize("share_params", [None, True, False])
def test_share_params_sets_or_conflicts_with_sharing(sharing, share_params):
    config = NetworkConfig(sharing=sharing, share_params=share_params)
    word = {True: "group", False: "none"}.get(share_params, sharing)
    if sharing in ("group", word):
        assert sharing_of(config) == word
    else:
        with pytest.raises(ConfigError, match=f"means sharing={word}.*'{sharing}'"):
            sharing_of(config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sharing": "trunc"}, "'trunc'; did you mean 'trunk'"),
        ({"sharing": "agent_id", "agent_id": "one_hot"}, "did you mean 'onehot'"),
        ({"sharing": "index"}, "sharing_index is not set; set it"),
        ({"sharing": "clusters"}, "not set; find it first by cluster_agents"),
        ({"sharing": "index", "sharing_index": [0, 1]}, "has 2 entries, expected 4"),
        ({"sharing": "index", "sharing_index": [0, 2, 2, 0]}, "leaves out network 1"),
        ({"sharing": "index", "sharing_index": [0, 10**12, 0, 0]}, "leaves out network 1"),
        ({"sharing": "index", "sharing_index": [0, -1, 0, 0]}, "negative"),
        ({"sharing": "full", "sharing_index": [0, 0, 0, 0]}, "sharing_index is given, but"),
        ({"sharing": "trunk", "num_cells": []}, "needs hidden layers"),
        ({"sharing": "masks", "num_cells": []}, "needs hidden layers"),
    ],
)
def test_invalid_settings_raise(settings, message):
    with pytest.raises(ConfigError, match=message):
        make_shared_mlp(*SAME, NetworkConfig(**settings), gain=1.0)


@pytest.mark.parametrize("team", [([5, 5], [2], [0, 0]), ([], [], [])])
def test_inconsistent_numbers_of_agents_raise(team):
    with pytest.raises(ValueError, match="one of each for every agent"):
        make_shared_mlp(*team, NetworkConfig(), gain=1.0)


@pytest.mark.parametrize("mode", ["none", "full", "agent_id", "embedding"])
def test_networks_without_hidden_layers(mode):
    network = make(mode, MIXED, num_cells=[])
    features = features_of(MIXED, 6)
    torch.testing.assert_close(network(features), by_hand(network, MIXED, features))


@modes
def test_one_agent_alone(mode):
    settings = {"sharing_index": [0]} if "sharing_index" in SETTINGS[mode] else {}
    team = ([5], [2], [0])
    network = make(mode, team, **settings)
    features = features_of(team, 6)
    torch.testing.assert_close(network(features), by_hand(network, team, features))
    torch.testing.assert_close(unshare(network)[0](features), network(features))
