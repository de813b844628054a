"""Trainings of other systems and of ours that a benchmark compares, kept in a folder.

A benchmark that was stopped reads the results that are there, and resumes our run that was stopped.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["load_or_train", "train_by_script", "train_by_suite"]

Result = dict[str, Any]


def load_or_train(path: Path, title: str, train: Callable[[], Result]) -> Result:
    """Returns the result of a training, from an earlier call or from one now.

    Args:
        path (Path): file of the result.
        title (str): what is trained, for the message.
        train (callable): trains, and returns the result.
    """
    if not path.is_file():
        print(f"{title} ...", file=sys.stderr)
        found = train()
        path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return json.loads(path.read_text(encoding="utf-8"))


def train_by_script(
    python: Path, script: Path, options: Mapping[str, Any], environment: Mapping[str, str]
) -> Result:
    """Trains in another environment, and returns what the script has written to ``--out``.

    Args:
        python (Path): Python of the environment.
        script (Path): what it runs.
        options (mapping): its command line, ``--out`` among it.
        environment (mapping): environment variables.
    """
    option_args = [str(word) for option in options.items() for word in option]
    command = [python, str(script), *option_args]
    subprocess.run(command, check=True, env=dict(environment), stdout=sys.stderr)
    return json.loads(Path(options["--out"]).read_text(encoding="utf-8"))


def train_by_suite(
    suite: str, algorithm: str, task: str, seed: int, out: Path, *, quick: bool, **settings: Any
) -> Any:
    """Trains a run of a suite, or resumes it; returns its results.

    Args:
        suite, algorithm, task (str): what to train.
        seed (int): random seed.
        out (Path): folder of the suite's runs.
        quick (bool): whether to train eagerly instead of compiled.
        **settings: ``frames`` and other settings of the run.
    """
    from torchrl_marl.apps.suites import run_suite

    (found,) = run_suite(
        suite,
        algorithms=algorithm,
        tasks=task,
        seeds=[seed],
        out=out,
        resume=(out / "suite.json").is_file(),
        jobs=1,
        log=lambda text: print(text, file=sys.stderr),
        execution="eager" if quick else "compile",
        **settings,
    )
    if not found.finished:
        raise SystemExit(f"{algorithm}, seed {seed}: {found.error}")
    return found
