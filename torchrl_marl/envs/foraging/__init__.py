"""Level-based foraging (LBF) and the robotic warehouse (RWARE), all envs in one batch."""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.envs.foraging.level_based_foraging import LevelBasedForaging
    from torchrl_marl.envs.foraging.warehouse import Warehouse

__getattr__, __dir__, __all__ = attach(__name__)
