"""Terminal output: tables, results of runs, errors and warnings."""

from __future__ import annotations

import math
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_marl.errors import RankError, UserError
from torchrl_marl.runtime.torchrun import place

if TYPE_CHECKING:
    from torchrl_marl.settings import Setting
    from torchrl_marl.training.run import Run

__all__ = [
    "align_columns",
    "number",
    "print_error",
    "print_failed",
    "print_result",
    "print_stopped",
    "report",
    "settings_markdown",
    "settings_table",
    "silence_libraries",
    "table",
]

_RETURN_LABELS = {
    "return_before": "before training",
    "return_after": "after training",
    "return_random": "random policy",
    "return_heuristic": "VMAS heuristic",
}
_MAX_VALUE_WIDTH = 24


def table(rows: Sequence[tuple[str, str]]) -> str:
    """Formats pairs of names and texts as two columns."""
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"  {name:<{width}}  {text}".rstrip() for name, text in rows)


def align_columns(
    rows: Sequence[Sequence[str]], numbers: slice = slice(0), indent: str = "  "
) -> str:
    """Formats rows of equal length as aligned columns.

    Args:
        rows (sequence of sequences of str): texts of the cells.
        numbers (slice): columns to right-align.
        indent (str): text before each row.
    """
    right = range(len(rows[0]))[numbers]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = (
        [
            cell.rjust(w) if i in right else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(row, widths))
        ]
        for row in rows
    )
    return "\n".join((indent + "  ".join(line)).rstrip() for line in lines)


def settings_table(settings: Sequence[Setting], *, words: bool = False) -> str:
    """Formats the key, value and meaning of every setting.

    Args:
        settings (list of Setting): settings, with their values as defaults.
        words (bool): whether to add a line for the meaning of each choice.
    """
    rows = [
        (s.key, _default_text(s), s.help if words else s.explanation, s.words) for s in settings
    ]
    keys = max(len(key) for key, *_ in rows)
    # A few long values may exceed their column; this keeps the rest readable.
    width = max((len(value) for _, value, *_ in rows if len(value) <= _MAX_VALUE_WIDTH), default=0)
    lines = []
    for key, value, text, meanings in rows:
        lines.append(f"  {key:<{keys}}  {value:<{width}}  {text}")
        if words:
            lines += [f"{'':<{keys + width + 8}}{w}: {m}" for w, m in meanings.items()]
    return "\n".join(lines)


def settings_markdown(settings: Sequence[Setting]) -> str:
    """Formats :func:`settings_table` as Markdown."""
    lines = ["| setting | default | meaning |", "|---|---|---|"]
    for setting in settings:
        meanings = "".join(f"<br>`{word}`: {text}" for word, text in setting.words.items())
        cells = f"`{setting.key}`", f"`{_default_text(setting)}`", setting.help + meanings
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)


def _default_text(setting: Setting) -> str:
    from torchrl_marl.settings import shown

    return setting.default if isinstance(setting.default, str) else shown(setting.default)


def report(runs: Sequence[Run], seeds: Sequence[int]) -> str:
    """Formats results: one run as a list; several runs as a table by seed, with the mean."""
    if len(runs) == 1:
        summary = runs[0].summary
        found = {text: summary.get(key) for key, text in _RETURN_LABELS.items()}
        rows = [(f"return, {text}", number(x)) for text, x in found.items() if x is not None]
        for kind, own in summary.get("evaluation", {}).items():
            if "return_low" in own:
                ends = f"{number(own['return_low'])} to {number(own['return_high'])}"
                rows.append((f"  by {kind} actions", f"{number(own['return_mean'])} ({ends})"))
        for key, x in summary.items():
            group, _, when = key.rpartition("/")
            if group and when in _RETURN_LABELS:
                rows.append((f"return of {group}, {_RETURN_LABELS[when]}", number(x)))
        seconds, rate = number(summary.get("seconds")), summary.get("frames_per_second")
        frames = f"{int(summary.get('frames') or 0):,} in {seconds} s ({number(rate)} frames/s)"
        return table([*rows, ("frames", frames), ("run folder", str(runs[0].folder))])
    heads = {
        **_RETURN_LABELS,
        "frames": "frames",
        "seconds": "seconds",
        "frames_per_second": "frames/s",
    }
    known = [c for c in heads if any(run.summary.get(c) is not None for run in runs)]
    numbers = [[run.summary.get(column) for column in known] for run in runs]
    lines = [
        ["seed", *(heads[column] for column in known), "run folder"],
        *(
            [str(seed), *map(number, row), str(run.folder)]
            for seed, row, run in zip(seeds, numbers, runs)
        ),
        ["mean", *(number(_mean(column)) for column in zip(*numbers)), ""],
    ]
    return "return by seed:\n" + align_columns(lines, slice(1, -1))


