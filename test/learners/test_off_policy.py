"""The off-policy learner: update counts, graphs, n-step returns, masks, and joined groups."""

import math

import learner_twins
import pytest
import torch
from learner_twins import assert_masked_slots_change_no_bit, set_same_weights
from protocols import missing_names
from samples import POISON, states
from support.tiers import second_tier_cases

import torchrl_marl
from torchrl_marl import TeamSpec
from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.envs import VmasEnv
from torchrl_marl.envs.toy import Arena, Paces
from torchrl_marl.errors import ConfigError, NonFiniteError
from torchrl_marl.learners import Learner, OffPolicyConfig, OffPolicyLearner
from torchrl_marl.learners.adam import moments_of
from torchrl_marl.learners.off_policy_config import ExplorationConfig, ReplayConfig
from torchrl_marl.modules import CriticConfig, NetworkConfig
from torchrl_marl.modules.config import AnyMixerConfig
from torchrl_marl.recipes import load_config

MIXER = AnyMixerConfig("monotonic", 4)
SMALL = {"actor": NetworkConfig([8]), "critic": CriticConfig([8]), "minibatch_size": 16}


def make_arena(**kwargs):
    return Arena(4, seed=0, **kwargs)


def make_tag():
    pytest.importorskip("vmas")
    return VmasEnv("simple_tag", num_envs=4, max_steps=20, seed=0)


def trained(env, n_batches=4, execution="eager", seed=0, **settings):
    config = OffPolicyConfig(**{"learning_starts": 80} | SMALL | settings)

    def make(team):
        return OffPolicyLearner(team.groups, config, team=team, execution=execution)

    return learner_twins.train_on_batches(make, env, n_batches, seed)


def test_learner_has_an_actor_for_each_group():
    learner, _ = trained(make_arena(n_groups=2), 1)
    assert not missing_names(learner, Learner) and list(learner.actors) == ["agents_0", "agents_1"]
    assert learner.actors["agents_0"].out_keys == [("agents_0", "action")]


def test_number_of_updates_for_each_batch():
    """0.15 updates per frame from 80 frames on, with 40 frames a batch; fractions carry over."""
    learner, metrics = trained(make_arena(), updates_per_frame=0.15)
    own = [m["agents"] for m in metrics]
    assert [int(m["updates"]) for m in own] == [0, 6, 6, 6]
    assert [int(m["stored"]) for m in own] == [40, 80, 120, 160]
    assert [float(m["epsilon"]) for m in own] == [1.0, 1.0, 0.0, 0.0]  # as collected
    assert set(own[0].keys()) == set(own[-1].keys())
    assert math.isnan(own[0]["loss_value"]) and math.isfinite(own[1]["loss_value"])
    learner, metrics = trained(make_arena(), updates_per_frame=0.0375, learning_starts=0)
    assert [int(m["agents", "updates"]) for m in metrics] == [1, 2, 1, 2]


def test_fraction_of_owed_updates_is_resumed():
    """40 frames at 0.0375 updates each are 1.5: the half and the frame count are saved."""
    settings = {"updates_per_frame": 0.0375, "learning_starts": 0}
    learner, _ = trained(make_arena(), 1, **settings)
    other, _ = trained(make_arena(), 0, seed=1, **settings)
    other.load_state_dict(learner.state_dict())
    assert other.owed == pytest.approx(0.5)
    assert (other.frames, other.updates.count) == (40, 1)


SETTINGS = {
    "own networks": ({"sharing": "none"}, {"sharing": "none"}, {}),
    "agent ids": ({"sharing": "agent_id"}, {"sharing": "trunk"}, {}),
    "masked units": ({"sharing": "masks"}, {"sharing": "masks"}, {}),
    "attention": ({}, {"architecture": "attention"}, {}),
    "a team's value": ({}, {"architecture": "set", "value_per": "team"}, {}),
    "state": ({}, {}, {"central_input": "state", "precision": "bf16"}),
    "all groups": ({}, {}, {"central_input": "team", "bootstrap": "agent"}),
    "mixed": ({}, {"sharing": "none"}, {"mixer": MIXER, "central_input": "state"}),
}


