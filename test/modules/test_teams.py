"""Actors of heterogeneous groups, and of several groups as one."""

import pytest
import torch
from cover import pairwise
from meadow import KINDS, make_team
from mixed_teams import H, joined_of, random_inputs, randomize_parameters
from samples import DISCRETE, assert_same, make_group
from tensordict import LazyStackedTensorDict, TensorDict
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_marl.modules import NetworkConfig, RandomActor, make_actor
from torchrl_marl.modules.joined_actor import JoinedActor, merge_parts
from torchrl_marl.specs.joining import join
from torchrl_marl.specs.stacking import unpad_group

ALL = ("bounded", "wide", "unbounded", "categorical", "one_hot")


def lazily(team, td):
    """The same data with heterogeneous groups stacked lazily."""
    lazy = td.clone()
    for name, group in team.groups.items():
        if group.members is not None:
            lazy[name] = unpad_group(td[name], group.paddings)
    return lazy


def actor_of(team, config=None):
    """An actor for all groups of a team, and the group whose names it uses."""
    group = joined_of(team)
    actor = randomize_parameters(make_actor(group, config or NetworkConfig([H])))
    return (JoinedActor(actor, group) if len(team.groups) > 1 else actor), group


# ------------------------------------------------------------------------------------- actors


@pairwise(layout=["one", "two", "three"], kind=ALL, batch=[(6,), (2, 3)])
def test_lazy_and_dense_inputs_give_equal_outputs(layout, kind, batch):
    team = make_team(layout, kind, kind in DISCRETE)
    actor, _ = actor_of(team)
    td = random_inputs(team, *batch)
    lazy = lazily(team, td)
    outputs = []
    for given in (td, lazy):
        torch.manual_seed(2)
        with torch.no_grad():
            outputs.append(actor(given))
    assert outputs[1] is lazy
    dense = outputs[0]
    for name, group in team.groups.items():
        members = [outputs[1][name][..., i] for i in range(group.n_agents)]
        for i, (member, a) in enumerate(zip(members, group.action_dims)):
            action = dense[name, "action"][..., i] if kind == "categorical" else None
            if action is None:
                action = dense[name, "action"][..., i, :a]
                assert not dense[name, "action"][..., i, a:].any()
            assert member["action"].shape == action.shape
            assert_same(member["action"], action)
            assert_same(member["action_log_prob"], dense[name, "action_log_prob"][..., i])


@pytest.mark.parametrize("layout", ["one", "two"])
@pytest.mark.parametrize("kind", ALL)
def test_log_probabilities_equal_those_of_separate_actors(layout, kind):
    """Two unpadded actors with the same weights; forward and gradient."""
    team = make_team(layout, kind, kind in DISCRETE)
    actor, joined = actor_of(team)
    padded = actor if layout == "one" else actor.actor
    td = random_inputs(team, 6)
    with torch.no_grad():
        whole = actor(td.clone())
    if layout == "two":
        whole = joined.gather(whole, leaves=("action",))
    distribution = padded.get_dist(whole)
    log_prob = distribution.log_prob(whole[joined.action_key])
    weight = torch.linspace(-1, 1, log_prob.numel()).view_as(log_prob)
    gradients = torch.autograd.grad((weight * log_prob).sum(), list(padded.parameters()))

    start = 0
    for k, (n, o, a) in enumerate(KINDS.values()):
        rows = slice(start, start + n)
        group = make_own_group(k, kind)
        own = make_actor(group, NetworkConfig([H]))
        outputs = list(range(a))
        if kind not in DISCRETE:
            outputs += list(range(joined.action_dim, joined.action_dim + a))
        cuts = [
            lambda x, k=k, o=o: x[k, :, :o],
            lambda x, k=k: x[k],
            lambda x, k=k, rows=outputs: x[k, rows],
            lambda x, k=k, rows=outputs: x[k, rows],
        ]
        with torch.no_grad():
            for mine, ours, cut in zip(own.parameters(), padded.parameters(), cuts, strict=True):
                mine.copy_(cut(ours))
        leaves = {
            "observation": whole[joined.name, "observation"][:, rows, :o],
            "mask": whole[joined.name, "mask"][:, rows],
        }
        if group.action_mask_key is not None:
            leaves["action_mask"] = whole[joined.name, "action_mask"][:, rows, :a]
        alone = TensorDict({group.name: TensorDict(leaves, [6, n])}, [6])
        action = whole[joined.action_key][:, rows]
        action = action if kind == "categorical" else action[..., :a]
        mine = own.get_dist(alone)
        assert action.isfinite().all()
        torch.testing.assert_close(mine.log_prob(action), log_prob[:, rows])
        if kind not in ("bounded", "wide"):
            torch.testing.assert_close(mine.entropy(), distribution.entropy()[:, rows])
        twin = torch.autograd.grad(
            (weight[:, rows] * mine.log_prob(action)).sum(), list(own.parameters())
        )
        for a_gradient, b_gradient, cut in zip(twin, gradients, cuts):
            torch.testing.assert_close(a_gradient, cut(b_gradient), rtol=1e-4, atol=1e-5)
            assert a_gradient.abs().sum() > 0
        start += n


def make_own_group(k, kind):
    """The group of one kind alone."""
    team = make_team("two", kind, kind in DISCRETE)
    return list(team.groups.values())[k]


