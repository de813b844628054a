"""Cost and gain of shards on Ray actors, on one machine.

python benchmarks/shards.py speed --write     # also: start, transport, learning
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import report
from forecast import Workload

BUSY = f"{Path(__file__).parent / 'busy_world.py'}:BusyArena"
TEXTS = {
    "speed": """A whole iteration, collecting and learning, of an environment with 2 ms of Python
    for each copy and step (`busy_world.py`), in two shards of 8 copies: in one process, and on
    two actors of a private Ray, with the learner in another process. In the second table learning
    takes a third of the iteration in one process. All alternate in one process, one
    thread each. The last column is the forecast of `forecast.py` from the times of one process.""",
    "transport": """A batch of about 10 and of 256 MiB that an actor has played, as it reaches the
    learner's process, and its share of an iteration of a second. `torch.cat` over the shards is the
    one copy.""",
    "start": """From the settings to the first batch of two actors, on a Ray that is started for
    them, and from the death of an actor (kill -9) to its batch: by a spare, and by a new
    process.""",
    "learning": """The recipe pettingzoo_simple_spread_mappo, 16 copies, in one piece, and in two
    shards whose collecting runs one batch ahead, with V-trace. The return is that of the last tenth
    of training (sampled actions).""",
}


def settings(**overrides: Any) -> Any:
    """A run on two shards of the busy arena."""
    from torchrl_marl.recipes import load_config

    base = {
        "threads": 1,
        "execution": "eager",
        "total_frames": 10**9,
        "frames_per_batch": 16 * 25,
        "env": {"library": BUSY, "name": "BusyArena", "num_envs": 16, "max_steps": 50},
        "learner": {"minibatch_size": 200, "num_epochs": 2},
        "evaluation": {"episodes": 16},
        "checkpoint": {"every_iterations": 0, "every_minutes": None},
        "logging": {"progress": False},
        "distributed": {"collectors": 2},
    }
    return load_config(load_config("toy_arena_mappo", base), overrides)


@contextlib.contextmanager
def started_training(config: Any) -> Iterator[Any]:
    """A training, whose environments are closed at the end."""
    import dataclasses

    from torchrl_marl.training.trainer import start_training

    with tempfile.TemporaryDirectory() as folder:
        training = start_training(dataclasses.replace(config, folder=f"{folder}/run"), None)
        try:
            yield training
        finally:
            training.close()


ON_RAY = {"backend": "ray", "collectors": 2, "actors": 2, "spares": 0, "cpus_per_actor": 0.5}


def speed(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Iterations in one process against two actors, synchronous and overlapped."""
    found = []
    for title, epochs in (("learning takes little", 2), ("learning takes a third", args.epochs)):
        learner = {"learner.num_epochs": epochs}
        configs = {
            "one process": settings(**learner),
            "2 actors": settings(**learner, distributed=ON_RAY),
            "2 actors, overlap 1": settings(**learner, distributed={**ON_RAY, "overlap": 1}),
        }
        with contextlib.ExitStack() as stack:
            runs = {
                name: stack.enter_context(started_training(config))
                for name, config in configs.items()
            }
            steps = {name: run.step for name, run in runs.items()}
            parts = collect_and_learn_seconds(runs["one process"])
            ahead = runs["2 actors, overlap 1"]
            # What plays ahead must not play while another is timed.
            steps["2 actors, overlap 1"] = partial(run_overlapped_iterations, ahead)
            timings = report.alternate(steps, args.rounds, seconds=args.seconds, shortest=0.0)
        forecasts = forecasts_of(*parts)
        rows = []
        for name in configs:
            n_iterations = IN_A_ROW if "overlap" in name else 1
            ratio = timings.ratio(name, "one process") * n_iterations
            text = timings.ratio_text(name, "one process") if n_iterations == 1 else f"{ratio:.2f}"
            rows.append(
                [name, f"{1e3 * timings.median(name) / n_iterations:.0f}", text, forecasts[name]]
            )
        header = ["", "ms an iteration", "times one process", "forecast"]
        collect, learn = parts
        share = f"collecting {1e3 * collect:.0f} ms, learning {1e3 * learn:.0f} ms in one process"
        found.append((f"{title}: {share}", report.markdown_table(header, rows)))
    return found


IN_A_ROW = 10


def run_overlapped_iterations(training: Any) -> None:
    """Iterations one after the other, of which the last one's batch ahead is waited for."""
    for _ in range(IN_A_ROW):
        training.step()
    training.collector.placement.states()


def collect_and_learn_seconds(training: Any, rounds: int = 5) -> tuple[float, float]:
    """Median seconds of collecting and of learning."""
    collect, learn = [], []
    for _ in range(rounds):
        began = time.perf_counter()
        batch = training.collector.rollout()
        collected = time.perf_counter()
        training._learn(batch)
        collect.append(collected - began)
        learn.append(time.perf_counter() - collected)
    return statistics.median(collect), statistics.median(learn)


