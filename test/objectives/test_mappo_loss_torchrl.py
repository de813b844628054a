"""The MAPPO loss against TorchRL's, and in a TorchRL script."""

import math

import pytest
import torch
import torchrl.objectives
from cover import pairwise
from ppo_losses import (
    LOSSES,
    assert_same_outcome,
    make_hand_batch,
    make_hand_case,
    make_networks,
    outputs_and_gradients,
)
from samples import assert_same, make_batch, make_group, make_trajectory
from torchrl.modules import PopArtValueNorm
from torchrl.objectives import ClipPPOLoss, ValueEstimators

from torchrl_marl import TeamSpec
from torchrl_marl.objectives import MAPPOLoss, TeamGAE


def torchrl_keys(group):
    return {
        "action": group.action_key,
        "sample_log_prob": group.key("action_log_prob"),
        "advantage": group.key("advantage"),
        "value_target": group.key("value_target"),
        "value": group.key("state_value"),
        "reward": group.reward_key,
        "done": "done",
        "terminated": "terminated",
    }


# --------------------------------------------------------------------------- against TorchRL's


@pairwise(
    kind=["bounded", "unbounded", "categorical", "one_hot"],
    critic_loss=["l2", "smooth_l1", "l1"],
    clip_value=[False, True, 0.1],
)
def test_one_agent_equals_clip_ppo(kind, critic_loss, clip_value):
    group = make_group(kind, 1)
    actor, critic = make_networks(group)
    td = make_batch(group, actor, 32, alive=2.0)
    settings = {
        "clip_epsilon": 0.2,
        "loss_critic_type": critic_loss,
        "clip_value": clip_value,
        "entropy_coeff": 0.02,
        "critic_coeff": 0.7,
        "normalize_advantage": False,
    }
    ours = MAPPOLoss(actor, critic, group=group, **settings)
    theirs = ClipPPOLoss(actor, critic, functional=False, **settings)
    theirs.set_keys(**torchrl_keys(group))
    one, other = outputs_and_gradients(ours, td), outputs_and_gradients(theirs, td)
    keys = {*LOSSES, "entropy", "clip_fraction", "ESS", "max_ratio", "mean_ratio"}
    keys |= {"explained_variance"} | ({"value_clip_fraction"} if clip_value else set())
    assert keys <= set(one[0])
    assert 0 < one[0]["clip_fraction"] < 1
    for key in keys:
        torch.testing.assert_close(
            one[0][key].squeeze(), other[0][key].squeeze(), rtol=1e-5, atol=1e-6, msg=key
        )
    assert_never_negative_divergence(one[0], other[0])
    for a, b in zip(one[1], other[1]):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def assert_never_negative_divergence(ours, theirs):
    """TorchRL's is the mean of -log ratio, which may be negative; ours adds ratio - 1."""
    assert ours["kl_approx"] >= 0
    expected = theirs["kl_approx"].squeeze() + theirs["mean_ratio"].squeeze() - 1
    torch.testing.assert_close(ours["kl_approx"].squeeze(), expected, rtol=1e-4, atol=1e-5)


def test_one_agent_equals_clip_ppo_with_normalized_advantage():
    group = make_group("categorical", 1)
    actor, critic = make_networks(group)
    td = make_batch(group, actor, 32, alive=2.0)
    ours = MAPPOLoss(actor, critic, group=group, normalize_advantage=True, entropy_bonus=False)
    theirs = ClipPPOLoss(
        actor, critic, normalize_advantage=True, entropy_bonus=False, functional=False
    )
    theirs.set_keys(**torchrl_keys(group))
    # TorchRL divides by the unbiased deviation.
    torch.testing.assert_close(
        ours(td)["loss_objective"] * math.sqrt(31 / 32),
        theirs(td)["loss_objective"],
        rtol=1e-4,
        atol=1e-6,
    )


