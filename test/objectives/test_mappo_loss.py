"""The MAPPO loss: by hand, against TorchRL's, and with poison in masked slots."""

import math

import pytest
import torch
import torchrl.objectives
from cover import pairwise
from samples import (
    DISCRETE,
    POISON,
    assert_same,
    make_batch,
    make_group,
    make_trajectory,
    poisoned,
    without_mask,
)
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torchrl.modules import PopArtValueNorm, ProbabilisticActor, TanhNormal
from torchrl.objectives import ClipPPOLoss

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.modules import NetworkConfig, ValueNorm, make_actor, make_critic
from torchrl_marl.objectives import MAPPOLoss, TeamGAE

SMALL = NetworkConfig(num_cells=[8])
LOSSES = ("loss_objective", "loss_critic", "loss_entropy")


def make_networks(group, *, centralized=True, value_norm=None, share=True, seed=0):
    torch.manual_seed(seed)
    config = NetworkConfig(num_cells=[8], share_params=share)
    actor = make_actor(group, config)
    critic = make_critic(group, config, centralized=centralized, value_norm=value_norm)
    # The first weights are tuned for small outputs; here differences are to be seen.
    with torch.no_grad():
        for parameter in (*actor.parameters(), *critic.parameters()):
            parameter.add_(0.3 * torch.randn_like(parameter))
    return actor, critic


def outcome(loss, td, seed=0):
    """Outputs and gradients."""
    parameters = [p for p in loss.parameters() if p.requires_grad]
    for parameter in parameters:
        parameter.grad = None
    torch.manual_seed(seed)
    out = loss(td)
    sum(out[key] for key in out.keys() if key.startswith("loss_")).sum().backward()
    assert all(p.grad is not None for p in parameters)
    return {k: v.detach() for k, v in out.items()}, [p.grad.clone() for p in parameters]


def assert_same_outcome(one, other, keys=None):
    for key in one[0] if keys is None else keys:
        assert_same(one[0][key], other[0][key], key)
    for a, b in zip(one[1], other[1]):
        assert_same(a, b, "gradient")
    assert any(bool(g.abs().sum() > 0) for g in one[1])
    assert all(bool(g.isfinite().all()) for g in one[1])


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


# ------------------------------------------------------------------------------------ by hand


class Constants(nn.Module):
    """Outputs that are parameters: [B, N, K], whatever the input."""

    def __init__(self, values):
        super().__init__()
        self.values = nn.Parameter(torch.tensor(values))

    def forward(self, observation):
        return self.values.expand(*observation.shape[:-1], self.values.shape[-1])


def by_hand(**kwargs):
    """Two agents, one step: two actions, each of probability one half."""
    group = make_group("categorical", 2, o=1)
    actor = ProbabilisticActor(
        TensorDictModule(Constants([0.0, 0.0]), [("car", "observation")], [("car", "logits")]),
        in_keys={"logits": ("car", "logits")},
        out_keys=[("car", "action")],
        distribution_class=Categorical,
        return_log_prob=True,
        log_prob_key=("car", "action_log_prob"),
    )
    critic = TensorDictModule(Constants([3.0]), [("car", "observation")], [("car", "state_value")])
    kwargs = {"normalize_advantage": False, "entropy_coeff": 0.1} | kwargs
    return group, MAPPOLoss(actor, critic, group=group, **kwargs)


def hand_batch(mask=(True, True)):
    """Ratios 2 and 0.5, advantages 1 and -1, value targets 1 and 8, old values 2.9 and 1."""
    car = {
        "observation": torch.zeros(1, 2, 1),
        "mask": torch.tensor([mask]),
        "action": torch.tensor([[0, 1]]),
        "action_log_prob": torch.tensor([[math.log(0.25), 0.0]]),
        "advantage": torch.tensor([[[1.0], [-1.0]]]),
        "value_target": torch.tensor([[[1.0], [8.0]]]),
        "state_value": torch.tensor([[[2.9], [1.0]]]),
    }
    return TensorDict({"car": car}, [1])


def test_objective_and_metrics_by_hand():
    _, loss = by_hand(clip_epsilon=0.2)
    out = loss(hand_batch())
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
    _, loss = by_hand(clip_epsilon=0.2)
    out = loss(hand_batch((True, False)))
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
    _, loss = by_hand(loss_critic_type=kind, huber_delta=delta, critic_coeff=0.5)
    assert loss(hand_batch())["loss_critic"].item() == pytest.approx(0.5 * expected)


