"""An episode as a GIF, drawn without a display.

Shapes: E envs.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.envs import EnvBase
from torchrl.envs.utils import step_mdp

from torchrl_marl.envs.scene import Shape, Stage, scene, stage
from torchrl_marl.errors import ConfigError, MissingExtraError
from torchrl_marl.modules.communication.heard import listening_by_group
from torchrl_marl.specs import TeamSpec
from torchrl_marl.training.births import begun
from torchrl_marl.training.files import whole_file
from torchrl_marl.training.metrics import group_reward

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from PIL.Image import Image

__all__ = ["Frame", "animate", "check_drawable", "draw_frames", "play"]

_MOST_FRAMES = 300
_LONGEST = 10_000
_MILLISECONDS, _LAST_MILLISECONDS = 60, 1500
_TRAIL = 40  # frames
_PIXELS_PER_INCH, _INCHES, _TITLE_INCHES = 100, 4.8, 0.34
_ORDER = {"goal": 2, "joint": 3, "object": 4, "agent": 6}
_ALPHA = {"goal": 0.35, "joint": 0.8, "object": 0.9, "agent": 1.0}
_BACKGROUND, _FIELD = (255, 255, 255), (247, 247, 244)

Policy = Callable[[TensorDictBase], TensorDictBase]


@dataclass(frozen=True)
class Frame:
    """A moment of an episode: its scene, and the return up to then."""

    step: int
    """0 is the start."""
    shapes: list[Shape]
    """All entities, in the same order in every frame."""
    returns: dict[str, float]
    """Group -> sum of the mean reward of its agents that are born and live."""
    words: tuple[tuple[int, int, float], ...] = ()
    """Who hears whom in this moment, by the places of their shapes, and how much, 0 to 1."""


def animate(env: EnvBase, act: Policy, path: Path) -> None:
    """Plays one whole episode of the first env and writes it as a GIF.

    An episode of more than 300 steps is shown in larger strides.

    Args:
        env (EnvBase): one that can be drawn, played from a reset.
        act (callable): writes the actions.
        path (Path): the file.

    Raises:
        ConfigError: an environment that cannot be drawn, or an episode that does not end.
        MissingExtraError: matplotlib is not installed.
        WriteError: the file cannot be written.

    Examples:
        >>> from torchrl_marl.envs import VmasEnv
        >>> env = VmasEnv("balance", num_envs=1, max_steps=100, seed=0)
        >>> animate(env, env.rand_action, Path("episode.gif"))  # doctest: +SKIP
    """
    check_drawable(env)
    pictures = draw_frames(play(env, act), stage(env))
    durations = [_MILLISECONDS] * (len(pictures) - 1) + [_LAST_MILLISECONDS]
    with whole_file(path, "wb") as file:
        pictures[0].save(
            file,
            format="GIF",
            save_all=True,
            append_images=pictures[1:],
            duration=durations,
            loop=0,
            disposal=1,
            optimize=False,
        )


def check_drawable(env: EnvBase) -> None:
    """Refuses worlds that :func:`animate` cannot draw, before anything is played.

    Raises:
        ConfigError: an environment that cannot be drawn.
        MissingExtraError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError("matplotlib", "plot")
    stage(env)


def play(env: EnvBase, act: Policy) -> list[Frame]:
    """Plays one whole episode of the first env, its last state included.

    Raises:
        ConfigError: an episode that does not end.
    """
    team = TeamSpec.from_env(env)
    carry = env.reset()
    returns = dict.fromkeys(team.groups, 0.0)
    first = scene(env)
    frames = [Frame(0, first, returns)]
    place = {shape.name: i for i, shape in enumerate(first)}
    born: dict[str, Tensor] = {}
    for step in range(1, _LONGEST + 1):
        acted = act(carry)
        words = _words(act, acted, team, place)
        following = env.step(acted)
        born = begun(team, following, born)
        earned = {
            n: float(group_reward(g, following, born.get(n))[0]) for n, g in team.groups.items()
        }
        returns = {name: returns[name] + earned[name] for name in returns}
        frames.append(Frame(step, scene(env), returns, words))
        if bool(following["next", "done"][0]):
            return frames
        # The reset comes after the picture, since it overwrites the last state.
        carry = env.maybe_reset(step_mdp(following))
    raise ConfigError(
        f"the episode did not end in {_LONGEST} steps; give the environment a time limit "
        "(env.max_steps)."
    )


