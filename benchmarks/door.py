"""Cost of serving external simulators: latency with 1, 8 and 64 clients, and bad clients.

python benchmarks/door.py --write
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import report

CLIENTS = Path(__file__).parent / "door_clients.py"
TEXT = """A server with an actor of two layers of 64 for 3 agents that see 18 numbers and do 2
    things, drawn, in a process of its own with one thread of torch; clients on the same machine, in
    another process, send their next step as soon as they are answered, and share the
    machine's cores with it. A round trip is from a step's sending to its answer, decoded. The
    server's time is its process's, all threads, over the steps that were answered. Who
    disturbs runs in a process of its own beside 8 clients: `bad` comes with random bytes 100
    times a second, `flood` sends one step again as often as the line takes it, `slow reader`
    does so and never reads."""
EXECUTIONS = ("compile", "trace", "eager")


@contextlib.contextmanager
def serve_policy(execution: str) -> Iterator[Any]:
    """Gives a server behind a door."""
    import numpy as np
    import torch
    from door_clients import AGENTS
    from torchrl.envs.utils import ExplorationType

    from torchrl_marl import TeamSpec
    from torchrl_marl.apps.external import ActionServer, Declared, Listener
    from torchrl_marl.apps.external.client_slots import ClientSlots
    from torchrl_marl.apps.external.graph_acting import GraphActing
    from torchrl_marl.modules import make_actor

    torch.set_num_threads(1)
    torch.manual_seed(0)
    declared = Declared.read(AGENTS)
    team: TeamSpec = declared.declaration("bench", 1).team
    acting = GraphActing(make_actor(team.groups["walker"]), execution=execution)
    acting.prepare(ClientSlots(declared, 1).inputs(np.zeros(1, int)), ExplorationType.RANDOM)
    door = Listener(ActionServer(declared, acting))
    door.ask(torch.set_num_threads, 1)
    try:
        yield door
    finally:
        door.close()


def play_clients(door: Any, n: int, seconds: float) -> dict[str, float]:
    """Lets n clients play, and returns what it took them and the server."""
    command = [sys.executable, str(CLIENTS), "play", str(door.port), str(n), str(seconds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    found: dict[str, Any] = {}
    counts = door.server.counts
    for line in process.stdout:
        message = json.loads(line)
        if message.get("now") == "measured":
            cpu, steps, batches = time.process_time(), counts["steps"], counts["batches"]
        elif message.get("now") == "over":
            cpu, steps = time.process_time() - cpu, counts["steps"] - steps
            batches = counts["batches"] - batches
        else:
            found = message
    process.wait()
    return {**found, "cpu": cpu / steps * 1e6, "batch": steps / batches}


def latencies(args: argparse.Namespace) -> list[list[str]]:
    """A row for each number of clients and each execution."""
    rows = []
    for execution in args.executions:
        with serve_policy(execution) as door:
            for n in args.clients:
                found = play_clients(door, n, args.seconds)
                rows.append([execution, str(n), *_format_cells(found)])
    return rows


def _format_cells(found: dict[str, float]) -> list[str]:
    return [
        f"{found['rate']:,.0f}",
        f"{found['p50']:.2f}",
        f"{found['p99']:.2f}",
        f"{found['batch']:.1f}",
        f"{found['cpu']:.0f}",
        f"{found['client_cpu']:.0f}",
    ]


def measure_disturbances(args: argparse.Namespace) -> list[list[str]]:
    """Returns a row for 8 clients alone, and one beside each kind of disturbing client."""
    rows, undisturbed = [], 0.0
    with serve_policy(args.executions[0]) as door:
        for disturber in ("nobody", "bad", "flood", "slow"):
            with _running_disturber(disturber, door.port):
                found = play_clients(door, 8, args.seconds)
            undisturbed = undisturbed or found["p50"]
            name = "slow reader" if disturber == "slow" else disturber
            rows.append([name, *_format_cells(found)[:3], f"{found['p50'] / undisturbed:.2f}"])
    return rows


@contextlib.contextmanager
def _running_disturber(disturber: str, port: int) -> Iterator[None]:
    if disturber == "nobody":
        yield
        return
    process = subprocess.Popen([sys.executable, str(CLIENTS), disturber, str(port)])
    time.sleep(0.5)
    try:
        assert process.poll() is None
        yield
    finally:
        process.kill()
        process.wait()


def main() -> None:
    """Measures and reports."""
    parser = report.parser(__doc__, threads=(1,))
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--executions", nargs="+", choices=EXECUTIONS, default=list(EXECUTIONS))
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds of each row")
    args = parser.parse_args()
    if args.quick:
        args.write, args.seconds, args.executions = False, 0.5, ["trace"]
    header = ["steps/s", "p50 ms", "p99 ms"]
    load_columns = ["a batch", "server us a step", "client us a step"]
    sections = [
        (
            "Clients",
            report.markdown_table(["policy", "clients", *header, *load_columns], latencies(args)),
        ),
        (
            "8 clients beside somebody who disturbs",
            report.markdown_table(
                ["beside them", *header, "times p50 alone"], measure_disturbances(args)
            ),
        ),
    ]
    report.publish("door", "A door", sections, {}, TEXT, write=args.write)


if __name__ == "__main__":
    main()
