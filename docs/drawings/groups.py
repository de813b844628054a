"""Groups: equal agents stacked, kinds of different shapes padded to the largest."""

from __future__ import annotations

from drawings.canvas import Drawing


def draw() -> Drawing:
    """An environment with two groups, one of which has two kinds."""
    drawing = Drawing(760, 400, "Groups, kinds and the TensorDict of a group")
    drawing.words(20, 30, "One environment: E environments, T steps", size=16, bold=True)
    drawing.words(20, 52, "rollout, batch [E, T]", code=True, size=12, color="soft")
    _rovers(drawing, 20, 72)
    _team(drawing, 300, 72)
    _root(drawing, 20, 318)
    return drawing


def _rovers(drawing: Drawing, x: float, y: float) -> None:
    """Draws a group of three equal agents."""
    drawing.box(x, y, 260, 222, "paper")
    drawing.words(x + 12, y + 24, 'group "rover"', bold=True)
    for i in range(3):
        drawing.dot(x + 150 + 38 * i, y + 20, 15, "blue", str(i))
    leaves = [
        ("observation", "[E, T, 3, 4]"),
        ("action", "[E, T, 3, 2]"),
        ("mask", "[E, T, 3]"),
        ("reward, done", "[E, T, 3, 1]"),
    ]
    _leaves(drawing, x + 12, y + 62, leaves)
    drawing.words(x + 12, y + 186, "equal agents: one dense tensor,", size=12, color="soft")
    drawing.words(x + 12, y + 204, "agents in the dim before the last", size=12, color="soft")


def _leaves(drawing: Drawing, x: float, y: float, leaves: list[tuple[str, str]]) -> None:
    for i, (name, shape) in enumerate(leaves):
        drawing.words(x, y + 25 * i, name, code=True, size=12)
        drawing.words(x + 234, y + 25 * i, shape, code=True, size=12, anchor="end", color="soft")


def _team(drawing: Drawing, x: float, y: float) -> None:
    """Draws a heterogeneous group, as a lazy stack and padded."""
    drawing.box(x, y, 440, 222, "paper")
    drawing.words(x + 12, y + 24, 'group "team": two kinds', bold=True)
    drawing.words(x + 12, y + 56, "from the environment", size=12, color="soft")
    drawing.words(x + 12, y + 73, "(a lazy stack)", size=12, color="soft")
    drawing.words(x + 12, y + 146, "in learners, replay, graphs", size=12, color="soft")
    drawing.words(x + 12, y + 163, "(PadAgents)", size=12, color="soft")
    kinds = [("speaker", 3, "amber"), ("listener", 9, "green")]
    for i, (kind, features, color) in enumerate(kinds):
        for top, padded in ((y + 44, False), (y + 130, True)):
            line = top + 32 * i
            drawing.words(x + 184, line + 17, kind, size=12)
            _features(drawing, x + 246, line, features, color, padded=padded)
    drawing.words(x + 184, y + 212, "observation [E, T, 2, 9]", code=True, size=12)


def _features(
    drawing: Drawing, x: float, y: float, features: int, color: str, *, padded: bool
) -> None:
    """Draws an agent's features, and those that are padding."""
    for k in range(9 if padded else features):
        real = k < features
        drawing.box(x + 20 * k, y, 17, 22, color if real else "empty", dashed=not real, radius=2)


def _root(drawing: Drawing, x: float, y: float) -> None:
    """Draws the entries at the root."""
    drawing.box(x, y, 720, 58, "paper")
    drawing.words(x + 12, y + 24, "at the root", bold=True)
    drawing.words(x + 120, y + 24, "done, terminated, truncated", code=True, size=12)
    drawing.words(x + 345, y + 24, "[E, T, 1]  of the episode", size=12, color="soft")
    drawing.words(x + 120, y + 46, "state", code=True, size=12)
    drawing.words(x + 345, y + 46, "[E, T, S]  only for the critic", size=12, color="soft")
