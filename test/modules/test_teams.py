"""Actors and critics of heterogeneous groups, and of several groups as one."""

import pytest
import torch
from cover import pairwise
from meadow import KINDS, make_team
from samples import DISCRETE, POISON, assert_same, make_group
from tensordict import LazyStackedTensorDict, TensorDict
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.errors import ConfigError
from torchrl_marl.joining import join
from torchrl_marl.modules import NetworkConfig, RandomActor, ValueNorm, make_actor, make_critic
from torchrl_marl.modules.config import CriticConfig
from torchrl_marl.modules.joined_actor import JoinedActor, merge_parts
from torchrl_marl.stacking import unpad_group

ALL = ("bounded", "wide", "unbounded", "categorical", "one_hot")
H = 8


def observed(team, *batch, seed=0, alive=0.7):
    """What a team sees, padded; someone lives, someone not."""
    generator = torch.Generator().manual_seed(seed)
    td = TensorDict({}, batch)
    for name, group in team.groups.items():
        n, o = group.n_agents, group.observation_dim
        seen = torch.randn(*batch, n, o, generator=generator)
        own = torch.ones(n, o) if group.observation_mask is None else group.observation_mask
        leaves = {"observation": seen * own}
        leaves["mask"] = torch.rand(*batch, n, generator=generator) < alive
        if group.action_mask_key is not None:
            legal = torch.rand(*batch, n, group.n_actions, generator=generator) < 0.6
            legal[..., 0] = True
            own = group.action_padding
            leaves["action_mask"] = legal if own is None else legal & own
        td[name] = TensorDict(leaves, [*batch, n])
    if team.state_spec is not None:
        td["state"] = torch.randn(*batch, 7, generator=generator)
    return td


def lively(module, seed=5):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return module


def lazily(team, td):
    """The same with heterogeneous groups stacked lazily."""
    lazy = td.clone()
    for name, group in team.groups.items():
        if group.members is not None:
            lazy[name] = unpad_group(td[name], group.paddings)
    return lazy


def joined_of(team, **kwargs):
    return join(tuple(team.groups.values()), **kwargs)


def actor_of(team, config=None):
    """An actor for all groups of a team, and the group whose names it uses."""
    group = joined_of(team)
    actor = lively(make_actor(group, config or NetworkConfig([H])))
    return (JoinedActor(actor, group) if len(team.groups) > 1 else actor), group


# ------------------------------------------------------------------------------------- actors


@pairwise(layout=["one", "two", "three"], kind=ALL, batch=[(6,), (2, 3)])
def test_lazy_and_dense_input_are_the_same(layout, kind, batch):
    team = make_team(layout, kind, kind in DISCRETE)
    actor, _ = actor_of(team)
    td = observed(team, *batch)
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
def test_log_probabilities_are_those_of_separate_actors(layout, kind):
    """Two unpadded actors with the same weights; forward and gradient."""
    team = make_team(layout, kind, kind in DISCRETE)
    actor, joined = actor_of(team)
    padded = actor if layout == "one" else actor.actor
    td = observed(team, 6)
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
def test_padding_of_an_action_mask_is_not_read(kind):
    """Nothing of one's own is legal: all of one's own are; what padding says means nothing."""
    team = make_team("one", kind, True)
    (group,) = team.groups.values()
    actors = [actor_of(team)[0], RandomActor(group)]
    td = observed(team, 50, alive=2.0)
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
    td = observed(team, 200)
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


# ------------------------------------------------------------------------------------ sharing


def mlp_size(i, o):
    return i * H + H + H * o + o


def config_with(sharing, n_agents, cls=NetworkConfig, **kwargs):
    index = [i % 2 for i in range(n_agents)] if sharing in ("index", "clusters") else None
    return cls([H], sharing=sharing, sharing_index=index, **kwargs)


