"""Choice of how a run runs, where its settings leave it open."""

from __future__ import annotations

import importlib.util
import os
import shutil
from typing import Any

from torchrl_marl.envs.libraries import LIBRARIES
from torchrl_marl.training.config import TrainConfig

__all__ = ["choose_execution"]

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
