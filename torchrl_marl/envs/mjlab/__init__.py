"""Teams of robots in one scene of mjlab."""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.envs.mjlab.env import MjlabEnv

__getattr__, __dir__, __all__ = attach(__name__)
