"""Servers that provide trained policies to external simulators."""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.apps.serving.policy_server import PolicyServer, declared_of, serve

__getattr__, __dir__, __all__ = attach(__name__)
