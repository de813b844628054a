"""State of the whole process during training: random generators and threads."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch

from torchrl_marl.random_state import RandomState

__all__ = ["ProcessState", "in_its_own_state"]

Method = TypeVar("Method", bound=Callable[..., Any])


class ProcessState:
    """Random generators and threads of a training, active only while it works.

    Two trainings in one process, and the code around them, do not disturb each other.

    Args:
        seed (int): start of all generators.
        device (torch.device): a CUDA device's generator is included.
        threads (int, optional): of torch on the CPU; None leaves them as they are.

    Examples:
        >>> mine, other = ProcessState(0), ProcessState(0)
        >>> with mine.active():
        ...     first = torch.rand(2)
        >>> with other.active():
        ...     again = torch.rand(2)
        >>> torch.equal(first, again)
        True
    """

    def __init__(
        self, seed: int, device: torch.device | str = "cpu", threads: int | None = None
    ) -> None:
        self._random = RandomState(seed, device)
        self._threads = threads
        self._depth = 0

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Activates both within this context; nested calls change nothing."""
        if self._depth:
            yield
            return
        before = torch.get_num_threads()
        self._depth += 1
        try:
            if self._threads is not None:
                torch.set_num_threads(self._threads)
            with self._random.active():
                yield
        finally:
            self._depth -= 1
            torch.set_num_threads(before)


def in_its_own_state(method: Method) -> Method:
    """Runs a method with the random generators and threads of its object's ``process``."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.process.active():
            return method(self, *args, **kwargs)

    return cast(Method, run)
