"""Draws frames with matplotlib: shapes, pixels, texts, and a line of agents."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from torchrl_marl.apps.pictures.film import ACTS, DEAD, UNBORN, WAITS, Agent, Frame
from torchrl_marl.envs.scene import Shape, Stage

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["AgentLine", "PixelsPanel", "ShapesPanel", "TextPanel", "limits"]

_TRAIL_FRAMES = 40  # frames
_ZORDER = {"goal": 2, "joint": 3, "object": 4, "agent": 6}
_ALPHA = {"goal": 0.35, "joint": 0.8, "object": 0.9, "agent": 1.0}
_DEAD_COLOR, _TURN_COLOR, _TEXT_COLOR = (0.62, 0.62, 0.62), (0.95, 0.6, 0.0), (0.25, 0.25, 0.25)
_MAX_NAMES = 6
Limits = tuple[float, float, float, float]


class ShapesPanel:
    """Panel of an environment that consists of shapes; artists are created once and then moved.

    Args:
        axes (Axes): axes of the panel.
        view (tuple): left, right, bottom and top.
        stage (Stage, optional): visible part of the plane, with its walls.
        turns (bool): True if agents act in turns; the agent to act is then marked.
    """

    def __init__(self, axes: Axes, view: Limits, stage: Stage | None, turns: bool) -> None:
        from matplotlib.patches import Rectangle

        self.axes, self.view, self.turns = axes, view, turns
        left, right, bottom, top = view
        axes.set(xlim=(left, right), ylim=(bottom, top))
        axes.set_aspect("equal", adjustable="box")
        if stage is not None and stage.border is not None:
            x, y = stage.border
            box = Rectangle((-x, -y), 2 * x, 2 * y, fill=False, color="#a8a8a8", lw=1.0, ls="--")
            axes.add_patch(box)
        self._shape_keys: list[tuple[Any, ...]] = []
        self._artists_by_shape: list[Any] = []
        self._line_collections: tuple[Any, ...] = ()

    def show(self, frame: Frame, recent: Sequence[Frame]) -> None:
        """Moves all artists to their places in a frame.

        Args:
            frame (Frame): frame of shapes.
            recent (sequence of Frame): frames up to this one, for the trails.
        """
        shapes = _shapes_of_frame(frame)
        known: list[tuple[Any, ...]] = [(one.name, one.kind, one.role) for one in shapes]
        if known != self._shape_keys:
            self._create_all_artists(shapes)
            self._shape_keys = known
        lives = {agent.name: agent.life for agent in frame.agents}
        for drawn, shape in zip(self._artists_by_shape, shapes):
            life = lives.get(shape.name, ACTS) if shape.role == "agent" else ACTS
            self._update_artists(drawn, shape, life)
        self._draw_trails(shapes, [_shapes_of_frame(one) for one in recent[-_TRAIL_FRAMES:]], lives)
        self._draw_messages(frame, {shape.name: shape for shape in shapes})

    def _create_all_artists(self, shapes: Sequence[Shape]) -> None:
        from matplotlib.collections import LineCollection

        for artists in self._artists_by_shape:
            for artist in artists.values():
                artist.remove()
        self._artists_by_shape = [self._create_artists(shape) for shape in shapes]
        for lines in self._line_collections:
            lines.remove()
        add: Any = self.axes.add_collection
        self._trails = add(LineCollection([], linewidths=1.6, zorder=5), autolim=False)
        self._message_lines = add(LineCollection([], linewidths=1.2, zorder=5), autolim=False)
        self._line_collections = (self._trails, self._message_lines)

    def _create_artists(self, shape: Shape) -> dict[str, Any]:
        """Returns the artists of a shape: its outline, its text and, for an agent, its marks."""
        artists: dict[str, Any] = {}
        order = _ZORDER[shape.role]
        if shape.kind != "text":
            artists["form"] = _create_outline(self.axes, shape, order)
        if shape.text or shape.kind == "text":
            artists["text"] = self._text(order + 2)
        if shape.role == "agent":
            artists["cross"] = self._text(order + 3)
            artists["cross"].set(text="×", color=_TEXT_COLOR)
            ring = _create_outline(self.axes, _ring_outline(shape), order - 1)
            ring.set(fill=False, edgecolor=_TURN_COLOR, linewidth=2.2)
            artists["ring"] = ring
        return artists

    def _text(self, order: int) -> Any:
        return self.axes.text(
            0, 0, "", ha="center", va="center", zorder=order, clip_on=True, parse_math=False
        )

    def _update_artists(self, artists: dict[str, Any], shape: Shape, life: str) -> None:
        from matplotlib.transforms import Affine2D

        place = Affine2D().rotate(shape.rotation).translate(shape.x, shape.y)
        if "form" in artists:
            _resize_outline(artists["form"], shape)
            artists["form"].set_transform(place + self.axes.transData)
            artists["form"].set_visible(shape.visible)
            _color_outline(artists["form"], shape, life)
        if "text" in artists:
            self._write_text(artists["text"], shape, shape.width if shape.kind == "text" else None)
            light = sum(w * part for w, part in zip((0.3, 0.59, 0.11), shape.color))
            dark = light < 0.6 and _ALPHA[shape.role] > 0.5 and not shape.hollow
            color = shape.color if shape.kind == "text" else (1, 1, 1) if dark else _TEXT_COLOR
            artists["text"].set_color(color)
        if "ring" in artists:
            _resize_outline(artists["ring"], _ring_outline(shape))
            artists["ring"].set_transform(place + self.axes.transData)
            artists["ring"].set_visible(shape.visible and self.turns and life == ACTS)
            self._write_text(artists["cross"], shape, 1.5 * min(shape.reach))
            artists["cross"].set_text("×")
            artists["cross"].set_visible(shape.visible and life == DEAD)

    def _write_text(self, artist: Any, shape: Shape, height: float | None) -> None:
        """Writes a text into a shape; the height of its letters is in the environment's units."""
        room = 1.1 * min(shape.reach)
        if height is None:
            height = min(room, 3.0 * shape.reach[0] / max(len(shape.text), 1))
        left, right = self.view[:2]
        points = 72 * self.axes.get_window_extent().width / self.axes.figure.dpi / (right - left)  # type: ignore[union-attr]
        artist.set(position=(shape.x, shape.y), text=shape.text, visible=shape.visible)
        artist.set_fontsize(min(max(height * points, 4.0), 40.0))

    def _draw_trails(
        self, shapes: Sequence[Shape], before: Sequence[Sequence[Shape]], lives: dict[str, str]
    ) -> None:
        segments, colors = [], []
        for i, shape in enumerate(shapes):
            if shape.role != "agent" or not shape.visible or lives.get(shape.name) == DEAD:
                continue
            there = [own[i] for own in before if i < len(own) and own[i].name == shape.name]
            points = [(own.x, own.y) for own in there if own.visible]
            age = [(k + 1) / len(points) for k in range(len(points) - 1)]
            segments += list(zip(points, points[1:]))
            colors += [(*shape.color, 0.45 * own) for own in age]
        self._trails.set_segments(segments)
        self._trails.set_color(colors or "none")

    def _draw_messages(self, frame: Frame, shapes: dict[str, Shape]) -> None:
        ends = [(shapes.get(a), shapes.get(b), weight) for a, b, weight in frame.words]
        shown = [(a, b, w) for a, b, w in ends if a and b and a.visible and b.visible]
        self._message_lines.set_segments([_message_line(a, b) for a, b, _ in shown])
        self._message_lines.set_color([(*b.color, 0.15 + 0.85 * w) for _, b, w in shown] or "none")


