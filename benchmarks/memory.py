"""Cost of memory: rollouts, compiling, and whole iterations against BenchMARL.

python benchmarks/memory.py rollout --write
python benchmarks/memory.py compiling --write
python benchmarks/memory.py iteration --write
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import report
from foreign import BENCHMARL, Worker, environments, make_environment

SCRIPT = Path(__file__).parent / "benchmarl_iteration.py"
N_AGENTS, MAX_STEPS, CELLS = 3, 100, 64
WITH, WITHOUT, EAGER = "GRU", "without memory", "GRU, eager"
OURS, THEIRS = "torchrl_marl", "BenchMARL"
TEXTS = {
    "rollout": """VMAS balance, 3 agents, 64 envs, 100 steps a batch, at most 100 an episode; actors
        of two layers of 64, with a GRU of 64 behind them or without. All but *eager* run in one
        compiled graph with the simulator. All alternate in one process, in random order every
        round, after as many batches as an episode is long.""",
    "compiling": """MAPPO on a batch of VMAS balance, 16 envs of 400 steps, minibatches of 400
        steps, actor and critic of two layers of 64, with GRUs of 64 behind them or without. Each in
        a process of its own with an empty cache of the compiler: the seconds of the first ``learn``
        less those of the second, by the clock, and of all its processes' CPU time.""",
    "iteration": """Collecting, advantages and epochs on VMAS balance, 3 agents: actor and critic
        are two layers of 64 and a GRU of 64; BenchMARL 1.5.2's `GruConfig`, with its perceptron
        behind the GRU. Ours trains on windows of 20 steps from stored states, theirs on whole
        batches from zero ones. Both alternate, theirs in an environment of its own.""",
}


def config_of(memory: bool, num_envs: int, frames: int, **settings: Any) -> Any:
    """The recipe at other sizes."""
    from torchrl_marl.recipes import load_config

    kind = "gru" if memory else "none"
    overrides: dict[str, Any] = {
        "threads": None,
        "env.num_envs": num_envs,
        "env.max_steps": MAX_STEPS,
        "frames_per_batch": frames,
        "learner.actor.num_cells": [CELLS, CELLS],
        "learner.critic.num_cells": [CELLS, CELLS],
        "learner.actor.memory.kind": kind,
        "learner.critic.memory.kind": kind,
        **{f"learner.{name}": value for name, value in settings.items()},
    }
    return load_config("vmas_balance_mappo", overrides)


def loop_of(config: Any, execution: str) -> tuple[Any, Any]:
    """A learner and its collector."""
    from torchrl_marl import TeamSpec
    from torchrl_marl.collectors import RolloutCollector, TeamPolicy
    from torchrl_marl.envs import make_env, with_memory
    from torchrl_marl.envs.remember import hidden_sizes
    from torchrl_marl.learners import build_learners

    env = make_env(config.env, seed=0)
    [learner] = build_learners(TeamSpec.from_env(env), config.learner, execution=execution)
    policy = TeamPolicy(learner.actors.values())
    sizes = hidden_sizes(policy)
    env = with_memory(env, sizes) if sizes else env
    frames = config.frames_per_batch
    return learner, RolloutCollector(env, policy, frames_per_batch=frames, execution=execution)


