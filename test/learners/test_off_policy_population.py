"""A population of MADDPG, MATD3 or MASAC: each member learns as in a run of one member."""

import dataclasses

import pytest
import torch
from meadow import make_meadow
from support.pictured import PicturedArena
from support.tiers import second_tier_cases

from torchrl_marl import TeamSpec
from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.envs.toy import Arena
from torchrl_marl.learners import OffPolicyConfig
from torchrl_marl.learners.block import Block
from torchrl_marl.learners.members import learner_of_members
from torchrl_marl.learners.off_policy import OffPolicyLearner
from torchrl_marl.learners.off_policy_config import ReplayConfig
from torchrl_marl.learners.rows import make_member_view
from torchrl_marl.modules import CriticConfig, RecurrentNetworkConfig
from torchrl_marl.objectives.own_actions import ValuesOfChoices, ValuesOfMovedActions
from torchrl_marl.specs.joining import of_members

MEMBERS, ENVS, STEPS = 3, 4, 10
CONFIG = OffPolicyConfig(
    actor=RecurrentNetworkConfig(num_cells=[8]),
    critic=CriticConfig(num_cells=[8]),
    learning_starts=0,
    minibatch_size=12,
    max_grad_norm=0.5,
    target_noise=0.0,  # one draw for all members differs from the draws of a single learner
    replay=ReplayConfig(capacity=60),
)
DIFFERENT = {
    "actor_lr": [1e-3, 5e-3, 2e-4],
    "critic_lr": [2e-3, 1e-3, 5e-4],
    "gamma": [0.9, 0.99, 0.8],
    "max_grad_norm": [0.1, 10.0, 0.5],
}


def world(**settings):
    defaults = {"n_agents": 2, "years": 2, "lives": 2, "seed": 0, "continuous_actions": True}
    return Arena(MEMBERS * ENVS, **defaults | settings)


def population(env, config=CONFIG, settings=None, **options):
    torch.manual_seed(0)
    own = {name: torch.tensor(values) for name, values in (settings or {}).items()}
    groups = TeamSpec.from_env(env).groups
    many = learner_of_members(groups, config, n_members=MEMBERS, settings=own, **options)
    policy = TeamPolicy(many.actors.values())
    return many, RolloutCollector(env, policy, frames_per_batch=MEMBERS * ENVS * STEPS)


def alone(env, config, settings, member):
    own = {name: values[member] for name, values in settings.items()}
    return OffPolicyLearner(TeamSpec.from_env(env).groups, dataclasses.replace(config, **own))


def numbers_of(learner):
    tensors = [x for x in learner.state_dict(keep_vars=True).values() if torch.is_tensor(x)]
    moments = [x for own in learner.updates.moments.values() for x in own.values()]
    return [x.detach().clone() for x in (*tensors, *moments)]


