"""Tests the package with versions of Python and torch, with and without each extra.

    python .ci/versions.py --python 3.11 3.12 3.13 --torch 2.11.0 2.12.1 2.13.0

For each Python and torch, the wheel of the last commit is installed into a new environment, and
short commands are run there. One more environment per extra sees the first one, so that torch is
installed once. Without an extra, its commands must end with the sentence that names the extra.

Results go into ``.ci/versions.csv``, from which ``docs/generate.py`` makes the table of
``docs/versions.md``. Combinations with a result are skipped; ``--again`` repeats them. The
environments of a Python and torch take up to 6 GB, and are deleted when these are finished.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / ".ci" / "versions.csv"
COLUMNS = ["python", "torch", "part", "result", "day"]
LIMIT = 600  # seconds of a command

# Commands without extras, in an empty folder. An iteration each, eager and traced.
LITTLE = "total_frames=640 evaluation.episodes=0"
SMALL = "env.num_envs=4 frames_per_batch=400 total_frames=400 evaluation.episodes=0"
CORE = (
    "python -c 'import torchrl_marl'",
    "torchrl-marl list",
    "torchrl-marl train toy_arena_mappo folder=run total_frames=640",
    f"torchrl-marl train toy_arena_mappo folder=traced execution=trace {LITTLE}",
    f"torchrl-marl train toy_arena_qmix folder=qmix learner.learning_starts=64 {LITTLE}",
    f"torchrl-marl train toy_matrix_game_hasac folder=hasac execution=trace {LITTLE}",
    "torchrl-marl train toy_echo_rmappo folder=memory total_frames=2048 evaluation.episodes=0",
    "torchrl-marl train --resume run total_frames=1280",
    "torchrl-marl evaluate run --episodes 8",
)
FEW_ROBOTS = f"{SMALL} learner.minibatch_size=100 env.kwargs.cone=pyramidal"
COMPILE = (f"torchrl-marl train toy_arena_mappo folder=compiled execution=compile {LITTLE}",)

# Reads a vault of the tests, and prints only the last line of an error.
READ_VAULT = f"""set -o pipefail; python -c "
from torchrl.data import Categorical, Unbounded
from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.apps.vaults import read_vault
ally = AgentSpec('ally', 2, Unbounded((3,)), Categorical(4), action_mask=True)
read_vault('{ROOT}/test/apps/vault/Good', TeamSpec([ally], Unbounded((5,))))
" 2>&1 | tail -n 1 >&2"""

# The commands of an extra. Without it the last one must be refused.
EXTRAS = {
    "vmas": (
        f"torchrl-marl train vmas_balance_mappo folder=vmas learner.minibatch_size=400 {SMALL}",
        "torchrl-marl train vmas_balance_mappo folder=vmas_traced learner.minibatch_size=400 "
        f"execution=trace {SMALL}",
    ),
    "pettingzoo": (f"torchrl-marl train pettingzoo_simple_spread_mappo folder=spread {SMALL}",),
    "jaxmarl": (f"torchrl-marl train jaxmarl_simple_spread_mappo folder=jaxmarl {SMALL}",),
    "mujoco": (f"torchrl-marl train mujoco_ant_mappo folder=ant {SMALL}",),
    "warp": (f"torchrl-marl train mujoco_ant_mappo folder=warp {SMALL} env.kwargs.engine=warp",),
    "mjlab": (f"torchrl-marl train mjlab_formation_mappo folder=mjlab {FEW_ROBOTS}",),
    "log": (
        f"torchrl-marl train toy_arena_mappo folder=logged {LITTLE} "
        "logging.backends=[tensorboard,mlflow,wandb]",
    ),
    "plot": ("torchrl-marl evaluate run --gif", "torchrl-marl plot run"),
    "video": ("torchrl-marl evaluate run --mp4",),
    "tune": (
        "torchrl-marl tune toy_arena_mappo learner.lr=1e-4..1e-3 --trials 2 --together 2 "
        "folder=tuned total_frames=640",
    ),
    "slurm": (
        "torchrl-marl sweep toy_arena_mappo learner.lr=1e-4,1e-3 --launcher slurm "
        f"--slurm cluster=local --slurm timeout_min=5 {LITTLE}",
    ),
    "completion": (
        "_ARGCOMPLETE=1 COMP_LINE='torchrl-marl tra' COMP_POINT=16 "
        "_ARGCOMPLETE_STDOUT_FILENAME=completed torchrl-marl && grep -q train completed",
    ),
    "ray": (
        "torchrl-marl train toy_arena_mappo folder=ray distributed=ray distributed.collectors=2 "
        f"distributed.actors=1 {LITTLE}",
    ),
    "serve": ("timeout --preserve-status -s INT 30 torchrl-marl serve run --port 0",),
    "export": ("torchrl-marl export run",),
    "vault": (READ_VAULT,),
}
# Without this extra the shell completes nothing, and nothing is said.
SILENT = {"completion"}
PARTS = ("core", "compile", *EXTRAS)


