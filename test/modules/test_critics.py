"""Critics: inputs, symmetry, masks, reward units."""

import pytest
import torch
from cover import pairwise
from samples import POISON, assert_same, make_group, make_observed, poisoned

from torchrl_marl.modules import (
    NetworkConfig,
    ObservationNorm,
    ValueNorm,
    make_action_critic,
    make_actor,
    make_critic,
    make_mixer,
)

SEES = [True, False, "state"]


def critic_of(group, share=True, **kwargs):
    critic = make_critic(group, NetworkConfig([8], share_params=share), **kwargs)
    with torch.no_grad():
        for parameter in critic.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return critic


@pairwise(sees=SEES, mask=[True, False], share=[True, False], batch=[(), (5,), (2, 3)])
def test_shapes_and_keys(sees, mask, share, batch):
    group = make_group(mask=mask, state=7)
    critic = critic_of(group, share, centralized=sees)
    td = critic(make_observed(group, *batch))
    assert td["car", "state_value"].shape == (*batch, 3, 1)
    assert critic.out_keys == [("car", "state_value")]
    of_agents = {("car", "observation")} | ({("car", "mask")} if mask else set())
    assert set(critic.in_keys) == ({"state"} if sees == "state" else of_agents)


@pytest.mark.parametrize(("sees", "width"), [(True, 15), (False, 5), ("state", 7)])
@pytest.mark.parametrize("share", [True, False])
def test_number_of_parameters(sees, width, share):
    critic = critic_of(make_group(state=7), share, centralized=sees)
    # A shared central critic sees the same for all agents: it has an output for each.
    outputs = 3 if share and sees else 1
    one = (width * 8 + 8) + (8 * outputs + outputs)
    assert sum(p.numel() for p in critic.parameters()) == one * (1 if share else 3)


@pytest.mark.parametrize("sees", [True, "state"])
def test_shared_central_critic_is_one_network(sees):
    """All agents' values share the hidden layers; each has a separate output."""
    group = make_group(state=7)
    critic = critic_of(group, centralized=sees)
    value = critic(make_observed(group, 6))["car", "state_value"]
    assert not torch.allclose(value[:, 0], value[:, 1])
    value[:, 1].sum().backward()
    hidden, _, head, head_bias = (p.grad for p in critic.parameters())
    assert bool((hidden.abs().sum(1) > 0).all())
    assert head_bias.tolist() == [0.0, 6.0, 0.0]
    assert (head.abs().sum(1) > 0).tolist() == [False, True, False]


@pytest.mark.parametrize("share", [True, False])
def test_permuting_agents_permutes_local_values(share):
    group = make_group()
    critic = critic_of(group, share, centralized=False)
    td = make_observed(group, 6)
    order = [2, 0, 1]
    other = td.clone()
    for leaf in td["car"].keys():
        other["car", leaf] = td["car", leaf][:, order]
    value = critic(td)["car", "state_value"][:, order]
    assert torch.allclose(value, critic(other)["car", "state_value"], atol=1e-5) is share


@pytest.mark.parametrize("sees", SEES)
def test_inputs_that_values_depend_on(sees):
    group = make_group(state=7, mask=False)
    critic = critic_of(group, centralized=sees)
    td = make_observed(group, 6)
    value = critic(td.clone())["car", "state_value"]
    other = td.clone()
    other["car", "observation"][:, 1] += 1.0
    changed = (critic(other)["car", "state_value"] != value).flatten(1)
    expected = {True: [True] * 3, False: [False, True, False], "state": [False] * 3}[sees]
    assert changed.all(0).tolist() == changed.any(0).tolist() == expected
    other = td.clone()
    other["state"] = other["state"] + 1.0
    assert torch.equal(critic(other)["car", "state_value"], value) is (sees != "state")


