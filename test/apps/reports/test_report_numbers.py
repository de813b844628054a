"""The figures of a report, compared with independent computations."""

import csv
import io
import json
import shutil

import numpy as np
import pytest
from reported import TASKS, write_run, write_suite
from scipy.stats import mannwhitneyu, trim_mean

from torchrl_marl.apps.reports import make_report
from torchrl_marl.apps.reports.aggregates import _value_at
from torchrl_marl.apps.reports.answers import _improvement_sentence, answers, notes
from torchrl_marl.apps.reports.page import page
from torchrl_marl.apps.reports.tables import curves_csv, evaluations_csv, markdown, results_csv
from torchrl_marl.errors import CheckpointError, ConfigError
from torchrl_marl.training.statistics import (
    estimate,
    interquartile_mean,
    probability_of_improvement,
)


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    folder = tmp_path_factory.mktemp("suite")
    return write_suite(folder, ["balance", "navigation", "wheel"], seeds=5, points=6)


@pytest.fixture(scope="module")
def report(suite):
    return make_report(suite)


def ends(folder, task, algorithm):
    """The last return of each seed, read from the files."""
    found = []
    for path in sorted((folder / task / algorithm).glob("seed*/evaluation.csv")):
        found.append(float(rows(path.read_text())[-1]["return_mean"]))
    return np.array(found)


def rows(text):
    return list(csv.DictReader(io.StringIO(text)))


def test_scores_and_estimates(suite, report):
    for result in report.tasks:
        one, other = (ends(suite, result.task.name, name) for name in ("mappo", "ippo"))
        team = result.teams["MAPPO"]
        np.testing.assert_allclose(team.scores, one)
        np.testing.assert_allclose(team.iqm.value, trim_mean(one, 0.25))
        assert min(one) <= team.iqm.low <= team.iqm.value <= team.iqm.high <= max(one)
        won = mannwhitneyu(one, other).statistic / 25
        np.testing.assert_allclose(result.improvements["MAPPO", "IPPO"].value, won)


def test_normalized_scores_over_all_tasks(suite, report):
    (found,) = report.aggregates
    assert found.tasks == ["balance", "navigation", "wheel"]
    scores = {"mappo": [], "ippo": []}
    for task in found.tasks:
        random = TASKS[task][0]
        both = {name: ends(suite, task, name) for name in scores}
        best = max(x.max() for x in both.values())
        for name, values in both.items():
            scores[name].append((values - random) / (best - random))
    for name, matrix in scores.items():
        own = found.estimates[name.upper()]
        np.testing.assert_allclose(own["IQM"].value, trim_mean(np.ravel(matrix), 0.25))
        np.testing.assert_allclose(own["mean"].value, np.mean(matrix))
        np.testing.assert_allclose(own["median"].value, np.median(np.mean(matrix, 1)))
        np.testing.assert_allclose(own["optimality gap"].value, 1 - np.mean(matrix))
        above = [(np.ravel(matrix) > tau).mean() for tau in found.thresholds]
        np.testing.assert_allclose(found.profiles[name.upper()].value, above)
        # Curves begin near 0 and end at the figure of the table.
        assert abs(found.curves[name.upper()].value[0]) < 0.1
        np.testing.assert_allclose(found.curves[name.upper()].value[-1], own["IQM"].value)


def test_lines_over_frames_agent_frames_and_seconds(suite, report):
    line = report.tasks[0].teams["MAPPO"].evaluation
    np.testing.assert_array_equal(line.frames, np.linspace(0, 480_000, 6))
    np.testing.assert_array_equal(line.agent_frames, 3 * line.frames)
    np.testing.assert_allclose(line.seconds, 0.0001 * line.frames)
    folders = [suite / "balance" / "mappo" / f"seed{seed}" for seed in range(5)]
    tables = [rows((folder / "evaluation.csv").read_text()) for folder in folders]
    third = [float(table[2]["return_mean"]) for table in tables]
    np.testing.assert_allclose(line.value[2], trim_mean(third, 0.25))
    np.testing.assert_allclose(line.each[2], third)


