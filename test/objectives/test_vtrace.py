"""The V-trace estimator: equal to GAE on policy, ratios of agents and teams, masked values."""

import math

import pytest
import torch
from ppo_losses import assert_same_outcome, make_networks, outputs_and_gradients
from samples import POISON, assert_same, make_group, make_trajectory, poisoned
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.objectives import ValueEstimators

from torchrl_marl.functional import vtrace
from torchrl_marl.modules import ValueNorm
from torchrl_marl.objectives import MAPPOLoss, TeamGAE, TeamVTrace

LEAVES = ("advantage", "value_target", "state_value")
DISCOUNT = {"gamma": 0.9, "lmbda": 0.8}


def make_losses(bootstrap="team", kind="bounded", **settings):
    """A loss with GAE, one with V-trace, and steps of their policy."""
    group = make_group(kind)
    actor, critic = make_networks(group)
    losses = []
    for which, own in ((None, {}), (ValueEstimators.VTrace, settings)):
        loss = MAPPOLoss(actor, critic, group=group, bootstrap=bootstrap)
        loss.make_value_estimator(which, **DISCOUNT, **own)
        losses.append(loss)
    td = make_trajectory(group, 4, 6)
    with torch.no_grad():
        actor(td)
    return *losses, td


def drifted(td, seed=9):
    """The same steps with the probabilities of another policy."""
    generator = torch.Generator().manual_seed(seed)
    td = td.clone()
    log_prob = td["car", "action_log_prob"]
    td["car", "action_log_prob"] = log_prob + torch.randn(log_prob.shape, generator=generator)
    return td


