"""Members of a population: each learns as in a run of one member, without mutual effects."""

import copy
import dataclasses

import pytest
import torch
from meadow import make_meadow
from support.pictured import PicturedArena
from support.tiers import second_tier_cases

from torchrl_marl import TeamSpec
from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.envs import with_memory
from torchrl_marl.envs.remember import hidden_sizes
from torchrl_marl.envs.toy import Arena
from torchrl_marl.errors import ConfigError, NonFiniteError
from torchrl_marl.learners import OnPolicyConfig
from torchrl_marl.learners.algorithms import ALGORITHMS
from torchrl_marl.learners.capabilities import varying_of
from torchrl_marl.learners.members import learner_of_members
from torchrl_marl.learners.off_policy_config import ParallelQConfig
from torchrl_marl.learners.rows import make_member_view
from torchrl_marl.modules import (
    CommunicationConfig,
    CriticConfig,
    MemoryConfig,
    NetworkConfig,
    RecurrentCriticConfig,
    RecurrentNetworkConfig,
    TeamNetworkConfig,
)

MEMBERS, ENVS, STEPS = 3, 4, 10
DIFFERENT = {
    "lr": [1e-3, 2e-3, 5e-4],
    "entropy_coeff": [0.01, 0.03, 0.02],
    "critic_coeff": [1.0, 0.5, 2.0],
    "clip_epsilon": [0.1, 0.2, 0.3],
    "gamma": [0.9, 0.99, 0.95],
    "lmbda": [0.9, 0.5, 1.0],
    "max_grad_norm": [0.1, 0.5, 10.0],
}
NETWORK = {"num_cells": [8]}
CONFIG = OnPolicyConfig(
    actor=NetworkConfig(**NETWORK),
    critic=CriticConfig(**NETWORK),
    minibatch_size=20,
    num_epochs=2,
    normalize_observations=True,
)
MEMORY = OnPolicyConfig(
    actor=RecurrentNetworkConfig(**NETWORK, memory=MemoryConfig("gru", size=6)),
    critic=RecurrentCriticConfig(**NETWORK, memory=MemoryConfig("lstm", size=4)),
    minibatch_size=20,
    num_epochs=2,
    window=5,
)


def world(**settings):
    defaults = {"n_agents": 2, "years": 2, "lives": 2, "seed": 0}
    return Arena(MEMBERS * ENVS, **defaults | settings)


def population(env, config=CONFIG, settings=None, execution="eager"):
    torch.manual_seed(0)
    own = {name: torch.tensor(values) for name, values in (settings or {}).items()}
    many = learner_of_members(
        TeamSpec.from_env(env).groups,
        config,
        n_members=MEMBERS,
        settings=own,
        execution=execution,
    )
    policy = TeamPolicy(many.actors.values())
    env = with_memory(env, hidden_sizes(policy)) if config.remembers else env
    return many, RolloutCollector(env, policy, frames_per_batch=MEMBERS * ENVS * STEPS)


def alone(env, config, settings, member):
    own = {name: values[member] for name, values in settings.items()}
    make = ALGORITHMS.learner(config.algorithm)
    return make(TeamSpec.from_env(env).groups, dataclasses.replace(config, **own))


def numbers_of(learner):
    state = learner.state_dict(keep_vars=True)
    tensors = [x for x in state.values() if isinstance(x, torch.Tensor)]
    moments = [x for own in learner.optimizer.state.values() for x in own.values()]
    return [x.detach().clone() for x in (*tensors, *moments)]


def assert_as_alone(env, config, settings, execution="eager", batches=3):
    many, collector = population(env, config, settings, execution)
    ones = [alone(env, config, settings, i) for i in range(MEMBERS)]
    for i, one in enumerate(ones):
        make_member_view(many, one).write(i)
    for n in range(batches):
        batch = collector.rollout()
        torch.manual_seed(n)
        metrics = many.learn(batch.clone())
        for i, one in enumerate(ones):
            torch.manual_seed(n)
            for key, value in one.learn(batch[i * ENVS : (i + 1) * ENVS].clone()).items(True, True):
                torch.testing.assert_close(metrics[key][i], value, rtol=1e-3, atol=2e-5)
        collector.finish(batch)
    for i, one in enumerate(ones):
        taken = make_member_view(many, alone(env, config, settings, i)).read(i)
        for x, y in zip(numbers_of(taken), numbers_of(one), strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-6)
    return many


