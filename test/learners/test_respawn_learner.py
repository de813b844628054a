"""Learners of agents that respawn: separate lives, dead steps without effect, fresh states."""

from functools import partial

import pytest
import torch
from cycles import Cycles
from echo import Echo
from graph_batches import assert_equal
from learner_twins import (
    EXACT,
    assert_masked_slots_change_no_bit,
    assert_same_learning,
    check_resume_and_read_metrics,
)
from runs import small_config
from support.tiers import second_tier_cases
from tensordict.nn import TensorDictModule
from torchrl.modules import set_recurrent_mode

from torchrl_marl import TeamSpec
from torchrl_marl.apps.cli import main as cli
from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.envs import with_memory
from torchrl_marl.envs.remember import hidden_sizes
from torchrl_marl.envs.toy import Arena
from torchrl_marl.learners import OffPolicyConfig, OnPolicyConfig, TeamReplay, build_learners
from torchrl_marl.learners.off_policy_config import ParallelQConfig, ValueConfig
from torchrl_marl.modules import (
    MemoryConfig,
    NetworkConfig,
    QNetworkConfig,
    RecurrentCriticConfig,
    RecurrentNetworkConfig,
    make_critic,
)
from torchrl_marl.objectives import TeamGAE
from torchrl_marl.recipes import read_config

HALF = {"gamma": 0.5, "lmbda": 0.5}


class FromAge(Echo):
    """The value of an age a is 1 - a / 10; the age is the second observed number."""

    def forward(self, x, mask):
        return super().forward(x[..., 1:], mask)


def estimated(env, n_steps, bootstrap):
    batch, group = env.rollout(n_steps), TeamSpec.from_env(env).groups["cat"]
    keys = [group.observation_key, group.mask_key]
    critic = TensorDictModule(FromAge(), keys, [group.key("state_value")])
    return TeamGAE(value_network=critic, group=group, bootstrap=bootstrap, **HALF)(batch)["cat"]


@pytest.mark.parametrize("poison", [0.0, float("nan")])
def test_lives_of_an_agent_are_separate_episodes(poison):
    """Rewards 1, 2, 3 and values 1, 0.9, 0.8, by hand; the last step is terminal."""
    found = estimated(Cycles(1, lives=(3, 4), gap=2, poison=poison), 11, "agent")
    advantage = [(1 + 0.45 - 1) + 0.25 * (1.5 + 0.25 * 2.2), 1.5 + 0.25 * 2.2, 3 - 0.8]
    target = [advantage[0] + 1, advantage[1] + 0.9, 3.0]
    for first in (0, 5):
        life = slice(first, first + 3)
        for leaf, expected in (("advantage", advantage), ("value_target", target)):
            torch.testing.assert_close(found[leaf][0, life, 0, 0], torch.tensor(expected))
    assert found["loss_mask"][0, :, 0].int().tolist() == [1, 1, 1, 0, 0, 1, 1, 1, 0, 0, 1]


def test_team_return_continues_through_steps_without_living_agents():
    """Steps 2 to 4 have the discounted value of step 5; step 6 has no next value."""
    found = estimated(Cycles(1, lives=(2, 2), gap=3), 7, "team")
    delta = [1 + 0.5 * 0.9 - 1, 2 + 0.5**4 * 1.0 - 0.9, 0, 0, 0, 1 + 0.5 * 0.9 - 1, 2 - 0.9]
    expected, later_ones = [], 0.0
    for own in reversed(delta):
        later_ones = own + 0.25 * later_ones
        expected.insert(0, later_ones)
    for agent in (0, 1):
        advantage = found["advantage"][0, :, agent, 0]
        torch.testing.assert_close(advantage, torch.tensor(expected))


def test_team_return_is_the_discounted_sum_over_all_lives():
    env = Cycles(1, lives=(2, 2), gap=3, max_steps=9)
    batch, group = env.rollout(9), TeamSpec.from_env(env).groups["cat"]
    batch["next", "terminated"] = batch["next", "done"]  # no bootstrap
    critic = make_critic(group, NetworkConfig([8]))
    estimator = TeamGAE(value_network=critic, group=group, gamma=0.5, lmbda=1.0)
    target = estimator(batch)["cat", "value_target"][0, :, :, 0]
    torch.testing.assert_close(target[0], torch.full((2,), 1 + 2 / 2 + 1 / 2**5 + 2 / 2**6))
    torch.testing.assert_close(target[6], torch.full((2,), 2.0))


