"""Mixers: equal to TorchRL's without masks, monotonic, and separate for each group."""

import pytest
import torch
from support.samples import make_group, make_observed
from torch import nn
from torchrl.modules import QMixer, VDNMixer

from torchrl_marl.errors import ConfigError
from torchrl_marl.learners.off_policy_config import TeamMixerConfig
from torchrl_marl.modules import MixerConfig, make_mixer, make_q_actor
from torchrl_marl.modules.config import AnyMixerConfig
from torchrl_marl.specs.joining import join

KINDS = ["sum", "monotonic"]
SEEN = [True, "state"]


def sample(group, *batch, seed=0, alive=0.7):
    td = make_observed(group, *batch, seed=seed, alive=alive)
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(*batch, group.n_agents, 1, generator=generator)
    td[group.name, "chosen_action_value"] = value
    return td


def wide(mixer):
    """Larger initial weights, so that their effects are visible."""
    for parameter in mixer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return mixer


def as_torchrl(mixer, group, width):
    """TorchRL's mixer with the same weights."""
    own, hidden = mixer.module, mixer.module.hidden
    theirs = QMixer((width,), hidden, group.n_agents, "cpu")
    cut = hidden * group.n_agents
    with torch.no_grad():
        for layer, rows in (
            (theirs.hyper_w_1, slice(0, cut)),
            (theirs.hyper_b_1, slice(cut, cut + hidden)),
            (theirs.hyper_w_final, slice(cut + hidden, None)),
        ):
            layer.weight.copy_(own.weights.weight[rows])
            layer.bias.copy_(own.weights.bias[rows])
        theirs.V.load_state_dict(own.bias.state_dict())
    return theirs


