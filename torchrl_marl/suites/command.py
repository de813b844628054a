"""``torchrl-marl suite``: what the command line does with a suite."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchrl_marl.console import number, silence_others, table
from torchrl_marl.errors import ConfigError, UserError
from torchrl_marl.settings import parse_overrides
from torchrl_marl.suites.board import Board
from torchrl_marl.suites.folder import check_folder
from torchrl_marl.suites.forecast import clock
from torchrl_marl.suites.plan import WORDS, Plan, seeds_of
from torchrl_marl.suites.results import found_result, read_elapsed, results_table
from torchrl_marl.suites.running import plan_of, run_suite
from torchrl_marl.suites.table import read_suite, suite_names

__all__ = ["suite_command", "suite_rows"]


def suite_command(
    texts: Sequence[str],
    *,
    out: Path | None,
    resume: bool,
    jobs: int,
    dry_run: bool,
    trust: bool = False,
) -> None:
    """Trains a suite, or shows what would be trained.

    Args:
        texts (sequence of str): the suite, then ``algorithms=..``, ``tasks=..``, ``seeds=..``,
            ``frames=..`` and settings.

    Keyword Args:
        out (Path, optional): its folder.
        resume (bool): go on in that folder.
        jobs (int): how many runs at once.
        dry_run (bool): show the table alone.
        trust (bool): run the code that a folder of somebody else's names.

    Raises:
        UserError: what is asked for cannot be done, or runs that failed.
    """
    if not texts or "=" in texts[0]:
        raise ConfigError(f"no suite is named; give one of {', '.join(suite_names())} first.")
    words = _words(texts[1:])
    if dry_run:
        plan, folder = plan_of(texts[0], out, resume, words)
        check_folder(folder, plan, resume=resume)
        print(plan_table(plan, folder, max(jobs, 1)))
        return
    silence_others()
    settings = words.pop("settings")
    how: dict[str, Any] = {"out": out, "resume": resume, "jobs": jobs, "trust": trust}
    results = run_suite(texts[0], **how, **words, **settings)
    print(results_table(results))
    print(results[0].folder.parents[2] / "results.csv")
    failed = [one for one in results if not one.finished]  # or stopped, by somebody else
    if failed:
        names = ", ".join(one.run.place.as_posix() for one in failed[:3])
        more = f" and {len(failed) - 3} more" if len(failed) > 3 else ""
        raise UserError(
            f"{len(failed)} of {len(results)} runs did not finish: {names}{more}; the same command "
            "with --resume goes on with them."
        )


def suite_rows() -> list[tuple[str, str]]:
    """Returns rows for ``torchrl-marl list suites``: name, and what it trains."""
    return [(name, read_suite(name).about) for name in suite_names()]


def plan_table(plan: Plan, out: Path, jobs: int = 1) -> str:
    """Formats what would be trained: a row for each task, frames, and when it would end."""
    rows = []
    for task in plan.words["tasks"]:
        own = [run for run in plan.runs if run.task == task]
        env = own[0].config.env
        each = sorted({number(run.config.total_frames) for run in own})
        steps = f"at most {env.max_steps} steps, " if env.max_steps else ""
        rows.append((task, f"{env.library} {env.name}, {steps}{' or '.join(each)} frames"))
    before = read_elapsed(out)
    found = [found_result(out, run, before.get(run.place.as_posix(), 0.0)) for run in plan.runs]
    left = Board({one.run.place: one for one in found}, jobs, bar=False).seconds_left()
    forecast = "unknown until a run has ended in " + repr(str(out)) if left is None else clock(left)
    many = len(plan.runs)
    return "\n".join(
        [
            f"{plan.suite.name}: {plan.suite.about}",
            table(rows),
            table(
                [
                    ("algorithms", ", ".join(plan.words["algorithms"])),
                    ("seeds", ", ".join(map(str, plan.words["seeds"]))),
                    ("runs", f"{many}, of which {sum(one.finished for one in found)} are finished"),
                    ("frames", number(plan.frames)),
                    ("time to go", forecast),
                ]
            ),
        ]
    )


def _words(texts: Sequence[str]) -> dict[str, Any]:
    """Returns what says which runs, and the settings of all."""
    found: dict[str, Any] = dict.fromkeys(WORDS)
    settings = []
    for text in texts:
        key, equals, value = text.partition("=")
        if key not in WORDS or not equals:
            settings.append(text)
        elif found[key] is not None:
            raise ConfigError(f"{key} is given twice, expected once; leave one out.")
        else:
            found[key] = value
    if found["seeds"] is not None:
        found["seeds"] = seeds_of(found["seeds"])
    if found["frames"] is not None:
        found["frames"] = parse_overrides([f"frames={found['frames']}"])["frames"]
    return {**found, "settings": parse_overrides(settings)}
