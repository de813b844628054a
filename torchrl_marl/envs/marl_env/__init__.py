"""Base class for custom environments."""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.envs.marl_env.env import MarlEnv

__getattr__, __dir__, __all__ = attach(__name__)
