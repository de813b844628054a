"""Grouping of runs in a report: settings that change learning, and seeds counted once."""

import json
import shutil

import numpy as np
import pytest
from reported import write_run, write_suite

from torchrl_marl.apps.reports import make_report
from torchrl_marl.apps.reports.answers import answers, notes
from torchrl_marl.apps.reports.marl_eval import raw_results
from torchrl_marl.apps.reports.tables import markdown
from torchrl_marl.training.config import read_run_config

pytestmark = pytest.mark.pictures


def names_of(report):
    return {
        task.task.name: {name: len(team.runs) for name, team in task.teams.items()}
        for task in report.tasks
    }


def write_population(folder, ends, seed=0, **settings):
    """A population whose members have the given returns and different learning rates."""
    population = {"population.size": len(ends), **settings}
    write_run(folder, [0, 0], seed=seed, **population)
    (folder / "evaluation.csv").unlink()
    for i, returns in enumerate(ends):
        lr = {"learner.lr": 0.001 * (i + 1)} if settings else {}
        write_run(folder / f"seed{seed + i}", returns, seed=seed + i, **lr)
    return folder


class TestWhatLearnsDifferently:
    @pytest.mark.parametrize(
        "settings",
        [
            {"distributed.collectors": 4},
            {"distributed.collectors": 4, "distributed.overlap": 1},
            {"distributed.collectors": 4, "distributed.backend": "ray", "distributed.overlap": 1},
        ],
    )
    def test_collectors_do_not_matter_but_policy_lag_does(self, tmp_path, settings):
        write_run(tmp_path / "a", [1, 2])
        write_run(tmp_path / "b", [1, 2], seed=1, **settings)
        write_run(tmp_path / "c", [1, 2], seed=2, **settings, execution="eager")
        assert sorted(names_of(make_report(tmp_path))["arena"].values()) == [1, 2]

    def test_asynchronous_settings_are_different_algorithms(self, tmp_path):
        ray = {"distributed.collectors": 4, "distributed.backend": "ray"}
        late = {**ray, "distributed.asynchronous": True}
        write_run(tmp_path / "a", [1, 2], **ray)
        write_run(tmp_path / "b", [1, 2], **late)
        write_run(tmp_path / "c", [1, 2], **late, **{"distributed.max_lag": 2})
        # These differ only in the placement of actors:
        write_run(tmp_path / "d", [1, 2], seed=1, **{"distributed.collectors": 4})
        write_run(tmp_path / "e", [1, 2], seed=2, **ray, **{"distributed.actors": 2})
        assert names_of(make_report(tmp_path)) == {
            "arena": {
                "MAPPO (asynchronous=false)": 3,
                "MAPPO (asynchronous=true, max_lag=2)": 1,
                "MAPPO (asynchronous=true, max_lag=4)": 1,
            }
        }


