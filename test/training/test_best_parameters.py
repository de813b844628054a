"""Evenly spaced evaluations, and the episodes after training with the best parameters."""

import json

import pytest
import torch
from runs import small_config, table

import torchrl_marl
from torchrl_marl.errors import ConfigError
from torchrl_marl.runs import resume
from torchrl_marl.specs import TeamSpec
from torchrl_marl.training import train
from torchrl_marl.training.best import BestParameters
from torchrl_marl.training.config import TrainConfig
from torchrl_marl.training.environments import EVALUATION_SEED
from torchrl_marl.training.evaluation import play
from torchrl_marl.training.progress import evaluation_period, is_due

PROTOCOL = {
    "evaluation.count": 6,
    "evaluation.episodes": 4,
    "evaluation.absolute_episodes": 10,
    "learner.lr": 0.1,  # too large, so that returns go up and down
}


def config_of(folder, **settings):
    return small_config(folder=str(folder), **{**PROTOCOL, **settings})


def test_evaluations_are_evenly_spaced():
    """122 of 20 million frames in batches of 1,000: each in the batch that reaches i / 122."""
    every = evaluation_period(TrainConfig(total_frames=20_000_000))
    assert every is None
    every = evaluation_period(small_config(**{"evaluation.count": 122, "total_frames": 20_000_000}))
    due = [f for f in range(1000, 20_000_000, 1000) if is_due(every, f, 1000)]
    assert due == [-(-20_000_000 * i // 122_000) * 1000 for i in range(1, 122)]


@pytest.mark.parametrize("count", [12, 30, 98])
def test_evaluation_at_a_whole_number_of_batches_is_not_late(count):
    """In floating point ``100000 / 30 * 3`` exceeds 10000."""
    config = small_config(**{"evaluation.count": count, "total_frames": 100_000})
    every = evaluation_period(config)
    due = [f for f in range(1000, 100_000, 1000) if is_due(every, f, 1000)]
    assert due == [-(-100 * i // count) * 1000 for i in range(1, count)]


def return_at(frames, folder, **settings):
    """The absolute return of the same run, stopped after some frames."""
    for iteration in torchrl_marl.iterate(config_of(folder, **settings)):
        if iteration.frames == frames:
            break
    env, policy = iteration.run.make_env(num_envs=4), iteration.run.policy
    played = play(env, policy, TeamSpec.from_env(env), episodes=10, seed=EVALUATION_SEED + 1)
    return played.figures()["return_mean"]


def test_absolute_evaluation_uses_the_best_parameters(tmp_path):
    run = train(config_of(tmp_path / "a"))
    rows = table(run.folder / "evaluation.csv")
    assert [int(row["frames"]) for row in rows] == [0, 80, 160, 240, 320, 400, 480]
    returns = [float(row["return_mean"]) for row in rows]
    best = returns.index(max(returns))
    absolute = run.summary["absolute"]
    assert absolute["frames"] == 80 * best < 480 and absolute["episodes"] == 10
    assert absolute["return_mean"] == run.summary["return_absolute"]
    assert return_at(absolute["frames"], tmp_path / "b") == absolute["return_mean"]
    assert json.loads((run.folder / "summary.json").read_text())["absolute"] == absolute


@pytest.mark.parametrize("unshare_at", [0.5, 0.75])
def test_best_parameters_of_before_and_after_unsharing(unshare_at, tmp_path, monkeypatch):
    """The best evaluation is that at frame 320, before or after the networks are un-shared."""
    rated, seen = [1.0, 2.0, 1.0, 2.0, 3.0, 2.0, 1.0], BestParameters.evaluated

    def evaluated(best, training, results):
        seen(best, training, [{**own, "return_mean": rated.pop(0)} for own in results])

    settings = {"learner.unshare_at": unshare_at}
    with monkeypatch.context() as patch:
        patch.setattr(BestParameters, "evaluated", evaluated)
        run = train(config_of(tmp_path / "a", **settings))
    assert not rated and run.summary["absolute"]["frames"] == 320
    assert run.summary["return_absolute"] == return_at(320, tmp_path / "b", **settings)


def test_absolute_evaluation_does_not_affect_training_or_resume(tmp_path):
    whole = train(config_of(tmp_path / "whole"))
    plain = train(config_of(tmp_path / "plain", **{"evaluation.absolute_episodes": 0}))
    names = ("iteration", "frames", "agents/episode_reward", "agents/lr")
    rows = [
        [[row[k] for k in names] for row in table(r.folder / "metrics.csv")] for r in (whole, plain)
    ]
    assert rows[0] == rows[1] and "absolute" not in plain.summary
    for iteration in torchrl_marl.iterate(config_of(tmp_path / "cut")):
        if iteration.frames == 320:
            break
    assert resume(tmp_path / "cut").summary["absolute"] == whole.summary["absolute"]


def test_absolute_evaluation_can_be_added_on_resume(tmp_path):
    settings = {"evaluation.absolute_episodes": 0, "total_frames": 240}
    train(config_of(tmp_path / "a", **settings))
    more = {"evaluation.absolute_episodes": 5, "total_frames": 480}
    assert resume(tmp_path / "a", **more).summary["absolute"]["episodes"] == 5


MEMBERS = {"population.size": 3, "evaluation.episodes": 12}


def test_each_member_keeps_its_best_parameters(tmp_path):
    run = train(config_of(tmp_path / "a", **MEMBERS))
    found = [json.loads((folder / "summary.json").read_text()) for folder in run.folders]
    frames = []
    for folder, own in zip(run.folders, found):
        rows = table(folder / "evaluation.csv")
        returns = [float(row["return_mean"]) for row in rows]
        frames.append(int(rows[returns.index(max(returns))]["frames"]))
        assert own["absolute"]["frames"] == frames[-1] and own["absolute"]["episodes"] == 10
        assert own["absolute"]["return_mean"] == own["return_absolute"]
    assert len(set(frames)) > 1, "take other settings: members have their best at the same time"
    mean = sum(own["return_absolute"] for own in found) / 3
    assert run.summary["return_absolute"] == pytest.approx(mean)
    # The same run, up to the best parameters of each member.
    played, saving = {}, {**MEMBERS, "checkpoint.every_iterations": 1}
    for iteration in torchrl_marl.iterate(config_of(tmp_path / "b", **saving)):
        for i in range(3):
            if iteration.frames == frames[i]:
                member = iteration.run.members[i]
                env = member.make_env(num_envs=36)
                team = TeamSpec.from_env(env)
                options = {"episodes": 10, "seed": EVALUATION_SEED + 1}
                played[i] = play(env, member.policy, team, **options).figures()["return_mean"]
    for i, own in enumerate(found):
        assert played[i] == pytest.approx(own["return_absolute"], abs=1e-5)


def test_best_parameters_of_members_on_resume(tmp_path):
    whole = train(config_of(tmp_path / "whole", **MEMBERS))
    for iteration in torchrl_marl.iterate(config_of(tmp_path / "cut", **MEMBERS)):
        if iteration.frames == 320:
            break
    cut = resume(tmp_path / "cut")
    for one, other in zip(whole.folders, cut.folders):
        summaries = [json.loads((own / "summary.json").read_text()) for own in (one, other)]
        assert summaries[0]["absolute"] == summaries[1]["absolute"]
    for folder in cut.folders:
        alone = resume(folder, total_frames=560)
        rows = table(folder / "evaluation.csv")
        best = max(rows, key=lambda row: float(row["return_mean"]))
        assert alone.summary["absolute"]["frames"] == int(best["frames"])


def test_absolute_evaluation_does_not_affect_members(tmp_path):
    names = ("iteration", "frames", "agents/episode_reward", "agents/loss_objective")
    found = []
    for episodes in (0, 10):
        settings = {**MEMBERS, "evaluation.absolute_episodes": episodes}
        run = train(config_of(tmp_path / f"{episodes}", **settings))
        tables = [table(folder / "metrics.csv") for folder in run.folders]
        found.append([[row[name] for name in names] for rows in tables for row in rows])
    assert found[0] == found[1]


def test_state_of_an_earlier_version_is_loaded():
    part = BestParameters()
    part.load_state_dict({"best": 2.0, "frames": 80, "parameters": {"a": torch.ones(1)}})
    assert (part.best, part.frames) == ([2.0], [80]) and part.state_dict()["best"] == [2.0]


def test_absolute_episodes_without_evaluations_raise():
    words = "absolute_episodes is 10, which needs evaluations.*, or evaluation.absolute_episodes=0"
    with pytest.raises(ConfigError, match=words):
        small_config(**{"evaluation.absolute_episodes": 10, "evaluation.episodes": 0}).check()
