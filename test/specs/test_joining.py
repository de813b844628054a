"""Joined groups: gathering, scattering, and which groups can be joined."""

from dataclasses import replace

import pytest
import torch
from meadow import make_team
from samples import assert_same
from tensordict import LazyStackedTensorDict, TensorDict
from torchrl.data import Bounded, Categorical, Composite, MultiCategorical, OneHot, Unbounded

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.errors import SpecError
from torchrl_marl.specs.joining import JoinedGroup, can_join, join
from torchrl_marl.specs.stacking import unpad_group

LEAVES = ("action", "action_log_prob")


def kind(name, n=1, o=4, action=None, **kwargs):
    return AgentSpec(name, n, Unbounded((o,)), action or Bounded(-1, 1, (2,)), **kwargs)


def joined_of(*kinds, **kwargs):
    return join(tuple(TeamSpec(list(kinds)).groups.values()), **kwargs)


def filled(team, *batch):
    """Random values for each leaf of each group; padding is 0."""
    td = TensorDict({}, batch)
    for name, group in team.groups.items():
        n = group.n_agents
        rows = {"observation": torch.randn(*batch, n, group.observation_dim)}
        rows["action"] = torch.randn(*batch, n, group.action_dim)
        for leaf in ("observation", "action"):
            padding = group.paddings.get(leaf)
            if padding is not None:
                rows[leaf] = rows[leaf] * padding.mask()
        rows["mask"] = torch.rand(*batch, n) < 0.6
        rows["action_log_prob"] = torch.randn(*batch, n)
        rows["reward"] = torch.randn(*batch, n, 1)
        for flag in ("done", "terminated", "truncated"):
            rows[flag] = torch.rand(*batch, n, 1) < 0.5
        td[name] = TensorDict(rows, [*batch, n])
    return td


def lazily(team, td):
    lazy = td.clone()
    for name, group in team.groups.items():
        if group.members is not None:
            lazy[name] = unpad_group(td[name], group.paddings)
    return lazy


# --------------------------------------------------------------------------- gather, scatter


def test_gather_matches_values_by_hand():
    joined = joined_of(kind("cat", 1, 2), kind("mouse", 2, 3))
    ones = torch.ones(1, 1)
    td = TensorDict(
        {
            "cat": {"observation": torch.tensor([[[1.0, 2.0]]]), "mask": ones.bool()},
            "mouse": {
                "observation": torch.tensor([[[3.0, 4.0, 5.0], [6.0, 7.0, 8.0]]]),
                "mask": torch.tensor([[True, False]]),
            },
        },
        [1],
    )
    gathered = joined.gather(td)
    assert list(gathered.keys()) == ["cat+mouse"]
    own = gathered["cat+mouse"]
    assert own.batch_size == (1, 3)
    assert own["observation"].tolist() == [[[1, 2, 0], [3, 4, 5], [6, 7, 8]]]
    assert own["mask"].tolist() == [[True, True, False]]
    assert set(own.keys()) == {"observation", "mask"}


@pytest.mark.parametrize("layout", ["two", "three"])
@pytest.mark.parametrize("batch", [(), (4,), (2, 3)])
@pytest.mark.parametrize("lazy", [True, False])
def test_gather_and_scatter_round_trip(layout, batch, lazy):
    team = make_team(layout)
    joined = join(tuple(team.groups.values()))
    td = filled(team, *batch)
    given = lazily(team, td) if lazy else td.clone()
    gathered = joined.gather(given, leaves=(*LEAVES, "reward"), flags=True)
    assert gathered.batch_size == batch
    for i, name in enumerate(team.groups):
        own = gathered[joined.name][..., torch.tensor(joined.group_index) == i]
        for leaf in td[name].keys():
            x = td[name, leaf]
            width = x.shape[-1] if leaf in ("observation", "action") else None
            assert_same(own[leaf][..., :width] if width else own[leaf], x, leaf)
            if width:
                assert not own[leaf][..., width:].any()
    target = lazily(team, td.exclude(*((name, leaf) for name in team.groups for leaf in LEAVES)))
    target = (
        target if lazy else td.exclude(*((name, leaf) for name in team.groups for leaf in LEAVES))
    )
    assert joined.scatter(gathered, target, LEAVES) is target
    for name, group in team.groups.items():
        for i, a in enumerate(group.action_dims):
            member = target[name][..., i]
            assert_same(member["action"], td[name, "action"][..., i, : a if lazy else None])
            assert_same(member["action_log_prob"], td[name, "action_log_prob"][..., i])


