"""JaxMARL environments: jitted, vectorized, and shared with torch without a copy."""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.envs.jaxmarl.env import JaxMarlEnv

__getattr__, __dir__, __all__ = attach(__name__)
