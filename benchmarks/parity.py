"""Agreement of captured VMAS steps with stock VMAS, scenario by scenario.

    python benchmarks/parity.py --compiled --write

Stock VMAS and the graph of its step run in lockstep: before each step the graph is set to the
state of stock VMAS. "traced" runs the graph operation by operation and must agree bitwise in all
state, observations, rewards, dones and infos; "compiled" must agree within 1e-4. A second graph
continues from its own results ("drift"). All envs or some are reset during the run. A graph is
recorded again when a reset changes the simulator's objects.
"""

from __future__ import annotations

import argparse
import ast
import logging
from collections.abc import Sequence
from typing import Any

import report

SCENARIOS = """
    simple simple_adversary simple_crypto simple_push simple_reference simple_speaker_listener
    simple_spread simple_tag simple_world_comm balance ball_passage ball_trajectory buzz_wire
    discovery discovery(targets_respawn=False) dispersion dropout flocking football
    football(ai_red_agents=False) give_way joint_passage joint_passage_size multi_give_way
    navigation passage reverse_transport road_traffic sampling transport wheel wind_flocking
    asym_joint circle_trajectory diff_drive drone goal het_mass kinematic_bicycle line_trajectory
    pollock vel_control waterfall
"""
TOLERANCE = 1e-4


