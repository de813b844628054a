"""Stored players: each row of a batch runs with the parameters of its player."""

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_marl import TeamSpec
from torchrl_marl.envs.toy import Arena
from torchrl_marl.errors import SpecError
from torchrl_marl.modules import CommunicationConfig, NetworkConfig, make_actor
from torchrl_marl.modules.normalization import ObservationNorm
from torchrl_marl.modules.players import Players, dispatch


def group_of(**settings):
    env = Arena(2, **{"n_agents": 3, "seed": 0} | settings)
    return TeamSpec.from_env(env).groups["agents"]


def actors_of(group, n, **settings):
    config = NetworkConfig(num_cells=[8, 8], **settings)
    found = []
    for seed in range(n):
        torch.manual_seed(seed)
        actor = make_actor(group, config)
        for p in actor.parameters():  # so that actions differ much
            torch.nn.init.normal_(p)
        found.append(actor)
    return found


def step_of(group, *batch):
    torch.manual_seed(9)
    rows = {
        "observation": torch.randn(*batch, group.n_agents, group.observation_dim),
        "mask": torch.rand(*batch, group.n_agents) > 0.2,
    }
    if group.action_mask_key is not None:
        legal = torch.rand(*batch, group.n_agents, group.n_actions) > 0.3
        legal[..., 0] = True
        rows["action_mask"] = legal
    return TensorDict({group.name: TensorDict(rows, [*batch, group.n_agents])}, batch)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("rows", "members", "block"), [(37, 5, 4), (8, 8, 3), (20, 2, 32)])
def test_rows_are_gathered_by_member_and_scattered_back(rows, members, block, seed):
    torch.manual_seed(seed)
    who = torch.randint(members, (rows,)) ** 2 // members  # some members have no row
    blocks = dispatch(who, members, block)
    assert len(blocks.member) == rows // block + members
    x = torch.arange(rows) + 1
    gathered = blocks.gather(x)
    assert torch.equal(blocks.scatter(gathered), x)
    for own, member in zip(gathered, blocks.member):
        assert all(who[i - 1] == member for i in own.tolist() if i)


@pytest.mark.parametrize("sharing", ["group", "none"])
@pytest.mark.parametrize("world", [{}, {"action_mask": True}, {"continuous_actions": True}])
@pytest.mark.parametrize("batch", [(29,), (7, 5)])
def test_every_row_acts_as_its_player(sharing, world, batch):
    assert_rows_act_as_their_players(group_of(**world), batch, sharing=sharing)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_players_with_bicnet_communication(cell):
    bicnet = CommunicationConfig("bicnet", cell=cell, message_size=6)
    assert_rows_act_as_their_players(group_of(n_agents=4), (29,), communication=bicnet)


def assert_rows_act_as_their_players(group, batch, **settings):
    actors = actors_of(group, 4, **settings)
    players = Players(actors[0], 4, block=4)
    for i, actor in enumerate(actors):
        players.store(i, actor)
    td = step_of(group, *batch)
    who = torch.randint(4, batch)
    td["agents", "player"] = who.unsqueeze(-1).expand(*batch, group.n_agents)
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        acted = players(td.clone())
        for i, actor in enumerate(actors):
            own = actor(td.clone())
            for key in (("agents", "action"), ("agents", "action_log_prob")):
                torch.testing.assert_close(acted[key][who == i], own[key][who == i])
    assert list(players.parameters()) == []


def test_observation_statistics_are_stored_too():
    group = group_of()
    norm = ObservationNorm(group.observation_dim)
    actor = make_actor(group, NetworkConfig(num_cells=[8]), observation_norm=norm)
    players = Players(actor, 2)
    norm.update(5 + 3 * torch.randn(100, 3, group.observation_dim))
    players.store(1, actor)
    norm.update(-9 + torch.randn(1000, 3, group.observation_dim))
    td = step_of(group, 6)
    found = []
    for i in (0, 1):
        td["agents", "player"] = torch.full((6, 3), i)
        found.append(players(td.clone())["agents", "logits"])
    assert (found[0] - found[1]).abs().max() > 1e-4
    assert (found[1] - actor(td.clone())["agents", "logits"]).abs().max() > 1e-4


def test_stored_player_is_a_copy():
    group = group_of()
    [actor] = actors_of(group, 1)
    players = Players(actor, 2)
    td = step_of(group, 4)
    td["agents", "player"] = torch.zeros(4, 3, dtype=torch.int64)
    before = players(td.clone())["agents", "logits"]
    with torch.no_grad():
        for p in actor.parameters():
            p.fill_(7.0)
    assert torch.equal(players(td.clone())["agents", "logits"], before)


def test_other_networks_and_data_without_players_raise():
    group = group_of()
    players = Players(make_actor(group, NetworkConfig(num_cells=[8])), 2)
    with pytest.raises(SpecError, match="store players of the same networks"):
        players.store(0, make_actor(group, NetworkConfig(num_cells=[9])))
    with pytest.raises(SpecError, match="the data have no players"):
        players(step_of(group, 3))


def test_invalid_slots_raise():
    group = group_of()
    actor = actors_of(group, 1)[0]
    with pytest.raises(SpecError, match="n_slots is 0"):
        Players(actor, 0)
    players = Players(actor, 3)
    for slot in (3, 9, -1):
        with pytest.raises(SpecError, match=f"slot is {slot}, expected 0 to 2"):
            players.store(slot, actor)
