"""Where the seconds before the first learned batch go, without and with the compiler's cache.

    python benchmarks/first_batch.py --write

Trains the default recipe until its first batch is learned: as installed, with the graphs that come
with the package; then with 84 environments, which these graphs do not fit, in a new process with an
empty cache, and in another one with the graphs of the first. Columns with one process compile the
updates after the step; otherwise a second process compiles them at the same time.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

BEGAN = time.perf_counter()
STAGES = {
    "imports and settings": ("built",),
    "evaluations of the untrained, random and heuristic policies": ("begin",),
    "recording graphs and comparing them with the simulator": ("trace", "_check_results"),
    "Inductor: graph to C++": ("compile_stored", "-_compile_and_link", "-_read_graph"),
    "C++ compiler": ("_compile_and_link",),
    "loading libraries": ("_read_graph",),
    "waiting for the second process": ("wait",),
}


def run_child(folder: str, mode: str) -> None:
    """Trains until the first batch is learned; writes the seconds of each function."""
    import torchrl_marl
    from torchrl_marl.capture import build, inductor, program, stored
    from torchrl_marl.simulator import captured
    from torchrl_marl.training import background_compile
    from torchrl_marl.training.training import Training

    seconds: Counter = Counter(built=0.0)
    time_calls(seconds, Training, "begin")
    for owner in (program, captured):
        time_calls(seconds, owner, "trace")
    time_calls(seconds, captured.CapturedSimulator, "_check_results")
    time_calls(seconds, inductor, "compile_stored")
    time_calls(seconds, build, "_compile_and_link")
    time_calls(seconds, stored, "_read_graph")
    time_calls(seconds, background_compile.BackgroundCompile, "wait")
    if mode == "alone":
        background_compile._start_process = lambda folder: None
    original_open = Training.open

    def timed_open(training: Any) -> None:
        seconds["built"] = time.perf_counter() - BEGAN
        original_open(training)

    Training.open = timed_open  # type: ignore[method-assign]
    settings: dict[str, Any] = {"folder": folder, "logging": {"progress": False}}
    if mode != "installed":  # the package's graphs do not fit
        settings |= {"env": {"num_envs": 84}, "frames_per_batch": 8400}
    run = torchrl_marl.iterate("vmas_balance_mappo", **settings)
    next(iter(run))
    seconds["all"] = time.perf_counter() - BEGAN
    Path(folder, "seconds.json").write_text(json.dumps(seconds), encoding="utf-8")


def time_calls(seconds: Counter, owner: Any, name: str) -> None:
    """Adds the seconds of a function's calls."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[name] += time.perf_counter() - began

    setattr(owner, name, call)


def measure(cache: Path, mode: str) -> dict[str, float]:
    """The seconds of a new process with this cache."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TMPDIR": str(cache)}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--child", f"{folder}/run", "--mode", mode]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        return json.loads(Path(folder, "run", "seconds.json").read_text(encoding="utf-8"))


def rows_of(columns: list[list[dict[str, float]]]) -> list[list[str]]:
    """A row for every stage, the rest, and the sum; medians of the rounds."""
    rows, accounted_seconds = [], [0.0] * len(columns)
    for stage, parts in STAGES.items():
        stage_seconds = [
            statistics.median(sum_of(one, parts) for one in column) for column in columns
        ]
        accounted_seconds = [x + y for x, y in zip(accounted_seconds, stage_seconds)]
        rows.append([stage, *(f"{x:.1f}" for x in stage_seconds)])
    totals = [statistics.median(one["all"] for one in column) for column in columns]
    remaining = [total - x for total, x in zip(totals, accounted_seconds)]
    rows.append(
        ["the rest: the batch, its update, and trial steps", *(f"{x:.1f}" for x in remaining)]
    )
    return [*rows, ["first learned batch after", *(f"{x:.1f}" for x in totals)]]


def sum_of(seconds: dict[str, float], parts: tuple[str, ...]) -> float:
    """Sum of the seconds of functions; those with a minus are subtracted."""
    signs = [(-1 if part.startswith("-") else 1, part.lstrip("-")) for part in parts]
    return sum(sign * seconds.get(name, 0.0) for sign, name in signs)


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--mode", help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help="write the table to results")
    args = parser.parse_args()
    if args.child:
        return run_child(args.child, args.mode)
    import report

    columns: list[list[dict[str, float]]] = [[], [], [], [], []]
    for _ in range(args.rounds):
        for first, mode in ((0, "installed"), (1, "alone"), (3, "both")):
            with tempfile.TemporaryDirectory() as cache:
                columns[first].append(measure(Path(cache), mode))
                if mode != "installed":
                    columns[first + 1].append(measure(Path(cache), mode))
    columns_of_modes = (f"{x}, {n}" for n in ("1 process", "2") for x in ("cold", "warm"))
    header = ("seconds", "as installed", *columns_of_modes)
    report.publish(
        "first_batch",
        "Seconds before the first learned batch",
        [("The default recipe", report.markdown_table(header, rows_of(columns)))],
        {"recipe": "vmas_balance_mappo", "rounds": args.rounds},
        """Each number is the median of new processes. "as installed" starts with an empty cache of
        the compiler and the graphs that come with the package. The other columns have 84
        environments instead of 96, which these graphs do not fit. "cold" starts with an empty
        cache, "warm" with the graphs of a run before. Time counts from the first line of the
        script. With 2 processes the second one compiles the updates.""",
        write=args.write,
    )
    return None


if __name__ == "__main__":
    main()
