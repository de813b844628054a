"""Runs with recurrent networks: settings, training, and exact resume in mid-episode."""

from functools import partial

import pytest
import torch
from learner_twins import check_resume_and_read_metrics
from runs import small_config
from support.tiers import second_tier_cases

import torchrl_marl
from torchrl_marl.envs import make_env, with_memory
from torchrl_marl.errors import ConfigError
from torchrl_marl.recipes import load_config, read_config, validate
from torchrl_marl.settings import parse_overrides
from torchrl_marl.training import Run

MEMORY = {"actor.memory": "gru", "critic.memory": "lstm", "window": 5, "minibatch_size": 20}


def recipe(folder, **overrides):
    learner = {**MEMORY, **overrides.pop("learner", {})}
    config = small_config(total_frames=320, folder=str(folder), **overrides)
    return read_config(config, {"learner": learner})


@pytest.mark.parametrize("algorithm", ["mappo", *second_tier_cases("runs", "happo")])
def test_run_with_memory_resumes_exactly_in_mid_episode(algorithm, tmp_path):
    make = partial(recipe, learner={"algorithm": algorithm})
    rows = check_resume_and_read_metrics(make, tmp_path, (1, 2))
    assert len(rows) == 4


@pytest.mark.parametrize(
    "algorithm", ["qmix", "masac", *second_tier_cases("runs", "haddpg", "hatd3", "hasac")]
)
def test_off_policy_run_with_memory_resumes_exactly(algorithm, tmp_path):
    learner = {"algorithm": algorithm, "learning_starts": 80, "updates_per_frame": 0.05,
               "actor.memory": "gru", "actor.num_cells": [8], "window": 5, "burn_in": 2,
               "minibatch_size": 20, "replay.capacity": 160}  # fmt: skip

    def make(folder, **_):
        config = {"total_frames": 320, "frames_per_batch": 80, "folder": str(folder),
                  "env": {"num_envs": 8, "max_steps": 13}, "evaluation": {"episodes": 4},
                  "threads": 1, "checkpoint": {"every_iterations": 0},
                  "logging": {"progress": False}}  # fmt: skip
        return read_config(read_config("toy_arena_mappo", config), {"learner": learner})

    rows = check_resume_and_read_metrics(make, tmp_path, (2,))
    assert len(rows) == 4


def test_loaded_run_with_memory_is_evaluated(tmp_path):
    torchrl_marl.train(recipe(tmp_path / "run"))
    run = Run.load(tmp_path / "run")
    assert run.evaluate(episodes=4)["episodes"] == 4
    for env in (run.make_env(8), with_memory(make_env(run.config.env, seed=1), run.policy)):
        with torch.no_grad():
            rollout = env.rollout(6, run.policy)
        assert len(rollout) == 8 and (rollout["agents", "hidden"][:, 1:] != 0).any()


def test_memory_in_the_critic_alone(tmp_path):
    config = recipe(tmp_path / "run", learner={"actor.memory": "none"})
    run = torchrl_marl.train(config)
    assert run.summary["frames"] == 320


def read(*texts):
    config = read_config("toy_arena_mappo", parse_overrides(texts))
    validate(config)
    return config


def test_memory_settings_on_the_command_line():
    config = read("learner.actor.memory=gru", "learner.actor.memory.size=32", "learner.window=20",
                  "learner.critic.memory=lru")  # fmt: skip
    actor, critic = config.learner.actor.memory, config.learner.critic.memory
    assert (actor.kind, actor.size, critic.kind) == ("gru", 32, "lru")


@pytest.mark.parametrize(("texts", "words"), [
    (["learner.actor.memory=gruu"], "learner.actor.memory.kind is 'gruu'.*did you mean 'gru'"),
    (["learner.actor.memory=gru", "learner.window=7", "learner.minibatch_size=322"],
     "20 steps of 32 envs; use frames_per_batch=672"),
    (["learner.actor.memory=gru", "learner.window=20", "learner.minibatch_size=330"],
     "use learner.minibatch_size=340, or learner.window=15"),
    (["learner.actor.memory=gru", "learner.window=7"], "=322, or learner.window=5"),
    (["learner=maddpg", "learner.critic.memory=gru"], "read only where learner.algorithm is"),
    (["learner.window=10"], "read only where learner.actor.memory.kind or"),
    (["learner.actor.memory=lru", "learner.actor.memory.size=5", "learner.window=20"],
     "use learner.actor.memory.size=6"),
    (["learner.critic.memory=gru", "learner.critic.architecture=set", "learner.window=20"],
     "use learner.critic.architecture=mlp"),
], ids=str)  # fmt: skip
def test_invalid_memory_settings_raise(texts, words):
    with pytest.raises(ConfigError, match=words):
        load_config("toy_arena_mappo", parse_overrides(texts))


if __name__ == "__main__":
    pytest.main([__file__])