@pytest.mark.parametrize("centralized", [True, False])
@pytest.mark.parametrize("kind", ["bounded", "categorical"])
@pytest.mark.parametrize("share", [True, False])
def test_without_masks_and_norms_equals_torchrl_mappo(kind, centralized, share):
    group = make_group(kind, mask=False)
    actor, critic = make_networks(group, centralized=centralized, share=share)
    td = make_batch(group, actor, 16)
    settings = {
        "loss_critic_type": "l2",
        "normalize_advantage": False,
        "entropy_coeff": 0.01,
        "functional": False,
    }
    cls = torchrl.objectives.MAPPOLoss if centralized else torchrl.objectives.IPPOLoss
    theirs = cls(actor, critic, **settings)
    theirs.set_keys(**torchrl_keys(group))
    one = outputs_and_gradients(MAPPOLoss(actor, critic, group=group, **settings), td)
    other = outputs_and_gradients(theirs, td)
    assert_never_negative_divergence(one[0], other[0])
    for key in (*LOSSES, "entropy", "clip_fraction", "max_ratio", "mean_ratio"):
        # A mean of 48 log-probabilities through atanh: float32 holds it to 1e-5.
        torch.testing.assert_close(one[0][key], other[0][key], rtol=1e-5, atol=1e-5, msg=key)
    for a, b in zip(one[1], other[1]):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_loss_is_an_instance_of_torchrl_mappo_loss():
    _, loss = make_hand_case()
    assert isinstance(loss, torchrl.objectives.MAPPOLoss)


# ------------------------------------------------------------------------ in a TorchRL script


@pytest.mark.parametrize("bootstrap", ["team", "agent"])
def test_missing_advantage_is_estimated_in_the_loss(bootstrap):
    group = make_group()
    actor, critic = make_networks(group)
    loss = MAPPOLoss(actor, critic, group=group, bootstrap=bootstrap)
    loss.make_value_estimator(gamma=0.9, lmbda=0.7)
    td = make_trajectory(group, 4, 5)
    with torch.no_grad():
        actor(td)
    keys = set(td.keys(True, True))
    copy = td.clone()
    estimated = td.clone()
    loss.value_estimator(estimated)
    assert_same_outcome(outputs_and_gradients(loss, estimated), outputs_and_gradients(loss, td))
    assert set(td.keys(True, True)) == keys  # nothing was written
    assert all(torch.equal(td[key], copy[key]) for key in keys)


def test_plain_torchrl_script():
    """TorchRL's collector, buffer and optimizer; keys set by hand, without a group."""
    from torchrl.collectors import Collector
    from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement

    from torchrl_marl.envs.toy import TwoStepGame

    env = TwoStepGame(16, seed=0)
    group = TeamSpec.from_env(env).groups["agents"]
    actor, critic = make_networks(group)
    loss = MAPPOLoss(actor, critic, normalize_advantage=True)
    loss.set_keys(**torchrl_keys(group))
    loss.loss_mask_key = group.mask_key
    loss.make_value_estimator(gamma=0.99, lmbda=0.95)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-2)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(64), sampler=SamplerWithoutReplacement(), batch_size=32
    )
    before = [p.detach().clone() for p in loss.parameters()]
    with_group = MAPPOLoss(actor, critic, group=group)
    for batch in Collector(env, actor, frames_per_batch=64, total_frames=64):
        loss.value_estimator(batch)
        expected = batch.clone()
        with_group.make_value_estimator(gamma=0.99, lmbda=0.95)
        with_group.value_estimator(expected)
        assert_same(batch["agents", "advantage"], expected["agents", "advantage"])
        assert_same_outcome(
            outputs_and_gradients(loss, batch), outputs_and_gradients(with_group, batch)
        )
        buffer.extend(batch.reshape(-1))
        for minibatch in buffer:
            out = loss(minibatch)
            optimizer.zero_grad()
            sum(out[key] for key in LOSSES).backward()
            optimizer.step()
    env.close()
    assert all(not torch.equal(a, b) for a, b in zip(before, loss.parameters()))


