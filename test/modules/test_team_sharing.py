"""Parameter sharing within a team: actors, local critics and central critics."""

import pytest
import torch
from cover import pairwise
from meadow import make_team
from mixed_teams import (
    SHARINGS,
    config_with,
    joined_of,
    mlp_size,
    n_parameters,
    random_inputs,
    randomize_parameters,
    size_of,
)
from torchrl.data import Bounded, Unbounded

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.modules import make_actor, make_critic
from torchrl_marl.modules.config import CriticConfig


def group_of(layout):
    """A group of equal agents, a heterogeneous one, or several as one; and its kinds."""
    if layout == "single":
        team = TeamSpec([AgentSpec("car", 3, Unbounded((5,)), Bounded(-1, 1, (2,)))])
        return team, next(iter(team.groups.values())), 1
    team = make_team(layout)
    return team, joined_of(team), {"one": 2, "two": 2, "three": 3}[layout]


def data_of(team, group, *batch, alive=2.0):
    td = random_inputs(team, *batch, alive=alive)
    return td if group.name in team.groups else td.update(group.gather(td))


LAYOUTS = ("single", "one", "two", "three")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sharing", SHARINGS)
def test_sharing_of_actors(layout, sharing):
    team, group, n_kinds = group_of(layout)
    actor = randomize_parameters(make_actor(group, config_with(sharing, group.n_agents)))
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
    critic = randomize_parameters(make_critic(group, config, centralized=False))
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
    critic = randomize_parameters(make_critic(group, config, centralized=centralized, team=seen))
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
        td[seen.name] = seen.gather(random_inputs(team, 16, alive=2.0))[seen.name]
    value = critic(td)[group.key("state_value")]
    assert value.shape == (16, group.n_agents, 1)
    if sharing in ("none", "group", "full"):
        reached = [reach(critic, value[:, i]) for i in (0, group.n_agents - 1)]
        common = [bool((a & b).any()) for a, b in zip(*reached)]
        one = sharing == "full" or (sharing == "group" and len(sizes) == 1)
        assert common[0] is common[1] is one
    # Values of agents differ in every kind of sharing.
    rows = value[..., 0]
    if sharing in ("none", "group", "trunk", "agent_id"):
        assert all((rows[:, i] != rows[:, 0]).any() for i in range(1, group.n_agents))