def measure_rollout(args: argparse.Namespace) -> list[list[str]]:
    """A row for every way of collecting."""
    num_envs, steps = (8, 5) if args.quick else (64, 100)
    collectors = {}
    for name in (WITHOUT, WITH, EAGER):
        memory, execution = name != WITHOUT, "eager" if name == EAGER else "compile"
        settings = {"minibatch_size": 20 * num_envs // 8, "window": 5} if memory else {}
        config = config_of(memory, num_envs, num_envs * steps, **settings)
        collectors[name] = loop_of(config, execution)[1]
    runs: dict[str, Callable[[], Any]] = {name: x.rollout for name, x in collectors.items()}
    timings = report.alternate(runs, args.rounds, seconds=args.seconds, warmup=2)
    assert all(
        x.execution == ("eager" if name == EAGER else "compile") for name, x in collectors.items()
    )
    return [
        [
            name,
            f"{1e3 * timings.median(name):.1f}",
            f"{num_envs * steps / timings.median(name):,.0f}",
            *(timings.ratio_text(name, other) for other in (WITHOUT, EAGER)),
            str(timings.rounds()),
        ]
        for name in runs
    ]


def compile_once(memory: bool, window: int, quick: bool) -> tuple[float, float]:
    """Seconds by the clock, and of CPU time, that the compiling of an update takes."""
    import torch

    size = 100 if quick else 400
    settings = {"window": window} if memory else {}
    config = config_of(memory, 16, 16 * size, minibatch_size=size, num_epochs=1, **settings)
    learner, _ = loop_of(config, "compile")
    collector = loop_of(config, "eager")[1]
    torch.manual_seed(0)
    batch = collector.rollout()
    times = []
    for _ in range(2):
        began, spent = time.perf_counter(), _cpu_time()
        learner.learn(batch.clone())
        times.append((time.perf_counter() - began, _cpu_time() - spent))
    (first, first_cpu), (second, second_cpu) = times
    return first - second, first_cpu - second_cpu


def _cpu_time() -> float:
    found = (resource.getrusage(x) for x in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(x.ru_utime + x.ru_stime for x in found)


def measure_compiling(args: argparse.Namespace) -> list[list[str]]:
    """A row for every window."""
    cases = {WITHOUT: (False, 0)} | {f"{WITH}, window {n}": (True, n) for n in args.windows}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    context = multiprocessing.get_context("spawn")
    for _ in range(args.compilations):
        for name, case in cases.items():
            with tempfile.TemporaryDirectory() as folder:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
                with ProcessPoolExecutor(1, context) as pool:
                    times[name].append(pool.submit(compile_once, *case, args.quick).result())
            print(name, times[name][-1], flush=True)
    fastest = {name: [min(column) for column in zip(*found)] for name, found in times.items()}
    return [
        [name, *(f"{x:.1f}" for x in found), f"{found[1] / fastest[WITHOUT][1]:.2f}",
         str(args.compilations)]
        for name, found in fastest.items()
    ]  # fmt: skip


def measure_iteration(args: argparse.Namespace) -> list[list[str]]:
    """Ours and BenchMARL's, one iteration each in turn."""
    import torch

    num_envs, frames, epochs, minibatch = (8, 160, 2, 80) if args.quick else (60, 6000, 4, 400)
    settings = {"window": 20, "num_epochs": epochs, "minibatch_size": minibatch}
    loops = {
        name: loop_of(config_of(True, num_envs, frames, **settings), execution)
        for name, execution in ((OURS, "compile"), (f"{OURS}, eager", "eager"))
    }

    def iteration(learner: Any, collector: Any) -> Callable[[], None]:
        return lambda: learner.learn(collector.rollout())

    runs: dict[str, Callable[[], Any]] = {name: iteration(*loop) for name, loop in loops.items()}
    options = {"--envs": num_envs, "--frames": frames, "--epochs": epochs, "--minibatch": minibatch,
               "--cells": CELLS, "--agents": N_AGENTS, "--memory": "gru"}  # fmt: skip
    worker = Worker(Path(args.python), SCRIPT, options, torch.get_num_threads())
    runs[THEIRS] = worker
    try:
        timings = report.alternate(runs, args.rounds, seconds=args.seconds, warmup=2, shortest=0.0)
    finally:
        worker.close()
    return [
        [
            name,
            f"{1e3 * timings.median(name):.0f}",
            f"{frames / timings.median(name):,.0f}",
            timings.ratio_text(name, THEIRS),
            str(timings.rounds()),
        ]
        for name in runs
    ]


SECTIONS: dict[str, tuple[Callable[[argparse.Namespace], Any], str, list[str]]] = {
    "rollout": (
        measure_rollout,
        "A rollout with memory",
        ["", "ms", "frames/s", f"times {WITHOUT}", f"times {EAGER}", "rounds"],
    ),
    "compiling": (
        measure_compiling,
        "Compiling an update with memory",
        ["", "s", "s of CPU", f"times {WITHOUT}", "compilations, of which the quickest counts"],
    ),
    "iteration": (
        measure_iteration,
        "A whole iteration of MAPPO with memory",
        ["", "ms", "frames/s", f"times {THEIRS}", "rounds"],
    ),
}


def main() -> None:
    """Measures and reports."""
    parser = report.parser(__doc__, threads=(1,))
    parser.add_argument("section", choices=SECTIONS)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit of the rounds")
    parser.add_argument("--windows", type=int, nargs="+", default=[16, 100])
    parser.add_argument("--compilations", type=int, default=1, help="compilations of each case")
    args = parser.parse_args()
    if args.quick:
        args.write, args.rounds = False, 2
    if args.section == "iteration":
        args.python = str(make_environment(environments() / "benchmarl", BENCHMARL))
    measure, title, header = SECTIONS[args.section]
    sections = [
        (report.count_of(n, "thread"), report.markdown_table(header, rows))
        for n, rows in report.for_each_number_of_threads(measure, args.threads, args).items()
    ]
    name = f"memory_{args.section}"
    report.publish(name, title, sections, {}, TEXTS[args.section], write=args.write)


if __name__ == "__main__":
    main()