def size_of(sharing, inputs, outputs, n_agents, n_kinds):
    """Parameters of agents' networks, stored padded to the widest."""
    return {
        "none": n_agents * mlp_size(inputs, outputs),
        "full": mlp_size(inputs, outputs),
        "group": n_kinds * mlp_size(inputs, outputs),
        "trunk": inputs * H + H + n_agents * (H * outputs + outputs),
        "agent_id": mlp_size(inputs + n_agents, outputs),
        "masks": mlp_size(inputs, outputs),
        "clusters": 2 * mlp_size(inputs, outputs),
        "index": 2 * mlp_size(inputs, outputs),
    }[sharing]


SHARINGS = ("none", "full", "group", "trunk", "agent_id", "masks", "clusters", "index")
# Whether agents of two kinds have a network of their own, whole or in part.
APART = {"none": "all", "group": "all", "trunk": "heads"}


def group_of(layout):
    """A group of equal agents, a heterogeneous one, or several as one; and its kinds."""
    if layout == "single":
        team = TeamSpec([AgentSpec("car", 3, Unbounded((5,)), Bounded(-1, 1, (2,)))])
        return team, next(iter(team.groups.values())), 1
    team = make_team(layout)
    return team, joined_of(team), {"one": 2, "two": 2, "three": 3}[layout]


def n_parameters(module):
    return sum(p.numel() for p in module.parameters())


def data_of(team, group, *batch, alive=2.0):
    td = observed(team, *batch, alive=alive)
    return td if group.name in team.groups else td.update(group.gather(td))


LAYOUTS = ("single", "one", "two", "three")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sharing", SHARINGS)
def test_sharing_of_actors(layout, sharing):
    team, group, n_kinds = group_of(layout)
    actor = lively(make_actor(group, config_with(sharing, group.n_agents)))
    outputs = 2 * group.action_dim
    wanted = size_of(sharing, group.observation_dim, outputs, group.n_agents, n_kinds)
    assert n_parameters(actor) == wanted
    td = actor(data_of(team, group, 16))
    assert td[group.action_key].shape == (16, group.n_agents, group.action_dim)
    loc = td[group.key("loc")]
    kinds = group.kinds or (0,) * group.n_agents
    reached = [reach(actor, loc[:, i]) for i in (0, group.n_agents - 1)]
    assert_reach(actor, reached, sharing, kinds[0] == kinds[-1])


def reach(module, output):
    """Rows of every parameter that the output depends on."""
    parameters = list(module.parameters())
    total = (output * torch.linspace(0.5, 1.5, output.numel()).view_as(output)).sum()
    gradients = torch.autograd.grad(total, parameters, retain_graph=True, allow_unused=True)
    return [
        torch.zeros(len(p)).bool() if g is None else (g.reshape(len(p), -1) != 0).any(1)
        for p, g in zip(parameters, gradients)
    ]


def assert_reach(module, reached, sharing, same_kind):
    first, last = reached
    assert all(bool(rows.any()) for rows in (*first, *last))
    common = [bool((a & b).any()) for a, b in zip(first, last)]
    if sharing == "none" or (sharing == "group" and not same_kind):
        assert not any(common)
    elif sharing == "trunk":
        apart = [len(p) > 1 and p.ndim > 1 for p in module.parameters()]
        assert any(common) and not all(common)
        assert common == [not x for x in apart]
    elif sharing in ("index", "clusters"):
        # Agents 0 and N - 1 are of one network where N is odd.
        assert all(common) is (len(first[0]) == 2 and bool((first[0] == last[0]).all()))
    else:
        assert all(common)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sharing", SHARINGS)
