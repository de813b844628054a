"""Program of the second process of :class:`BackgroundCompile`. It makes one update."""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
import threading
from typing import Any

from torchrl_marl.runtime.trust import trusting
from torchrl_marl.training.config import read_run_config
from torchrl_marl.training.folder import RunFolder
from torchrl_marl.training.training import Training

__all__ = ["precompile"]


def precompile(folder: str) -> None:
    """Collects a batch and learns from it, with the settings of a run.

    Args:
        folder (str): folder of the run, which is only read.
    """
    with trusting(), tempfile.TemporaryDirectory() as own:  # the first process already trusts it
        own_settings: dict[str, Any] = {"folder": f"{own}/run", "callbacks": []}
        config = dataclasses.replace(read_run_config(folder), **own_settings)
        training = Training(config, RunFolder.new(config), None)
        # Makes tensors like those of the step that the first process compiles in the meantime.
        training.collector.execution = "trace"
        training.learn_once()


def _end_with_the_first() -> None:
    sys.stdin.read()  # until the first process closes it or ends
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_first, daemon=True).start()
    precompile(sys.argv[1])
