"""Equality of sharded runs under different placements and after deaths of actors.

python benchmarks/same_shards.py equality --write     # also: deaths
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report
from shards import ON_RAY, settings, started_training

TEXTS = {
    "equality": """Five iterations of four shards: in one process, on 1, 2 and 4 actors of Ray, and
    stopped on two actors after the second iteration and resumed on one. Compared with one process:
    a hash of every weight, the optimizer, metrics, running episodes and random states.""",
    "deaths": """Twenty iterations in which ten actors die, a seeded draw of `kill -9`, falling
    silent (SIGSTOP) and raising, against the same run in one process: what differs of weights,
    optimizer, metrics and random states.""",
}
ENVIRONMENTS = {
    "toy arena, deaths, two groups": (
        "toy_arena_mappo",
        {"env.kwargs.n_groups": 2, "frames_per_batch": 640, "learner.minibatch_size": 320},
    ),
    "VMAS balance": (
        "vmas_balance_mappo",
        {"frames_per_batch": 960, "learner.minibatch_size": 480},
    ),
    "PettingZoo simple_spread": (
        "pettingzoo_simple_spread_mappo",
        {
            "frames_per_batch": 400,
            "env.num_envs": 8,
            "env.workers": 0,
            "learner.minibatch_size": 200,
        },
    ),
}


def equality(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Runs every environment in one process, on actors, and resumed on others."""
    import torchrl_marl
    from torchrl_marl.recipes import load_config
    from torchrl_marl.training import iterate

    rows = []
    for title, (recipe, overrides) in ENVIRONMENTS.items():
        base = load_config(recipe, {**overrides, **SHORT})
        base = load_config(base, {"total_frames": 5 * base.frames_per_batch})
        found = {}
        with tempfile.TemporaryDirectory() as folder:
            for actors in (0, 1, 2, 4):
                run = torchrl_marl.train(placement_settings(base, f"{folder}/{actors}", actors))
                found[actors] = state_of(run.folder)
            for step in iterate(placement_settings(base, f"{folder}/moved", 2)):
                if step.number == 2:
                    break
            torchrl_marl.resume(f"{folder}/moved", distributed={"actors": 1})
            found["moved"] = state_of(Path(folder) / "moved")
        equal = ["equal" if found[0] == found[i] else "DIFFERENT" for i in (1, 2, 4, "moved")]
        rows.append([title, *equal])
    header = ["", "1 actor", "2 actors", "4 actors", "2, then 1"]
    return [("against one process, to the bit", report.markdown_table(header, rows))]


SHORT = {
    "threads": 1,
    "execution": "eager",
    "evaluation.episodes": 8,
    "checkpoint.every_iterations": 0,
    "logging.progress": False,
}


def placement_settings(base: Any, folder: str, actors: int) -> Any:
    """Settings of four shards, on so many actors."""
    from torchrl_marl.recipes import load_config

    distributed: dict[str, Any] = {"collectors": 4}
    if actors:
        distributed |= {"backend": "ray", "actors": actors, "cpus_per_actor": 0.5, "spares": 0}
    return load_config(base, {"folder": folder, "distributed": distributed})


def state_of(folder: Path) -> str:
    """A hash of a run's last checkpoint and metrics."""
    import csv

    from torchrl_marl.training.checkpoint import latest_checkpoint, load_checkpoint

    digest = hashlib.sha256()
    state = load_checkpoint(latest_checkpoint(folder))
    for part in ("learners", "tracker", "random"):
        hash_leaves(digest, state[part])
    with (folder / "metrics.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            digest.update(repr([(k, v) for k, v in row.items() if k not in CLOCK]).encode())
    return digest.hexdigest()


CLOCK = ("seconds", "frames_per_second", "collector_restarts", "episodes_lost")


def deaths(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Ten deaths in twenty iterations, against a run without."""
    rows = []
    for seed in range(args.seeds):
        with tempfile.TemporaryDirectory() as orders:
            env_settings = {"env.kwargs.milliseconds": 0.1, "env.kwargs.orders": orders}
            with started_training(
                settings(**env_settings, **{"distributed.collectors": 4})
            ) as training:
                expected, _ = run_and_hash(training, {}, orders)
            distributed = {**ON_RAY, "collectors": 4, "spares": 1, "timeout": 5.0}
            with started_training(settings(**env_settings, distributed=distributed)) as training:
                kinds = draw_failures(random.Random(seed))
                began = time.perf_counter()
                state, row = run_and_hash(training, kinds, orders)
                seconds = time.perf_counter() - began
            died = [kind for iteration_kinds in kinds.values() for kind in iteration_kinds]
            counts = ", ".join(f"{died.count(kind)} {kind}" for kind in sorted(set(died)))
            equal = "nothing" if state == expected else "SOMETHING"
            rows.append([seed, counts, row["collector_restarts"], row["episodes_lost"], equal])
            rows[-1].append(f"{seconds:.0f}")
    header = ["seed", "deaths", "collector_restarts", "episodes_lost", "differs", "seconds"]
    return [("20 iterations, 4 shards on 2 actors", report.markdown_table(header, rows))]


ITERATIONS = 20


def draw_failures(rng: random.Random) -> dict[int, list[str]]:
    """What happens before which iteration: ten deaths, each in an iteration of its own."""
    kinds = ["killed"] * 4 + ["silent"] * 3 + ["raised"] * 3
    rng.shuffle(kinds)
    return {i: [kind] for i, kind in zip(sorted(rng.sample(range(1, 20), 10)), kinds)}


def run_and_hash(
    training: Any, kinds: dict[int, list[str]], orders: str
) -> tuple[str, dict[str, float]]:
    """A hash of all that a run has come to, and its last row of metrics."""
    digest = hashlib.sha256()
    for i in range(ITERATIONS):
        for kind in kinds.get(i, []):
            inject_failure(training.collector.placement, kind, i % 2, orders)
        metrics = training.step().metrics
        digest.update(repr({k: v for k, v in metrics.items() if k not in CLOCK}).encode())
    state = training.state_dict()
    for part in ("learners", "tracker", "random"):
        hash_leaves(digest, state[part])
    return digest.hexdigest(), metrics


def inject_failure(placement: Any, kind: str, a: int, orders: str) -> None:
    """Makes an actor die or hang, or its environment raise."""
    if kind == "raised":
        (Path(orders) / "raise").touch()
        return
    pid = placement._ray.get(placement.actors[a].process.remote())
    os.kill(pid, signal.SIGKILL if kind == "killed" else signal.SIGSTOP)


def hash_leaves(digest: Any, state: Any) -> None:
    """Adds every tensor and number of a state, in order."""
    if isinstance(state, dict):
        for key in sorted(state, key=str):
            digest.update(str(key).encode())
            hash_leaves(digest, state[key])
    elif isinstance(state, (list, tuple)):
        for one in state:
            hash_leaves(digest, one)
    elif hasattr(state, "numpy"):
        digest.update(state.detach().contiguous().numpy().tobytes())
    else:
        digest.update(repr(state).encode())


def main() -> None:
    """Measures and reports."""
    parser = report.parser(__doc__, threads=(1,))
    sections: dict[str, Callable] = {"equality": equality, "deaths": deaths}
    parser.add_argument("what", choices=sections)
    parser.add_argument("--seeds", type=int, default=3, help="random seeds of the deaths")
    args = parser.parse_args()
    if args.quick:
        args.write, args.seeds = False, 1
    report.be_quiet()
    found = sections[args.what](args)
    name = f"shards_{args.what}"
    report.publish(name, "Shards", found, {}, TEXTS[args.what], write=args.write)


if __name__ == "__main__":
    main()