def test_sharing_of_local_critics(layout, sharing):
    team, group, n_kinds = group_of(layout)
    config = config_with(sharing, group.n_agents, CriticConfig)
    critic = lively(make_critic(group, config, centralized=False))
    wanted = size_of(sharing, group.observation_dim, 1, group.n_agents, n_kinds)
    assert n_parameters(critic) == wanted
    value = critic(data_of(team, group, 16))[group.key("state_value")]
    assert value.shape == (16, group.n_agents, 1)
    kinds = group.kinds or (0,) * group.n_agents
    reached = [reach(critic, value[:, i]) for i in (0, group.n_agents - 1)]
    assert_reach(critic, reached, sharing, kinds[0] == kinds[-1])


@pairwise(
    lambda layout, sharing, sees: sees != "state" or layout != "single",
    layout=LAYOUTS,
    sharing=SHARINGS,
    sees=["observations", "team", "state"],
)
def test_sharing_of_central_critics(layout, sharing, sees):
    team, group, n_kinds = group_of(layout)
    config = config_with(sharing, group.n_agents, CriticConfig)
    seen = joined_of(team, same_actions=False) if sees == "team" else None
    centralized = "state" if sees == "state" else True
    critic = lively(make_critic(group, config, centralized=centralized, team=seen))
    widths = {
        "state": [7] * len(group.groups),
        "team": [sum(joined_of(team).observation_dims)] * len(group.groups),
        "observations": [sum(part.observation_dims) for part in group.groups],
    }[sees]
    sizes = [part.n_agents for part in group.groups]
    if sharing == "group":
        wanted = len(sizes) * mlp_size(max(widths), max(sizes))
    elif sharing == "full":
        alike = sees != "observations" or len(sizes) == 1
        wanted = mlp_size(max(widths), sum(sizes) if alike else max(sizes))
    else:
        wanted = size_of(sharing, max(widths), 1, group.n_agents, n_kinds)
    assert n_parameters(critic) == wanted
    td = data_of(team, group, 16)
    if seen is not None and seen is not group:
        td[seen.name] = seen.gather(observed(team, 16, alive=2.0))[seen.name]
    value = critic(td)[group.key("state_value")]
    assert value.shape == (16, group.n_agents, 1)
    if sharing in ("none", "group", "full"):
        reached = [reach(critic, value[:, i]) for i in (0, group.n_agents - 1)]
        common = [bool((a & b).any()) for a, b in zip(*reached)]
        one = sharing == "full" or (sharing == "group" and len(sizes) == 1)
        assert common[0] is common[1] is one
    # No two agents have one value, whoever shares what.
    rows = value[..., 0]
    if sharing in ("none", "group", "trunk", "agent_id"):
        assert all((rows[:, i] != rows[:, 0]).any() for i in range(1, group.n_agents))


# ------------------------------------------------------------------------------------ critics


def central(team, group, config=None, sees="team", **kwargs):
    seen = joined_of(team, same_actions=False) if sees == "team" else None
    centralized = "state" if sees == "state" else sees != "own"
    critic = make_critic(
        group, config or CriticConfig([H]), centralized=centralized, team=seen, **kwargs
    )
    return lively(critic), seen


def values_of(critic, seen, group, td):
    """Values of a group, from what a team sees."""
    data = td.clone()
    for known in (group, seen):
        if known is not None and known.name not in td.keys():
            data[known.name] = known.gather(td)[known.name]
    return critic(data)[group.key("state_value")]


def can_see(architecture, sees, alone, **others):
    """Whether there is a critic like that; over a set it sees agents, of one group or the team."""
    return architecture == "mlp" or sees == "team" or (sees == "observations" and alone)


