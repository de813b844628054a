"""A whole training iteration of MAPPO: collecting, advantages, epochs."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from calibrate import policy_work, step_work
from foreign import Worker
from loops import Form, Loop, OurLoop, TorchRLLoop, reset_compiler

from sections.case import BENCHMARL, DEFAULT, EAGER, OURS, TUNED, Case, Settings
from sections.update import N_AGENTS, recipe, training_work

TITLE = "A whole iteration of MAPPO"
TEXT = """VMAS balance, 3 agents, networks of two layers of 64 (on a GPU 256): collecting a batch,
advantages, all epochs; no evaluation, no logging. *TorchRL* is its own MAPPO example at these
sizes: ``Collector`` on ``VmasEnv`` with ``StepCounter``, ``MAPPOLoss``, ``PopArtValueNorm``,
replay buffer, Adam with its defaults; *tuned* has the compiled policy and loss, fused Adam, the
time limit from VMAS, plain indexing, the loop for GAE and no value norm. *BenchMARL* is 1.5.2 with
its own defaults for MAPPO in an environment of its own, at the same sizes, in a process that makes
one iteration when it is its turn."""
ON_CPU = {"num_envs": 60, "frames": 6000, "epochs": 4, "minibatch": 400, "cells": 64}
ON_GPU = {"num_envs": 600, "frames": 60_000, "epochs": 45, "minibatch": 4096, "cells": 256}
QUICK = {"num_envs": 8, "frames": 80, "epochs": 2, "minibatch": 40, "cells": 16}
FORMS = {DEFAULT: Form(fused=False), TUNED: Form(tuned=True, compiled=True)}
WARMUP = 3
SCRIPT = Path(__file__).parent.parent / "benchmarl_iteration.py"


def measure(settings: Settings) -> list[Case]:
    """One case."""
    import torch

    sizes = QUICK if settings.quick else ON_GPU if settings.device == "cuda" else ON_CPU
    config = recipe(**sizes, device=settings.device)
    reset_compiler()
    loops: dict[str, Loop] = {}
    for name in (DEFAULT, TUNED, EAGER, OURS):
        torch.manual_seed(0)
        if name in FORMS:
            loops[name] = TorchRLLoop(config, FORMS[name])
        else:
            loops[name] = OurLoop(config, "eager" if name == EAGER else settings.execution)
    candidates: dict[str, Any] = {name: loop.iterate for name, loop in loops.items()}
    baselines = {DEFAULT: DEFAULT, TUNED: TUNED}
    worker = _benchmarl(sizes, settings)
    if worker is not None:
        candidates[BENCHMARL] = worker
        baselines[BENCHMARL] = BENCHMARL
    try:
        timings = settings.timings(candidates, warmup=WARMUP, shortest=0.0)
    finally:
        if worker is not None:
            worker.close()
    for loop in loops.values():
        loop.close()
    cells = config.learner.actor.num_cells
    policy = policy_work(16, cells, 4, N_AGENTS)
    work = sizes["frames"] * (step_work("balance", N_AGENTS) + policy) + training_work(config)
    notes: dict[str, dict[str, str]] = {"collect, ms": {}, "learn, ms": {}}
    for name, loop in loops.items():
        for half, seconds in loop.seconds.items():
            median = statistics.median(seconds[WARMUP:])
            notes[f"{half}, ms"][name] = f"{1e3 * median:.0f}"
    updates = math.ceil(sizes["frames"] / sizes["minibatch"])
    return [
        Case(
            f"{sizes['num_envs']} envs x {sizes['frames'] // sizes['num_envs']} steps, "
            f"{sizes['epochs']} epochs of {updates} minibatches",
            timings,
            frames=sizes["frames"],
            least=None if settings.rates is None else work.seconds(settings.rates),
            baselines=baselines,
            # Without waiting for a GPU, halves of an iteration cannot be told apart.
            notes=notes if settings.device == "cpu" else {},
            versions={} if worker is None else {BENCHMARL: worker.versions},
        )
    ]


def _benchmarl(sizes: dict[str, int], settings: Settings) -> Worker | None:
    import torch

    python = settings.pythons.get(BENCHMARL)
    if python is None:
        return None
    options = {
        "--envs": sizes["num_envs"],
        "--frames": sizes["frames"],
        "--epochs": sizes["epochs"],
        "--minibatch": sizes["minibatch"],
        "--cells": sizes["cells"],
        "--agents": N_AGENTS,
        "--device": settings.device,
    }
    return Worker(Path(python), SCRIPT, options, torch.get_num_threads())
