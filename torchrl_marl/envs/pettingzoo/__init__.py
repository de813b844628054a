"""PettingZoo environments of both APIs, parallel and AEC."""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.envs.pettingzoo.env import PettingZooEnv

__getattr__, __dir__, __all__ = attach(__name__)