def _shapes_of_frame(frame: Frame) -> Sequence[Shape]:
    assert not isinstance(frame.picture, (str, np.ndarray))
    return frame.picture


def _ring_outline(shape: Shape) -> Shape:
    """Returns the outline of the ring around the agent to act."""
    import dataclasses

    reach = 0.35 * min(shape.reach)
    sizes: dict[str, Any] = {"radius": shape.radius + reach}
    if shape.kind != "circle":
        sizes = {"length": shape.length + 2 * reach, "width": shape.width + 2 * reach}
    return dataclasses.replace(shape, hollow=True, **sizes)


def _message_line(listener: Shape, speaker: Shape) -> list[tuple[float, float]]:
    """Returns the ends of a message's line.

    The line is shifted to one side, so that the line of a reply does not cover it.
    """
    x, y = speaker.x - listener.x, speaker.y - listener.y
    side = 0.25 * max(listener.reach) / max(math.hypot(x, y), 1e-9)
    return [(s.x - side * y, s.y + side * x) for s in (listener, speaker)]


def _create_outline(axes: Axes, shape: Shape, order: int) -> Any:
    """Returns the artist of a shape at the origin; a transform later moves it to its place."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Circle, Rectangle

    if shape.kind == "line":
        half = shape.length / 2
        line = Line2D([-half, half], [0, 0], lw=2.4, solid_capstyle="round", zorder=order)
        return axes.add_line(line)
    if shape.kind == "circle":
        patch: Any = Circle((0, 0), shape.radius, lw=1.0, zorder=order)
    else:
        corner = (-shape.length / 2, -shape.width / 2)
        patch = Rectangle(corner, shape.length, shape.width, lw=1.0, zorder=order)
    patch.set_fill(not shape.hollow)
    return axes.add_patch(patch)


def _resize_outline(artist: Any, shape: Shape) -> None:
    if shape.kind == "circle":
        artist.set_radius(shape.radius)
    elif shape.kind == "line":
        artist.set_xdata([-shape.length / 2, shape.length / 2])
    else:
        artist.set_bounds(-shape.length / 2, -shape.width / 2, shape.length, shape.width)


def _color_outline(artist: Any, shape: Shape, life: str) -> None:
    """Colors the artist of a shape; dead and unborn agents are gray and dotted."""
    absent = life in (DEAD, UNBORN)
    color = _DEAD_COLOR if absent else shape.color
    alpha = 0.35 if absent else _ALPHA[shape.role]
    dark = tuple(0.65 * part for part in color)
    if shape.kind == "line":
        artist.set_color((*color, alpha))
        return
    artist.set_facecolor((*color, alpha))
    artist.set_edgecolor((*dark, 0.5 if shape.role == "goal" else 1.0))
    artist.set_linestyle(":" if absent else "-")


class PixelsPanel:
    """Panel of an environment that renders pixels.

    Args:
        axes (Axes): axes of the panel.
    """

    def __init__(self, axes: Axes) -> None:
        self.axes = axes
        self._image: Any = None

    def show(self, frame: Frame, recent: Sequence[Frame]) -> None:
        """Shows a frame's pixels."""
        pixels = np.asarray(frame.picture)
        if self._image is not None and self._image.get_array().shape == pixels.shape:
            self._image.set_data(pixels)
            return
        if self._image is not None:
            self._image.remove()
        self._image = self.axes.imshow(pixels, interpolation="antialiased")


