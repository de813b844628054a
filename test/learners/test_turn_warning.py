"""Bootstrap "team" in a turn-based environment warns once."""

import warnings
from pathlib import Path

import pytest
import torch

from torchrl_marl import TeamSpec
from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.envs import make_env
from torchrl_marl.envs.toy import Arena, Nim, Paces
from torchrl_marl.learners import OnPolicyConfig, build_learners
from torchrl_marl.learners.off_policy_config import ValueConfig
from torchrl_marl.learners.offline_config import ImitationConfig
from torchrl_marl.modules import NetworkConfig


def learn(env, bootstrap, n=2):
    config = OnPolicyConfig(
        actor=NetworkConfig([8]),
        critic=NetworkConfig([8]),
        bootstrap=bootstrap,
        minibatch_size=40,
        num_epochs=1,
    )
    return told_of_turns(env, config, n)


def told_of_turns(env, config, n):
    learners = build_learners(TeamSpec.from_env(env), config)
    policy = TeamPolicy(actor for learner in learners for actor in learner.actors.values())
    collector = RolloutCollector(env, policy, frames_per_batch=40)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(n):
            batch = collector.next()
            for learner in learners:
                learner.learn(batch)
    return [str(w.message) for w in caught if "turns" in str(w.message)]


@pytest.mark.parametrize("world", [Nim, lambda n, **kw: Paces(n, max_steps=20, **kw)])
def test_team_bootstrap_in_turn_based_environment_warns_once(world):
    torch.manual_seed(0)
    (text,) = learn(world(4, seed=0), "team")
    assert "use learner.bootstrap=agent" in text
    assert not learn(world(4, seed=0), "agent")


def test_iql_in_turns_suggests_an_algorithm_with_credit():
    config = ValueConfig(algorithm="iql", learning_starts=0, minibatch_size=16)
    (text,) = told_of_turns(Nim(4, seed=0), config, n=1)
    assert "use learner.algorithm=mappo with learner.bootstrap=agent" in text


def test_behavior_cloning_in_turns_does_not_warn():
    """Behavior cloning reads no rewards and has no setting ``bootstrap`` to suggest."""
    config = ImitationConfig(minibatch_size=16)
    assert not told_of_turns(Nim(4, seed=0), config, n=1)


def test_tutorial_names_the_bootstrap_setting_for_turns():
    """The game of its section on turns, with the default setting and with the named one."""
    pytest.importorskip("pettingzoo")
    text = (Path(__file__).parents[2] / "tutorials" / "05_your_environment.ipynb").read_text(
        "utf-8"
    )
    section = text.partition("## 3. Turn-based games")[2].partition("## 4.")[0]
    assert "`learner.bootstrap=agent`" in section and "nothing to be set" not in section
    (told,) = learn(make_env("pettingzoo/classic/connect_four_v3", num_envs=4, seed=0), "team")
    assert "use learner.bootstrap=agent" in told and OnPolicyConfig().bootstrap == "team"
    assert not learn(make_env("pettingzoo/classic/connect_four_v3", num_envs=4, seed=0), "agent")


def test_deaths_and_late_spawns_do_not_warn():
    torch.manual_seed(0)
    assert not learn(Arena(4, n_agents=3, years=2, late_spawn=2, seed=0), "team", n=3)
