"""Compiles a run's updates in a second process while the first one compiles the simulator."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchrl_marl.capture import shipped
from torchrl_marl.capture.program import announce_slow_work
from torchrl_marl.runtime.import_path import child_path
from torchrl_marl.settings import read, read_yaml, to_yaml
from torchrl_marl.training.config import TrainConfig
from torchrl_marl.training.part import Part
from torchrl_marl.version import __version__

if TYPE_CHECKING:
    from tensordict import TensorDictBase
    from torchrl.envs import EnvBase

__all__ = ["BackgroundCompile"]

_MAX_WAIT_SECONDS = 300.0  # seconds to wait for the second process before compiling here


class BackgroundCompile(Part):
    """A second process that compiles a run's updates into the compiler's cache on disk.

    The second process builds the run from its settings, collects one batch and learns from it. The
    first process then finds the compiled graphs of the updates in the cache. The results of the run
    do not change.

    Args:
        folder (Path): folder of the run, with its settings.
        config (TrainConfig): config of the run.
        env (EnvBase): environment of the run.

    Attributes:
        process (Popen, optional): the second process. None if it would save no time: the simulator
            is not captured, the graphs come with the package or are in the cache, or the compiler
            may use only one process (one core, or ``TORCHINDUCTOR_COMPILE_THREADS=1``).
    """

    def __init__(self, folder: Path, config: TrainConfig, env: EnvBase) -> None:
        self.process: subprocess.Popen | None = None
        self._marker: Path | None = None
        with contextlib.suppress(OSError):  # the compiler itself reports an unwritable cache
            self._marker = _marker_file(config) if _is_worthwhile(config, env) else None
        if self._marker is not None and not self._marker.exists():
            self.process = _start_process(folder)

    def take(self, batch: TensorDictBase) -> TensorDictBase:
        """Waits for the second process before the first update."""
        self.wait()
        return batch

    def update(self, training: Any, batch: TensorDictBase) -> dict[str, float]:
        """Records, after the first update, that the graphs are in the cache."""
        self.learned()
        return {}

    def wait(self) -> None:
        """Waits until the updates are compiled; returns at once if there is no second process."""
        if self.process is not None:
            if self.process.poll() is None:
                waiting = announce_slow_work("compiling the updates in a second process")
                with waiting, contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(_MAX_WAIT_SECONDS)
            self.close()

    def learned(self) -> None:
        """Marks the graphs as cached, for later runs with these settings; does so only once."""
        mark, self._marker = self._marker, None
        if mark is not None:
            with contextlib.suppress(OSError):  # a failure only costs time
                mark.parent.mkdir(parents=True, exist_ok=True)
                mark.touch()

    def close(self) -> None:
        """Ends the second process."""
        process, self.process = self.process, None
        if process is None:
            return
        process.kill()
        process.wait()
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()


def _is_worthwhile(config: TrainConfig, env: EnvBase) -> bool:
    base: Any = getattr(env, "base_env", env)
    is_rebuildable = config.env.library != "own" and not config.distributed.enabled
    captured = config.execution == "compile" and hasattr(base, "captured")
    if not (is_rebuildable and captured and config.device == "cpu") or _is_shipped(config):
        return False
    import torch._inductor.config

    return (
        torch._inductor.config.compile_threads or 1
    ) > 1  # number of cores, or the limit of the user


def _is_shipped(config: TrainConfig) -> bool:
    """Returns whether graphs for these settings come with the package."""
    folder = shipped.folder(config.threads or torch.get_num_threads())
    if folder is None or not folder.is_dir():
        return False
    overrides = {"execution": config.execution, "device": config.device}
    recipes = map(read_yaml, shipped.FOLDER.glob("*.yaml"))
    return any(
        _hash_settings(config) == _hash_settings(read(TrainConfig, recipe, overrides))
        for recipe in recipes
    )


def _marker_file(config: TrainConfig) -> Path:
    """Returns the file in the compiler's cache that marks these settings' graphs as cached."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    versions = [version(name) for name in ("torch", "torchrl", "tensordict")]
    versions.append(__version__)
    text = _hash_settings(config) + str(versions)
    return Path(cache_dir()) / "torchrl_marl" / hashlib.sha256(text.encode()).hexdigest()


def _hash_settings(config: TrainConfig) -> str:
    """Returns a hash of the settings that graphs depend on."""
    defaults = TrainConfig()
    ignored = ("seed", "folder", "total_frames", "stop_at_return", "evaluation", "checkpoint")
    replaced = {name: getattr(defaults, name) for name in (*ignored, "logging", "recipe")}
    text = to_yaml(dataclasses.replace(config, **replaced))
    return hashlib.sha256(text.encode()).hexdigest()


def _start_process(folder: Path) -> subprocess.Popen | None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(child_path())}
    with contextlib.suppress(OSError):
        # The second process ends when its input closes, at the latest when this process ends.
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "torchrl_marl.training.precompile", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
    return None