def assert_as_alone(env, config, settings, execution="eager", batches=3, rtol=0.0):
    many, collector = population(env, config, settings, execution=execution)
    ones = [alone(env, config, settings, i) for i in range(MEMBERS)]
    for i, one in enumerate(ones):
        make_member_view(many, one).write(i)
    for n in range(batches):
        batch = collector.next()
        for i, learner in enumerate((many, *ones)):
            torch.manual_seed(n)
            learner.learn((batch[(i - 1) * ENVS : i * ENVS] if i else batch).clone())
    for i, one in enumerate(ones):
        taken = make_member_view(many, alone(env, config, settings, i)).read(i)
        for x, y in zip(numbers_of(taken), numbers_of(one), strict=True):
            torch.testing.assert_close(x, y, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("algorithm", ["maddpg", "iddpg", "matd3"])
@pytest.mark.parametrize("execution", ["eager", "trace"])
def test_members_match_single_learners(algorithm, execution):
    config = dataclasses.replace(CONFIG, algorithm=algorithm)
    assert_as_alone(world(), config, DIFFERENT, execution)


@pytest.mark.parametrize("kind", [*second_tier_cases("runs", "sum"), "monotonic"])
@pytest.mark.parametrize("env", [{}, {"n_groups": 2, "n_agents": 4}], ids=["one", "groups"])
def test_members_of_facmac_match_single_learners(env, kind):
    mixer = dataclasses.replace(CONFIG.mixer, kind=kind)
    for algorithm in ("maddpg", "matd3"):
        config = dataclasses.replace(CONFIG, algorithm=algorithm, mixer=mixer)
        assert_as_alone(world(**env), config, DIFFERENT, rtol=2e-6)


@pytest.mark.parametrize("algorithm", [*second_tier_cases("runs", "iddpg"), "maddpg"])
def test_members_with_agent_states_match_single_learners(algorithm):
    """A central critic reads the actions of agents of the same member."""
    env = make_meadow(MEMBERS * ENVS, "two", states="own")
    config = dataclasses.replace(CONFIG, algorithm=algorithm, central_input="agent_state")
    assert_as_alone(env, config, DIFFERENT, batches=2)


@pytest.mark.parametrize("env", [{}, {"n_groups": 2, "n_agents": 4}], ids=["one", "groups"])
@pytest.mark.parametrize("mixer", ["none", "monotonic"])
def test_members_with_state_critics_match_single_learners(env, mixer):
    """A critic reads the state and actions of its member, or its mixer reads the state."""
    mixer = dataclasses.replace(CONFIG.mixer, kind=mixer)
    config = dataclasses.replace(CONFIG, algorithm="matd3", central_input="state", mixer=mixer)
    assert_as_alone(world(**env), config, DIFFERENT, batches=2, rtol=2e-6)


def test_members_with_image_states_match_single_learners():
    critic = CriticConfig(num_cells=[8], sharing="none")
    config = dataclasses.replace(CONFIG, central_input="state", critic=critic)
    env = PicturedArena(
        MEMBERS * ENVS, n_agents=4, n_groups=2, years=2, seed=0, continuous_actions=True
    )
    assert_as_alone(env, config, DIFFERENT, batches=2)


@pytest.mark.parametrize("algorithm", ["masac", "isac"])
def test_members_with_sampled_actions_match_single_learners(algorithm, monkeypatch):
    """The noise is set to zero, as one draw serves all members."""
    for module in (torch.distributions.normal, torch.distributions.utils):
        if hasattr(module, "_standard_normal"):
            monkeypatch.setattr(
                module,
                "_standard_normal",
                lambda shape, dtype, device: torch.zeros(shape, dtype=dtype, device=device),
            )
    config = dataclasses.replace(CONFIG, algorithm=algorithm)
    assert_as_alone(world(), config, DIFFERENT | {"alpha_lr": [1e-2, 1e-3, 5e-3]})


@pytest.mark.parametrize("seen", ["observations", "team", "state"])
@pytest.mark.parametrize("env", [{}, {"n_groups": 2, "n_agents": 4}], ids=["one", "groups"])
def test_members_with_sampled_discrete_actions_match_single_learners(env, seen, monkeypatch):
    """The random part of the draws is constant, as one draw serves all members."""
    monkeypatch.setattr(torch.Tensor, "exponential_", lambda x: x.fill_(1.0))
    config = dataclasses.replace(CONFIG, algorithm="masac", central_input=seen)
    assert_as_alone(world(continuous_actions=False, **env), config, DIFFERENT, batches=2)


@pytest.mark.parametrize("whose", ["group", "agent"])
def test_members_need_no_more_copies_of_a_step_than_one_learner(whose):
    env = world(n_groups=2, n_agents=4, continuous_actions=False)
    [team] = Block(TeamSpec.from_env(env).groups).joined.values()
    many = of_members(team, MEMBERS)
    one, all_ = (ValuesOfMovedActions(group, whose) for group in (team, many))
    assert all_.moves.shape == (len(one.moves), MEMBERS * 4)
    assert all_.copy_of.tolist() == one.copy_of.tolist() * MEMBERS
    one, all_ = (ValuesOfChoices(group, whose) for group in (team, many))
    assert all_.mine.shape == (len(one.mine), MEMBERS * 4) and len(one.mine) == 4


@pytest.mark.parametrize(
    ("env", "config"),
    [
        ({"n_groups": 2, "n_agents": 4}, {}),
        ({"n_groups": 2, "n_agents": 4}, {"central_input": "team"}),
        (
            {},
            {"bootstrap": "agent", "actor": RecurrentNetworkConfig(num_cells=[8], sharing="none")},
        ),
        (
            {},
            {
                "actor": RecurrentNetworkConfig([8], body="simba"),
                "critic": CriticConfig([8], body="simba"),
            },
        ),
        (
            {},
            {
                "actor": RecurrentNetworkConfig([8], sharing="agent_id"),
                "critic": CriticConfig([8], sharing="agent_id"),
            },
        ),
    ],
    ids=["groups", "across", "apart", "simba", "ids"],
)
def test_members_with_other_settings_match_single_learners(env, config):
    assert_as_alone(world(**env), dataclasses.replace(CONFIG, **config), DIFFERENT, batches=2)


@pytest.mark.parametrize("algorithm", ["matd3", "masac"])
def test_diverged_member_is_frozen_without_effect_on_others(algorithm):
    config, found = dataclasses.replace(CONFIG, algorithm=algorithm), {}
    for diverged in (False, True):
        many, collector = population(world(), config, DIFFERENT)
        batch = collector.rollout()
        torch.manual_seed(1)
        many.learn(batch.clone())
        if diverged:
            batch["next", "agents", "reward"][ENVS : 2 * ENVS] = torch.nan
        for _ in range(2):
            many.learn(batch.clone())
        own = [make_member_view(many, alone(world(), config, {}, 0)).read(i) for i in (0, 2)]
        found[diverged] = many, [numbers_of(one) for one in own]
    for well, ill in zip(found[False][1], found[True][1]):
        for x, y in zip(well, ill, strict=True):
            assert torch.equal(x, y)
    many = found[True][0]
    assert many.diverged.tolist() == [False, True, False] and not found[False][0].diverged.any()
    assert all(p.isfinite().all() for p in many.members.rows.owners)