@pytest.mark.parametrize(("actor", "critic", "others"), SETTINGS.values(), ids=SETTINGS)
def test_all_kinds_of_networks_are_trained(actor, critic, others):
    networks = {"actor": NetworkConfig([8], **actor), "critic": CriticConfig([8], **critic)}
    learner, metrics = trained(make_arena(n_groups=2), 3, **networks, **others)
    for name in learner.groups:
        assert float(metrics[-1][name, "grad_norm_actor"]) > 0
        assert float(metrics[-1][name, "grad_norm_critic"]) > 0
    assert all(bool(p.isfinite().all()) for p in learner.parameters())


def test_heterogeneous_agents_are_trained_with_padding(tmp_path):
    """A recipe with two kinds of agents in one group, and two critics."""
    run = torchrl_marl.train(
        "toy_arena_mappo_kinds",
        learner={"algorithm": "matd3", "learning_starts": 40, "minibatch_size": 16},
        env={"num_envs": 4},
        frames_per_batch=40,
        total_frames=80,
        evaluation={"episodes": 4},
        logging={"progress": False},
        folder=str(tmp_path / "run"),
    )
    assert math.isfinite(run.summary["return_after"])


@pytest.mark.learning
def test_maddpg_solves_coordination_game(tmp_path):
    """The coordination game: 10 at best, 3.75 at random."""
    run = torchrl_marl.train(
        "toy_matrix_game_mappo",
        learner={"algorithm": "maddpg", "learning_starts": 512, "minibatch_size": 64},
        total_frames=6_400,
        frames_per_batch=128,
        evaluation={"deterministic": True},
        logging={"progress": False},
        folder=str(tmp_path / "run"),
    )
    assert run.summary["return_after"] == 10.0


@pytest.mark.learning
def test_masac_solves_coordination_game(tmp_path):
    """The same game, with a value for each action."""
    run = torchrl_marl.train(
        "toy_matrix_game_mappo",
        learner={"algorithm": "masac", "learning_starts": 512, "minibatch_size": 64},
        total_frames=6_400,
        frames_per_batch=128,
        evaluation={"deterministic": True},
        logging={"progress": False},
        folder=str(tmp_path / "run"),
    )
    assert run.summary["return_after"] == 10.0


def test_temperatures_are_learned_and_saved():
    """Each group has a temperature and an Adam for it, both in the state dict."""
    settings = {"algorithm": "masac", "alpha_init": 0.5, "alpha_lr": 0.01}
    learner, metrics = trained(make_arena(n_groups=2), **settings)
    alphas = [metrics[-1][name, "alpha"] for name in learner.groups]
    assert all(bool(alpha != 0.5) for alpha in alphas) and bool(alphas[0] != alphas[1])
    assert "sigma" not in metrics[-1]["agents_0"].keys()
    other, _ = trained(make_arena(n_groups=2), 0, seed=1, **settings)
    other.load_state_dict(learner.state_dict())
    for one, two in zip(states([learner]), states([other]), strict=True):
        assert torch.equal(one, two)
    alphas = other.updates.optimizers["alphas"]
    held = [*moments_of(alphas, alphas.parameters)[0], *other.log_alphas.values()]
    assert all(bool((x != 0).all()) for x in held)


