"""JaxMARL environments: jitted and vectorized; their arrays are shared with torch, not copied."""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.envs.jaxmarl.env import JaxMarlEnv

__getattr__, __dir__, __all__ = attach(__name__)
