"""`simple_spread` learned through external clients, against the same recipe in one process.

Run: python benchmarks/external_spread.py [--frames 160000] [--seeds 0 1 2] [--write]

Eight clients (the Python client around mpe2's environment, in two processes) play the task of the
recipe pettingzoo_simple_spread_mappo; learner, number of rows and frames are equal. The return of
the last tenth of training (sampled actions) is compared seed by seed. Frames/s include the clients,
the learning and any other load of the machine.
"""

from __future__ import annotations

import csv
import multiprocessing
import socket
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import report

import torchrl_marl

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "clients" / "python"))
RECIPE = "pettingzoo_simple_spread_mappo"
N_CLIENTS, N_PROCESSES, NUM_ENVS = 8, 2, 16


def play(port: int, numbers: list[int]) -> None:
    """Plays mpe2's simple_spread with several clients of this process, until the server is gone."""
    threads = [threading.Thread(target=play_one, args=(port, i), daemon=True) for i in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def play_one(port: int, number: int) -> None:
    from mpe2 import simple_spread_v3
    from torchrl_marl_client import Client

    env = simple_spread_v3.parallel_env(continuous_actions=False)
    agents = {"agent": {"n": 3, "observation": 18, "action": {"n_actions": 5}}}
    client = Client(port=port, agents=agents, name=f"spread{number}", patience=120.0)
    seed = 1000 * number
    try:
        while True:
            seed += 1
            observations, _ = env.reset(seed=seed)
            actions = client.begin(observations)
            while env.agents:
                observations, rewards, ended, truncated, _ = env.step(actions)
                if env.agents:
                    actions = client.step(observations, rewards)
            client.end(rewards, truncated=not all(ended.values()), observations=observations)
    except (OSError, EOFError, RuntimeError):
        return


def settings(seed: int, frames: int, folder: Path) -> dict:
    """What both have in common."""
    return {
        "seed": seed,
        "threads": 1,
        "total_frames": frames,
        "folder": str(folder),
        "evaluation.episodes": 0,
        "logging.progress": False,
    }


def in_process(seed: int, frames: int, folder: Path) -> tuple[float, float]:
    """Returns the return at the end, and the seconds, of the recipe as it is."""
    env = {"num_envs": NUM_ENVS, "workers": 0}
    return measure_training(torchrl_marl.train, RECIPE, env=env, **settings(seed, frames, folder))


def through_clients(seed: int, frames: int, folder: Path) -> tuple[float, float]:
    """The same through clients."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    shares = [list(range(i, N_CLIENTS, N_PROCESSES)) for i in range(N_PROCESSES)]
    clients = [context.Process(target=play, args=(port, own), daemon=True) for own in shares]
    for client in clients:
        client.start()
    own = {"library": "external", "name": "spread", "num_envs": NUM_ENVS, "workers": 0}
    env = {**own, "max_steps": 100, "continuous_actions": True, "kwargs": {"port": port}}
    try:
        return measure_training(
            torchrl_marl.train, RECIPE, env=env, **settings(seed, frames, folder)
        )
    finally:
        for client in clients:
            client.terminate()
            client.join()


def measure_training(train, *args, **kwargs) -> tuple[float, float]:
    began = time.perf_counter()
    run = train(*args, **kwargs)
    seconds = time.perf_counter() - began
    with (run.folder / "metrics.csv").open(newline="") as file:
        returns = [float(row["agent/episode_reward"]) for row in csv.DictReader(file)]
    last = returns[-max(1, len(returns) // 10) :]
    return sum(last) / len(last), seconds


def main() -> None:
    """Trains both ways and reports."""
    warnings.simplefilter("ignore")
    parser = report.parser(__doc__, threads=(1,))
    parser.add_argument("--frames", type=int, default=160_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    if args.quick:
        args.write, args.frames, args.seeds = False, 3200, [0]
    rows, found = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for name, train in (("in this process", in_process), ("8 clients", through_clients)):
            results = [train(s, args.frames, Path(folder) / f"{name[0]}{s}") for s in args.seeds]
            found[name] = [value for value, _ in results]
            listed = ", ".join(f"{value:.2f}" for value in found[name])
            seconds = sum(train_seconds for _, train_seconds in results) / len(results)
            mean = f"{sum(found[name]) / len(results):.2f}"
            rows.append([name, listed, mean, f"{args.frames / seconds:,.0f}"])
            print(rows[-1], flush=True)
    header = ["where the environment runs", "return, by seed", "mean", "frames/s"]
    section = f"{args.frames:,} frames", report.markdown_table(header, rows)
    report.publish(
        "external_spread",
        "simple_spread through external clients",
        [section, ("Within the range?", verdict(*found.values()))],
        {"rows of a batch": NUM_ENVS, "clients": f"{N_CLIENTS} in {N_PROCESSES} processes"},
        __doc__.split("\n\n", 2)[2],
        write=args.write,
    )


def verdict(in_process_returns: list[float], client_returns: list[float]) -> str:
    """Says whether what clients reach lies in the range of the seeds in process."""
    mean, low, high = (
        sum(client_returns) / len(client_returns),
        min(in_process_returns),
        max(in_process_returns),
    )
    place = "within" if low <= mean <= high else "above" if mean > high else "below"
    return (
        f"The clients' mean, {mean:.2f}, is {place} the range of the seeds in this process, "
        f"{low:.2f} to {high:.2f}."
    )


if __name__ == "__main__":
    main()
