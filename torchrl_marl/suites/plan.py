"""Which runs of a suite are meant: tasks, algorithms, seeds, and settings of all of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrl_marl.errors import ConfigError, nearest, quoted
from torchrl_marl.settings import flatten, normalized, unfold
from torchrl_marl.suites.table import OF_A_RUN, Suite, SuiteRun, read_suite
from torchrl_marl.training.config import TrainConfig

__all__ = ["SEEDS", "WORDS", "Plan", "make_plan"]

SEEDS = 5
"""Seeds of each task and algorithm, where no number is given."""
WORDS = ("algorithms", "tasks", "seeds", "frames")
"""What says which runs; everything else is a setting of all of them."""


@dataclass(frozen=True)
class Plan:
    """The runs of a suite that are meant, in the order in which they begin.

    Attributes:
        suite (Suite): the table.
        runs (tuple of SuiteRun): seed by seed, so that every task is seen early.
        words (dict): by which the same plan is made again.
    """

    suite: Suite
    runs: tuple[SuiteRun, ...]
    words: dict[str, Any]

    @property
    def frames(self) -> int:
        """Env steps of all runs together."""
        return sum(run.config.total_frames for run in self.runs)


def make_plan(
    suite: str | Path | Suite,
    *,
    algorithms: Collection[str] | str | None = None,
    tasks: Collection[str] | str | None = None,
    seeds: int | Sequence[int] | None = None,
    frames: int | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Plan:
    """Returns the runs of a suite, all of their settings checked.

    Args:
        suite (str, Path or Suite): a name, the path of a YAML file, or the table itself.

    Keyword Args:
        algorithms (list of str, optional): by default those that the suite names as its default.
        tasks (list of str, optional): by default all.
        seeds (int or list of int, optional): how many, from 0 on, or which; by default 5.
        frames (int, optional): of each run, in place of the table's.
        settings (mapping, optional): of all runs, such as ``{"execution": "compile"}``.

    Raises:
        ConfigError: naming what is unknown, and what comes nearest.

    Examples:
        >>> [str(run.place) for run in make_plan("toy", tasks="arena", seeds=1).runs]
        ['arena/mappo/seed0', 'arena/ippo/seed0']
    """
    table = suite if isinstance(suite, Suite) else read_suite(suite)
    algorithms = _chosen(algorithms, table.algorithms, "algorithm", table) or table.default
    tasks = _chosen(tasks, table.tasks, "task", table) or list(table.tasks)
    numbers = seeds_of(SEEDS if seeds is None else seeds)
    overrides = _overrides(settings or {}, frames)
    runs = [
        table.run(task, algorithm, seed, overrides)
        for seed in numbers
        for task in tasks
        for algorithm in algorithms
    ]
    words = {
        "algorithms": list(algorithms),
        "tasks": list(tasks),
        "seeds": numbers,
        "settings": flatten(overrides),
    }
    return Plan(table, tuple(runs), words)


def seeds_of(value: Any) -> list[int]:
    """Returns the seeds that ``5``, ``[0, 2]``, ``"0..4"`` and ``"0,2"`` mean.

    Raises:
        ConfigError: none of them.

    Examples:
        >>> seeds_of(3), seeds_of([4, 2]), seeds_of("1..3"), seeds_of("7,9")
        ([0, 1, 2], [4, 2], [1, 2, 3], [7, 9])
    """
    found: list[Any] = []
    if isinstance(value, str):
        first, dots, last = value.partition("..")
        if dots and first.isdecimal() and last.isdecimal():
            found = list(range(int(first), min(int(last), int(first) + 10_000) + 1))
        elif all(part.isdecimal() for part in value.split(",")):
            found = [int(part) for part in value.split(",")]
            found = list(range(found[0])) if "," not in value else found
    elif isinstance(value, int) and not isinstance(value, bool):
        found = list(range(min(value, 10_000)))
    elif isinstance(value, Iterable):
        found = list(value)
    right = all(isinstance(seed, int) and 0 <= seed < 2**32 for seed in found)
    if not found or not right or len(set(found)) < len(found):
        raise ConfigError(
            f"seeds is {quoted(value)}, expected how many, such as seeds=5, or which, each once: "
            "seeds=0,2 or seeds=3..7."
        )
    return found


def _chosen(
    given: Collection[str] | str | None, known: Mapping[str, Any], what: str, suite: Suite
) -> list[str]:
    if given is None:
        return []
    names = given.split(",") if isinstance(given, str) else [str(one) for one in given]
    names = [name.strip() for name in names if name.strip()]
    for name in names:
        if name not in known:
            raise ConfigError(
                f"unknown {what} {quoted(name)} of suite {suite.name!r}; {nearest(name, known)}"
                f"choose among {', '.join(known)}."
            )
    if not names or len(set(names)) < len(names):
        raise ConfigError(
            f"{what}s is {quoted(','.join(names))}, expected one or more, each once, of "
            f"{', '.join(known)}."
        )
    return names


def _overrides(settings: Mapping[str, Any], frames: int | None) -> dict[str, Any]:
    overrides = normalized(TrainConfig, settings)
    for key in OF_A_RUN:
        if key in overrides:
            fix = "give seeds=... instead" if key == "seed" else "leave it out"
            fix = "give --out instead" if key == "folder" else fix
            raise ConfigError(f"{key} is given, which each run of a suite has for itself; {fix}.")
    if frames is not None and "total_frames" in overrides:
        raise ConfigError("frames and total_frames are both given, which are one; leave one out.")
    if frames is not None:
        if isinstance(frames, bool) or not isinstance(frames, int) or frames < 1:
            raise ConfigError(
                f"frames is {quoted(frames)}, expected a whole number above 0, such as "
                "frames=600000."
            )
        overrides = unfold({**overrides, "total_frames": frames})
    return overrides
