"""Bitwise comparison of two versions of the code on the same runs.

    python benchmarks/same_bits.py --base main

Checks out ``--base`` in a separate folder and trains the same small runs on both: every recipe,
eagerly and as a recorded program, some compiled, resumed ones, populations, leagues, shards and
ranks. For each run it compares the bits of the last checkpoint, stored players, tables and summary,
except times. The exit status is 1 if anything differs or fails.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import report
import same_bits_leaves
import torch
from same_bits_cases import Case, all_cases

HERE = Path(__file__).resolve().parent
PACKAGES = ("torch", "torchrl", "tensordict", "numpy", "vmas", "pettingzoo", "mpe2", "jax")
SHOWN = 5  # paths of a case that are named
QUICKLY_COMPILED = {  # what is compiled runs a few steps only
    "AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL": "O0",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "XLA_FLAGS": "--xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true --xla_cpu_use_fusion_emitters=false",
}


class Side(NamedTuple):
    """One of the two versions, and where its results are."""

    name: str
    checkout: Path
    results: Path


class Verdict(NamedTuple):
    """Result of a case: equal, moved, DIFFERENT or FAILED, and the lines that say more."""

    case: str
    word: str
    lines: list[str]
    seconds: float


def file_of(side: Side, case: Case, end: str = "json") -> Path:
    """The file with a case's result, or with its leaves."""
    return side.results / f"{case.stem}.{end}"


def run_side(side: Side, cases: list[Case], folder: Path) -> None:
    """Runs the cases in a process of the side's own; one that dies is started again."""
    folder.mkdir()
    missing = [case for case in cases if not file_of(side, case).exists()]
    while missing:
        cases_file = folder / "cases.json"
        cases_file.write_text(json.dumps([case.as_dict() for case in missing]), encoding="utf-8")
        command = [sys.executable, str(HERE / "same_bits_side.py"), str(side.checkout)]
        with (folder / "log.txt").open("a", encoding="utf-8") as log:
            done = subprocess.run(
                [*command, str(cases_file), str(side.results)],
                env=variables(side, folder),
                stdout=log,
                stderr=subprocess.STDOUT,
                check=False,
            )
        missing = [case for case in missing if not file_of(side, case).exists()]
        if missing:  # the first of them was running
            last = (folder / "log.txt").read_text(encoding="utf-8").splitlines()[-1:]
            note_death(side, missing.pop(0), done.returncode, " ".join(last))


def note_death(side: Side, case: Case, status: int, last: str) -> None:
    """Writes the result of a case in which the process died."""
    error = f"the process ended with status {status}: {last}"
    result = {"error": error, "digests": {}, "seconds": 0.0}
    file_of(side, case).write_text(json.dumps(result), encoding="utf-8")


