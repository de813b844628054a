"""The MAPPO loss: by hand, with a value norm, its entropy, and its errors."""

import math

import pytest
import torch
import torchrl.objectives
from ppo_losses import LOSSES, make_hand_batch, make_hand_case, make_networks
from samples import make_batch, make_group, make_trajectory
from torch import nn
from torchrl.modules import TanhNormal

from torchrl_marl.modules import ValueNorm
from torchrl_marl.objectives import MAPPOLoss, TeamGAE
from torchrl_marl.objectives.ppo import entropy_of

# ------------------------------------------------------------------------------------ by hand


def test_objective_and_metrics_by_hand():
    _, loss = make_hand_case(clip_epsilon=0.2)
    out = loss(make_hand_batch())
    # min(2 * 1, 1.2 * 1) = 1.2; min(0.5 * -1, 0.8 * -1) = -0.8
    assert out["loss_objective"].item() == pytest.approx(-(1.2 - 0.8) / 2)
    assert out["loss_entropy"].item() == pytest.approx(-0.1 * math.log(2))
    assert out["entropy"].item() == pytest.approx(math.log(2))
    assert out["kl_approx"].item() == pytest.approx(0.25)  # 2 - 1 - log 2 and 0.5 - 1 + log 2
    assert out["clip_fraction"].item() == 1.0
    assert out["max_ratio"].item() == pytest.approx(2.0)
    assert out["mean_ratio"].item() == pytest.approx(1.25)
    assert out["ESS"].item() == pytest.approx(2.5**2 / (4 + 0.25) / 2)
    # Huber with delta 10: 2 * 2 / 2 and 5 * 5 / 2
    assert out["loss_critic"].item() == pytest.approx((2.0 + 12.5) / 2)
    # 1 - var(-2, 5) / var(1, 8)
    assert out["explained_variance"].item() == pytest.approx(0.0, abs=1e-6)


def test_masked_objective_and_metrics_by_hand():
    _, loss = make_hand_case(clip_epsilon=0.2)
    out = loss(make_hand_batch((True, False)))
    assert out["loss_objective"].item() == pytest.approx(-1.2)
    assert out["loss_critic"].item() == pytest.approx(2.0)
    assert out["loss_entropy"].item() == pytest.approx(-0.1 * math.log(2))
    assert out["kl_approx"].item() == pytest.approx(1 - math.log(2))
    assert out["clip_fraction"].item() == 1.0
    assert out["max_ratio"].item() == out["mean_ratio"].item() == pytest.approx(2.0)
    assert out["ESS"].item() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("kind", "delta", "expected"),
    [
        ("huber", 1.0, ((2 - 0.5) + (5 - 0.5)) / 2),
        ("huber", 3.0, (2.0 + 3 * (5 - 1.5)) / 2),
        ("l2", 10.0, (4 + 25) / 2),
        ("l1", 10.0, (2 + 5) / 2),
        ("smooth_l1", 10.0, ((2 - 0.5) + (5 - 0.5)) / 2),
    ],
)
def test_critic_losses_by_hand(kind, delta, expected):
    _, loss = make_hand_case(loss_critic_type=kind, huber_delta=delta, critic_coeff=0.5)
    assert loss(make_hand_batch())["loss_critic"].item() == pytest.approx(0.5 * expected)


def test_clipped_value_by_hand():
    _, loss = make_hand_case(loss_critic_type="l2", clip_value=0.2)
    out = loss(make_hand_batch())
    # 3 is within 0.2 of 2.9: 4. Of 1 it is not: max(5^2, (8 - 1.2)^2).
    assert out["loss_critic"].item() == pytest.approx((4 + 6.8**2) / 2)
    assert out["value_clip_fraction"].item() == pytest.approx(0.5)


