"""Living agents in an episode, and the ends of an episode."""

from __future__ import annotations

from drawings.canvas import Drawing

LEFT, CELL, ROW = 120, 40, 34
STEPS = 12
AGENTS = {  # name: first own step, step of its end
    "rover 0": (0, 11),
    "rover 1": (0, 4),
    "rover 2": (3, 11),
    "rover 3": (0, 8),
}


def draw() -> Drawing:
    """An episode of four agents, and two ways in which an episode ends."""
    drawing = Drawing(760, 376, "An episode in which agents are born late and die early")
    drawing.words(20, 30, "One episode, step by step", size=16, bold=True)
    for t in range(STEPS):
        drawing.words(LEFT + (t + 0.5) * CELL, 56, str(t), anchor="middle", color="soft")
    for i, (name, (born, end)) in enumerate(AGENTS.items()):
        _agent(drawing, 64 + i * ROW, name, born, end)
    y = 64 + len(AGENTS) * ROW + 8
    drawing.words(20, y + 18, "the team", bold=True)
    drawing.box(LEFT, y, STEPS * CELL, ROW - 8, "empty", "the episode ends with the last agent")
    drawing.box(LEFT + STEPS * CELL + 6, y, 84, ROW - 8, "red", "root done")
    _legend(drawing, y + 46)
    _ends(drawing, y + 80)
    return drawing


def _agent(drawing: Drawing, y: float, name: str, born: int, end: int) -> None:
    """Draws a row: a box for each step."""
    drawing.words(20, y + 20, name)
    for t in range(STEPS):
        color = "green" if born <= t <= end else "empty"
        word = "1" if born <= t <= end else "0"
        drawing.box(LEFT + t * CELL, y, CELL - 3, ROW - 6, color, word, dashed=word == "0")
    x = LEFT + (end + 1) * CELL - 9
    drawing.box(x, y, 6, ROW - 6, "red", radius=1)
    word = "done after its death" if end < STEPS - 1 else "done"
    drawing.words(LEFT + STEPS * CELL + 6, y + 18, word, size=11, color="soft")


def _legend(drawing: Drawing, y: float) -> None:
    pieces = [("green", "mask 1: alive, and acts"), ("empty", "mask 0: not born, or dead")]
    for i, (color, words) in enumerate([*pieces, ("red", "terminated")]):
        x = LEFT + i * 196
        drawing.box(x, y, 18, 14, color, dashed=color == "empty")
        drawing.words(x + 25, y + 12, words, size=12, color="soft")


def _ends(drawing: Drawing, y: float) -> None:
    """Draws the value that is added after an end."""
    cases = [
        ("terminated", "red", "ended by the rules", "no further rewards: + 0"),
        ("truncated", "amber", "time limit reached", "the task would continue: + value"),
    ]
    for i, (word, color, meaning, behind) in enumerate(cases):
        top = y + i * 40
        drawing.words(20, top + 20, word, code=True)
        drawing.box(LEFT, top, 200, 28, "green", "rewards of the episode")
        drawing.box(LEFT + 206, top, 150, 28, color, meaning)
        drawing.arrow([(LEFT + 360, top + 14), (LEFT + 390, top + 14)])
        drawing.words(LEFT + 398, top + 19, behind, size=12)
