"""Private random states of environments and trainings; a training's also sets its threads."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

__all__ = ["ProcessState", "RandomState", "offset_seed", "with_run_rng"]


class RandomState:
    """Private random state of torch (CPU and device), numpy and Python.

    Simulators draw from global generators. Inside :meth:`active` the global generators have this
    object's state, and they are restored on exit. Two environments in one process, and the code
    around them, thus do not influence each other.

    Args:
        seed (int): random seed of all generators.
        device (torch.device): device; the generator of a CUDA device is included.

    Examples:
        >>> first, second = RandomState(0), RandomState(0)
        >>> with first.active():
        ...     a = torch.rand(2)
        >>> with second.active():
        ...     b = torch.rand(2)
        >>> torch.equal(a, b)
        True
    """

    def __init__(self, seed: int, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.seed(seed)

    def seed(self, seed: int) -> None:
        """Seeds all generators."""
        torch_generator = torch.Generator().manual_seed(seed)
        self._torch = torch_generator.get_state()
        self._numpy: Any = np.random.RandomState(seed % 2**32).get_state()
        self._python = random.Random(seed).getstate()
        self._cuda = None
        if self.device.type == "cuda":
            self._cuda = torch.Generator(self.device).manual_seed(seed).get_state()

    @classmethod
    def of_process(cls, device: torch.device | str = "cpu") -> RandomState:
        """Returns a copy of the process's random state."""
        state = cls(0, device)
        outer = state._swap((state._torch, state._numpy, state._python, state._cuda))
        state._torch, state._numpy, state._python, state._cuda = outer
        state.install()
        return state

    def install(self) -> None:
        """Sets the process's random state to this one."""
        self._swap((self._torch, self._numpy, self._python, self._cuda))

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Context in which global random functions draw from this state."""
        outer = self._swap((self._torch, self._numpy, self._python, self._cuda))
        try:
            yield
        finally:
            self._torch, self._numpy, self._python, self._cuda = self._swap(outer)

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Like :meth:`active`, but leaves this state on exit as it was on entry."""
        saved = self.state_dict()
        try:
            with self.active():
                yield
        finally:
            self.load_state_dict(saved)

    def _swap(self, state: tuple) -> tuple:
        cuda = None
        if self._cuda is not None:
            cuda = torch.cuda.get_rng_state(self.device)
            torch.cuda.set_rng_state(state[3], self.device)
        outer = (torch.get_rng_state(), np.random.get_state(), random.getstate(), cuda)
        torch.set_rng_state(state[0])
        np.random.set_state(state[1])
        random.setstate(state[2])
        return outer

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the state as tensors."""
        _, numpy_keys, *numpy_rest = self._numpy
        version, python_keys, gauss = self._python
        state = {
            "torch": self._torch.clone(),
            "numpy_keys": torch.from_numpy(numpy_keys.astype(np.int64)),
            "numpy_rest": torch.tensor(numpy_rest, dtype=torch.float64),
            "python_keys": torch.tensor([version, *python_keys], dtype=torch.int64),
            "python_gauss": torch.tensor(
                [float("nan") if gauss is None else gauss], dtype=torch.float64
            ),
        }
        if self._cuda is not None:
            state["cuda"] = self._cuda.clone()
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restores a saved state.

        Raises:
            ValueError: if an entry is missing or has another shape or dtype.
        """
        for name, own in self.state_dict().items():
            given = state.get(name)
            if not isinstance(given, Tensor) or (given.shape, given.dtype) != (
                own.shape,
                own.dtype,
            ):
                raise ValueError(f"{name!r} is not a random state")
        self._torch = state["torch"].cpu().clone()
        position, has_gauss, cached = state["numpy_rest"].tolist()
        keys = state["numpy_keys"].cpu().numpy().astype(np.uint32)
        self._numpy = ("MT19937", keys, int(position), int(has_gauss), cached)
        version, *python_keys = state["python_keys"].tolist()
        gauss = state["python_gauss"].item()
        self._python = (version, tuple(python_keys), None if gauss != gauss else gauss)
        if self._cuda is not None:
            self._cuda = state["cuda"].cpu().clone()


def offset_seed(seed: int) -> int:
    """Derives another seed, so that an env and a policy with equal seeds draw different numbers.

    Args:
        seed (int): seed of an environment, possibly also passed to ``torch.manual_seed``.

    Returns:
        int: the derived seed, below ``2**32``.

    Examples:
        >>> offset_seed(0) == offset_seed(0), offset_seed(0) in (0, offset_seed(1))
        (True, False)
    """
    return int(np.random.SeedSequence([seed % 2**64, 0]).generate_state(1)[0])


Method = TypeVar("Method", bound=Callable[..., Any])


class ProcessState:
    """Random state and number of threads of a training, active only while it runs.

    Two trainings in one process, and the code around them, do not influence each other.

    Args:
        seed (int): random seed of all generators.
        device (torch.device): device; the generator of a CUDA device is included.
        threads (int, optional): number of CPU threads of torch; None: unchanged.

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
        """Context with this random state and number of threads; nested contexts have no effect."""
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


def with_run_rng(method: Method) -> Method:
    """Decorates a method to run in the random state and threads of its object's ``process``."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.process.active():
            return method(self, *args, **kwargs)

    return cast(Method, run)
