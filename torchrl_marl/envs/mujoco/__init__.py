"""MuJoCo robots with joints as agents."""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.envs.mujoco.env import MujocoEnv

__getattr__, __dir__, __all__ = attach(__name__)
