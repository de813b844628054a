"""Runs of several processes: one folder, results of one process, resume on any number."""

import functools
import tempfile
from pathlib import Path

import pytest
import torch
from rank_runs import arena_config, early_stopping_config, runs_of_a_rank, talking_config
from ranked import on_ranks
from runs import final_state, replaced, small_config, table

import torchrl_marl
from torchrl_marl.errors import ConfigError
from torchrl_marl.runs import resume
from torchrl_marl.runtime.ranks import SingleProcess
from torchrl_marl.training.ddp import check_ranks, with_shards
from torchrl_marl.training.process_group import resolve_config


@functools.cache
def found():
    """The folder of the runs and the outcome of each rank."""
    folder = Path(tempfile.mkdtemp())
    torchrl_marl.train(arena_config(folder / "turns", total_frames=160))
    edited = (
        torchrl_marl.train(arena_config(folder / "edited", total_frames=160)).folder / "config.yaml"
    )
    edited.write_text(edited.read_text().replace("  lr: 0.0005", "  lr: 0.1"))
    outcomes = on_ranks(2, runs_of_a_rank, folder, joined=False)
    resume(folder / "turns", total_frames=480)
    resume(folder / "stopped")
    return folder, outcomes


@functools.cache
def alone(make):
    folder = Path(tempfile.mkdtemp()) / "alone"
    torchrl_marl.train(make(folder))
    return folder


def assert_alike(folder, other, bound=1e-4):
    """Metrics, evaluations and learned parameters are equal up to rounding."""
    for name in ("metrics.csv", "evaluation.csv"):
        rows, others = table(folder / name), table(other / name)
        if name == "evaluation.csv":  # resumed runs have more of them
            rows, others = rows[:: len(rows) - 1], others[:: len(others) - 1]
        assert len(rows) == len(others) > 1
        for row, expected in zip(rows, others):
            assert list(row) == list(expected)
            off = {
                key: abs(float(value) - float(expected[key]))
                for key, value in row.items()
                if value != expected[key]
            }
            assert all(x < bound * max(1, abs(float(expected[k]))) for k, x in off.items()), off
    for own, theirs in zip(final_state(folder)["learners"], final_state(other)["learners"]):
        for name, value in own.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(value, theirs[name], rtol=bound, atol=bound)


@pytest.mark.processes
@pytest.mark.parametrize("name", ["ranks", "turns", "stopped"])
def test_two_ranks_equal_one_process(name):
    """Also if one process started and finished the run, or it was interrupted."""
    folder, _ = found()
    assert_alike(folder / name, alone(arena_config))


def test_memory_and_communication_over_ranks():
    folder, _ = found()
    assert_alike(folder / "talk", alone(talking_config))
    states = final_state(folder / "talk")["learners"][0]["_extra_state"]["critic_states"]
    expected = final_state(alone(talking_config))["learners"][0]["_extra_state"]["critic_states"]
    for name, state in states.items():
        torch.testing.assert_close(state, expected[name], rtol=1e-4, atol=1e-4)


def test_ranks_stop_together_at_a_return():
    folder, _ = found()
    rows, expected = (
        table(path / "metrics.csv") for path in (folder / "early", alone(early_stopping_config))
    )
    assert 1 < len(rows) == len(expected) < 6
    assert len(list((folder / "early" / "checkpoints").iterdir())) > 1


@pytest.mark.processes
def test_checkpoint_of_ranks_equals_that_of_one_process():
    folder, _ = found()
    state, expected = final_state(folder / "ranks"), final_state(alone(arena_config))
    assert set(state) == set(expected)
    assert len(state["collector"]["shards"]) == 4
    assert state["collector"]["frames"] == expected["collector"]["frames"] == 480
    assert [len(x) for x in state["tracker"].values()] == [8] * len(state["tracker"])


def test_only_the_first_rank_writes_and_prints():
    folder, (first, second) = found()
    assert first["said"] and not second["said"]
    assert {"metrics.csv", "evaluation.csv"} < set(first["written"]) and not second["written"]
    assert {path.name for path in folder.iterdir()} >= {"ranks", "talk", "turns"}
    assert len(table(folder / "ranks" / "metrics.csv")) == 6