@pytest.mark.parametrize("sees", [True, False])
@pytest.mark.parametrize("value", POISON)
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("norm", [True, False])
def test_masked_observations_have_no_effect(sees, value, share, norm):
    group = make_group()
    critic = critic_of(
        group,
        share,
        centralized=sees,
        value_norm=ValueNorm(),
        observation_norm=ObservationNorm(5) if norm else None,
    )
    td = make_observed(group, 16)
    mask = td["car", "mask"]
    bad = poisoned(td, ("car", "observation"), mask, value)
    weight = torch.randn(16, 3, 1)
    results = []
    for x in (td, bad):
        critic.zero_grad()
        out = critic(x.clone())["car", "state_value"]
        (torch.where(mask.unsqueeze(-1), out, 0.0) * weight).sum().backward()
        results.append([out.detach(), *(p.grad.clone() for p in critic.parameters())])
    for a, b in zip(*results):
        assert_same(a, b)
        assert bool(b.isfinite().all())
    # All values depend on which agents are alive.
    if sees:
        everyone = td.clone()
        everyone["car", "mask"] = torch.ones_like(mask)
        assert not torch.equal(critic(everyone)["car", "state_value"], results[0][0])


def test_values_are_in_reward_units():
    group = make_group()
    norm = ValueNorm(decay=0.9)
    critic = critic_of(group, value_norm=norm)
    td = make_observed(group, 6)
    raw = critic(td.clone())["car", "state_value"]
    norm.update(torch.tensor([100.0, 300.0]))  # mean 200, deviation 100
    torch.testing.assert_close(
        critic(td.clone())["car", "state_value"], raw * 100 + 200, rtol=1e-4, atol=1e-3
    )
    assert "module.head.value_norm.running_mean" in critic.state_dict()


@pytest.mark.parametrize("share", [True, False])
def test_state_of_several_dims_is_flattened(share):
    from torchrl.data import Bounded, Unbounded

    from torchrl_marl import AgentSpec, TeamSpec

    spec = AgentSpec("car", 3, Unbounded((5,)), Bounded(-1, 1, (2,)))
    group = TeamSpec([spec], Unbounded((2, 4))).groups["car"]
    critic = critic_of(group, share, centralized="state")
    td = make_observed(make_group(), 6)
    td["state"] = torch.randn(6, 2, 4)
    value = critic(td.clone())["car", "state_value"]
    assert value.shape == (6, 3, 1)
    td["state"][:, 1, 3] += 1.0
    assert not torch.equal(critic(td)["car", "state_value"], value)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float64])
@pytest.mark.parametrize("make", [make_critic, make_action_critic, make_mixer])
def test_states_and_observations_of_any_dtype(make, dtype):
    """Values and gradients are those of the same numbers in float32."""
    torch.manual_seed(0)
    group = make_group("categorical", state=4)
    td = make_observed(group, 6)
    numbers = {"state": 3 * torch.rand(6, 4), ("car", "observation"): 3 * torch.rand(6, 3, 5)}
    td["car", "action"] = torch.zeros(6, 3, dtype=torch.int64)
    td["car", "chosen_action_value"] = torch.ones(6, 3, 1)
    plain, other = td.clone(), td.clone()
    for key, value in numbers.items():
        plain[key], other[key] = value.floor(), value.floor().to(dtype)
    for sees in ("state", True):
        network = make(group, centralized=sees)
        found = [network(data.clone()).get(network.out_keys[-1]) for data in (plain, other)]
        torch.testing.assert_close(*found)
        gradients = [torch.autograd.grad(x.sum(), [*network.parameters()]) for x in found]
        torch.testing.assert_close(*gradients)


def test_actors_read_observations_of_float64():
    group = make_group()
    actor, td = make_actor(group, NetworkConfig([8])), make_observed(group, 6)
    mean = actor.get_dist(td).deterministic_sample
    td["car", "observation"] = td["car", "observation"].double()
    torch.testing.assert_close(actor.get_dist(td).deterministic_sample, mean)
    assert actor.double().get_dist(td).deterministic_sample.dtype == torch.float64


def test_invalid_centralized_settings_raise():
    with pytest.raises(ValueError, match=r"'car'.*no 'state'.*env.state=world or observations"):
        make_critic(make_group(), centralized="state")
    with pytest.raises(ValueError, match="'everything'.*True, False, 'state' or 'agent_state'"):
        make_critic(make_group(), centralized="everything")
