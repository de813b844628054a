"""Copies of an environment in worker processes, which do not import torch."""

from torchrl_marl._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
