"""Credit in turn-based games: transitions between moves of the same player."""

from __future__ import annotations

from drawings.canvas import Drawing

LEFT, CELL, ROW = 140, 84, 60
MOVES = 6


def draw() -> Drawing:
    """Two players move in turns; the first wins with the fifth move."""
    drawing = Drawing(760, 332, "Credit in a game of turns")
    drawing.words(20, 30, "Turn-based game: the first player wins in step 4", size=16, bold=True)
    for t in range(MOVES - 1):
        drawing.words(LEFT + (t + 0.5) * CELL - 2, 58, f"step {t}", anchor="middle", color="soft")
    for player in (0, 1):
        _player(drawing, 68 + player * (ROW + 58), player)
    line = (
        "Only moves of the same player are discounted: the loser's last move gets a credit of -1,"
    )
    drawing.words(20, 298, line, size=12)
    drawing.words(20, 316, "not with 0.99 x -1.", size=12)
    return drawing


def _player(drawing: Drawing, y: float, player: int) -> None:
    """Draws the moves, waits and rewards of a player."""
    drawing.words(20, y + 20, f"player {player}", bold=True)
    drawing.words(20, y + 38, "reward", size=12, color="soft")
    color = ("blue", "amber")[player]
    for t in range(MOVES - 1):
        x, own = LEFT + t * CELL, t % 2 == player
        words = "moves" if own else "waits"
        drawing.box(x, y, CELL - 5, 28, color if own else "empty", words, dashed=not own)
        reward = {0: "+1", 1: "-1"}[player] if t == MOVES - 2 else "0"
        strong = reward != "0"
        drawing.words(
            x + CELL / 2 - 2,
            y + 46,
            reward,
            anchor="middle",
            size=13 if strong else 12,
            color="ink" if strong else "soft",
            bold=strong,
        )
    own = [t for t in range(MOVES - 1) if t % 2 == player]
    for t in own:
        start, end = LEFT + t * CELL + 6, LEFT + min(t + 2, MOVES - 1) * CELL - 8
        drawing.line([(start, y + 56), (start, y + 64), (end, y + 64), (end, y + 56)])
        words = "one transition" if end - start > 100 else "one"
        drawing.words((start + end) / 2, y + 79, words, size=11, anchor="middle", color="soft")
    last = "credit of its last move: " + ("+1" if player == 0 else "-1")
    drawing.words(LEFT + (MOVES - 1) * CELL + 8, y + 20, last, size=12)
    where = "received in this step" if player == 0 else "received while it waits"
    drawing.words(LEFT + (MOVES - 1) * CELL + 8, y + 38, where, size=11, color="soft")
