"""Many runs: equal in this process and in subprocesses; a failure does not affect others."""

from unittest.mock import Mock

import pytest
from runs import assert_same_run

from torchrl_marl.apps.jobs import jobs
from torchrl_marl.apps.jobs.jobs import Jobs, Stopped, train_each
from torchrl_marl.recipes import load_config

SMALL = {
    "total_frames": 80,
    "frames_per_batch": 40,
    "threads": 1,
    "execution": "eager",
    "env.num_envs": 4,
    "learner.minibatch_size": 20,
    "evaluation.episodes": 4,
}


def configs_in(folder):
    folder.mkdir()
    each = [{"seed": seed, "folder": str(folder / f"seed{seed}")} for seed in (0, 1)]
    return [load_config("toy_arena_mappo", {**SMALL, **own}) for own in each]


def test_runs_here_and_in_subprocesses_are_equal(tmp_path):
    for where in ("here", "processes"):
        began, folder = [], tmp_path / where
        given = {
            "at_once": 2,
            "folder": folder,
            "on_begin": began.append,
            "logging.progress": False,
        }
        ended = dict(Jobs(configs_in(folder), where, **given).ended())
        assert began == [0, 1] and sorted(ended) == [0, 1]
    assert ended[1] == tmp_path / "processes" / "seed1"
    for seed in ("seed0", "seed1"):
        assert_same_run(tmp_path / "here" / seed, tmp_path / "processes" / seed)
    logs = (tmp_path / "processes" / "logs").iterdir()
    assert sorted(path.name for path in logs) == ["seed0.log", "seed1.log"]


def test_failed_run_is_yielded_and_the_others_continue(tmp_path, monkeypatch):
    def fail_first(config, folder, **overrides):
        assert folder is None  # runs start from the beginning
        if config.seed == 0:
            raise ValueError("the engine broke")
        return config.seed

    monkeypatch.setattr(jobs, "train_or_resume", fail_first)
    configs = configs_in(tmp_path / "runs")
    (_, first), (_, second) = train_each(configs)
    assert str(first) == "the engine broke" and second == [1]
    with pytest.raises(ValueError, match="the engine broke"):
        list(train_each(configs[:1]))


def test_interrupted_run_is_yielded_before_the_interrupt_is_raised(tmp_path, monkeypatch):
    def stop(config, folder, **overrides):
        raise KeyboardInterrupt(config.folder)

    monkeypatch.setattr(jobs, "train_or_resume", stop)
    configs = configs_in(tmp_path / "runs")
    ended = Jobs(configs).ended()
    number, found = next(ended)
    assert number == 0 and isinstance(found, Stopped)
    with pytest.raises(KeyboardInterrupt, match="seed0"):
        next(ended)
    with pytest.raises(KeyboardInterrupt, match="seed0"):
        list(train_each(configs))


def test_interrupted_ray_tasks_are_yielded_before_the_interrupt_is_raised(tmp_path, monkeypatch):
    def outcomes(*args):
        yield 1, tmp_path
        raise KeyboardInterrupt("pressed")

    monkeypatch.setattr("torchrl_marl.collectors.ray_connection.connect", lambda *args: Mock())
    monkeypatch.setattr(jobs, "_outcomes_of_tasks", outcomes)
    ended = Jobs(configs_in(tmp_path / "runs"), "ray").ended()
    assert next(ended) == (1, tmp_path)
    number, found = next(ended)
    assert number == 0 and isinstance(found, Stopped)
    with pytest.raises(KeyboardInterrupt, match="pressed"):
        next(ended)
