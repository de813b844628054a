"""Learning curves of several experiments and groups: names, panels and legends."""

import dataclasses

import numpy as np
import pytest
from meadow import Meadow
from plotted import make_groups_run, make_run

from torchrl_marl.apps.plotting import learning_curve
from torchrl_marl.apps.reports.curves import environment_name, group_by_experiment, read_run
from torchrl_marl.runs import train

pytest.importorskip("matplotlib")

pytestmark = pytest.mark.pictures

TOY = "toy_arena_mappo"
PARTS = ("actor", "critic")


class TestNames:
    """Names of different runs are short, and as long as needed to be unique."""

    def names(self, *runs):
        return [name for name, _ in group_by_experiment([read_run(run) for run in runs])]

    def test_names_use_the_last_part_of_settings(self, tmp_path):
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

    def test_names_with_equal_last_part_use_longer_keys(self, tmp_path):
        """Both settings are shown if they differ from each other in some run."""
        one = make_run(tmp_path / "a", **{"learner.actor.sharing": "full"})
        other = make_run(tmp_path / "b", **{"learner.critic.sharing": "none"})
        before = str(read_run(other).settings["learner.actor.sharing"])
        old = str(read_run(one).settings["learner.critic.sharing"])
        assert self.names(one, other) == [
            f"actor.sharing=full, critic.sharing={'null' if old == 'None' else old}",
            f"actor.sharing={'null' if before == 'None' else before}, critic.sharing=none",
        ]

    def test_settings_that_change_together_are_shown_once(self, tmp_path):
        runs = [
            make_run(tmp_path / f"{i}", **{f"learner.{part}.num_cells": cells for part in PARTS})
            for i, cells in enumerate(([8], [256, 256]))
        ]
        assert self.names(*runs) == ["num_cells=[8]", "num_cells=[256,256]"]

    def test_many_settings_are_shortened_and_folders_added(self, tmp_path):
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

    def test_names_of_other_recipes_and_environments(self, tmp_path):
        one = make_run(tmp_path / "one")
        other = make_run(tmp_path / "other", recipe="toy_arena_mappo_kinds")
        environment = make_run(tmp_path / "world", **{"env.name": "paces"})
        assert self.names(one) == [TOY]
        assert self.names(environment) == ["paces"]
        assert self.names(one, environment) == [TOY, "paces"]
        assert self.names(one, other) == [TOY, "toy_arena_mappo_kinds"]

    def test_class_as_library_is_the_environment_name(self, tmp_path):
        run = read_run(make_run(tmp_path / "run"))
        for recipe in (TOY, "mine"):
            settings = {**run.settings, "env.library": "worlds.py:Reach"}
            other = dataclasses.replace(run, recipe=recipe, settings=settings)
            assert environment_name(other) == "Reach"
            assert [name for name, _ in group_by_experiment([other])] == ["Reach"]

    def test_custom_environment_uses_its_class_name(self, tmp_path):
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


def texts_of(figure):
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def dots_of(axes):
    """Values of evaluations by color."""
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
    def test_groups_have_separate_evaluations_and_random_policies(self, tmp_path):
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

    def test_groups_of_several_experiments_have_separate_panels(self, tmp_path):
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

    def test_evaluations_are_drawn_without_training_rows(self, tmp_path):
        run = make_groups_run(tmp_path / "run")
        (run / "metrics.csv").unlink()
        (axes,) = learning_curve(run).axes
        assert list(dots_of(axes).values()) == [[3.0, 4.0], [-11.0, -22.0]]


class TestLayout:
    @pytest.mark.parametrize("n", [1, 3, 12])
    def test_legend_fits_below_the_axes(self, tmp_path, n):
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
        assert height > 2.8  # for any number of lines
        styles = {
            (line.get_color(), line.get_linestyle())
            for line in axes.lines
            if not line.get_label().startswith("_")
        }
        assert len(styles) == n + 1