def test_algorithms_are_compared_at_the_smallest_number_of_frames(tmp_path):
    write_run(tmp_path / "a", [0, 1, 2, 3, 4], frames=[0, 100, 200, 300, 400])
    write_run(tmp_path / "b", [0, 5, 7], frames=[0, 100, 205], **{"learner.algorithm": "ippo"})
    (result,) = make_report(tmp_path).tasks
    assert result.frames == 205 and result.equal
    assert result.teams["MAPPO"].scores == [2] and result.teams["MAPPO"].runs[0].end == 4
    assert result.teams["IPPO"].scores == [7]
    assert any("trained for 205 to 400 frames" in note for note in notes(make_report(tmp_path)))


def test_distant_measurements_are_interpolated_and_noted(tmp_path):
    write_run(tmp_path / "a", [0, 4], frames=[0, 400])
    write_run(tmp_path / "b", [0, 7], frames=[0, 200], **{"learner.algorithm": "ippo"})
    report = make_report(tmp_path)
    assert report.tasks[0].teams["MAPPO"].scores == [2] and not report.tasks[0].equal
    assert any("no measurement near" in note and "/a (400)" in note for note in notes(report))


def test_longer_training_does_not_raise_scores(tmp_path):
    """At equal frames each run of MAPPO is 1 below that of IPPO, whose training was shorter."""
    for seed in range(4):
        long, short = [seed + 10 * k for k in range(5)], [seed + 1 + 12 * k for k in range(3)]
        ippo = {"learner.algorithm": "ippo", "seed": seed}
        write_run(tmp_path / f"a{seed}", long, frames=[0, 100, 200, 300, 400], seed=seed)
        write_run(tmp_path / f"b{seed}", short, frames=[0, 120, 240], **ippo)
    teams = make_report(tmp_path).tasks[0].teams
    np.testing.assert_allclose(teams["MAPPO"].scores, [24, 25, 26, 27])
    np.testing.assert_allclose(teams["IPPO"].scores, [25, 26, 27, 28])


def test_exact_measurement_is_not_interpolated():
    frames, values = np.array([0.0, 100, 200]), np.array([1.0, 3, np.nan])
    assert [_value_at(frames, values, at) for at in (0, 50, 100)] == [1, 2, 3]


def test_reference_of_the_lever_game_depends_on_its_rounds(tmp_path):
    levers = {"env.name": "matching_levers"}
    once = {"env.kwargs.rounds": 1, "env.kwargs.n_levers": 10, "env.kwargs.last_lever": 0.9}
    for folder, settings, best in (("a", {}, 8), ("b", once, 1)):
        (result,) = make_report(write_run(tmp_path / folder, [0, 1], **levers, **settings)).tasks
        assert result.reference.best == best


def test_unfinished_runs_count_up_to_their_last_frame(tmp_path):
    write_run(tmp_path / "a", [0, 1, 2, 3], seed=0)
    write_run(tmp_path / "b", [0, 1, 4, 5], seed=1)
    write_run(tmp_path / "c", [0, 6], seed=2, finished=False)
    report = make_report(tmp_path)
    (team,) = report.tasks[0].teams.values()
    assert report.tasks[0].frames == 3000 and team.scores == [3, 5, 6]
    assert [run.record.finished for run in team.runs] == [True, True, False]
    np.testing.assert_array_equal(team.evaluation.runs, [3, 3, 2, 2])
    np.testing.assert_allclose(team.evaluation.value, [0, 8 / 3, 3, 4])
    assert any("has not finished; used up to frame 1,000 of 100,000" in x for x in notes(report))