def _words(
    act: Policy, acted: TensorDictBase, team: TeamSpec, place: Mapping[str, int]
) -> tuple[tuple[int, int, float], ...]:
    """Returns who hears whom in the first env, where agents communicate and have shapes."""
    if not isinstance(act, nn.Module):
        return ()
    found = []
    for name, weights in listening_by_group(act, acted).items():
        agents = [place.get(agent) for agent in team.groups[name].agent_names]
        for i, row in zip(agents, weights[0].tolist()):
            found += [
                (i, j, weight)
                for j, weight in zip(agents, row)
                if weight > 0.01 and i is not None and j is not None
            ]
    return tuple(found)


def draw_frames(frames: Sequence[Frame], where: Stage) -> list[Image]:
    """Draws the frames of an episode, all with the same axes and the same palette of colors."""
    import numpy
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    stride = math.ceil(len(frames) / _MOST_FRAMES)
    shown = [*frames[:-1:stride], frames[-1]]
    left, right, bottom, top = _limits(frames, where)
    height = min(max(_INCHES * (top - bottom) / (right - left), 1.6), 6.4)
    width = min(_INCHES, height * (right - left) / (top - bottom))
    figure = Figure((max(width, 3.0), height + _TITLE_INCHES), dpi=_PIXELS_PER_INCH)
    canvas = FigureCanvasAgg(figure)
    share = height / (height + _TITLE_INCHES)
    axes = figure.add_axes((0.015, 0.015, 0.97, share - 0.02))
    field = [part / 255 for part in _FIELD]
    axes.set(xlim=(left, right), ylim=(bottom, top), xticks=[], yticks=[], facecolor=field)
    axes.set_aspect("equal", adjustable="box")
    for spine in axes.spines.values():
        spine.set_color("#c8c8c8")
    picture = _Picture(axes, frames[0], where)
    drawn = []
    for i, frame in enumerate(shown):
        picture.show(frame, shown[max(0, i - _TRAIL) : i + 1])
        canvas.draw()
        drawn.append(Image.fromarray(numpy.asarray(canvas.buffer_rgba())[..., :3].copy()))
    palette = _palette(drawn)
    return [pixels.quantize(palette=palette, dither=Image.Dither.NONE) for pixels in drawn]


