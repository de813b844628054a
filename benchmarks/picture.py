"""Picture of ``one_program.py``: speed ratios as bars, one for each baseline."""

from __future__ import annotations

import textwrap
from pathlib import Path

from sections.case import BENCHMARL, DEFAULT, JAXMARL, TUNED, Case

COLORS = {DEFAULT: "#2a6fbb", TUNED: "#8fb8de", BENCHMARL: "#d1662a", JAXMARL: "#6b9e4f"}
# A step has no policy and no loss: stock VMAS, as it is and compiled, are its baselines.
STANDS_FOR = {"VMAS": DEFAULT, "VMAS, tuned": TUNED}
NAMES = {DEFAULT: "TorchRL (step: stock VMAS)", TUNED: "TorchRL, tuned (step: VMAS, tuned)"}
TICKS = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)


def bars_of(case: Case) -> dict[str, float]:
    """Baseline -> times faster, with what stands for TorchRL in its place."""
    times = case.bars()
    if any(name in times for name in STANDS_FOR):
        return {label: times[name] for name, label in STANDS_FOR.items() if name in times}
    return {name: x for name, x in times.items() if name in COLORS}


def draw(sections: dict[str, list[Case]], title: str, path: Path) -> None:
    """Draws all cases that are compared with another system.

    Args:
        sections (dict): name -> cases.
        title (str): of the picture.
        path (Path): of the file.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown_cases = [
        ("\n".join([name, *textwrap.wrap(case.name, 34)]), bars_of(case))
        for name, cases in sections.items()
        for case in cases
        if case.in_picture and bars_of(case)
    ]
    figure, axes = pyplot.subplots(
        figsize=(8.0, 1.5 + 0.52 * len(shown_cases)), layout="constrained"
    )
    for i, (_, bars) in enumerate(shown_cases):
        height = 0.84 / len(bars)
        for j, (name, times) in enumerate(bars.items()):
            y = i - 0.42 + (j + 0.5) * height
            axes.barh(y, times - 1, height * 0.9, left=1, color=COLORS[name])
            axes.annotate(
                f"{times:.0f}" if times >= 10 else f"{times:.{1 if times >= 1 else 2}f}",
                (times, y),
                xytext=(3 if times >= 1 else -3, 0),
                textcoords="offset points",
                ha="left" if times >= 1 else "right",
                va="center",
                fontsize=8,
            )
    drawn_names = [name for name in COLORS if any(name in bars for _, bars in shown_cases)]
    patches = [pyplot.Rectangle((0, 0), 1, 1, color=COLORS[name]) for name in drawn_names]
    figure.legend(
        patches,
        [NAMES.get(name, name) for name in drawn_names],
        loc="outside lower center",
        ncols=2,
        edgecolor="none",
        fontsize=8,
    )
    values = [times for _, bars in shown_cases for times in bars.values()]
    low, high = min(0.8, *values) / 1.35, max(1.5, *values) * 1.35
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.set_xticks([x for x in TICKS if low <= x <= high])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set_yticks(range(len(shown_cases)), [label for label, _ in shown_cases], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(shown_cases) - 0.4, -0.6)
    axes.axvline(1, color="#555555", linewidth=0.8)
    axes.set_xlabel("times faster than; 1: as fast")
    axes.set_title(title, loc="left", weight="bold", fontsize=11)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", color="#e4e4e4")
    axes.set_axisbelow(True)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
