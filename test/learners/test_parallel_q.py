"""The learner of PQN: graphs, resuming, joined groups, mixed runs, invalid settings."""

from functools import partial

import learner_twins
import pytest
import torch
from learner_twins import (
    assert_masked_slots_change_no_bit,
    check_resume_and_read_metrics,
    set_same_weights,
)
from protocols import missing_names
from samples import POISON, states

import torchrl_marl
from torchrl_marl import TeamSpec
from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.envs import VmasEnv
from torchrl_marl.envs.toy import Arena, Paces
from torchrl_marl.errors import ConfigError
from torchrl_marl.learners import Learner, ParallelQConfig, ParallelQLearner
from torchrl_marl.learners.config import EpsilonConfig
from torchrl_marl.learners.off_policy_config import AnyTeamMixerConfig
from torchrl_marl.modules import QNetworkConfig
from torchrl_marl.recipes import load_config

NORMED = partial(QNetworkConfig, activation="relu", layer_norm=True)
SMALL = {"actor": NORMED([8]), "minibatch_size": 20, "num_epochs": 2}
NONE, SUM, MONOTONIC = (AnyTeamMixerConfig(kind, 4) for kind in ("none", "sum", "monotonic"))


def make_arena(**kwargs):
    return Arena(4, seed=0, **kwargs)


def make_tag(**kwargs):
    pytest.importorskip("vmas")
    return VmasEnv(
        "simple_tag", num_envs=4, max_steps=20, seed=0, continuous_actions=False, **kwargs
    )


def trained(env, n_batches=2, execution="eager", **settings):
    config = ParallelQConfig(**SMALL | settings)

    def make(team):
        return ParallelQLearner(team.groups, config, team=team, execution=execution)

    return learner_twins.train_on_batches(make, env, n_batches)


def test_learner_has_actors_and_schedules_for_its_groups():
    learner, metrics = trained(make_arena(n_groups=2), exploration=EpsilonConfig(1, 0.2, 1.0))
    assert not missing_names(learner, Learner) and list(learner.actors) == ["agents_0", "agents_1"]
    own = [m["agents_1"] for m in metrics]
    assert [float(m["epsilon"]) for m in own] == pytest.approx([1.0, 0.6])
    assert [float(m["lr"]) for m in own] == pytest.approx([5e-4, 2.5e-4])
    assert set(own[0].keys()) == set(own[1].keys()) and float(own[0]["epochs"]) == 2
    assert float(own[1]["grad_norm"]) > 0


@pytest.mark.parametrize(
    ("make", "settings", "off"),
    [
        (lambda: make_arena(n_groups=2), {"mixer": MONOTONIC, "normalize_observations": True}, 0),
        (make_arena, {"mixer": MONOTONIC, "central_input": "state"}, 0),
        (make_tag, {"mixer": NONE, "bootstrap": "agent"}, 0),
        (
            lambda: make_arena(kinds=2, n_actions=6, action_mask=True, categorical_actions=False),
            {"actor": NORMED([8], sharing="none", dueling=True)},
            1e-6,  # exact on Intel CPUs; AMD kernels sum these seven rows in another order
        ),
    ],
)
def test_traced_updates_match_eager_updates(make, settings, off):
    eager, metrics = trained(make(), **settings)
    traced, others = trained(make(), execution="trace", **settings)
    assert len(traced.updates.programs) == 1
    for one, other in zip(states([eager]), states([traced]), strict=True):
        torch.testing.assert_close(one, other, rtol=off, atol=off / 100)
    for key, value in metrics[-1].items(True, True):
        assert bool(value.isfinite())
        torch.testing.assert_close(value, others[-1][key], rtol=off, atol=off / 100, msg=str(key))


@pytest.mark.parametrize("value", POISON)
@pytest.mark.parametrize("mixer", [NONE, MONOTONIC], ids=["none", "monotonic"])
def test_values_in_masked_slots_have_no_effect(mixer, value):
    """On networks, optimizer, statistics and metrics."""
    env = make_arena(n_groups=2, max_steps=12)
    settings = {"mixer": mixer, "normalize_observations": True}
    (one, _), (other, _) = trained(env, 0, **settings), trained(env, 0, **settings)
    assert_masked_slots_change_no_bit(one, other, env, value)


@pytest.mark.parametrize("mixer", [NONE, SUM], ids=["none", "sum"])
def test_joined_groups_match_separate_learners(mixer):
    """Competing groups have a mixer each."""
    env = make_tag()
    team = TeamSpec.from_env(env)
    config = ParallelQConfig(**SMALL, mixer=mixer)
    both = ParallelQLearner(team.groups, config, team=team)
    batch = RolloutCollector(env, TeamPolicy(both.actors.values()), frames_per_batch=80).rollout()
    set_same_weights(both.actors, both.mixers)
    torch.manual_seed(5)
    metrics = both.learn(batch)
    assert len(both.losses) == 1
    for name, group in team.groups.items():
        alone = ParallelQLearner({name: group}, config, team=team)
        set_same_weights(alone.actors, alone.mixers)
        torch.manual_seed(5)
        for key, value in alone.learn(batch)[name].items():
            torch.testing.assert_close(metrics[name, key], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["sum", "monotonic"])
