"""Module stacks against TorchRL's MultiAgentMLP, the Python loop, and one call per structure.

    python benchmarks/module_stack.py --write

Forward and backward of one perceptron 64-128-128-8 (tanh) for each agent, no shared parameters:

- *stack*: ``torchrl_marl.modules.stack`` of the agents' modules;
- *MultiAgentMLP*: TorchRL's, ``share_params=False, use_td_params=False``, the faster way;
- *MultiAgentMLP, default*: the same with its default ``use_td_params=True``;
- *loop*: the modules one after the other over ``x.unbind(1)``, then ``torch.stack``.

Mixed widths: 8 agents whose inputs (34 to 64), hidden layers (128, or 64 to 128) and outputs (2 to
8) differ, so that each is a structure of its own:

- *padded*: ``stack(..., pad=True)``, dense padded input and output;
- *padded, lists*: the same, with a list of the agents' tensors as input and output;
- *stack*: ``stack(...)`` without padding, lists, one call for each structure;
- *calls*: the modules called one by one, lists.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import report

if TYPE_CHECKING:
    from torch import Tensor, nn

# glibc hands large blocks back to the system after each use; page faults would then be measured.
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**33),
    "MALLOC_TOP_PAD_": str(2**28),
}
WIDTHS = (64, 128, 128, 8)
OURS = "stack"
BASELINES = ("MultiAgentMLP", "MultiAgentMLP, default", "loop")
MIXED_BASELINES = ("stack", "calls")
HIDDEN = {"equal hidden": (128,) * 8, "hidden differ": (64, 72, 80, 88, 96, 104, 112, 128)}


def make_mlp(widths: Sequence[int]) -> nn.Module:
    """Linear maps with tanh between them."""
    from torch import nn

    layers: list[nn.Module] = []
    for i, o in zip(widths, widths[1:]):
        layers += [nn.Linear(i, o), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def forward_and_backward(
    forward: Callable[[], Tensor | list[Tensor]], parameters: Iterable[Tensor]
) -> Callable[[], None]:
    """A forward and a backward from a drawn gradient; gradients do not accumulate."""
    import torch

    parameters = list(parameters)
    first = forward()
    gradients = [torch.randn_like(y) for y in (first if isinstance(first, list) else [first])]

    def run() -> None:
        y = forward()
        torch.autograd.backward(y, gradients if isinstance(y, list) else gradients[0])
        for parameter in parameters:
            parameter.grad = None

    return run


def candidates(n_agents: int, batch: int) -> dict[str, Callable[[], None]]:
    """What is compared on equal widths; outputs of stack and loop agree."""
    import torch
    from torch import nn
    from torchrl.modules import MultiAgentMLP

    from torchrl_marl.modules import stack

    torch.manual_seed(0)
    x = torch.randn(batch, n_agents, WIDTHS[0])
    modules = [make_mlp(WIDTHS) for _ in range(n_agents)]
    stacked = stack(modules)
    networks = {
        name: MultiAgentMLP(
            n_agent_inputs=WIDTHS[0],
            n_agent_outputs=WIDTHS[-1],
            n_agents=n_agents,
            centralized=False,
            share_params=False,
            num_cells=list(WIDTHS[1:-1]),
            activation_class=nn.Tanh,
            use_td_params="default" in name,
        )
        for name in BASELINES[:2]
    }

    def loop() -> Tensor:
        return torch.stack([module(row) for module, row in zip(modules, x.unbind(1))], 1)

    torch.testing.assert_close(stacked(x), loop(), rtol=1e-5, atol=1e-5)
    runs = {OURS: forward_and_backward(lambda: stacked(x), stacked.parameters())}
    for name, network in networks.items():
        runs[name] = forward_and_backward(lambda network=network: network(x), network.parameters())
    runs["loop"] = forward_and_backward(
        loop, [p for module in modules for p in module.parameters()]
    )
    return runs


def mixed_candidates(hidden: Sequence[int], batch: int) -> dict[str, Callable[[], None]]:
    """What is compared on mixed widths; all outputs agree."""
    import torch

    from torchrl_marl.modules import stack

    torch.manual_seed(0)
    ends = zip((34, 38, 42, 46, 50, 54, 60, 64), hidden, (2, 3, 4, 5, 6, 7, 8, 8))
    widths = [(i, h, h, o) for i, h, o in ends]
    modules = [make_mlp(w) for w in widths]
    inputs = [torch.randn(batch, w[0]) for w in widths]
    dense = torch.zeros(batch, len(widths), WIDTHS[0])
    for agent, x in enumerate(inputs):
        dense[:, agent, : x.shape[-1]] = x
    padded, separate = stack(modules, pad=True), stack(modules)

    def calls() -> list[Tensor]:
        return [module(x) for module, x in zip(modules, inputs)]

    for agent, expected in enumerate(calls()):
        for found in (padded(inputs)[agent], separate(inputs)[agent], padded(dense)[:, agent]):
            unpadded = found[..., : expected.shape[-1]]
            torch.testing.assert_close(unpadded, expected, rtol=1e-5, atol=1e-5)
    return {
        "padded": forward_and_backward(lambda: padded(dense), padded.parameters()),
        "padded, lists": forward_and_backward(lambda: padded(inputs), padded.parameters()),
        "stack": forward_and_backward(lambda: separate(inputs), separate.parameters()),
        "calls": forward_and_backward(
            calls, [p for module in modules for p in module.parameters()]
        ),
    }


def count_operations(run: Callable[[], None]) -> int:
    """Operations that PyTorch dispatches, views included."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):
        n = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.n += 1
            return func(*args, **(kwargs or {}))

    with Counter() as counter:
        run()
    return counter.n


