"""Shared parts of the benchmarks: alternating timing, hardware, versions, tables, result files."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import math
import multiprocessing
import os
import platform
import random
import re
import shlex
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "torchrl", "tensordict", "vmas", "numpy")
SHORT = 0.005  # seconds; a shorter call is repeated until a measurement takes as long


@dataclasses.dataclass(frozen=True)
class Timings:
    """Seconds of each candidate in each round.

    Args:
        seconds (dict): name -> seconds per call, one number a round.
    """

    seconds: dict[str, list[float]]

    def rounds(self) -> int:
        """How often each was timed."""
        return min(len(seconds) for seconds in self.seconds.values())

    def median(self, name: str) -> float:
        """Median seconds of a call."""
        return statistics.median(self.seconds[name])

    def ratio(self, name: str, baseline: str) -> float:
        """How many times faster than the baseline: the median of the rounds' ratios."""
        return statistics.median(self._ratios(name, baseline))

    def ratio_text(self, name: str, baseline: str) -> str:
        """The median of the rounds' ratios with their quartiles."""
        ratios = self._ratios(name, baseline)
        double = ratios * 2 if len(ratios) == 1 else ratios
        low, _, high = statistics.quantiles(double, method="inclusive")
        return f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})"

    def _ratios(self, name: str, baseline: str) -> list[float]:
        return [b / x for x, b in zip(self.seconds[name], self.seconds[baseline])]


def alternate(
    candidates: Mapping[str, Callable[[], Any]],
    rounds: int,
    *,
    seconds: float = float("inf"),
    warmup: int = 1,
    shortest: float = SHORT,
    before: Callable[[str], Any] | None = None,
) -> Timings:
    """Times every candidate once a round, so that what slows the machine slows them all.

    The order is drawn anew every round; a short candidate is called several times in a row. A
    time ends when a GPU has done what it was given.

    Args:
        candidates (mapping): name -> what to time.
        rounds (int): how often each is timed.

    Keyword Args:
        seconds (float): after so long, stop with fewer rounds, though with five at least.
        warmup (int): calls of each that are not timed.
        shortest (float): seconds that one measurement should take at least; 0: one call each.
        before (callable, optional): called with the name before each measurement, not timed.

    Returns:
        Timings: seconds per call.
    """
    prepare = before or (lambda name: None)
    calls = _calls(candidates, warmup, shortest, prepare)
    seconds_of: dict[str, list[float]] = {name: [] for name in candidates}
    order, names = random.Random(0), list(candidates)
    end = time.perf_counter() + seconds
    for i in range(rounds):
        if i >= 5 and time.perf_counter() > end:
            break
        order.shuffle(names)
        for name in names:
            prepare(name)
            wait_for_gpu()
            began = time.perf_counter()
            for _ in range(calls[name]):
                candidates[name]()
            wait_for_gpu()
            seconds_of[name].append((time.perf_counter() - began) / calls[name])
    return Timings(seconds_of)


def _calls(
    candidates: Mapping[str, Callable[[], Any]],
    warmup: int,
    shortest: float,
    prepare: Callable[[str], Any],
) -> dict[str, int]:
    """How often each is called for a measurement; they warm up in turn, as they are measured."""
    fastest = dict.fromkeys(candidates, shortest)
    for _ in range(warmup):
        for name, run in candidates.items():
            prepare(name)
            began = time.perf_counter()
            run()
            wait_for_gpu()
            fastest[name] = min(fastest[name], time.perf_counter() - began)
    return {name: math.ceil(shortest / x) if shortest else 1 for name, x in fastest.items()}


def wait_for_gpu() -> None:
    """Returns when the GPU has nothing left to do; at once where none is in use."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def for_each_number_of_threads(
    measure: Callable[..., Any], threads: Iterable[int], *arguments: Any
) -> dict[int, Any]:
    """Runs ``measure(*arguments)`` in one fresh process for each number of torch's threads."""
    results = {}
    context = multiprocessing.get_context("spawn")
    for count in threads:
        print(f"measuring with {count_of(count, 'thread')} ...", file=sys.stderr)
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = str(count)
        try:
            with ProcessPoolExecutor(1, context, _start_worker, (count,)) as pool:
                results[count] = pool.submit(measure, *arguments).result()
        finally:
            os.environ.pop("OMP_NUM_THREADS")
            if before is not None:
                os.environ["OMP_NUM_THREADS"] = before
    return results