def forecasts_of(collect: float, learn: float) -> dict[str, str]:
    """What `forecast.py` says of two actors, from the seconds of one process."""
    workload = Workload("", copies=16, steps=25, step=0.0, copy=collect / 400, learn=learn / 400)
    cores = len(os.sched_getaffinity(0))
    seconds = workload.iteration(0)
    return {
        "one process": "1",
        "2 actors": f"{seconds / workload.iteration(2):.2f}",
        "2 actors, overlap 1": f"{seconds / workload.iteration(2, overlap=True, cores=cores):.2f}",
    }


def transport(args: argparse.Namespace) -> list[tuple[str, str]]:
    """What a batch costs on its way."""
    import numpy as np
    import torch
    from tensordict import TensorDict

    from torchrl_marl.collectors.ray_connection import connect
    from torchrl_marl.collectors.shard import pack, unpack

    connection = connect(None, 2)
    ray = connection.ray

    @ray.remote
    def send(mib: int) -> dict:
        group = TensorDict({"observation": torch.rand(64, mib * 256, 4, 4)}, [64, mib * 256, 4])
        return pack(TensorDict({"agents": group}, [64, mib * 256]))

    rows = []
    for mib in (10, 256):
        times: dict[str, list[float]] = {"get": [], "copy": []}
        for _ in range(args.rounds):
            result = send.remote(mib)
            ray.wait([result])
            began = time.perf_counter()
            batch = unpack(ray.get(result))
            got = time.perf_counter()
            torch.cat([batch, batch[:1]], 0)
            times["get"].append(got - began)
            times["copy"].append(time.perf_counter() - got)
            del batch, result
        get, copy = (1e3 * float(np.median(times[name])) for name in ("get", "copy"))
        rows.append([str(mib), f"{get:.2f}", f"{copy:.1f}", f"{get / 10:.2f} %"])
    connection.close()
    header = ["MiB", "ms to get", "ms of the one copy", "of an iteration of 1 s"]
    return [("a batch from an actor", report.markdown_table(header, rows))]


def start(args: argparse.Namespace) -> list[tuple[str, str]]:
    """First batch, and the batch of a replaced actor."""
    rows = []
    for name, spares in (("by a spare", 1), ("by a new process", 0)):
        began = time.perf_counter()
        ray_settings = {**ON_RAY, "spares": spares}
        with started_training(
            settings(distributed=ray_settings, **{"env.kwargs.milliseconds": 0.1})
        ) as training:
            training.collector.rollout()
            first = time.perf_counter() - began
            placement = training.collector.placement
            if spares:
                placement._ray.get(placement._spares[0].ready.remote())
            training.collector.rollout()
            pid = placement._ray.get(placement.actors[0].process.remote())
            os.kill(pid, signal.SIGKILL)
            began = time.perf_counter()
            training.collector.rollout()
            rows.append([name, f"{first:.1f}", f"{time.perf_counter() - began:.2f}"])
    header = ["", "s to the first batch", "s from a death to the batch"]
    return [("two actors on a Ray of one's own", report.markdown_table(header, rows))]


def learning(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Returns at the end with collecting one batch ahead, against none."""
    import csv

    import torchrl_marl

    ahead = {"collectors": 2, "overlap": 1}
    variants: dict[str, dict[str, Any]] = {
        "in one piece": {},
        "overlap 1, V-trace": {"distributed": ahead, "learner": {"estimator": "vtrace"}},
    }
    rows = []
    for name, distributed in variants.items():
        found = []
        for seed in range(args.seeds):
            with tempfile.TemporaryDirectory() as folder:
                run = torchrl_marl.train(
                    "pettingzoo_simple_spread_mappo",
                    env={"num_envs": 16, "workers": 0},
                    seed=seed,
                    threads=1,
                    total_frames=args.frames,
                    folder=f"{folder}/run",
                    evaluation={"episodes": 1},
                    logging={"progress": False},
                    **distributed,
                )
                with (run.folder / "metrics.csv").open(newline="") as file:
                    returns = [float(row["agent/episode_reward"]) for row in csv.DictReader(file)]
            found.append(statistics.fmean(returns[-max(1, len(returns) // 10) :]))
        by_seed = ", ".join(f"{value:.2f}" for value in found)
        rows.append([name, by_seed, f"{statistics.fmean(found):.2f}"])
    header = ["", "return, by seed", "mean"]
    return [(f"{args.frames:,} frames", report.markdown_table(header, rows))]


def main() -> None:
    """Measures and reports."""
    parser = report.parser(__doc__, threads=(1,))
    sections: dict[str, Callable] = {
        "speed": speed,
        "transport": transport,
        "start": start,
        "learning": learning,
    }
    parser.add_argument("what", choices=sections)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=120.0, help="time limit of the rounds")
    parser.add_argument(
        "--frames", type=int, default=48_000, help="frames of each run of `learning`"
    )
    parser.add_argument("--seeds", type=int, default=3, help="seeds of `learning`")
    parser.add_argument(
        "--epochs", type=int, default=40, help="epochs; 40 make learning take a third"
    )
    args = parser.parse_args()
    if args.quick:
        args.write, args.rounds, args.seeds, args.frames = False, 2, 1, 9_600
    report.be_quiet()
    found = sections[args.what](args)
    report.publish(f"shards_{args.what}", "Shards", found, {}, TEXTS[args.what], write=args.write)


if __name__ == "__main__":
    main()