class Walk:
    """One scenario, stock and captured side by side.

    Args:
        scenario (str): a name, or ``name(argument=value)``.
        args (Namespace): sizes.
        execution ("trace" or "compile"): how the graph runs.
    """

    def __init__(self, scenario: str, args: argparse.Namespace, execution: str) -> None:
        import torch

        from torchrl_marl.envs.vmas.build import build_simulator, import_vmas, warm_up
        from torchrl_marl.envs.vmas.capture import without_branches
        from torchrl_marl.runtime.random_state import RandomState
        from torchrl_marl.simulator.captured import CapturedSimulator
        from torchrl_marl.simulator.state import SimulatorState

        import_vmas()
        torch.manual_seed(args.seed)
        name, arguments = parse(scenario)
        arguments |= {"max_steps": 100, "terminated_truncated": True, "continuous_actions": True}

        def build(num_envs: int) -> Any:
            env = build_simulator(name, num_envs, torch.device("cpu"), arguments, True)
            warm_up(env, True)
            return env

        state = SimulatorState(build, exclude=("viewer", "visible_display", "text_lines"))
        self.env = env = build(args.envs)
        self.captured = CapturedSimulator(
            env,
            state,
            lambda: warm_up(env, True),
            RandomState(args.seed),
            lambda: without_branches(env),
        )
        self.args, self.execution = args, execution
        self.graphs: dict[str, Any] = {}
        self.differing: set[str] = set()
        self.largest = self.drift = 0.0

    def graph(self, actions: Sequence[Any]) -> Any:
        """The graph of the simulator as it is now."""
        import torch.utils._pytree as pytree

        from torchrl_marl.envs.vmas.build import advance

        def step(*actions: Any) -> list:
            advance(self.env, actions)
            return pytree.tree_leaves(self.env._get_from_scenario(True, True, True, True))

        structure = self.captured.signature()
        if structure not in self.graphs:
            self.graphs[structure] = self.captured.capture(
                step, *actions, name="a step", execution=self.execution
            )
        return self.graphs[structure]

    def run(self) -> Any:
        """All steps; the last graph."""
        import torch

        packing, captured_state = self.captured.packing, None
        for t in range(self.args.steps):
            captured_state = None if self.reset(t) else captured_state
            actions = self.env.get_random_actions()
            graph = self.graph(actions)
            before = packing.read(self.env)
            rng = torch.get_rng_state()
            outputs = type(self.env).step.__wrapped__(self.env, [x.clone() for x in actions])
            state, rng_after = packing.read(self.env), torch.get_rng_state()
            torch.set_rng_state(rng)
            self.compare(state, outputs, graph.flat([*before, *actions]))
            torch.set_rng_state(rng)
            captured_state = graph.flat([*(captured_state or before), *actions])[: len(state)]
            self.drift = max(self.drift, *map(largest, state, captured_state))
            torch.set_rng_state(rng_after)
        for graph in self.graphs.values():
            graph.raise_failed()
        return graph

    def reset(self, t: int) -> bool:
        """Before step ``t``: all envs at times, a quarter of them at others."""
        import torch

        everywhere = t % max(1, self.args.steps // 3) == 0
        if not everywhere and t % 7 != 5:
            return False
        packing = self.captured.packing
        before = packing.read(self.env)
        self.env._reset(return_observations=False)
        if not everywhere:
            envs = torch.rand(self.args.envs) < 0.25
            starts = packing.read(self.env)
            n = len(packing)
            merged = [torch.where(envs, x, y) for x, y in zip(starts[:n], before)]
            packing.write(self.env, merged + starts[n:])
        return True

    def compare(self, state: list, outputs: Any, found: list) -> None:
        """Notes what differs."""
        import torch
        import torch.utils._pytree as pytree

        packing, n = self.captured.packing, len(state)
        for path, stock in pytree.tree_flatten_with_path(outputs)[0]:
            self._compare("read" + pytree.keystr(path), stock, found[n])
            n += 1
        assert n == len(found)
        if not all(map(equal, state, found)):
            for path in packing.paths:
                of_path = packing.rows_of(frozenset([path]), torch.device("cpu"))
                for rows, stock, captured in zip(of_path, state, found):
                    rows = rows.squeeze(-1)
                    self._compare(".".join(path), stock[rows], captured[rows])
        for i in range(len(packing), len(state)):
            self._compare("shared", state[i], found[i])

    def _compare(self, name: str, stock: Any, found: Any) -> None:
        if not equal(stock, found):
            self.differing.add(name)
            self.largest = max(self.largest, largest(stock, found))


def parse(scenario: str) -> tuple[str, dict[str, Any]]:
    """The name and the arguments in ``name(argument=value)``."""
    call = ast.parse(scenario, mode="eval").body
    if not isinstance(call, ast.Call):
        return scenario, {}
    return ast.unparse(call.func), {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}


def equal(a: Any, b: Any) -> bool:
    """To the bit, where NaN is NaN."""
    same = a == b
    if a.is_floating_point():
        same = same | (a.isnan() & b.isnan())
    return a.dtype == b.dtype and a.shape == b.shape and bool(same.all())


def largest(a: Any, b: Any) -> float:
    """The largest deviation, where magnitudes above one count relatively."""
    if not a.numel():
        return 0.0
    a, b = a.double(), b.double()
    deviation = (a - b).abs() / (1 + b.abs())
    same = (a == b) | (a.isnan() & b.isnan())
    return deviation.masked_fill(same, 0.0).nan_to_num(float("inf")).max().item()


def measure(args: argparse.Namespace) -> list[list[str]]:
    """The rows of all scenarios."""
    return [row(scenario, args) for scenario in args.scenarios]


def row(scenario: str, args: argparse.Namespace) -> list[str]:
    """One scenario's row."""
    from torchrl_marl.errors import UserError

    cells = [scenario]
    try:
        walk = Walk(scenario, args, "trace")
        last = walk.run()
    except UserError as refusal:
        return print_row([scenario, "refused", str(refusal)] + [""] * 6)
    verdict = "to the bit" if not walk.differing else f"differs by {walk.largest:.0e}"
    cells += [verdict, ", ".join(sorted(walk.differing)[:3]), str(last.n_operations)]
    cells += [f"{last.seconds:.1f}", str(len(walk.graphs))]
    if not args.compiled:
        return print_row(cells + [""] * 3)
    compiled = Walk(scenario, args, "compile")
    last = compiled.run()
    within = "yes" if compiled.largest <= TOLERANCE else "NO"
    cells += [f"{within} ({compiled.largest:.0e}; drift {compiled.drift:.0e})"]
    cells += [str(last.n_kernels), f"{last.seconds:.1f}"]
    return print_row(cells)


def print_row(cells: list[str]) -> list[str]:
    """Shows it at once: all scenarios take long."""
    import sys

    print(" | ".join(cells), file=sys.stderr, flush=True)
    return cells


def main() -> None:
    """Measures and reports."""
    parser = report.parser(__doc__, threads=(1,))
    parser.add_argument("--scenarios", nargs="+", default=SCENARIOS.split())
    parser.add_argument("--compiled", action="store_true", help="also test the compiled graph")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--envs", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.quick:
        args.write, args.steps, args.envs = False, 6, 4
    logging.getLogger("torchrl_marl.capture").setLevel(logging.WARNING)
    header = ["scenario", "traced", "what differs, or why it is refused", "operations"]
    header += ["trace s", "graphs", f"compiled within {TOLERANCE:.0e}", "kernels", "compile s"]
    measured = report.for_each_number_of_threads(measure, args.threads, args)
    report.publish(
        "parity",
        "A captured VMAS step against the stock one",
        [
            (report.count_of(n, "thread"), report.markdown_table(header, rows))
            for n, rows in measured.items()
        ],
        {"walk": f"{args.steps} steps of {args.envs} envs, random actions, seed {args.seed}"},
        __doc__.split("\n\n", 2)[2],
        write=args.write,
    )


if __name__ == "__main__":
    main()
