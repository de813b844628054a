"""Policies that act on arrays: graphs of a few batch sizes against the eager policy."""

import numpy as np
import pytest
import torch
from samples import make_group
from torchrl.envs.utils import ExplorationType

from torchrl_marl.apps.external.graph_acting import Acting, GraphActing
from torchrl_marl.collectors import TeamPolicy
from torchrl_marl.envs.remember import hidden_sizes
from torchrl_marl.modules import (
    CommunicationConfig,
    MemoryConfig,
    NetworkConfig,
    QNetworkConfig,
    RecurrentNetworkConfig,
    TeamNetworkConfig,
    make_actor,
    make_q_actor,
)

DRAWN, BEST = ExplorationType.RANDOM, ExplorationType.DETERMINISTIC


def make_policy(kind):
    """Two groups: one of the given kind, the other plain."""
    torch.manual_seed(0)
    mouse = make_group("bounded", 2, name="mouse", o=3)
    config = NetworkConfig(num_cells=[8])
    if kind == "memory":
        car, config = make_group(), RecurrentNetworkConfig([8], memory=MemoryConfig("gru", size=4))
    elif kind == "talk":
        car = make_group()
        talk = CommunicationConfig("tarmac", message_size=4, key_size=3)
        config = TeamNetworkConfig([8], communication=talk)
    elif kind in ("one_hot", "categorical"):
        car = make_group(kind, action_mask=True)
    else:
        car = make_group("bounded")
    if kind == "values":
        car = make_group("categorical", action_mask=True)
        return TeamPolicy([make_q_actor(car, QNetworkConfig(num_cells=[8])), make_actor(mouse)])
    return TeamPolicy([make_actor(car, config), make_actor(mouse, NetworkConfig([8]))])


def make_leaves(policy, n, seed=0):
    draw = np.random.default_rng(seed)
    leaves = {}
    for name, agents, width in (("car", 3, 5), ("mouse", 2, 3)):
        leaves[name, "observation"] = draw.normal(size=(n, agents, width)).astype(np.float32)
        leaves[name, "mask"] = draw.random((n, agents)) < 0.7
        leaves[name, "done"] = ~leaves[name, "mask"][..., None]
        if (name, "action_mask") in policy.in_keys:
            leaves[name, "action_mask"] = draw.random((n, agents, 4)) < 0.7
            leaves[name, "action_mask"][..., 0] = True
        if name in hidden_sizes(policy):
            size = hidden_sizes(policy)[name]
            leaves[name, "hidden"] = draw.normal(size=(n, agents, size)).astype(np.float32)
            leaves[name, "is_init"] = draw.random((n, agents, 1)) < 0.3
    leaves["done",] = np.zeros((n, 1), bool)
    return leaves


def assert_same_arrays(found, expected, tolerance=1e-6):
    assert found.keys() == expected.keys()
    for key in expected:
        assert found[key].dtype == expected[key].dtype
        np.testing.assert_allclose(found[key], expected[key], rtol=0, atol=tolerance, err_msg=key)


KINDS = ("bounded", "one_hot", "categorical", "values", "memory", "talk")


@pytest.mark.parametrize("kind", KINDS)
def test_graph_actions_match_the_policy(kind):
    """With as many rows as a graph has, with fewer, and with more than the largest."""
    policy = make_policy(kind)
    eager, graphs = Acting(policy), GraphActing(policy, execution="trace", sizes=(1, 4))
    for n in (1, 4, 3, 9, 1):
        leaves = make_leaves(policy, n, seed=n)
        before = {key: rows.copy() for key, rows in leaves.items()}
        assert_same_arrays(graphs.act(leaves, BEST), eager.act(leaves, BEST))
        assert all(np.array_equal(leaves[key], before[key]) for key in before)
    assert ("car", "action") in eager.act(leaves, BEST)
    assert (("next", "car", "hidden") in graphs.act(leaves, BEST)) == (kind == "memory")


@pytest.mark.parametrize("kind", ["bounded", "categorical"])
def test_samples_of_a_full_graph_match_the_policy(kind):
    policy = make_policy(kind)
    eager, graphs = Acting(policy), GraphActing(policy, execution="trace", sizes=(4,))
    leaves = make_leaves(policy, 4)
    graphs.prepare(leaves, DRAWN)
    state = torch.get_rng_state()
    graphs.prepare(leaves, BEST)
    assert torch.equal(torch.get_rng_state(), state)  # recording draws no random numbers
    found = graphs.act(leaves, DRAWN)
    torch.set_rng_state(state)
    assert_same_arrays(found, eager.act(leaves, DRAWN), tolerance=0)
    again = graphs.act(leaves, DRAWN)
    assert not np.array_equal(again["car", "action"], found["car", "action"])


def test_samples_of_a_padded_graph_follow_the_policy_distribution():
    """Three rows in a graph of four: action frequencies match the logits."""
    policy = make_policy("categorical")
    graphs = GraphActing(policy, execution="trace", sizes=(4,))
    leaves = make_leaves(policy, 3)
    torch.manual_seed(0)
    n, counts = 1500, np.zeros((3, 3, 4))
    for _ in range(n):
        acted = graphs.act(leaves, DRAWN)
        counts += np.eye(4)[acted["car", "action"]]
    logits = acted["car", "logits"].astype(np.float64)
    logits = np.where(leaves["car", "action_mask"], logits, -np.inf)
    chances = np.exp(logits - logits.max(-1, keepdims=True))
    chances /= chances.sum(-1, keepdims=True)
    acts = leaves["car", "mask"]
    deviation = np.sqrt(chances * (1 - chances) / n)
    assert (np.abs(counts / n - chances) <= 5 * deviation + 1e-9)[acts].all()


def test_compiled_graph_actions_match_the_policy():
    policy = make_policy("bounded")
    eager, graphs = Acting(policy), GraphActing(policy, sizes=(4,))
    for n in (4, 2):
        leaves = make_leaves(policy, n)
        assert_same_arrays(graphs.act(leaves, BEST), eager.act(leaves, BEST))


def test_graphs_use_updated_parameters():
    policy = make_policy("bounded")
    graphs, leaves = GraphActing(policy, execution="trace", sizes=(4,)), None
    leaves = make_leaves(policy, 4)
    before = graphs.act(leaves, BEST)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.3)
    found = graphs.act(leaves, BEST)
    assert_same_arrays(found, Acting(policy).act(leaves, BEST))
    assert not np.allclose(found["car", "action"], before["car", "action"])


def test_replaced_parameters_are_recaptured():
    policy = make_policy("bounded")
    graphs = GraphActing(policy, execution="trace", sizes=(4,))
    leaves = make_leaves(policy, 4)
    graphs.prepare(leaves, BEST)
    for module in policy.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(parameter.detach() + 0.3))
    graphs.prepare(leaves, BEST)
    assert_same_arrays(graphs.act(leaves, BEST), Acting(policy).act(leaves, BEST))


def test_policy_that_cannot_be_captured_runs_eagerly():
    def policy(td):
        seen = td["car", "observation"]
        best = seen.sum() > 0  # the branch depends on the values of all rows
        td["car", "action"] = seen if best else -seen
        return td

    graphs = GraphActing(policy, execution="trace", sizes=(4,))
    leaves = {("car", "observation"): np.ones((2, 3, 1), np.float32)}
    with pytest.warns(UserWarning, match="cannot be captured as a graph and runs eagerly"):
        assert (graphs.act(leaves, BEST)["car", "action"] == 1).all()
    assert (graphs.act(leaves, BEST)["car", "action"] == 1).all()
