"""Invalid arguments of the Python interface raise an error of one sentence."""

from pathlib import Path

import pytest
from torch import nn

import torchrl_marl
from torchrl_marl.errors import ConfigError
from torchrl_marl.recipes import load_config
from torchrl_marl.training.run import Run


@pytest.fixture
def run():
    """A run without a trained policy; the tests only pass invalid arguments."""
    return Run(Path("run"), load_config("toy_arena_mappo"), nn.Module(), {})


@pytest.mark.parametrize("door", [torchrl_marl.train, torchrl_marl.iterate, load_config])
@pytest.mark.parametrize("recipe", [3, None, ["toy_arena_mappo"]])
def test_invalid_recipe_raises(door, recipe):
    with pytest.raises(ConfigError, match=r"^recipe is .*, expected a recipe's name, the path"):
        door(recipe)


def test_resume_requires_a_path(run):
    with pytest.raises(ConfigError, match=r"run folder is Run\(.*expected a path; give run.folder"):
        torchrl_marl.resume(run)
    with pytest.raises(ConfigError, match="run folder is 3, expected a path; give the folder that"):
        torchrl_marl.resume(3)


@pytest.mark.parametrize("episodes", ["5", 2.5, 0, -1, [5]])
def test_evaluate_with_invalid_episodes_raises(run, episodes):
    message = "^episodes is .*, expected a whole number, 1 or more; use episodes=100.$"
    with pytest.raises(ConfigError, match=message):
        run.evaluate(episodes=episodes)


def test_evaluate_with_invalid_seed_raises(run):
    with pytest.raises(ConfigError, match="^seed is 'a', expected a whole number; use seed=0.$"):
        run.evaluate(seed="a")


def test_env_kwargs_with_an_environment_object_raise(tmp_path):
    script = pytest.importorskip("scripted").Script
    world = script("bob", [{}])
    given = {"env.kwargs.n_agents": 3}
    for env in (world, lambda: world):
        with pytest.raises(ConfigError, match="^env.kwargs.n_agents is given with an environment"):
            torchrl_marl.train("toy_arena_mappo", env=env, folder=str(tmp_path / "run"), **given)
    assert not (tmp_path / "run").exists()


class TestAdvice:
    """Messages suggest the value of the recipe, not the default of the setting."""

    @pytest.mark.parametrize(
        ("override", "advice"),
        [
            ({"learner.minibatch_size": 0}, "use learner.minibatch_size=320."),
            ({"groups.agents.minibatch_size": 0}, "use groups.agents.minibatch_size=320."),
            ({"env.num_envs": 0}, "use env.num_envs=32."),
            ({"learner.actor.num_cells": [0]}, "use learner.actor.num_cells=[64,64]."),
            ({"checkpoint.keep": 0}, "use checkpoint.keep=2."),
        ],
    )
    def test_suggests_value_of_the_recipe(self, override, advice):
        with pytest.raises(ConfigError) as error:
            load_config("toy_arena_mappo", override)
        assert str(error.value).endswith(advice)

    def test_suggests_default_if_the_recipe_is_invalid(self):
        with pytest.raises(ConfigError, match="use learner.num_epochs=6.$"):
            load_config({"learner": {"num_epochs": 0}}, {"seed": 1})

    def test_suggests_default_of_the_chosen_algorithm(self):
        """The recipe has another algorithm, so its values do not apply."""
        with pytest.raises(ConfigError, match="use learner.tau=0.005.$"):
            load_config("toy_arena_mappo", {"learner.algorithm": "maddpg", "learner.tau": 0})


class TestStore:
    """A replay buffer larger than memory is refused before a file is written."""

    def test_oversized_replay_buffer_is_refused(self, tmp_path):
        folder = tmp_path / "run"
        with pytest.raises(ConfigError) as error:
            torchrl_marl.train(
                "toy_arena_mappo",
                folder=str(folder),
                **{"learner.algorithm": "maddpg", "learner.replay.capacity": 10**14},
            )
        found, fix = str(error.value).split("; use learner.replay.capacity=")
        assert found.startswith("learner.replay.capacity is 100,000,000,000,000: the replay buffer")
        assert " B a step, takes " in found and "of memory" in found
        assert not folder.exists()
        load_config(
            "toy_arena_mappo",
            {"learner.algorithm": "maddpg", "learner.replay.capacity": int(fix.rstrip("."))},
        )