@pytest.mark.parametrize("algorithm", ["mappo", "ippo"])
@pytest.mark.parametrize("execution", ["eager", "trace"])
def test_members_match_single_learners(algorithm, execution):
    config = dataclasses.replace(CONFIG, algorithm=algorithm)
    assert set(DIFFERENT) == set(varying_of(config))
    assert_as_alone(world(), config, DIFFERENT, execution)


def test_members_with_agent_states_match_single_learners():
    env = make_meadow(MEMBERS * ENVS, "two", "categorical", states="own")
    config = dataclasses.replace(CONFIG, central_input="agent_state")
    assert_as_alone(env, config, DIFFERENT, batches=2)


@pytest.mark.parametrize("execution", ["eager", "trace"])
@pytest.mark.parametrize(
    ("env", "critic"),
    [
        ({}, {"value_per": "team"}),
        ({}, {"sharing": "none"}),
        ({"n_groups": 2, "n_agents": 4}, {}),
        ({"n_groups": 2, "n_agents": 4}, {"sharing": "none", "body": "simba"}),
    ],
    ids=["team", "apart", "groups", "groups apart"],
)
def test_members_with_state_critics_match_single_learners(env, critic, execution):
    config = dataclasses.replace(
        CONFIG, central_input="state", critic=CriticConfig(**NETWORK, **critic)
    )
    assert_as_alone(world(**env), config, DIFFERENT, execution, batches=2)


def test_members_with_recurrent_state_critics_match_single_learners():
    config = dataclasses.replace(MEMORY, central_input="state")
    assert_as_alone(world(), config, {"lr": DIFFERENT["lr"]}, batches=2)


def test_members_with_image_states_match_single_learners():
    critic = CriticConfig(**NETWORK, body="cnn", channels="last")
    config = dataclasses.replace(CONFIG, central_input="state", critic=critic)
    env = PicturedArena(MEMBERS * ENVS, n_agents=2, years=2, lives=2, seed=0)
    # small rates, as convolutions of several members round differently
    assert_as_alone(env, config, {"lr": [1e-4, 2e-4, 5e-5]}, batches=2)


@pytest.mark.parametrize("ids", ["onehot", "embedding"])
@pytest.mark.parametrize("memory", [False, True], ids=["", "memory"])
def test_members_with_agent_ids_match_single_learners(ids, memory):
    own = {"sharing": "agent_id", "agent_id": ids, "agent_id_size": 3}
    config = MEMORY if memory else CONFIG
    config = dataclasses.replace(
        config,
        actor=dataclasses.replace(config.actor, **own),
        critic=dataclasses.replace(config.critic, **own),
        central_input="state",
    )
    assert_as_alone(world(), config, {"lr": DIFFERENT["lr"]}, batches=2)
    with pytest.raises(ConfigError, match="one network, but a population needs a network for each"):
        population(world(n_groups=2, n_agents=4), config)


@pytest.mark.parametrize("actions", ["multi_discrete", "hybrid"])
def test_members_with_composite_actions_match_single_learners(actions):
    env = make_meadow(MEMBERS * ENVS, "two", actions)
    assert_as_alone(env, CONFIG, DIFFERENT, batches=2)


@pytest.mark.parametrize("sharing", ["group", "none", "agent_id"])
def test_members_with_scale_parameters_match_single_learners(sharing):
    actor = TeamNetworkConfig(**NETWORK, sharing=sharing, state_independent_scale=True)
    config = dataclasses.replace(CONFIG, actor=actor)
    layout = "one" if sharing == "agent_id" else "two"
    env = make_meadow(MEMBERS * ENVS, layout, "unbounded")
    assert_as_alone(env, config, DIFFERENT, batches=2)


@pytest.mark.parametrize(
    ("env", "config"),
    [
        ({"n_groups": 2, "n_agents": 4}, {}),
        ({"n_groups": 2, "n_agents": 4}, {"central_input": "team"}),
        ({"kinds": 2, "n_actions": 6, "action_mask": True}, {}),
        ({}, {"actor": NetworkConfig(**NETWORK, sharing="none"), "bootstrap": "agent"}),
        ({}, {"lr_schedule": "linear", "clip_value": True, "normalize_advantage": "agent"}),
        ({"n_groups": 2, "n_agents": 4}, {"value_centering": True}),
        (
            {},
            {"actor": NetworkConfig([8], body="simba"), "critic": CriticConfig([8], body="simba")},
        ),
    ],
    ids=["groups", "across", "kinds", "apart", "schedules", "centered", "simba"],
)
def test_members_with_other_settings_match_single_learners(env, config):
    assert_as_alone(world(**env), dataclasses.replace(CONFIG, **config), DIFFERENT, batches=2)


