"""Exported agents act as the policy of their team, also with deaths and births."""

import pytest
import torch
from exported import check_players_alone, team_policy
from shared_networks import SETTINGS, config_of
from tensordict import TensorDict
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.apps.export.agent import agents_of, find_agents
from torchrl_marl.apps.export.check import InMemory
from torchrl_marl.envs.toy import Arena
from torchrl_marl.errors import ConfigError
from torchrl_marl.modules import (
    MemoryConfig,
    NetworkConfig,
    RecurrentNetworkConfig,
    make_actor,
    make_deterministic_actor,
    make_q_actor,
)
from torchrl_marl.modules.bodies import Feedforward

WORLDS = {
    "discrete": {},
    "one-hot, masked": {"categorical_actions": False, "action_mask": True},
    "kinds, masked": {"kinds": 2, "action_mask": True, "n_actions": 6},
    "continuous": {"continuous_actions": True},
    "groups of kinds": {"kinds": 2, "n_groups": 2},
}
MEMORIES = ("gru", "lstm", "mingru", "lru")


def arena(**settings):
    """Several episodes in which agents are born late and die early."""
    sizes = {"n_agents": 4, "late_spawn": 1, "years": 2, "lives": 3, "max_steps": 12, "seed": 0}
    return Arena(2, **sizes, **settings)


def dueling(group, config, **settings):
    return make_q_actor(group, config, dueling=True, **settings)


class TestActors:
    @pytest.mark.parametrize("environment", WORLDS)
    @pytest.mark.parametrize("make", [make_actor, make_deterministic_actor])
    def test_policy_actors(self, make, environment):
        joined = "groups" in environment
        found = check_players_alone(
            arena(**WORLDS[environment]),
            make,
            config=NetworkConfig([8]),
            joined=joined,
            normed=True,
        )
        assert found.actions > 24
        assert found.differ == 0
        assert found.largest < 1e-5

    @pytest.mark.parametrize("environment", [name for name in WORLDS if name != "continuous"])
    @pytest.mark.parametrize("make", [make_q_actor, dueling])
    def test_q_actors(self, make, environment):
        joined = "groups" in environment
        found = check_players_alone(
            arena(**WORLDS[environment]), make, config=NetworkConfig([8]), joined=joined
        )
        assert (found.differ, found.largest < 1e-5) == (0, True)

    def test_unbounded_actions(self):
        team = TeamSpec([AgentSpec("car", 2, Unbounded((3,)), Unbounded((2,)))])
        assert_alone(team, make_actor)
        assert_alone(team, make_deterministic_actor)

    def test_bounds_of_each_action(self):
        bounds = Bounded(torch.tensor([-2.0, 0.0]), torch.tensor([1.0, 5.0]))
        assert_alone(TeamSpec([AgentSpec("car", 2, Unbounded((3,)), bounds)]), make_actor)


class TestObservations:
    def test_kinds_with_different_observation_leaves(self):
        sees = Composite(place=Unbounded((2,)), camera=Unbounded((2, 2, 3)))
        less = Composite(place=Unbounded((3,)), camera=Unbounded((1, 2, 3)))
        kinds = [AgentSpec("a", 2, sees, Categorical(3)), AgentSpec("b", 1, less, Categorical(2))]
        assert_alone(TeamSpec({"both": kinds}), make_actor, normed=True)

    def test_uint8_images(self):
        picture = Bounded(0, 255, (5, 4, 3), dtype=torch.uint8)
        team = TeamSpec([AgentSpec("a", 2, picture, Categorical(3))])
        assert_alone(team, make_actor, config=NetworkConfig([8], body="cnn"))
        assert_alone(team, make_actor, config=NetworkConfig([8], body="cnn", sharing="none"))

    @pytest.mark.parametrize("normed", [False, True])
    @pytest.mark.parametrize("dtype", [torch.float64, torch.int16])
    def test_observations_of_another_dtype(self, dtype, normed):
        sees = Bounded(-9, 9, (3,), dtype=dtype)
        team = TeamSpec([AgentSpec("a", 2, sees, Bounded(-1, 1, (2,)))])
        assert_alone(team, make_actor, normed=normed)

    @pytest.mark.parametrize("sharing", ["full", "none"])
    def test_residual_blocks(self, sharing):
        team = TeamSpec([AgentSpec("a", 2, Unbounded((3,)), Categorical(3))])
        assert_alone(team, make_actor, config=NetworkConfig([8], body="simba", sharing=sharing))


