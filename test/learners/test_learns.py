"""Steps of other policies, marked by ``learns``: they have no effect on learners."""

import copy

import pytest
import torch
from lives import Lives
from samples import states
from torchrl.data import Categorical, Unbounded

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.envs.toy import Arena, Kuhn, ZeroSum
from torchrl_marl.learners import OnPolicyConfig
from torchrl_marl.learners.algorithms import ALGORITHMS
from torchrl_marl.learners.build import build_learners
from torchrl_marl.modules import CriticConfig, NetworkConfig

pytestmark = pytest.mark.learning

ENVS, STEPS, OWN = 6, 8, 4
WORLDS = {
    "deaths": lambda: Arena(ENVS, n_agents=4, n_groups=2, years=2, lives=2, seed=0),
    "no_masks": lambda: ZeroSum(ENVS, payoff="biased", seed=0),
    "turns": lambda: Kuhn(ENVS, seed=0),
}


def collected(world, **settings):
    env = WORLDS[world]()
    config = OnPolicyConfig(
        actor=NetworkConfig([8]),
        critic=CriticConfig([8]),
        num_epochs=3,
        minibatch_size=ENVS * STEPS,
        normalize_observations=True,
        target_kl=None,
        bootstrap="agent" if world == "turns" else "team",
        **settings,
    )
    torch.manual_seed(0)
    [learner] = build_learners(TeamSpec.from_env(env), config)
    policy = TeamPolicy(learner.actors.values())
    collector = RolloutCollector(env, policy, frames_per_batch=ENVS * STEPS)
    collector.rollout()
    return learner, collector.rollout(), list(TeamSpec.from_env(env).groups.values())


def with_learns(batch, groups, rows):
    """Returns a batch in which only some envs and groups have steps to learn from."""
    batch = batch.clone()
    for group, own in zip(groups, rows):
        learns = torch.zeros(*batch.shape, group.n_agents, dtype=torch.bool)
        learns[own] = True
        batch[group.name, "learns"] = learns
    return batch


def learned(learner, batch):
    twin = copy.deepcopy(learner)
    torch.manual_seed(5)
    metrics = twin.learn(batch)
    state = {k: x for k, x in twin.state_dict().items() if isinstance(x, torch.Tensor)}
    return state, metrics


def assert_same(one, other):
    for found, expected in zip(one, other):
        names = (
            [k for k in found.keys(True, True) if k[-1] not in ("epochs",)]
            if hasattr(found, "batch_size")
            else list(found)
        )
        for name in names:
            torch.testing.assert_close(
                found[name], expected[name], atol=1e-6, rtol=1e-5, equal_nan=True, msg=str(name)
            )


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("algorithm", ["mappo", "ippo"])
def test_learning_from_some_envs_matches_a_batch_of_them(world, algorithm):
    learner, batch, groups = collected(world, algorithm=algorithm)
    some = with_learns(batch, groups, [slice(0, OWN)] * len(groups))
    assert_same(learned(learner, some), learned(learner, batch[:OWN].clone()))
    before = {k: x for k, x in learner.state_dict().items() if isinstance(x, torch.Tensor)}
    assert any(not torch.equal(x, before[k]) for k, x in learned(learner, some)[0].items())


@pytest.mark.parametrize("world", WORLDS)
def test_learns_true_everywhere_matches_no_learns_entry(world):
    learner, batch, groups = collected(world)
    everywhere = with_learns(batch, groups, [slice(None)] * len(groups))
    for found, expected in zip(learned(learner, everywhere), learned(learner, batch.clone())):
        for name in expected.keys(True, True) if hasattr(expected, "batch_size") else expected:
            assert torch.equal(found[name].nan_to_num(), expected[name].nan_to_num()), name


@pytest.mark.parametrize("world", WORLDS)
def test_actions_and_rewards_of_other_policies_have_no_effect(world):
    learner, batch, groups = collected(world)
    first, second = groups
    clean = with_learns(batch, groups, [slice(None), slice(0, OWN)])
    poisoned = clean.clone()
    poisoned["next", second.name, "reward"][OWN:] = torch.nan
    poisoned[second.name, "action_log_prob"][OWN:] = torch.nan
    assert_same(learned(learner, poisoned), learned(learner, clean))
    # Without the entry, they do have an effect.
    without = poisoned.exclude((first.name, "learns"), (second.name, "learns"))
    with pytest.raises(Exception, match="NaN"):
        learned(learner, without)


# ----------------------------------------------------------------- opponents in the same group


def mixed_seats(seed=0):
    """The groups, and a batch in which some agents of the group are opponents in most envs."""
    kind = AgentSpec("car", 4, Unbounded((3,)), Categorical(2))
    groups = TeamSpec([kind]).groups
    batch = Lives(8, 4, seed).batch(groups["car"], 20, features=3)
    batch["car", "action_log_prob"] = -torch.rand(8, 20, 4)
    learns = torch.ones(8, 1, 4, dtype=torch.bool)
    learns[:3, :, 2:] = learns[3:6, :, :3] = False
    batch["car", "learns"] = learns.expand(8, 20, 4).clone()
    return groups, batch


def wild(batch, leaves):
    """The same steps with random values for opponents, and NaN where they are masked."""
    bad, own, then = batch.clone(), batch["car"], batch["next", "car"]
    others = ~own["learns"]
    cut = (then["truncated"] & ~then["terminated"]).squeeze(-1)
    there = {
        ("car", "observation"): own["mask"],
        ("next", "car", "observation"): then["mask"] | cut,
        ("next", "car", "reward"): ~own["done"].squeeze(-1),
        ("car", "action_log_prob"): own["mask"],
    }
    for key in leaves:
        value = bad[key]
        noise = torch.where(_like(there[key], value), 1e6 * torch.randn_like(value), torch.nan)
        bad[key] = torch.where(_like(others, value), noise, value)
    return bad


def _like(mask, value):
    return mask.reshape(*mask.shape, *(1,) * (value.ndim - mask.ndim))


EARNED = [("next", "car", "reward"), ("car", "action_log_prob")]
SEEN = [("car", "observation"), ("next", "car", "observation")]
SINGLE_PROCESS = {"algorithm": "ippo", "normalize_observations": True}


@pytest.mark.filterwarnings("ignore:group .*act in turns")
@pytest.mark.parametrize("bootstrap", ["team", "agent"])
@pytest.mark.parametrize(
    "leaves, settings",
    [
        (EARNED + SEEN, SINGLE_PROCESS),
        (EARNED + SEEN, {**SINGLE_PROCESS, "value_centering": True}),
        (EARNED[:1] + SEEN, {**SINGLE_PROCESS, "estimator": "vtrace"}),
        (EARNED, {"algorithm": "mappo"}),
        (EARNED, {"algorithm": "happo"}),
    ],
    ids=["ippo", "centering", "vtrace", "mappo", "happo"],
)
def test_opponents_in_the_same_group_change_no_parameter(leaves, settings, bootstrap):
    """Dead agents are credited with rewards and values of learning agents only."""
    groups, batch = mixed_seats()
    config = ALGORITHMS.schema(settings["algorithm"])(
        actor=NetworkConfig([8]),
        critic=CriticConfig([8]),
        num_epochs=2,
        minibatch_size=40,
        bootstrap=bootstrap,
        **settings,
    )
    found = []
    for given in (batch, wild(batch, leaves)):
        torch.manual_seed(0)
        learner = ALGORITHMS.learner(config.algorithm)(groups, config)
        torch.manual_seed(1)
        for part in given.split(10, 1):
            learner.learn(part)
        found.append(states([learner]))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