PQN = ParallelQConfig(actor=RecurrentNetworkConfig(**NETWORK), minibatch_size=20, num_epochs=2)


@pytest.mark.parametrize("execution", ["eager", "trace"])
@pytest.mark.parametrize("mixer", [*second_tier_cases("runs", "none", "sum"), "monotonic"])
@pytest.mark.parametrize("env", [{}, {"n_groups": 2, "n_agents": 4}], ids=["one", "groups"])
def test_members_of_pqn_match_single_learners(env, mixer, execution):
    config = dataclasses.replace(PQN, mixer=dataclasses.replace(PQN.mixer, kind=mixer))
    settings = {name: DIFFERENT[name] for name in varying_of(config)}
    assert set(settings) == {"lr", "gamma", "lmbda", "max_grad_norm"}
    assert_as_alone(world(continuous_actions=False, **env), config, settings, execution)


def test_members_of_recurrent_pqn_match_single_learners():
    memory = dataclasses.replace(PQN.actor, memory=MemoryConfig("gru", size=6))
    config = dataclasses.replace(PQN, actor=memory, window=5)
    assert_as_alone(world(continuous_actions=False), config, {"lr": DIFFERENT["lr"]}, batches=2)


@pytest.mark.parametrize("value_per", ["agent", "team"])
def test_members_with_memory_match_single_learners(value_per):
    critic = dataclasses.replace(MEMORY.critic, value_per=value_per)
    config = dataclasses.replace(MEMORY, critic=critic)
    assert_as_alone(world(), config, {"lr": DIFFERENT["lr"]}, batches=2)


def test_target_kl_stops_members_separately():
    config = dataclasses.replace(CONFIG, target_kl=1e-4, lr=1e-2, num_epochs=3)
    many, collector = population(world(), config, {"lr": [1e-2, 0.0, 1e-2]})
    epochs = many.learn(collector.rollout())["agents", "epochs"]
    assert epochs[1] == 3 and epochs[0] < 3 and epochs[2] < 3


@pytest.mark.parametrize("execution", ["eager", "trace"])
@pytest.mark.parametrize("where", ["reward", "observation", "state", "parameter"])
def test_diverged_member_is_frozen_without_effect_on_others(where, execution):
    found = {}
    seen = "state" if where == "state" else "observations"
    config = dataclasses.replace(CONFIG, central_input=seen)
    for diverged in (False, True):
        many, collector = population(world(), config, {"lr": DIFFERENT["lr"]}, execution)
        batch = collector.rollout()
        torch.manual_seed(1)
        many.learn(batch.clone())
        before = networks_of(many, 1)
        if diverged and where == "parameter":
            with torch.no_grad():
                for p, owner in zip(many.updates.clips["agents"].parameters, owners_of(many)):
                    p[owner == 1] = torch.nan
        elif diverged:
            place = batch if where == "state" else batch["agents"]
            place = batch["next", "agents"] if where == "reward" else place
            place[where][ENVS : 2 * ENVS, 3] = torch.nan
        for _ in range(2):
            many.learn(batch.clone())
        found[diverged] = (
            many,
            [
                numbers_of(make_member_view(many, alone(world(), config, {}, 0)).read(i))
                for i in (0, 2)
            ],
        )
    for well, ill in zip(found[False][1], found[True][1]):
        for x, y in zip(well, ill, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0)
    many = found[True][0]
    assert many.diverged.tolist() == [False, True, False] and not found[False][0].diverged.any()
    if where != "parameter":
        for x, y in zip(before, networks_of(many, 1), strict=True):
            assert torch.equal(x, y)
    assert all(x.isfinite().all() for x in many.buffers())


def networks_of(many, member):
    taken = make_member_view(many, alone(world(), CONFIG, {}, 0)).read(member)
    return [p.detach().clone() for p in taken.parameters()]


