"""The learner of IQL, VDN and QMIX: equivalences, graphs, resuming, joined groups, masks."""

import math

import learner_twins
import pytest
import torch
from learner_twins import assert_masked_slots_change_no_bit, check_resume_and_read_metrics
from protocols import missing_names
from samples import POISON, states

import torchrl_marl
from torchrl_marl import TeamSpec
from torchrl_marl.capture import Program, count_syncs, graph_syncs
from torchrl_marl.capture.folding import fold_constants
from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.envs import VmasEnv
from torchrl_marl.envs.toy import Arena, MatrixGame
from torchrl_marl.errors import ConfigError
from torchrl_marl.learners import Learner, ValueConfig, ValueLearner
from torchrl_marl.learners.config import EpsilonConfig
from torchrl_marl.learners.off_policy_config import ReplayConfig, TeamMixerConfig
from torchrl_marl.modules import MixerConfig, QNetworkConfig

SMALL = {"actor": QNetworkConfig([8]), "mixer": MixerConfig(4), "minibatch_size": 16}


def make_arena(**kwargs):
    return Arena(4, seed=0, **kwargs)


def make_tag(**kwargs):
    pytest.importorskip("vmas")
    settings = {"num_envs": 4, "max_steps": 20, "seed": 0, "continuous_actions": False}
    return VmasEnv("simple_tag", **settings, **kwargs)


def trained(env, n_batches=4, execution="eager", seed=0, **settings):
    config = ValueConfig(**{"learning_starts": 80} | SMALL | settings)

    def make(team):
        return ValueLearner(team.groups, config, team=team, execution=execution)

    return learner_twins.train_on_batches(make, env, n_batches, seed)


def test_learner_explores_by_epsilon_only():
    learner, metrics = trained(make_arena(n_groups=2), 3, exploration=EpsilonConfig(1, 0.2, 0.5))
    assert not missing_names(learner, Learner) and list(learner.actors) == ["agents_0", "agents_1"]
    own = [m["agents_1"] for m in metrics]
    # The second batch is random, too; learning starts after it.
    assert [float(m["epsilon"]) for m in own] == pytest.approx([1.0, 1.0, 0.2])
    assert [int(m["updates"]) for m in own] == [0, 4, 4]
    assert "sigma" not in own[0].keys() and set(own[0].keys()) == set(own[-1].keys())
    assert math.isnan(own[0]["loss_value"]) and float(own[-1]["grad_norm"]) > 0


def test_target_networks_follow_every_update():
    learner, _ = trained(make_arena(), 0, algorithm="qmix", learning_starts=0, tau=0.25)
    before = [p.clone() for p in learner.targets.parameters()]
    env = make_arena()
    batch = RolloutCollector(env, learner.actors["agents"], frames_per_batch=40).rollout()
    learner.config = ValueConfig(**SMALL, learning_starts=0, updates_per_frame=1 / 40)
    learner.learn(batch)
    assert learner.updates.count == 1
    [loss] = learner.losses.values()
    sources = [p for network, _ in loss.followed for p in network.parameters()]
    for old, new, source in zip(before, learner.targets.parameters(), sources, strict=True):
        torch.testing.assert_close(new, old + 0.25 * (source.detach() - old))
    assert len(loss.followed) == 2 and list(learner.mixers) == ["agents"]


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (lambda: make_arena(n_groups=2), {"algorithm": "qmix", "n_step": 3, "double_q": False}),
        (make_arena, {"central_input": "state", "replay": ReplayConfig(200, alpha=0.6)}),
        (make_tag, {"algorithm": "qmix", "central_input": "team", "normalize_observations": True}),
        (make_tag, {"algorithm": "iql", "bootstrap": "agent", "negative_weight": 0.5}),
        (
            lambda: make_arena(kinds=2, n_actions=6, action_mask=True, categorical_actions=False),
            {"algorithm": "vdn", "actor": QNetworkConfig([8], sharing="none", dueling=True)},
        ),
    ],
)
def test_traced_updates_match_eager_updates(make, settings):
    eager, metrics = trained(make(), **settings)
    traced, others = trained(make(), execution="trace", **settings)
    assert len(traced.updates.programs) == 1
    for one, other in zip(states([eager]), states([traced]), strict=True):
        assert torch.equal(one, other)
    for key, value in metrics[-1].items(True, True):
        assert math.isfinite(value) and torch.equal(value, others[-1][key]), key


def test_update_does_not_synchronize_with_device(monkeypatch):
    """Neither eagerly nor as a graph, including priorities."""
    inputs, plain = {}, Program.flat
    monkeypatch.setattr(Program, "flat", lambda p, x: inputs.update({p: list(x)}) or plain(p, x))
    for execution in ("eager", "trace"):
        replay = ReplayConfig(200, alpha=0.6)
        learner, _ = trained(make_arena(), 2, execution, algorithm="qmix", replay=replay)
        with count_syncs() as syncs:
            learner.updates.run(learner.replay, 3)
        assert not syncs, syncs
    [(program, leaves)] = inputs.items()
    fold_constants(program.traced.module)
    assert not graph_syncs(program.traced.module, [*leaves, *program.traced.captured])


