"""Animations of episodes as GIF or video, drawn without a display."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torchrl.envs import EnvBase

from torchrl_marl.apps.pictures.drawing import check_matplotlib
from torchrl_marl.apps.pictures.film import ACTS, WAITS, Film, Frame
from torchrl_marl.apps.pictures.panels import AgentLine, PixelsPanel, ShapesPanel, TextPanel, limits
from torchrl_marl.envs.scene import check_scene
from torchrl_marl.errors import ConfigError, MissingExtraError
from torchrl_marl.training.files import explain_write_errors, open_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image

__all__ = ["ENDINGS", "check_drawable", "draw_frames", "write"]

ENDINGS = (".gif", ".mp4")
"""Supported file name suffixes of an animation."""

_MAX_FRAMES = 300
_MIN_FRAME_MS, _LAST_FRAME_MS = 60, 1500
_TOTAL_MS, _MAX_FRAME_MS = (
    3000,
    250,
)  # milliseconds: total of a short film, and most of a frame in it
_DPI, _TITLE_HEIGHT, _LINE_HEIGHT = (
    100,
    0.34,
    0.46,
)  # heights in inches of a title and a line of agents
_PANEL_SIZES = {1: 4.8, 2: 3.8, 3: 3.2}  # panel size in inches, by number of panels in a row
_MAX_COLUMNS, _MIN_PANEL_SIZE = 4, 2.8
_BACKGROUND, _PANEL_COLOR = (255, 255, 255), (247, 247, 244)


def check_drawable(env: EnvBase, paths: Sequence[Path] = ()) -> None:
    """Raises an error if an environment cannot be drawn or a file type cannot be written.

    Meant to be called before any episode is played.

    Args:
        env (EnvBase): environment to draw.
        paths (sequence of Path): files to write.

    Raises:
        ConfigError: the environment cannot be drawn, or a file type is not supported.
        MissingExtraError: matplotlib, or imageio-ffmpeg for a video, is not installed.
    """
    for path in paths:
        if path.suffix not in ENDINGS:
            raise ConfigError(
                f"the animation file {str(path)!r} has an unknown type, expected a name that ends "
                f"in {' or '.join(ENDINGS)}."
            )
        if path.suffix == ".mp4" and importlib.util.find_spec("imageio_ffmpeg") is None:
            raise MissingExtraError("imageio-ffmpeg", "video")
    check_matplotlib()  # after the files: the extra of videos has it, too
    check_scene(env)


def write(film: Film, path: Path) -> None:
    """Writes the episodes of a film as a GIF or video, one panel for each episode.

    Episodes of more than 300 steps are subsampled.

    Args:
        film (Film): recorded episodes.
        path (Path): file to write, which ends in ``.gif`` or ``.mp4``.

    Raises:
        WriteError: the file cannot be written.

    Examples:
        >>> from torchrl_marl import TeamSpec
        >>> from torchrl_marl.envs import VmasEnv
        >>> from torchrl_marl.training.evaluation import play
        >>> env = VmasEnv("balance", num_envs=4, max_steps=100, seed=0)
        >>> film = Film(env, TeamSpec.from_env(env), shown=4)
        >>> played = play(env, None, TeamSpec.from_env(env), episodes=4, film=film)
        >>> write(film, Path("episodes.gif"))  # doctest: +SKIP
    """
    pictures = draw_frames(film)
    each = min(max(_MIN_FRAME_MS, _TOTAL_MS // max(len(pictures), 1)), _MAX_FRAME_MS)
    if path.suffix == ".mp4":
        _write_video(pictures, path, each)
    else:
        _write_gif(pictures, path, each)


def _write_gif(pictures: Sequence[np.ndarray], path: Path, milliseconds: int) -> None:
    from PIL import Image

    images = [Image.fromarray(pixels) for pixels in pictures]
    palette = _shared_palette(images)
    images = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]
    with open_atomically(path, "wb") as file:
        images[0].save(
            file,
            format="GIF",
            save_all=True,
            append_images=images[1:],
            duration=[milliseconds] * (len(images) - 1) + [_LAST_FRAME_MS],
            loop=0,
            disposal=1,
            optimize=False,
        )


def _write_video(pictures: Sequence[np.ndarray], path: Path, milliseconds: int) -> None:
    import imageio_ffmpeg

    height, width = (size + size % 2 for size in pictures[0].shape[:2])
    last = [pictures[-1]] * (_LAST_FRAME_MS // milliseconds)
    part = path.with_name(f"{path.name}.part.mp4")
    with explain_write_errors(path):
        part.unlink(missing_ok=True)
        part.open("xb").close()  # raises for a missing folder or a full disk
        video = imageio_ffmpeg.write_frames(
            str(part), (width, height), fps=1000 / milliseconds, macro_block_size=2
        )
        try:
            video.send(None)
            for pixels in [*pictures, *last]:
                whole = np.full((height, width, 3), 255, np.uint8)
                whole[: pixels.shape[0], : pixels.shape[1]] = pixels
                video.send(whole)
            video.close()
            part.replace(path)
        finally:
            video.close()
            part.unlink(missing_ok=True)


def _shared_palette(pictures: Sequence[Image]) -> Image:
    """Returns one palette for all pictures.

    The palette is computed from three of the pictures, and contains the exact background colors.
    """
    from PIL import Image

    width, height = pictures[0].size
    sample = Image.new("RGB", (width, 3 * height))
    for i, picture in enumerate((pictures[0], pictures[len(pictures) // 2], pictures[-1])):
        sample.paste(picture, (0, i * height))
    palette = sample.quantize(126, method=Image.Quantize.MEDIANCUT)
    colors = palette.getpalette() or []
    palette.putpalette([*colors[: 3 * 126], *_BACKGROUND, *_PANEL_COLOR])
    return palette


def draw_frames(film: Film) -> list[np.ndarray]:
    """Draws the frames of a film; returns uint8 arrays ``[H, W, 3]`` of equal size.

    An episode that has ended shows its last state until the longest episode ends.

    Args:
        film (Film): recorded episodes.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    longest = max(len(frames) for frames in film.episodes)
    stride = math.ceil(longest / _MAX_FRAMES)
    times = [*range(0, longest - 1, stride), longest - 1]
    figure = Figure(dpi=_DPI)
    canvas = FigureCanvasAgg(figure)
    panels = list(_make_panels(figure, film))
    drawn = []
    for time in times:
        for panel, frames in zip(panels, film.episodes):
            panel.show(frames[: time + 1 : stride], frames[min(time, len(frames) - 1)])
        canvas.draw()
        drawn.append(np.asarray(canvas.buffer_rgba())[..., :3].copy())
    return drawn


