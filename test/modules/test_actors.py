"""Actors: shapes, keys, legal actions, sharing, symmetry, masks."""

import pytest
import torch
from cover import pairwise
from samples import (
    ACTIONS,
    DISCRETE,
    LOGITS,
    POISON,
    assert_same,
    make_group,
    make_observed,
    poisoned,
)
from tensordict import TensorDict
from torchrl.data import Bounded, Composite, MultiOneHot, Unbounded
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.errors import SpecError
from torchrl_marl.modules import (
    NetworkConfig,
    ObservationNorm,
    make_actor,
    make_deterministic_actor,
)

ALL = [*ACTIONS]


def lively(actor):
    """Perturbs the initial weights, which give nearly equal outputs."""
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return actor


def gradients(actor, td, weight):
    actor.zero_grad()
    out = actor.get_dist(td).log_prob(td["car", "action"])
    (torch.where(td["car", "mask"], out, 0.0) * weight).sum().backward()
    return [p.grad.clone() for p in actor.parameters()]


@pairwise(kind=ALL, mask=[True, False], share=[True, False], batch=[(), (5,), (2, 3)])
def test_shapes_and_keys(kind, mask, share, batch):
    group = make_group(kind, mask=mask, action_mask=kind in DISCRETE)
    actor = make_actor(group, NetworkConfig([8], share_params=share))
    td = actor(make_observed(group, *batch))
    shape = (*batch, 3)
    widths = {"categorical": (), "one_hot": (4,), "hybrid": (3,)}
    assert td["car", "action"].shape == (*shape, *widths.get(kind, (2,)))
    assert td["car", "action_log_prob"].shape == shape
    parameters = {"logits"} if kind in LOGITS else {"loc", "scale"}
    parameters |= {"logits"} if kind == "hybrid" else set()
    assert parameters <= set(td["car"].keys())
    assert set(actor.out_keys) == {
        ("car", leaf) for leaf in (*parameters, "action", "action_log_prob")
    }
    read = {("car", "observation")} | ({("car", "mask")} if mask else set())
    read |= {("car", "action_mask")} if kind in DISCRETE else set()
    assert set(actor.in_keys) == read
    if not batch:
        assert group.action_spec.is_in(td["car", "action"].to(group.action_spec.dtype))
    log_prob = actor.get_dist(td).log_prob(td["car", "action"])
    torch.testing.assert_close(log_prob, td["car", "action_log_prob"], rtol=1e-3, atol=1e-3)


def test_actions_stay_within_bounds_of_each_feature():
    group = make_group("wide")
    td = lively(make_actor(group))(make_observed(group, 2000))
    action = td["car", "action"]
    low, high = torch.tensor([-1.0, 0.0]), torch.tensor([1.0, 4.0])
    assert bool((action >= low).all())
    assert bool((action <= high).all())
    assert action[..., 1].max() > 2.5


def test_density_of_bounded_actions_integrates_to_one():
    group = TeamSpec([AgentSpec("car", 1, Unbounded((5,)), Bounded(0, 4, (1,)))]).groups["car"]
    actor = make_actor(group)  # its scale is near 1, so that few actions are near the bounds
    td = make_observed(group, 1, alive=2.0)
    distribution = actor.get_dist(td)
    grid = torch.linspace(1e-4, 4 - 1e-4, 20_001, dtype=torch.float32)
    density = distribution.log_prob(grid.view(-1, 1, 1, 1)).exp().flatten()
    assert torch.trapezoid(density, grid).item() == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("kind", DISCRETE)
def test_illegal_actions_are_never_drawn(kind):
    group = make_group(kind, action_mask=True)
    actor = lively(make_actor(group))
    td = make_observed(group, 1000, alive=2.0)
    legal = td["car", "action_mask"]
    for exploration in (ExplorationType.RANDOM, ExplorationType.DETERMINISTIC):
        with set_exploration_type(exploration), torch.no_grad():
            actor(td)
        action = td["car", "action"]
        index = action.argmax(-1) if kind == "one_hot" else action
        drawn = legal.gather(-1, index.unsqueeze(-1)).squeeze(-1)
        assert bool((drawn | ~legal.any(-1)).all())
    probability = actor.get_dist(td).probs.detach()
    some = legal.any(-1, keepdim=True).expand_as(legal)
    assert torch.equal(probability[some & ~legal], torch.zeros_like(probability[some & ~legal]))
    assert bool((probability[some & legal] > 0).all())
    torch.testing.assert_close(probability.sum(-1), torch.ones(1000, 3))