@pytest.mark.parametrize(("reduction", "shape"), [("none", (1, 2, 1)), ("sum", ()), ("mean", ())])
def test_reductions(reduction, shape):
    _, loss = make_hand_case(reduction=reduction, clip_epsilon=0.2)
    out = loss(make_hand_batch((True, False)))
    for key in LOSSES:
        assert out[key].shape == shape
        assert out[key].sum().item() == pytest.approx(
            {"loss_objective": -1.2, "loss_critic": 2.0, "loss_entropy": -0.1 * math.log(2)}[key]
        )


def test_fully_masked_batch_gives_zero_losses_and_gradients():
    _, loss = make_hand_case()
    td = make_hand_batch((False, False))
    td["car", "advantage"] = torch.full_like(td["car", "advantage"], float("nan"))
    out = loss(td)
    for key in (*LOSSES, "entropy", "kl_approx", "clip_fraction", "ESS", "mean_ratio"):
        assert out[key].item() == 0.0, key
    sum(out[key] for key in LOSSES).backward()
    for parameter in loss.parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))


@pytest.mark.parametrize(("exclude", "pooled"), [((), True), ((-2,), False)])
def test_advantage_is_standardized_over_living_agents(exclude, pooled):
    group, loss = make_hand_case(
        normalize_advantage=True,
        normalize_advantage_exclude_dims=exclude,
        reduction="none",
        entropy_bonus=False,
    )
    advantage = torch.tensor([[1.0, 10.0], [3.0, 99.0], [99.0, 14.0]])
    mask = torch.tensor([[True, True], [True, False], [False, True]])
    td = torch.cat([make_hand_batch()] * 3).contiguous()
    td["car", "mask"], td["car", "advantage"] = mask, advantage.unsqueeze(-1)
    td["car", "action_log_prob"] = torch.full((3, 2), math.log(0.5))  # ratio 1
    standardized = -loss(td)["loss_objective"].detach().squeeze(-1)
    if pooled:
        living = advantage[mask]
        expected = (advantage - living.mean()) / living.std(correction=0)
    else:
        # Agent 0: 1 and 3; agent 1: 10 and 14.
        expected = (advantage - torch.tensor([2.0, 12.0])) / torch.tensor([1.0, 2.0])
    torch.testing.assert_close(standardized, torch.where(mask, expected, 0.0), atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------------------------- value norm


def test_loss_with_value_norm_equals_the_papers():
    """The critic in normalized space, targets normalized, GAE on denormalized values."""
    group = make_group(n=2)
    norm = ValueNorm(decay=0.9)
    norm.update(torch.tensor([5.0, 9.0, -3.0]))
    actor, critic = make_networks(group, value_norm=norm)
    loss = MAPPOLoss(actor, critic, group=group, huber_delta=0.5, clip_value=0.2)
    td = make_trajectory(group, 3, 4, alive=2.0)
    with torch.no_grad():
        actor(td)
        raw = critic.module  # features, network, head
        old_normalized = raw.network(*raw.features(td["car", "observation"], td["car", "mask"]))[0]
    mean, variance = norm._running_stats()
    loss.value_estimator(td)
    # The returns were made with values in reward units.
    torch.testing.assert_close(
        td["car", "value_target"] - td["car", "advantage"],
        old_normalized * variance.sqrt() + mean,
        rtol=1e-5,
        atol=1e-5,
    )
    target = td["car", "value_target"]
    new_mean = 0.9 * norm_raw(5.0, 9.0, -3.0)[0] + 0.1 * target.mean()
    new_square = 0.9 * norm_raw(5.0, 9.0, -3.0)[1] + 0.1 * target.square().mean()
    debias = 0.9 * 0.1 + 0.1
    new_mean, new_square = new_mean / debias, new_square / debias
    torch.testing.assert_close(norm._running_stats()[0].squeeze(), new_mean)
    deviation = (new_square - new_mean**2).sqrt()
    # The critic's weights move between estimation and update.
    with torch.no_grad():
        for parameter in critic.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    value = raw.network(*raw.features(td["car", "observation"], td["car", "mask"]))[0]
    normalized = (target - new_mean) / deviation
    near = old_normalized + (value - old_normalized).clamp(-0.2, 0.2)
    huber = nn.functional.huber_loss
    expected = torch.maximum(
        huber(value, normalized, delta=0.5, reduction="none"),
        huber(near, normalized, delta=0.5, reduction="none"),
    ).mean()
    out = loss(td)
    torch.testing.assert_close(out["loss_critic"], expected, rtol=1e-4, atol=1e-5)
    assert 0 < out["value_clip_fraction"] < 1
    ours = torch.autograd.grad(out["loss_critic"], list(critic.parameters()))
    papers = torch.autograd.grad(expected, list(critic.parameters()))
    for a, b in zip(ours, papers):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def norm_raw(*values):
    """Running mean and mean square after one update with decay 0.9."""
    values = torch.tensor(values)
    return 0.1 * values.mean(), 0.1 * values.square().mean()


def test_value_norm_updates_once_per_estimate_in_training_mode():
    group = make_group()
    norm = ValueNorm()
    actor, critic = make_networks(group, value_norm=norm)
    loss = MAPPOLoss(actor, critic, group=group)
    assert loss.value_norm is norm  # found inside the critic
    td = make_trajectory(group, 3, 4)
    with torch.no_grad():
        actor(td)
    loss.make_value_estimator()
    loss.value_estimator.eval()
    loss.value_estimator(td)
    assert norm.debiasing_term.item() == 0.0
    loss.value_estimator.train()
    loss.value_estimator(td)
    assert norm.debiasing_term.item() == pytest.approx(0.01)
    statistics = norm.running_mean.clone()
    for _ in range(3):
        loss(td)
    assert torch.equal(norm.running_mean, statistics)
    assert norm.debiasing_term.item() == pytest.approx(0.01)
    loss.value_estimator(td)
    assert norm.debiasing_term.item() == pytest.approx(1 - 0.99**2)


def test_masked_targets_do_not_update_the_value_norm():
    group = make_group()
    norm = ValueNorm(decay=0.5)
    _, critic = make_networks(group, value_norm=norm)
    estimator = TeamGAE(gamma=0.9, lmbda=0.8, value_network=critic, group=group, value_norm=norm)
    td = make_trajectory(group, 3, 4)
    estimator(td)
    living = td["car", "value_target"][td["car", "mask"]]
    assert norm.running_mean.item() == pytest.approx(0.5 * living.mean().item())
    assert norm.running_mean_sq.item() == pytest.approx(0.5 * living.square().mean().item())


# -------------------------------------------------------------------------------------- entropy


def test_entropy_of_discrete_actions_is_exact():
    group = make_group("categorical", action_mask=True)
    actor, critic = make_networks(group)
    td = make_batch(group, actor, 16)
    loss = MAPPOLoss(actor, critic, group=group, entropy_coeff=0.5)
    out = loss(td)
    logits = td["car", "logits"]
    legal = td["car", "action_mask"]
    legal = legal | ~legal.any(-1, keepdim=True)
    p = torch.where(legal, logits, -torch.inf).softmax(-1)
    entropy = -(p * torch.where(p > 0, p, 1.0).log()).sum(-1)
    expected = entropy[td["car", "mask"]].mean()
    torch.testing.assert_close(out["entropy"], expected)
    torch.testing.assert_close(out["loss_entropy"], -0.5 * expected)


def test_entropy_of_squashed_actions_is_estimated_from_samples():
    group = make_group("bounded", 1)
    actor, critic = make_networks(group)
    td = make_batch(group, actor, 2, alive=2.0)
    loss = MAPPOLoss(actor, critic, group=group, samples_mc_entropy=40_000)
    distribution = actor.get_dist(td)
    with torch.no_grad():
        # H(tanh x) = H(x) + E log(1 - tanh(x)^2), by quadrature of each dim
        loc, scale = distribution.base_dist.base_dist.loc, distribution.base_dist.base_dist.scale
        grid = torch.linspace(-8, 8, 4001)
        weight = torch.softmax(-(grid**2) / 2, 0)
        x = loc.unsqueeze(-1) + scale.unsqueeze(-1) * grid
        squash = 2 * (math.log(2) - x - nn.functional.softplus(-2 * x))
        entropy = 0.5 * math.log(2 * math.pi * math.e) + scale.log() + (squash * weight).sum(-1)
        expected = entropy.sum(-1).mean()
    out = loss(td)
    torch.testing.assert_close(out["entropy"], expected, atol=0.02, rtol=0.0)
    gradient = torch.autograd.grad(out["loss_entropy"], list(actor.parameters()))
    assert any(bool(g.abs().sum() > 0) for g in gradient)


def test_entropy_is_reported_without_entropy_bonus():
    _, loss = make_hand_case(entropy_bonus=False)
    out = loss(make_hand_batch())
    assert "loss_entropy" not in out.keys()
    assert out["entropy"].item() == pytest.approx(math.log(2))


# --------------------------------------------------------------------------------------- errors


def test_invalid_settings_and_data_raise():
    group = make_group()
    actor, critic = make_networks(group)
    with pytest.raises(ValueError, match="'mse'.*expected huber"):
        MAPPOLoss(actor, critic, group=group, loss_critic_type="mse")
    loss = MAPPOLoss(actor, critic, group=group)
    td = make_batch(group, actor, 4)
    with pytest.raises(KeyError, match="action_log_prob"):
        loss(td.exclude(("car", "action_log_prob")))
    wrong = td.clone()
    wrong["car", "advantage"] = torch.zeros(4, 3)
    with pytest.raises(ValueError, match=r"advantage \(4, 3\) do not fit"):
        MAPPOLoss(actor, critic, group=group, normalize_advantage=False)(wrong)
    loss = MAPPOLoss(actor, critic, group=group, clip_value=0.2)
    with pytest.raises(KeyError, match="state_value"):
        loss(td.exclude(("car", "state_value")))
    with pytest.raises(ValueError, match="'everyone'"):
        MAPPOLoss(actor, critic, group=group, bootstrap="everyone").make_value_estimator()


@pytest.mark.parametrize("loc", [0.0, 3.0, 9.0, 20.0])
def test_entropy_of_squashed_actions_near_their_bounds(loc):
    """Compared with the integral in double precision; the inverse of tanh would be inexact."""
    scale = 0.5
    x = torch.linspace(-8, 8, 200_001, dtype=torch.float64)
    density = torch.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    before = loc + scale * x
    log_slope = 2 * (math.log(2) - before - torch.nn.functional.softplus(-2 * before))
    gaussian = 0.5 * math.log(2 * math.pi * math.e) + math.log(scale)
    expected = gaussian + torch.trapezoid(density * log_slope, x).item()
    where = torch.full((1,), loc)
    torch.manual_seed(0)
    squashed = TanhNormal(where, torch.full((1,), scale), event_dims=1)
    found = entropy_of(squashed, 20_000).item()
    assert found == pytest.approx(expected, abs=0.03)


def test_functional_by_default_like_torchrl():
    group = make_group()
    actor, critic = make_networks(group)
    loss = MAPPOLoss(actor, critic, group=group)
    theirs = torchrl.objectives.MAPPOLoss(actor, critic)
    for name in ("actor_network_params", "critic_network_params", "target_critic_network_params"):
        ours, other = (getattr(x, name) for x in (loss, theirs))
        assert set(ours.keys(True, True)) == set(other.keys(True, True)), name
    td = make_batch(group, actor, 8)
    total = sum(value for key, value in loss(td).items() if key.startswith("loss_"))
    total.backward()
    gradients = [p.grad for p in loss.parameters() if p.requires_grad]
    assert gradients
    assert all(g is not None and g.isfinite().all() for g in gradients)
