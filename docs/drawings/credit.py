"""Credit of an agent that dies."""

from __future__ import annotations

from drawings.canvas import Drawing

GAMMA, STEPS = 0.99, 40
LEFT, CELL = 150, 46


def credit() -> dict[str, float]:
    """Returns the target of the first step, in which an agent dies, for both settings."""
    return {"team": sum(GAMMA**t for t in range(STEPS)), "agent": 1.0}


def draw() -> Drawing:
    """The team earns 1 in each of 40 steps; one of its agents dies in the first."""
    drawing = Drawing(760, 268, "Credit of an agent that dies in the first step")
    drawing.words(
        20, 30, "An agent dies in the first of 40 steps; its team earns on", size=16, bold=True
    )
    credits = credit()
    rows = [
        (
            "team",
            "green",
            "return until the episode ends",
            "for example, it opened a door for the others",
        ),
        ("agent", "blue", "return until the agent dies", "only rewards up to its death count"),
    ]
    for i, (way, color, what, why) in enumerate(rows):
        y = 62 + i * 102
        drawing.words(20, y + 12, f"bootstrap={way}", code=True, size=12)
        drawing.words(20, y + 32, what, size=11, color="soft")
        _steps(drawing, y + 40, color, all_of_them=way == "team")
        drawing.words(640, y + 60, f"= {credits[way]:.2f}", size=17, bold=True)
        drawing.words(640, y + 80, "the return", size=11, color="soft")
        drawing.words(LEFT + CELL, y + 86, why, size=12, color="soft")
    return drawing


def _steps(drawing: Drawing, y: float, color: str, *, all_of_them: bool) -> None:
    """Draws the contribution of each step to the credit of the first."""
    words = ["1", "+ 0.99", "+ 0.98", "+ 0.97", "+ 0.96", "...", "...", "+ 0.69", "+ 0.68"]
    for i, word in enumerate(words):
        counts = all_of_them or i == 0
        drawing.box(
            LEFT + (i + 1) * CELL - CELL,
            y,
            CELL - 3,
            30,
            color if counts else "empty",
            word if counts else "",
            size=11,
            dashed=not counts,
        )
    drawing.box(LEFT + CELL - 9, y, 6, 30, "red", radius=1)
    drawing.words(LEFT + len(words) * CELL + 6, y + 19, "last step", size=11, color="soft")