def owners_of(many):
    clip = many.updates.clips["agents"]
    return clip.row_groups.split(clip.sizes)


def test_raises_when_all_members_diverge():
    many, collector = population(world())
    batch = collector.rollout()
    batch["next", "agents", "reward"][:, 3] = torch.nan
    with pytest.raises(NonFiniteError, match="every member of the population"):
        many.learn(batch)


def test_changed_settings_take_effect_without_recapture():
    many, collector = population(world(), settings=DIFFERENT, execution="trace")
    many.learn(collector.rollout().clone())
    recorded = dict(many.updates.programs)
    before = [p.detach().clone() for p in many.parameters()]
    many.settings["lr"].zero_()
    metrics = many.learn(collector.rollout().clone())
    assert many.updates.programs == recorded
    assert metrics["agents", "lr"].tolist() == [0.0] * MEMBERS
    for p, old in zip(many.parameters(), before, strict=True):
        assert torch.equal(p, old)


def test_population_resumes_exactly():
    many, collector = population(world(), settings=DIFFERENT)
    batch = collector.rollout()
    many.learn(batch.clone())
    other, _ = population(world(), settings={name: [0.5] * MEMBERS for name in DIFFERENT})
    many.diverged[1] = True
    other.load_state_dict(copy.deepcopy(many.state_dict()))
    for learner in (many, other):
        torch.manual_seed(3)
        learner.learn(batch.clone())
    for x, y in zip(numbers_of(many), numbers_of(other), strict=True):
        assert torch.equal(x, y)
    assert torch.equal(many.diverged, other.diverged)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"unshare_at": 0.5}, "unshare_at is 0.5"),
        ({"actor": NetworkConfig(sharing="full")}, "learner.actor.sharing is 'full'"),
        ({"critic": CriticConfig(sharing="full")}, "learner.critic.sharing is 'full'"),
        ({"critic": CriticConfig(architecture="set")}, "learner.critic.architecture is 'set'"),
        (
            {"actor": RecurrentNetworkConfig(communication=CommunicationConfig("commnet"))},
            "communication.kind is 'commnet'",
        ),
    ],
)
def test_settings_that_link_members_raise(settings, words):
    with pytest.raises(ConfigError, match=words):
        population(world(), OnPolicyConfig(**settings))


def test_state_is_not_required_without_state_critic():
    many, collector = population(world())
    batch = collector.rollout().exclude("state", ("next", "state"))
    assert many.learn(batch)["agents", "loss_critic"].isfinite().all()


def test_copied_members_equal_their_parents():
    settings = {"lr": DIFFERENT["lr"]}
    many, collector = population(world(), MEMORY, settings)
    for _ in range(2):
        batch = collector.rollout()
        many.learn(batch)
    many.diverged[0] = True
    one = alone(world(), MEMORY, {}, 0)
    before = [numbers_of(make_member_view(many, one).read(i)) for i in range(MEMBERS)]
    states = many.critic_states["agents"].unflatten(1, (MEMBERS, -1)).clone()
    parent = torch.tensor([2, 1, 2])
    many.copy_members(parent)
    for i, source in enumerate(parent.tolist()):
        for x, y in zip(
            numbers_of(make_member_view(many, one).read(i)), before[source], strict=True
        ):
            assert torch.equal(x, y)
    assert torch.equal(many.critic_states["agents"].unflatten(1, (MEMBERS, -1)), states[:, parent])
    assert not many.diverged.any() and many.settings["lr"].tolist() == pytest.approx(settings["lr"])


def test_invalid_arguments_raise():
    groups = TeamSpec.from_env(world()).groups
    with pytest.raises(ConfigError, match="n_members is 1"):
        learner_of_members(groups, CONFIG, n_members=1)
    for settings in ({"lr": torch.ones(2)}, {"num_epochs": torch.ones(3)}):
        with pytest.raises(ConfigError, match="expected 3, one for each member"):
            learner_of_members(groups, CONFIG, n_members=3, settings=settings)
    many, collector = population(world())
    with pytest.raises(ConfigError, match="expected a multiple of the 3 members"):
        many.learn(collector.rollout()[:7])
    for parent in ([0, 1], [0, 1, 3], [0, -1, 2]):
        with pytest.raises(ConfigError, match="expected the number of a member"):
            many.copy_members(torch.tensor(parent))
