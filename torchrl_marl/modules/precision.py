"""How precisely networks compute: float32, TF32 or bfloat16."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

__all__ = ["matmuls_in", "run_in", "set_precision"]


def set_precision(network: nn.Module, precision: str) -> None:
    """Sets how precisely the networks inside an actor or critic compute, wherever it is called.

    Args:
        network (nn.Module): from ``make_actor`` or ``make_critic``.
        precision (str): ``float32``, ``tf32`` or ``bf16``.
    """
    for module in network.modules():
        if hasattr(module, "precision"):
            setattr(module, "precision", precision)  # noqa: B010


def run_in(precision: str, network: nn.Module, features: Tensor, *others: Tensor) -> Tensor:
    """Runs a network; what it gives is as wide as its features.

    Args:
        precision (str): ``bf16`` computes in bfloat16; others leave everything as it is.
        network (nn.Module): takes the features and others.

    Examples:
        >>> run_in("bf16", nn.Linear(2, 1), torch.ones(1, 2)).dtype
        torch.float32
    """
    if precision != "bf16":
        return network(features, *others)
    # Without a cache: a weight's copy would outlive the step that changes the weight.
    with torch.autocast(features.device.type, torch.bfloat16, cache_enabled=False):
        return network(features, *others).to(features.dtype)


@contextlib.contextmanager
def matmuls_in(precision: str) -> Iterator[None]:
    """Matrix products on a GPU in TF32, for a while, if that is the precision."""
    if precision != "tf32":
        yield
        return
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    settings.fp32_precision = "tf32"
    try:
        yield
    finally:
        settings.fp32_precision = before
