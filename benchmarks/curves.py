"""Learning curves of several seeds and libraries: measured during training, as rows, as a picture.

A result is a dict with ``curve``, a list of evaluations; each has ``frames`` and its measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import report

Result = dict[str, Any]


def train_with_curve(
    recipe: str,
    overrides: dict[str, Any],
    frames_between_points: int,
    evaluation: Callable[[Any], Callable[[], Any]],
) -> Result:
    """Trains a recipe and returns its curve and its seconds, those of the evaluations left out.

    Args:
        recipe (str): our recipe.
        overrides (dict): its other settings.
        frames_between_points (int): frames between evaluations.
        evaluation (callable): given the training, returns what measures its policy.
    """
    from torchrl_marl.recipes import load_config
    from torchrl_marl.training.trainer import start_training

    quiet = {"logging.progress": False, "checkpoint.every_iterations": 0}
    training = start_training(load_config(recipe, {**quiet, **overrides}), None)
    measure = evaluation(training)

    def point() -> dict[str, Any]:
        seconds = round(training.seconds, 3)
        return {"frames": training.frames, **measure(), "seconds_training": seconds}

    curve = [point()]
    while not training.done:
        training.step()
        if training.frames // frames_between_points > curve[-1]["frames"] // frames_between_points:
            curve.append(point())
    training.close()
    return {"curve": curve, "seconds_training": round(training.seconds, 3)}


def column(results: Sequence[Result], i: int, key: str) -> list[float]:
    """Returns a value of all seeds at one evaluation."""
    return [result["curve"][i][key] for result in results]


def mean_and_range(values: Sequence[float], style: str = ".2f") -> str:
    """Returns ``mean (least to most)``."""
    mean = sum(values) / len(values)
    if len(values) == 1:
        return f"{mean:{style}}"
    return f"{mean:{style}} ({min(values):{style}} to {max(values):{style}})"


def curve_rows(sides: Mapping[str, list[Result]], key: str, style: str = ".2f") -> list[list[str]]:
    """Returns a row for every evaluation that all sides have."""
    first = next(iter(sides.values()))[0]
    return [
        [
            f"{first['curve'][i]['frames']:,}",
            *(mean_and_range(column(results, i, key), style) for results in sides.values()),
        ]
        for i in range(n_evaluations(*sides.values()))
    ]


def n_evaluations(*sides: Sequence[Result]) -> int:
    """Returns the number of evaluations that all seeds have."""
    return min(len(result["curve"]) for results in sides for result in results)


def draw(
    sides: Mapping[str, list[Result]],
    key: str,
    path: Path,
    colors: Sequence[str],
    **labels: Any,
) -> None:
    """Draws all curves in one picture: the mean of the seeds and their range.

    Args:
        sides (dict): name -> results of its seeds.
        key (str): measurement to draw.
        path (Path): PNG file.
        colors (sequence of str): color of each side.
        **labels: ``title``, ``ylabel``, and further properties of the axes.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import EngFormatter

    figure, axes = pyplot.subplots(figsize=(7.2, 4.4), layout="constrained")
    for (name, results), color in zip(sides.items(), colors):
        points = range(n_evaluations(results))
        frames = [results[0]["curve"][i]["frames"] for i in points]
        values = [column(results, i, key) for i in points]
        label = f"{name} ({report.count_of(len(results), 'seed')}, mean and range)"
        means = [sum(x) / len(x) for x in values]
        axes.plot(frames, means, "o-", color=color, markersize=4, label=label)
        low, high = [min(x) for x in values], [max(x) for x in values]
        axes.fill_between(frames, low, high, color=color, alpha=0.18, linewidth=0)
    axes.set_title(labels.pop("title"), loc="left", weight="bold")
    axes.set(xlabel="frames", **labels)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e4e4e4")
    axes.set_axisbelow(True)
    axes.legend(edgecolor="none", loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