def test_clipped_value_by_hand():
    _, loss = by_hand(loss_critic_type="l2", clip_value=0.2)
    out = loss(hand_batch())
    # 3 is within 0.2 of 2.9: 4. Of 1 it is not: max(5^2, (8 - 1.2)^2).
    assert out["loss_critic"].item() == pytest.approx((4 + 6.8**2) / 2)
    assert out["value_clip_fraction"].item() == pytest.approx(0.5)


@pytest.mark.parametrize(("reduction", "shape"), [("none", (1, 2, 1)), ("sum", ()), ("mean", ())])
def test_reductions(reduction, shape):
    _, loss = by_hand(reduction=reduction, clip_epsilon=0.2)
    out = loss(hand_batch((True, False)))
    for key in LOSSES:
        assert out[key].shape == shape
        assert out[key].sum().item() == pytest.approx(
            {"loss_objective": -1.2, "loss_critic": 2.0, "loss_entropy": -0.1 * math.log(2)}[key]
        )


def test_nobody_lives():
    _, loss = by_hand()
    td = hand_batch((False, False))
    td["car", "advantage"] = torch.full_like(td["car", "advantage"], float("nan"))
    out = loss(td)
    for key in (*LOSSES, "entropy", "kl_approx", "clip_fraction", "ESS", "mean_ratio"):
        assert out[key].item() == 0.0, key
    sum(out[key] for key in LOSSES).backward()
    for parameter in loss.parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))


@pytest.mark.parametrize(("exclude", "pooled"), [((), True), ((-2,), False)])
def test_advantage_is_standardized_over_the_living(exclude, pooled):
    group, loss = by_hand(
        normalize_advantage=True,
        normalize_advantage_exclude_dims=exclude,
        reduction="none",
        entropy_bonus=False,
    )
    advantage = torch.tensor([[1.0, 10.0], [3.0, 99.0], [99.0, 14.0]])
    mask = torch.tensor([[True, True], [True, False], [False, True]])
    td = torch.cat([hand_batch()] * 3).contiguous()
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


# --------------------------------------------------------------------------- against TorchRL's


@pairwise(
    kind=["bounded", "unbounded", "categorical", "one_hot"],
    critic_loss=["l2", "smooth_l1", "l1"],
    clip_value=[False, True, 0.1],
)
def test_one_agent_is_clip_ppo(kind, critic_loss, clip_value):
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
    one, other = outcome(ours, td), outcome(theirs, td)
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


def test_one_agent_is_clip_ppo_with_normalized_advantage():
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
def test_without_masks_and_norms_it_is_torchrls_mappo(kind, centralized, share):
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
    one = outcome(MAPPOLoss(actor, critic, group=group, **settings), td)
    other = outcome(theirs, td)
    assert_never_negative_divergence(one[0], other[0])
    for key in (*LOSSES, "entropy", "clip_fraction", "max_ratio", "mean_ratio"):
        # A mean of 48 log-probabilities through atanh: float32 holds it to 1e-5.
        torch.testing.assert_close(one[0][key], other[0][key], rtol=1e-5, atol=1e-5, msg=key)
    for a, b in zip(one[1], other[1]):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_it_is_torchrls_loss_to_whoever_asks():
    _, loss = by_hand()
    assert isinstance(loss, torchrl.objectives.MAPPOLoss)


# ---------------------------------------------------------------------------- masks and poison