class Failed(Exception):
    """A command with another end than expected; the message says which."""


def find_python(version: str) -> str | None:
    """Returns the interpreter of a version such as ``3.12``, from the PATH or pyenv."""
    pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for candidate in [shutil.which(f"python{version}"), *map(str, reversed(pyenv))]:
        command = [candidate or "false", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        if subprocess.run(command, capture_output=True, text=True).stdout.strip() == version:
            return candidate
    return None


def run(*command: str, **kwargs) -> None:
    """Runs a command, and raises an error with the end of what it printed."""
    done = subprocess.run(command, capture_output=True, text=True, **kwargs)
    if done.returncode:
        raise Failed(last_line(done.stderr) or f"exit status {done.returncode}")


def last_line(text: str) -> str:
    """Returns the last line that says something, without paths of this machine."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()] or lines
    return " ".join(errors[-1].replace(tempfile.gettempdir(), "")[:160].split()) if errors else ""


def build_wheel(work: Path) -> Path:
    """Returns the wheel of the last commit."""
    for folder in ("source", "wheel"):
        shutil.rmtree(work / folder, ignore_errors=True)
    (work / "source").mkdir(parents=True)
    run("git", "-C", str(ROOT), "archive", "--output", str(work / "source.tar"), "HEAD")
    run("tar", "-xf", str(work / "source.tar"), "-C", str(work / "source"))
    folder = str(work / "wheel")
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", folder, str(work / "source"))
    (wheel,) = (work / "wheel").iterdir()
    return wheel


class Pair:
    """The environments of one Python and one torch."""

    def __init__(self, python: str, torch: str, work: Path, wheel: Path) -> None:
        self.python, self.torch, self.wheel = python, torch, wheel
        self.folder = work / f"python{python}_torch{torch}"
        self.base = self.folder / "base"
        self.runs = self.folder / "runs"

    def pip(self, environment: Path, *arguments: str) -> None:
        """Installs into an environment, with this torch."""
        constraints = self.folder / "constraints.txt"
        constraints.write_text(f"torch=={self.torch}\n")
        env = {**os.environ, "PIP_CONSTRAINT": str(constraints)}
        python = ["--python", str(environment / "bin" / "python")]
        pip = [str(self.base / "bin" / "python"), "-m", "pip", *python, "install", "--quiet"]
        run(*pip, *arguments, env=env)

    def make_base(self) -> None:
        """Installs the package without extras."""
        shutil.rmtree(self.runs, ignore_errors=True)
        self.runs.mkdir(parents=True)
        interpreter = find_python(self.python)
        if interpreter is None:
            raise Failed(f"there is no Python {self.python} here")
        if not self.base.exists():
            run(interpreter, "-m", "venv", str(self.base))
            run(str(self.base / "bin" / "python"), "-m", "pip", "install", "-q", "-U", "pip")
        self.pip(self.base, str(self.wheel))
        self.pip(self.base, "--no-deps", "--force-reinstall", str(self.wheel))

    def make_extra(self, extra: str) -> Path:
        """Returns an environment with one extra, which sees the packages of the first one."""
        folder = self.folder / extra
        run(str(self.base / "bin" / "python"), "-m", "venv", "--without-pip", str(folder))
        (packages,) = self.base.glob("lib/python*/site-packages")
        (site_packages,) = folder.glob("lib/python*/site-packages")
        (site_packages / "base.pth").write_text(f"{packages}\n")
        self.pip(folder, "--no-deps", "--ignore-installed", str(self.wheel))
        self.pip(folder, f"{self.wheel}[{extra}]")
        return folder

    def shell(self, environment: Path, command: str) -> subprocess.CompletedProcess:
        """Runs a command in an environment."""
        kept_variables = {
            k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")
        }
        path = f"{environment / 'bin'}:{os.environ['PATH']}"
        env = {**kept_variables, "PATH": path, "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"}
        options = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        shell = ["timeout", str(LIMIT), "bash", "-c", command]
        return subprocess.run(shell, cwd=self.runs, env=env, **options)

    def passes(self, environment: Path, commands: Sequence[str]) -> None:
        """Raises an error if a command fails."""
        for command in commands:
            done = self.shell(environment, command)
            if done.returncode:
                raise Failed(f"`{command}`: {last_line(done.stderr) or done.returncode}")

    def refuses(self, extra: str) -> None:
        """Raises an error if the command of a missing extra is not refused in one sentence."""
        done = self.shell(self.base, EXTRAS[extra][-1])
        expected_line = f"run: pip install '.[{extra}]'"
        if not done.returncode or "Traceback" in done.stderr:
            raise Failed(f"without [{extra}]: status {done.returncode}, {last_line(done.stderr)}")
        if extra not in SILENT and expected_line not in done.stderr.splitlines()[-1]:
            raise Failed(f"without [{extra}]: {last_line(done.stderr)}")

    def test(self, part: str) -> None:
        """Tests one part: ``core``, ``compile`` or an extra."""
        if part == "core":
            self.passes(self.base, CORE)
            for extra in EXTRAS:
                self.refuses(extra)
        elif part == "compile":
            self.passes(self.base, COMPILE)
        else:
            environment = self.make_extra(part)
            self.passes(environment, EXTRAS[part])
            shutil.rmtree(environment)


def read_record() -> dict[tuple[str, ...], dict[str, str]]:
    """Returns the results by Python, torch and part."""
    if not RECORD.exists():
        return {}
    with RECORD.open(newline="", encoding="utf-8") as file:
        return {(x["python"], x["torch"], x["part"]): x for x in csv.DictReader(file)}


def record(python: str, torch: str, part: str, result: str) -> None:
    """Writes a result; several of these programs may write at a time."""
    result = " ".join(result.replace(str(ROOT), ".").split())
    print(f"Python {python}, torch {torch}, {part}: {result}", flush=True)
    with Path(__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        rows = read_record()
        values = (python, torch, part, result, datetime.date.today().isoformat())
        rows[python, torch, part] = dict(zip(COLUMNS, values))
        order = sorted(rows.values(), key=lambda x: (x["python"], x["torch"], rank(x["part"])))
        with RECORD.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(order)


def rank(part: str) -> int:
    """Returns the place of a part in the table."""
    return PARTS.index(part) if part in PARTS else len(PARTS)


def test_pair(pair: Pair, parts: Sequence[str], keep: bool) -> None:
    """Tests parts of one Python and torch, and notes the results."""
    try:
        pair.make_base()
    except Failed as error:
        record(pair.python, pair.torch, "core", f"not installed: {error}")
        return
    if "core" not in parts:  # other parts evaluate its run
        pair.passes(pair.base, CORE[2:3])
    for part in parts:
        try:
            pair.test(part)
            result = "passed"
        except Failed as error:
            result = f"failed: {error}"
        record(pair.python, pair.torch, part, result)
    if not keep:
        shutil.rmtree(pair.folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", nargs="+", default=["3.11", "3.12", "3.13"])
    parser.add_argument("--torch", nargs="+", default=["2.11.0", "2.12.1", "2.13.0"])
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "versions")
    parser.add_argument("--again", action="store_true", help="repeat combinations with a result")
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    args = parser.parse_args()
    wheel = None
    for torch in args.torch:
        for python in args.python:
            known_results = {} if args.again else read_record()
            parts = [part for part in args.parts if (python, torch, part) not in known_results]
            if parts:
                wheel = wheel or build_wheel(args.work)
                test_pair(Pair(python, torch, args.work, wheel), parts, args.keep)


if __name__ == "__main__":
    main()