@pytest.mark.parametrize("kind", ["bounded", "one_hot"])
@pytest.mark.parametrize("bootstrap", ["team", "agent"])
@pytest.mark.parametrize("ratio", ["agent", "joint"])
def test_on_policy_vtrace_equals_gae(kind, bootstrap, ratio):
    gae, loss, td = make_losses(bootstrap, kind, ratio=ratio)
    assert isinstance(loss.value_estimator, TeamVTrace)
    expected, found = gae.value_estimator(td.clone()), loss.value_estimator(td.clone())
    for leaf in LEAVES:
        torch.testing.assert_close(found["car", leaf], expected["car", leaf], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ratio", ["agent", "joint"])
def test_importance_ratios_per_agent_and_joint(ratio):
    _, loss, td = make_losses(ratio=ratio, rho_clip=2.0, c_clip=None)
    td = drifted(td)
    found = loss.value_estimator(td.clone())
    gae = TeamGAE(
        value_network=loss.critic_network, group=loss.group, value_norm=loss.value_norm, **DISCOUNT
    )
    signals = {}

    def keep(*given):
        signals["given"] = given
        return given[1:3]

    gae._make_estimate = lambda data, learned, turns: keep
    gae(td.clone())
    with torch.no_grad():
        fresh = loss.actor_network.get_dist(td).log_prob(td["car", "action"])
    own = torch.where(td["car", "mask"], fresh - td["car", "action_log_prob"], 0.0)
    if ratio == "joint":
        own = own.sum(-1, keepdim=True).expand_as(own)
    expected = vtrace(
        own.unsqueeze(-1), *signals["given"], **DISCOUNT, rho_clip=2.0, c_clip=math.inf, weigh=False
    )
    for leaf, value in zip(LEAVES, expected):
        torch.testing.assert_close(found["car", leaf], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bootstrap", ["team", "agent"])
def test_off_policy_centering_equals_shifted_values(bootstrap):
    """Also for advantages, which differ from targets minus values if ratios are not 1."""
    _, loss, td = make_losses(bootstrap)
    td, norm, shifts = drifted(td), ValueNorm(), []
    norm.shift = shifts.append
    settings = {"actor_network": loss.actor_network, "group": loss.group, "bootstrap": bootstrap}
    settings |= DISCOUNT
    centered = TeamVTrace(
        **settings, value_network=loss.critic_network, value_norm=norm, centering=True
    )
    found = centered(td.clone())["car"]
    [shift] = shifts
    key = ("car", "state_value")
    raised = TensorDictModule(lambda value: value + shift, [key], [key])
    critic = TensorDictSequential(loss.critic_network, raised)
    again = TeamVTrace(**settings, value_network=critic)(td.clone())["car"]
    learned = found.get("loss_mask", found["mask"])
    for leaf in ("advantage", "value_target"):
        torch.testing.assert_close(found[leaf][learned], again[leaf][learned])
    value = again["state_value"][learned]
    torch.testing.assert_close(found["value_target"][learned].mean(), value.mean())
    assert shift.abs() > 1e-3
    assert (found["advantage"][learned] - found["value_target"][learned] + value).abs().max() > 1e-2


@pytest.mark.parametrize("bootstrap", ["team", "agent"])
@pytest.mark.parametrize("ratio", ["agent", "joint"])
@pytest.mark.parametrize("poison", POISON)
def test_values_of_masked_agents_have_no_effect(bootstrap, ratio, poison):
    _, loss, td = make_losses(bootstrap, ratio=ratio)
    td = drifted(td)
    clean, mask = loss.value_estimator(td.clone()), td["car", "mask"]
    dirty = td
    for leaf in ("observation", "action", "action_log_prob"):
        dirty = poisoned(dirty, ("car", leaf), mask, poison)
    following = td["next", "car", "mask"]
    dirty = poisoned(dirty, ("next", "car", "observation"), following, poison)
    dirty = loss.value_estimator(dirty)
    for leaf in LEAVES[:2]:
        assert_same(clean["car", leaf], dirty["car", leaf], leaf)


def test_log_probs_of_agents_that_do_not_learn_have_no_effect():
    _, loss, td = make_losses()
    td = drifted(td)
    learns = torch.rand(4, 6, 3, generator=torch.Generator().manual_seed(0)) < 0.5
    td["car", "learns"] = learns
    clean = loss.value_estimator(td.clone())
    dirty = loss.value_estimator(poisoned(td, ("car", "action_log_prob"), learns, math.nan))
    for leaf in LEAVES:
        assert_same(clean["car", leaf], dirty["car", leaf], leaf)


@pytest.mark.parametrize("functional", [True, False])
def test_missing_advantage_is_estimated_in_the_loss(functional):
    _, _, td = make_losses()
    td, group = drifted(td), make_group()
    loss = MAPPOLoss(*make_networks(group), group=group, functional=functional)
    loss.make_value_estimator(ValueEstimators.VTrace, **DISCOUNT)
    estimated = loss.value_estimator(td.clone())
    assert_same_outcome(outputs_and_gradients(loss, estimated), outputs_and_gradients(loss, td))


def test_custom_keys_without_a_group():
    _, loss, td = make_losses(kind="categorical")
    td = drifted(td)
    plain = MAPPOLoss(loss.actor_network, loss.critic_network)
    keys = ("advantage", "value_target", "value", "reward", "action", "sample_log_prob")
    plain.set_keys(**{name: getattr(loss.tensor_keys, name) for name in keys})
    plain.set_keys(done="done", terminated="terminated")
    plain.loss_mask_key = ("car", "mask")
    plain.make_value_estimator(ValueEstimators.VTrace, **DISCOUNT)
    with pytest.raises(ValueError, match="'everybody', expected 'agent' or 'joint'"):
        plain.make_value_estimator(ValueEstimators.VTrace, ratio="everybody")
    one, other = loss.value_estimator(td.clone()), plain.value_estimator(td.clone())
    # Without a group, living agents are those that act.
    living = td["car", "mask"]
    torch.testing.assert_close(
        one["car", "state_value"][living], other["car", "state_value"][living]
    )
    assert other["car", "advantage"].isfinite().all()
