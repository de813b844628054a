"""What recording an update as a graph leaves as it was: networks and random numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from torchrl_marl.capture import Program

__all__ = ["Programs", "random_state", "set_random_state", "unchanged"]


class Programs(dict[Any, Program]):
    """Recorded graphs, which belong to the networks that they were recorded with."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Programs:
        return Programs()


@contextlib.contextmanager
def unchanged(device: torch.device, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Undoes the update that recording runs; distributions do not look at values.

    Args:
        device (torch.device): whose random numbers are drawn again.
        tensors (sequence of Tensor): what an update writes to.
    """
    before = [x.detach().clone() for x in tensors]
    validates, state = Distribution._validate_args, random_state(device)
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(validates)
        set_random_state(device, state)
        with torch.no_grad():
            for x, value in zip(tensors, before):
                x.copy_(value)


def random_state(device: torch.device) -> Tensor:
    """Returns the state of torch's generator of a device."""
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.get_rng_state()


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Puts a state of :func:`random_state` back."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
