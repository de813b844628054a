"""What a world declares of its agents, and how they live."""

from torchrl_marl._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, {})
