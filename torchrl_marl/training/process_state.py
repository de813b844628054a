"""The random state, threads and execution of a run."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch

from torchrl_marl.envs.libraries import LIBRARIES
from torchrl_marl.runtime.random_state import RandomState
from torchrl_marl.training.config import TrainConfig

__all__ = ["ProcessState", "choose_execution", "in_its_own_state"]

# A step of `balance` in 96 envs, its share of the update included, takes 9 ms less when compiled,
# and compiling takes 20 to 40 s; on an H100 about as much of both.
_STEPS_THAT_PAY = 5_000


def choose_execution(config: TrainConfig, env: Any = None) -> str:
    """Returns a run's execution; for ``auto`` graphs where they pay, else ``eager``.

    They pay for a simulator that can be captured, from 5,000 steps of all environments on:
    ``compile`` on a CPU with a C++ compiler, ``cudagraph`` on a GPU with Triton. Runs of equal
    settings on equal machines get the same.

    Args:
        config (TrainConfig): the settings.
        env (EnvBase, optional): the run's, where it is not made from the settings.

    Examples:
        >>> choose_execution(TrainConfig(total_frames=6_400))
        'eager'
    """
    if config.execution != "auto":
        return config.execution
    if env is None:
        library = LIBRARIES.find(config.env.library)
        captured = library is not None and library.captured
        n_envs = config.env.num_envs
    else:
        captured = hasattr(getattr(env, "base_env", env), "captured")
        n_envs = env.batch_size.numel()
    pays = config.total_frames // n_envs >= _STEPS_THAT_PAY
    return _compiled(config.device) if captured and pays else "eager"


def _compiled(device: str) -> str:
    """Returns how graphs run on a device, ``eager`` where nothing can compile them."""
    if device != "cpu":
        return "eager" if importlib.util.find_spec("triton") is None else "cudagraph"
    return "eager" if shutil.which(os.environ.get("CXX", "g++")) is None else "compile"


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