def _mean(values: Sequence[float | None]) -> float | None:
    """Returns the mean; NaN if a run among others has no number, since it has diverged."""
    known = [value for value in values if value is not None]
    if known and len(known) < len(values):
        return math.nan
    return sum(known) / len(known) if known else None


def number(value: Any) -> str:
    """Formats a number with four significant digits; None becomes ``-``.

    Examples:
        >>> number(1500000), number(41.23456), number(None)
        ('1,500,000', '41.23', '-')
    """
    if value is None:
        return "-"
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return str(value)
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.4g}"


def print_result(text: str) -> None:
    """Prints the result of a run; with several ranks, only rank 0 prints."""
    if _is_rank_zero():
        print(text)


def _is_rank_zero() -> bool:
    """Returns whether this process is rank 0, or the only rank of a run."""
    here = place()
    return here is None or here.rank == 0


def print_error(error: UserError) -> None:
    """Prints an error in one line; with several ranks, it is printed once on each machine."""
    here = place()
    if here is None or here.local_rank == 0 or isinstance(error, RankError):
        print(f"torchrl-marl: error: {' '.join(str(error).split())}", file=sys.stderr)


def print_stopped(folder: Path | None, saved: bool = True, *, command: str = "train") -> None:
    """Prints that Ctrl-C or SIGTERM ended a run, and the command that resumes it.

    Args:
        folder (Path, optional): folder of the run.
        saved (bool): whether the run was saved first.

    Keyword Args:
        command (str): the command that was stopped.
    """
    if _is_rank_zero():
        print(f"\ntorchrl-marl: stopped{_resume_hint(folder, saved, command)}", file=sys.stderr)


def _resume_hint(folder: Path | None, saved: bool, command: str) -> str:
    if folder is None:
        return "."
    ending = " and saved" if saved else " at once"
    if command in ("suite", "sweep"):
        return f"{ending}; resume with the same command and --resume."
    if command == "tune":
        return f"{ending}; resume with the same command."
    resume = f"torchrl-marl train --resume {folder}"
    if saved:
        return f"{ending}; resume with: {resume}"
    from torchrl_marl.training.folder import has_checkpoint

    if has_checkpoint(folder):
        return f"{ending}; resume from the last checkpoint with: {resume}"
    if (folder / "config.yaml").is_file():
        return f" before the first checkpoint; start again with: {resume}"
    return "; nothing was saved, so start again."


def print_failed(seed: int, error: Exception) -> None:
    """Prints the error of a failed seed, with a traceback unless it is a user error."""
    if not isinstance(error, UserError):
        traceback.print_exception(error)
    text = " ".join(str(error).split())
    print(f"torchrl-marl: error: seed {seed} failed: {text}", file=sys.stderr)


def silence_libraries() -> None:
    """Silences other libraries' logs and warnings; prints this package's warnings in one line."""
    os.environ.setdefault("RL_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if not sys.warnoptions:
        warnings.simplefilter("default")
        warnings.showwarning = _show_warning


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    # A warning's file depends on its stacklevel; the frame that raises the warning does not.
    frame = sys._getframe(1)
    while frame.f_back and Path(frame.f_code.co_filename).name == "warnings.py":
        frame = frame.f_back
    if not Path(frame.f_code.co_filename).is_relative_to(Path(__file__).parents[1]):
        return
    text = " ".join(f"torchrl-marl: warning: {message}".split())
    if "tqdm" in sys.modules:
        sys.modules["tqdm"].tqdm.write(text, file=sys.stderr)
    else:
        print(text, file=sys.stderr)
