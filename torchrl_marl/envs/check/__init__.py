"""Checks that environments follow the multi-agent conventions, and explains violations."""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.envs.check.marl_env import check_marl_env

__getattr__, __dir__, __all__ = attach(__name__)
