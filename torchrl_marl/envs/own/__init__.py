"""Worlds of one's own: by ``module:Class``, or as an object that is there already."""

from torchrl_marl._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, {})
