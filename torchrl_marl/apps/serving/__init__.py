"""Runs that answer: a policy behind a door, for simulators that are clients."""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.apps.serving.policy_server import PolicyServer, declared_of, serve

__getattr__, __dir__, __all__ = attach(__name__)
