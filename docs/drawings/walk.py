"""Data flow of one training iteration."""

from __future__ import annotations

from drawings.canvas import Drawing


def draw() -> Drawing:
    """From an environment's name to new weights."""
    drawing = Drawing(760, 330, "Data flow of a run")
    drawing.words(20, 30, "Data flow", size=16, bold=True)
    pieces = [
        (20, "green", ["env", "E environments"]),
        (272, "blue", ["collector", "plays T steps"]),
        (524, "violet", ["learner", "for groups of equal settings"]),
    ]
    for x, color, (name, what) in pieces:
        drawing.box(x, 60, 216, 62, color)
        drawing.words(x + 108, 86, name, anchor="middle", bold=True)
        drawing.words(x + 108, 108, what, anchor="middle", size=12)
    drawing.arrow([(238, 80), (270, 80)])
    drawing.arrow([(270, 102), (238, 102)])
    drawing.arrow([(490, 80), (522, 80)])
    drawing.arrow([(522, 102), (490, 102)])
    drawing.words(254, 142, "observations, actions", anchor="middle", size=11, color="soft")
    drawing.words(506, 142, "batch [E, T], new weights", anchor="middle", size=11, color="soft")
    _learner(drawing, 524, 166)
    _specs(drawing, 20, 166)
    drawing.line([(632, 124), (632, 164)], dashed=True)
    drawing.line([(128, 124), (128, 164)], dashed=True)
    return drawing


def _learner(drawing: Drawing, x: float, y: float) -> None:
    steps = ["advantage, target", "minibatches", "loss", "optimizer", "metrics"]
    for i, step in enumerate(steps):
        drawing.box(x, y + 28 * i, 216, 24, "violet", step, size=12)


def _specs(drawing: Drawing, x: float, y: float) -> None:
    rows = ["TeamSpec: groups, agents, keys", "actor and critic of each group"]
    for i, row in enumerate(rows):
        drawing.box(x, y + 28 * i, 216, 24, "green" if i == 0 else "blue", row, size=12)
    lines = [
        "Features add keys to the batch and",
        "never change its layout. For example,",
        "a league acts with stored players, and",
        "mixed algorithms train with several",
        "learners.",
    ]
    for i, line in enumerate(lines):
        drawing.words(x + 252, y + 20 + 20 * i, line, size=12, color="soft")