def _palette(pictures: Sequence[Image]) -> Image:
    """Returns a palette for all pictures, from three of them, with exact backgrounds."""
    from PIL import Image

    width, height = pictures[0].size
    sample = Image.new("RGB", (width, 3 * height))
    for i, picture in enumerate((pictures[0], pictures[len(pictures) // 2], pictures[-1])):
        sample.paste(picture, (0, i * height))
    palette = sample.quantize(126, method=Image.Quantize.MEDIANCUT)
    colors = palette.getpalette() or []
    palette.putpalette([*colors[: 3 * 126], *_BACKGROUND, *_FIELD])
    return palette


class _Picture:
    """The artists of a scene, created once and moved from frame to frame.

    Args:
        axes (Axes): where they are drawn.
        first (Frame): says what there is.
        where (Stage): the scenario's name and walls.
    """

    def __init__(self, axes: Axes, first: Frame, where: Stage) -> None:
        from matplotlib.collections import LineCollection
        from matplotlib.patches import Rectangle

        self.axes = axes
        if where.border is not None:
            x, y = where.border
            corner = (-x, -y)
            axes.add_patch(
                Rectangle(corner, 2 * x, 2 * y, fill=False, color="#a8a8a8", lw=1.0, ls="--")
            )
        self.artists = [_artist(axes, shape) for shape in first.shapes]
        self.trails: dict[int, Any] = {
            i: axes.add_collection(LineCollection([], linewidths=1.6, zorder=5))
            for i, shape in enumerate(first.shapes)
            if shape.role == "agent"
        }
        self.words: Any = axes.add_collection(LineCollection([], linewidths=1.2, zorder=5))
        axes.set_title(where.name, loc="left", fontsize=11, fontweight="bold", pad=6)

    def show(self, frame: Frame, recent: Sequence[Frame]) -> None:
        """Moves all artists to their places in a frame."""
        from matplotlib.transforms import Affine2D

        for artist, shape in zip(self.artists, frame.shapes):
            place = Affine2D().rotate(shape.rotation).translate(shape.x, shape.y)
            artist.set_transform(place + self.axes.transData)
            artist.set_visible(shape.visible)
            _paint(artist, shape)
        for i, trail in self.trails.items():
            there = [f.shapes[i] for f in recent if f.shapes[i].visible]
            points = [(shape.x, shape.y) for shape in there]
            age = [(k + 1) / len(points) for k in range(len(points) - 1)]
            trail.set_segments(list(zip(points, points[1:])))
            trail.set_color([(*frame.shapes[i].color, 0.45 * a) for a in age])
            trail.set_visible(frame.shapes[i].visible)
        ends = [(frame.shapes[i], frame.shapes[j], weight) for i, j, weight in frame.words]
        shown = [(a, b, weight) for a, b, weight in ends if a.visible and b.visible]
        self.words.set_segments([_word(a, b) for a, b, _ in shown])
        self.words.set_color([(*b.color, 0.15 + 0.85 * weight) for _, b, weight in shown])
        self.axes.set_title(_title(frame), loc="right", fontsize=10, color="#404040", pad=6)


def _word(listener: Shape, speaker: Shape) -> list[tuple[float, float]]:
    """Returns the line of a word, beside that of the answer: it has the speaker's color."""
    x, y = speaker.x - listener.x, speaker.y - listener.y
    side = 0.25 * max(listener.reach) / max(math.hypot(x, y), 1e-9)
    return [(s.x - side * y, s.y + side * x) for s in (listener, speaker)]


def _title(frame: Frame) -> str:
    if len(frame.returns) == 1:
        earned = [f"return {value:.2f}" for value in frame.returns.values()]
    else:
        earned = [f"{name} {value:.2f}" for name, value in frame.returns.items()]
    return "   ".join([f"step {frame.step}", *earned])


def _artist(axes: Axes, shape: Shape) -> Any:
    """Returns the artist of a shape at the origin; a transform moves it."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Circle, Rectangle

    order = _ORDER[shape.role]
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


def _paint(artist: Any, shape: Shape) -> None:
    alpha, dark = _ALPHA[shape.role], tuple(0.65 * part for part in shape.color)
    if shape.kind == "line":
        artist.set_color((*shape.color, alpha))
        return
    artist.set_facecolor((*shape.color, alpha))
    artist.set_edgecolor((*dark, 0.5 if shape.role == "goal" else 1.0))


def _limits(frames: Sequence[Frame], where: Stage) -> tuple[float, float, float, float]:
    """Returns the limits of an episode in the plane: left, right, bottom, top.

    Agents are always inside. Of all else so much as the scenario's own view shows, which grows
    with the agents: floors may be endless, and what is used up may be far away.
    """
    agents = [s for f in frames for s in f.shapes if s.role == "agent"]
    low, high = [], []
    for axis in (0, 1):
        middle, half = where.center[axis], where.half_size[axis]
        ends = [(s.x, s.y)[axis] for s in agents]
        reach = max(s.reach[axis] for s in agents)
        own = (min(ends) - reach, max(ends) + reach)
        view = (min(middle - half, own[0]), max(middle + half, own[1]))
        others = [s for f in frames for s in f.shapes if s.visible and s.role != "agent"]
        spans = [own]
        for s in others:
            at, extent = (s.x, s.y)[axis], s.reach[axis]
            spans.append((max(at - extent, view[0]), min(at + extent, view[1])))
        if where.border is not None:
            spans.append((-where.border[axis], where.border[axis]))
        spans = [span for span in spans if span[0] < span[1]]
        low.append(min(a for a, _ in spans))
        high.append(max(b for _, b in spans))
    margin = 0.04 * max(high[0] - low[0], high[1] - low[1])
    return low[0] - margin, high[0] + margin, low[1] - margin, high[1] + margin