def test_states_of_agents_are_joined_like_observations():
    """States are flattened and padded; they are left out if one group has none."""
    image = AgentSpec("eye", 1, Unbounded((2,)), Bounded(-1, 1, (1,)), state_spec=Unbounded((2, 2)))
    line = AgentSpec("ear", 2, Unbounded((1,)), Bounded(-1, 1, (1,)), state_spec=Unbounded((3,)))
    groups = TeamSpec([image, line]).groups
    joined = join(tuple(groups.values()))
    assert joined.of_states.observation_dims == (4, 3, 3)
    assert [own.of_states.observation_dims for own in joined.groups] == [(4,), (3, 3)]
    seen = {
        "eye": {"observation": torch.zeros(1, 2), "state": torch.arange(4.0).view(1, 2, 2)},
        "ear": {"observation": torch.zeros(2, 1), "state": torch.arange(6.0).view(2, 3)},
    }
    for name, own in seen.items():
        own["mask"] = torch.ones(groups[name].n_agents, dtype=torch.bool)
    gathered = joined.gather(TensorDict(seen), leaves=["state"])["eye+ear"]
    assert gathered["state"].tolist() == [[0, 1, 2, 3], [0, 1, 2, 0], [3, 4, 5, 0]]
    assert "state" not in joined.gather(TensorDict(seen))["eye+ear"].keys()  # actors need none
    deaf = replace(line, state_spec=None)
    assert join(tuple(TeamSpec([image, deaf]).groups.values())).agent_state_key is None


def test_gather_returns_a_copy():
    """Writes to the joined group do not change its parts."""
    team = make_team("two")
    td = filled(team, 3)
    before = td.clone()
    gathered = join(tuple(team.groups.values())).gather(td, leaves=LEAVES, flags=True)
    gathered.apply_(lambda x: x.zero_() if x.dtype != torch.bool else x.fill_(True))
    for key in before.keys(True, True):
        assert_same(td[key], before[key], key)


def test_dict_observations_with_different_keys_and_images():
    """Features of each agent come first, whichever leaves it has."""
    fast = Composite({"speed": Unbounded((2,)), "image": Unbounded((2, 2))})
    slow = Composite({"smell": Unbounded((3,)), "speed": Unbounded((2,))})
    action = Bounded(-1, 1, (2,))
    team = TeamSpec(
        {
            "animals": [AgentSpec("cat", 1, fast, action), AgentSpec("snail", 1, slow, action)],
            "birds": [AgentSpec("bird", 1, Unbounded((2,)), action)],
        }
    )
    cat = {"speed": torch.tensor([1.0, 2.0]), "image": torch.tensor([[3.0, 4.0], [5.0, 6.0]])}
    snail = {"smell": torch.tensor([7.0, 8.0, 9.0]), "speed": torch.tensor([1.0, 2.0])}
    alive = torch.tensor(True)
    members = [TensorDict({"observation": x, "mask": alive}, []) for x in (cat, snail)]
    birds = {"observation": torch.tensor([[5.0, 6.0]]), "mask": torch.tensor([True])}
    td = TensorDict({"birds": TensorDict(birds, [1])}, [])
    td["animals"] = LazyStackedTensorDict(*members, stack_dim=0)
    joined = join(tuple(team.groups.values()))
    assert joined.observation_dims == (6, 5, 2)
    group = team.groups["animals"]
    order = [key[2] for key in group.observation_keys]
    rows = []
    for own in (cat, snail):
        rows.append(torch.cat([own[leaf].flatten() for leaf in order if leaf in own]))
    wanted = torch.zeros(3, 6)
    wanted[0], wanted[1, :5], wanted[2, :2] = rows[0], rows[1], torch.tensor([5.0, 6.0])
    assert_same(joined.gather(td)[joined.name, "observation"], wanted)
    dense = td.clone()
    dense["animals"] = group.data(td)
    assert_same(joined.gather(dense)[joined.name, "observation"], wanted)
    flat = group.flat_observation(td)
    assert_same(flat, wanted[:2])