class TestPopulations:
    PBT = {"evolution.method": "pbt"}

    def test_evolved_population_has_rows_for_best_and_mean(self, tmp_path):
        for seed, shift in ((0, 0.0), (10, 2.0)):
            ends = [[0, 1 + shift, 5], [0, 4, 2], [0, 1, 3 + shift], [0, 2, 6]]
            write_population(tmp_path / f"pbt{seed}", ends, seed=seed, **self.PBT)
        write_run(tmp_path / "alone", [0, 1, 4])
        report = make_report(tmp_path)
        teams = report.tasks[0].teams
        assert names_of(report)["arena"] == {
            "MAPPO": 1,
            "MAPPO, best of PBT of 4": 2,
            "MAPPO, mean of PBT of 4": 2,
        }
        assert teams["MAPPO, best of PBT of 4"].scores == [6, 6]
        assert teams["MAPPO, mean of PBT of 4"].scores == [4, 4.5]
        line = teams["MAPPO, best of PBT of 4"].evaluation
        assert line.each[1].tolist() == [4, 4]
        said = "\n".join(notes(report))
        assert "is the best of 4 members at each measurement, and so partly luck" in said
        assert "all members together have been trained for 4 times its frames" in said

    def test_absolute_metric_is_that_of_the_member_with_the_best_evaluation(self, tmp_path):
        """Of the members' best evaluations, 9 is the best; its parameters earn 7 in more games."""
        folder = write_population(tmp_path / "pbt", [[0, 5, 6], [0, 9, 2]], **self.PBT)
        for name, absolute in (("seed0", 8.0), ("seed1", 7.0), (".", 7.5)):
            path = folder / name / "summary.json"
            found = json.loads(path.read_text())
            path.write_text(json.dumps({**found, "return_absolute": absolute}))
        tree = raw_results(make_report(tmp_path).tasks)["toy"]["arena"]
        found = {name: own["seed_0"]["absolute_metrics"]["return"] for name, own in tree.items()}
        assert found == {"MAPPO - best of PBT of 2": [7.0], "MAPPO - mean of PBT of 2": [7.5]}

    def test_given_member_is_replaced_by_its_evolved_population(self, tmp_path):
        folder = write_population(tmp_path / "pbt", [[0, 1], [0, 3]], **self.PBT)
        report = make_report([folder / "seed1"])
        assert set(report.tasks[0].teams) == {
            "MAPPO, best of PBT of 2",
            "MAPPO, mean of PBT of 2",
        }

    def test_diverged_member_is_excluded_from_best_and_mean(self, tmp_path):
        ends = [[0, float("nan")], [0, 3]]
        write_population(tmp_path / "pbt", ends, **self.PBT)
        teams = make_report(tmp_path).tasks[0].teams
        assert teams["MAPPO, best of PBT of 2"].scores == [3]
        assert teams["MAPPO, mean of PBT of 2"].scores == [3]  # of the others

    def test_members_without_evolution_are_seeds(self, tmp_path):
        write_population(tmp_path / "population", [[0, 1], [0, 2]])
        assert names_of(make_report(tmp_path))["arena"] == {"MAPPO": 2}


class TestASeedCountsOnce:
    def test_member_and_run_with_equal_seed_count_once(self, tmp_path):
        write_population(tmp_path / "population", [[0, 1], [0, 2]])
        write_run(tmp_path / "run", [0, 1.5])
        report = make_report(tmp_path)
        assert names_of(report)["arena"] == {"MAPPO": 2}
        (sentence,) = report.left_out
        assert "run' has the seed 0 and the learning settings of " in sentence
        assert sentence.endswith("population/seed0'; a seed counts once.")

    def test_longer_run_of_a_seed_is_kept(self, tmp_path):
        write_run(tmp_path / "a", [0, 1], finished=False)
        write_run(tmp_path / "b", [0, 1, 3], execution="eager")
        assert make_report(tmp_path).tasks[0].teams["MAPPO"].scores == [3]


class TestNames:
    def test_unused_settings_are_not_part_of_the_name(self, tmp_path):
        zero_sum = "toy_zero_sum_ippo_psro"
        write_run(tmp_path / "a", [0, 0], recipe=zero_sum)
        none = {"league.opponents": "none"}
        write_run(tmp_path / "b", [0, 0], recipe=zero_sum, **none)
        more = {"league.snapshot_every": 77, "league.weighting": "linear"}
        config = write_run(tmp_path / "c", [0, 0], recipe=zero_sum, seed=1, **none) / "config.yaml"
        text = config.read_text()
        for name, value in more.items():
            key = name.removeprefix("league.")
            before = getattr(read_run_config(tmp_path / "c").league, key)
            text = text.replace(f"  {key}: {before} ", f"  {key}: {value} ", 1)
        config.write_text(text)
        assert read_run_config(tmp_path / "c").league.snapshot_every == 77
        assert names_of(make_report(tmp_path)) == {
            "zero_sum": {"IPPO (opponents=nash)": 1, "IPPO (opponents=none)": 2}
        }


