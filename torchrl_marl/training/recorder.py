"""Recording of a run's metrics: tables, loggers and the progress bar."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrl_marl.training.config import TrainConfig
from torchrl_marl.training.csv_table import CsvTable
from torchrl_marl.training.loggers import Loggers

with warnings.catch_warnings():  # in a notebook without ipywidgets the bar is plain text
    warnings.simplefilter("ignore")
    from tqdm.auto import tqdm

__all__ = ["Recorder", "say"]


class Recorder:
    """Writer of ``metrics.csv`` and ``evaluation.csv``, the loggers and the progress bar.

    Args:
        config (TrainConfig): the run's settings.
        folder (Path): the run folder; tables that are there go on.
        iterations (int): rows of later iterations are cut off.
        frames (int): env steps so far.
        done (bool): whether nothing more is trained.

    Raises:
        CheckpointError: a table that cannot be gone on with.
        MissingExtraError, ConfigError: a logging backend that is not installed, or refuses.
    """

    def __init__(
        self, config: TrainConfig, folder: Path, *, iterations: int, frames: int, done: bool
    ) -> None:
        self._metrics = CsvTable(folder / "metrics.csv", keep_iterations=iterations)
        self._evaluation = CsvTable(folder / "evaluation.csv", keep_iterations=iterations)
        self._loggers = Loggers(config.logging, folder)
        self._bar = tqdm(
            desc=f"seed {config.seed}",
            total=config.total_frames,
            initial=frames,
            unit=" frames",
            unit_scale=True,
            dynamic_ncols=True,
            disable=done or not config.logging.progress,
        )

    def iteration(self, row: Mapping[str, Any], returns: Sequence[float]) -> None:
        """Writes an iteration's row, and shows the groups' returns."""
        frames = row["frames"]
        self._metrics.write(row)
        self._loggers.log(row, frames)
        self._bar.update(frames - self._bar.n)
        shown = ("-" if math.isnan(value) else f"{value:.2f}" for value in returns)
        self._bar.set_postfix_str(f"return {', '.join(shown)}")

    def evaluation(self, progress: Mapping[str, Any], result: Mapping[str, float]) -> None:
        """Writes an evaluation's row, with its time."""
        self._evaluation.write({**progress, **result})
        self._loggers.log({f"evaluation/{k}": v for k, v in result.items()}, progress["frames"])

    def working(self, what: str) -> None:
        """Shows slow work beside the bar, such as a compilation; nothing for ``""``."""
        self._bar.set_postfix_str(what)

    def close_bar(self) -> None:
        """Closes the progress bar; later evaluations have none."""
        self._bar.close()

    def close(self) -> None:
        """Closes the progress bar and the loggers."""
        self._bar.close()
        self._loggers.close()


def say(text: str, *, warns: bool = True) -> None:
    """Prints a message above the progress bar.

    Args:
        text (str): a sentence without its full stop.

    Keyword Args:
        warns (bool): on stderr, which a notebook shows on red; else a result, on stdout.
    """
    tqdm.write(f"torchrl_marl: {text}.", file=sys.stderr if warns else sys.stdout)