@pytest.mark.parametrize("kind", DISCRETE)
def test_padding_of_action_masks_has_no_effect(kind):
    """Without a legal action, agents draw from all of theirs; mask padding has no effect."""
    team = make_team("one", kind, True)
    (group,) = team.groups.values()
    actors = [actor_of(team)[0], RandomActor(group)]
    td = random_inputs(team, 50, alive=2.0)
    td["herd", "action_mask"] = torch.zeros_like(td["herd", "action_mask"])
    other = td.clone()
    other["herd", "action_mask"] = (~group.action_padding).expand(50, 5, 4).clone()
    for actor in actors:
        drawn = []
        for given in (td.clone(), other.clone()):
            torch.manual_seed(0)
            drawn.append(actor(given)["herd", "action"])
        assert_same(*drawn)
        action = drawn[0] if kind == "categorical" else drawn[0].long().argmax(-1)
        assert set(action[:, 0].tolist()) == {0, 1}
        assert set(action[:, 3].tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("layout", ["one", "two"])
@pytest.mark.parametrize("kind", ALL)
def test_random_actions(layout, kind):
    """Inside their specs, legal, and the same for dense and lazy groups."""
    team = make_team(layout, kind, kind in DISCRETE)
    td = random_inputs(team, 200)
    for name, group in team.groups.items():
        actor = RandomActor(group)
        drawn = []
        for given in (td.clone(), lazily(team, td)):
            torch.manual_seed(3)
            drawn.append(actor(given)[name])
        dense, lazy = drawn
        for i in range(group.n_agents):
            a = group.action_dims[i]
            member = lazy[..., i]["action"]
            action = dense["action"][:, i]
            if kind != "categorical":
                assert not action[:, a:].any()
                action = action[:, :a]
            assert_same(member, action)
            spec = group.action_spec[i] if group.members is None else group.members[i]["action"]
            assert spec.expand(200, *spec.shape).is_in(action)
            if kind in DISCRETE:
                choice = action if kind == "categorical" else action.long().argmax(-1)
                legal = td[name, "action_mask"][:, i]
                assert legal.gather(-1, choice.unsqueeze(-1)).all()


# ---------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("layout", ["one", "two"])
def test_data_that_mismatch_the_specs_raise(layout):
    team = make_team(layout, "categorical", True)
    actor, _ = actor_of(team)
    name, n, o, a = ("herd", 5, 6, 4) if layout == "one" else ("mice", 3, 6, 4)
    td = random_inputs(team, 8)
    cases = {
        "observation": [
            (torch.zeros(8, n, o - 1), rf"\(8, {n}, {o - 1}\), expected \(\*batch, {n}, {o}\)"),
            (torch.zeros(8, n, o + 1), rf"\(8, {n}, {o + 1}\), expected \(\*batch, {n}, {o}\)"),
        ],
        "mask": [
            (torch.ones(8, n), "torch.float32, expected torch.bool"),
            (torch.ones(8, n, 1).bool(), rf"\(8, {n}, 1\), expected \(8, {n}\)"),
        ],
        "action_mask": [
            (torch.ones(8, n, a), "torch.float32, expected torch.bool"),
            (torch.ones(8, n, a - 1).bool(), rf"\(8, {n}, {a - 1}\), expected \(8, {n}, {a}\)"),
        ],
    }
    for leaf, wrongs in cases.items():
        for wrong, message in wrongs:
            given = td.clone()
            given[name, leaf] = wrong
            pattern = rf"group '{name}': \('{name}', '{leaf}'\) is {message}"
            with pytest.raises(ValueError, match=pattern):
                actor(given)
            if leaf == "action_mask":
                with pytest.raises(ValueError, match=pattern):
                    RandomActor(team.groups[name])(given)
    given = td.exclude(name)
    with pytest.raises(KeyError, match=name):
        actor(given)


@pytest.mark.parametrize("joined", [True, False])
def test_unequal_agents_in_a_homogeneous_group_raise(joined):
    team = make_team("two")
    td = random_inputs(team, 4)
    rows = [{"observation": torch.zeros(4, o), "mask": torch.ones(4).bool()} for o in (4, 3)]
    td["cats"] = LazyStackedTensorDict(*(TensorDict(row, [4]) for row in rows), stack_dim=1)
    actor = actor_of(team)[0] if joined else make_actor(team.groups["cats"])
    with pytest.raises(
        ValueError,
        match=r"group 'cats': 'observation' of agent 1 has shape \(3,\), expected \(4,\)",
    ):
        actor(td)


def test_deterministic_actions_of_a_joined_actor():
    team = make_team("two")
    actor, _ = actor_of(team)
    td = random_inputs(team, 4)
    with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
        one, other = actor(td.clone()), actor(td.clone())
    for name in team.groups:
        assert_same(one[name, "action"], other[name, "action"])


def test_parts_are_merged_only_if_all_are_present():
    groups = [make_group(n=2, name="cat", o=4), make_group(n=1, name="mouse", o=3)]
    joined = join(groups)
    whole = JoinedActor(make_actor(joined), joined)
    cat, mouse = whole.part("cat"), whole.part("mouse")
    at_random = RandomActor(make_group(n=1, name="dog", o=2))
    assert merge_parts([mouse, at_random, cat]) == [whole, at_random]
    assert merge_parts([cat, at_random]) == [cat, at_random]
    other = JoinedActor(make_actor(joined), joined).part("mouse")
    assert merge_parts([cat, other]) == [cat, other]
