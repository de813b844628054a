"""Critics of heterogeneous groups and of several groups: what values depend on."""

import pytest
import torch
from cover import pairwise
from meadow import KINDS, make_team
from mixed_teams import (
    SHARINGS,
    H,
    config_with,
    joined_of,
    mlp_size,
    n_parameters,
    random_inputs,
    randomize_parameters,
    size_of,
)
from samples import POISON, assert_same, make_group
from tensordict import LazyStackedTensorDict, TensorDict
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import set_recurrent_mode

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.errors import ConfigError
from torchrl_marl.modules import (
    MemoryConfig,
    RecurrentCriticConfig,
    ValueNorm,
    make_actor,
    make_critic,
)
from torchrl_marl.modules.config import CriticConfig
from torchrl_marl.specs.joining import join


def central(team, group, config=None, sees="team", **kwargs):
    seen = joined_of(team, same_actions=False) if sees == "team" else None
    centralized = "state" if sees == "state" else sees != "own"
    critic = make_critic(
        group, config or CriticConfig([H]), centralized=centralized, team=seen, **kwargs
    )
    return randomize_parameters(critic), seen


def values_of(critic, seen, group, td):
    """Values of a group from data of the team."""
    data = td.clone()
    for known in (group, seen):
        if known is not None and known.name not in td.keys():
            data[known.name] = known.gather(td)[known.name]
    return critic(data)[group.key("state_value")]


def can_see(architecture, sees, alone, **others):
    """Whether the settings are valid; critics over sets read agents of one group or the team."""
    return architecture == "mlp" or sees == "team" or (sees == "observations" and alone)


@pairwise(
    can_see,
    architecture=["mlp", "set", "attention"],
    sees=["own", "observations", "team", "state"],
    alone=[True, False],
)
def test_observations_that_values_depend_on(architecture, sees, alone):
    """Checked by gradients; with ``alone`` the groups have separate critics."""
    team = make_team("two")
    td = random_inputs(team, 4, alive=2.0)
    groups = list(team.groups.values()) if alone else [joined_of(team)]
    names = [name for name, (n, _, _) in zip(team.groups, KINDS.values()) for _ in range(n)]
    agents = [i for n, _, _ in KINDS.values() for i in range(n)]
    heard = torch.zeros(5, 5).bool()  # by agent of the value and of the observation
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
def test_order_within_a_kind_and_dead_agents(architecture, value_per, alone, norm):
    team = make_team("two")
    groups = list(team.groups.values()) if alone else [joined_of(team)]
    td = random_inputs(team, 32)
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
        # Values of dead agents have no effect; groups without living agents are finite.
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
        # Deaths change the values of living agents.
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
def test_value_per_team(architecture, sees, sharing, alone):
    """Equal for all agents of a group, different between groups."""
    team = make_team("two")
    td = random_inputs(team, 16, alive=2.0)
    config = CriticConfig([H], architecture=architecture, value_per="team", sharing=sharing)
    rows = []
    for i, group in enumerate(team.groups.values() if alone else [joined_of(team)]):
        critic, seen = central(team, group, config, sees)
        randomize_parameters(critic, seed=i)
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


@pytest.mark.parametrize(("sharing", "alone"), [("group", True), ("group", False), ("full", False)])
def test_memory_per_team_matches_a_cell_of_torch(sharing, alone):
    """Each group has its own state, which is reset where all its agents begin an episode."""
    team, memory = make_team("two"), MemoryConfig("gru", size=5)
    config = RecurrentCriticConfig([H], value_per="team", sharing=sharing, memory=memory)
    for group in team.groups.values() if alone else [joined_of(team)]:
        critic = randomize_parameters(make_critic(group, config, centralized="state"))
        td = TensorDict({"state": torch.randn(4, 6, 7)}, [4, 6])
        init = torch.rand(4, 6, group.n_agents, 1) < 0.5  # of single agents
        init[:, 3] = True
        td[group.key("is_init")] = init
        numbers = torch.tensor(group.group_index)
        before = numbers[:, None].float().add(1).div(4).expand(4, 6, -1, 5)  # of each group
        td[group.key("critic_hidden")] = before
        with set_recurrent_mode(True):
            found = critic(td)
        network = critic.module.network.network
        features, _ = network.encoder(td["state"])
        for k in range(len(group.groups)):
            own = numbers == k
            begins = init[:, :, own].all(2)
            state = torch.full((4, 5), (k + 1) / 4)
            states = states_of_cell(network.memory, k, features[:, :, k], state, begins)
            states = states.unsqueeze(2).expand(-1, -1, int(own.sum()), -1)
            after = found["next", *group.key("critic_hidden")][:, :, own]
            torch.testing.assert_close(after, states, rtol=1e-5, atol=1e-6)
            value = found[group.key("state_value")][:, :, own]
            assert (value == value[:, :, :1]).all()