class TestAnswers:
    @pytest.fixture
    def three(self, tmp_path):
        ends = {"mappo": 10.0, "ippo": 9.9, "happo": 2.0}
        for name, end in ends.items():
            for seed in range(5):
                settings = {"learner.algorithm": name, "seed": seed}
                write_run(tmp_path / f"{name}{seed}", [0, end + 0.1 * seed], **settings)
        return make_report(tmp_path)

    def test_best_algorithm_is_compared_with_each_other(self, three):
        _, second, third = answers(three)
        assert second.startswith("A run of MAPPO is better than one of IPPO with probability")
        assert second.endswith("these runs cannot tell them apart.")
        assert third.startswith("A run of MAPPO is better than one of HAPPO with probability 1.00")
        assert third.endswith("a significant difference over seeds.")

    def test_comparisons_over_several_tasks(self, tmp_path):
        levels = {"mappo": (0.9, 0.01), "ippo": (0.5, 0.01), "masac": (0.3, 0.01)}
        write_suite(tmp_path, ["balance", "navigation"], levels, seeds=5, points=3)
        sentences = answers(make_report(tmp_path))
        assert [" IPPO " in x or " MASAC " in x for x in sentences[1:]] == [True, True]
        assert all("significant difference" in x for x in sentences[1:])

    def test_aggregates_cover_every_algorithm_of_several_tasks(self, tmp_path):
        """Two teams in two tasks, and a third in two others."""
        levels = {"mappo": (0.9, 0.01), "ippo": (0.8, 0.01)}
        write_suite(tmp_path, ["balance", "navigation"], levels, seeds=2, points=3)
        write_suite(tmp_path, ["wheel", "transport"], {"masac": (0.5, 0.01)}, seeds=2, points=3)
        first, second = make_report(tmp_path).aggregates
        assert first.algorithms == ["MAPPO", "IPPO"] and second.algorithms == ["MASAC"]
        assert second.tasks == ["transport", "wheel"]
        # For a single task there is one table.
        (alone,) = make_report([tmp_path / "balance"]).aggregates
        assert alone.algorithms == ["MAPPO", "IPPO"]

    def test_zero_sum_task_recommends_crossplay(self, tmp_path):
        for seed, won in enumerate((0.2, -0.1)):
            for name, opponents in (("a", "nash"), ("b", "none")):
                run = write_run(
                    tmp_path / f"{name}{seed}",
                    [0, 0],
                    recipe="toy_zero_sum_ippo_psro",
                    seed=seed,
                    **{"league.opponents": opponents},
                )
                head = "frames,return_mean,first/episode_reward,second/episode_reward"
                rows = f"{head}\n0,0,0.5,-0.5\n1000,1e-9,{won},{-won}\n"
                (run / "evaluation.csv").write_text(rows)
        (sentence,) = answers(make_report(tmp_path))
        assert (
            "is zero-sum: where one policy plays both sides the mean return is always 0" in sentence
        )
        assert "`torchrl-marl crossplay RUN RUN ...`" in sentence
        # Also for one algorithm without a league, but not for a task with zero returns.
        shutil.rmtree(tmp_path / "a0"), shutil.rmtree(tmp_path / "a1")
        assert "crossplay" in answers(make_report(tmp_path))[0]
        write_run(tmp_path / "c", [0, 0])
        assert "crossplay" not in answers(make_report(tmp_path / "c"))[0]

    def test_zero_sum_task_among_others_is_a_note(self, tmp_path):
        write_suite(tmp_path, ["balance", "navigation"], seeds=2, points=3)
        write_run(tmp_path / "game", [0, 0], recipe="toy_zero_sum_ippo_psro")
        report = make_report(tmp_path)
        assert not any("crossplay" in x for x in answers(report))
        assert any("crossplay" in x for x in notes(report)) and "crossplay" in markdown(report)
        assert np.isfinite(report.aggregates[0].estimates["MAPPO"]["IQM"].value)


if __name__ == "__main__":
    pytest.main([__file__])