@pytest.mark.parametrize("kind", DISCRETE)
def test_agent_without_legal_action_draws_and_stays_finite(kind):
    group = make_group(kind, action_mask=True)
    actor = lively(make_actor(group))
    td = make_observed(group, 200)
    td["car", "action_mask"][:, 1] = False
    actor(td)
    distribution = actor.get_dist(td)
    log_prob, entropy = distribution.log_prob(td["car", "action"]), distribution.entropy()
    assert bool(log_prob.isfinite().all())
    assert bool(entropy.isfinite().all())
    assert len(td["car", "action"][:, 1].unique(dim=0)) == 4
    everything = td.clone()
    everything["car", "action_mask"][:, 1] = True
    assert torch.equal(distribution.probs[:, 1], actor.get_dist(everything).probs[:, 1])
    (log_prob.sum() + entropy.sum()).backward()
    assert all(bool(p.grad.isfinite().all()) for p in actor.parameters())


def test_entropy_counts_legal_actions_only():
    group = make_group("categorical", 1, action_mask=True)
    actor = make_actor(group)
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.zero_()
    td = make_observed(group, 1, alive=2.0)
    td["car", "action_mask"] = torch.tensor([[[True, False, True, False]]])
    distribution = actor.get_dist(td)
    assert distribution.entropy().item() == pytest.approx(0.6931472)
    assert distribution.log_prob(torch.tensor([[2]])).item() == pytest.approx(-0.6931472)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (torch.ones(5, 3, 4), "is torch.float32, expected torch.bool"),
        (torch.ones(5, 3, 3).bool(), r"is \(5, 3, 3\), expected \(5, 3, 4\)"),
    ],
)
def test_action_mask_of_wrong_shape_or_dtype_raises(wrong, message):
    group = make_group("categorical", action_mask=True)
    td = make_observed(group, 5)
    td["car", "action_mask"] = wrong
    with pytest.raises(SpecError, match=rf"group 'car': \('car', 'action_mask'\) {message}"):
        make_actor(group)(td)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("kind", ["bounded", "categorical"])
def test_number_of_parameters(share, kind):
    group = make_group(kind)
    actor = make_actor(group, NetworkConfig([8, 6], share_params=share))
    one = (5 * 8 + 8) + (8 * 6 + 6) + (6 * 4 + 4)
    assert sum(p.numel() for p in actor.parameters()) == one * (1 if share else 3)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("share", [True, False])
def test_permuting_agents_permutes_outputs(kind, share):
    group = make_group(kind, action_mask=kind in DISCRETE)
    actor = lively(make_actor(group, NetworkConfig([8], share_params=share)))
    td = make_observed(group, 6)
    order = [2, 0, 1]
    permuted = td.clone()
    for leaf in td["car"].keys():
        permuted["car", leaf] = td["car", leaf][:, order]
    with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
        one, other = actor(td), actor(permuted)
    leaf = "logits" if kind in LOGITS else "loc"
    assert torch.allclose(one["car", leaf][:, order], other["car", leaf], atol=1e-5) is share
    if share:
        actions = one["car", "action"][:, order].float(), other["car", "action"].float()
        torch.testing.assert_close(*actions, atol=1e-5, rtol=1e-5)


def test_unshared_agents_have_separate_weights():
    group = make_group(mask=False)
    actor = make_actor(group, NetworkConfig([8], share_params=False))
    td = make_observed(group, 1)
    td["car", "observation"] = torch.ones(1, 3, 5)
    loc = actor(td)["car", "loc"][0]
    assert not torch.equal(loc[0], loc[1])
    actor.zero_grad()
    actor(td)["car", "loc"][:, 1].sum().backward()
    for parameter in actor.parameters():
        assert parameter.shape[0] == 3
        moved = parameter.grad.flatten(1).abs().sum(1) > 0
        assert moved.tolist() == [False, True, False]


@pairwise(kind=ALL, value=POISON, share=[True, False], norm=[True, False])
def test_masked_observations_have_no_effect(kind, value, share, norm):
    group = make_group(kind, action_mask=kind in DISCRETE)
    norm = ObservationNorm(5) if norm else None
    actor = make_actor(group, NetworkConfig([8], share_params=share), observation_norm=norm)
    lively(actor)
    td = make_observed(group, 16)
    mask = td["car", "mask"]
    bad = poisoned(td, ("car", "observation"), mask, value)
    torch.manual_seed(1)
    one = actor(td)
    torch.manual_seed(1)
    other = actor(bad)
    for key in actor.out_keys:
        assert_same(one[key], other[key], key)
        assert bool(other[key].isfinite().all())
    weight = torch.randn(16, 3)
    before, after = gradients(actor, one, weight), gradients(actor, other, weight)
    for a, b in zip(before, after):
        assert_same(a, b)
    assert any(bool(g.abs().sum() > 0) for g in before)