@pytest.mark.clients
class TestSharing:
    @pytest.mark.parametrize("kinds", [1, 2])
    @pytest.mark.parametrize("way", SETTINGS)
    def test_every_kind_of_sharing(self, way, kinds):
        joined = kinds == 2
        env = arena(kinds=kinds, n_groups=kinds)
        found = check_players_alone(
            env, make_actor, config=config_of(way), joined=joined, normed=joined
        )
        assert (found.differ, found.largest < 1e-5) == (0, True)

    def test_parameters_of_other_agents_are_not_exported(self):
        env = arena()
        groups = TeamSpec.from_env(env).groups.values()
        policy = team_policy(groups, make_actor, config=NetworkConfig([8], sharing="none"))
        total = sum(p.numel() for p in policy.parameters())
        [one, *_] = agents_of(policy).values()
        [program] = one.programs()
        assert sum(p.numel() for p in program.module.parameters()) == total // 4

    def test_custom_layer_over_all_agents(self):
        class Twice(torch.nn.Module):
            def forward(self, x):
                return 2 * x * torch.arange(1.0, 5.0).unsqueeze(-1)

        env = arena()
        [group] = TeamSpec.from_env(env).groups.values()
        actor = make_actor(group, NetworkConfig([8]))
        agent = agents_of(actor)["agent_2"]
        agent.network.network = Feedforward(Twice(), *agent.network.network)
        assert_equal_to(actor, group, agent, random_data(group))


@pytest.mark.clients
class TestMemory:
    @pytest.mark.parametrize("kind", MEMORIES)
    def test_every_kind_of_memory(self, kind):
        memory = MemoryConfig(kind, size=6, layers=2)
        config = RecurrentNetworkConfig([8], memory=memory, layer_norm=kind == "lru")
        found = check_players_alone(arena(action_mask=True), make_actor, config=config, normed=True)
        assert (found.differ, found.largest < 1e-5) == (0, True)

    @pytest.mark.parametrize("way", ["none", "trunk", "agent_id", "index", "group"])
    @pytest.mark.parametrize("kind", ["gru", "lru"])
    def test_memory_with_every_kind_of_sharing(self, kind, way):
        index = [1, 0, 1, 1] if way == "index" else None
        memory = MemoryConfig(kind, size=6)
        config = RecurrentNetworkConfig([8], memory=memory, sharing=way, sharing_index=index)
        env = arena(kinds=2, n_groups=2)
        found = check_players_alone(env, make_actor, config=config, joined=True)
        assert (found.differ, found.largest < 1e-5) == (0, True)

    def test_reset_clears_the_memory(self):
        """Without a reset the player differs from its team."""
        env = arena()
        config = RecurrentNetworkConfig([8], memory=MemoryConfig("gru", size=6))
        group = TeamSpec.from_env(env).groups["agents"]
        agent = agents_of(team_policy([group], make_actor, config=config))["agent_0"]
        player, seen = InMemory(agent), torch.ones(6).numpy()
        first = (player.act(seen), player.parameters["logits"])[1]
        assert abs((player.act(seen), player.parameters["logits"])[1] - first).max() > 1e-3
        player.reset()
        assert abs((player.act(seen), player.parameters["logits"])[1] - first).max() == 0


class TestRefusals:
    def test_unknown_agent_raises(self):
        team = TeamSpec([AgentSpec("car", 2, Unbounded((3,)), Categorical(2))])
        actor = make_actor(team.groups["car"])
        with pytest.raises(ConfigError, match="agent is 'cra_1'; did you mean 'car_1'"):
            find_agents(actor, "cra_1")
        with pytest.raises(ConfigError, match="no agent of this team has a network"):
            find_agents(torch.nn.Linear(1, 1))

    def test_body_over_all_agents_is_refused(self):
        class Hears(torch.nn.Module):
            def forward(self, features, mask, context):
                return features.mean(-2, keepdim=True).expand_as(features), None

        team = TeamSpec([AgentSpec("car", 2, Unbounded((3,)), Categorical(2))])
        actor = make_actor(team.groups["car"])
        agent = agents_of(actor)["car_0"]
        agent.network.network = Hears()
        with pytest.raises(ConfigError, match="a Hears, one network over all agents"):
            agent.programs()


def random_data(group, seed=0):
    """Random observations of a group, with all agents alive."""
    torch.manual_seed(seed)
    data = TensorDict({group.name: TensorDict({}, [5, group.n_agents])}, [5])
    for key in group.observation_keys:
        data[key] = group.padded_spec[key[1:]].expand(5, *group.padded_spec[key[1:]].shape).rand()
    if group.mask_key is not None:
        data[group.mask_key] = torch.ones(5, group.n_agents, dtype=torch.bool)
    return data


def assert_equal_to(actor, group, agent, data):
    player = InMemory(agent)
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        acted = actor(data.clone())
    for row in acted[group.name][:, agent.number]:
        seen = {}
        for field in agent.observation():
            own = tuple(slice(0, size) for size in field.shape)
            seen[field.name] = row[tuple(field.name.split("."))][own].numpy()
        action = torch.as_tensor(player.act(seen))
        torch.testing.assert_close(action, row["action"], rtol=1e-5, atol=1e-5)


def assert_alone(team, make, *, config=None, **settings):
    """Asserts that the programs of all agents equal the actor on random observations."""
    config = NetworkConfig([8]) if config is None else config
    [group] = team.groups.values()
    policy = team_policy([group], make, config=config, **settings)
    for agent in agents_of(policy).values():
        assert_equal_to(policy, group, agent, random_data(group))