def test_discrete_and_image_observations_become_features():
    numbers = AgentSpec("counter", 2, Categorical(9), Bounded(-1, 1, (1,)))
    images = AgentSpec("camera", 1, Unbounded((2, 3)), Bounded(-1, 1, (1,)))
    joined = joined_of(numbers, images)
    assert joined.observation_dims == (1, 1, 6)
    living = [torch.ones(4, n).bool() for n in (2, 1)]
    seen, image = torch.tensor([3, 5]).expand(4, 2), torch.arange(24.0).view(4, 1, 2, 3)
    td = TensorDict(
        {
            "counter": {"observation": seen, "mask": living[0]},
            "camera": {"observation": image, "mask": living[1]},
        },
        [4],
    )
    rows = joined.gather(td)[joined.name, "observation"]
    assert rows[:, :2].tolist() == [[[3, 0, 0, 0, 0, 0], [5, 0, 0, 0, 0, 0]]] * 4
    assert_same(rows[:, 2], image.flatten(1))


# ------------------------------------------------------------------------------ masks, flags


def test_agents_of_a_part_without_masks_count_as_alive():
    team = make_team("two")
    cats, mice = team.groups.values()
    td = filled(team, 5)
    joined = join((replace(cats, mask_key=None), mice))
    mask = joined.gather(td.exclude(("cats", "mask")))[joined.mask_key]
    assert mask.dtype is torch.bool
    assert mask[:, :2].all()
    assert_same(mask[:, 2:], td["mice", "mask"])
    nobody = join((replace(cats, mask_key=None), replace(mice, mask_key=None)))
    assert nobody.mask_key is None
    assert "mask" not in nobody.gather(td)[nobody.name].keys()


def test_action_masks_of_one_part():
    cats, mice = (
        kind("cat", 2, action=Categorical(2)),
        kind("mouse", 1, action=Categorical(3), action_mask=True),
    )
    joined = joined_of(cats, mice)
    legal = torch.tensor([[[True, False, True]]])
    td = TensorDict(
        {
            "cat": {"observation": torch.zeros(1, 2, 4), "mask": torch.ones(1, 2).bool()},
            "mouse": {
                "observation": torch.zeros(1, 1, 4),
                "mask": torch.ones(1, 1).bool(),
                "action_mask": legal,
            },
        },
        [1],
    )
    mask = joined.gather(td)[joined.action_mask_key]
    assert mask.tolist() == [[[True, True, False], [True, True, False], [True, False, True]]]
    assert joined.action_padding.tolist() == [[True, True, False]] * 2 + [[True] * 3]
    plain = joined_of(kind("a", action=Categorical(2)), kind("b", action=Categorical(3)))
    assert plain.action_mask_key is None


