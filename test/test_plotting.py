"""Learning curves: what is read from run folders, and what is drawn."""

import dataclasses
import json

import numpy as np
import pytest
from meadow import Meadow

from torchrl_marl import cli
from torchrl_marl.curves import read_csv, read_run
from torchrl_marl.errors import CheckpointError, ConfigError, MissingExtraError
from torchrl_marl.experiments import experiments, world_name
from torchrl_marl.plotting import aggregate, learning_curve
from torchrl_marl.recipes import load_config, save_config
from torchrl_marl.runs import train

pytest.importorskip("matplotlib")

TOY = "toy_arena_mappo"
PARTS = ("actor", "critic")
HEAD = "iteration,frames,agent_frames,seconds,frames_per_second,agents/episode_reward,agents/kl"


def make_run(folder, seed=0, rewards=(1.0, 2.0, 3.0), last="", **overrides):
    folder.mkdir(parents=True)
    save_config(load_config(TOY, {"seed": seed, **overrides}), folder / "config.yaml")
    rows = [
        f"{i},{i * 640},{i * 2000},{i * 0.5},1280,{'' if reward is None else reward},0.01"
        for i, reward in enumerate(rewards, 1)
    ]
    (folder / "metrics.csv").write_text("\n".join([HEAD, *rows]) + "\n" + last)
    (folder / "evaluation.csv").write_text(
        "iteration,frames,seconds,return_mean,return_std,length_mean,episodes,agents/episode_reward\n"
        f"0,0,0,0.5,1,20,100,0.5\n3,1920,1.5,{3.5 + seed},1,20,100,3.5\n"
    )
    (folder / "summary.json").write_text(
        json.dumps({"return_random": 0.25, "return_heuristic": None})
    )
    return folder


def lines_of(figure):
    (axes,) = figure.axes
    return {
        line.get_label(): (np.asarray(line.get_xdata()), np.asarray(line.get_ydata()))
        for line in axes.lines
        if not line.get_label().startswith("_")
    }


class TestReading:
    def test_columns_and_empty_cells(self, tmp_path):
        run = read_run(make_run(tmp_path / "run", rewards=(None, 2.0)))
        assert run.recipe == TOY
        np.testing.assert_array_equal(run.training["frames"], [640, 1280])
        np.testing.assert_array_equal(run.training["agents/episode_reward"], [np.nan, 2.0])
        np.testing.assert_array_equal(run.evaluation["return_mean"], [0.5, 3.5])
        assert run.summary["return_random"] == 0.25

    @pytest.mark.parametrize("last", ["4", "4,2560,", "4,2560,8000,2.0,1280,4.0,0.0"])
    def test_a_half_written_last_line_is_left_out(self, tmp_path, last):
        run = read_run(make_run(tmp_path / "run", last=last))
        np.testing.assert_array_equal(run.training["frames"], [640, 1280, 1920])

    def test_a_broken_line_is_named(self, tmp_path):
        path = tmp_path / "metrics.csv"
        path.write_text("frames,x\n1,2\n2,two\n3,4\n")
        with pytest.raises(CheckpointError, match=r"broken in line 3, expected 2 numbers"):
            read_csv(path)
        path.write_text("frames,x\n1,2\n2\n3,4\n")
        with pytest.raises(CheckpointError, match=r"broken in line 3"):
            read_csv(path)

    def test_a_missing_or_empty_table_holds_nothing(self, tmp_path):
        assert read_csv(tmp_path / "none.csv") == {}
        (tmp_path / "empty.csv").write_text("")
        assert read_csv(tmp_path / "empty.csv") == {}

    def test_a_run_that_has_no_row_yet(self, tmp_path):
        folder = make_run(tmp_path / "run", rewards=())
        (folder / "evaluation.csv").unlink()
        with pytest.raises(CheckpointError, match="has no row in metrics.csv yet"):
            read_run(folder)

    def test_a_folder_that_is_no_run(self, tmp_path):
        with pytest.raises(CheckpointError, match="is no run folder") as error:
            learning_curve([tmp_path])
        assert "\n" not in str(error.value)


class TestAggregate:
    def test_seeds_that_log_at_other_frames_are_interpolated(self):
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

    def test_the_mean_ends_where_the_shortest_seed_ends(self):
        frames, mean, *_ = aggregate(
            [
                (np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 3.0])),
                (np.array([1.0, 2.0]), np.array([3.0, 4.0])),
            ]
        )
        np.testing.assert_array_equal(frames, [1, 2])
        np.testing.assert_array_equal(mean, [2, 3])

    def test_rows_without_an_ended_episode_do_not_count(self):
        frames, mean, *_ = aggregate([(np.array([1.0, 2.0, 3.0]), np.array([np.nan, 4.0, 6.0]))])
        np.testing.assert_array_equal(frames, [2, 3])
        np.testing.assert_array_equal(mean, [4, 6])
        assert len(aggregate([(np.array([1.0]), np.array([np.nan]))])[0]) == 0


