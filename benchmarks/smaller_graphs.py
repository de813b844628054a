"""Costs of a simulator's step as a recorded, a simplified and a batched graph.

    python benchmarks/smaller_graphs.py --write

For each VMAS scenario and number of agents, one process compiles the three graphs of a step, each
with an empty cache. Then the compiled steps are timed in turn. A step has no policy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import report

FORMS = ("recorded", "simplified", "batched")
CASES = [
    ("navigation", 4),
    ("navigation", 8),
    ("navigation", 16),
    ("flocking", 4),
    ("flocking", 8),
    ("sampling", 4),
    ("simple_spread", 4),
    ("simple_spread", 8),
    ("balance", 4),
]
METHOD = """One process for each scenario and number of agents. Compiling includes recording and
making the graph smaller, and begins with an empty cache. The three compiled steps are timed in
turn, 20 calls at a time; the ratio is the median of the ratios of a turn."""
HEADER = (
    "scenario",
    "agents",
    "envs",
    "graph",
    "operations",
    "kernels",
    "compiling, s",
    "step, ms",
    "ratio to recorded",
)


def compile_form(form: str, scenario: str, n_agents: int, n_envs: int) -> Any:
    """Compiles a step in one form with an empty cache; its program, inputs and seconds."""
    import torch
    import torch.utils._pytree as pytree

    from torchrl_marl.capture import reduction
    from torchrl_marl.envs import VmasEnv
    from torchrl_marl.simulator import captured

    reduce_graph = reduction.reduce_graph
    reduction.batching_pays = lambda simplified, batched: form == "batched"
    reduction.reduce_graph = (lambda module, *_: module) if form == "recorded" else reduce_graph
    env = VmasEnv(scenario, num_envs=n_envs, seed=0, n_agents=n_agents, execution="compile")
    found: list[Any] = []
    compile_trace = captured.compile_trace

    def recording_compile(traced: Any, *inputs: Any, **kwargs: Any) -> Any:
        program = compile_trace(traced, *inputs, **kwargs)
        leaves = [x.clone() for x in pytree.tree_leaves(inputs)]
        found[:] = [program, leaves, program.seconds]
        return program

    captured.compile_trace = recording_compile
    with tempfile.TemporaryDirectory() as cache, torch.no_grad():
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        env.step(env.rand_action(env.reset()))
    captured.compile_trace, reduction.reduce_graph = compile_trace, reduce_graph
    return found


def child(scenario: str, n_agents: int, n_envs: int, threads: int, seconds: float) -> None:
    """Prints the measurements of one scenario as JSON."""
    import torch

    torch.set_num_threads(threads)
    report.be_quiet()
    found = {form: compile_form(form, scenario, n_agents, n_envs) for form in FORMS}
    times: dict[str, list[float]] = {form: [] for form in FORMS}
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        for form, (program, leaves, _) in found.items():
            began = time.perf_counter()
            for _ in range(20):
                program.flat(leaves)
            times[form].append((time.perf_counter() - began) / 20)
    for form, (program, _, compiling) in found.items():
        ratios = [x / y for x, y in zip(times[form], times["recorded"])]
        row = {
            "form": form,
            "operations": program.n_operations,
            "kernels": program.n_kernels,
            "compiling": compiling,
            "ms": statistics.median(times[form]) * 1e3,
            "ratio": statistics.median(ratios),
        }
        print(json.dumps(row), flush=True)


def measure(scenario: str, n_agents: int, args: argparse.Namespace) -> list[list[str]]:
    """Measures one scenario in a process of its own; a row for each graph."""
    child_args = [scenario, str(n_agents), str(args.envs), str(args.threads), str(args.seconds)]
    command = [sys.executable, str(Path(__file__)), "--child", *child_args]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [
        [
            scenario,
            str(n_agents),
            f"{args.envs:,}",
            row["form"],
            f"{row['operations']:,}",
            str(row["kernels"]),
            f"{row['compiling']:.0f}",
            f"{row['ms']:.2f}",
            f"{row['ratio']:.2f}",
        ]
        for row in rows
    ]


def main() -> None:
    """Measures all cases."""
    if sys.argv[1:2] == ["--child"]:
        scenario, n_agents, n_envs, threads, seconds = sys.argv[2:]
        return child(scenario, int(n_agents), int(n_envs), int(threads), float(seconds))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--envs", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=10.0, help="of timing, per scenario")
    parser.add_argument("--only", nargs="*", help="scenarios, or scenario:agents")
    parser.add_argument("--write", action="store_true", help="write into benchmarks/results")
    args = parser.parse_args()
    rows = []
    for scenario, n_agents in CASES:
        if args.only and not {scenario, f"{scenario}:{n_agents}"} & set(args.only):
            continue
        rows += measure(scenario, n_agents, args)
        print(report.markdown_table(HEADER, rows[-len(FORMS) :]), flush=True)
    sections = [("Graphs of a step", report.markdown_table(HEADER, rows))]
    settings = {"envs": args.envs, "threads": args.threads}
    report_name = f"smaller_graphs_{args.envs}"
    report.publish(report_name, "Smaller graphs", sections, settings, METHOD, write=args.write)


if __name__ == "__main__":
    main()