# ---------------------------------------------------------------------------------- memory


def memory_policy(env):
    torch.manual_seed(0)
    actor = RecurrentNetworkConfig([8], memory=MemoryConfig("gru", size=6))
    critic = RecurrentCriticConfig([8], memory=MemoryConfig("gru", size=4))
    config = OnPolicyConfig(
        algorithm="ippo",
        actor=actor,
        critic=critic,
        window=5,
        minibatch_size=10,
        num_epochs=1,
        bootstrap="agent",
    )
    learners = build_learners(TeamSpec.from_env(env), config)
    return learners, TeamPolicy(a for learner in learners for a in learner.actors.values())


@pytest.mark.parametrize("poison", [0.0, float("nan")])
def test_recurrent_states_restart_with_each_life(poison):
    env = Cycles(2, lives=(3, 4), gap=2, max_steps=10, poison=poison)
    [learner], policy = memory_policy(env)
    env = with_memory(env, hidden_sizes(policy))
    batch = RolloutCollector(env, policy, frames_per_batch=20).rollout()
    hidden = batch["cat", "hidden"]
    assert hidden[:, 1:3, 0].abs().sum() > 0
    torch.testing.assert_close(hidden[:, 6:8, 0], hidden[:, 1:3, 0], **EXACT)
    # As sequences, of the actor and the critic.
    group = learner.groups["cat"]
    loss = next(iter(learner.losses.values()))
    data = learner.block.gather(batch)
    with torch.no_grad(), set_recurrent_mode(True):
        logits = learner.actors["cat"].get_dist(batch.copy()).logits
    torch.testing.assert_close(logits[:, 5:8, 0], logits[:, :3, 0])
    loss.value_estimator(data)
    value = data[group.key("state_value")]
    torch.testing.assert_close(value[:, 5:8, 0], value[:, :3, 0])
    learner.learn(batch)
    assert all(p.isfinite().all() for p in learner.parameters())


# ---------------------------------------------------------------------------------- replay


def replayed(by_life):
    """4-step returns from each of twelve steps, in which agents live 3 and 5 steps."""
    env = Cycles(1, max_steps=12)
    leaves = ("observation", "mask", "action")
    keys = [("cat", leaf) for leaf in leaves]
    keys += [("next", "cat", leaf) for leaf in ("observation", "mask", "reward", "terminated")]
    replay = TeamReplay(12, 1, keys, by_life=by_life)
    replay.extend(env.rollout(12))
    return replay.look(torch.arange(12), n_step=4, gamma=0.5)


def test_n_step_returns_end_at_a_death():
    """Agent 0 dies in steps 2 and 7, agent 1 in step 4; all returns end there."""
    found = replayed(True)
    reward, terminated = (found["next", "cat", leaf][..., 0] for leaf in ("reward", "terminated"))
    assert found["discount"].flatten().log2().neg().int().tolist() == [
        *(3, 2, 1),
        *(2, 1),
        *(3, 2, 1),
        *(4, 3, 2, 1),
    ]
    assert reward[0].tolist() == [1 + 2 / 2 + 3 / 4] * 2 and terminated[0].tolist() == [True, False]
    assert reward[5].tolist() == [1 + 2 / 2 + 3 / 4, 1 / 4] and terminated[5, 0]
    assert reward[3].tolist() == [0, 4 + 5 / 2] and terminated[3].tolist() == [False, True]


def test_n_step_returns_continue_after_a_death_without_by_life():
    found = replayed(False)
    assert found["discount"].flatten()[:3].tolist() == [0.5**4] * 3
    assert not found["next", "cat", "terminated"][2, 0]  # agent 0 has respawned


@pytest.mark.parametrize("bootstrap", ["agent", "team"])
def test_returns_end_at_deaths_with_bootstrap_agent(bootstrap):
    [learner] = build_learners(
        TeamSpec.from_env(Arena(4, respawn=2)),
        OffPolicyConfig(actor=NetworkConfig([8]), bootstrap=bootstrap, learning_starts=0),
    )
    assert learner._make_replay(4).by_life == (bootstrap == "agent")