class TestDrawing:
    def test_one_run(self, tmp_path):
        path = tmp_path / "run" / "learning_curve.png"
        figure = learning_curve(make_run(tmp_path / "run"), path=path)
        assert path.read_bytes().startswith(b"\x89PNG")
        lines = lines_of(figure)
        np.testing.assert_array_equal(lines[TOY][0], [640, 1280, 1920])
        np.testing.assert_array_equal(lines[TOY][1], [1, 2, 3])
        assert lines["random policy"][1][0] == 0.25
        assert "VMAS heuristic" not in lines
        assert figure.axes[0].get_title(loc="left") == "arena"

    def test_seeds_become_one_line(self, tmp_path):
        runs = [
            make_run(tmp_path / f"{seed}", seed, rewards=(seed, seed + 1.0, seed + 2.0))
            for seed in range(3)
        ]
        lines = lines_of(learning_curve(runs))
        np.testing.assert_array_equal(lines[f"{TOY} (3 seeds)"][1], [1, 2, 3])

    def test_runs_whose_settings_differ_are_no_seeds(self, tmp_path):
        runs = [
            make_run(tmp_path / "a", 0),
            make_run(tmp_path / "b", 1, **{"learner.lr": 0.01}),
            make_run(tmp_path / "c", 2, device="cpu", threads=1),
        ]
        lines = lines_of(learning_curve(runs))
        assert set(lines) == {"lr=0.0005 (2 seeds)", "lr=0.01", "random policy"}

    def test_a_column_of_either_table(self, tmp_path):
        run = make_run(tmp_path / "run")
        figure = learning_curve([run], key="agents/kl")
        np.testing.assert_array_equal(lines_of(figure)[TOY][1], [0.01] * 3)
        assert figure.axes[0].get_ylabel() == "agents/kl"
        np.testing.assert_array_equal(
            lines_of(learning_curve([run], key="return_mean"))[TOY][1], [0.5, 3.5]
        )
        with pytest.raises(ConfigError, match="no column 'agents/kll'; did you mean 'agents/kl'"):
            learning_curve([run], key="agents/kll")

    def test_evaluation_is_drawn_where_no_episode_has_ended(self, tmp_path):
        run = make_run(tmp_path / "run", rewards=(None, None))
        assert TOY not in lines_of(learning_curve([run]))
        (run / "evaluation.csv").unlink()
        with pytest.raises(CheckpointError, match="wait until an episode has ended"):
            learning_curve([run])

    def test_a_kind_of_file_that_is_not_written(self, tmp_path):
        with pytest.raises(ConfigError, match=r"expected one of .*png.*; name it curve.png"):
            learning_curve([make_run(tmp_path / "run")], path=tmp_path / "curve.txt")

    def test_matplotlib_is_missing(self, tmp_path, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(MissingExtraError, match=r"pip install 'torchrl_marl\[plot\]'"):
            learning_curve([tmp_path])


class TestNames:
    """Of runs that differ: short, in full where they would be taken for one another."""

    def names(self, *runs):
        return [name for name, _ in experiments([read_run(run) for run in runs])]

    def test_settings_by_their_last_part(self, tmp_path):
        runs = [
            make_run(
                tmp_path / f"{lr}{sharing}",
                **{"learner.lr": lr, "learner.actor.sharing": sharing},
            )
            for lr in (0.01, 0.02)
            for sharing in ("full", "none")
        ]
        assert self.names(*runs) == [
            "sharing=full, lr=0.01",
            "sharing=none, lr=0.01",
            "sharing=full, lr=0.02",
            "sharing=none, lr=0.02",
        ]

    def test_two_settings_of_one_last_part(self, tmp_path):
        """Both are told where they differ from one another in some run."""
        one = make_run(tmp_path / "a", **{"learner.actor.sharing": "full"})
        other = make_run(tmp_path / "b", **{"learner.critic.sharing": "none"})
        before = str(read_run(other).settings["learner.actor.sharing"])
        old = str(read_run(one).settings["learner.critic.sharing"])
        assert self.names(one, other) == [
            f"actor.sharing=full, critic.sharing={'null' if old == 'None' else old}",
            f"actor.sharing={'null' if before == 'None' else before}, critic.sharing=none",
        ]

    def test_two_settings_that_change_together_are_one(self, tmp_path):
        runs = [
            make_run(tmp_path / f"{i}", **{f"learner.{part}.num_cells": cells for part in PARTS})
            for i, cells in enumerate(([8], [256, 256]))
        ]
        assert self.names(*runs) == ["num_cells=[8]", "num_cells=[256,256]"]

    def test_many_settings_are_cut_and_folders_tell_them_apart(self, tmp_path):
        many = {"learner.lr": 0.1, "learner.gamma": 0.5, "learner.lmbda": 0.5}
        many |= {"learner.num_epochs": 1, "learner.clip_epsilon": 0.1}
        runs = [
            make_run(tmp_path / "plain"),
            make_run(tmp_path / "one", **many),
            make_run(tmp_path / "two", **{**many, "learner.huber_delta": 3.0}),
        ]
        names = self.names(*runs)
        assert len(set(names)) == 3
        assert names[1].endswith("3 more, one") and names[2].endswith("3 more, two")
        assert all(len(name) < 80 for name in names)

    def test_other_recipes_and_worlds(self, tmp_path):
        one = make_run(tmp_path / "one")
        other = make_run(tmp_path / "other", recipe="toy_arena_mappo_kinds")
        world = make_run(tmp_path / "world", **{"env.name": "paces"})
        assert self.names(one) == [TOY]
        assert self.names(world) == ["paces"]
        assert self.names(one, world) == [TOY, "paces"]
        assert self.names(one, other) == [TOY, "toy_arena_mappo_kinds"]

    def test_a_class_as_a_library(self, tmp_path):
        run = read_run(make_run(tmp_path / "run"))
        for recipe in (TOY, "mine"):
            settings = {**run.settings, "env.library": "worlds.py:Reach"}
            other = dataclasses.replace(run, recipe=recipe, settings=settings)
            assert world_name(other) == "Reach"
            assert [name for name, _ in experiments([other])] == ["Reach"]

    def test_a_world_of_ones_own_has_its_own_name(self, tmp_path):
        env = Meadow(8, max_steps=4)
        run = train(
            TOY, env=env, folder=str(tmp_path / "run"), total_frames=64, frames_per_batch=32,
            learner={"minibatch_size": 32}, evaluation={"episodes": 8},
            logging={"progress": False},
        )  # fmt: skip
        assert self.names(run.folder) == ["Meadow"]
        figure = learning_curve(run.folder)
        assert figure.axes[0].get_title(loc="left") == "Meadow"
        assert TOY not in texts_of(figure)


def make_groups_run(folder, seed=0, **overrides):
    """Of two groups, whose figures have nothing in common."""
    run = make_run(folder, seed, **overrides)
    head = "iteration,frames,cats/episode_reward,dogs/episode_reward"
    (run / "metrics.csv").write_text(f"{head}\n1,640,1,-10\n2,1280,2,-20\n")
    (run / "evaluation.csv").write_text(
        "iteration,frames,return_mean,cats/episode_reward,dogs/episode_reward\n"
        f"0,0,-4,3,-11\n2,1280,-9,{4 + seed},-22\n"
    )
    summary = {"return_random": -3.5, "cats/return_random": 5, "dogs/return_random": -12}
    (run / "summary.json").write_text(json.dumps(summary))
    return run


def texts_of(figure):
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def dots_of(axes):
    """Evaluations by color."""
    return {
        bar.lines[0].get_color(): np.asarray(bar.lines[0].get_ydata()).tolist()
        for bar in axes.containers
    }


def levels_of(axes):
    """Colors and heights of the horizontal lines."""
    return {
        line.get_color(): line.get_ydata()[0]
        for line in axes.lines
        if list(line.get_xdata()) == [0, 1]
    }


class TestGroups:
    def test_each_has_its_own_evaluation_and_random_policy(self, tmp_path):
        figure = learning_curve([make_groups_run(tmp_path / f"{i}", i) for i in range(2)])
        (axes,) = figure.axes
        colors = {line.get_label(): line.get_color() for line in axes.lines}
        cats, dogs = colors["cats (2 seeds)"], colors["dogs (2 seeds)"]
        assert cats != dogs
        assert dots_of(axes) == {cats: [3.0, 4.5], dogs: [-11.0, -22.0]}
        assert levels_of(axes) == {cats: 5.0, dogs: -12.0}
        assert texts_of(figure) == [
            "cats (2 seeds)",
            "dogs (2 seeds)",
            "range of seeds",
            "evaluation",
            "random policy",
        ]

    def test_groups_of_several_experiments_have_a_panel_each(self, tmp_path):
        figure = learning_curve(
            [
                make_groups_run(tmp_path / "a"),
                make_groups_run(tmp_path / "b", 1, **{"learner.lr": 0.01}),
            ]
        )
        cats, dogs = figure.axes
        assert [axes.get_title(loc="right") for axes in figure.axes] == ["cats", "dogs"]
        assert list(dots_of(cats).values()) == [[3.0, 4.0], [3.0, 5.0]]
        assert list(dots_of(dogs).values()) == [[-11.0, -22.0]] * 2
        assert list(levels_of(cats).values()) == [5.0]
        assert list(levels_of(dogs).values()) == [-12.0]
        assert texts_of(figure)[:2] == ["lr=0.0005", "lr=0.01"]

    def test_before_the_first_batch_only_evaluations_are_drawn(self, tmp_path):
        run = make_groups_run(tmp_path / "run")
        (run / "metrics.csv").unlink()
        (axes,) = learning_curve(run).axes
        assert list(dots_of(axes).values()) == [[3.0, 4.0], [-11.0, -22.0]]


class TestLayout:
    @pytest.mark.parametrize("n", [1, 3, 12])
    def test_the_legend_covers_no_axes_and_fits(self, tmp_path, n):
        runs = [
            make_run(
                tmp_path / f"{i}", recipe=f"a_recipe_of_ones_own_with_a_long_name_{i}",
                **{"learner.lr": 0.001 * (i + 1), "learner.entropy_coeff": 0.1 * i},
            )
            for i in range(n)
        ]  # fmt: skip
        figure = learning_curve(runs)
        figure.draw_without_rendering()
        (axes,), (legend,) = figure.axes, figure.legends
        box, inside = legend.get_window_extent(), axes.get_tightbbox()
        assert box.y1 <= inside.y0 + 1  # below the label of the axis
        assert box.x0 >= 0 and box.x1 <= figure.bbox.width and box.y0 >= -1
        height = axes.get_window_extent().height / figure.dpi
        assert height > 2.8  # however many there are
        styles = {
            (line.get_color(), line.get_linestyle())
            for line in axes.lines
            if not line.get_label().startswith("_")
        }
        assert len(styles) == n + 1


class TestBrokenFolders:
    """One sentence, whatever lies in a run's folder."""

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("", "has no row in metrics.csv yet"),
            ("iteration,fra", "has no row in metrics.csv yet"),
            (HEAD + "\n", "has no row in metrics.csv yet"),
            (HEAD + "\n1,640,20", "has no row in metrics.csv yet"),
            ("iteration,reward\n1,2\n", "no column 'frames'"),
            ("\x00\x01\x02\nabc\n", "is no table of metrics"),
            (f"frames,{'x' * 200_000}\n1,2\n", "is no table of metrics"),
        ],
    )
    def test_tables(self, tmp_path, content, message, capsys):
        run = make_run(tmp_path / "run")
        (run / "evaluation.csv").unlink()
        (run / "metrics.csv").write_text(content)
        assert cli.main(["plot", str(run)]) == 2
        text = capsys.readouterr().err
        assert message in text and text.count("\n") == 1

    def test_a_table_cut_anywhere_is_drawn_or_told_in_a_sentence(self, tmp_path):
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
    def test_summaries(self, tmp_path, summary):
        run = make_run(tmp_path / "run")
        (run / "summary.json").write_text(summary)
        assert "random policy" not in lines_of(learning_curve(run))

    def test_mixed_recipes(self, tmp_path, monkeypatch, capsys):
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

    def test_a_folder_given_twice_is_one_run(self, tmp_path):
        run = make_run(tmp_path / "run")
        assert set(lines_of(learning_curve([run, str(run), run / "."]))) == {TOY, "random policy"}


class TestCommand:
    def test_one_run_is_drawn_into_its_folder(self, tmp_path, capsys):
        run = make_run(tmp_path / "run")
        assert cli.main(["plot", str(run)]) == 0
        assert capsys.readouterr().out.strip() == str(run / "learning_curve.png")
        assert (run / "learning_curve.png").is_file()

    def test_several_runs_are_drawn_here(self, tmp_path, monkeypatch):
        runs = [str(make_run(tmp_path / name)) for name in "ab"]
        monkeypatch.chdir(tmp_path)
        assert cli.main(["plot", *runs]) == 0
        assert (tmp_path / "learning_curve.png").is_file()
        assert cli.main(["plot", *runs, "--out", "new/curve.svg"]) == 0
        assert (tmp_path / "new" / "curve.svg").is_file()