def variables(side: Side, own_folder: Path) -> dict[str, str]:
    """The environment of a side's process: its code first, and caches that nobody shares."""
    folders = {
        "TORCHINDUCTOR_CACHE_DIR": own_folder / "inductor",
        "JAX_COMPILATION_CACHE_DIR": own_folder / "jax",
        "XDG_STATE_HOME": own_folder / "state",
        "TMPDIR": own_folder / "runs",
    }
    for folder in folders.values():
        folder.mkdir(exist_ok=True)
    plain = {"PYTHONPATH": str(side.checkout), "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    paths = {key: str(folder) for key, folder in folders.items()}
    return {**QUICKLY_COMPILED, **os.environ, **plain, **paths, "PYTHONHASHSEED": "0"}


def result_of(side: Side, case: Case) -> dict[str, Any]:
    """A case's digests, error and seconds."""
    return json.loads(file_of(side, case).read_text(encoding="utf-8"))


def verdict(case: Case, base: Side, head: Side) -> Verdict:
    """Compares what both sides have left of a case."""
    one, other = result_of(base, case), result_of(head, case)
    seconds = other["seconds"]
    errors = [f"{s.name}: {r['error']}" for s, r in ((base, one), (head, other)) if r["error"]]
    if errors:
        return Verdict(case.name, "FAILED", errors, seconds)
    found = same_bits_leaves.differences(one["digests"], other["digests"])
    if not found:
        return Verdict(case.name, "equal", [], seconds)
    if same_bits_leaves.only_moved(one["digests"], other["digests"]):
        lines = [f"{path} {change}" for path, change in found[:SHOWN]]
        return Verdict(case.name, "MOVED", ["the same bits under other names", *lines], seconds)
    return Verdict(case.name, "DIFFERENT", describe_differences(case, found, base, head), seconds)


def describe_differences(
    case: Case, found: list[tuple[str, str]], base: Side, head: Side
) -> list[str]:
    """A line for each of the first paths that differ, and how many there are."""
    one, other = (torch.load(file_of(s, case, "pt")) for s in (base, head))
    lines = [f"{len(found)} of {len(set(one) | set(other))} entries"]
    for path, change in found[:SHOWN]:
        if change == "differs":
            change = same_bits_leaves.describe_difference(one[path], other[path])
        lines.append(f"{path}: {change}")
    return lines


@contextlib.contextmanager
def checked_out(revision: str, folder: Path) -> Iterator[Path]:
    """A working tree of a revision, for as long as it is needed."""
    git("worktree", "add", "--quiet", "--detach", str(folder), revision)
    try:
        yield folder
    finally:
        git("worktree", "remove", "--force", str(folder))


def git(*arguments: str) -> str:
    """Output of a git command in the repository of this file."""
    command = ["git", "-C", str(HERE), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def versions() -> str:
    """Python, the machine and the packages that numbers depend on."""
    installed = {
        distribution.metadata["Name"].lower(): distribution.version
        for distribution in metadata.distributions()
    }
    packages = [f"{name} {installed.get(name, '-')}" for name in PACKAGES]
    return ", ".join([platform.python_version(), report.hardware(), *packages])


def cache_of(folder: str | None, commit: str, otherwise: Path) -> Path:
    """Where base's results are kept: by commit, versions, and how cases are run."""
    if folder is None:
        otherwise.mkdir()
        return otherwise
    texts = [
        versions(),
        *((HERE / f"same_bits_{part}.py").read_text() for part in ("side", "leaves")),
    ]
    key = hashlib.sha256("\n".join(texts).encode()).hexdigest()
    kept = Path(folder).resolve() / f"{commit[:12]}-{key[:12]}"
    kept.mkdir(parents=True, exist_ok=True)
    for part in [*kept.glob("*.part")]:
        part.unlink()
    return kept


def chosen_cases(args: argparse.Namespace) -> list[Case]:
    """The cases that are asked for."""
    cases = [case for case in all_cases() if case.quick or not args.quick]
    cases = [case for case in cases if re.search(args.only, case.name)]
    if not cases:
        raise SystemExit(f"no case has {args.only!r} in its name; --list names them all.")
    return cases


def run_both(args: argparse.Namespace, cases: list[Case], work: Path) -> list[Verdict]:
    """Runs both sides, at once or one after the other, and compares them."""
    commit = git("rev-parse", f"{args.base}^{{commit}}")
    kept = cache_of(args.cache, commit, work / "base_results")
    (work / "head_results").mkdir()
    head = Side("head", Path(args.head).resolve(), work / "head_results")
    with contextlib.ExitStack() as stack:
        all_cached = all((kept / f"{case.stem}.json").exists() for case in cases)
        tree = None if all_cached else stack.enter_context(checked_out(commit, work / "base"))
        base = Side("base", tree or work, kept)
        with ThreadPoolExecutor(args.jobs) as pool:
            running = [
                pool.submit(run_side, side, cases, work / f"own_{side.name}")
                for side in (base, head)
            ]
            for one in running:
                one.result()
        keep_logs(args.logs, work)
        verdicts = [verdict(case, base, head) for case in cases]
        forget_failures(base, cases)
        return verdicts


def keep_logs(folder: str | None, work: Path) -> None:
    """Copies what the runs of both sides said to a folder."""
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for log in work.glob("own_*/log.txt"):
            shutil.copy(log, Path(folder) / f"{log.parent.name.removeprefix('own_')}.txt")


def forget_failures(side: Side, cases: list[Case]) -> None:
    """Removes what failed from the results that are kept, so that it is tried again."""
    for case in cases:
        if result_of(side, case)["error"]:
            file_of(side, case).unlink()


def print_summary(verdicts: list[Verdict], seconds: float) -> None:
    """Names what is not equal, and counts the cases of every kind."""
    for case_verdict in verdicts:
        if case_verdict.word != "equal":
            print(f"{case_verdict.word}: {case_verdict.case}", *case_verdict.lines, sep="\n    ")
    kinds = dict.fromkeys(case_verdict.case.partition("/")[0] for case_verdict in verdicts)
    words = ("equal", "MOVED", "DIFFERENT", "FAILED")
    rows = []
    for kind in kinds:
        verdicts_of_kind = [
            case_verdict for case_verdict in verdicts if case_verdict.case.partition("/")[0] == kind
        ]
        counts = [
            sum(case_verdict.word == word for case_verdict in verdicts_of_kind) for word in words
        ]
        rows.append(
            [kind, *counts, f"{sum(case_verdict.seconds for case_verdict in verdicts_of_kind):.0f}"]
        )
    print(report.markdown_table(("cases", *words, "seconds of head"), rows))
    equal = sum(case_verdict.word == "equal" for case_verdict in verdicts)
    print(f"{equal} of {len(verdicts)} cases are equal to the bit ({seconds:.0f} s)")


def main() -> None:
    """Compares, and ends with status 1 where not everything is equal."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", default="HEAD", help="git revision to compare with")
    parser.add_argument("--head", default=str(HERE.parent), help="working tree; default: this one")
    parser.add_argument("--only", default="", help="pattern of the names of cases")
    parser.add_argument("--quick", action="store_true", help="some cases of every kind")
    parser.add_argument("--list", action="store_true", help="list the cases without running them")
    parser.add_argument(
        "--jobs", type=int, default=2, choices=(1, 2), help="number of concurrent sides"
    )
    parser.add_argument("--cache", help="folder to cache the results of --base in, by commit")
    parser.add_argument("--logs", help="folder for the output of the runs")
    args = parser.parse_args()
    cases = chosen_cases(args)
    if args.list:
        print(*(case.name for case in cases), sep="\n")
        return
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work:
        verdicts = run_both(args, cases, Path(work))
    print_summary(verdicts, time.perf_counter() - began)
    raise SystemExit(any(one.word != "equal" for one in verdicts))


if __name__ == "__main__":
    main()
