"""Runs that answer: a policy behind a door, for simulators that are clients."""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.serving.declaring import declared_of
    from torchrl_marl.serving.served import ServedRun, serve

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "declaring": ["declared_of"],
        "served": ["ServedRun", "serve"],
    },
)
