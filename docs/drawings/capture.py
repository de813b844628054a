"""Launches of a training iteration, eager and captured."""

from __future__ import annotations

from drawings.canvas import Drawing


def draw() -> Drawing:
    """An iteration as thousands of launches, and as two graphs."""
    drawing = Drawing(760, 390, "A training iteration, operation by operation and as two graphs")
    drawing.words(20, 30, "One iteration of training", size=16, bold=True)
    _eager(drawing, 50)
    _captured(drawing, 196)
    _kept(drawing, 334)
    return drawing


def _eager(drawing: Drawing, y: float) -> None:
    drawing.words(20, y + 20, "eager", code=True, bold=True)
    drawing.words(20, y + 38, "each small operation", size=11, color="soft")
    drawing.words(20, y + 53, "is launched by Python", size=11, color="soft")
    drawing.box(160, y, 580, 122, "paper")
    stages = [("step of the simulator", "green", 20), ("policy", "blue", 6), ("reset", "amber", 8)]
    x = 174.0
    for name, color, count in stages:
        drawing.words(x, y + 22, name, size=12)
        for k in range(count):
            drawing.box(x + 9 * k, y + 30, 6, 22, color, radius=1)
        x += max(9 * count, 60) + 24
    drawing.words(x, y + 46, "... x T steps", size=12, color="soft")
    drawing.words(174, y + 78, "update", size=12)
    for k in range(36):
        drawing.box(230 + 9 * k, y + 66, 6, 22, "violet", radius=1)
    drawing.words(564, y + 82, "... x minibatches", size=12, color="soft")
    words = "VMAS balance: 814 launches per step, and 67 synchronizations"
    drawing.words(174, y + 110, words, size=12, color="soft")


def _captured(drawing: Drawing, y: float) -> None:
    drawing.words(20, y + 20, "compile", code=True, bold=True)
    drawing.words(20, y + 38, "recorded once, checked", size=11, color="soft")
    drawing.words(20, y + 53, "against eager, compiled", size=11, color="soft")
    drawing.box(160, y, 580, 122, "paper")
    drawing.box(174, y + 22, 220, 44, "green", ["each step: policy,", "simulator, reset"])
    drawing.box(424, y + 22, 116, 44, "empty", ["advantage,", "in eager mode"])
    drawing.box(570, y + 22, 156, 44, "violet", ["each update: loss,", "gradient, Adam"])
    drawing.arrow([(396, y + 44), (422, y + 44)])
    drawing.arrow([(542, y + 44), (568, y + 44)])
    drawing.line([(648, y + 68), (648, y + 86), (284, y + 86)])
    drawing.arrow([(284, y + 86), (284, y + 69)])
    drawing.words(466, y + 82, "new weights", size=11, anchor="middle", color="soft")
    words = "VMAS balance: 141 kernels per step, and no synchronization within a batch"
    drawing.words(174, y + 110, words, size=12, color="soft")


def _kept(drawing: Drawing, y: float) -> None:
    lines = [
        "Python does the rest: initial states (in advance), advantages, logging, evaluation,",
        "checkpoints. A step whose Python code depends on the state runs eagerly.",
    ]
    for i, line in enumerate(lines):
        drawing.words(20, y + 18 + 19 * i, line, size=12)
