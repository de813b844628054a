"""Runs that stop at a return of evaluations or of the last episodes."""

import pytest
from runs import assert_equal, final_state, small_config, table

from torchrl_marl.runs import resume
from torchrl_marl.training import train
from torchrl_marl.training.progress import StopAtReturn


def stop(limit, episodes, every=None):
    settings = {"episodes": episodes, "every_frames": every}
    return StopAtReturn(small_config(stop_at_return=limit, evaluation=settings))


def test_stop_uses_the_mean_of_the_last_episodes():
    last = stop(3.0, episodes=10)
    assert not last.update_from_episodes(9.0, 4) and last.value is None
    assert not last.update_from_episodes(float("nan"), 0) and last.value is None
    assert last.update_from_episodes(1.0, 6)
    assert last.value == pytest.approx((9 * 4 + 1 * 6) / 10)
    assert last.update_from_episodes(2.0, 3)  # the 4 are still needed: 13 - 4 < 10
    assert last.value == pytest.approx((9 * 4 + 1 * 6 + 2 * 3) / 13)
    assert not last.update_from_episodes(2.0, 1)
    assert last.value == pytest.approx((1 * 6 + 2 * 3 + 2 * 1) / 10)
    other = stop(3.0, episodes=10)
    other.load_state_dict(last.state_dict())
    assert other.value == last.value
    assert last.update_from_episodes(5.0, 50) == other.update_from_episodes(5.0, 50) is True
    assert last.value == 5.0


def test_stop_uses_only_evaluations_if_there_are_any():
    evaluated = stop(3.0, episodes=2, every=100)
    assert not evaluated.update_from_episodes(9.0, 4)
    assert not evaluated.update_from_evaluation(2.9)
    assert evaluated.update_from_evaluation(3.0)
    assert not stop(None, episodes=2, every=100).update_from_evaluation(9e9)


def config_of(folder, **settings):
    return small_config(folder=str(folder), **settings)


def test_run_stops_at_a_return_of_evaluations(tmp_path, capsys):
    every = {"evaluation.every_frames": 160}
    whole = train(config_of(tmp_path / "whole", **every))
    run = train(config_of(tmp_path / "run", stop_at_return=-1e6, **every))
    assert run.summary["frames"] == 160
    assert "ends after 160 frames: the return, " in capsys.readouterr().err
    rows = table(run.folder / "evaluation.csv")
    assert [int(row["frames"]) for row in rows] == [0, 160]  # the last one only once
    assert float(rows[-1]["return_mean"]) == pytest.approx(run.summary["return_after"], rel=1e-5)
    assert rows == table(whole.folder / "evaluation.csv")[:2]
    # It is finished, and continues without the limit.
    resume(run.folder)
    assert "is finished, with 160 frames; add a higher stop_at_return" in capsys.readouterr().err
    resumed = resume(run.folder, stop_at_return=None)
    assert resumed.summary["frames"] == 480
    for name in ("metrics.csv", "evaluation.csv"):
        assert table(run.folder / name) == table(whole.folder / name)


def test_run_stops_at_a_return_of_the_last_episodes(tmp_path):
    """It stops after the first iteration at which 20 episodes have ended."""
    whole = train(config_of(tmp_path / "whole"))
    lengths = [row["agents/episode_length"] for row in table(whole.folder / "metrics.csv")]
    run = train(config_of(tmp_path / "run", stop_at_return=-1e6, **{"evaluation.episodes": 20}))
    iterations = len(table(run.folder / "metrics.csv"))
    state = final_state(run.folder)["stopping"]
    counts = [count for _, count in state["last"]]
    assert sum(counts) >= 20 > sum(counts[:-1])
    assert 1 < iterations < len(lengths)
    assert table(run.folder / "metrics.csv") == table(whole.folder / "metrics.csv")[:iterations]
    # A return that is never reached has no effect.
    high = train(config_of(tmp_path / "high", stop_at_return=1e6))
    assert table(high.folder / "metrics.csv") == table(whole.folder / "metrics.csv")
    assert_equal(final_state(high.folder)["learners"], final_state(whole.folder)["learners"])
