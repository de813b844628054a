"""Populations whose members replace each other, as two runs: the best member, and the mean.

Shapes: M members, K points that all have measured.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from torchrl_marl.curves import Curves, read_run
from torchrl_marl.errors import CheckpointError, UserError
from torchrl_marl.training.config import read_run_config, seed_folders

__all__ = ["SHOWN", "is_evolved", "population_name", "read_population"]

SHOWN = "population.members"
"""The setting that tells the two apart."""

_METHODS = {"pbt": "PBT", "tournament": "tournaments"}
_OF_ALL = ("iteration", "frames", "agent_frames", "seconds", "frames_per_second")
Table = Mapping[str, np.ndarray]


def is_evolved(folder: Path) -> bool:
    """Whether a folder is that of a population whose members replace each other."""
    if not (folder / "config.yaml").is_file():
        return False
    try:
        config = read_run_config(folder)
    except UserError:  # said where the run is read
        return False
    return config.population.size > 1 and config.evolution.method != "none"


def population_name(settings: Mapping[str, object]) -> str | None:
    """Returns ``best of PBT of 4``, or None for an ordinary run's settings."""
    if SHOWN not in settings:
        return None
    method = str(settings.get("evolution.method"))
    of = f"{_METHODS.get(method, method)} of {settings.get('population.size')}"
    return f"{settings[SHOWN]} of {of}"


def read_population(folder: Path) -> list[Curves]:
    """Reads a population: its best member at each measurement, and the mean of all.

    Args:
        folder (Path): the population's, in which its members' folders are.

    Raises:
        CheckpointError: one without members, or of which a member cannot be read.
    """
    members = [read_run(member) for member in seed_folders(folder)]
    if not members:
        raise CheckpointError(f"{str(folder)!r} is a population's and holds no member's folder.")
    own = dataclasses.replace(read_run(folder), evaluation={})
    size = len(members)
    together = f"together its members have been trained for {size} times its frames"
    notes = {
        "best": f"is the best of {size} members at each measurement, of which chance is part; "
        f"{together}",
        "mean": f"is the mean of {size} members; {together}",
    }
    cut = tuple(sorted({name for member in members for name in member.cut}))
    return [
        dataclasses.replace(
            own,
            settings={**own.settings, SHOWN: shown},
            training=_together([member.training for member in members], shown),
            evaluation=_together([member.evaluation for member in members], shown),
            cut=cut,
            notes=(note,),
        )
        for shown, note in notes.items()
    ]


def _together(tables: Sequence[Table], shown: str) -> dict[str, np.ndarray]:
    """Returns the columns that all have, at the frames that all have measured, ``[K]`` each."""
    if not all("frames" in table for table in tables):
        return {}
    frames = tables[0]["frames"]
    for table in tables[1:]:
        frames = np.intersect1d(frames, table["frames"])
    rows = [np.searchsorted(table["frames"], frames, side="right") - 1 for table in tables]
    names = [name for name in tables[0] if all(name in table for table in tables)]
    every = {name: np.stack([t[name][at] for t, at in zip(tables, rows)]) for name in names}
    returns = [name for name in names if name.endswith("/episode_reward")]
    score = "return_mean" if "return_mean" in names else returns[0] if len(returns) == 1 else None
    if shown == "best" and score is not None:
        known = np.where(np.isnan(every[score]), -np.inf, every[score])
        best = known.argmax(0), np.arange(len(frames))
        return {name: _mean(x) if name in _OF_ALL else x[best] for name, x in every.items()}
    return {name: _mean(x) for name, x in every.items()}


def _mean(values: np.ndarray) -> np.ndarray:
    """The mean of the members that have the number: who have not diverged, or ended an episode."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # nobody has it
        return np.asarray(np.nanmean(values, 0))