@pairwise(
    can_see,
    architecture=["mlp", "set", "attention"],
    sees=["own", "observations", "team", "state"],
    alone=[True, False],
)
def test_who_sees_what(architecture, sees, alone):
    """Whose observation reaches whose value; ``alone``: the groups have critics of their own."""
    team = make_team("two")
    td = observed(team, 4, alive=2.0)
    groups = list(team.groups.values()) if alone else [joined_of(team)]
    names = [name for name, (n, _, _) in zip(team.groups, KINDS.values()) for _ in range(n)]
    agents = [i for n, _, _ in KINDS.values() for i in range(n)]
    heard = torch.zeros(5, 5).bool()  # whose value, whose observation
    by_state = torch.zeros(5).bool()
    row = 0
    for group in groups:
        critic, seen = central(team, group, CriticConfig([H], architecture=architecture), sees)
        for i in range(group.n_agents):
            given = td.clone()
            leaves = [given[name, "observation"].requires_grad_() for name in team.groups]
            leaves.append(given["state"].requires_grad_())
            value = values_of(critic, seen, group, given)[:, i].sum()
            gradients = torch.autograd.grad(value, leaves, allow_unused=True)
            for k, name in enumerate(team.groups):
                if gradients[k] is None:
                    continue
                for j in range(team.groups[name].n_agents):
                    column = next(c for c in range(5) if (names[c], agents[c]) == (name, j))
                    heard[row, column] = bool((gradients[k][:, j] != 0).any())
            by_state[row] = gradients[-1] is not None and bool((gradients[-1] != 0).any())
            row += 1
    same = torch.tensor([[a == b for b in names] for a in names])
    wanted = {
        "own": torch.eye(5).bool(),
        "observations": same,
        "team": torch.ones(5, 5).bool(),
        "state": torch.zeros(5, 5).bool(),
    }[sees]
    assert torch.equal(heard, wanted)
    assert torch.equal(by_state, torch.full((5,), sees == "state"))


@pairwise(
    architecture=["set", "attention"],
    value_per=["agent", "team"],
    alone=[True, False],
    norm=[True, False],
)
def test_order_within_a_kind_and_death(architecture, value_per, alone, norm):
    team = make_team("two")
    groups = list(team.groups.values()) if alone else [joined_of(team)]
    td = observed(team, 32)
    order = [2, 0, 1]
    permuted = td.clone()
    permuted["mice"] = td["mice"][:, order]
    for group in groups:
        value_norm = ValueNorm(membership=group.membership) if norm else None
        if value_norm is not None:
            value_norm.update(torch.randn(9, group.n_agents, 1) * 3 + 2)
        config = CriticConfig([H], architecture=architecture, value_per=value_per)
        critic, seen = central(team, group, config, value_norm=value_norm)
        value = values_of(critic, seen, group, td)
        assert value.shape == (32, group.n_agents, 1)
        assert value.isfinite().all()
        other = values_of(critic, seen, group, permuted)
        places = list(range(group.n_agents))
        if "mice" in [part.name for part in group.groups]:
            places[-3:] = [places[-3:][i] for i in order]
        mask = torch.cat([td[part.name, "mask"] for part in group.groups], -1)
        torch.testing.assert_close(value[:, places][mask[:, places]], other[mask[:, places]])
        # What the dead hold reaches nobody; nobody at all is fine, too.
        for poison in POISON:
            dead = td.clone()
            for name in team.groups:
                dead[name, "observation"][~td[name, "mask"]] = poison
            assert_same(value[mask], values_of(critic, seen, group, dead)[mask])
        for name in team.groups:
            dead[name, "mask"] = torch.zeros_like(dead[name, "mask"])
        nobody = values_of(critic, seen, group, dead)
        assert nobody.isfinite().all()
        assert (nobody == nobody[:1]).all()
        # Whoever dies changes what the living are worth.
        fewer = td.clone()
        fewer["cats", "mask"] = torch.zeros_like(td["cats", "mask"])
        after = values_of(critic, seen, group, fewer)
        somebody = td["cats", "mask"].any(-1)
        assert (after[somebody] != value[somebody]).any()


