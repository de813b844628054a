"""States of each agent: critics that must be equal, and masked slots without effect."""

import learner_twins
import pytest
import torch
from learner_twins import EXACT, assert_masked_slots_change_no_bit, assert_same_learning
from meadow import make_meadow, make_team
from samples import POISON
from support.tiers import first_tier_cases, second_tier_cases
from torchrl.envs import TransformedEnv

from torchrl_marl import TeamSpec
from torchrl_marl.collectors.rollout import check_finite
from torchrl_marl.envs import AgentInitTracker
from torchrl_marl.errors import ConfigError, NonFiniteError
from torchrl_marl.learners import OnPolicyConfig, ValueConfig, build_learners
from torchrl_marl.learners.algorithms import ALGORITHMS
from torchrl_marl.modules import (
    CriticConfig,
    MemoryConfig,
    MixerConfig,
    NetworkConfig,
    QNetworkConfig,
    RecurrentCriticConfig,
    make_critic,
)
from torchrl_marl.modules.config import AnyMixerConfig

SMALL = {"actor": NetworkConfig([8], sharing="none"), "minibatch_size": 40}
STORED = {"learning_starts": 40, "updates_per_frame": 0.1}
OWN = {"critic": CriticConfig([8], sharing="none")}
SHARED = {"critic": CriticConfig([8])}
MEMORY = RecurrentCriticConfig([8], memory=MemoryConfig("gru", size=4))


def config_of(algorithm, **settings):
    schema = ALGORITHMS.schema(algorithm)
    stored = STORED if "learning_starts" in schema.__dataclass_fields__ else {}
    return schema(**{"algorithm": algorithm} | SMALL | stored | settings)


def world_of(config, n_envs, world):
    env = make_meadow(n_envs, **world)
    return TransformedEnv(env, AgentInitTracker()) if getattr(config, "remembers", False) else env


def trained(algorithm, world, execution="eager", **settings):
    """The learners and metrics of some batches of a meadow."""
    config = config_of(algorithm, **settings)

    def make(team):
        [learner] = build_learners(team, config, execution=execution)
        return learner

    learner, metrics = learner_twins.train_on_batches(make, world_of(config, 4, world), 3)
    return [learner], metrics


@pytest.mark.parametrize("layout", ["one", "two", *second_tier_cases("runs", "three")])
@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("ippo", SHARED),
        ("ippo", OWN | {"bootstrap": "agent"}),
        ("iddpg", SHARED),
        ("isac", OWN | {"bootstrap": "agent"}),
    ],
)
def test_state_equal_to_observation_matches_independent_critic(algorithm, settings, layout):
    """Also with agents that spawn late and die, and with groups of different sizes."""
    plain = trained(algorithm, {"layout": layout}, **settings)
    world = {"layout": layout, "states": "seen"}
    own = trained(algorithm, world, central_input="agent_state", **settings)
    assert_same_learning(plain, own, **EXACT)


def test_central_critic_of_agent_states_matches_independent_critic():
    world, settings = {"layout": "two", "states": "own"}, SHARED | {"central_input": "agent_state"}
    one, other = (trained(name, world, **settings) for name in ("ippo", "mappo"))
    assert_same_learning(one, other, **EXACT)


@pytest.mark.parametrize("layout", ["one", *second_tier_cases("runs", "two")])
@pytest.mark.parametrize(
    "algorithm", ["mappo", "maddpg", *second_tier_cases("runs", "happo", "matd3", "hasac")]
)
def test_agent_states_equal_to_team_state_match_team_state(algorithm, layout):
    """Holds for a critic per agent; a shared critic has an output for each agent."""
    world = {"layout": layout, "states": "team"}
    team = trained(algorithm, world, central_input="state", **OWN)
    own = trained(algorithm, world, central_input="agent_state", **OWN)
    weights = [
        [p for learner in learners for p in learner.parameters()] for learners, _ in (team, own)
    ]
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    for one, other in zip(team[1], own[1], strict=True):
        for key, value in one.items(True, True):
            torch.testing.assert_close(value, other[key], rtol=1e-4, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("layout", ["one", "two"])
@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("qmix", {"actor": QNetworkConfig([8]), "mixer": MixerConfig(4)}),
        ("maddpg", SHARED | {"mixer": AnyMixerConfig("monotonic", 4)}),
    ],
)
def test_mixer_of_states_equal_to_observations_matches_plain_mixer(algorithm, settings, layout):
    world = {"layout": layout, "actions": "categorical"}
    plain = trained(algorithm, world, **settings)
    own = trained(algorithm, world | {"states": "seen"}, central_input="agent_state", **settings)
    assert_same_learning(plain, own, **EXACT)


def test_value_of_an_agent_computed_by_hand():
    """A linear critic, 2 s + 1, of each agent's state s; states of masked agents are not read."""
    group = make_team("one", states="own").groups["herd"]
    critic = make_critic(group, CriticConfig([]), centralized="agent_state")
    assert critic.in_keys == [("herd", "state"), ("herd", "mask")]
    with torch.no_grad():
        for name, parameter in critic.named_parameters():
            parameter.fill_(2.0 if name.endswith("weight") else 1.0)
    state = torch.arange(25.0).reshape(1, 5, 5)
    state[0, 2:, 3:] = float("nan")  # padding, as the mice's states are of 3 numbers
    state[0, 4] = float("nan")
    mask = torch.tensor([[True, True, True, True, False]])
    found = critic(state, mask)
    # cats: 0 + 1 + .. + 4 = 10, 5 + .. + 9 = 35; mice: 10 + 11 + 12 = 33, 15 + 16 + 17 = 48
    assert found[0, :, 0].tolist() == [21.0, 71.0, 67.0, 97.0, 1.0]


