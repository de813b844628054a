"""Numerical precision of networks: float32, TF32 or bfloat16."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["in_bfloat16", "matmul_in_tf32", "set_precision"]


def set_precision(network: nn.Module, precision: str) -> None:
    """Sets the precision of the networks inside an actor or critic, for every call.

    Args:
        network (nn.Module): from ``make_actor`` or ``make_critic``.
        precision (str): ``float32``, ``tf32`` or ``bf16``.
    """
    for module in network.modules():
        if hasattr(module, "precision"):
            setattr(module, "precision", precision)  # noqa: B010


def in_bfloat16(body: nn.Module) -> Callable[..., tuple[Tensor, Any]]:
    """Returns a body that computes in bfloat16; its outputs have the dtype of its features.

    Args:
        body (nn.Module): maps features and further inputs to outputs and a state.

    Examples:
        >>> from torchrl_marl.modules.bodies import Feedforward
        >>> in_bfloat16(Feedforward(nn.Linear(2, 1)))(torch.ones(1, 2))[0].dtype
        torch.float32
    """

    def run(features: Tensor, *others: Any) -> tuple[Tensor, Any]:
        # Without a cache: a weight's copy would outlive the update of the weight.
        with torch.autocast(features.device.type, torch.bfloat16, cache_enabled=False):
            output, state = body(features, *others)
            return output.to(features.dtype), state

    return run


@contextlib.contextmanager
def matmul_in_tf32() -> Iterator[None]:
    """Computes matrix products on a GPU in TF32, within a context."""
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    settings.fp32_precision = "tf32"
    try:
        yield
    finally:
        settings.fp32_precision = before
