"""Declaration of an environment's agents, and their life cycle: masks and done flags."""

from torchrl_marl._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
