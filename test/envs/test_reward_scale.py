"""Rewards are scaled in training and unscaled in evaluations."""

import csv

import pytest
import torch
from torchrl.data import Bounded
from torchrl.envs import TransformedEnv, check_env_specs

import torchrl_marl
from torchrl_marl import AgentSpec
from torchrl_marl.envs import MarlEnv, check_marl_env, make_env
from torchrl_marl.envs.config import EnvConfig
from torchrl_marl.envs.randomization import randomized
from torchrl_marl.envs.reward_scale import scaled
from torchrl_marl.errors import ConfigError
from torchrl_marl.recipes import load_config
from torchrl_marl.specs import TeamSpec
from torchrl_marl.training.evaluation import play

SMALL = {
    "threads": 1,
    "total_frames": 160,
    "frames_per_batch": 80,
    "env.num_envs": 4,
    "env.max_steps": 10,
    "learner.minibatch_size": 40,
    "learner.num_epochs": 1,
    "evaluation.episodes": 4,
    "logging.progress": False,
}


def env_of(scale, **kwargs):
    config = EnvConfig("toy", "arena", num_envs=3, reward_scale=scale, **kwargs)
    return make_env(config, seed=0)


def test_rewards_of_all_groups_are_multiplied():
    plain, scaled = (env_of(x, kwargs={"n_groups": 2}) for x in (1.0, 0.25))
    assert not isinstance(plain, TransformedEnv)
    rewards = []
    for env in (plain, scaled):
        torch.manual_seed(1)
        td = env.rollout(6, break_when_any_done=False)
        rewards.append([td["next", name, "reward"] for name in env.group_map])
    assert len(rewards[0]) == 2
    for own, expected in zip(rewards[1], rewards[0], strict=True):
        assert bool(expected.abs().sum() > 0)
        assert torch.equal(own, 0.25 * expected)


class Tide(MarlEnv):
    """Rewards from -1 to 1, and observations from 0 to 1, with declared bounds."""

    def __init__(self):
        super().__init__(3, max_steps=5, seed=0)
        one = Bounded(-1, 1, (1,))
        self.register_agent(AgentSpec("boat", 2, Bounded(0, 1, (2,)), one, reward_spec=one))

    def _reset(self, tensordict):
        return {"boat": {"observation": torch.rand(3, 2, 2)}}

    def _step(self, tensordict):
        reward = tensordict["boat", "action"].clone()
        return {"boat": {"observation": torch.rand(3, 2, 2), "reward": reward}}


def test_bounded_rewards_are_scaled():
    env = scaled(Tide(), 3.0)
    check_marl_env(env, n_steps=20)
    td = env.rollout(5)
    assert torch.equal(td["next", "boat", "reward"], 3 * td["boat", "action"])
    assert td["next", "boat", "reward"].abs().max() > 1


def test_noise_leaves_the_bounds_of_observations():
    env = randomized(Tide(), {"observation_noise": 0.5})
    check_marl_env(env, n_steps=20)
    check_env_specs(env)
    assert env.rollout(5)["boat", "observation"].abs().max() > 1
    bounded = randomized(Tide(), {"observation_delay": 1}).full_observation_spec
    assert isinstance(bounded["boat", "observation"], Bounded)


@pytest.mark.parametrize("execution", ["eager", "trace"])
def test_metrics_are_scaled_and_evaluations_are_not(execution, tmp_path):
    """Before the first update both runs act alike, so the first row differs by the factor."""
    rows, summaries = [], []
    for scale in (1.0, 0.5):
        settings = SMALL | {"execution": execution, "env.reward_scale": scale}
        folder = tmp_path / f"{scale}"
        run = torchrl_marl.train("vmas_balance_mappo", folder=folder, **nested(settings))
        with open(folder / "metrics.csv", encoding="utf-8") as file:
            rows.append(float(next(csv.DictReader(file))["agents/episode_reward"]))
        summaries.append(run.summary)
    assert rows[1] == pytest.approx(0.5 * rows[0], rel=1e-5)
    for key in ("return_before", "return_random", "return_heuristic"):
        assert summaries[0][key] == summaries[1][key]


def nested(settings):
    found = {}
    for name, value in settings.items():
        *path, last = name.split(".")
        section = found
        for part in path:
            section = section.setdefault(part, {})
        section[last] = value
    return found


def test_shared_environment_is_scaled_only_in_training():
    """For simulators that allow one instance per process, such as Isaac Lab."""
    env, plain = (env_of(scale, max_steps=4) for scale in (0.25, 1.0))
    team = TeamSpec.from_env(env)
    found, expected = (
        play(one, None, team, episodes=3, deterministic=False, seed=1).total for one in (env, plain)
    )
    assert torch.equal(found, expected) and bool(expected.abs().sum() > 0)
    rewards = []
    for one in (env, plain):
        one.set_seed(3)
        torch.manual_seed(1)
        rewards.append(one.rollout(3)["next", "agents", "reward"])
    assert torch.equal(rewards[0], 0.25 * rewards[1])


def test_custom_environment_is_scaled():
    own = EnvConfig("torchrl_marl.envs.toy.arena:Arena", "", num_envs=3, reward_scale=0.25)
    plain = EnvConfig("torchrl_marl.envs.toy.arena:Arena", "", num_envs=3)
    rewards = []
    for config in (own, plain):
        env = make_env(config, seed=0)
        torch.manual_seed(1)
        rewards.append(env.rollout(3)["next", "agents", "reward"])
    assert torch.equal(rewards[0], 0.25 * rewards[1]) and bool(rewards[1].abs().sum() > 0)


@pytest.mark.parametrize("setting", [{"reward_scale": 0.5}, {"randomize": {"action_noise": 0.1}}])
def test_settings_ignored_by_environment_objects_are_refused(setting):
    from mpe2 import simple_spread_v3

    (key,) = setting
    overrides = {f"env.{key}": setting[key], "env.num_envs": 2, "total_frames": 100}
    with pytest.raises(ConfigError, match=f"env.{key}.* is given with an environment object"):
        torchrl_marl.train("vmas_balance_mappo", env=simple_spread_v3.parallel_env(), **overrides)


@pytest.mark.parametrize("scale", [0.0, -1.0, "half"])
def test_scale_must_be_a_positive_number(scale):
    with pytest.raises(ConfigError, match=r"env\.reward_scale is .*, expected"):
        load_config("vmas_balance_mappo", {"env.reward_scale": scale})
