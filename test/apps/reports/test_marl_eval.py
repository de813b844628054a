"""Raw results in the format of marl-eval: written, read back, and files of other libraries."""

import json

import numpy as np
import pytest
from reported import write_run, write_suite

from torchrl_marl.apps.cli.main import main
from torchrl_marl.apps.reports import make_report
from torchrl_marl.apps.reports.answers import notes
from torchrl_marl.apps.reports.marl_eval import raw_results, read_raw_results
from torchrl_marl.errors import CheckpointError, ConfigError


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    folder = tmp_path_factory.mktemp("suite")
    return write_suite(folder, ["balance", "wheel"], seeds=3, points=4)


def wrapped(steps, run="seed_0"):
    return {"smax": {"3m": {"mappo": {run: steps}}}}


def written(folder, tree):
    path = folder / "raw.json"
    path.write_text(tree if isinstance(tree, str) else json.dumps(tree))
    return path


def test_raw_results_of_one_run(tmp_path):
    run = write_run(tmp_path / "a", [1.0, 2.5], seed=3, frames=[0, 500])
    assert raw_results(make_report(run).tasks) == {
        "toy": {
            "arena": {
                "MAPPO": {
                    "seed_3": {
                        "step_0": {"step_count": 0, "return": [1.0]},
                        "step_1": {"step_count": 500, "return": [2.5]},
                        "absolute_metrics": {"return": [2.5]},
                    }
                }
            }
        }
    }


def test_absolute_metric_is_that_of_the_best_parameters(tmp_path):
    run = write_run(tmp_path / "a", [1.0, 2.5])
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**summary, "return_absolute": 7.0}))
    [steps] = raw_results(make_report(run).tasks)["toy"]["arena"]["MAPPO"].values()
    assert steps["absolute_metrics"] == {"return": [7.0]}