def test_all_ranks_stop_after_the_same_iteration():
    _, (first, second) = found()
    assert first["stopped"] == second["stopped"]
    assert first["stopped"][0] == "KeyboardInterrupt"


def test_different_settings_on_ranks_raise_once():
    folder, outcomes = found()
    (spoken,) = [one["disagree"] for one in outcomes if one["disagree"][0] != "SystemExit"]
    (silent,) = [one["disagree"] for one in outcomes if one["disagree"] != spoken]
    assert spoken[0] == "RankError" and spoken[2]
    assert "ranks disagree: seed is 0 on rank 0 and 1 on rank 1, expected the same" in spoken[1]
    assert silent == ("SystemExit", "2", False)
    assert not (folder / "seed").exists()


def test_failure_of_one_rank_ends_all_ranks():
    _, (first, second) = found()
    assert second["broken"] == ("RankError", "rank 1 of 2: the environment broke.", True)
    assert first["broken"] == ("SystemExit", "2", False)
    assert second["bug"][0] == "KeyError" and "rank 1 of 2" in second["bug"][1]
    assert first["bug"] == ("SystemExit", "1", False)


def test_resume_on_ranks_with_edited_settings_raises():
    _, (first, second) = found()
    (spoken,) = [one["edited"] for one in (first, second) if one["edited"][0] != "SystemExit"]
    assert spoken[0] == "RankError"
    assert "learner.lr was 0.0005 when this run was made and is 0.1 in '" in spoken[1]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"distributed": {"collectors": 6}}, "distributed.collectors is 6, expected a divisor of"),
        ({"distributed": {"collectors": 1}}, "is 1, expected a multiple of the 2 processes"),
        ({"distributed": {"backend": "ray"}}, "is 'ray', but the processes of torchrun"),
        ({"distributed": {"overlap": 1}}, "distributed.overlap is 1, but several processes"),
        ({"learner": {"unshare_at": 0.5}}, "learner.unshare_at is 0.5, but several"),
        ({"learner": {"minibatch_size": 21}}, "learner.minibatch_size is 21, .* use .*=22"),
        ({"groups": {"agents": {"algorithm": "happo"}}}, "groups.agents.algorithm is 'happo'"),
        ({"learner": {"algorithm": "qmix", "minibatch_size": 32}}, "learner.algorithm is 'qmix'"),
        ({"learner": {"algorithm": "pqn"}}, "learner.algorithm is 'pqn', which trains in"),
        ({"population": {"size": 2}}, "population.size is 2, but several processes"),
        ({"league": {"opponents": "self"}}, "league is given, but several processes"),
    ],
)
def test_unsupported_settings_with_ranks_raise(overrides, message):
    with pytest.raises(ConfigError, match=message):
        check_ranks(with_shards(small_config(**overrides), 2), 2)


def test_external_simulators_and_env_objects_with_ranks_raise():
    config = small_config()
    door = replaced(config, env=replaced(config.env, library="external"))
    with pytest.raises(
        ConfigError, match="is 'external', but external simulators connect to a single"
    ):
        check_ranks(with_shards(door, 2), 2)
    with pytest.raises(ConfigError, match="an environment object is given, but each of 2 ranks"):
        check_ranks(with_shards(small_config(), 2), 2, own_env=True)


class Two(SingleProcess):
    size = 2

    def all_gather(self, value):
        return [value, value]


@pytest.mark.parametrize(
    ("overrides", "setting"),
    [
        ({"population": {"size": 2}}, "population.size is 2"),
        ({"league": {"opponents": "self"}}, "league is given"),
    ],
)
def test_populations_and_leagues_with_torchrun_raise(overrides, setting):
    with pytest.raises(ConfigError) as refused:
        resolve_config(small_config(**overrides), Two())
    value = {"population.size is 2": 1, "league is given": "none"}[setting]
    assert str(refused.value) == (
        f"{setting}, but several processes of torchrun do not support it; use "
        f"{setting.split()[0]}={value}, or start one process."
    )


def test_resume_on_ranks_without_shards_raises(tmp_path):
    with pytest.raises(ConfigError, match="distributed.collectors is null, so that the run has"):
        resolve_config(small_config(), Two(), resumed=True)
    assert resolve_config(small_config(), Two()).distributed.collectors == 2
    assert resolve_config(arena_config(tmp_path), Two(), resumed=True).distributed.collectors == 4
