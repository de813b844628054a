"""Networks of four agents, for each kind of sharing."""

from __future__ import annotations

from drawings.canvas import Drawing

AGENT_COLORS = ("blue", "green", "amber", "violet")
WIDTH, HEIGHT = 236, 152
WAYS = [
    ("none", "a network for each agent"),
    ("full", "one for all"),
    ("group", "one for each group and kind"),
    ("trunk", "shared layers, a head for each"),
    ("agent_id", "one, with the agent as input"),
    ("masks", "one, pruned for each agent"),
    ("clusters", "one for similar agents"),
    ("index", "by a list: [0, 1, 1, 0]"),
]


def draw() -> Drawing:
    """Four agents and their networks, in eight panels."""
    drawing = Drawing(760, 560, "Ways of sharing networks among four agents")
    drawing.words(20, 30, "Four agents and their networks", size=16, bold=True)
    panels = {
        "none": [0, 1, 2, 3],
        "full": [0, 0, 0, 0],
        "group": [0, 0, 1, 1],
        "clusters": [0, 1, 0, 1],
        "index": [0, 1, 1, 0],
    }
    for i, (way, meaning) in enumerate(WAYS):
        x, y = 20 + (i % 3) * (WIDTH + 8), 48 + (i // 3) * (HEIGHT + 12)
        drawing.box(x, y, WIDTH, HEIGHT, "paper")
        drawing.words(x + 10, y + 22, way, code=True, bold=True)
        drawing.words(x + 10, y + 40, meaning, size=11, color="soft")
        if way in panels:
            _by_index(drawing, x, y, panels[way])
        else:
            {"trunk": _trunk, "agent_id": _agent_id, "masks": _masks}[way](drawing, x, y)
    x, y = 20 + 2 * (WIDTH + 8), 48 + 2 * (HEIGHT + 12)
    for k, line in enumerate(_note()):
        drawing.words(x + 10, y + 26 + 19 * k, line, size=12, color="soft")
    return drawing


def _note() -> list[str]:
    return [
        "Actors and critics may differ.",
        "From unshare_at on, each agent",
        "trains its own copy. To add a",
        "kind of sharing, write a function",
        "and register it in one line.",
    ]


def _places(x: float) -> list[float]:
    return [x + 34 + 56 * i for i in range(4)]


def _agents(drawing: Drawing, x: float, y: float) -> None:
    for i, place in enumerate(_places(x)):
        drawing.dot(place, y + 130, 13, AGENT_COLORS[i], str(i))


def _by_index(drawing: Drawing, x: float, y: float, index: list[int]) -> None:
    """Draws networks above their agents."""
    places = _places(x)
    n_networks = max(index) + 1
    width = 44 if n_networks > 2 else 80
    step = 56 if n_networks > 2 else 112
    first = {1: x + WIDTH / 2, 2: x + 62, 4: places[0]}[n_networks]
    for k in range(n_networks):
        drawing.box(first + k * step - width / 2, y + 56, width, 28, "empty", "net")
    for i, k in enumerate(index):
        drawing.line([(places[i], y + 117), (first + k * step, y + 84)])
    _agents(drawing, x, y)


def _trunk(drawing: Drawing, x: float, y: float) -> None:
    for i, place in enumerate(_places(x)):
        drawing.box(place - 22, y + 50, 44, 20, AGENT_COLORS[i], "head", size=11)
        drawing.line([(place, y + 78), (place, y + 70)])
        drawing.line([(place, y + 117), (place, y + 102)])
    drawing.box(x + 12, y + 78, WIDTH - 24, 24, "empty", "trunk")
    _agents(drawing, x, y)


def _agent_id(drawing: Drawing, x: float, y: float) -> None:
    drawing.box(x + WIDTH / 2 - 40, y + 52, 80, 24, "empty", "net")
    for i, place in enumerate(_places(x)):
        drawing.line([(place, y + 92), (x + WIDTH / 2, y + 76)])
        for k in range(4):
            color = AGENT_COLORS[i] if k == i else "empty"
            drawing.box(place - 20 + 10 * k, y + 94, 9, 12, color, radius=1)
    _agents(drawing, x, y)


def _masks(drawing: Drawing, x: float, y: float) -> None:
    for i, place in enumerate(_places(x)):
        for k in range(8):
            lacks = (k * 5 + i * 3) % 8 < 3
            color = "empty" if lacks else AGENT_COLORS[i]
            left, top = place - 22 + 11 * (k % 4), y + 60 + 16 * (k // 4)
            drawing.box(left, top, 9, 12, color, dashed=lacks, radius=1)
        drawing.line([(place, y + 117), (place, y + 94)])
    _agents(drawing, x, y)
