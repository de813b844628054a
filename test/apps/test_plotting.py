"""Learning curves: reading run folders, and drawing them."""

import csv
import shutil

import numpy as np
import pytest
from plotted import HEAD, make_groups_run, make_run

from torchrl_marl.apps.cli import main as cli
from torchrl_marl.apps.plotting import aggregate, learning_curve
from torchrl_marl.apps.reports.curves import read_csv, read_run
from torchrl_marl.errors import CheckpointError, ConfigError, MissingExtraError

pytest.importorskip("matplotlib")

pytestmark = pytest.mark.pictures

TOY = "toy_arena_mappo"


def lines_of(figure):
    (axes,) = figure.axes
    return {
        line.get_label(): (np.asarray(line.get_xdata()), np.asarray(line.get_ydata()))
        for line in axes.lines
        if not line.get_label().startswith("_")
    }


class TestReading:
    def test_read_run_reads_columns_and_empty_cells(self, tmp_path):
        run = read_run(make_run(tmp_path / "run", rewards=(None, 2.0)))
        assert run.recipe == TOY
        np.testing.assert_array_equal(run.training["frames"], [640, 1280])
        np.testing.assert_array_equal(run.training["agents/episode_reward"], [np.nan, 2.0])
        np.testing.assert_array_equal(run.evaluation["return_mean"], [0.5, 3.5])
        assert run.summary["return_random"] == 0.25

    @pytest.mark.parametrize("last", ["4", "4,2560,", "4,2560,8000,2.0,1280,4.0,0.0"])
    def test_incomplete_last_line_is_ignored(self, tmp_path, last):
        run = read_run(make_run(tmp_path / "run", last=last))
        np.testing.assert_array_equal(run.training["frames"], [640, 1280, 1920])

    def test_error_names_the_broken_line(self, tmp_path):
        path = tmp_path / "metrics.csv"
        path.write_text("frames,x\n1,2\n2,two\n3,4\n")
        with pytest.raises(CheckpointError, match=r"broken in line 3, expected 2 numbers"):
            read_csv(path)
        path.write_text("frames,x\n1,2\n2\n3,4\n")
        with pytest.raises(CheckpointError, match=r"broken in line 3"):
            read_csv(path)

    def test_special_line_separators_do_not_end_rows(self, tmp_path):
        """Names of groups and agents may contain characters that other readers split at."""
        path = tmp_path / "metrics.csv"
        names = ["a\u2028b/x", "c\x85d/x", "two\nlines/x", "e\x0bf\x1cg/x"]
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([["frames", *names], [1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])
        found = read_csv(path)
        assert list(found) == ["frames", *names]
        np.testing.assert_array_equal([column[1] for column in found.values()], range(6, 11))
        with path.open("a", newline="", encoding="utf-8") as file:
            file.write("11,12,x,14,15\r\n")
        with pytest.raises(CheckpointError, match="broken in line 5, expected 5 numbers"):
            read_csv(path)

    def test_missing_or_empty_table_has_no_columns(self, tmp_path):
        assert read_csv(tmp_path / "none.csv") == {}
        (tmp_path / "empty.csv").write_text("")
        assert read_csv(tmp_path / "empty.csv") == {}

    def test_run_without_rows_raises(self, tmp_path):
        folder = make_run(tmp_path / "run", rewards=())
        (folder / "evaluation.csv").unlink()
        with pytest.raises(CheckpointError, match="has no row in metrics.csv yet"):
            read_run(folder)

    def test_folder_that_is_no_run_raises(self, tmp_path):
        with pytest.raises(CheckpointError, match="is not a run folder") as error:
            learning_curve([tmp_path])
        assert "\n" not in str(error.value)


class TestAggregate:
    def test_seeds_with_different_frames_are_interpolated(self):
        frames, mean, low, high = aggregate(
            [
                (np.array([0.0, 10.0, 20.0]), np.array([0.0, 10.0, 20.0])),
                (np.array([0.0, 20.0]), np.array([2.0, 22.0])),
            ]
        )
        np.testing.assert_array_equal(frames, [0, 10, 20])
        np.testing.assert_array_equal(mean, [1, 11, 21])
        np.testing.assert_array_equal(low, [0, 10, 20])
        np.testing.assert_array_equal(high, [2, 12, 22])

    def test_mean_ends_with_the_shortest_seed(self):
        frames, mean, *_ = aggregate(
            [
                (np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 3.0])),
                (np.array([1.0, 2.0]), np.array([3.0, 4.0])),
            ]
        )
        np.testing.assert_array_equal(frames, [1, 2])
        np.testing.assert_array_equal(mean, [2, 3])

    def test_seeds_without_common_frames_are_not_extended(self):
        frames, mean, low, high = aggregate(
            [
                (np.array([0.0, 10.0]), np.array([1.0, 3.0])),
                (np.array([20.0, 30.0]), np.array([5.0, 7.0])),
            ]
        )
        np.testing.assert_array_equal(frames, [0, 10, 20, 30])
        for values in (mean, low, high):
            np.testing.assert_array_equal(values, [1, 3, 5, 7])

    def test_rows_without_finished_episode_are_ignored(self):
        frames, mean, *_ = aggregate([(np.array([1.0, 2.0, 3.0]), np.array([np.nan, 4.0, 6.0]))])
        np.testing.assert_array_equal(frames, [2, 3])
        np.testing.assert_array_equal(mean, [4, 6])
        assert len(aggregate([(np.array([1.0]), np.array([np.nan]))])[0]) == 0