def test_mixer_over_two_groups_matches_one_group_of_all_agents(kind):
    """One network serves the four agents of the arena, in one group and in two."""
    found = []
    for n_groups, sharing in ((1, "group"), (2, "full")):
        mixer = AnyTeamMixerConfig(kind, 4, over="team")
        actor = NORMED([8], sharing=sharing)
        learner, _ = trained(make_arena(n_groups=n_groups), 0, mixer=mixer, actor=actor)
        set_same_weights(learner.actors, learner.mixers)
        torch.manual_seed(1)
        policy = TeamPolicy(learner.actors.values())
        env = make_arena(n_groups=n_groups)
        batch = RolloutCollector(env, policy, frames_per_batch=80).rollout()
        torch.manual_seed(2)
        found.append(learner.learn(batch))
    alone, parts = found
    for name in ("agents_0", "agents_1"):
        for key, value in alone["agents"].items():
            torch.testing.assert_close(parts[name, key], value, rtol=1e-4, atol=1e-6)


def test_competing_groups_under_one_mixer_raise():
    shaped = {"shape_adversary_rew": True, "shape_agent_rew": True}
    with pytest.raises(ConfigError, match="'adversary' and 'agent' compete"):
        trained(make_tag(**shaped), 1, mixer=AnyTeamMixerConfig("sum", over="team"))


def recipe(folder):
    small = {"actor": {"num_cells": [8]}, "minibatch_size": 40, "num_epochs": 2}
    return {
        "recipe": "mixed",
        "threads": 1,
        "total_frames": 400,
        "frames_per_batch": 80,
        "folder": str(folder),
        "env": {"library": "toy", "name": "arena", "num_envs": 8, "max_steps": 13}
        | {"kwargs": {"n_groups": 2}, "continuous_actions": False},
        "learner": {"algorithm": "mappo", **small},
        "groups": {"agents_1": {"algorithm": "pqn", "mixer": {"kind": "monotonic"}, **small}},
        "evaluation": {"episodes": 4},
        "logging": {"progress": False},
    }


def test_run_with_pqn_and_mappo_resumes_exactly(tmp_path):
    rows = check_resume_and_read_metrics(recipe, tmp_path, (2,))
    # Annealed from 1 to 0.1 in the first tenth of the run.
    assert [float(row["agents_1/epsilon"]) for row in rows] == pytest.approx([1.0] + [0.1] * 4)
    assert all(row["agents_1/loss_value"] for row in rows)
    assert "agents_0/clip_fraction" in rows[0] and "agents_1/clip_fraction" not in rows[0]


def test_unsharing_gives_each_agent_a_network():
    learner, _ = trained(make_arena(), unshare_at=0.5, mixer=MONOTONIC)
    assert learner.unshared
    weights = [p for p in learner.actors.parameters() if p.ndim == 3]
    assert weights and all(not torch.equal(w[0], w[1]) for w in weights)
    other, _ = trained(make_arena(), 0, mixer=MONOTONIC)
    other.load_state_dict(learner.state_dict())
    for one, two in zip(states([learner]), states([other]), strict=True):
        assert torch.equal(one, two)


@pytest.mark.learning
def test_pqn_solves_the_arena(tmp_path):
    """The optimal return is 12.5, the random one 0.97. Agents die in mid-episode."""
    run = torchrl_marl.train(
        "toy_arena_mappo",
        learner={"algorithm": "pqn", "minibatch_size": 160, "lr": 1e-3}
        | {"exploration": {"annealing": 0.15}},
        total_frames=25_600,
        logging={"progress": False},
        execution="eager",
        folder=str(tmp_path / "run"),
    )
    assert run.summary["return_after"] == 12.5


def test_turns_with_bootstrap_agent_raise():
    with pytest.raises(ConfigError, match="pqn does not yet credit with bootstrap=agent"):
        trained(Paces(4, seed=0), 1, bootstrap="agent", mixer=NONE)


def test_continuous_actions_raise():
    with pytest.raises(ConfigError, match="its actions are continuous, expected discrete ones"):
        trained(VmasEnv("balance", num_envs=2, seed=0), 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bootstrap": "agent"}, "bootstrap is 'agent', but a mixer has one value for all agents"),
        ({"minibatch_size": 1_000}, "minibatch_size is 1000, expected at most frames_per_batch"),
        (
            {"mixer": {"kind": "product"}},
            "mixer.kind is 'product', expected none, sum or monotonic",
        ),
    ],
)
def test_invalid_settings_raise(settings, message):
    with pytest.raises(ConfigError, match=message):
        load_config("toy_arena_mappo", {"learner": {"algorithm": "pqn", **settings}})
