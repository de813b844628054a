"""Records episodes, and makes animations of them."""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.apps.pictures.animation import check_drawable, draw_frames, write
    from torchrl_marl.apps.pictures.film import Film

__getattr__, __dir__, __all__ = attach(__name__)
