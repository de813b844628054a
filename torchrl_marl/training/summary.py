"""What is known of a run at its end: ``summary.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrl_marl.training.config import TrainConfig
from torchrl_marl.training.files import whole_file

__all__ = ["figures_of", "returns_of", "write_summary"]


def figures_of(config: TrainConfig, frames: int, seconds: float) -> dict[str, Any]:
    """Returns what a run's summary says beside its returns.

    Args:
        config (TrainConfig): its settings.
        frames (int): env steps.
        seconds (float): in which they were collected and learned from.
    """
    return {
        "recipe": config.recipe,
        "seed": config.seed,
        "frames": frames,
        "seconds": round(seconds, 2),
        "frames_per_second": round(frames / max(seconds, 1e-9), 1),
    }


def returns_of(when: str, result: Mapping[str, float], groups: Sequence[str]) -> dict[str, Any]:
    """Returns what a summary says of an evaluation, by group where several may compete.

    Args:
        when (str): ``before``, ``after``, ``random`` or ``heuristic``.
        result (mapping): of the evaluation; empty without one.
        groups (sequence of str): their names.
    """
    found = {f"return_{when}": result.get("return_mean")}
    for name in groups if len(groups) > 1 else ():
        found[f"{name}/return_{when}"] = result.get(f"{name}/episode_reward")
    return found


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Writes a run's ``summary.json``.

    Raises:
        WriteError: a full disk or a read-only folder.
    """
    with whole_file(folder / "summary.json") as file:
        file.write(json.dumps(summary, indent=2) + "\n")
