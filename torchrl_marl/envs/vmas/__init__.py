"""VMAS scenarios on the unmodified simulator, with snapshots, batched resets and graphs."""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.envs.vmas.env import VmasEnv

__getattr__, __dir__, __all__ = attach(__name__)