def test_schedules_of_exploration():
    explore = ExplorationConfig(0.4, 0.2, 0.3, 0.1, annealing=0.5)
    learner, _ = trained(make_arena(), 2, exploration=explore)
    for fraction, epsilon, sigma in (
        (0.0, 0.3, 0.4),
        (0.25, 0.2, 0.3),
        (0.5, 0.1, 0.2),
        (1.0, 0.1, 0.2),
    ):
        learner.set_progress(fraction)
        assert float(learner.explorers[0].epsilon) == pytest.approx(epsilon)
        assert float(learner.explorers[0].sigma) == pytest.approx(sigma)


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (lambda: make_arena(n_groups=2), {"algorithm": "maddpg", "n_step": 3}),
        (make_arena, {"algorithm": "matd3", "bootstrap": "agent", "central_input": "state"}),
        (make_tag, {"algorithm": "matd3", "bootstrap": "agent", "central_input": "team"}),
        (make_arena, {"algorithm": "isac", "replay": ReplayConfig(200, alpha=0.6)}),
        *second_tier_cases(
            "compiled",
            (make_tag, {"algorithm": "itd3", "normalize_observations": True}),
            (
                make_arena,
                {"algorithm": "maddpg", "replay": ReplayConfig(200, alpha=0.6), "n_step": 2},
            ),
            (make_tag, {"algorithm": "masac", "bootstrap": "agent", "central_input": "team"}),
            (lambda: make_arena(n_groups=2), {"algorithm": "masac", "n_step": 2}),
            (lambda: make_arena(n_groups=2), {"algorithm": "matd3", "mixer": MIXER}),
        ),
    ],
)
def test_traced_updates_match_eager_updates(make, settings):
    eager, metrics = trained(make(), **settings)
    traced, others = trained(make(), execution="trace", **settings)
    assert len(traced.updates.programs) == (2 if "td3" in settings["algorithm"] else 1)
    for one, other in zip(states([eager]), states([traced]), strict=True):
        assert torch.equal(one, other)
    for key, value in metrics[-1].items(True, True):
        assert torch.equal(value, others[-1][key]), key


def test_td3_updates_the_actor_every_second_update():
    learner, _ = trained(make_arena(), 2, algorithm="matd3", updates_per_frame=0.025)
    assert learner.updates.count == 1
    fresh, _ = trained(make_arena(), 1, algorithm="matd3")
    for one, other in zip(learner.actors.parameters(), fresh.actors.parameters(), strict=True):
        assert torch.equal(one, other)
    changed = zip(learner.critics.parameters(), fresh.critics.parameters(), strict=True)
    assert any(not torch.equal(one, other) for one, other in changed)
    for one, other in zip(learner.targets.parameters(), fresh.targets.parameters(), strict=True):
        assert torch.equal(one, other)


def test_non_finite_loss_raises():
    learner, _ = trained(make_arena(), 2)
    for parameter in learner.critics.parameters():
        parameter.data.fill_(torch.nan)
    collector = RolloutCollector(make_arena(), learner.actors["agents"], frames_per_batch=40)
    with pytest.raises(NonFiniteError, match=r"'agents'.*loss_value became NaN"):
        learner.learn(collector.rollout())


@pytest.mark.parametrize("bootstrap", ["team", "agent"])
def test_n_step_rewards_after_a_death_depend_on_bootstrap(bootstrap):
    """Against a loop: dead agents get the mean reward of living agents of their group, or 0."""
    env = Arena(4, n_groups=2, seed=0, max_steps=12)
    learner, _ = trained(env, 0, bootstrap=bootstrap, learning_starts=10**6)
    policy = TeamPolicy(learner.actors.values())
    batch = RolloutCollector(env, policy, frames_per_batch=80).rollout()
    learner.learn(batch.clone())
    rows, died = torch.arange(80), 0
    found = learner.replay.look(rows, 3, 0.5)
    [joined] = learner.block.joined.values()
    sizes = [group.n_agents for group in joined.groups]
    for own, group in zip(found["next", joined.name, "reward"].split(sizes, 1), joined.groups):
        for row in rows.tolist():
            t, e = divmod(row, 4)
            total = torch.zeros(group.n_agents)
            for k in range(3):
                reward = batch["next", group.name, "reward"][e, t + k, :, 0].clone()
                alive = ~batch[group.name, "done"][e, t + k, :, 0]
                died += int((~alive).any())
                earned = reward[alive].mean() if bootstrap == "team" and alive.any() else 0.0
                reward[~alive] = earned
                total += 0.5**k * reward
                ends = batch["next", group.name]
                cut = alive & (ends["truncated"] & ~ends["terminated"])[e, t + k, :, 0]
                others = batch["next", "done"][e, t + k]
                if t + k == 19 or bool(others) or bool(cut.any()):
                    break
            torch.testing.assert_close(own[row, :, 0], total)
    assert died > 10