@pytest.mark.parametrize("truncated", [True, False])
def test_done_flags_of_a_part_with_root_flags_only(truncated):
    team = make_team("two")
    cats, mice = team.groups.values()
    flags = {"done_key": "done", "terminated_key": "terminated", "agent_done": False}
    cats = replace(cats, **flags, truncated_key="truncated" if truncated else None)
    joined = join((cats, mice))
    assert joined.agent_done
    td = filled(team, 4).exclude(*(("cats", flag) for flag in ("done", "terminated", "truncated")))
    td["done"] = torch.tensor([[True], [True], [False], [False]])
    td["terminated"] = torch.tensor([[True], [False], [False], [False]])
    if truncated:
        td["truncated"] = td["done"] & ~td["terminated"]
    own = joined.gather(td, flags=True)[joined.name]
    for flag, wanted in (
        ("done", [1, 1, 0, 0]),
        ("terminated", [1, 0, 0, 0]),
        ("truncated", [0, 1, 0, 0]),
    ):
        assert own[flag].shape == (4, 5, 1)
        assert own[flag][:, :2, 0].tolist() == [[bool(x)] * 2 for x in wanted]
        assert_same(own[flag][:, 2:], td["mice", flag])


# -------------------------------------------------------------------------------------- specs


def test_specs_of_joined_groups():
    joined = joined_of(
        kind("cat", 2, 4, Bounded(-1, 1, (3,))), kind("mouse", 1, 6, Bounded(-2, 3, (2,)))
    )
    assert isinstance(joined, JoinedGroup)
    assert joined.name == "cat+mouse"
    assert joined.agent_names == ("cat_0", "cat_1", "mouse_0")
    assert joined.group_index == (0, 0, 1)
    assert joined.membership.tolist() == [[1, 0], [1, 0], [0, 1]]
    assert joined.kinds == (0, 0, 1)
    assert joined.observation_dims == (4, 4, 6)
    assert joined.observation_dim == 6
    assert joined.observation_mask.tolist() == [[True] * 4 + [False] * 2] * 2 + [[True] * 6]
    assert joined.observation_order is None
    assert joined.action_dims == (3, 3, 2)
    low, high = joined.action_bounds
    assert low.tolist() == [[-1, -1, -1], [-1, -1, -1], [-2, -2, 0]]
    assert high.tolist() == [[1, 1, 1], [1, 1, 1], [3, 3, 0]]
    assert joined.action_padding.tolist() == [[True] * 3] * 2 + [[True, True, False]]
    assert joined.paddings["action"].shapes == ((3,), (3,), (2,))


@pytest.mark.parametrize("action", [Categorical, OneHot])
def test_discrete_specs_of_joined_groups(action):
    joined = joined_of(kind("cat", 1, action=action(2)), kind("mouse", 1, action=action(4)))
    assert joined.discrete
    assert joined.one_hot is (action is OneHot)
    assert joined.n_actions == 4
    assert joined.action_dims == (2, 4)
    assert joined.action_padding.tolist() == [[True, True, False, False], [True] * 4]


def test_branches_of_joined_groups():
    choices = MultiCategorical([2, 3])
    joined = joined_of(kind("cat", 1, action=choices), kind("mouse", 2, action=choices))
    assert joined.branches == (2, 3) and joined.action_dims == (2, 2, 2)


def test_kinds_of_joined_groups_stay_separate():
    """Equal kinds of two groups are two kinds, so that groups learn as separate ones."""
    team = make_team("three")
    joined = join(tuple(team.groups.values()))
    assert joined.kinds == (0, 0, 1, 1, 1, 2, 2, 2)
    same = joined_of(kind("a", 2), kind("b", 1))
    assert same.kinds == (0, 0, 1)
    assert same.members is not None
    assert same.observation_mask is None
    assert same.action_padding is None


def test_join_of_one_group_returns_it():
    (group,) = TeamSpec([kind("cat")]).groups.values()
    assert join((group,)) is group
    assert group.groups == (group,)
    assert group.membership is None