# ---------------------------------------------------------------------------------- poison

SMALL = {"minibatch_size": 40, "bootstrap": "team"}
OFF = {**SMALL, "learning_starts": 0, "updates_per_frame": 0.02}
ALGORITHMS = {
    "mappo": lambda **own: OnPolicyConfig(actor=NetworkConfig([8]), **SMALL | own),
    "pqn": lambda **own: ParallelQConfig(actor=QNetworkConfig([8]), **SMALL | own),
    "qmix": lambda **own: ValueConfig(actor=QNetworkConfig([8]), **OFF | own),
    "maddpg": lambda **own: OffPolicyConfig(actor=NetworkConfig([8]), **OFF | own),
}
CASES = [(name, "team") for name in ALGORITHMS] + [("mappo", "agent"), ("maddpg", "agent")]


@pytest.mark.parametrize(("algorithm", "bootstrap"), CASES)
def test_values_between_lives_have_no_effect(algorithm, bootstrap):
    env = Arena(8, n_agents=3, lives=1, respawn=2, seed=0)
    config = ALGORITHMS[algorithm](bootstrap=bootstrap)
    twins = []
    for _ in range(2):
        torch.manual_seed(0)
        twins += build_learners(TeamSpec.from_env(env), config)
    assert_masked_slots_change_no_bit(*twins, env, float("nan"))


def trained(env, execution="eager"):
    learners, policy = memory_policy(env)
    env = with_memory(env, hidden_sizes(policy))
    collector = RolloutCollector(env, policy, frames_per_batch=20, execution=execution)
    batches, metrics = [], []
    for _ in range(3):
        batches.append(collector.rollout())
        metrics += [learner.learn(batches[-1]) for learner in learners]
    assert collector.execution == execution
    return batches, (learners, metrics)


def test_observations_between_lives_have_no_effect():
    _, one = trained(Cycles(4, max_steps=13))
    _, other = trained(Cycles(4, max_steps=13, poison=float("nan")))
    assert_same_learning(one, other, **EXACT)


# ----------------------------------------------------------------------------------- runs


def test_traced_run_matches_eager_run():
    eager, one = trained(Cycles(4, max_steps=13))
    traced, other = trained(Cycles(4, max_steps=13), "trace")
    for batch, found in zip(eager, traced):
        assert_equal(found, batch)
    assert_same_learning(one, other, **EXACT)


def recipe(folder, algorithm):
    learner = {"algorithm": algorithm, "actor.memory": "gru", "window": 5, "minibatch_size": 20}
    env = {"num_envs": 8, "max_steps": 13, "kwargs": {"lives": 1, "respawn": 2}}
    if algorithm == "mappo":
        config = small_config(total_frames=320, folder=str(folder), env=env)
        return read_config(config, {"learner": learner})
    learner |= {"learning_starts": 80, "updates_per_frame": 0.05, "replay.capacity": 160}
    config = {"total_frames": 320, "frames_per_batch": 80, "folder": str(folder), "env": env,
              "evaluation": {"episodes": 4}, "threads": 1, "logging": {"progress": False},
              "checkpoint": {"every_iterations": 0}}  # fmt: skip
    return read_config(read_config("toy_arena_mappo", config), {"learner": learner})


@pytest.mark.parametrize("algorithm", ["mappo", *second_tier_cases("runs", "qmix")])
def test_run_resumes_exactly(algorithm, tmp_path):
    make = partial(recipe, algorithm=algorithm)
    assert len(check_resume_and_read_metrics(make, tmp_path, (2,))) == 4


def test_command_line_trains_with_respawn(tmp_path, capsys):
    words = ["env.kwargs.respawn=3", "env.num_envs=8", "total_frames=160", "frames_per_batch=80"]
    words += ["learner.minibatch_size=40", "evaluation.episodes=4", f"folder={tmp_path / 'run'}"]
    assert cli.main(["train", "toy_arena_mappo", *words]) == 0
    assert "respawn: 3" in (tmp_path / "run" / "config.yaml").read_text()
