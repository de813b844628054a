"""Runs cases of ``same_bits.py`` on one checkout, the one in PYTHONPATH.

python benchmarks/same_bits_side.py CHECKOUT CASES.json RESULTS

It uses only ``train``, ``resume`` and the run folder, so that it works with any version of the
code. For each case it writes ``<case>.json``, with the digests or the error, and ``<case>.pt``,
with the data of the digests.
"""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import same_bits_leaves
import torch

SECONDS = 300  # after which a case is given up


def run_case(case: dict[str, Any], folder: Path) -> None:
    """Runs one case as its kind says."""
    RUNNERS[case["kind"]](case["recipe"], case["overrides"], str(folder))


def train(recipe: str, overrides: dict[str, Any], folder: str) -> None:
    """An ordinary run."""
    import torchrl_marl

    torchrl_marl.train(recipe, folder=folder, **overrides)


def resume(recipe: str, overrides: dict[str, Any], folder: str) -> None:
    """A run that ends after two thirds of its frames and is gone on with."""
    import torchrl_marl

    frames = overrides["total_frames"]
    train(recipe, {**overrides, "total_frames": frames * 2 // 3}, folder)
    torchrl_marl.resume(folder, total_frames=frames)


def train_on_two_ranks(recipe: str, overrides: dict[str, Any], folder: str) -> None:
    """A run of two processes that learn as one."""
    launched = "-m torch.distributed.run --nnodes 1 --nproc-per-node 2 --master-addr 127.0.0.1"
    settings = [f"{key}={json.dumps(value)}" for key, value in overrides.items()]
    command = [sys.executable, *launched.split(), "--master-port", str(free_port())]
    command += ["-m", "torchrl_marl", "train", recipe, f"folder={folder}", *settings]
    variables = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "torchrl-marl" in line]
        raise RuntimeError((lines or done.stderr.splitlines() or ["no word"])[-1])


RUNNERS: dict[str, Callable[[str, dict[str, Any], str], None]] = {
    "train": train,
    "resume": resume,
    "ranks": train_on_two_ranks,
}


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def reset_process() -> None:
    """Brings what cases share to one state: random numbers, compiled code, threads."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()  # type: ignore[attr-defined]
    gc.collect()


def give_up(*_: Any) -> None:
    """Ends a case that takes too long."""
    raise TimeoutError(f"not done after {SECONDS} s")


def run_and_digest(case: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A case's result, and the leaves of its run, none where it failed."""
    folder = Path(tempfile.mkdtemp())
    began = time.perf_counter()
    values: dict[str, Any] = {}
    error = None
    signal.alarm(SECONDS)
    try:
        reset_process()
        run_case(case, folder / "run")
        values = same_bits_leaves.leaves_of_run(folder / "run")
    except (Exception, SystemExit) as failure:
        traceback.print_exc()
        error = " ".join(traceback.format_exception_only(failure)[-1].split())
    finally:
        signal.alarm(0)
        shutil.rmtree(folder, ignore_errors=True)
    digests = {path: same_bits_leaves.digest(value) for path, value in values.items()}
    seconds = time.perf_counter() - began
    return {"error": error, "digests": digests, "seconds": seconds}, values


def main() -> None:
    """Runs the cases, one after the other."""
    checkout, cases, results = (Path(text).resolve() for text in sys.argv[1:])
    import torchrl_marl

    imported_file = Path(torchrl_marl.__file__).resolve()
    assert imported_file.is_relative_to(checkout), (
        f"{imported_file} was imported, expected that of {checkout}"
    )
    signal.signal(signal.SIGALRM, give_up)
    for case in json.loads(cases.read_text(encoding="utf-8")):
        print(f"--- {case['name']}", flush=True)
        result, values = run_and_digest(case)
        stem = case["stem"]
        torch.save(values, results / f"{stem}.pt")
        part = results / f"{stem}.part"
        part.write_text(json.dumps(result), encoding="utf-8")
        part.rename(results / f"{stem}.json")


if __name__ == "__main__":
    main()
