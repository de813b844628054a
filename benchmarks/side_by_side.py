"""Runs the programs of the pages "coming from", theirs and ours, and compares their output.

    python benchmarks/side_by_side.py --write

Programs of other libraries (``benchmarks/coming_from/*_program.py``) run in separate environments,
created the first time. Ours are the first Python blocks of ``docs/coming_from/*.md``. Each uses
one thread. The times exclude installing and importing, but include starting and compiling. They
only show the time to expect and are no comparison, since the programs share just the task and the
main settings.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import foreign
import report

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ROOT / "benchmarks" / "coming_from"
PAGES = ROOT / "docs" / "coming_from"


class Peer(NamedTuple):
    """A library, its environment (None: ours) and the packages whose versions count."""

    title: str
    installs: tuple[list[str], ...] | None
    packages: tuple[str, ...]


PEERS = {
    "benchmarl": Peer("BenchMARL", foreign.BENCHMARL, ("benchmarl", "torchrl", "torch", "vmas")),
    "rllib": Peer("RLlib", foreign.RLLIB, ("ray", "torch", "pettingzoo", "mpe2")),
    "agilerl": Peer("AgileRL", foreign.AGILERL, ("agilerl", "torch", "pettingzoo", "mpe2")),
    "jaxmarl": Peer("JaxMARL", foreign.JAXMARL, ("jaxmarl", "jax", "flax", "optax")),
    "torchrl": Peer("TorchRL", None, ("torchrl", "torch", "vmas")),
}


def our_program(name: str) -> str:
    """The first Python of a page."""
    page = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0]


def run(python: Path | str, program: Path, folder: Path, path: str = "") -> tuple[float, list[str]]:
    """Runs a program in a folder; its seconds, and the lines that it prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    environment.pop("PYTHONPATH", None)
    if path:
        environment["PYTHONPATH"] = path
    started = time.perf_counter()
    done = subprocess.run(
        [str(python), str(program)], cwd=folder, env=environment, capture_output=True, text=True
    )
    seconds = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(f"{program.name} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    printed = [line.strip() for line in done.stdout.splitlines()]
    return seconds, [line for line in printed if line and "\033" not in line]  # no colored notices


def installed(python: Path | str, packages: tuple[str, ...]) -> str:
    """Versions of packages in an environment."""
    program = (
        "import importlib.metadata as m, sys\n"
        "print(', '.join(f'{p} {m.version(p)}' for p in sys.argv[1:]))"
    )
    done = subprocess.run(
        [str(python), "-c", program, *packages], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def code(line: str) -> str:
    """A printed line as it stands: brackets would be links."""
    return f"`{line}`"


def rows_of(name: str) -> list[list[str]]:
    """Both programs of a page, run."""
    peer = PEERS[name]
    python: Path | str = sys.executable
    if peer.installs is not None:
        python = foreign.make_environment(foreign.environments() / name, peer.installs)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        their_program = PROGRAMS / f"{name}_program.py"
        seconds, lines = run(python, their_program, Path(folder))
        versions = installed(python, peer.packages)
        rows.append([peer.title, versions, f"{seconds:.0f}", *map(code, (lines[0], lines[-1]))])
    with tempfile.TemporaryDirectory() as folder:
        ours = Path(folder) / "ours.py"
        ours.write_text(our_program(name), encoding="utf-8")
        seconds, lines = run(sys.executable, ours, Path(folder), str(ROOT))
        rows.append([f"ours, beside {peer.title}", "", f"{seconds:.0f}", "", code(lines[-1])])
    return rows


def main() -> None:
    """Runs the pages that are named, or all, and writes a table for each."""
    parser = report.parser(__doc__, threads=())
    parser.add_argument("--only", nargs="+", choices=list(PEERS), default=list(PEERS))
    args = parser.parse_args()
    for name in args.only:
        rows = rows_of(name)
        header = ["program", "versions", "seconds", "first line printed", "last line printed"]
        report.publish(
            f"coming_from_{name}",
            f"A program of {PEERS[name].title}, and ours beside it",
            [("What they print", report.markdown_table(header, rows))],
            {"threads": 1, "seeds": "0, once"},
            __doc__.partition("--write\n")[2],
            write=args.write,
        )


if __name__ == "__main__":
    main()
