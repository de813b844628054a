"""Checkpoints: written whole or not at all, loaded without running code.

The worlds of a PettingZoo run are bytes in it, which their environment unpickles when the run is
resumed: resume only runs that you trust.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchrl_marl.errors import CheckpointError

__all__ = ["latest_checkpoint", "load_checkpoint", "load_learners", "save_checkpoint"]

_FORMAT = 1


def save_checkpoint(folder: Path, iteration: int, state: dict[str, Any], keep: int) -> Path:
    """Writes ``checkpoints/iteration_<n>.pt`` and removes all but the latest ``keep``.

    Args:
        folder (Path): the run folder.
        iteration (int): number of the last finished iteration.
        state (dict): tensors, numbers, strings and containers of such.
        keep (int): how many checkpoints to keep, this one included.
    """
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    path = checkpoints / f"iteration_{iteration:06d}.pt"
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        torch.save({"format": _FORMAT, **state}, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    for old in _all(folder)[: -max(keep, 1)]:
        old.unlink()
    return path


def latest_checkpoint(folder: Path) -> Path:
    """The last whole checkpoint of a run.

    Raises:
        CheckpointError: the run has no checkpoint yet.
    """
    found = _all(folder)
    if not found:
        raise CheckpointError(
            f"run {str(folder)!r} has no checkpoint yet; train it again, "
            "with a smaller checkpoint.every_iterations if it is stopped early."
        )
    return found[-1]


def load_checkpoint(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Reads a checkpoint.

    Raises:
        CheckpointError: a broken or half-written file, or one of another version.
    """
    try:
        state = torch.load(path, map_location=device, weights_only=True)
        version = state["format"]
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint {str(path)!r}; check the path.") from None
    except (
        RuntimeError,
        EOFError,
        KeyError,
        TypeError,
        OSError,
        ValueError,
        pickle.UnpicklingError,
        zipfile.BadZipFile,
    ):
        earlier = [p.name for p in sorted(path.parent.glob("iteration_*.pt")) if p.name < path.name]
        fix = f"delete it to go on from {earlier[-1]}" if earlier else "train the run again"
        raise CheckpointError(
            f"checkpoint {str(path)!r} is broken or half-written; {fix}."
        ) from None
    if version != _FORMAT:
        raise CheckpointError(
            f"checkpoint {str(path)!r} has format {version}, expected {_FORMAT}; "
            "it was written by another version of torchrl_marl."
        )
    return state


def load_learners(learners: Sequence[nn.Module], states: Sequence[dict[str, Any]]) -> None:
    """Gives learners the states that a checkpoint has of them.

    Raises:
        CheckpointError: other groups or networks than the checkpoint's.
    """
    try:
        for learner, state in zip(learners, states, strict=True):
            learner.load_state_dict(state)
    except (RuntimeError, ValueError):
        raise CheckpointError(
            "the checkpoint does not fit the run's config.yaml or environment: other groups or "
            "networks of another size; put back those that it was trained with."
        ) from None


def _all(folder: Path) -> list[Path]:
    return sorted((folder / "checkpoints").glob("iteration_*.pt"))