def test_unfinished_runs_of_a_report_are_unfinished_in_its_table(tmp_path):
    """IPPO's only run has stopped early, so that MAPPO is compared at its own end."""
    write_run(tmp_path / "a", [0, 1, 2, 3])
    write_run(tmp_path / "b", [0, 5], finished=False, **{"learner.algorithm": "ippo"})
    report = make_report(tmp_path)
    (tmp_path / "evaluations.csv").write_text(evaluations_csv(report))
    again = make_report(tmp_path / "evaluations.csv")
    for found in (report, again):
        (result,) = found.tasks
        assert result.frames == 3000 and result.teams["MAPPO"].scores == [3]
        assert any("has not finished; used up to frame 1,000" in x for x in notes(found))


def test_better_mean_with_fewer_wins_is_not_called_undecided(tmp_path):
    """Of 40 runs, 12 earn 50 and 28 earn 2: IQM 6.8, but 3 of 10 runs beat one that earns 3."""
    rare, steady = [np.repeat([2.0, 50.0], (28, 12))], [np.full(40, 3.0)]
    assert interquartile_mean(rare) == pytest.approx((18 * 2 + 2 * 50) / 20)
    found = estimate(probability_of_improvement, rare, steady)
    assert found.value == pytest.approx(0.3) and found.high < 0.5
    sentence = _improvement_sentence(("A", "B"), found, rare, steady)
    assert sentence.startswith("A run of A is better than one of B with probability 0.30 [0.")
    assert sentence.endswith("], a significant difference over seeds.")


def test_run_is_cut_at_its_first_nan_return(tmp_path):
    write_run(tmp_path / "a", [0.0, 3.0, float("nan"), 9.0])
    report = make_report(tmp_path)
    assert report.tasks[0].teams["MAPPO"].scores == [3]
    assert any("not finite at frame 2,000; used up to there" in x for x in notes(report))
    write_run(tmp_path / "b", [float("nan"), float("nan")], seed=1, training=False)
    write_run(tmp_path / "c", [float("nan"), 3.0], seed=2)
    report = make_report(tmp_path)
    assert report.tasks[0].teams["MAPPO"].scores == [3]  # without returns of training episodes
    for name, sentence in zip("bc", report.left_out):
        assert f"/{name}' has a return that is not finite at its first" in sentence
    assert not any("/c " in note for note in notes(report) if "Left out" not in note)


def test_training_returns_end_at_the_first_return_that_is_not_finite(tmp_path):
    """Returns of 5 and 7 after a diverged evaluation, or an infinite return, are no scores."""
    run = write_run(tmp_path / "a", [0.0, 2.0, 5.0, 7.0])
    lines = (run / "evaluation.csv").read_text().splitlines()
    lines[3] = lines[3].replace(",5.0,", ",nan,")
    (run / "evaluation.csv").write_text("\n".join([*lines[:2], *lines[3:]]) + "\n")
    run = write_run(tmp_path / "b", [0.0, 3.0, float("inf"), 7.0], seed=1)
    (run / "evaluation.csv").unlink()
    report = make_report(tmp_path)
    assert report.tasks[0].teams["MAPPO"].scores == [2, 3]
    cut = [note for note in notes(report) if "not finite at frame 2,000; used up to there" in note]
    assert len(cut) == 2


def test_runs_without_evaluations_use_training_returns(tmp_path):
    run = write_run(tmp_path / "a", [0, 1, 2])
    (run / "evaluation.csv").unlink()
    report = make_report(tmp_path)
    assert report.tasks[0].teams["MAPPO"].scores == [2]
    assert any("returns are those of training episodes" in note for note in notes(report))
    assert {row["measured_by"] for row in rows(evaluations_csv(report))} == {"training"}


def test_training_returns_are_those_of_the_environment(tmp_path):
    """The table of training has ten times the environment's rewards; evaluations have its own."""
    write_run(tmp_path / "a", [0, 10, 20], **{"env.reward_scale": 10.0})
    write_run(tmp_path / "b", [0, 1, 2], **{"learner.algorithm": "ippo"})
    (tmp_path / "a" / "evaluation.csv").unlink()
    teams = make_report(tmp_path).tasks[0].teams
    np.testing.assert_allclose(teams["MAPPO"].training.value, teams["IPPO"].training.value)
    assert teams["MAPPO"].scores == teams["IPPO"].scores == [2]