def _make_panels(figure: Figure, film: Film) -> Iterator[_Panel]:
    """Lays out a panel for each episode, at most four in a row."""
    n = len(film.episodes)
    columns = min(n, _MAX_COLUMNS)
    rows = math.ceil(n / columns)
    every = [frame for frames in film.episodes for frame in frames]
    view = _Layout(film, every)
    size = _PANEL_SIZES.get(columns, _MIN_PANEL_SIZE)
    height = min(max(size * view.ratio, 0.33 * size), 1.34 * size)
    width = max(min(size, height / view.ratio), 0.62 * size)
    line = _LINE_HEIGHT if view.has_line else 0.0
    names = sum(len(name) + 6 for name in every[0].returns) + 8
    title = _TITLE_HEIGHT * (1 if 0.085 * (len(film.name) + names) < width else 1.6)
    whole = height + title + line
    figure.set_size_inches(columns * width, rows * whole)
    figure.set_facecolor("white")
    for i in range(n):
        row, column = divmod(i, columns)
        left, bottom = column / columns, 1 - (row + 1) / rows
        gap = 0.015 / columns
        share = 1 / columns - 2 * gap
        place = (
            left + gap,
            bottom + (line + 0.03) / whole / rows,
            share,
            (height - 0.03) / whole / rows,
        )
        below = (left + gap, bottom, share, line / whole / rows)
        words = film.name if n == 1 else f"{film.name} {i + 1}" if i == 0 else str(i + 1)
        pad = 6 if title == _TITLE_HEIGHT else 20
        yield _Panel(figure, view, place, below if line else None, words, pad)


