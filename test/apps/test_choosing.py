"""``algorithms_for`` predicts correctly which algorithms train in an environment."""

import dataclasses
import functools
import re
import warnings
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Categorical, Unbounded

import torchrl_marl
from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.apps.choosing import Fit, algorithms_for
from torchrl_marl.apps.cli.main import main
from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.envs import MarlEnv, make_env
from torchrl_marl.envs.toy import Arena
from torchrl_marl.errors import ConfigError, UserError
from torchrl_marl.learners import build_learners
from torchrl_marl.learners.algorithms import ALGORITHMS
from torchrl_marl.learners.happo_config import HAPPOConfig
from torchrl_marl.recipes import load_config

pytestmark = pytest.mark.runs

VALUES = {"qmix", "vdn", "iql", "pqn"}
GRADIENTS = {"mappo", "ippo", "happo", "random"}
EVERY = set(ALGORITHMS.names()) - {"bc", "td3_bc", "iql_offline"}  # of datasets
AGENT, DISCRETE = {"learner.bootstrap": "agent"}, {"env.continuous_actions": False}
# Environment -> algorithms that do not fit, and settings that others need.
WORLDS = {
    "toy/arena": (set(), dict.fromkeys(VALUES, DISCRETE)),
    "toy/kuhn": (EVERY - GRADIENTS, dict.fromkeys(GRADIENTS - {"random"}, AGENT)),
    "toy/speaker_listener": (VALUES, {}),
    "toy/traffic_junction": (
        set(),
        dict.fromkeys(EVERY - {"random", "qmix", "vdn"}, AGENT)
        | {"pqn": AGENT | {"learner.mixer.kind": "none"}},
    ),
    "vmas/simple_tag": (set(), dict.fromkeys(VALUES, DISCRETE)),
}
SMALL = {"minibatch_size": 16, "num_epochs": 1, "learning_starts": 0, "updates_per_frame": 0.05}


@functools.cache
def asked(environment):
    return algorithms_for(environment)


def learn_once(config, env=None):
    """Collects a batch and learns from it as a run; warnings are errors."""
    env = make_env(config.env, seed=0) if env is None else env
    known = {field.name for field in dataclasses.fields(config.learner)}
    small = {name: x for name, x in SMALL.items() if name in known}
    team = TeamSpec.from_env(env)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learners = build_learners(team, dataclasses.replace(config.learner, **small))
        policy = TeamPolicy(actor for learner in learners for actor in learner.actors.values())
        batch = RolloutCollector(env, policy, frames_per_batch=80).next()
        for learner in learners:
            learner.learn(batch)


def settings_of(environment, fit):
    library, _, name = environment.partition("/")
    env = {"env.library": library, "env.name": name, "env.num_envs": 4}
    return {**env, "learner.algorithm": fit.algorithm, **fit.settings}


@pytest.mark.parametrize("environment", WORLDS)
def test_predicted_fit_agrees_with_training(environment):
    if environment.startswith("vmas"):
        pytest.importorskip("vmas")
    found = asked(environment).algorithms
    refused, settings = WORLDS[environment]
    assert {name for name, fit in found.items() if not fit.fits} == refused
    assert {name: fit.settings for name, fit in found.items() if fit.settings} == settings
    for fit in found.values():
        torch.manual_seed(0)
        if fit.fits:
            learn_once(load_config({}, settings_of(environment, fit)))
        else:
            with pytest.raises((UserError, UserWarning)) as error:
                learn_once(load_config({}, settings_of(environment, fit)))
            assert " ".join(fit.reason.split()[:4]) in str(error.value)


class Duel(MarlEnv):
    """A zero-sum game of two agents in one group."""

    def __init__(self, num_envs, **kwargs):
        super().__init__(num_envs, **kwargs)
        self.register_agent(AgentSpec("side", 2, Unbounded((1,)), Categorical(2)))

    def _reset(self, tensordict):
        return TensorDict({"side": {"observation": torch.zeros(self.num_envs, 2, 1)}})

    def _step(self, tensordict):
        first = tensordict["side", "action"][:, :1].unsqueeze(-1).float()
        side = {"observation": torch.zeros(self.num_envs, 2, 1)}
        return TensorDict({"side": {**side, "reward": torch.cat([first, -first], 1)}})