def test_run_evaluated_before_training_only_counts_with_its_training_returns(tmp_path):
    for seed, ends in enumerate(([0.0, 3.0], [0.0, 5.0])):
        run = write_run(tmp_path / f"{seed}", ends, seed=seed, finished=False)
        lines = (run / "evaluation.csv").read_text().splitlines()
        (run / "evaluation.csv").write_text("\n".join(lines[:2]) + "\n")  # of frame 0
    report = make_report(tmp_path)
    assert report.tasks[0].frames == 1000 and report.tasks[0].teams["MAPPO"].scores == [3, 5]
    sentence = "0 has no evaluations after frame 0; returns are those of training episodes."
    assert sum(note.endswith(sentence) for note in notes(report)) == 1


def test_run_without_evaluations_has_not_diverged(tmp_path):
    run = write_run(tmp_path / "a", [0, 1, 2])
    (run / "evaluation.csv").unlink()
    found = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**found, "return_after": None}))
    assert not any("diverged" in note for note in notes(make_report(tmp_path)))


def test_pruned_trials_have_not_finished(tmp_path):
    write_run(tmp_path / "whole", [0.0, 2.0, 4.0, 12.0])
    for seed, lr in ((1, 1e-3), (2, 1e-2)):
        run = write_run(tmp_path / f"pruned_{seed}", [0.0, 1.0], seed=seed, **{"learner.lr": lr})
        summary = json.loads((run / "summary.json").read_text())
        del summary["return_after"]
        (run / "summary.json").write_text(json.dumps(summary))
        lines = (run / "evaluation.csv").read_text().splitlines()
        (run / "evaluation.csv").write_text("\n".join(lines[: 3 - seed]) + "\n")
    report = make_report(tmp_path)
    assert report.tasks[0].frames == 3000
    assert [run.record.finished for run in report.runs].count(True) == 1
    assert sum("used up to frame 1,000 of 100,000" in note for note in notes(report)) == 2
    markdown(report)


def test_one_seed_has_no_interval(tmp_path):
    write_run(tmp_path / "a", [0, 3])
    report = make_report(tmp_path)
    (row,) = rows(results_csv(report))
    assert row["iqm"] == "3" and row["iqm_low"] == row["iqm_high"] == ""
    assert any("One seed, and so no interval" in note for note in notes(report))
    assert "earns 3 (random policy: 0)" in answers(report)[0]


def test_note_states_coverage_for_few_seeds(tmp_path):
    for seed in range(3):
        write_run(tmp_path / f"{seed}", [0, seed], seed=seed)
    assert any("in 75 % of the cases, not 95 %" in note for note in notes(make_report(tmp_path)))


def test_tasks_of_different_algorithms_are_not_averaged(tmp_path):
    write_run(tmp_path / "a", [0, 3])
    other = {"recipe": "toy_matrix_game_mappo", "learner.algorithm": "ippo"}
    write_run(tmp_path / "b", [0, 3], **other)
    report = make_report(tmp_path)
    assert not report.aggregates
    assert any("No figure over all tasks is given" in note for note in notes(report))


def test_aggregates_use_the_tasks_shared_by_algorithms(tmp_path):
    levels = {"mappo": (0.9, 0.01), "ippo": (0.8, 0.01)}
    write_suite(tmp_path, ["balance", "navigation", "wheel"], levels, seeds=2, points=3)
    write_suite(tmp_path, ["balance", "wheel"], {"masac": (0.5, 0.01)}, seeds=2, points=3)
    first, second = make_report(tmp_path).aggregates
    assert first.algorithms == ["MAPPO", "IPPO"] and len(first.tasks) == 3
    assert second.algorithms == ["MAPPO", "IPPO", "MASAC"]
    assert second.tasks == ["balance", "wheel"]


