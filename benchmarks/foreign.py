"""Worker processes of other systems, each in a virtual environment, measured in turn with ours.

Scripts of other systems import this file, too, so it needs nothing beyond Python. A script sends a
description of itself, then does one piece of work per request (:class:`Channel`). For
``report.alternate`` it is a candidate like any other (:class:`Worker`).
"""

from __future__ import annotations

import contextlib
import json
import os
import site
import subprocess
import sys
import venv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

BENCHMARL = (
    # The second repeats the first: alone, it may change an earlier version.
    ["torch==2.13.0"],
    ["torch==2.13.0", "benchmarl==1.5.2", "torchrl==0.11.1", "tensordict==0.11.0", "vmas==1.5.2"],
)
AGILERL = (
    ["torch==2.13.0"],
    # Its algorithms import peft, which only an extra of it asks for.
    ["torch==2.13.0", "peft==0.21.0", "transformers==5.14.1"]
    + ["pettingzoo==1.26.1", "mpe2==1.1.1", "agilerl==2.58.0"],
)
RLLIB = (
    ["torch==2.13.0"],
    ["torch==2.13.0", "ray[rllib]==2.60.0", "pettingzoo>=1.26", "mpe2==1.1.1"],
)
JAXMARL = (["jaxmarl==0.2.0", "flax", "optax", "six"],)
JAXMARL_GPU = (["jaxmarl==0.2.0", "flax", "optax", "six", "jax[cuda12]"],)


def environments() -> Path:
    """The folder of the virtual environments, in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return cache / "torchrl_marl"


def checkout(folder: Path, address: str, commit: str, paths: Sequence[str], needed: str) -> Path:
    """Fetches files of a repository at a commit, unless an earlier call has done so.

    Args:
        folder (Path): where to put them; returned.
        address (str): of the repository.
        commit (str): hash.
        paths (sequence of str): what to check out, as for ``git checkout``.
        needed (str): name in the folder that shows that the files are there.
    """
    if not (folder / needed).exists():
        folder.mkdir(parents=True, exist_ok=True)
        git = ["git", "-C", str(folder)]
        subprocess.run([*git, "init", "--quiet"], check=True)
        fetch = [*git, "fetch", "--quiet", "--depth", "1", "--filter=blob:none", address, commit]
        subprocess.run(fetch, check=True)
        subprocess.run([*git, "checkout", "FETCH_HEAD", "--", *paths], check=True)
    return folder


def make_environment(folder: Path, installs: Sequence[Sequence[str]]) -> Path:
    """The Python of a virtual environment, made where it is not there yet.

    Args:
        folder (Path): of the environment.
        installs (sequence of sequence of str): what pip installs, one command after the other.
    """
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    complete = folder / "complete"
    if not complete.exists():
        print(f"installing {installs[-1][-1]} and others into {folder} ...", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=True)
        for packages in installs:
            pip_args = ["-m", "pip", "install", *packages, "--quiet"]
            subprocess.run([python, *pip_args], check=True)
        complete.touch()
    return python


def make_environment_over_ours(folder: Path, installs: Sequence[Sequence[str]]) -> Path:
    """The Python of a virtual environment in which the packages of this one come last.

    Args:
        folder, installs: as in :func:`make_environment`.
    """
    python = make_environment(folder, installs)
    packages = next(iter(folder.glob("lib/python*/site-packages")))
    ours = [*site.getsitepackages(), str(Path(__file__).parents[1])]
    (packages / "zz_ours.pth").write_text("\n".join(ours) + "\n", encoding="utf-8")
    return python


class Worker:
    """A script in another environment that does one piece of work each time it is called.

    Args:
        python (Path): the environment's Python.
        script (Path): what it runs; it holds a :class:`Channel`.
        options (mapping): its command line.
        threads (int): for its numerics.

    Attributes:
        facts (dict): what the script says about itself, ``versions`` among it.
    """

    def __init__(
        self, python: Path, script: Path, options: Mapping[str, Any], threads: int
    ) -> None:
        option_args = [str(word) for option in options.items() for word in option]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        environment["OMP_NUM_THREADS"] = str(threads)
        self.process = subprocess.Popen(
            [str(python), str(script), *option_args, "--threads", str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self.facts = self._read()

    @property
    def versions(self) -> str:
        """Of the packages in its environment."""
        return ", ".join(f"{name} {x}" for name, x in self.facts["versions"].items())

    def __call__(self) -> None:
        """One piece of work."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args} ended with {self.process.wait()}.")
        return json.loads(line)

    def close(self) -> None:
        """Ends the script."""
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Channel:
    """The script's end: what else it prints goes to stderr.

    Examples:
        >>> channel = Channel()  # doctest: +SKIP
        >>> for _ in channel.requests({"library": "other"}):  # doctest: +SKIP
        ...     work()
    """

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def answer(self, facts: Mapping[str, Any]) -> bool:
        """Says that the last piece is done, and waits; False when no more is asked for."""
        try:
            self._answers.write(json.dumps(facts) + "\n")
            self._answers.flush()
        except OSError:
            return False
        return sys.stdin.readline() == "go\n"

    def requests(self, facts: Mapping[str, Any]) -> Iterator[None]:
        """One turn for each piece of work."""
        while self.answer(facts):
            yield