def test_rows_with_high_td_error_are_drawn_more_often():
    learner, _ = trained(make_arena(), 3, replay=ReplayConfig(200, alpha=1.0), learning_starts=0)
    priorities = learner.replay.priorities
    values = priorities.tree.values[: len(learner.replay)]
    assert values.unique().numel() > 20 and float(values.max()) <= float(priorities.highest)
    rows = learner.replay.rows(200, 16)
    drawn = torch.cat([learner.replay.look(own, 1, 0.9)["index"] for own in rows])
    often = torch.bincount(drawn, minlength=len(values)).double()
    assert float(torch.corrcoef(torch.stack([often, values]))[0, 1]) > 0.9


@pytest.mark.parametrize("value", POISON)
@pytest.mark.parametrize("bootstrap", ["team", "agent"])
def test_values_in_masked_slots_have_no_effect(bootstrap, value):
    """On the replay buffer, networks, optimizers, statistics and metrics."""
    settings = {"learning_starts": 0, "bootstrap": bootstrap, "n_step": 2, "algorithm": "matd3"}
    env = Arena(4, n_groups=2, seed=0, max_steps=12)
    one, _ = trained(env, 0, normalize_observations=True, **settings)
    other, _ = trained(env, 0, normalize_observations=True, **settings)
    assert_masked_slots_change_no_bit(one, other, env, value)


def test_turns_with_bootstrap_agent_raise():
    with pytest.raises(ConfigError, match="does not yet credit with bootstrap=agent"):
        trained(Paces(4, seed=0), 1, bootstrap="agent")


@pytest.mark.parametrize("algorithm", ["iddpg", "maddpg"])
@pytest.mark.parametrize("bootstrap", ["team", "agent"])
def test_joined_groups_match_separate_learners(algorithm, bootstrap):
    """One learner of two groups against two learners of one group each, with the same rows."""
    env = make_tag()
    team = TeamSpec.from_env(env)
    settings = {**SMALL, "learning_starts": 0, "bootstrap": bootstrap, "max_grad_norm": 0.05}
    config = OffPolicyConfig(algorithm, **settings)
    both = OffPolicyLearner(team.groups, config, team=team)
    batch = RolloutCollector(env, TeamPolicy(both.actors.values()), frames_per_batch=80).rollout()
    set_same_weights(both.actors, both.critics, both.targets)
    torch.manual_seed(5)
    metrics = both.learn(batch)
    assert int(metrics["agent", "updates"]) == 8
    for name, group in team.groups.items():
        alone = OffPolicyLearner({name: group}, config, team=team)
        set_same_weights(alone.actors, alone.critics, alone.targets)
        torch.manual_seed(5)
        for key, value in alone.learn(batch)[name].items():
            torch.testing.assert_close(metrics[name, key], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"replay.capacity": 5_999}, "capacity is 5999, expected at least frames_per_batch, 6000"),
        ({"n_step": 2_001, "replay.capacity": 120_000}, "n_step is 2001, expected at most 2000"),
    ],
)
def test_too_small_replay_capacity_raises(settings, message):
    learner = {f"learner.{name}": value for name, value in settings.items()}
    with pytest.raises(ConfigError, match=message):
        load_config("vmas_balance_matd3", learner)
    fits = {**learner, "learner.replay.capacity": 6_000 * 60, "learner.n_step": 2_000}
    load_config("vmas_balance_matd3", fits)
