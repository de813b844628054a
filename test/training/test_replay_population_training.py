"""Off-policy populations: run folders, exact resume, and invalid settings."""

import csv

import pytest
import torch

import torchrl_marl
from torchrl_marl.errors import ConfigError
from torchrl_marl.recipes import load_config
from torchrl_marl.training.checkpoint import load_latest
from torchrl_marl.training.config import read_run_config

SMALL = {
    "total_frames": 160,
    "frames_per_batch": 40,
    "execution": "eager",
    "env": {"num_envs": 4, "kwargs": {"n_agents": 2, "years": 2}},
    "learner": {
        "learning_starts": 40,
        "minibatch_size": 20,
        "replay": {"capacity": 100},
        "actor": {"num_cells": [8]},
        "mixer": {"hidden": 4},
    },
    "evaluation": {"episodes": 6, "every_frames": None},
    "logging": {"progress": False},
}
EPSILONS = [0.2, 0.1, 0.0]
VARY = {"learner": {"lr": [1e-3, 2e-3, 3e-3], "exploration": {"epsilon_end": EPSILONS}}}


def train(folder, **settings):
    population = {"size": 3, "vary": VARY} | settings.pop("population", {})
    return torchrl_marl.train(
        "toy_arena_qmix", folder=str(folder), population=population, **SMALL | settings
    )


def table(path):
    times = ("seconds", "frames_per_second")
    with path.open(newline="") as file:
        return [{k: v for k, v in row.items() if k not in times} for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return train(tmp_path_factory.mktemp("population") / "whole")


def test_members_leave_ordinary_run_folders(whole):
    for i, (folder, member) in enumerate(zip(whole.folders, whole.members)):
        config = read_run_config(folder)
        assert config.learner.lr == pytest.approx(VARY["learner"]["lr"][i])
        assert config.learner.exploration.epsilon_end == pytest.approx(EPSILONS[i])
        rows = table(folder / "metrics.csv")
        assert [row["agents/stored"] for row in rows] == ["40", "80", "100", "100"]
        assert float(rows[-1]["agents/epsilon"]) == pytest.approx(EPSILONS[i], abs=1e-6)
        assert float(rows[-1]["agents/updates"]) == 4 and rows[-1]["agents/loss_value"] != "nan"
        assert member.frames == 160 and member.evaluate(episodes=6)["episodes"] == 6


def test_off_policy_population_resumes_exactly(whole, tmp_path):
    train(tmp_path / "half", total_frames=80)
    half = torchrl_marl.resume(tmp_path / "half", total_frames=160)
    first, again = (load_latest(run.folder)[1]["learners"][0] for run in (whole, half))
    for name, value in first.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, again[name]), name
    for key, value in first["_extra_state"]["replay"]["leaves"].items():
        assert torch.equal(value, again["_extra_state"]["replay"]["leaves"][key]), key


def test_member_resumes_alone_with_its_replay_buffer(tmp_path):
    run = train(tmp_path / "all", total_frames=80)
    all_of_them = load_latest(run.folder)[1]["learners"][0]["_extra_state"]["replay"]["leaves"]
    own = load_latest(run.folders[1])[1]["learners"][0]["_extra_state"]["replay"]
    assert own["shape"] == [25, 4]
    for key, value in own["leaves"].items():
        if key[-1] != "terminated":
            assert torch.equal(value, all_of_them[key][:, 4:8])
    more = torchrl_marl.resume(run.folders[1], total_frames=160)
    assert more.summary["frames"] == 160
    rows = table(run.folders[1] / "metrics.csv")
    assert [row["agents/stored"] for row in rows] == ["40", "80", "100", "100"]


@pytest.mark.runs
@pytest.mark.parametrize(
    ("recipe", "env"),
    [
        (
            "vmas_navigation_maddpg",
            {"num_envs": 4, "max_steps": 10},
        ),  # done flag of the team
        ("toy_arena_mappo", SMALL["env"] | {"continuous_actions": True}),
    ],
)
def test_actor_critic_populations_and_their_members_resume(recipe, env, tmp_path):
    learner = {k: v for k, v in SMALL["learner"].items() if k != "mixer"}
    settings = {**SMALL, "env": env, "learner": {"algorithm": "maddpg", **learner}}
    settings |= {"population": {"size": 2, "vary": {"learner": {"actor_lr": [1e-3, 2e-3]}}}}
    whole = torchrl_marl.train(recipe, folder=str(tmp_path / "whole"), **settings)
    parts = settings | {"folder": str(tmp_path / "parts")}
    for step in torchrl_marl.iterate(recipe, **parts):
        if step.number == 2:
            break
    parts = torchrl_marl.resume(tmp_path / "parts")
    first, again = (load_latest(run.folder)[1]["learners"][0] for run in (whole, parts))
    for name, value in first.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, again[name]), name
    own = load_latest(parts.folders[1])[1]["learners"][0]["_extra_state"]["replay"]["leaves"]
    more = torchrl_marl.resume(parts.folders[1], total_frames=200)
    assert more.summary["frames"] == 200
    assert ("next", "terminated") in own and ("next", "agents", "terminated") not in own


def test_members_may_share_a_replay_buffer(tmp_path):
    run = train(tmp_path / "all", population={"share_replay": True}, total_frames=120)
    rows = [table(folder / "metrics.csv") for folder in run.folders]
    assert [row["agents/stored"] for row in rows[0]] == ["120", "240", "300"]
    assert len({own[-1]["agents/loss_value"] for own in rows}) == 3


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"vary": {"learner.lmbda": [0.9] * 3}},
            "has 'learner.lmbda', which learner.algorithm=qmix",
        ),
        ({"vary": {"learner.exploration.epsilon": [0.1, 0.2, 1.5]}}, "epsilon is 1.5"),
    ],
)
def test_invalid_population_settings_raise(settings, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        train(tmp_path / "all", population=settings)


def test_share_replay_with_on_policy_learner_raises():
    population = {"size": 3, "share_replay": True}
    with pytest.raises(ConfigError, match="share_replay is true, but learner.algorithm=mappo"):
        load_config("toy_arena_mappo", {"population": population}).check()