@pytest.mark.parametrize("value", POISON)
@pytest.mark.parametrize("algorithm", ["iql", "vdn", "qmix"])
def test_values_in_masked_slots_have_no_effect(algorithm, value):
    """On the replay buffer, networks, optimizer, statistics and metrics."""
    settings = {"learning_starts": 0, "n_step": 2, "algorithm": algorithm}
    env = Arena(4, n_groups=2, seed=0, max_steps=12)
    one, _ = trained(env, 0, normalize_observations=True, **settings)
    other, _ = trained(env, 0, normalize_observations=True, **settings)
    assert_masked_slots_change_no_bit(one, other, env, value)


# -------------------------------------------------------------------------------- equivalences


def same_weights(learner):
    """Sets weights by their column, so that they do not depend on the other groups."""
    for name, parameter in learner.named_parameters():
        value = torch.arange(parameter.shape[-1]) if name.endswith("weight") else torch.ones(1)
        parameter.data.copy_(0.3 * torch.cos(3.0 * value).expand_as(parameter))


@pytest.mark.parametrize("algorithm", ["iql", "vdn", "qmix"])
def test_joined_groups_match_separate_learners(algorithm):
    """Competing groups have a mixer each."""
    env = make_tag()
    team = TeamSpec.from_env(env)
    config = ValueConfig(algorithm, **SMALL, learning_starts=0, max_grad_norm=0.05)
    both = ValueLearner(team.groups, config, team=team)
    batch = RolloutCollector(env, TeamPolicy(both.actors.values()), frames_per_batch=80).rollout()
    same_weights(both)
    torch.manual_seed(5)
    metrics = both.learn(batch)
    assert int(metrics["agent", "updates"]) == 8 and len(both.losses) == 1
    for name, group in team.groups.items():
        alone = ValueLearner({name: group}, config, team=team)
        same_weights(alone)
        torch.manual_seed(5)
        for key, value in alone.learn(batch)[name].items():
            torch.testing.assert_close(metrics[name, key], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("algorithm", ["vdn", "qmix"])
@pytest.mark.parametrize("central_input", ["observations", "state"])
def test_mixer_over_two_groups_matches_one_group_of_all_agents(algorithm, central_input):
    """One network serves the four agents of the arena, in one group and in two."""
    found = []
    for n_groups, sharing in ((1, "group"), (2, "full")):
        learner, _ = trained(
            Arena(4, seed=0, n_groups=n_groups),
            0,
            algorithm=algorithm,
            central_input=central_input,
            learning_starts=0,
            max_grad_norm=0.1,
            actor=QNetworkConfig([8], sharing=sharing),
            mixer=TeamMixerConfig(4, over="team"),
        )
        same_weights(learner)
        torch.manual_seed(1)
        policy = TeamPolicy(learner.actors.values())
        batch = RolloutCollector(
            Arena(4, seed=0, n_groups=n_groups), policy, frames_per_batch=80
        ).rollout()
        torch.manual_seed(2)
        found.append(learner.learn(batch))
    alone, parts = found
    for name in ("agents_0", "agents_1"):
        for key, value in alone["agents"].items():
            torch.testing.assert_close(parts[name, key], value, rtol=1e-4, atol=1e-6)


def identity(mixer, above=100.0):
    """Makes a monotonic mixer of one agent return its input."""
    for parameter in mixer.parameters():
        parameter.data.zero_()
    made = mixer.module.weights.bias.data.view(-1, mixer.module.hidden)
    made[:, 0] = torch.tensor([1.0, above, 1.0])  # where elu is the identity
    list(mixer.parameters())[-1].data.fill_(-above)


@pytest.mark.parametrize("algorithm", ["vdn", "qmix"])
def test_mixer_of_one_agent_matches_double_dqn(algorithm):
    """The first update equals that of IQL, which uses TorchRL's DQNLoss."""
    env = make_arena(n_agents=1)
    learned = []
    for word in ("iql", algorithm):
        settings = {"learning_starts": 0, "updates_per_frame": 1 / 40, "max_grad_norm": None}
        learner, _ = trained(env, 0, algorithm=word, **settings)
        [loss] = learner.losses.values()
        if word == "qmix":
            identity(loss.mixer_network)
            identity(loss.target_mixer_network)
        env.set_seed(0)
        torch.manual_seed(1)
        collector = RolloutCollector(env, learner.actors["agents"], frames_per_batch=40)
        metrics = learner.learn(collector.rollout())["agents"]
        learned.append((metrics, [p.detach().clone() for p in learner.actors.parameters()]))
    (one, own), (other, mixed) = learned
    assert float(one["loss_value"]) > 0
    rounding = {"rtol": 1e-4, "atol": 1e-5} if algorithm == "qmix" else {"rtol": 0, "atol": 0}
    for key in ("loss_value", "pred_value", "target_value"):
        torch.testing.assert_close(one[key], other[key], **rounding)
    for mine, theirs in zip(own, mixed, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def test_vdn_decomposes_an_additive_reward():
    """The better action adds 2 for the first agent and 1 for the second."""
    env = MatrixGame(8, payoff=[[0.0, 1.0], [2.0, 3.0]], seed=0)
    settings = {"learning_starts": 0, "lr": 0.02, "updates_per_frame": 1.0, "tau": 1.0}
    learner, metrics = trained(env, 8, algorithm="vdn", exploration=EpsilonConfig(1, 1), **settings)
    values = learner.actors["agents"](env.reset())["agents", "action_value"][0]
    torch.testing.assert_close(values[:, 1] - values[:, 0], torch.tensor([2.0, 1.0]))
    assert float(metrics[-1]["agents", "target_value"]) == pytest.approx(1.5, abs=0.2)


# ------------------------------------------------------------------------------ runs


def recipe(folder, **settings):
    """MAPPO beside QMIX, half of the arena each."""
    small = {"actor": {"num_cells": [8]}, "critic": {"num_cells": [8]}, "minibatch_size": 24}
    return {
        "recipe": "mixed",
        "threads": 1,
        "total_frames": 480,
        "frames_per_batch": 80,
        "folder": str(folder),
        "env": {"library": "toy", "name": "arena", "num_envs": 8, "max_steps": 13}
        | {"continuous_actions": False, "kwargs": {"n_groups": 2}},
        "learner": {"algorithm": "mappo", "num_epochs": 2} | small,
        "groups": {
            "agents_1": {"algorithm": "qmix", "learning_starts": 200, "minibatch_size": 16}
            | {"replay": {"capacity": 256, "alpha": 0.6}, "normalize_observations": True}
        },
        "evaluation": {"episodes": 4},
        "logging": {"progress": False},
    } | settings


def test_mixed_run_resumes_exactly_in_warm_up_and_with_full_buffer(tmp_path):
    """256 rows of 8 envs: the ring of 32 steps is full after the fourth of six batches."""
    rows = check_resume_and_read_metrics(recipe, tmp_path, (1, 5))
    assert [row["agents_1/updates"] for row in rows] == ["0", "0", "8", "8", "8", "8"]
    assert rows[0]["agents_1/loss_value"] == "" and float(rows[-1]["agents_1/grad_norm"]) > 0
    assert "agents_0/clip_fraction" in rows[0] and "agents_1/clip_fraction" not in rows[0]


def test_on_policy_group_learns_as_without_off_policy_group():
    """MAPPO predators beside IQL prey match those trained alone on the same batches."""
    from torchrl_marl.learners import OnPolicyConfig, build_learners
    from torchrl_marl.modules import CriticConfig, NetworkConfig

    env = make_tag()
    team = TeamSpec.from_env(env)
    sizes = {"actor": NetworkConfig([8]), "critic": CriticConfig([8])}
    config = OnPolicyConfig(**sizes, num_epochs=2, minibatch_size=20)
    prey = {"agent": {"algorithm": "iql", "learning_starts": 40, "minibatch_size": 16}}

    def build():
        torch.manual_seed(0)
        return build_learners(team, config, prey)

    mixed, (alone, _) = build(), build()
    assert mixed[1].config.actor.num_cells == [8]
    policy = TeamPolicy(actor for learner in mixed for actor in learner.actors.values())
    collector = RolloutCollector(env, policy, frames_per_batch=40, team=team)
    for i in range(3):
        batch = collector.rollout()
        same = batch.clone()
        for learner in mixed:
            torch.manual_seed(i)
            found = learner.learn(batch)
        torch.manual_seed(i)
        alone.learn(same)
    assert int(found["agent", "updates"]) == 4
    for one, other in zip(states(mixed[:1]), states([alone]), strict=True):
        assert torch.equal(one, other)


def test_heterogeneous_agents_are_trained_with_padding(tmp_path):
    """A recipe with two kinds of agents in one group, and clustered sharing."""
    run = torchrl_marl.train(
        "toy_arena_mappo_kinds",
        learner={"algorithm": "qmix", "learning_starts": 40, "minibatch_size": 16}
        | {"actor": {"sharing": "clusters", "clustering_frames": 160}},
        env={"num_envs": 4},
        frames_per_batch=40,
        total_frames=80,
        evaluation={"episodes": 4},
        logging={"progress": False},
        folder=str(tmp_path / "run"),
    )
    assert math.isfinite(run.summary["return_after"])


# ------------------------------------------------------------------------------ bad input


def test_competing_groups_under_one_mixer_raise():
    settings = {"algorithm": "vdn", "mixer": TeamMixerConfig(over="team")}
    shaped = {"shape_adversary_rew": True, "shape_agent_rew": True}
    with pytest.raises(ConfigError, match="'adversary' and 'agent' compete: .* correlation of -"):
        trained(make_tag(**shaped), 1, **settings)


def test_continuous_actions_raise():
    with pytest.raises(ConfigError, match="'agents': its actions are continuous, .* for qmix; use"):
        trained(make_arena(continuous_actions=True), 0)