class _Layout:
    """Layout that all panels share: the limits of the view, the colors, and the parts shown."""

    def __init__(self, film: Film, every: Sequence[Frame]) -> None:
        self.stage, self.first = film.stage, every[0]
        picture = every[0].picture
        lives = {agent.life for frame in every for agent in frame.agents}
        self.turns = WAITS in lives
        talks = any(a.heard is not None for f in every for a in f.agents)
        self.colors: dict[str, Any] = {}
        if isinstance(picture, str):
            self.kind, texts = "text", [str(frame.picture).splitlines() for frame in every]
            self.lines = max(map(len, texts))
            self.columns = max(len(line) for lines in texts for line in lines)
            self.ratio = min(max(2.1 * self.lines / max(self.columns, 1), 0.4), 1.2)
        elif isinstance(picture, np.ndarray):
            self.kind, self.ratio = "pixels", picture.shape[0] / picture.shape[1]
        else:
            self.kind, self.limits = "shapes", limits(every, film.stage)
            left, right, bottom, top = self.limits
            self.ratio = (top - bottom) / (right - left)
            self.colors = {s.name: s.color for s in picture if s.role == "agent"}
        # Agents that are drawn as shapes show their state there.
        placed = all(agent.name in self.colors for agent in every[0].agents)
        self.has_line = bool(every[0].agents) and (talks or (lives != {ACTS} and not placed))


class _Panel:
    """Panel of one episode, with the environment, a title and a line of agents."""

    def __init__(
        self, figure: Figure, view: _Layout, place: Any, below: Any | None, title: str, pad: int
    ) -> None:
        axes = figure.add_axes(place)
        field = [part / 255 for part in _PANEL_COLOR]
        axes.set(xticks=[], yticks=[], facecolor=field)
        for spine in axes.spines.values():
            spine.set_color("#c8c8c8")
        axes.set_title(title, loc="left", fontsize=10, fontweight="bold", y=1.0, pad=pad)
        # Not a matplotlib title, since all titles of an axes have the same distance from it.
        self._status = axes.annotate(
            *("", (1, 1), (0, 6)),
            xycoords="axes fraction",
            textcoords="offset points",
            ha="right",
            va="bottom",
            fontsize=9,
            parse_math=False,
            annotation_clip=False,
        )
        self._env_panel: Any
        if view.kind == "shapes":
            self._env_panel = ShapesPanel(axes, view.limits, view.stage, view.turns)
        elif view.kind == "pixels":
            self._env_panel = PixelsPanel(axes)
        else:
            self._env_panel = TextPanel(axes, view.lines, view.columns)
        self._agent_line = None
        if below is not None:
            self._agent_line = AgentLine(figure.add_axes(below), view.first.agents, view.colors)

    def show(self, recent: Sequence[Frame], frame: Frame) -> None:
        """Shows a frame."""
        self._env_panel.show(frame, recent)
        if self._agent_line is not None:
            self._agent_line.show(frame.agents)
        color = "#202020" if frame.over else "#606060"
        self._status.set(text=_status(frame), color=color)


def _status(frame: Frame) -> str:
    if len(frame.returns) == 1:
        earned = [f"return {value:.2f}" for value in frame.returns.values()]
    else:
        earned = [f"{name} {value:.2f}" for name, value in frame.returns.items()]
    return "  ".join([f"{'end' if frame.over else 'step'} {frame.step}", *earned])