def measure(args: argparse.Namespace) -> dict[str, list[list[Any]]]:
    """The rows of all tables."""
    rows: dict[str, list[list[Any]]] = {"speed": [], "agents": [], "mixed": []}
    for n_agents in args.agents:
        for batch in args.batches:
            runs = candidates(n_agents, batch)
            timings = time_candidates(runs, args)
            ratios = [timings.ratio_text(OURS, other) for other in BASELINES]
            took = f"{1e3 * timings.median(OURS):.3f}"
            rows["speed"].append([n_agents, f"{batch:,}", took, *ratios, timings.rounds()])
    rows["agents"] = rows_by_agents(args)
    for kind, hidden in HIDDEN.items():
        for batch in args.mixed_batches:
            timings = time_candidates(mixed_candidates(hidden, batch), args)
            for name in ("padded", "padded, lists"):
                ratios = [timings.ratio_text(name, other) for other in MIXED_BASELINES]
                took = f"{1e3 * timings.median(name):.3f}"
                rows["mixed"].append([kind, f"{batch:,}", name, took, *ratios])
    return rows


def rows_by_agents(args: argparse.Namespace) -> list[list[Any]]:
    """Operations and cost per agent; all sizes are timed in the same rounds."""
    runs = {n: candidates(n, args.batch) for n in args.agents}
    timings = time_candidates(
        {str(n): candidates_of_size[OURS] for n, candidates_of_size in runs.items()}, args
    )
    fewest = str(min(args.agents))
    return [
        [
            n,
            *(
                count_operations(candidates_of_size[name])
                for name in (OURS, "MultiAgentMLP", "loop")
            ),
            f"{1e6 * timings.median(str(n)) / n:.1f}",
            f"{n / int(fewest) * timings.ratio(str(n), fewest):.2f}",
        ]
        for n, candidates_of_size in runs.items()
    ]


def time_candidates(
    runs: dict[str, Callable[[], None]], args: argparse.Namespace
) -> report.Timings:
    """All side by side."""
    return report.alternate(runs, args.rounds, seconds=args.seconds, warmup=3)


def main() -> None:
    """Measures and reports."""
    parser = report.parser(__doc__)
    parser.add_argument("--agents", type=int, nargs="+", default=[4, 8, 16, 64])
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 32, 256, 1024, 4096])
    parser.add_argument("--mixed-batches", type=int, nargs="+", default=[8, 32, 1024])
    parser.add_argument("--batch", type=int, default=32, help="batch size for the cost per agent")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=8.0, help="time limit of one size")
    args = parser.parse_args()
    if args.quick:
        args.write = False
        args.agents, args.batches, args.mixed_batches, args.rounds = [2, 4], [8], [8], 2
    os.environ.update(ALLOCATOR)  # read by the measuring processes when they start
    header = ["agents", "batch", "stack, ms", *(f"times {other}" for other in BASELINES), "rounds"]
    by_agents = [
        "agents",
        *(f"operations, {name}" for name in (OURS, "MultiAgentMLP", "loop")),
        "stack, us an agent",
        f"times the cost per agent at {min(args.agents)}",
    ]
    mixed = ["", "batch", "", "ms", *(f"times {other}" for other in MIXED_BASELINES)]
    sections = []
    for n, rows in report.for_each_number_of_threads(measure, args.threads, args).items():
        threads = report.count_of(n, "thread")
        sections += [
            (f"Equal widths, {threads}", report.markdown_table(header, rows["speed"])),
            (
                f"By number of agents, batch {args.batch}, {threads}",
                report.markdown_table(by_agents, rows["agents"]),
            ),
            (f"Mixed widths, {threads}", report.markdown_table(mixed, rows["mixed"])),
        ]
    report.publish(
        "module_stack",
        "Module stacks",
        sections,
        {
            "network": "-".join(map(str, WIDTHS)) + ", tanh, float32",
            "allocator": ", ".join(f"{name}={value}" for name, value in ALLOCATOR.items()),
        },
        """A measurement is a forward, and a backward from a drawn gradient of the output; gradients
        are dropped after each. All candidates of a size run in one process, one after the other in
        random order every round (a short one several times in a row); milliseconds are medians over
        the rounds, "times" is the median (and the quartiles) of the rounds' ratios: how many times
        faster than the baseline. The cost per agent of all sizes is timed in the same rounds; above
        1 is cheaper than at the fewest agents. Operations are those that PyTorch dispatches in a
        forward and a backward, views included. glibc's allocator is told to keep its memory:
        otherwise page faults on large activations are what is measured. The outputs of all
        candidates with equal parameters are compared before.""",
        write=args.write,
    )


if __name__ == "__main__":
    main()
