"""Whole runs of heterogeneous teams: exact resume, random groups, invalid settings."""

import pytest
import torch
from meadow import Meadow
from runs import assert_equal, assert_same_run, final_state, small_config, table
from support.tiers import first_tier_cases
from torchrl.envs.utils import MarlGroupMapType

from torchrl_marl.envs import VmasEnv
from torchrl_marl.errors import ConfigError
from torchrl_marl.learners import FixedPolicy
from torchrl_marl.recipes import validate
from torchrl_marl.training import Run, iterate, train
from torchrl_marl.training.trainer import resume, resume_training

COMM = {"num_adversaries": 2, "num_good_agents": 1, "num_food": 1, "num_forests": 1}


def arena(**kwargs):
    settings = {"n_agents": 4, "years": 3, "lives": 2, "late_spawn": 1, "kinds": 2}
    return {"env.kwargs": settings | kwargs}


def comm():
    """All agents in one group, with different observations and actions."""
    env = VmasEnv("simple_world_comm", num_envs=1, **COMM, seed=0)
    agents = [name for names in env.group_map.values() for name in names]
    return small_config(
        "vmas_simple_world_comm_mappo", **{"env.kwargs": COMM, "env.group_map": {"all": agents}}
    )


WORLDS = {
    "heterogeneous": lambda: small_config(
        **arena(action_mask=True, n_actions=6), **{"learner.critic.architecture": "set"}
    ),
    "joined": lambda: small_config(
        **arena(n_groups=2),
        **{
            "learner.central_input": "team",
            "learner.critic.architecture": "attention",
            "learner.normalize_observations": True,
            "learner.bootstrap": "agent",
        },
    ),
    "one random": lambda: small_config(
        **arena(n_groups=2), groups={"agents_1": {"algorithm": "random"}}
    ),
    "all in one": comm,
    "own states": lambda: small_config(
        **{
            "env.library": "meadow:Meadow",
            "env.kwargs": {"layout": "one", "states": "own"},
            "learner.central_input": "agent_state",
        }
    ),
}


def at(config, folder, **overrides):
    return small_config(config, folder=str(folder), total_frames=320, **overrides)


@pytest.mark.parametrize("world", first_tier_cases({"one random"}, WORLDS, "runs"))
def test_resume_is_exact(world, tmp_path):
    config = WORLDS[world]()
    whole = train(at(config, tmp_path / "whole"))
    for iteration in iterate(at(config, tmp_path / "parts")):
        if iteration.number == 2:
            break
    torch.rand(7)
    resumed = resume(tmp_path / "parts")
    assert_same_run(whole.folder, resumed.folder)
    rows = table(whole.folder / "metrics.csv")
    assert [int(row["iteration"]) for row in rows] == [1, 2, 3, 4]
    run = Run.load(whole.folder)
    assert_equal(run.evaluate(episodes=4), Run.load(resumed.folder).evaluate(episodes=4))


def test_same_settings_give_the_same_run(tmp_path):
    config = WORLDS["joined"]()
    one, two = (train(at(config, tmp_path / name)) for name in "ab")
    assert_same_run(one.folder, two.folder)


def test_random_group_is_not_trained(tmp_path):
    run = train(at(WORLDS["one random"](), tmp_path / "run"))
    training = resume_training(tmp_path / "run", None)
    assert [type(x) is FixedPolicy for x in training.learners] == [False, True]
    learned = {key.split("/")[0] for row in table(run.folder / "metrics.csv") for key in row}
    assert {"agents_0", "agents_1"} <= learned
    columns = table(run.folder / "metrics.csv")[0]
    assert "agents_0/loss_critic" in columns
    assert not [key for key in columns if key.startswith("agents_1/loss")]
    assert not final_state(run.folder)["learners"][1]


@pytest.mark.runs
@pytest.mark.parametrize("layout", ["one", "two", "three"])
def test_user_environment_with_heterogeneous_agents_trains(layout, tmp_path):
    """The env has lazily stacked groups. The policy acts in lazy and padded ones."""
    env = Meadow(8, layout, seed=0, max_steps=6)
    config = at(small_config(), tmp_path / "run", **{"learner.central_input": "team"})
    run = train(config, env=env)
    rows = table(run.folder / "metrics.csv")
    frames = [int(row["agent_frames"]) for row in rows]
    assert 0 < frames[0] < 80 * env.n
    with torch.no_grad():
        rollout = Meadow(3, layout, seed=1).rollout(4, run.policy)
    for group in env.group_map:
        assert rollout[group].shape == (3, 4, len(env.group_map[group]))


def test_vmas_group_of_all_agents_trains(tmp_path):
    env = VmasEnv(
        "simple_tag", num_envs=8, max_steps=5, seed=0, group_map=MarlGroupMapType.ALL_IN_ONE_GROUP
    )
    run = train(at(small_config(), tmp_path / "run"), env=env)
    rollout = env.rollout(3, run.policy)
    sizes = [x.shape[-1] for x in rollout.get(("agents", "observation"), as_list=True)]
    assert len(set(sizes)) == 2


# ---------------------------------------------------------------------------------- bad input

REFUSED = {
    "too few networks": (
        {"learner.actor": {"sharing": "index", "sharing_index": [0, 1]}},
        "actor: sharing_index has 2 entries, expected 4",
    ),
    "more clusters than agents": (
        {"learner.actor": {"sharing": "clusters", "n_clusters": 9, "clustering_frames": 40}},
        "n_clusters is 9, expected 1 to 4",
    ),
    "a word": ({"learner.actor.sharing": "gruop"}, "learner.actor.sharing is 'gruop'.*'group'"),
    "attention of one": (
        {"learner.algorithm": "ippo", "learner.critic.architecture": "attention"},
        "learner.critic.architecture is 'attention'.*learner.algorithm=mappo",
    ),
    "a team's value of one": (
        {"learner.algorithm": "ippo", "learner.critic.value_per": "team"},
        "learner.critic.value_per is 'team'.*learner.algorithm=mappo",
    ),
    "a team's value of each": (
        {"learner.critic": {"value_per": "team", "sharing": "none"}},
        "learner.critic.value_per is 'team'.*learner.critic.sharing=group",
    ),
    "state of a set": (
        {"learner.central_input": "state", "learner.critic.architecture": "set"},
        "learner.critic.architecture is 'set'.*central_input=observations",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_settings_raise(name, tmp_path):
    settings, message = REFUSED[name]
    config = at(small_config(**arena()), tmp_path / "run", **settings)
    with pytest.raises(ConfigError, match=message):
        validate(config)  # raises if no environment is needed to see it
        train(config)


def test_state_critic_in_env_without_state_raises(tmp_path):
    class Stateless(Meadow):
        def register_state(self, spec):
            pass

        def _observe(self):
            seen = super()._observe()
            del seen["state"]
            return seen

    config = at(small_config(), tmp_path / "run", **{"learner.central_input": "state"})
    with pytest.raises(ConfigError, match="group 'herd': critic: .*no 'state'.*central_input"):
        train(config, env=Stateless(8, seed=0))
