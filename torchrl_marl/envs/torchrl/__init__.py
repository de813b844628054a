"""Adapters that correct the masks and done flags of TorchRL's multi-agent environments."""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.envs.torchrl.env import adapt

__getattr__, __dir__, __all__ = attach(__name__)