STATELESS = {"states": "own", "team_state": False}


@pytest.mark.parametrize(
    ("world", "settings", "reads"),
    [
        ({"states": "own"}, {"central_input": "state"}, "state"),
        (STATELESS, {"central_input": "state"}, ("herd", "state")),
        ({"states": "own"}, {"central_input": "agent_state"}, ("herd", "state")),
        ({"states": "own"}, {}, ("herd", "observation")),
        ({"states": "own"}, {"algorithm": "ippo"}, ("herd", "observation")),
    ],
)
def test_critic_input_for_each_kind_of_state(world, settings, reads):
    """The team state where there is one; agent states where requested or the only ones."""
    team = TeamSpec.from_env(make_meadow(2, **world))
    [learner] = build_learners(team, OnPolicyConfig(**SMALL | settings))
    assert learner.critics["herd"].in_keys[0] == reads


def test_mixer_reads_agent_states_without_team_state():
    team = TeamSpec.from_env(make_meadow(2, actions="categorical", **STATELESS))
    config = ValueConfig(central_input="state", actor=QNetworkConfig([8]))
    [learner] = build_learners(team, config)
    assert ("herd", "state") in learner.losses["herd"].in_keys


CASES = {
    "mappo": ("mappo", {"layout": "three"}, SHARED),
    "ippo, centered": ("ippo", {"layout": "two"}, OWN | {"value_centering": True}),
    "masac": (
        "masac",
        {"layout": "two", "actions": "categorical"},
        SHARED | {"bootstrap": "agent"},
    ),
    "matd3": ("matd3", {"layout": "one", "actions": "wide"}, SHARED | {"n_step": 3}),
    "iddpg": ("iddpg", {"layout": "two"}, OWN),
    "hasac": ("hasac", {"layout": "one"}, SHARED),
    "qmix": ("qmix", {"layout": "two", "actions": "categorical"}, {"actor": QNetworkConfig([8])}),
    "memory": ("mappo", {"layout": "one"}, {"critic": MEMORY, "minibatch_size": 40, "window": 5}),
}


@pytest.mark.parametrize("case", first_tier_cases({"mappo", "matd3", "iddpg"}, CASES, "runs"))
def test_traced_updates_match_eager_updates(case):
    algorithm, world, settings = CASES[case]
    settings = {**settings, "central_input": "agent_state"}
    world = {"states": "own", **world}
    eager, traced = (trained(algorithm, world, how, **settings) for how in ("eager", "trace"))
    assert_same_learning(eager, traced, **EXACT)


@pytest.mark.parametrize("value", POISON)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_values_in_masked_slots_have_no_effect(case, value):
    """States, next states, actions and rewards of masked slots are not read."""
    algorithm, world, settings = case
    config = config_of(algorithm, central_input="agent_state", **settings)
    env, learners = world_of(config, 8, {"states": "own", **world}), []
    for _ in range(2):
        torch.manual_seed(0)
        learners += build_learners(TeamSpec.from_env(env), config)
    one, other = learners
    assert_masked_slots_change_no_bit(one, other, env, value)


def test_error_names_non_finite_state():
    env = make_meadow(4, states="own", max_steps=6)
    team, batch = TeamSpec.from_env(env), env.rollout(6, break_when_any_done=False)
    mask = batch["herd", "mask"]
    assert not bool(mask.all())
    batch["herd", "state"][~mask] = float("nan")
    batch["herd", "state"][..., 2:, 3:] = float("inf")  # the padding of the mice
    check_finite(team, batch)
    place = mask[..., 0].nonzero()[0].tolist()
    batch["herd", "state"][(*place, 0, 4)] = float("nan")
    with pytest.raises(NonFiniteError, match="'herd'.*state.*env 0"):
        check_finite(team, batch)


REFUSED = {
    "no states": ({}, {"central_input": "agent_state"}, r"gives no state of each agent, .*'state'"),
    "none in one of two": (
        {"layout": "two"},
        {"central_input": "agent_state", "algorithm": "ippo"},
        "group 'cats': .*AgentSpec\\(state_spec=...\\)",
    ),
    "a team's value": (
        STATELESS,
        {"central_input": "state", "critic": CriticConfig([8], value_per="team")},
        "group 'herd': critic: .*sees each agent's own state; use value_per=agent",
    ),
}


@pytest.mark.parametrize(("world", "settings", "message"), REFUSED.values(), ids=REFUSED)
def test_missing_states_raise(world, settings, message):
    team = TeamSpec.from_env(make_meadow(2, **world))
    with pytest.raises(ConfigError, match=message):
        build_learners(team, OnPolicyConfig(**SMALL | settings))


@pytest.mark.parametrize(
    ("critic", "message"),
    [
        ({"value_per": "team"}, "a critic sees one agent; use learner.critic.value_per=agent"),
        ({"architecture": "set"}, "use .*learner.central_input=observations"),
    ],
)
def test_settings_that_need_all_agents_raise(critic, message):
    config = OnPolicyConfig(central_input="agent_state", critic=CriticConfig([8], **critic))
    with pytest.raises(ConfigError, match=message):
        config.check("learner.")
