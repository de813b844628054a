"""Clusters of agents: behaviors are separated; dead agents and padding have no effect."""

import pytest
import torch
from cover import pairwise
from samples import POISON

from torchrl_marl.errors import ConfigError, NonFiniteError
from torchrl_marl.modules.clustering import cluster_agents

STEPS = 400


def world_of(kinds, *, seed=0, n=1000, noise=0.1):
    """Transitions of agents with like observations; dynamics and rewards differ by kind."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(shape, generator=generator)

    push, value = randn(max(kinds) + 1, 2, 4), randn(max(kinds) + 1, 4)
    kinds = torch.tensor(kinds)
    observation = randn(n, len(kinds), 4)
    action = 2 * torch.rand(n, len(kinds), 2, generator=generator) - 1
    change = torch.einsum("mna,nao->mno", action, push[kinds]) + noise * randn(n, len(kinds), 4)
    reward = (observation * value[kinds]).sum(-1, keepdim=True)
    return observation, action, observation + change, reward


def clusters_of(kinds, world, **kwargs):
    return cluster_agents(*world, max(kinds) + 1, **{"steps": STEPS} | kwargs)


@pytest.mark.learning
@pairwise(
    kinds=[(0, 1, 0, 1), (0, 0, 1, 1, 2, 2, 0, 1), (0, 0, 0, 1)], noise=[0.1, 1.0], seed=range(3)
)
def test_behaviors_are_separated(kinds, noise, seed):
    assert clusters_of(kinds, world_of(kinds, seed=seed, noise=noise), seed=seed) == kinds


@pytest.mark.parametrize("only", ["reward", "observation"])
def test_reward_or_dynamics_alone_separate_agents(only):
    kinds = (0, 1, 1, 0)
    observation, action, after, reward = world_of(kinds)
    if only == "reward":
        after = observation
    else:
        reward = torch.zeros_like(reward)
    assert clusters_of(kinds, (observation, action, after, reward)) == kinds


def test_result_depends_on_seed_and_not_on_global_rng():
    kinds = (0, 1, 0, 1)
    world = world_of(kinds)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with torch.no_grad():
        first = cluster_agents(*world, 3, steps=50, seed=4)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert cluster_agents(*world, 3, steps=50, seed=4) == first
    assert not any(tensor.requires_grad for tensor in world)


@pytest.mark.parametrize("value", POISON)
def test_values_of_dead_agents_have_no_effect(value):
    kinds = (0, 1, 0, 1)
    world = world_of(kinds)
    mask = torch.rand(world[0].shape[:2], generator=torch.Generator().manual_seed(5)) < 0.7
    bad = [torch.where(mask.unsqueeze(-1), tensor, value) for tensor in world]
    # Few steps and too many clusters: the slightest difference would show.
    few = {"mask": mask, "steps": 30}
    assert cluster_agents(*world, 3, **few) == cluster_agents(*bad, 3, **few)
    assert clusters_of(kinds, bad, mask=mask) == kinds


@pytest.mark.learning
@pytest.mark.parametrize("value", POISON)
def test_padded_features_have_no_effect(value):
    kinds = (0, 1, 0, 1)
    observation, action, after, reward = world_of(kinds)
    real = torch.ones(4, 4, dtype=torch.bool)
    real[1::2, 3] = False
    results = []
    for fill in (0.0, value):
        padded = [torch.where(real, tensor, fill) for tensor in (observation, after)]
        world = (padded[0], action, padded[1], reward)
        results.append(clusters_of(kinds, world, observation_mask=real))
    assert results == [kinds, kinds]


def test_constant_features_do_not_break_clustering():
    kinds = (0, 1, 0, 1)
    observation, action, after, reward = world_of(kinds)
    constant = torch.full_like(reward, 7.0)
    observation, after = (torch.cat([x, constant], -1) for x in (observation, after))
    assert clusters_of(kinds, (observation, action, after, torch.ones_like(reward))) == kinds


@pytest.mark.parametrize(("n_clusters", "expected"), [(1, 1), (4, 4)])
def test_extreme_numbers_of_clusters(n_clusters, expected):
    found = cluster_agents(*world_of((0, 1, 2, 3)), n_clusters, steps=300)
    assert found[0] == 0
    assert len(set(found)) == expected
    assert list(dict.fromkeys(found)) == list(range(expected))


def test_invalid_input_raises():
    world = world_of((0, 1, 0))
    for n_clusters in (0, 4):
        with pytest.raises(ConfigError, match=f"n_clusters is {n_clusters}, expected 1 to 3"):
            cluster_agents(*world, n_clusters)
    mask = torch.ones(1000, 3, dtype=torch.bool)
    mask[:, 1] = False
    with pytest.raises(ConfigError, match=r"agents \[1\] lived in none of the 1000 transitions"):
        cluster_agents(*world, 2, mask=mask)
    world[3][17, 2] = float("inf")
    with pytest.raises(NonFiniteError, match="the reward of a living agent"):
        cluster_agents(*world, 2)