def test_dict_and_image_observations_are_flattened():
    seen = Composite(image=Unbounded((3, 4, 4)), speed=Unbounded((2,)), shape=())
    group = TeamSpec([AgentSpec("car", 2, seen, Bounded(-1, 1, (1,)))]).groups["car"]
    assert group.observation_dim == 50
    actor = lively(make_actor(group, NetworkConfig([8])))
    td = TensorDict(
        {
            "car": {
                "observation": {"image": torch.randn(6, 2, 3, 4, 4), "speed": torch.randn(6, 2, 2)},
                "mask": torch.ones(6, 2, dtype=torch.bool),
            }
        },
        [6],
    )
    assert actor(td)["car", "action"].shape == (6, 2, 1)
    loc = td["car", "loc"].clone()
    for leaf in ("image", "speed"):
        other = td.clone()
        other["car", "observation", leaf] += 1.0
        assert not torch.allclose(actor(other)["car", "loc"], loc)


def test_observation_norm_is_applied():
    group = make_group(mask=False)
    norm = ObservationNorm(5)
    actor = lively(make_actor(group, NetworkConfig([8]), observation_norm=norm))
    plain = make_actor(group, NetworkConfig([8]))
    for a, b in zip(plain.parameters(), actor.parameters()):
        a.data.copy_(b.data)
    td = make_observed(group, 50)
    norm.update(3 + 2 * torch.randn(100, 3, 5))
    by_hand = td.clone()
    mean, variance = norm.mean.float(), norm.variance.float()
    by_hand["car", "observation"] = (td["car", "observation"] - mean) / (variance + 1e-5).sqrt()
    torch.testing.assert_close(
        actor(td)["car", "loc"], plain(by_hand)["car", "loc"], rtol=1e-4, atol=1e-5
    )


def test_actions_without_a_distribution_are_refused():
    spec = AgentSpec("car", 2, Unbounded((5,)), MultiOneHot([2, 3]))
    with pytest.raises(ValueError, match="'car': MultiOneHot actions have no distribution"):
        make_actor(TeamSpec([spec]).groups["car"])


def test_initial_policy_is_nearly_uniform():
    group = make_group("categorical")
    probability = make_actor(group).get_dist(make_observed(group, 100)).probs
    assert (probability - 0.25).abs().max() < 0.02


def test_bounds_on_one_side_only_are_refused():
    half = Bounded(torch.zeros(2), torch.full((2,), float("inf")), (2,))
    group = TeamSpec([AgentSpec("car", 2, Unbounded((3,)), half)]).groups["car"]
    with pytest.raises(ValueError, match="some action bounds are finite and some are not"):
        make_actor(group)


@pytest.mark.parametrize(
    "high, message",
    [
        ([1.0, -1.0], "has equal low and high bounds"),
        ([1.0, 3e38], "too far apart for torch.float"),
    ],
)
def test_degenerate_action_ranges_raise(high, message):
    bounds = Bounded(torch.tensor([-1.0, -1.0 if high[1] < 0 else -3e38]), torch.tensor(high), (2,))
    group = TeamSpec([AgentSpec("car", 2, Unbounded((3,)), bounds)]).groups["car"]
    with pytest.raises(ValueError, match=message):
        make_actor(group)


def test_deterministic_actor_refuses_overflowing_bounds():
    bounds = Bounded(-3e38, 3e38, (2,))
    group = TeamSpec([AgentSpec("car", 2, Unbounded((3,)), bounds)]).groups["car"]
    with pytest.raises(ValueError, match="too far apart for torch.float32"):
        make_deterministic_actor(group)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_observations_are_cast_to_the_network_dtype(dtype):
    group = make_group("categorical")
    td = make_observed(group, 3)
    key = group.key("observation")
    td[key] = td[key].to(dtype)
    actor = make_actor(group)
    own = actor.get_dist(td).logits
    td[key] = td[key].float()
    assert torch.equal(own, actor.get_dist(td).logits)