@pytest.mark.parametrize("kind", ["bounded", "wide", "unbounded", "categorical", "one_hot"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("exclude", [(), (-2,)])
def test_an_all_true_mask_is_no_mask(kind, normalize, exclude):
    group = make_group(kind)
    actor, critic = make_networks(group, value_norm=ValueNorm())
    td = make_batch(group, actor, 16, alive=2.0)
    assert td["car", "mask"].all()
    outcomes = []
    for which in (group, without_mask(group)):
        actor, critic = make_networks(which, value_norm=ValueNorm())
        loss = MAPPOLoss(
            actor,
            critic,
            group=which,
            normalize_advantage=normalize,
            normalize_advantage_exclude_dims=exclude,
            clip_value=0.2,
        )
        outcomes.append(outcome(loss, td))
    assert_same_outcome(*outcomes)


@pairwise(
    kind=["bounded", "wide", "unbounded", "categorical", "one_hot"],
    centralized=[True, False],
    value=POISON,
    share=[True, False],
)
def test_poison_in_masked_slots_of_a_minibatch(kind, centralized, value, share):
    group = make_group(kind, action_mask=kind in DISCRETE)
    actor, critic = make_networks(
        group, centralized=centralized, value_norm=ValueNorm(), share=share
    )
    loss = MAPPOLoss(actor, critic, group=group, clip_value=0.2)
    td = make_batch(group, actor, 32)
    mask = td["car", "mask"]
    assert 0 < (~mask).sum() < mask.numel()
    before = outcome(loss, td)
    leaves = [
        "observation",
        "action",
        "action_log_prob",
        "advantage",
        "value_target",
        "state_value",
    ]
    everything = td
    for leaf in leaves:
        assert_same_outcome(before, outcome(loss, poisoned(td, ("car", leaf), mask, value)))
        everything = poisoned(everything, ("car", leaf), mask, value)
    assert_same_outcome(before, outcome(loss, everything))
    # The test can fail: a living agent's entries do matter.
    for leaf in leaves:
        if leaf == "action":
            continue
        x = td.clone()
        x["car", leaf] = torch.where(
            mask.view(mask.shape + (1,) * (x["car", leaf].ndim - 2)),
            x["car", leaf] + 0.5,
            x["car", leaf],
        )
        out = outcome(loss, x)
        assert any(not torch.equal(before[0][k], out[0][k]) for k in before[0]), leaf


@pytest.mark.parametrize("kind", DISCRETE)
def test_a_masked_agents_legal_actions_do_not_matter(kind):
    group = make_group(kind, action_mask=True)
    actor, critic = make_networks(group)
    loss = MAPPOLoss(actor, critic, group=group)
    td = make_batch(group, actor, 32)
    before = outcome(loss, td)
    for legal in (True, False):
        other = td.clone()
        other["car", "action_mask"] = torch.where(
            td["car", "mask"].unsqueeze(-1), td["car", "action_mask"], torch.tensor(legal)
        )
        assert_same_outcome(before, outcome(loss, other))
    only_last = td.clone()
    last = torch.tensor([False, False, False, True])
    only_last["car", "action_mask"] = torch.where(
        td["car", "mask"].unsqueeze(-1), td["car", "action_mask"], last
    )
    assert_same_outcome(before, outcome(loss, only_last))


@pytest.mark.parametrize("bootstrap", ["team", "agent"])
@pytest.mark.parametrize("centralized", [True, False])
@pytest.mark.parametrize("value", POISON)
def test_poison_in_masked_slots_of_a_trajectory(bootstrap, centralized, value):
    group = make_group()
    actor, critic = make_networks(group, centralized=centralized)
    td = make_trajectory(group, 4, 6)
    td["car", "mask"][..., 0] |= ~td["car", "mask"].any(-1)  # else the reward is kept as it is
    with torch.no_grad():
        actor(td)
    mask = td["car", "mask"]
    truncated = td["next", "car", "truncated"] & ~td["next", "car", "terminated"]
    seen = td["next", "car", "mask"] | (mask & truncated.squeeze(-1))
    rewarded = mask.clone()
    if bootstrap == "agent":  # who waits is still paid for what it did; the dead are not
        dead = torch.zeros_like(mask)
        dead[:, 1:] = td["next", "car", "done"][:, :-1].squeeze(-1)
        rewarded |= ~dead
    poison = [(("car", leaf), mask) for leaf in ("observation", "action", "action_log_prob")]
    poison += [(("next", "car", "reward"), rewarded), (("next", "car", "observation"), seen)]
    assert all(0 < (~alive).sum() < alive.numel() for _, alive in poison)

    def run(td):
        norm = ValueNorm()
        actor, critic = make_networks(group, centralized=centralized, value_norm=norm)
        loss = MAPPOLoss(actor, critic, group=group, bootstrap=bootstrap)
        estimated = td.clone()
        loss.value_estimator(estimated)
        written = [
            torch.where(mask.unsqueeze(-1), estimated["car", leaf], 0.0)
            for leaf in ("advantage", "value_target", "state_value")
        ]
        written += [norm.running_mean.clone(), norm.running_mean_sq.clone()]
        return outcome(loss, estimated), outcome(loss, td), written

    before = run(td)
    assert all(bool(x.isfinite().all()) for x in before[2])
    everything = td
    for key, alive in poison:
        everything = poisoned(everything, key, alive, value)
        for other in (poisoned(td, key, alive, value), everything):
            after = run(other)
            assert_same_outcome(before[0], after[0])
            assert_same_outcome(before[1], after[1])
            for a, b in zip(before[2], after[2]):
                assert_same(a, b, key)


# ---------------------------------------------------------------------------------- value norm


def test_with_a_value_norm_it_is_the_papers_loss():
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


def test_statistics_change_once_an_estimate_and_only_in_training():
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


def test_a_masked_target_does_not_reach_the_statistics():
    group = make_group()
    norm = ValueNorm(decay=0.5)
    _, critic = make_networks(group, value_norm=norm)
    estimator = TeamGAE(gamma=0.9, lmbda=0.8, value_network=critic, group=group, value_norm=norm)
    td = make_trajectory(group, 3, 4)
    estimator(td)
    living = td["car", "value_target"][td["car", "mask"]]
    torch.testing.assert_close(norm.running_mean.squeeze(), 0.5 * living.mean())
    torch.testing.assert_close(norm.running_mean_sq.squeeze(), 0.5 * living.square().mean())


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


def test_without_entropy_bonus_the_entropy_is_still_measured():
    _, loss = by_hand(entropy_bonus=False)
    out = loss(hand_batch())
    assert "loss_entropy" not in out.keys()
    assert out["entropy"].item() == pytest.approx(math.log(2))


# ------------------------------------------------------------------------- parameters, groups


@pytest.mark.parametrize("kind", ["bounded", "categorical"])
def test_functional_is_the_same(kind):
    group = make_group(kind)
    td = make_trajectory(group, 4, 5)
    outcomes, norms = [], []
    for functional in (False, True):
        norm = ValueNorm()
        actor, critic = make_networks(group, value_norm=norm)
        batch = td.clone()
        torch.manual_seed(3)
        with torch.no_grad():
            actor(batch)
        loss = MAPPOLoss(actor, critic, group=group, functional=functional, clip_value=0.2)
        loss.make_value_estimator(gamma=0.9)
        if functional:
            loss.value_estimator(
                batch,
                params=loss.critic_network_params.detach(),
                target_params=loss.target_critic_network_params,
            )
        else:
            loss.value_estimator(batch)
        first = outcome(loss, batch)
        with torch.no_grad():
            for parameter in loss.parameters():
                parameter.sub_(0.1 * parameter.grad)
        # Estimated inside, with the weights and statistics as they are now.
        second = outcome(loss, batch.exclude(("car", "advantage"), ("car", "value_target")))
        third = outcome(loss, batch)
        order = sorted(range(len(first[1])), key=lambda i: (first[1][i].shape, first[1][i].norm()))
        outcomes.append([(out, [g[i] for i in order]) for out, g in (first, second, third)])
        norms.append(torch.stack([norm.running_mean, norm.running_mean_sq]))
    assert torch.equal(*norms)
    assert norms[0].abs().sum() > 0
    for one, other in zip(*outcomes):
        assert_same_outcome(one, other)


def test_ippo_is_the_same_class_with_a_local_critic():
    """Each agent's value depends on its own observation only, and so do the losses."""
    group = make_group(n=2)
    for centralized in (True, False):
        actor, critic = make_networks(group, centralized=centralized)
        loss = MAPPOLoss(actor, critic, group=group, reduction="none", loss_critic_type="l2")
        td = make_batch(group, actor, 8, alive=2.0)
        other = td.clone()
        other["car", "observation"][:, 1] += 1.0
        same = torch.isclose(
            loss(td)["loss_critic"][:, 0], loss(other)["loss_critic"][:, 0], atol=1e-6
        )
        assert bool(same.all()) is not centralized


def test_two_groups_of_equal_size_do_not_meet():
    team = TeamSpec(
        [
            AgentSpec(name, 2, make_group().observation_spec[0], make_group().action_spec[0])
            for name in ("cat", "dog")
        ]
    )
    cats, dogs = team.groups.values()
    (cat_actor, cat_critic), (dog_actor, dog_critic) = (
        make_networks(group, seed=i) for i, group in enumerate((cats, dogs))
    )
    both = make_trajectory(cats, 4, 5)
    both.update(make_trajectory(dogs, 4, 5, seed=9))
    with torch.no_grad():
        dog_actor(cat_actor(both))
    losses = [
        MAPPOLoss(cat_actor, cat_critic, group=cats),
        MAPPOLoss(dog_actor, dog_critic, group=dogs),
    ]
    alone = []
    for group, loss in zip((cats, dogs), losses):
        own = both.select(
            group.name, ("next", group.name), *[("next", f) for f in ("done", "terminated")]
        ).clone()
        loss.value_estimator(own)
        alone.append((own, outcome(loss, own)))
    for loss in losses:
        loss.value_estimator(both)
    for group, loss, (own, expected) in zip((cats, dogs), losses, alone):
        for leaf in ("advantage", "value_target", "state_value"):
            assert_same(both[group.name, leaf], own[group.name, leaf])
        assert_same_outcome(expected, outcome(loss, both))
    other = poisoned(both, ("dog", "observation"), torch.zeros(4, 5, 2, dtype=torch.bool), 7.0)
    assert_same_outcome(alone[0][1], outcome(losses[0], other))
    changed = outcome(losses[1], other)
    assert not torch.equal(changed[0]["loss_critic"], alone[1][1][0]["loss_critic"])


# ------------------------------------------------------------------------ in a TorchRL script


@pytest.mark.parametrize("bootstrap", ["team", "agent"])
def test_the_advantage_is_estimated_where_it_is_missing(bootstrap):
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
    assert_same_outcome(outcome(loss, estimated), outcome(loss, td))
    assert set(td.keys(True, True)) == keys  # nothing was written
    assert all(torch.equal(td[key], copy[key]) for key in keys)


def test_a_plain_torchrl_script():
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
        assert_same_outcome(outcome(loss, batch), outcome(with_group, batch))
        buffer.extend(batch.reshape(-1))
        for minibatch in buffer:
            out = loss(minibatch)
            optimizer.zero_grad()
            sum(out[key] for key in LOSSES).backward()
            optimizer.step()
    env.close()
    assert all(not torch.equal(a, b) for a, b in zip(before, loss.parameters()))


def test_it_takes_tensors_by_name():
    """TorchRL's dispatch: keyword arguments in, outputs out."""
    group = make_group()
    actor, critic = make_networks(group)
    loss = MAPPOLoss(actor, critic, group=group, entropy_bonus=False)
    td = make_trajectory(group, 4, 5)
    with torch.no_grad():
        actor(td)
    expected = loss(td)
    loss.select_out_keys("loss_objective", "loss_critic")
    by_name = {"_".join((k,) if isinstance(k, str) else k): td[k] for k in loss.in_keys}
    objective, critic_loss = loss(**by_name)
    assert_same(objective, expected["loss_objective"])
    assert_same(critic_loss, expected["loss_critic"])


def test_torchrls_estimators_are_still_there():
    from torchrl.objectives import ValueEstimators
    from torchrl.objectives.value import TDLambdaEstimator

    group = make_group(mask=False)
    actor, critic = make_networks(group)
    loss = MAPPOLoss(actor, critic, group=group)
    loss.make_value_estimator(ValueEstimators.TDLambda, gamma=0.9, lmbda=0.9)
    assert isinstance(loss.value_estimator, TDLambdaEstimator)
    loss.make_value_estimator(ValueEstimators.GAE, gamma=0.9)
    assert isinstance(loss.value_estimator, TeamGAE)


def test_masked_scalar_entropy_coefficient_can_be_scheduled():
    _, loss = by_hand()
    loss.entropy_coeff.fill_(0.7)
    assert loss(hand_batch())["loss_entropy"].item() == pytest.approx(-0.7 * math.log(2))


def test_value_norm_of_torchrls_own():
    """One may pass TorchRL's; its statistics are the caller's to update."""
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


# --------------------------------------------------------------------------------------- errors


def test_errors():
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
def test_the_entropy_of_squashed_actions_near_their_bounds(loc):
    """Against the integral in double precision; through the inverse of tanh it drifts."""
    scale = 0.5
    x = torch.linspace(-8, 8, 200_001, dtype=torch.float64)
    density = torch.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    before = loc + scale * x
    log_slope = 2 * (math.log(2) - before - torch.nn.functional.softplus(-2 * before))
    gaussian = 0.5 * math.log(2 * math.pi * math.e) + math.log(scale)
    expected = gaussian + torch.trapezoid(density * log_slope, x).item()
    group = make_group("bounded", 1)
    loss = MAPPOLoss(*make_networks(group), group=group, samples_mc_entropy=20_000)
    where = torch.full((1,), loc)
    torch.manual_seed(0)
    found = loss._entropy(TanhNormal(where, torch.full((1,), scale), event_dims=1)).item()
    assert found == pytest.approx(expected, abs=0.03)


def test_it_is_functional_by_default_as_torchrls():
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
