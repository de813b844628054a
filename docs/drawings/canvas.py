"""Drawings of boxes, text, arrows and lines, written as SVG.

Colors have names (``PALETTE``), each with a light and a dark value. The picture follows the color
scheme of the reader's system, and has a background, so that it is readable on any page.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

PALETTE = {
    "paper": ("#fbfaf7", "#1d2126"),
    "edge": ("#d6d2c8", "#3a414a"),
    "ink": ("#23272d", "#e8e6e1"),
    "soft": ("#68707a", "#a2a9b3"),
    "empty": ("#eeece6", "#282d33"),
    "blue": ("#bcd5f0", "#2d547c"),
    "green": ("#c0e0c4", "#2c5f3a"),
    "amber": ("#f6dca0", "#7a5a16"),
    "red": ("#f1bdb5", "#7d372e"),
    "violet": ("#d9cbee", "#56437a"),
}
LETTER = 0.56  # mean width of a letter, as a share of its size


class Drawing:
    """A picture with coordinates in pixels from the upper left.

    Args:
        width, height (int): of the paper.
        title (str): what a screen reader says.

    Examples:
        >>> drawing = Drawing(100, 50, "a box")
        >>> drawing.box(10, 10, 80, 30, "blue", "hello")
        >>> drawing.svg().count("<rect")
        2
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._parts: list[str] = []

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        color: str = "empty",
        words: str | Sequence[str] = (),
        *,
        size: int = 13,
        dashed: bool = False,
        radius: float = 5,
    ) -> None:
        """Draws a box with centered lines of text."""
        lines = [words] if isinstance(words, str) else list(words)
        widest = max((len(line) for line in lines), default=0) * LETTER * size
        if widest > width:
            raise ValueError(f"{lines} takes {widest:.0f} pixels, expected at most {width:.0f}.")
        dashes = ' stroke-dasharray="4 3"' if dashed else ""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" '
            f'class="{color} line"{dashes}/>'
        )
        first = y + height / 2 - (len(lines) - 1) * 0.6 * size + 0.35 * size
        for i, line in enumerate(lines):
            self.words(x + width / 2, first + 1.2 * i * size, line, size=size, anchor="middle")

    def words(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: int = 13,
        anchor: str = "start",
        color: str = "ink",
        bold: bool = False,
        code: bool = False,
    ) -> None:
        """Writes one line of text, anchored at ``x``."""
        width = len(words) * (0.6 if code else LETTER) * size
        left = {"start": x, "middle": x - width / 2, "end": x - width}[anchor]
        if left < 0 or left + width > self.width:
            raise ValueError(f"{words!r} would leave the paper.")
        style = (' font-weight="600"' if bold else "") + (' class="code"' if code else "")
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"'
            f'{style}><tspan class="{color}">{escape(words)}</tspan></text>'
        )

    def line(self, points: Sequence[tuple[float, float]], *, dashed: bool = False) -> None:
        """Draws a line through points."""
        self._path(points, "thin", dashed)

    def arrow(self, points: Sequence[tuple[float, float]], *, dashed: bool = False) -> None:
        """Draws an arrow through points."""
        self._path(points, "thin head", dashed)

    def dot(self, x: float, y: float, radius: float, color: str, words: str = "") -> None:
        """Draws a circle with a word in it."""
        self._parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" class="{color} line"/>')
        if words:
            self.words(x, y + 4, words, size=12, anchor="middle")

    def _path(self, points: Sequence[tuple[float, float]], kind: str, dashed: bool) -> None:
        way = " L".join(f"{x:g} {y:g}" for x, y in points)
        dashes = ' stroke-dasharray="4 3"' if dashed else ""
        self._parts.append(f'<path d="M{way}" class="{kind}"{dashes}/>')

    def svg(self) -> str:
        """Returns the picture as SVG text."""
        paper = (
            f'<rect x="0.5" y="0.5" width="{self.width - 1}" height="{self.height - 1}" rx="8" '
            'class="paper line"/>'
        )
        body = "\n".join([paper, *self._parts])
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" '
            f'height="{self.height}" viewBox="0 0 {self.width} {self.height}" role="img" '
            'font-family="system-ui, Helvetica, Arial, sans-serif">\n'
            f"<title>{escape(self.title)}</title>\n<style>\n{_style()}</style>\n"
            '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
            'markerHeight="7" orient="auto"><path d="M0 0L10 5L0 10z" class="soft"/></marker>'
            f"</defs>\n{body}\n</svg>\n"
        )


def _style() -> str:
    """Returns the CSS of all colors, for light and dark schemes."""

    def rules(which: int) -> str:
        fills = "".join(f".{name}{{fill:{pair[which]}}}" for name, pair in PALETTE.items())
        edge, soft = PALETTE["edge"][which], PALETTE["soft"][which]
        return f"{fills}.line{{stroke:{edge}}}.thin{{fill:none;stroke:{soft};stroke-width:1.4}}"

    return (
        f"{rules(0)}\n.head{{marker-end:url(#tip)}}"
        ".code{font-family:ui-monospace,Menlo,Consolas,monospace}\n"
        f"@media (prefers-color-scheme:dark){{{rules(1)}}}\n"
    )
