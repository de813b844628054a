"""Pickles environments with their whole state."""

from __future__ import annotations

import copyreg
import io
import pickle
import zlib
from typing import Any

import cloudpickle

__all__ = ["pickled", "unpickled"]

_PACKAGE = __name__.rpartition(".")[0]
# Modules that snapshots name which were saved before 0.2.
_RENAMED_MODULES = {
    f"{_PACKAGE}.lives": f"{_PACKAGE}.lifecycle",
    f"{_PACKAGE}.own_random": f"{_PACKAGE}.rng",
    f"{_PACKAGE}.one_copy": f"{_PACKAGE}.instance",
}


def pickled(value: Any) -> bytes:
    """Pickles a value with its whole state.

    Some environments would pickle only the arguments of their constructor. Unlike ``cloudpickle``,
    this function keeps the whole state of such environments. It also supports pygame's surfaces,
    fonts and clocks.
    """
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def unpickled(data: bytes) -> Any:
    """Loads a value from the bytes of :func:`pickled`."""
    return _Unpickler(io.BytesIO(data)).load()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(_RENAMED_MODULES.get(module, module), name)


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        # Otherwise Gymnasium's EzPickle would build a new environment from the same arguments.
        if "_ezpickle_args" in getattr(obj, "__dict__", ()):
            return copyreg.__newobj__, (kind,), vars(obj), None, None, _set_state  # type: ignore[attr-defined]
        if kind.__module__.startswith("pygame"):
            reduce = _REDUCERS.get(kind.__name__)
            if reduce is not None:
                return reduce(obj)
        return super().reducer_override(obj)


# Snapshots name _set_state, _surface and _font, so these functions keep their names.
def _set_state(obj: Any, state: dict[str, Any]) -> None:
    vars(obj).update(state)


def _reduce_surface(surface: Any) -> tuple:
    if surface.get_parent() is not None:
        raise TypeError("a subsurface of pygame cannot be pickled")
    shape = surface.get_size(), surface.get_flags(), surface.get_bitsize(), surface.get_masks()
    pixels = zlib.compress(bytes(surface.get_buffer().raw), 1)
    return _surface, (*shape, surface.get_colorkey(), surface.get_alpha(), pixels)


def _surface(
    size: tuple, flags: int, depth: int, masks: tuple, key: Any, alpha: Any, pixels: bytes
) -> Any:
    import pygame

    surface = pygame.Surface(size, flags & pygame.SRCALPHA, depth, masks)
    surface.get_buffer().write(zlib.decompress(pixels))
    surface.set_colorkey(key)
    surface.set_alpha(alpha)
    return surface


def _reduce_clock(clock: Any) -> tuple:
    return type(clock), ()


def _reduce_font(font: Any) -> tuple:
    import pygame

    if not hasattr(type(font), "path"):
        raise TypeError("a pygame font without its file's path cannot be pickled")
    try:
        return _font, (font.path, font.size)
    except pygame.error:  # another environment's close() has quit pygame
        return _font, (None, 0)


def _font(path: Any, size: Any) -> Any:
    if path is None:
        return None
    import pygame.freetype

    pygame.freetype.init()
    return pygame.freetype.Font(path, size)


_REDUCERS = {"Surface": _reduce_surface, "Clock": _reduce_clock, "Font": _reduce_font}
