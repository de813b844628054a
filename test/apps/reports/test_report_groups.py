"""Reports find runs and group them into tasks, algorithms and seeds."""

import pytest
import yaml
from reported import write_run, write_suite

from torchrl_marl.apps.reports import make_report
from torchrl_marl.apps.reports.grouping import find_runs
from torchrl_marl.errors import CheckpointError

pytestmark = pytest.mark.pictures


def teams_of(report):
    return {
        task.task.name: {name: len(team.runs) for name, team in task.teams.items()}
        for task in report.tasks
    }


def test_all_runs_of_a_suite_are_found(tmp_path):
    write_suite(tmp_path / "suite", ["balance", "wheel"], seeds=3, points=4)
    both = {"MAPPO": 3, "IPPO": 3}
    assert teams_of(make_report(tmp_path / "suite")) == {"balance": both, "wheel": both}
    one = tmp_path / "suite" / "balance" / "mappo"
    assert teams_of(make_report([one, one / "seed0"])) == {"balance": {"MAPPO": 3}}  # once each


def test_population_is_replaced_by_its_members(tmp_path):
    write_run(tmp_path / "population", [1, 2])
    for seed in range(2):
        write_run(tmp_path / "population" / f"seed{seed}", [1, 2], seed=seed)
    runs, left_out = find_runs([tmp_path])
    assert sorted(run.seed for run in runs) == [0, 1] and not left_out


def test_different_learning_settings_are_different_algorithms(tmp_path):
    write_run(tmp_path / "a", [1, 2])
    write_run(tmp_path / "b", [1, 2], seed=1)
    write_run(tmp_path / "c", [1, 2], **{"learner.lr": 0.01})
    write_run(tmp_path / "d", [1, 2], **{"learner.algorithm": "ippo"})
    # Settings of speed and length do not make another algorithm.
    write_run(tmp_path / "e", [1, 2], seed=2, execution="eager", total_frames=128_000)
    assert teams_of(make_report(tmp_path)) == {
        "arena": {"IPPO": 1, "MAPPO (lr=0.01)": 1, "MAPPO (lr=0.0005)": 3}
    }


def test_recipes_of_one_algorithm_get_distinct_names(tmp_path):
    write_run(tmp_path / "a", [1, 2], recipe="vmas_balance_mappo")
    write_run(tmp_path / "b", [1, 2], recipe="vmas_balance_rmappo", **{"env.kwargs.n_agents": 3})
    write_run(tmp_path / "c", [1, 2], recipe="vmas_balance_ippo", **{"env.kwargs.n_agents": 3})
    assert set(teams_of(make_report(tmp_path))["balance"]) == {"IPPO", "MAPPO", "MAPPO (rmappo)"}


def test_env_kwargs_and_names_define_tasks(tmp_path):
    write_run(tmp_path / "a", [1, 2])
    write_run(tmp_path / "b", [1, 2], **{"env.kwargs.lives": 5})
    write_run(tmp_path / "c", [1, 2], **{"env.num_envs": 64})
    write_run(tmp_path / "d", [1, 2], recipe="toy_matrix_game_mappo")
    found = {name: sum(teams.values()) for name, teams in teams_of(make_report(tmp_path)).items()}
    assert found == {"arena, lives=3": 2, "arena, lives=5": 1, "matrix_game": 1}


def test_algorithms_of_groups_are_part_of_the_name(tmp_path):
    groups = {"groups.agent.algorithm": "iql", "env.continuous_actions": False}
    write_run(tmp_path / "a", [1, 2], recipe="vmas_simple_tag_mappo", **groups)
    assert list(teams_of(make_report(tmp_path))["simple_tag"]) == ["MAPPO + IQL"]


def test_unreadable_runs_are_left_out_and_reported(tmp_path):
    write_run(tmp_path / "good", [1, 2])
    broken = write_run(tmp_path / "broken", [1, 2])
    (broken / "evaluation.csv").write_text("frames,return_mean\n0,one\n1,2\n")
    older = write_run(tmp_path / "older", [1, 2])
    config = yaml.safe_load((older / "config.yaml").read_text())
    (older / "config.yaml").write_text(yaml.safe_dump({**config, "n_environments": 3}))
    begun = write_run(tmp_path / "begun", [1, 2])
    for name in ("metrics.csv", "evaluation.csv"):
        (begun / name).unlink()
    report = make_report(tmp_path)
    assert teams_of(report) == {"arena": {"MAPPO": 1}}
    sentences = "\n".join(report.left_out)
    assert "is broken in line 2" in sentences
    assert "does not fit this version" in sentences
    assert "has no row in metrics.csv yet" in sentences
    assert sentences.count("\n") == 2


def test_folders_without_runs_raise(tmp_path):
    with pytest.raises(CheckpointError, match="is not a run folder: it does not exist"):
        make_report(tmp_path / "none")
    write_run(tmp_path / "runs" / "a", [1, 2])
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="no folder in it is one; give the folder of a run"):
        make_report([tmp_path / "runs", tmp_path / "empty"])
    (tmp_path / "runs" / "a" / "config.yaml").write_text("seed: one\n")
    with pytest.raises(CheckpointError, match="does not fit this version") as error:
        make_report(tmp_path / "runs")
    assert "\n" not in str(error.value)


if __name__ == "__main__":
    pytest.main([__file__])
