"""Unsharing of networks, and the Adam states that carry over."""

import pytest
import torch
from cover import pairwise
from shared_networks import MIXED, SAME, SETTINGS, N, features_of, make, modes, stacks_of, teams
from torch import nn

from torchrl_marl.modules.unsharing import carry_state, unshare


@modes
@teams
def test_unsharing_keeps_the_outputs(mode, team):
    network = make(mode, team)
    before = {name: p.clone() for name, p in network.named_parameters()}
    alone, origins = unshare(network)
    assert all(len(stack.buckets) == 1 for stack in stacks_of(alone))  # one batched call
    features = features_of(team, 6)
    torch.testing.assert_close(alone(features), network(features), rtol=1e-6, atol=1e-6)
    parameters = dict(alone.named_parameters())
    assert origins.keys() == parameters.keys()
    for name, origin in origins.items():
        assert torch.equal(origin.take(before[origin.name]), parameters[name])
    # An update of one agent does not change the others.
    target = 2
    optimizer = torch.optim.SGD(alone.parameters(), 0.1)
    output = alone(features)
    output[:, target].square().sum().backward()
    optimizer.step()
    changed = (alone(features) != output).flatten(2).any(-1).any(0)
    assert changed.tolist() == [i == target for i in range(N)]
    for name, p in network.named_parameters():
        assert torch.equal(p, before[name])


@modes
def test_unsharing_twice_changes_nothing(mode):
    once, _ = unshare(make(mode, MIXED))
    twice, origins = unshare(once)
    assert [*once.state_dict()] == [*twice.state_dict()]
    for name, origin in origins.items():
        assert origin.name == name
        assert origin.rows == tuple(range(N))
    features = features_of(MIXED, 6)
    torch.testing.assert_close(twice(features), once(features))


def adam_step(p, grad, state, lr, beta1=0.9, beta2=0.999, eps=1e-8):
    t = float(state["step"]) + 1
    m = beta1 * state["exp_avg"] + (1 - beta1) * grad
    v = beta2 * state["exp_avg_sq"] + (1 - beta2) * grad**2
    return p - lr * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + eps)


def trained(network, team, lr=0.01):
    optimizer = torch.optim.Adam(network.parameters(), lr)
    for seed in range(3):
        optimizer.zero_grad()
        network(features_of(team, 6, seed=seed)).square().sum().backward()
        optimizer.step()
    return optimizer


def carried(network, alone, origins, optimizer, lr=0.01):
    """An optimizer of the unshared network, with the state of the other."""
    state = {name: optimizer.state[p] for name, p in network.named_parameters()}
    new, parameters = torch.optim.Adam(alone.parameters(), lr), dict(alone.named_parameters())
    for name, own in carry_state(state, origins).items():
        new.state[parameters[name]] = own
    return new


@pairwise(mode=SETTINGS, team=[SAME, MIXED], agent=[0, 1])
def test_adam_state_carries_over_at_unsharing(mode, team, agent):
    network = make(mode, team)
    optimizer = trained(network, team)
    alone, origins = unshare(network)
    other = carried(network, alone, origins, optimizer)
    state = {name: dict(optimizer.state[p]) for name, p in network.named_parameters()}
    state = {n: {k: v.clone() for k, v in s.items()} for n, s in state.items()}
    old = {name: p.detach().clone() for name, p in network.named_parameters()}

    features = features_of(team, 6, seed=9)
    for net, opt in ((network, optimizer), (alone, other)):
        opt.zero_grad()
        net(features)[:, agent].square().sum().backward()
        opt.step()
    # The loss is of this agent only, so the shared network and its copy move alike.
    torch.testing.assert_close(alone(features)[:, agent], network(features)[:, agent])
    # Copies of other agents follow Adam with their momentum and a gradient of 0.
    for name, parameter in alone.named_parameters():
        origin = origins[name]
        moments = {k: origin.take(v) if v.ndim else v for k, v in state[origin.name].items()}
        expected = adam_step(origin.take(old[origin.name]), parameter.grad, moments, 0.01)
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-4, atol=1e-6)
        assert bool((origin.take(old[origin.name]) != parameter).any())


def test_carried_state_is_a_copy():
    network = make("full")
    optimizer = trained(network, SAME)
    alone, origins = unshare(network)
    other = carried(network, alone, origins, optimizer)
    before = [p.clone() for p in alone.parameters()]
    trained(network, SAME)
    optimizer.step()
    for p, value in zip(alone.parameters(), before):
        assert torch.equal(p, value)
        assert float(other.state[p]["step"]) == 3


def test_no_state_is_carried_before_the_first_step():
    network = make("full")
    alone, origins = unshare(network)
    assert not carried(network, alone, origins, torch.optim.Adam(network.parameters())).state


def test_any_fully_shared_module_can_be_unshared():
    network = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    features = features_of(SAME, 6)
    alone, origins = unshare(network, N)
    torch.testing.assert_close(alone(features), network(features))
    optimizer = trained(network, SAME)
    alone, origins = unshare(network, N)
    other = carried(network, alone, origins, optimizer)
    for name, p in alone.named_parameters():
        old = dict(network.named_parameters())[origins[name].name]
        for agent in range(N):
            assert torch.equal(p[agent], old)
            moments = optimizer.state[old]["exp_avg"]
            assert torch.equal(other.state[p]["exp_avg"][agent], moments)
    with pytest.raises(TypeError, match="the number of agents of a Sequential is unknown"):
        unshare(network)