@pytest.mark.parametrize("seen", SEEN)
def test_monotonic_equals_torchrl(seen):
    torch.manual_seed(0)
    group = make_group("categorical", state=4)
    mixer = wide(make_mixer(group, "monotonic", hidden=6, centralized=seen))
    td = sample(group, 7, alive=1.1)
    state = td["state"] if seen == "state" else td["car", "observation"].flatten(-2)
    expected = as_torchrl(mixer, group, state.shape[-1])(td["car", "chosen_action_value"], state)
    found = mixer(td)["chosen_action_value"]
    assert found.shape == (7, 1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_sum_equals_torchrl_and_skips_dead_agents():
    group = make_group("categorical")
    td = sample(group, 7, alive=1.1)
    value = td["car", "chosen_action_value"]
    expected = VDNMixer(n_agents=3, device="cpu")(value)
    torch.testing.assert_close(make_mixer(group, "sum")(td)["chosen_action_value"], expected)
    td["car", "mask"][:, 1] = False
    td["car", "chosen_action_value"] = value.clone().index_fill_(1, torch.tensor(1), torch.nan)
    found = make_mixer(group, "sum")(td)["chosen_action_value"]
    torch.testing.assert_close(found, value[:, 0] + value[:, 2])


@pytest.mark.parametrize("seen", SEEN)
def test_monotonic_increases_in_each_living_agents_value(seen):
    torch.manual_seed(0)
    group = make_group("categorical", state=4)
    mixer = wide(make_mixer(group, centralized=seen))
    td = sample(group, 64)
    value = td["car", "chosen_action_value"].requires_grad_()
    (slope,) = torch.autograd.grad(mixer(td)["chosen_action_value"].sum(), [value])
    alive = td["car", "mask"]
    assert bool((slope.squeeze(-1)[alive] > 0).all())
    assert bool((slope.squeeze(-1)[~alive] == 0).all())


@pytest.mark.parametrize("kind", KINDS)
def test_best_joint_action_combines_greedy_actions(kind):
    torch.manual_seed(0)
    group = make_group("categorical", n=2)
    mixer = wide(make_mixer(group, kind))
    td = sample(group, 32, alive=1.1)
    values = torch.randn(32, 2, 4)
    best, totals = values.argmax(-1), []
    for first in range(4):
        for second in range(4):
            chosen = torch.stack([values[:, 0, first], values[:, 1, second]], -1).unsqueeze(-1)
            td["car", "chosen_action_value"] = chosen
            totals.append(mixer(td)["chosen_action_value"].squeeze(-1))
    joint = torch.stack(totals, -1).argmax(-1)
    assert torch.equal(joint, best[:, 0] * 4 + best[:, 1])


@pytest.mark.parametrize("seen", SEEN)
def test_joined_groups_have_separate_mixers(seen):
    torch.manual_seed(0)
    one = make_group("categorical", 2, name="cat", o=4, state=3)
    other = make_group("categorical", 3, name="mouse", o=3, state=3)
    joined = join((one, other))
    mixer = wide(make_mixer(joined, hidden=5, centralized=seen))
    tds = [sample(one, 6, seed=1), sample(other, 6, seed=2)]
    td = tds[0].clone()
    td["mouse"] = tds[1]["mouse"]
    together = joined.gather(td)
    together["state"] = td["state"]
    values = [td[name, "chosen_action_value"] for name in ("cat", "mouse")]
    together[joined.name, "chosen_action_value"] = torch.cat(values, -2)
    found = mixer(together)["chosen_action_value"]
    assert found.shape == (6, 2)
    for i, group in enumerate((one, other)):
        alone = make_mixer(group, hidden=5, centralized=seen)
        keep = torch.arange(5 * 5).reshape(5, 5)  # rows of 3 agents, the bias, the last
        keep = keep[[*range(group.n_agents), 3, 4]].flatten()
        state = mixer.module.state_dict()
        mine = alone.module.state_dict()
        for key, own in mine.items():
            rows = stacked(state, key)[i]
            rows = rows[keep] if key.startswith("weights") else rows
            own.copy_(rows[..., : own.shape[-1]] if key.endswith("weight") else rows)
        expected = alone(td.clone())["chosen_action_value"]
        torch.testing.assert_close(found[:, i : i + 1], expected, rtol=1e-5, atol=1e-6)


def stacked(state, key):
    """The entry of a stack of the same name."""
    name, *path = key.split(".")
    (found,) = [
        value
        for other, value in state.items()
        if other.startswith(name) and other.split(".")[-len(path) :] == path
    ]
    return found


def slope_at_the_start(**settings):
    """Mean of dQ_tot / dQ_i over 16 states and 3 agents."""
    torch.manual_seed(0)
    group = make_group("categorical")
    mixer, td = make_mixer(group, "monotonic", **settings), sample(group, 16)
    value = td["car", "chosen_action_value"].requires_grad_()
    total = mixer(td)["chosen_action_value"].sum()
    return float(torch.autograd.grad(total, value)[0].mean())


def test_initial_gradient_does_not_vanish():
    """Gradients are as large as those of TorchRL's mixer, initialized like ``nn.Linear``."""
    td = sample(make_group("categorical"), 16)
    state = td["car", "observation"].flatten(-2)
    theirs = QMixer(state.shape[-1:], 32, 3, "cpu")
    value = td["car", "chosen_action_value"].requires_grad_()
    total = theirs(value, state).sum()
    expected = float(torch.autograd.grad(total, value)[0].mean())
    assert 0.3 < slope_at_the_start() / expected < 3
    assert slope_at_the_start(init_scale=1e-3) < 1e-4 * expected  # layers that multiply
    for settings in (MixerConfig(), AnyMixerConfig("monotonic"), TeamMixerConfig()):
        own = slope_at_the_start(hidden=settings.hidden, init_scale=settings.init_scale)
        assert 0.3 < own / expected < 3, settings


def test_layers_are_initialized_like_nn_linear():
    mixer = make_mixer(make_group("categorical"), "monotonic").module
    for layer in (m for m in mixer.modules() if isinstance(m, torch.nn.Linear)):
        bound = layer.in_features**-0.5
        for x in (layer.weight, layer.bias):
            assert 0.5 * bound < float(x.detach().abs().max()) <= bound or x.numel() < 4


def test_no_mixer_and_invalid_settings():
    group = make_group("categorical")
    assert make_mixer(group, "none") is None
    with pytest.raises(ConfigError, match="expected one of none, sum, monotonic"):
        make_mixer(group, "monoton")
    with pytest.raises(ConfigError, match="no 'state'"):
        make_mixer(group, centralized="state")
    with pytest.raises(ConfigError, match="expected True, 'state' or 'agent_state'"):
        make_mixer(group, centralized=False)
    td = sample(group, 4)
    td["car", "chosen_action_value"] = torch.zeros(4, 3)
    with pytest.raises(ValueError, match=r"expected \[\*B, 3, 1\]"):
        make_mixer(group, "sum")(td)


def test_actor_then_mixer_gives_team_value():
    group = make_group("categorical")
    td = make_observed(group, 2, 5)
    total = make_mixer(group)(make_q_actor(group)(td))["chosen_action_value"]
    assert total.shape == (2, 5, 1)