def test_dispatch_by_keyword_arguments():
    """TorchRL's dispatch: keyword arguments in, outputs out."""
    group = make_group()
    actor, critic = make_networks(group)
    loss = MAPPOLoss(actor, critic, group=group, entropy_bonus=False)
    td = make_trajectory(group, 4, 5)
    with torch.no_grad():
        actor(td)
    td["car", "done"] = torch.zeros_like(td["next", "car", "done"])
    expected = loss(td)
    loss.select_out_keys("loss_objective", "loss_critic")
    by_name = {"_".join((k,) if isinstance(k, str) else k): td[k] for k in loss.in_keys}
    objective, critic_loss = loss(**by_name)
    assert_same(objective, expected["loss_objective"])
    assert_same(critic_loss, expected["loss_critic"])


@pytest.mark.parametrize("bootstrap", ["team", "agent"])
@pytest.mark.parametrize(("kind", "lmbda"), [("TD0", 0.0), ("TD1", 1.0), ("TDLambda", 0.7)])
def test_td_estimators_respect_masks(kind, lmbda, bootstrap):
    """The advantage of TD(lambda) is GAE; TorchRL's would read observations of dead agents."""
    group = make_group()
    actor, critic = make_networks(group)
    loss = MAPPOLoss(actor, critic, group=group, bootstrap=bootstrap)
    td = make_trajectory(group, 4, 5)
    given = {"lmbda": lmbda} if kind == "TDLambda" else {}
    loss.make_value_estimator(ValueEstimators[kind], gamma=0.9, **given)
    found = loss.value_estimator(td.clone())
    loss.make_value_estimator(ValueEstimators.GAE, gamma=0.9, lmbda=lmbda)
    expected = loss.value_estimator(td.clone())
    for leaf in ("advantage", "value_target"):
        assert_same(found["car", leaf], expected["car", leaf])


def test_loss_without_group_uses_torchrl_estimators():
    from torchrl.objectives.value import TDLambdaEstimator

    loss = MAPPOLoss(*make_networks(make_group(mask=False)))
    loss.set_keys(value=("car", "state_value"))
    loss.make_value_estimator(ValueEstimators.TDLambda, gamma=0.9, lmbda=0.9)
    assert isinstance(loss.value_estimator, TDLambdaEstimator)
    loss.make_value_estimator(ValueEstimators.GAE, gamma=0.9)
    assert isinstance(loss.value_estimator, TeamGAE)


def test_collected_log_probs_get_no_gradient():
    """``env.rollout`` keeps their graph, which would cancel the gradient of the ratio."""
    group = make_group()
    actor, critic = make_networks(group)
    loss = MAPPOLoss(actor, critic, group=group, entropy_bonus=False, functional=False)
    td = actor(make_trajectory(group, 4, 5))
    loss.value_estimator(td)
    assert td["car", "action_log_prob"].requires_grad
    found, expected = (
        torch.autograd.grad(loss(x)["loss_objective"], list(actor.parameters()))
        for x in (td, td.detach())
    )
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)
        assert bool((one != 0).any())


def test_masked_scalar_entropy_coefficient_can_be_scheduled():
    _, loss = make_hand_case()
    loss.entropy_coeff.fill_(0.7)
    assert loss(make_hand_batch())["loss_entropy"].item() == pytest.approx(-0.7 * math.log(2))


def test_torchrl_value_norm():
    """TorchRL's value norm is accepted; the caller updates its statistics."""
    group = make_group(mask=False)
    actor, critic = make_networks(group)
    norm = PopArtValueNorm()
    norm.update(torch.tensor([[1.0], [5.0]]))
    loss = MAPPOLoss(
        actor, critic, group=group, value_norm=norm, loss_critic_type="l2", entropy_bonus=False
    )
    plain = MAPPOLoss(actor, critic, group=group, loss_critic_type="l2", entropy_bonus=False)
    td = make_batch(group, actor, 8)
    torch.testing.assert_close(
        loss(td)["loss_critic"] * norm.scale().squeeze() ** 2,
        plain(td)["loss_critic"],
        rtol=1e-4,
        atol=1e-5,
    )