class TextPanel:
    """Panel of an environment that renders text.

    Args:
        axes (Axes): axes of the panel.
        lines (int): maximum number of lines in a frame.
        columns (int): number of characters in the longest line.
    """

    def __init__(self, axes: Axes, lines: int, columns: int) -> None:
        inches = axes.get_window_extent().width / axes.figure.dpi  # type: ignore[union-attr]
        high = axes.get_window_extent().height / axes.figure.dpi  # type: ignore[union-attr]
        points = min(72 * 0.92 * inches / (0.62 * columns), 72 * 0.92 * high / (1.3 * lines), 13)
        self._text = axes.text(
            *(0.04, 0.96, ""),
            transform=axes.transAxes,
            ha="left",
            va="top",
            family="monospace",
            fontsize=max(points, 4),
            linespacing=1.2,
            parse_math=False,
        )

    def show(self, frame: Frame, recent: Sequence[Frame]) -> None:
        """Shows a frame's text."""
        self._text.set_text(str(frame.picture))


class AgentLine:
    """Line with a dot for each agent: filled if it acts, hollow if it waits, crossed if it is dead.

    The bar over an agent shows how much attention others pay to its messages.

    Args:
        axes (Axes): axes of the line.
        agents (sequence of Agent): all agents.
        colors (dict): agent -> color; other agents get a default color.
    """

    def __init__(self, axes: Axes, agents: Sequence[Agent], colors: dict[str, Any]) -> None:
        self.axes = axes
        n = len(agents)
        axes.set(xlim=(-0.6, max(n, 4) - 0.4), ylim=(-1.0, 1.0))
        axes.set_axis_off()
        self._colors = [colors.get(agent.name, (0.30, 0.45, 0.69)) for agent in agents]
        self._dots = axes.scatter(range(n), [0.0] * n, s=60, zorder=3, linewidths=1.4)
        self._dead_markers = axes.scatter([], [], s=60, marker="x", color=[_TEXT_COLOR], zorder=4)
        self._attention_bars = axes.bar(range(n), [0.0] * n, 0.28, bottom=0.38, color=self._colors)
        for i, agent in enumerate(agents if n <= _MAX_NAMES else ()):
            axes.text(
                i, -0.66, agent.name[:14], ha="center", va="center", fontsize=7, color=_TEXT_COLOR
            )

    def show(self, agents: Sequence[Agent]) -> None:
        """Shows the states of the agents in a frame."""
        faces = {ACTS: 1.0, WAITS: 0.0, DEAD: 0.0, UNBORN: 0.0}
        absent = (DEAD, UNBORN)
        rows = list(zip(agents, self._colors))
        edges = [_DEAD_COLOR if agent.life in absent else color for agent, color in rows]
        self._dots.set_facecolor([(*c, faces[agent.life]) for (agent, _), c in zip(rows, edges)])
        self._dots.set_edgecolor([(*color, 1.0) for color in edges])
        gone = [(float(i), 0.0) for i, agent in enumerate(agents) if agent.life == DEAD]
        self._dead_markers.set_offsets(gone or np.zeros((0, 2)))
        for bar, agent in zip(self._attention_bars, agents):
            bar.set_height(0.6 * min(agent.heard or 0.0, 1.0))