@pairwise(
    can_see,
    architecture=["mlp", "set", "attention"],
    sees=["observations", "team", "state"],
    sharing=["group", "full"],
    alone=[True, False],
)
def test_a_value_per_team(architecture, sees, sharing, alone):
    """Equal for all agents of a group, another one for the other group."""
    team = make_team("two")
    td = observed(team, 16, alive=2.0)
    config = CriticConfig([H], architecture=architecture, value_per="team", sharing=sharing)
    rows = []
    for i, group in enumerate(team.groups.values() if alone else [joined_of(team)]):
        critic, seen = central(team, group, config, sees)
        lively(critic, seed=i)
        value = values_of(critic, seen, group, td)[..., 0]
        assert value.shape == (16, group.n_agents)
        parts = torch.tensor(group.group_index)
        for part in range(len(group.groups)):
            own = value[:, parts == part]
            assert (own == own[:, :1]).all()
            rows.append(own[:, 0])
        outputs = 1 if alone or (sharing == "full" and sees == "observations") else 2
        if architecture == "mlp" and sees == "state":
            one = mlp_size(7, 1)
            wanted = {"group": len(group.groups) * one, "full": mlp_size(7, outputs)}[sharing]
            assert n_parameters(critic) == wanted
    assert (rows[0] != rows[1]).any()


@pytest.mark.parametrize("sharing", ["none", "trunk", "agent_id", "masks", "index", "clusters"])
def test_a_value_per_team_has_no_agents_to_share(sharing):
    team = make_team("two")
    config = config_with(sharing, 5, CriticConfig, value_per="team")
    with pytest.raises(ConfigError, match=f"value_per is 'team'.*sharing is '{sharing}'.*group"):
        make_critic(joined_of(team), config)


def test_a_local_critic_has_no_value_per_team():
    group = make_group()
    with pytest.raises(ConfigError, match="group 'car'.*value_per is 'team'"):
        make_critic(group, CriticConfig([H], value_per="team"), centralized=False)


def test_networks_over_a_set_see_one_group_or_the_team():
    """Without a team, joined groups would see each other."""
    team = make_team("two")
    config = CriticConfig([H], architecture="set")
    with pytest.raises(ValueError, match=r"cats\+mice.*team="):
        make_critic(joined_of(team), config)


@pytest.mark.parametrize("layout", ["one", "two"])
def test_values_of_an_mlp_by_hand(layout):
    """Own features of every agent of a group, side by side without padding, into its network."""
    team = make_team(layout)
    group = joined_of(team)
    critic, _ = central(team, group, sees="observations")
    td = observed(team, 6)
    value = values_of(critic, None, group, td)
    weights = list(critic.parameters())
    rows = []
    for part, own in enumerate(team.groups.values()):
        seen = torch.where(td[own.name, "mask"].unsqueeze(-1), td[own.name, "observation"], 0.0)
        features = torch.cat([seen[:, i, :o] for i, o in enumerate(own.observation_dims)], -1)
        w1, b1, w2, b2 = weights if layout == "one" else [w[part] for w in weights]
        hidden = torch.tanh(features @ w1[:, : features.shape[-1]].T + b1)
        rows.append((hidden @ w2.T + b2)[:, : own.n_agents])
    torch.testing.assert_close(value[..., 0], torch.cat(rows, -1))


@pytest.mark.parametrize("architecture", ["mlp", "set", "attention"])
def test_a_learner_of_some_groups_shows_theirs(architecture):
    """The agents of two groups, with another group between them in what the critic sees."""
    team = make_team("many")
    cats, herd, mice = team.groups.values()
    group = join((cats, mice))
    critic, seen = central(team, group, CriticConfig([H], architecture=architecture))
    assert seen.name == "cats+herd+mice"
    td = observed(team, 8, alive=2.0)
    value = values_of(critic, seen, group, td)
    assert value.shape == (8, 5, 1)
    for name, place in (("cats", slice(0, 2)), ("mice", slice(2, 5))):
        alone, _ = central(team, team.groups[name], CriticConfig([H], architecture=architecture))
        with torch.no_grad():
            for own, ours in zip(alone.parameters(), critic.parameters(), strict=True):
                part = ours if architecture != "mlp" else ours[int(name == "mice")]
                own.copy_(part[tuple(slice(size) for size in own.shape)])
        own = values_of(alone, seen, team.groups[name], td)
        torch.testing.assert_close(own, value[:, place])
    for name in team.groups:
        other = td.clone()
        other[name, "observation"] += 1.0
        assert (values_of(critic, seen, group, other) != value).any()