def test_report_command_writes_raw_results_that_round_trip(suite, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert not main(["report", str(suite), "--json", "raw.json"])
    tree = json.loads((tmp_path / "raw.json").read_text())
    assert {task: set(own) for task, own in tree["vmas"].items()} == {
        "balance": {"MAPPO", "IPPO"},
        "wheel": {"MAPPO", "IPPO"},
    }
    one, again = make_report(suite), make_report(tmp_path / "raw.json")
    assert raw_results(again.tasks) == tree
    for result, read in zip(one.tasks, again.tasks):
        for name, team in result.teams.items():
            assert read.teams[name].scores == team.scores
            np.testing.assert_array_equal(read.teams[name].evaluation.value, team.evaluation.value)


def test_names_of_algorithms_have_no_commas(tmp_path):
    write_run(tmp_path / "a", [1.0, 2.0], **{"learner.lr": 0.1, "learner.gamma": 0.5})
    write_run(tmp_path / "b", [1.0, 2.0], **{"learner.lr": 0.2, "learner.gamma": 0.6})
    report = make_report(tmp_path)
    assert all("," in name for name in report.algorithms)
    names = list(raw_results(report.tasks)["toy"]["arena"])
    assert len(names) == 2 and not any("," in name for name in names)


def test_file_of_mava_is_read(tmp_path):
    """Mava has ``elapsed_time``, single means, and metrics besides the return."""
    steps = {
        "absolute_metrics": {"mean_episode_return": [9.0], "steps_per_second": [5.0]},
        "step_1": {"step_count": 20, "elapsed_time": 4.0, "mean_episode_return": [3.0]},
        "step_0": {"step_count": 10, "elapsed_time": 2.0, "mean_episode_return": [1.0]},
    }
    found, left_out = read_raw_results(written(tmp_path, wrapped(steps, "seed_42")))
    ([record],) = found.values()
    assert list(found) == [("3m", "mappo")] and left_out == [] and record.notes == ()
    assert record.run.seed == 42 and record.summarized("return_absolute") == 9
    assert record.evaluation.frames.tolist() == [10, 20]
    assert record.evaluation.seconds.tolist() == [2, 4]
    assert record.evaluation.returns.tolist() == [1, 3]


def test_returns_of_episodes_are_averaged_per_run(suite, tmp_path):
    steps = {"step_0": {"step_count": 480_000, "return": [1, 2, 6]}}
    path = written(tmp_path, {"vmas": {"wheel": {"theirs": {"run_a": steps, "run_b": steps}}}})
    both = {result.task.name: result for result in make_report([suite, path]).tasks}
    assert both["wheel"].teams["theirs"].scores == [3, 3]
    assert [run.record.run.seed for run in both["wheel"].teams["theirs"].runs] == [0, 1]


def test_files_of_single_seeds_are_joined(tmp_path):
    def path(name, seed, value):
        (tmp_path / name).mkdir()
        steps = {"step_0": {"step_count": 100, "return": [value]}}
        return written(tmp_path / name, wrapped(steps, f"seed_{seed}"))

    a, b, c = path("a", 0, 1.0), path("b", 1, 3.0), path("c", 1, 5.0)
    [task] = make_report([a, b]).tasks
    assert task.teams["mappo"].scores == [1.0, 3.0]
    with pytest.raises(ConfigError, match="'mappo' in '3m', as other runs do"):
        make_report([a, b, c])


def test_equal_task_names_of_two_environments_are_distinct(tmp_path):
    own = {"easy": {"a": {"seed_0": {"step_0": {"step_count": 5, "return": [1]}}}}}
    found, _ = read_raw_results(written(tmp_path, {"rware": own, "lbf": own}))
    assert list(found) == [("rware, easy", "a"), ("lbf, easy", "a")]


def test_files_of_different_environments_are_not_one_algorithm(tmp_path):
    """Seeds of `easy` in two environments have no common mean; other names are noted."""

    def path(environment, algorithm, seed):
        (tmp_path / f"{environment}{algorithm}").mkdir()
        own = {"easy": {algorithm: {f"seed_{seed}": {"step_0": {"step_count": 5, "return": [1]}}}}}
        return written(tmp_path / f"{environment}{algorithm}", {environment: own})

    rware, lbf, other = path("rware", "a", 0), path("lbf", "a", 1), path("lbf", "b", 1)
    with pytest.raises(ConfigError, match="'a' in 'easy' of the environment 'lbf', and other"):
        make_report([rware, lbf])
    sentence = "easy is a task of lbf and rware: its runs are compared as if these were one"
    assert any(sentence in note for note in notes(make_report([rware, other])))
    assert not any("is a task of" in note for note in notes(make_report([lbf, other])))


STEP = {"step_count": 5, "return": [1]}


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        ("{", "cannot be read"),
        ("[]", "the file has '\\[\\]', expected environment, task"),
        ({"smax": {"3m": 4}}, "smax/3m has '4'"),
        (wrapped({}), "smax/3m/mappo/seed_0 has '{}'"),
        (wrapped({"absolute_metrics": {"return": [1]}}), "has no steps in smax/3m/mappo/seed_0"),
        (wrapped({"step_0": {"step_count": 5, "retrun": [1]}}), "did you mean 'retrun'"),
        (wrapped({"step_0": {"return": [1]}}), "is broken in smax/3m/mappo/seed_0/step_0"),
        (wrapped({"step_0": {"step_count": -5, "return": [1]}}), "a step_count of 0 or more"),
        (wrapped({"step_0": {"step_count": 5, "return": ["a"]}}), "lists of numbers"),
        (wrapped({"step_0": {"step_count": 5, "return": []}}), "lists of numbers"),
        (wrapped({"step_0": STEP, "step_1": STEP}), "two steps with one step_count"),
        (
            {"smax": {"3m": {"mappo": {"0": {"step_0": STEP}, "seed_0": {"step_0": STEP}}}}},
            "has '0' and 'seed_0' in smax/3m/mappo, which are one seed",
        ),
    ],
)
def test_invalid_files_raise(tree, sentence, tmp_path):
    with pytest.raises(CheckpointError, match=sentence) as error:
        make_report(written(tmp_path, tree))
    assert "\n" not in str(error.value)


def test_run_is_cut_at_its_first_nan_return(tmp_path):
    bad = {"step_count": 9, "return": [float("nan")]}
    found, left_out = read_raw_results(
        written(
            tmp_path, {"e": {"t": {"a": {"seed_0": {"s": STEP, "t": bad}, "seed_1": {"s": bad}}}}}
        )
    )
    ([record],) = found.values()
    assert record.evaluation.returns.tolist() == [1]
    assert "not finite at frame 9" in record.notes[0]
    assert left_out == [
        f"{str(tmp_path / 'raw.json')!r} has no finite return at the start of e/t/a/seed_1."
    ]
