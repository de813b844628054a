"""Multi-agent tasks of Isaac Lab."""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.envs.isaaclab.env import IsaacLabEnv

__getattr__, __dir__, __all__ = attach(__name__)
