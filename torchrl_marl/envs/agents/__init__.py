"""Declared agents of an environment, and their life cycle."""

from torchrl_marl._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