def states_of_cell(memory, k, features, state, begins):
    """States of torch's cell with the parameters of a GRU's network k, ``[B, T, S]``."""
    k = min(k, len(memory.ih.weight) - 1)  # one network for all groups
    cell, states = torch.nn.GRUCell(features.shape[-1], memory.size), []
    maps = {"ih": memory.ih, "hh": memory.hh}
    weights = {f"weight_{name}": own.weight[k] for name, own in maps.items()}
    cell.load_state_dict(weights | {f"bias_{name}": own.bias[k] for name, own in maps.items()})
    for t in range(features.shape[1]):
        state = cell(features[:, t], torch.where(begins[:, t], 0.0, state))
        states.append(state)
    return torch.stack(states, 1)


@pytest.mark.parametrize("sharing", ["none", "trunk", "agent_id", "masks", "index", "clusters"])
def test_value_per_team_with_per_agent_sharing_raises(sharing):
    team = make_team("two")
    config = config_with(sharing, 5, CriticConfig, value_per="team")
    with pytest.raises(ConfigError, match=f"value_per is 'team'.*sharing is '{sharing}'.*group"):
        make_critic(joined_of(team), config)


def test_value_per_team_of_local_critic_raises():
    group = make_group()
    with pytest.raises(ConfigError, match="group 'car'.*value_per is 'team'"):
        make_critic(group, CriticConfig([H], value_per="team"), centralized=False)


def test_set_critic_of_joined_groups_without_team_raises():
    """Without a team, joined groups would see each other."""
    team = make_team("two")
    config = CriticConfig([H], architecture="set")
    with pytest.raises(ValueError, match=r"cats\+mice.*team="):
        make_critic(joined_of(team), config)


@pytest.mark.parametrize("layout", ["one", "two"])
def test_values_of_an_mlp_by_hand(layout):
    """A group's network reads the unpadded features of its agents side by side."""
    team = make_team(layout)
    group = joined_of(team)
    critic, _ = central(team, group, sees="observations")
    td = random_inputs(team, 6)
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
def test_critic_of_some_groups_returns_their_values(architecture):
    """A learner of two groups; its critic also reads a third group between them."""
    team = make_team("many")
    cats, herd, mice = team.groups.values()
    group = join((cats, mice))
    critic, seen = central(team, group, CriticConfig([H], architecture=architecture))
    assert seen.name == "cats+herd+mice"
    td = random_inputs(team, 8, alive=2.0)
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


def test_agents_with_different_observation_keys():
    """No agent has all leaves; networks are as wide as the largest observation."""
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
        actor = randomize_parameters(make_actor(group, config_with(sharing, 3)))
        size = size_of(sharing, 6, 4, 3, 2)
        assert n_parameters(actor) == size
        with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
            outputs = [actor(given.clone()) for given in (dense, poisoned, lazy)]
        for i in range(3):
            one, two, three = (out["animals"][..., i]["action"] for out in outputs)
            assert_same(one, two)
            assert_same(one, three)
    critic = randomize_parameters(make_critic(group, CriticConfig([H])))
    w1, b1, w2, b2 = critic.parameters()
    value = torch.tanh(torch.cat(flat, -1) @ w1.T + b1) @ w2.T + b2
    for given in (dense, poisoned):
        torch.testing.assert_close(critic(given)["animals", "state_value"][..., 0], value)
