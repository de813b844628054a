"""How costs grow with agents, envs, groups, members of a population, and rows of a replay buffer.

    python benchmarks/growth.py --write
    python benchmarks/growth.py --sweeps agents --scenarios navigation --agents 4,8,16

Each point is measured in a process of its own (``growth_points.py``), which is ended at its time
limit. Points are kept as JSON lines in ``--results``: the same command goes on after being stopped,
and reuses the points of the same code and machine. Each sweep gives tables, a picture with two
logarithmic axes, and the slopes of its lines.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import report
from growth_tables import Lines, Measure, Sweep, draw, failure_text, measures_with_values, table

HERE = Path(__file__).resolve().parent
POINTS = HERE / "growth_points.py"
SCRIPTS = ("growth_points", "groups", "populations", "replay")
MEASURED_CODE = ("torchrl_marl", *(f"benchmarks/{name}.py" for name in SCRIPTS))

LOOP = (
    Measure("recorded", "recorded operations"),
    Measure("operations", "operations"),
    Measure("kernels", "kernels"),
    Measure("compile", "cold compile, s", ",.1f"),
    Measure("first", "first batch, s", ",.1f"),
    Measure("memory", "memory, MiB"),
    Measure("sampling", "sampling, agent-frames/s"),
    Measure("training", "training, agent-frames/s"),
    Measure("training_memory", "memory of training, MiB"),
)
REPLAY = (
    Measure("fill", "filling, s", ",.2f"),
    Measure("add", "adding a batch, ms", ",.2f"),
    Measure("sample", "a minibatch, ms", ",.3f"),
    Measure("stored", "buffer, MiB"),
    Measure("memory", "memory, MiB"),
)


SWEEPS = {
    "agents": Sweep(
        "agents",
        (4, 8, 16, 32, 64),
        (2,),
        ("navigation", "sampling", "flocking", "simple_spread"),
        """60 envs of a VMAS scenario, batches of 100 steps. The area of `navigation` grows with its
        agents from 4 on, so that all find room. Training is IPPO, 2 epochs of 4 minibatches, and is
        measured on `navigation`.""",
        LOOP,
    ),
    "envs": Sweep(
        "envs",
        tuple(64 * 2**i for i in range(9)),
        (8,),
        ("balance",),
        """VMAS `balance`, 3 agents, batches of 25 steps. Training is IPPO, 2 epochs of 4
        minibatches. The points of one call share a compiler cache. Each number of envs compiles its
        own graph; the first point of a call
        also compiles what they share, which takes some seconds.""",
        LOOP,
        shared_cache=True,
    ),
    "groups": Sweep(
        "groups",
        (1, 2, 4, 8),
        (2,),
        ("navigation",),
        """8 agents of VMAS `navigation` in groups of one size, 64 envs, batches of 32 steps. No
        agents share networks. Training is IPPO, 2 epochs of 4 minibatches, all groups in one
        update.""",
        LOOP,
    ),
    "members": Sweep(
        "members",
        (1, 2, 4, 8, 16, 32, 64),
        (2,),
        ("balance",),
        """A population of MAPPO on VMAS `balance`, 3 agents, 8 envs a member, batches of 100 steps.
        Training is 2 epochs of 5 minibatches. Agent-frames are those of all members. One member is
        the ordinary learner.""",
        LOOP,
    ),
    "rows": Sweep(
        "rows",
        (10_000, 100_000, 1_000_000, 10_000_000),
        (600,),
        ("in memory", "prioritized", "memory-mapped"),
        """A full replay buffer with team steps of `balance`, 3 agents; rows are rounded down to
        whole steps of 60 envs. *Filling* adds batches until the buffer is full. A batch has 6,000
        rows, or the buffer's if that is smaller. A minibatch has 1,024 rows. *In memory* is
        `TeamReplay` with uniform sampling. *Prioritized* is the same with priorities, which are
        updated after each minibatch. *Memory-mapped* is TorchRL's `TensorDictReplayBuffer` on a
        `LazyMemmapStorage`, for buffers above memory; its resident pages count as memory.""",
        REPLAY,
    ),
}
OF_LOOPS = """*Operations* and *kernels* are those of the program that steps simulator and policy,
    *recorded operations* those before simplification. *Cold compile* is recording and compiling it,
    with an empty compiler cache. *First batch* is the time from building the environment to the end
    of the first batch. *Memory of training* includes compiling the update.

    """
METHOD = """Each point is a process of its own, which is ended at the time limit. Allocations above
    the memory limit fail. Such points are rows that say so. *Memory* is the peak of the process,
    with its libraries. Times and speeds are of the median call. A slope is that of a line through
    the logarithms of sizes and values, by least squares over the upper half of the measured points:
    of an odd number, the larger half, and at least two. 0 means constant, 1 proportional, 2
    quadratic."""


# ------------------------------------------------------------------------------ the points


class Points:
    """Measured points, as JSON lines.

    Args:
        path (Path): the file; it is read if it exists, and only appended to.
        fresh (bool): True to reuse nothing that is already there.
    """

    def __init__(self, path: Path, fresh: bool = False) -> None:
        self.path = path
        self.known: dict[str, dict[str, Any]] = {}
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        self._before = "" if text.endswith("\n") or not text else "\n"
        for line in [] if fresh else text.splitlines():
            kept = _read_line(line)
            if kept is not None:
                self.known[key_of(kept["point"])] = kept

    def find(self, point: Mapping[str, Any]) -> dict[str, Any] | None:
        """The result of a point, unless it failed within less time or memory, or by an error."""
        found = self.known.get(key_of(point))
        if found is None or "values" in found["result"]:
            return None if found is None else found["result"]
        allowed = {"time": "limit", "memory": "memory"}.get(found["result"]["failed"])
        enough = allowed is not None and found["point"][allowed] >= point[allowed]
        return found["result"] if enough else None

    def add(self, point: Mapping[str, Any], result: Mapping[str, Any]) -> None:
        """Keeps a result."""
        self.known[key_of(point)] = found = {"point": dict(point), "result": dict(result)}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{self._before}{json.dumps(found)}\n")
        self._before = ""


def key_of(point: Mapping[str, Any]) -> str:
    """Returns the identity of a point: its code, machine and settings, without the limits."""
    return json.dumps(
        {k: x for k, x in point.items() if k not in ("limit", "memory")}, sort_keys=True
    )


def _read_line(line: str) -> dict[str, Any] | None:
    try:
        return json.loads(line)
    except ValueError:  # the process was stopped while it wrote
        return None


def code_version() -> str:
    """The last commit of the measured code, and a digest of what is changed since."""
    commit, changed = (
        subprocess.run(
            ["git", *git_args, "--", *MEASURED_CODE],
            cwd=HERE.parent,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for git_args in (("log", "-1", "--format=%h"), ("diff", "HEAD"))
    )
    digest = hashlib.sha256(changed.encode()).hexdigest()[:8] if changed else ""
    return "+".join(x for x in (commit or "unknown", digest) if x)


def run_point(point: Mapping[str, Any], cache: str) -> dict[str, Any]:
    """Measures a point in a process of its own; what fails is a result, too."""
    threads = str(point["threads"])
    variables = {**os.environ, "OMP_NUM_THREADS": threads, "TORCHINDUCTOR_CACHE_DIR": cache}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            [sys.executable, str(POINTS), json.dumps(point)],
            stdout=subprocess.PIPE,
            stderr=errors,
            env=variables,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        try:
            printed, _ = process.communicate(timeout=point["limit"])
        except subprocess.TimeoutExpired:
            return {"failed": "time"}
        finally:
            _kill_process_group(process)
        if process.returncode == 0:
            return json.loads(printed.splitlines()[-1])
        if process.returncode == -signal.SIGKILL:  # by a system without memory
            return {"failed": "memory"}
        errors.seek(0)
        error_lines = errors.read().strip().splitlines() or [f"exit status {process.returncode}"]
        return {"failed": "error", "message": error_lines[-1]}


def _kill_process_group(process: subprocess.Popen[str]) -> None:
    """Ends a process that still runs, with the compilers that it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def points_of(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The points of a sweep, by scenario, in rising size."""
    sweep = SWEEPS[name]
    sizes = getattr(args, name) or (sweep.quick if args.quick else sweep.sizes)
    return [
        {
            "sweep": name,
            "scenario": scenario,
            "size": size,
            "quick": args.quick,
            "execution": "trace" if args.quick else "compile",
            "threads": args.threads,
            "seconds": 0.1 if args.quick else args.seconds,
            "code": args.code,
            "machine": report.hardware(),
            "limit": args.limit,
            "memory": args.memory,
        }
        for scenario in sweep.scenarios
        if args.scenarios is None or scenario in args.scenarios
        for size in sorted(sizes)
    ]


def measure(
    name: str, points: Points, args: argparse.Namespace, run: Callable[..., Any] = run_point
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The points of a sweep with their results, which are reused or measured."""
    found = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for i, point in enumerate(points_of(name, args)):
            result = points.find(point)
            origin = "reused" if result else "measured"
            if result is None:
                cache = Path(folder) / ("shared" if SWEEPS[name].shared_cache else str(i))
                result = run(point, str(cache))
                points.add(point, result)
            status = failure_text(point, result) if "failed" in result else origin
            print(f"{name} {point['scenario']} {point['size']:,}: {status}", file=sys.stderr)
            found.append((point, result))
    return found


def publish(name: str, found: list[tuple[dict, dict]], args: argparse.Namespace) -> None:
    """Prints the tables of a sweep, and writes them with the picture."""
    sweep = SWEEPS[name]
    lines: Lines = {}
    for point, result in found:
        lines.setdefault(point["scenario"], []).append((point, result))
    measures = measures_with_values(sweep, lines)
    sections = [
        (scenario, table(sweep, line, measures or sweep.measures[:1]))
        for scenario, line in lines.items()
    ]
    if args.write and measures:
        picture = report.file_name(f"growth_{name}", "png")
        draw(sweep, lines, picture)
        sections.append(("Picture", f"![growth with {sweep.grows}]({picture.name})"))
    report.publish(
        f"growth_{name}",
        f"Growth with {sweep.grows}",
        sections,
        {
            "code": args.code,
            "threads of torch": args.threads,
            "limits": f"{args.limit:,.0f} s and {args.memory:,.0f} GiB a point",
        },
        f"{sweep.text}\n\n{OF_LOOPS if sweep.measures is LOOP else ''}{METHOD}",
        write=args.write,
    )


# ------------------------------------------------------------------------ the command line


def _numbers(text: str) -> list[int]:
    return [int(float(number)) for number in text.split(",")]


def _split_words(text: str) -> list[str]:
    return text.split(",")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    named = ", ".join(SWEEPS)
    parser.add_argument(
        "--sweeps", type=_split_words, default=list(SWEEPS), help=f"some of {named}"
    )
    parser.add_argument("--scenarios", type=_split_words, help="only these scenarios, of any sweep")
    for name, sweep in SWEEPS.items():
        sizes = ",".join(map(str, sweep.sizes))
        parser.add_argument(f"--{name}", type=_numbers, help=f"sizes; default: {sizes}")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds of a point")
    parser.add_argument("--memory", type=float, help="GiB of a point; default: 0.9 of all")
    parser.add_argument("--seconds", type=float, default=10.0, help="of timing one call's rounds")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads")
    parser.add_argument("--results", type=Path, default=HERE.parent / "runs" / "growth.jsonl")
    parser.add_argument("--fresh", action="store_true", help="reuse no points")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, as a smoke test")
    parser.add_argument("--write", action="store_true", help="write tables and pictures to results")
    args = parser.parse_args(argv)
    unknown = set(args.sweeps) - set(SWEEPS)
    unknown |= set(args.scenarios or ()) - {
        x for known_sweep in SWEEPS.values() for x in known_sweep.scenarios
    }
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    return args


def main() -> None:
    """Measures and reports."""
    # So that a stopped script also ends the process of its point.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        run(parse_args())
    finally:
        signal.signal(signal.SIGTERM, before)


def run(args: argparse.Namespace) -> None:
    """Measures the chosen sweeps, and reports each."""
    from torchrl_marl.runtime.memory import memory_of

    args.write = args.write and not args.quick
    args.memory = args.memory or 0.9 * (memory_of("cpu") or 2**63) / 2**30
    args.code = code_version()
    points = Points(args.results, args.fresh)
    for name in args.sweeps:
        found = measure(name, points, args)
        if found:
            publish(name, found, args)


if __name__ == "__main__":
    main()