def test_returns_of_groups(tmp_path):
    for seed, cats in enumerate((1, 2, 6)):
        run = write_run(tmp_path / f"{seed}", [0, 3], seed=seed)
        head = "frames,return_mean,cats/episode_reward,dogs/episode_reward"
        (run / "evaluation.csv").write_text(f"{head}\n0,0,9,9\n1000,3,{cats},-7\n")
    report = make_report(tmp_path)
    (team,) = report.tasks[0].teams.values()
    assert (team.groups["cats"].value, team.groups["dogs"].value) == (3, -7)
    assert "| MAPPO | 3.0 \\[1.0, 6.0\\] | -7 \\[-7, -7\\] |" in markdown(report)
    assert any("has the groups cats and dogs" in note for note in notes(report))


def test_note_compares_most_likely_and_sampled_actions(tmp_path):
    for seed, drawn in enumerate((1.0, 2.0, 9.0)):
        run = write_run(tmp_path / f"{seed}", [0, 3], seed=seed)
        summary = json.loads((run / "summary.json").read_text())
        kinds = {"likeliest": {"return_mean": -5.0}, "drawn": {"return_mean": drawn}}
        differ = "they differ" if seed < 2 else None
        summary |= {"evaluation": kinds, "actions_differ": differ}
        (run / "summary.json").write_text(json.dumps(summary))
    (note,) = (note for note in notes(make_report(tmp_path)) if "most likely" in note)
    assert "earn -5 and sampled ones 1.5, a significant difference in 2 of 3 runs" in note
    for path in tmp_path.glob("*/summary.json"):  # episodes with a much larger spread
        summary = json.loads(path.read_text())
        for own in summary["evaluation"].values():
            own["return_std"] = 50.0
        path.write_text(json.dumps(summary))
    assert not any("most likely" in note for note in notes(make_report(tmp_path)))


def test_references_for_normalization(tmp_path):
    exact = make_report(write_run(tmp_path / "a", [0, 3], random=1.0)).tasks[0]
    assert (exact.reference.random, exact.reference.best) == (1.0, 12.5)
    assert exact.normalized("MAPPO") == [pytest.approx(2 / 11.5)]
    other = write_run(tmp_path / "b", [0, 3], random=1.0, **{"env.kwargs.lives": 5})
    unknown = make_report(other).tasks[0].reference
    assert unknown.best == 3 and unknown.best_source == "the best run of this report, of MAPPO"
    worse = write_run(tmp_path / "c", [0, 0.5], random=1.0, **{"env.kwargs.lives": 6})
    report = make_report(worse)
    assert "no known return is better" in "\n".join(notes(report)) and not report.aggregates

    own = tmp_path / "own.yaml"
    own.write_text("- {task: toy/arena, random: 0, best: 6, source: mine}\n")
    found = make_report(tmp_path / "b", own).tasks[0]
    assert found.normalized("MAPPO") == [0.5] and found.reference.random_source == "mine"
    own.write_text("- {task: toy/arena, top: 6}\n")
    with pytest.raises(ConfigError, match="expected entries with task, source"):
        make_report(tmp_path / "b", own)


def test_csv_and_markdown_tables(report):
    evaluations = rows(evaluations_csv(report))
    assert len(evaluations) == 3 * 2 * 5 * 6
    results = rows(results_csv(report))
    assert len(results) == 6
    last = [
        float(row["return"])
        for row in evaluations
        if (row["task"], row["algorithm"], row["frames"]) == ("wheel", "IPPO", "480000")
    ]
    row = next(row for row in results if (row["task"], row["algorithm"]) == ("wheel", "IPPO"))
    np.testing.assert_allclose(float(row["iqm"]), trim_mean(last, 0.25))
    assert row["agent_frames"] == "1440000" and row["seeds"] == "5"
    text = markdown(report)
    assert f"| IPPO | {float(row['iqm']):.2f} \\[" in text
    assert all(line.count("|") > 2 for line in text.splitlines() if line.startswith("|"))