def test_agents_with_observations_of_their_own_keys():
    """Nobody has all leaves: networks are as wide as the agent that sees most."""
    action = Bounded(-1, 1, (2,))
    fast = Composite({"speed": Unbounded((2,)), "image": Unbounded((2, 2))})
    slow = Composite({"smell": Unbounded((3,)), "speed": Unbounded((2,))})
    kinds = [AgentSpec("cat", 1, fast, action), AgentSpec("snail", 2, slow, action)]
    (group,) = TeamSpec({"animals": kinds}).groups.values()
    assert group.observation_dim == 6
    assert group.observation_dims == (6, 5, 5)
    rows = [
        {key: torch.randn(4, *spec[key].shape) for key in spec.keys()}
        for spec in (fast, slow, slow)
    ]
    alive = torch.ones(4).bool()
    members = [TensorDict({"observation": row, "mask": alive}, [4]) for row in rows]
    lazy = TensorDict({"animals": LazyStackedTensorDict(*members, stack_dim=1)}, [4])
    dense = TensorDict({"animals": group.data(lazy)}, [4])
    poisoned = dense.clone()
    for key, padding in group.paddings.items():
        leaf = poisoned["animals"].get(key)
        leaf[~padding.mask().expand_as(leaf)] = float("nan")
    flat = [
        torch.cat([row[key[2]].flatten(1) for key in group.observation_keys if key[2] in row], -1)
        for row in rows
    ]
    for sharing in SHARINGS:
        actor = lively(make_actor(group, config_with(sharing, 3)))
        size = size_of(sharing, 6, 4, 3, 2)
        assert n_parameters(actor) == size
        with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
            outputs = [actor(given.clone()) for given in (dense, poisoned, lazy)]
        for i in range(3):
            one, two, three = (out["animals"][..., i]["action"] for out in outputs)
            assert_same(one, two)
            assert_same(one, three)
    critic = lively(make_critic(group, CriticConfig([H])))
    w1, b1, w2, b2 = critic.parameters()
    value = torch.tanh(torch.cat(flat, -1) @ w1.T + b1) @ w2.T + b2
    for given in (dense, poisoned):
        torch.testing.assert_close(critic(given)["animals", "state_value"][..., 0], value)


# ---------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("layout", ["one", "two"])
def test_data_that_do_not_fit_the_specs(layout):
    team = make_team(layout, "categorical", True)
    actor, _ = actor_of(team)
    name, n, o, a = ("herd", 5, 6, 4) if layout == "one" else ("mice", 3, 6, 4)
    td = observed(team, 8)
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
def test_agents_of_unequal_structure_where_one_was_promised(joined):
    team = make_team("two")
    td = observed(team, 4)
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
    td = observed(team, 4)
    with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
        one, other = actor(td.clone()), actor(td.clone())
    for name in team.groups:
        assert_same(one[name, "action"], other[name, "action"])


def test_parts_are_merged_only_where_all_of_them_are_there():
    groups = [make_group(n=2, name="cat", o=4), make_group(n=1, name="mouse", o=3)]
    joined = join(groups)
    whole = JoinedActor(make_actor(joined), joined)
    cat, mouse = whole.part("cat"), whole.part("mouse")
    at_random = RandomActor(make_group(n=1, name="dog", o=2))
    assert merge_parts([mouse, at_random, cat]) == [whole, at_random]
    assert merge_parts([cat, at_random]) == [cat, at_random]
    other = JoinedActor(make_actor(joined), joined).part("mouse")
    assert merge_parts([cat, other]) == [cat, other]