def limits(frames: Sequence[Frame], stage: Stage | None) -> Limits:
    """Returns the limits of the view: left, right, bottom, top.

    The view contains all agents. Other shapes are included only where they lie in the scenario's
    view, which is first extended to all agents. The reason is that floors may be endless, and
    used-up objects may be moved far away.

    Args:
        frames (sequence of Frame): all frames to show.
        stage (Stage, optional): the scenario's view; by default, all visible shapes count.
    """
    shapes = [shape for frame in frames for shape in _shapes_of_frame(frame) if shape.visible]
    agents = [shape for shape in shapes if shape.role == "agent"] if stage else shapes
    low, high = [], []
    for axis in (0, 1):
        spans = []
        own = [((s.x, s.y)[axis], s.reach[axis]) for s in agents]
        if own:
            spans.append((min(at - r for at, r in own), max(at + r for at, r in own)))
        if stage is not None:
            spans += _spans_in_view(shapes, stage, axis, spans)
        spans = [span for span in spans if span[0] < span[1]] or [(-1.0, 1.0)]
        low.append(min(a for a, _ in spans))
        high.append(max(b for _, b in spans))
    margin = 0.06 * max(high[0] - low[0], high[1] - low[1])
    return low[0] - margin, high[0] + margin, low[1] - margin, high[1] + margin


def _spans_in_view(
    shapes: Sequence[Shape], stage: Stage, axis: int, own: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    """Returns the extents of the walls, and those of all shapes but agents, cut to the view."""
    middle, half = stage.center[axis], stage.half_size[axis]
    view = (
        min([middle - half, *(a for a, _ in own)]),
        max([middle + half, *(b for _, b in own)]),
    )
    spans = []
    for shape in shapes:
        if shape.role != "agent":
            at, extent = (shape.x, shape.y)[axis], shape.reach[axis]
            spans.append((max(at - extent, view[0]), min(at + extent, view[1])))
    if stage.border is not None:
        spans.append((-stage.border[axis], stage.border[axis]))
    return spans