def test_curves_csv_has_values_and_intervals(suite, report):
    curves = rows(curves_csv(report))
    assert {row["measured_by"] for row in curves} == {"evaluation", "training"}
    own = [
        row
        for row in curves
        if (row["task"], row["algorithm"], row["measured_by"]) == ("wheel", "IPPO", "evaluation")
    ]
    line = next(x for x in report.tasks if x.task.name == "wheel").teams["IPPO"].evaluation
    for name, expected in (("iqm", line.value), ("iqm_low", line.low), ("iqm_high", line.high)):
        np.testing.assert_allclose([float(row[name]) for row in own], expected)
    assert [row["frames"] for row in own][-1] == "480000" and {row["runs"] for row in own} == {"5"}


def test_foreign_tables_are_merged_into_the_tasks(suite, report, tmp_path):
    own = tmp_path / "evaluations.csv"
    own.write_text(evaluations_csv(report))
    again = make_report(own)  # a report of a report's table
    for one, other in zip(report.tasks, again.tasks):
        for name, team in one.teams.items():
            np.testing.assert_allclose(other.teams[name].scores, team.scores)
            np.testing.assert_array_equal(
                other.teams[name].evaluation.seconds, team.evaluation.seconds
            )
    theirs = tmp_path / "other.csv"
    theirs.write_text(
        "task,algorithm,seed,frames,return\n"
        "wheel,Other MAPPO,0,480000,1\nwheel,Other MAPPO,1,480000,2\nelsewhere,Other MAPPO,0,9,3\n"
    )
    both = {result.task.name: result for result in make_report([suite, theirs]).tasks}
    assert both["wheel"].teams["Other MAPPO"].scores == [1, 2]
    assert set(both["wheel"].teams) == {"MAPPO", "IPPO", "Other MAPPO"}
    assert list(both["elsewhere"].teams) == ["Other MAPPO"]


@pytest.mark.pictures
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "it has no rows"),
        ("task,seed\na,1\n", "it has no column 'algorithm'"),
        ("task,algorithm,seed,frames,return\na,b,0,1,good\n", "is broken in line 2"),
        ("task,algorithm,seed,frames,return\n,b,0,1,1\n", "in line 2, expected a task"),
        ("task,algorithm,seed,frames,return\na,b,0,-5,1\n", "has frames=-5 in line 2"),
        ("task,algorithm,seed,frames,return\na,b,0,5,1\n\na,b,0,5,2\n", "in lines 2 and 4"),
        ("task,algorithm,seed,frames,return\nwheel,MAPPO,0,1,1\n", "give it another name"),
    ],
)
def test_invalid_foreign_tables_raise(suite, tmp_path, text, sentence):
    path = tmp_path / "other.csv"
    path.write_text(text)
    with pytest.raises((CheckpointError, ConfigError), match=sentence) as error:
        make_report([suite / "wheel", path])
    assert "\n" not in str(error.value)


def test_foreign_run_is_cut_at_its_first_nan_return(tmp_path):
    path = tmp_path / "other.csv"
    rows = "a,b,0,0,1\na,b,0,9,nan\na,b,1,0,1\na,b,1,9,2\na,c,1,0,nan\n"
    path.write_text("task,algorithm,seed,frames,return\n" + rows)
    report = make_report(path)
    assert report.tasks[0].teams["b"].scores == [1, 2]
    said = "\n".join(notes(report))
    assert "('b' in 'a', seed 0) has a return that is not finite at frame 9" in said
    assert "no finite return at the start of 'c' in 'a', seed 1" in report.left_out[0]
    assert "of training in all" not in page(report)  # the table has no seconds


def test_notes_name_runs_of_a_foreign_table(tmp_path):
    path = tmp_path / "other.csv"
    rows = "a,b,0,10,1\na,b,0,20,1\na,b,1,100,1\na,b,1,300,3\n"
    path.write_text("task,algorithm,seed,frames,return\n" + rows)
    said = "\n".join(notes(make_report(path)))
    assert "other.csv ('b' in 'a', seed 0) (20)" in said