REFUSED = {
    "kinds of numbers": (Bounded(-1, 1, (2,)), Categorical(3)),
    "one-hot and index": (OneHot(3), Categorical(3)),
    "bounds or none": (Bounded(-1, 1, (2,)), Unbounded((2,))),
    "types": (Bounded(-1, 1, (2,)), Bounded(-1, 1, (2,), dtype=torch.float64)),
    "several choices": (MultiCategorical([2, 3]), MultiCategorical([2, 4])),
}


@pytest.mark.parametrize("actions", REFUSED.values(), ids=REFUSED)
def test_joining_groups_with_different_actions_raises(actions):
    groups = tuple(
        TeamSpec([kind(name, action=action)]).groups[name] for name, action in zip("ab", actions)
    )
    assert not can_join(*groups)
    with pytest.raises(ValueError, match="groups 'a' and 'b' have actions of different types"):
        join(groups)


@pytest.mark.parametrize("actions", REFUSED.values(), ids=REFUSED)
def test_observations_of_groups_with_different_actions_are_joined(actions):
    """For a critic across groups."""
    groups = tuple(
        TeamSpec([kind(name, 2, o, action=action)]).groups[name]
        for name, o, action in zip("ab", (4, 3), actions)
    )
    seen = join(groups, same_actions=False)
    assert seen.observation_dims == (4, 4, 3, 3)
    rows = {
        name: {"observation": torch.ones(5, 2, o), "mask": torch.ones(5, 2).bool()}
        for name, o in zip("ab", (4, 3))
    }
    own = seen.gather(TensorDict(rows, [5]))["a+b"]
    assert own["observation"].sum(-1).tolist() == [[4, 4, 3, 3]] * 5
    assert seen.action_mask_key is None


@pytest.mark.parametrize("action", [Bounded(-1, 1, (2,)), Unbounded((2,)), Categorical(3)])
def test_can_join_needs_rewards_per_agent(action):
    groups = TeamSpec([kind("a", 1, 3, action), kind("b", 4, 7, action)]).groups.values()
    assert can_join(*groups)
    # A team reward does not belong to agents.
    one, other = groups
    assert not can_join(replace(one, reward_key="reward"), other)
    assert not can_join(*(replace(g, reward_key="reward") for g in groups))


# ---------------------------------------------------------------------------------- bad input


def test_error_of_wrong_data_names_group_and_key():
    team = make_team("two")
    joined = join(tuple(team.groups.values()))
    td = filled(team, 4)
    for leaf, wrong, message in (
        ("observation", torch.zeros(4, 3, 5), r"\(4, 3, 5\), expected \(\*batch, 3, 6\)"),
        ("observation", torch.zeros(4, 2, 6), r"\(4, 2, 6\), expected \(\*batch, 3, 6\)"),
        ("mask", torch.zeros(4, 3), "torch.float32, expected torch.bool"),
        ("mask", torch.zeros(4, 3, 1).bool(), r"\(4, 3, 1\), expected \(4, 3\)"),
    ):
        given = td.exclude(("mice", leaf))
        if wrong.shape[1] == 3:
            given["mice", leaf] = wrong
        else:
            given["mice"] = TensorDict({**given["mice"].to_dict(), leaf: wrong}, [4])
        with pytest.raises(SpecError, match=rf"group 'mice': \('mice', '{leaf}'\) is {message}"):
            joined.gather(given)
    with pytest.raises(KeyError, match="there is no group 'mice'.*cats"):
        joined.gather(td.exclude("mice"))


def test_error_of_wrong_lazy_data_names_the_agent():
    team = make_team("one")
    (group,) = team.groups.values()
    lazy = lazily(team, filled(team, 4))["herd"]
    rows = [member.clone() for member in lazy.unbind(-1)]
    rows[3]["observation"] = torch.zeros(4, 5)
    td = TensorDict({"herd": LazyStackedTensorDict(*rows, stack_dim=1)}, [4])
    with pytest.raises(
        SpecError,
        match=r"group 'herd': 'observation' of agent 3 has shape \(5,\), expected \(6,\)",
    ):
        group.data(td)
