"""Draws PettingZoo environments with their own ``render``. Imports no torch."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from torchrl_marl.errors import ConfigError, UserError

__all__ = ["check_modes", "drawn", "mode_of", "quiet", "takes_mode"]

_MODES = ("rgb_array", "ansi")


def mode_of(env: Any) -> str | None:
    """Returns an environment's render mode for pixels or text; None if it supports neither.

    Args:
        env: PettingZoo environment.
    """
    known = getattr(env, "metadata", None) or {}
    modes = known.get("render_modes") or known.get("render.modes") or ()
    return next((mode for mode in _MODES if mode in modes), None)


def check_modes(name: str, mode: str | None, now: str | None, chosen: bool) -> None:
    """Raises an error if an environment cannot be rendered.

    Args:
        name (str): name of the environment.
        mode (str, optional): render mode that the environment supports.
        now (str, optional): render mode with which the environment was built.
        chosen (bool): True if the user built the environment.

    Raises:
        ConfigError: if the environment cannot be rendered; the message says how to fix that.
    """
    if mode is None:
        raise ConfigError(
            f"{name} cannot be drawn: its render modes have neither 'rgb_array' nor 'ansi'; turn "
            "the animation off."
        )
    if chosen and now != mode:
        raise ConfigError(
            f"{name} was built with render_mode={now!r}, expected {mode!r} for drawing; build it "
            f"with render_mode={mode!r}."
        )


def takes_mode(create: Any) -> bool:
    """Returns True if a factory takes the argument ``render_mode``."""
    try:
        parameters = inspect.signature(create).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.name == "render_mode" or p.kind is p.VAR_KEYWORD for p in parameters)


def drawn(env: Any, name: str) -> np.ndarray | str:
    """Renders an environment as pixels ``[H, W, 3]`` or as text.

    Drawing does not change the random state of the episode.

    Raises:
        UserError: if ``render()`` raises an error, or returns neither pixels nor text.
    """
    with _keep_random_state(), quiet():
        try:
            picture = env.render()
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise UserError(
                f"{name} could not be drawn (render() raised {reason}); turn the animation off, or "
                "correct the environment."
            ) from error
    picture = picture.getvalue() if isinstance(picture, io.StringIO) else picture
    if isinstance(picture, str):
        return picture
    pixels = np.asarray(picture)
    if pixels.ndim != 3 or pixels.shape[-1] not in (3, 4):
        raise UserError(
            f"{name} could not be drawn: render() returned {type(picture).__name__} of shape "
            f"{pixels.shape}, expected pixels [H, W, 3]; build it with render_mode='rgb_array'."
        )
    return np.array(pixels[..., :3], dtype=np.uint8)


@contextlib.contextmanager
def _keep_random_state() -> Iterator[None]:
    """Context that restores the global random state on exit."""
    numpy, python = np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        np.random.set_state(numpy)
        random.setstate(python)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Context that suppresses messages, windows and warnings of environments."""
    defaults = {"PYGAME_HIDE_SUPPORT_PROMPT": "hide", "SDL_VIDEODRIVER": "dummy"}
    added = {key: value for key, value in defaults.items() if key not in os.environ}
    os.environ.update(added)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for key in added:
            os.environ.pop(key, None)
