"""Trainings of other systems and of ours that a benchmark compares, kept in a folder.

A benchmark that was stopped reads the results that are there, and resumes our run that was stopped.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["arguments", "load_or_train", "results", "train_by_script", "train_by_suite"]

Result = dict[str, Any]
Train = Callable[[str, int, Path, argparse.Namespace], Result]


def arguments(
    parser: argparse.ArgumentParser,
    library: str,
    sides: Sequence[str],
    default_sides: Sequence[str],
    *,
    seeds: Sequence[int],
    frames: int,
    batch: int,
    episodes: tuple[str, int],
) -> argparse.Namespace:
    """Adds the options that all comparisons have, and reads the command line.

    Args:
        parser (ArgumentParser): with the options of one comparison.
        library (str): name of the other library.
        sides, default_sides (sequence of str): what can be trained, and what is by default.

    Keyword Args:
        seeds (sequence of int): by default.
        frames (int): by default.
        batch (int): number that divides the frames; the frames of ``--quick``.
        episodes (tuple): option for the number of episodes, and its default; read as ``episodes``.

    Returns:
        Namespace: the options; ``source`` is a checkout of the library, if one is given.
    """
    option, count = episodes
    metavar, checkout = option.removeprefix("--").upper(), f"folder with a checkout of {library}"
    parser.add_argument("--sides", nargs="+", choices=list(sides), default=list(default_sides))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(seeds))
    parser.add_argument("--frames", type=int, help=f"a multiple of {batch:,}; default: {frames:,}")
    parser.add_argument(option, dest="episodes", metavar=metavar, type=int, default=count)
    parser.add_argument(f"--{library.lower()}", dest="source", type=Path, help=checkout)
    parser.add_argument("--python", type=Path, help=f"Python of an environment for {library}")
    parser.add_argument("--results", type=Path, help="folder to keep and reuse results in")
    args = parser.parse_args()
    args.frames = args.frames or (batch if args.quick else frames)
    args.episodes = 8 if args.quick else args.episodes
    if args.frames % batch:
        raise SystemExit(f"--frames is no multiple of {batch:,}, the frames of a batch.")
    return args


def results(task: str, train: Train, args: argparse.Namespace) -> dict[str, list[Result]]:
    """Returns the results of all sides and seeds; those of an earlier call are reused.

    Args:
        task (str): name of the task or map.
        train (callable): trains a side with a seed; gets the result's file and the options.
        args (Namespace): from :func:`arguments`.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.results or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)

        def result(side: str, seed: int) -> Result:
            path = folder / f"{task}_{side}_{args.frames}_seed{seed}.json"
            title = f"{side} on {task}, seed {seed}"
            return load_or_train(path, title, lambda: train(side, seed, path, args))

        return {side: [result(side, seed) for seed in args.seeds] for side in args.sides}


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