def _start_worker(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
    be_quiet()


def be_quiet() -> None:
    """Keeps other libraries' notices out of the table."""
    import torchrl

    warnings.filterwarnings("ignore")
    torchrl.logger.setLevel("ERROR")


def parser(description: str | None, threads: Sequence[int] = (1, 2)) -> argparse.ArgumentParser:
    """A command line with what all benchmarks have.

    Args:
        description (str, optional): the script's docstring.
        threads (sequence of int): torch's threads by default.
    """
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--threads",
        type=int,
        nargs="+",
        default=list(threads),
        help="numbers of torch's threads, in turn",
    )
    made.add_argument("--quick", action="store_true", help="tiny sizes, as a smoke test")
    made.add_argument("--write", action="store_true", help="write the table to benchmarks/results")
    return made


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table with numbers to the right, also readable as it stands."""
    cells = [[str(cell) for cell in row] for row in [header, *rows]]
    width = [max(len(row[i]) for row in cells) for i in range(len(header))]
    left_aligned = [
        i == 0 or not any(_is_number(row[i]) for row in cells[1:]) for i in range(len(header))
    ]
    lines = []
    for row in cells:
        padded = [x.ljust(w) if a else x.rjust(w) for x, w, a in zip(row, width, left_aligned)]
        lines.append("| " + " | ".join(padded) + " |")
    rule = ["-" * w if a else "-" * (w - 1) + ":" for w, a in zip(width, left_aligned)]
    lines.insert(1, "| " + " | ".join(rule) + " |")
    return "\n".join(lines)


def _is_number(text: str) -> bool:
    return bool(re.match(r"[-+]?\d", text))


def hardware(device: str = "cpu") -> str:
    """CPU, cores and memory in words, and the GPU where it is one that computes."""
    machine = f"{_cpu()}, {count_of(_cores(), 'core')}, {_memory()} GiB memory"
    return machine if device == "cpu" else f"{_gpu()}; {machine}"


def file_name(what: str, suffix: str, device: str = "cpu") -> Path:
    """``results/<what>_<hardware>_<date>.<suffix>``."""
    name = f"{_cpu()} {_cores()} cores" if device == "cpu" else _gpu()
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return RESULTS / f"{what}_{slug}_{date.today().isoformat()}.{suffix}"


def _gpu() -> str:
    import torch

    return torch.cuda.get_device_name()


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    except OSError:
        found = None
    name = found.group(1) if found else platform.processor() or platform.machine()
    return re.sub(r"\((R|TM)\)|\bCPU\b|@.*|\d+-Core Processor", "", name).strip()


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory() -> int | str:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    except (AttributeError, ValueError, OSError):
        return "?"


def count_of(number: int, noun: str) -> str:
    """``1 thread``, ``2 threads``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def versions() -> str:
    """Versions of Python and of the packages that matter."""
    found = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def publish(
    what: str,
    title: str,
    sections: Sequence[tuple[str, str]],
    settings: Mapping[str, Any],
    method: str,
    *,
    write: bool,
    device: str = "cpu",
) -> None:
    """Prints the tables, and writes them with all that is needed to repeat them.

    Args:
        what (str): the result's name.
        title (str): its heading.
        sections (sequence of (heading, text)): tables and pictures.
        settings (mapping): name -> value.
        method (str): how it was measured.

    Keyword Args:
        write (bool): write the file, too.
        device (str): what computed, ``cpu`` or ``cuda``.
    """
    body = "\n\n".join(f"## {heading}\n\n{text}" for heading, text in sections)
    facts = {
        "command": f"`{command()}`",
        "date": date.today().isoformat(),
        "hardware": hardware(device),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": versions(),
        **settings,
    }
    listed = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    method = re.sub(r"^ +(?=\S)", "", method, flags=re.MULTILINE).replace("``", "`").strip()
    text = f"# {title}\n\n{body}\n\n## How it was measured\n\n{method}\n\n{listed}\n"
    print(text)
    if write:
        RESULTS.mkdir(exist_ok=True)
        path = file_name(what, "md", device)
        path.write_text(text, encoding="utf-8")
        print(f"written: {path}", file=sys.stderr)


def command() -> str:
    """The command that runs, from the repository's root; folders of this machine are left out."""
    arguments = [
        f"<{Path(word).name}>" if Path(word).is_absolute() else shlex.quote(word)
        for word in sys.argv[1:]
    ]
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *arguments])
