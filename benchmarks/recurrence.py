"""Memory over sequences: our recurrence against TorchRL's GRU and torch's own.

    python benchmarks/recurrence.py --write

Forward and backward of a GRU over 64 windows of three agents (192 rows), 64 units. Each agent is
reset with a probability of 1 % a step. Gradients of all parameters:

- *torchrl_marl*: ``modules.memory.GRU``, one operation with a handwritten gradient;
- *the loop*: the same cell step by step, by autograd;
- *TorchRL, pad*: ``GRUModule`` in recurrent mode, its default, rows split at resets and padded;
- *TorchRL, scan*: the same with ``recurrent_backend="scan"``;
- *torch, no starts*: ``torch.nn.GRU``, which cannot reset within a sequence.

All candidates with resets are checked against the loop before they are timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import report

N_WINDOWS, N_AGENTS, N_UNITS = 64, 3, 64
OURS, LOOP, PAD, SCAN = "torchrl_marl", "the loop", "TorchRL, pad", "TorchRL, scan"
WITHOUT = "torch, no starts"


def candidates(n_steps: int) -> dict[str, Callable[[], list[Any]]]:
    """Name -> forward and backward, giving output ``[T, R, H]`` and gradients."""
    import torch
    from tensordict import TensorDict
    from torch import nn
    from torchrl.modules import GRUModule, set_recurrent_mode

    from torchrl_marl.modules.memory import GRU
    from torchrl_marl.modules.memory.gru import gru_loop

    torch.manual_seed(0)
    n_rows = N_WINDOWS * N_AGENTS
    x = torch.randn(n_steps, n_rows, N_UNITS)
    init = torch.rand(n_steps, n_rows, 1) < 0.01
    init[0] = True  # TorchRL takes what is stored at a start, and forgets nothing itself
    target = torch.randn(n_steps, n_rows, N_UNITS)
    ours = GRU(N_UNITS, N_UNITS)
    torch_gru = nn.GRU(N_UNITS, N_UNITS, batch_first=True)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            kind, part = name.split(".")
            getattr(torch_gru, f"{part}_{kind}_l0").copy_(parameter[0])

    def of_agents(y: Any) -> Any:
        return y.unflatten(1, (N_WINDOWS, N_AGENTS))

    def finished(y: Any, module: nn.Module) -> list[Any]:
        gradients = torch.autograd.grad((y * target).sum(), list(module.parameters()))
        return [y.detach(), *gradients]

    def run_module() -> list[Any]:
        state = x.new_zeros(N_WINDOWS, N_AGENTS, N_UNITS)
        return finished(ours(of_agents(x), state, of_agents(init), None)[0].flatten(1, 2), ours)

    def run_loop() -> list[Any]:
        keep = (~init).float().unsqueeze(1)
        state = x.new_zeros(1, n_rows, N_UNITS)
        rows = gru_loop(x.unsqueeze(1), state, keep, None, *ours.weights(x))
        return finished(rows.squeeze(1), ours)

    def run_torchrl(backend: str) -> Callable[[], list[Any]]:
        module = GRUModule(
            gru=torch_gru,
            in_keys=["x", "state"],
            out_keys=["y", ("next", "state")],
            recurrent_backend=backend,
        )
        rows, begins = x.transpose(0, 1).contiguous(), init.transpose(0, 1).contiguous()
        state = torch.zeros(n_rows, n_steps, 1, N_UNITS)

        def run() -> list[Any]:
            steps = TensorDict({"x": rows, "state": state, "is_init": begins}, [n_rows, n_steps])
            with set_recurrent_mode(True):
                return finished(module(steps)["y"].transpose(0, 1), torch_gru)

        return run

    def without_starts() -> list[Any]:
        return finished(torch_gru(x.transpose(0, 1))[0].transpose(0, 1), torch_gru)

    return {
        OURS: run_module,
        LOOP: run_loop,
        PAD: run_torchrl("pad"),
        SCAN: run_torchrl("scan"),
        WITHOUT: without_starts,
    }


def measure(args: argparse.Namespace) -> list[list[str]]:
    """A row for every length and candidate."""
    import torch

    rows = []
    for n_steps in args.steps:
        runs = candidates(n_steps)
        expected = runs[LOOP]()
        for name in (OURS, PAD, SCAN):
            torch.testing.assert_close(runs[name]()[0], expected[0], atol=1e-5, rtol=1e-4)
        timings = report.alternate(runs, args.rounds, seconds=args.seconds, warmup=2)
        rows += [
            [
                f"{n_steps}",
                name,
                f"{1e3 * timings.median(name):.1f}",
                *(timings.ratio_text(name, other) for other in (PAD, SCAN, WITHOUT)),
                timings.rounds(),
            ]
            for name in runs
        ]
    return rows


def main() -> None:
    """Measures and reports."""
    parser = report.parser(__doc__, threads=(1,))
    parser.add_argument("--steps", type=int, nargs="+", default=[16, 32, 100])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="time limit of a sequence length"
    )
    args = parser.parse_args()
    if args.quick:
        args.write, args.rounds, args.steps = False, 2, [4]
    header = ["steps", "", "ms", *(f"times {x}" for x in (PAD, SCAN, WITHOUT)), "rounds"]
    sections = [
        (f"Forward and backward, {report.count_of(n, 'thread')}",
         report.markdown_table(header, rows))
        for n, rows in report.for_each_number_of_threads(measure, args.threads, args).items()
    ]  # fmt: skip
    report.publish(
        "recurrence",
        "Memory over sequences",
        sections,
        {"rows": N_WINDOWS * N_AGENTS, "units": N_UNITS},
        __doc__.split("\n\n", 2)[2]
        + """
        All alternate in one process, in random order every round; milliseconds are medians over the
        rounds, "times" is the median (and the quartiles) of the rounds' ratios.""",
        write=args.write,
    )


if __name__ == "__main__":
    main()
