"""Worlds of one's own: by ``module:Class``, or as an existing object."""

from torchrl_marl._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, {})