@pytest.mark.parametrize(("seeds", "cases"), [(2, "1 of 3"), (3, "1 of 10"), (4, None)])
def test_significance_requires_four_seeds(tmp_path, seeds, cases):
    for seed in range(seeds):
        write_run(tmp_path / f"a{seed}", [0, 9 + seed], seed=seed)
        write_run(tmp_path / f"b{seed}", [0, seed], seed=seed, **{"learner.algorithm": "ippo"})
    said = answers(make_report(tmp_path))[1]
    if cases is None:
        assert "with probability 1.00 [1.00, 1.00], a significant difference over seeds" in said
    else:
        assert f"{seeds} seeds each differ as much by chance in {cases} cases" in said
        assert said.endswith("and a verdict takes at least 4 seeds each.")
        assert "significant" not in said


def test_copy_of_a_run_counts_once(tmp_path):
    run = write_run(tmp_path / "a", [0, 1])
    write_run(tmp_path / "b", [0, 1], seed=1)
    shutil.copytree(run, tmp_path / "c")
    report = make_report(tmp_path)
    assert report.tasks[0].teams["MAPPO"].scores == [1, 1]
    (sentence,) = report.left_out
    assert "/c' has the settings, the seed and every number of" in sentence
    assert any("Left out:" in note and "does not count" in note for note in notes(report))


def test_notes_report_different_lengths_of_seeds(tmp_path):
    write_run(tmp_path / "a", [0, 1, 2, 3], total_frames=3000)
    write_run(tmp_path / "b", [0, 1, 2, 3], seed=1, total_frames=6000)
    write_run(tmp_path / "c", [0, 6], seed=2, finished=False, total_frames=6000)
    said = "\n".join(notes(make_report(tmp_path)))
    assert "Seeds of MAPPO in arena have total_frames of 3,000 and 6,000" in said
    assert "compared at 3,000 frames" in said and "/c (1,000)" in said


def test_notes_report_truncated_tables(tmp_path):
    run = write_run(tmp_path / "a", [0, 1, 2, 3])
    table = run / "evaluation.csv"
    table.write_text(table.read_text()[:-3])
    text = (run / "metrics.csv").read_text().splitlines(keepends=True)
    (run / "metrics.csv").write_text("".join(text[:2]))
    report = make_report(tmp_path)
    assert report.tasks[0].teams["MAPPO"].scores == [2]
    said = "\n".join(notes(report))
    assert "/a has an incomplete last line in evaluation.csv, which is not used." in said
    assert "/a has a metrics.csv that ends at frame 1,000; later evaluations have no agent" in said


@pytest.mark.pictures
def test_report_is_deterministic(suite, report):
    assert markdown(make_report(suite)) == markdown(report)


if __name__ == "__main__":
    pytest.main([__file__])


@pytest.mark.parametrize(
    ("settings", "texts"),
    [
        ({"evaluation.deterministic": False}, ("true", "false")),
        (
            {"evaluation.randomize": True, "env.randomize": {"observation_noise": 0.1}},
            ("false", '{"observation_noise": 0.1}'),
        ),
        ({"evaluation.randomize": True}, ()),  # without ranges it changes nothing
        ({"evaluation.episodes": 7}, ()),
    ],
)
def test_note_on_returns_of_different_evaluations(tmp_path, settings, texts):
    """Sampled actions or randomized values measure another return."""
    write_run(tmp_path / "a", [1, 2])
    write_run(tmp_path / "b", [1, 9], seed=1, **settings)
    sentences = [note for note in notes(make_report(tmp_path)) if "different evaluations" in note]
    assert len(sentences) == bool(texts)
    for text, name, sentence in zip(texts, "ab", sentences * 2):
        assert f" {text} in {tmp_path / name}" in sentence