class TestDrawing:
    def test_curve_of_one_run(self, tmp_path):
        path = tmp_path / "run" / "learning_curve.png"
        figure = learning_curve(make_run(tmp_path / "run"), path=path)
        assert path.read_bytes().startswith(b"\x89PNG")
        lines = lines_of(figure)
        np.testing.assert_array_equal(lines[TOY][0], [640, 1280, 1920])
        np.testing.assert_array_equal(lines[TOY][1], [1, 2, 3])
        assert lines["random policy"][1][0] == 0.25
        assert "VMAS heuristic" not in lines
        assert figure.axes[0].get_title(loc="left") == "arena"

    def test_curve_and_evaluations_have_the_rewards_of_the_environment(self, tmp_path):
        """The learner saw a quarter of the rewards, and so does metrics.csv; evaluations do not."""
        run = make_run(tmp_path / "run", rewards=(0.25, 0.5, 0.75), **{"env.reward_scale": 0.25})
        np.testing.assert_array_equal(lines_of(learning_curve(run))[TOY][1], [1, 2, 3])

    def test_seeds_are_averaged_to_one_line(self, tmp_path):
        runs = [
            make_run(tmp_path / f"{seed}", seed, rewards=(seed, seed + 1.0, seed + 2.0))
            for seed in range(3)
        ]
        lines = lines_of(learning_curve(runs))
        np.testing.assert_array_equal(lines[f"{TOY} (3 seeds)"][1], [1, 2, 3])

    def test_copies_and_seeds_without_values_are_not_counted(self, tmp_path):
        """Of four folders, one is a copy and one has no return; 0 and 2 remain, with mean 1."""
        runs = [make_run(tmp_path / f"{seed}", seed, rewards=(seed,) * 2) for seed in (0, 2)]
        runs += [shutil.copytree(tmp_path / "2", tmp_path / "copy")]
        runs += [make_run(tmp_path / "3", 3, rewards=(None, None))]
        table = tmp_path / "curves.csv"
        with pytest.warns(UserWarning, match="copy' has the settings, the seed and every number"):
            lines = lines_of(learning_curve(runs, table=table))
        np.testing.assert_array_equal(lines[f"{TOY} (2 seeds)"][1], [1, 1])
        rows = csv.DictReader(table.read_text().splitlines())
        assert {row["seeds"] for row in rows if row["column"] != "evaluation"} == {"2"}

    def test_runs_with_different_settings_are_separate_lines(self, tmp_path):
        runs = [
            make_run(tmp_path / "a", 0),
            make_run(tmp_path / "b", 1, **{"learner.lr": 0.01}),
            make_run(tmp_path / "c", 2, device="cpu", threads=1),
        ]
        lines = lines_of(learning_curve(runs))
        assert set(lines) == {"lr=0.0005 (2 seeds)", "lr=0.01", "random policy"}

    def test_key_selects_a_column_of_either_table(self, tmp_path):
        run = make_run(tmp_path / "run")
        figure = learning_curve([run], key="agents/kl")
        np.testing.assert_array_equal(lines_of(figure)[TOY][1], [0.01] * 3)
        assert figure.axes[0].get_ylabel() == "agents/kl"
        np.testing.assert_array_equal(
            lines_of(learning_curve([run], key="return_mean"))[TOY][1], [0.5, 3.5]
        )
        with pytest.raises(ConfigError, match="no column 'agents/kll'; did you mean 'agents/kl'"):
            learning_curve([run], key="agents/kll")

    def test_runs_without_finished_episode_show_evaluations_only(self, tmp_path):
        run = make_run(tmp_path / "run", rewards=(None, None))
        assert TOY not in lines_of(learning_curve([run]))
        (run / "evaluation.csv").unlink()
        with pytest.raises(CheckpointError, match="wait for the first episode to end"):
            learning_curve([run])

    def test_unknown_file_format_is_refused(self, tmp_path):
        with pytest.raises(ConfigError, match=r"expected one of .*png.*; name it curve.png"):
            learning_curve([make_run(tmp_path / "run")], path=tmp_path / "curve.txt")

    def test_missing_matplotlib_names_the_extra(self, tmp_path, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(MissingExtraError, match=r"pip install '\.\[plot\]'"):
            learning_curve([tmp_path])


class TestBrokenFolders:
    """Invalid files in a run folder raise one sentence or are ignored."""

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("", "has no row in metrics.csv yet"),
            ("iteration,fra", "has no row in metrics.csv yet"),
            (HEAD + "\n", "has no row in metrics.csv yet"),
            (HEAD + "\n1,640,20", "has no row in metrics.csv yet"),
            ("iteration,reward\n1,2\n", "no column 'frames'"),
            ("\x00\x01\x02\nabc\n", "is not a table of metrics"),
            (f"frames,{'x' * 200_000}\n1,2\n", "is not a table of metrics"),
        ],
    )
    def test_invalid_tables_raise_one_sentence(self, tmp_path, content, message, capsys):
        run = make_run(tmp_path / "run")
        (run / "evaluation.csv").unlink()
        (run / "metrics.csv").write_text(content)
        assert cli.main(["plot", str(run)]) == 2
        text = capsys.readouterr().err
        assert message in text and text.count("\n") == 1

    def test_truncated_table_is_drawn_or_refused(self, tmp_path):
        run = make_run(tmp_path / "run")
        whole = (run / "metrics.csv").read_text()
        (run / "evaluation.csv").unlink()
        drawn = 0
        for end in range(0, len(whole), 7):
            (run / "metrics.csv").write_text(whole[:end])
            try:
                rows = read_run(run).training["frames"]
                assert len(rows) == whole[:end].count("\n") - 1
                drawn += 1
            except CheckpointError as error:
                assert "\n" not in str(error)
        assert drawn > 5

    @pytest.mark.parametrize("summary", ["", "[1]", "nan", '{"return_random": "low"}', "{"])
    def test_invalid_summary_is_ignored(self, tmp_path, summary):
        run = make_run(tmp_path / "run")
        (run / "summary.json").write_text(summary)
        assert "random policy" not in lines_of(learning_curve(run))

    def test_error_for_mixed_recipes_names_the_run(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        runs = [
            str(make_run(tmp_path / "one")),
            str(make_groups_run(tmp_path / "two", recipe="other")),
            str(tmp_path / "none"),
        ]
        assert cli.main(["plot", *runs[:2]]) == 0
        capsys.readouterr()
        for arguments, named in ((["--key", "agents/kl"], runs[1]), (runs[2:], runs[2])):
            assert cli.main(["plot", *runs[:2], *arguments]) == 2
            text = capsys.readouterr().err
            assert repr(named) in text and text.count("\n") == 1

    def test_folder_given_twice_counts_once(self, tmp_path):
        run = make_run(tmp_path / "run")
        assert set(lines_of(learning_curve([run, str(run), run / "."]))) == {TOY, "random policy"}


class TestCommand:
    def test_plot_of_one_run_is_written_to_its_folder(self, tmp_path, capsys):
        run = make_run(tmp_path / "run")
        assert cli.main(["plot", str(run)]) == 0
        names = ["learning_curve.png", "learning_curve.csv"]
        assert capsys.readouterr().out.split() == [str(run / name) for name in names]
        assert all((run / name).is_file() for name in names)

    def test_plot_of_several_runs_is_written_to_their_parent(self, tmp_path, monkeypatch, capsys):
        runs = [str(make_run(tmp_path / "runs" / name)) for name in "ab"]
        (tmp_path / "here").mkdir()
        monkeypatch.chdir(tmp_path / "here")
        assert cli.main(["plot", *runs]) == 0
        assert (tmp_path / "runs" / "learning_curve.png").is_file()
        assert not list((tmp_path / "here").iterdir())
        monkeypatch.chdir(tmp_path)
        assert cli.main(["plot", "runs/a", "runs/b"]) == 0
        *_, picture, table = capsys.readouterr().out.split()
        assert (picture, table) == ("runs/learning_curve_2.png", "runs/learning_curve_2.csv")
        assert (tmp_path / picture).is_file() and (tmp_path / table).is_file()

    def test_existing_files_are_not_overwritten(self, tmp_path, monkeypatch):
        runs = [make_run(tmp_path / name).name for name in "ab"]
        monkeypatch.chdir(tmp_path)
        (tmp_path / "learning_curve.png").write_text("mine")
        assert cli.main(["plot", *runs]) == 0
        assert (tmp_path / "learning_curve.png").read_text() == "mine"
        assert (tmp_path / "learning_curve_2.png").is_file()

    def test_out_option_sets_the_path(self, tmp_path, monkeypatch):
        runs = [str(make_run(tmp_path / name)) for name in "ab"]
        monkeypatch.chdir(tmp_path)
        assert cli.main(["plot", *runs, "--out", "new/curve.svg"]) == 0
        assert (tmp_path / "new" / "curve.svg").is_file()
        assert (tmp_path / "new" / "curve.csv").is_file()


class TestFolders:
    """``plot`` accepts the same folders as ``report``."""

    def test_runs_in_nested_folders_are_found(self, tmp_path):
        for name, lr in (("a", 0.001), ("b", 0.01)):
            for seed in range(2):
                folder = tmp_path / "suite" / "arena" / name / f"seed{seed}"
                make_run(folder, seed, rewards=(seed, 1.0), **{"learner.lr": lr})
        lines = lines_of(learning_curve(tmp_path / "suite"))
        assert set(lines) == {"lr=0.001 (2 seeds)", "lr=0.01 (2 seeds)", "random policy"}
        assert lines["lr=0.01 (2 seeds)"][1].tolist() == [0.5, 1.0]

    def test_unreadable_runs_are_left_out_with_a_warning(self, tmp_path, capsys):
        make_run(tmp_path / "runs/a")
        (make_run(tmp_path / "runs/b") / "metrics.csv").write_text("frames,x\n1,two\n2,3\n")
        with pytest.warns(UserWarning, match="left out: .*b/metrics.csv' is broken in line 2"):
            assert TOY in lines_of(learning_curve(tmp_path / "runs"))
        with pytest.raises(CheckpointError, match="is broken in line 2"):
            learning_curve(tmp_path / "runs/b")

    def test_evolved_population_has_lines_for_best_and_mean(self, tmp_path):
        evolves = {"population.size": 2, "evolution.method": "pbt"}
        make_run(tmp_path / "pbt", rewards=(9.0, 9.0), **evolves)
        for seed, rewards in enumerate([(1.0, 4.0), (3.0, 2.0)]):
            lr = {"learner.lr": 0.1 * (seed + 1)}
            make_run(tmp_path / "pbt" / f"seed{seed}", seed, rewards=rewards, **lr)
        lines = lines_of(learning_curve(tmp_path / "pbt"))
        assert lines["members=best"][1].tolist() == [3, 4]
        assert lines["members=mean"][1].tolist() == [2, 3]


class TestWorlds:
    @pytest.fixture
    def two(self, tmp_path):
        for seed in range(2):
            make_run(tmp_path / "three" / f"{seed}", seed)
            make_run(tmp_path / "five" / f"{seed}", seed, **{"env.kwargs.lives": 5})
            algorithm = {"learner.algorithm": "ippo", "env.kwargs.lives": 5}
            make_run(tmp_path / "ippo" / f"{seed}", seed, **algorithm)
        return tmp_path

    def test_each_task_has_separate_axes(self, two):
        figure = learning_curve(two)
        titles = [axes.get_title(loc="left") for axes in figure.axes]
        assert titles == ["arena, lives=3", "arena, lives=5"]
        named = [
            {
                line.get_label(): line.get_color()
                for line in axes.lines
                if "seeds" in line.get_label()
            }
            for axes in figure.axes
        ]
        assert [set(own) for own in named] == [
            {"MAPPO (2 seeds)"},
            {"MAPPO (2 seeds)", "IPPO (2 seeds)"},
        ]
        assert named[0]["MAPPO (2 seeds)"] == named[1]["MAPPO (2 seeds)"]
        assert named[1]["IPPO (2 seeds)"] != named[1]["MAPPO (2 seeds)"]

    def test_table_has_the_drawn_values(self, two):
        path = two / "curves.csv"
        learning_curve([two / "three", two / "ippo"], table=path)
        rows = list(csv.DictReader(path.read_text().splitlines()))
        assert {row["task"] for row in rows} == {"arena, lives=3", "arena, lives=5"}
        ours = [row for row in rows if row["line"] == "MAPPO" and row["column"] == "evaluation"]
        assert [(row["frames"], row["mean"], row["least"], row["greatest"]) for row in ours] == [
            ("0", "0.5", "0.5", "0.5"),
            ("1920", "4", "3.5", "4.5"),
        ]
        assert {row["seeds"] for row in rows} == {"2"}
        learning_curve(two / "three", key="agents/kl", table=path)
        rows = list(csv.DictReader(path.read_text().splitlines()))
        assert {row["column"] for row in rows} == {"agents/kl"} and len(rows) == 3