def test_competing_agents_of_one_group_exclude_value_factorization():
    env = Duel(4, max_steps=10, seed=0)
    found = algorithms_for(env)
    assert found.traits.rivals == ("side_0", "side_1")
    assert {name for name, fit in found.algorithms.items() if not fit.fits} == {"qmix", "vdn"}
    assert found.algorithms["pqn"].settings == {"learner.mixer.kind": "none"}
    for learner in ("vdn", "pqn", {"algorithm": "maddpg", "mixer": {"kind": "sum"}}):
        config = load_config({}, {"learner": learner}, own_env=True)
        with pytest.raises(ConfigError, match=r"'side_0' and 'side_1' compete.* of -1\.00 in"):
            learn_once(config, env)
    for learner in ("iql", "maddpg", {"algorithm": "pqn", "mixer": {"kind": "none"}}):
        learn_once(load_config({}, {"learner": learner}, own_env=True), env)


def test_reason_names_groups_that_the_algorithm_fits():
    fit = asked("toy/speaker_listener").algorithms["iql"]
    of_speaker = "for speaker groups.speaker.algorithm=iql fits"
    assert fit.reason == f"its actions are continuous (of listener); {of_speaker}"
    given = {"env.library": "toy", "env.name": "speaker_listener", "learner.algorithm": "ippo"}
    config = load_config({}, {**given, "groups.speaker.algorithm": "iql"})
    team = TeamSpec.from_env(make_env(config.env, seed=0))
    learners = build_learners(team, config.learner, config.groups)
    assert sorted(type(one).__name__ for one in learners) == ["OnPolicyLearner", "ValueLearner"]


def test_traits_from_random_steps():
    traits = asked("toy/traffic_junction").traits
    assert traits.deaths and traits.shared is False and not traits.in_turns
    assert asked("toy/kuhn").traits.in_turns
    assert dict(traits.rows())["state"].startswith("28 numbers")


def test_random_state_and_environment_are_unchanged():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    env = Arena(4, seed=0)
    assert algorithms_for(env).environment == "Arena"
    assert torch.equal(torch.rand(2), expected)
    assert env.rollout(3).shape == (4, 3)


def test_recipes_and_files_are_accepted(tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("env: {library: toy, name: nim}\nlearner: {bootstrap: agent}\n")
    assert torchrl_marl.algorithms_for(mine).environment == "toy/nim"
    found = algorithms_for("toy_matrix_game_happo")
    assert found.environment == "toy/matrix_game"
    assert found.algorithms == {name: Fit(name, True) for name in EVERY}


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            "kuhnn",
            "unknown environment 'kuhnn'; did you mean 'toy/kuhn'? expected "
            "'library/environment', such",
        ),
        ("toy/kun", "unknown toy environment 'kun'; did you mean 'kuhn'?"),
        ("tooy/kuhn", "unknown environment library 'tooy'; did you mean 'toy'?"),
        ("toy/", "unknown environment 'toy/'; expected 'library/environment'"),
        ("external/meet", "external/meet gets its agents from its first client"),
        ("nothing.yaml", "'nothing.yaml' is missing"),
    ],
)
def test_unknown_environment_raises(environment, message, capsys):
    assert main(["list", "algorithms", "--for", environment]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"torchrl-marl: error: {message}") and told.count("\n") == 1


def test_list_algorithms_command(capsys):
    assert main(["list", "algorithms", "--for", "toy/kuhn"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("toy/kuhn:\n  agents   first: 1, second: 1\n")
    assert "\n  mappo   fits with learner.bootstrap=agent  agents act in turns\n" in out
    assert "\n  vdn     does not fit                       agents act in turns" in out
    page = (Path(__file__).parents[2] / "docs" / "choosing.md").read_text()
    shown = re.search(r"^```text\n(toy/kuhn:.*?)^```", page, re.M | re.S)[1].splitlines()
    assert set(shown) - {"  ..."} <= set(out.splitlines())
    assert main(["list", "settings", "--for", "toy/kuhn"]) == 2
    assert "expected: list algorithms --for toy/kuhn." in capsys.readouterr().err


def test_happo_accepts_image_observations():
    team = TeamSpec([AgentSpec("cook", 2, Unbounded((3, 4, 2)), Categorical(2))])
    assert build_learners(team, HAPPOConfig())
