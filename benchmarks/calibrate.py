"""Limits of this machine, to compare measurements with.

    python benchmarks/calibrate.py --device cuda

Measures, in a separate process for each number of threads, the cost of launching an operation,
waiting for a value, copying a number to the device, and a node of a CUDA graph (a chain of 200 tiny
kernels), and the rates of memory copies and matrix products. :class:`Work` counts the bytes and
arithmetic that a piece of work needs at least; ``Work.seconds(rates)`` is the shortest time at
these rates. ``one_program.py`` prints each result as a fraction of that.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import report

CHAIN = 200  # kernels of the graph whose nodes are timed


@dataclasses.dataclass(frozen=True)
class Rates:
    """A machine's rates; None for what it has not.

    Examples:
        >>> h200 = Rates("cuda", 4.0, 4.3e12, {"tf32": 3.9e14, "float32": 5e13}, node=1.6)
        >>> h200.matmul()
        390000000000000.0
    """

    device: str
    launch: float
    """Microseconds of an operation on a tiny tensor."""
    copy: float
    """Bytes per second, read and written, of a large copy."""
    flops: dict[str, float]
    """Type of number -> floating-point operations per second of a large matrix product."""
    sync: float | None = None
    """Microseconds of reading a value off the device."""
    upload: float | None = None
    """Microseconds of making a number a tensor of the device."""
    node: float | None = None
    """Microseconds of a tiny kernel in a CUDA graph."""

    def matmul(self) -> float:
        """Of products of float32 matrices, as fast as the device has them."""
        return self.flops.get("tf32", self.flops["float32"])


@dataclasses.dataclass(frozen=True)
class Work:
    """What must at least be done, fused as far as can be.

    Examples:
        >>> rates = Rates("cpu", 1.0, 1e10, {"float32": 1e11})
        >>> Work(bytes=1e10, flops=1e10, products=1e10).seconds(rates)
        1.0
        >>> (2 * Work(products=1e11)).seconds(rates)
        2.0
    """

    bytes: float = 0.0
    """Read and written in memory."""
    flops: float = 0.0
    """Outside matrix products."""
    products: float = 0.0
    """In matrix products."""

    def seconds(self, rates: Rates) -> float:
        """The least time: moving and computing go on side by side."""
        computing = self.flops / rates.flops["float32"] + self.products / rates.matmul()
        return max(self.bytes / rates.copy, computing)

    def __add__(self, other: Work) -> Work:
        own_fields, other_fields = dataclasses.astuple(self), dataclasses.astuple(other)
        return Work(*(a + b for a, b in zip(own_fields, other_fields)))

    def __rmul__(self, times: float) -> Work:
        return Work(*(times * x for x in dataclasses.astuple(self)))


# An env step with 4 agents: state read and written, observations, actions, rewards; arithmetic of
# the physics and, in navigation, of the rays.
_STEPS = {
    "balance": Work(bytes=520, flops=3e3),
    "navigation": Work(bytes=500, flops=5e3),
    "simple_spread": Work(bytes=500, flops=2e3),
}


def step_work(scenario: str, n_agents: int) -> Work:
    """An env step of a VMAS scenario.

    Examples:
        >>> step_work("balance", 4)
        Work(bytes=520.0, flops=3000.0, products=0.0)
    """
    return n_agents / 4 * _STEPS[scenario]


def mlp_flops(sizes: Sequence[int]) -> float:
    """Operations of a forward pass for one row.

    Examples:
        >>> mlp_flops([18, 256, 256, 4])
        142336.0
    """
    return float(sum(2 * a * b for a, b in zip(sizes, sizes[1:])))


def policy_work(observation: int, cells: Sequence[int], outputs: int, n_agents: int) -> Work:
    """Actions for one env step; activations stay in the chip.

    Examples:
        >>> policy_work(18, [256, 256], 4, 4).products
        569344.0
    """
    return Work(products=n_agents * mlp_flops([observation, *cells, outputs]))


def update_work(
    observation: int, cells: Sequence[int], outputs: int, n_agents: int, *, central: bool = True
) -> Work:
    """A frame's part in an epoch: forward and backward of all actors and of the critic.

    MAPPO's central critic sees all agents at once; IPPO's (``central=False``) each on its own.

    Examples:
        >>> round(update_work(18, [256, 256], 4, 4).products / 1e6, 1)
        2.2
    """
    actor = mlp_flops([observation, *cells, outputs])
    critic = n_agents * mlp_flops([observation, *cells, 1])
    if central:
        critic = mlp_flops([n_agents * observation, *cells, 1])
    rows = 4 * n_agents * (observation + outputs + 4)  # bytes read once
    return Work(bytes=float(rows), products=3 * (n_agents * actor + critic))


def gae_work(num_envs: int, n_steps: int, n_agents: int) -> Work:
    """Three floats and two flags read, two floats written."""
    return num_envs * n_steps * n_agents * Work(bytes=22, flops=8)


# ------------------------------------------------------------------------------------- measuring


def measure(device: str, quick: bool = False) -> Rates:
    """The rates of this process's threads, or of the GPU."""
    import torch

    tiny = torch.zeros(1, device=device)
    large = torch.zeros(2**22 if quick else 2**26 if device == "cpu" else 2**29, device=device)
    target = torch.empty_like(large)
    copying = _seconds(lambda: target.copy_(large), quick)
    common: dict[str, Any] = {
        "launch": 1e6 * _seconds(lambda: tiny.add_(1.0), quick, repeat=1000),
        "copy": 2 * large.nbytes / copying,
        "flops": _matmul_rates(device, quick),
    }
    if device == "cpu":
        return Rates(device, **common)
    return Rates(
        device,
        **common,
        sync=1e6 * _seconds(lambda: tiny.item(), quick, repeat=200),
        upload=1e6 * _seconds(lambda: torch.tensor(1.0, device=device), quick, repeat=200),
        node=1e6 * _seconds(_time_dependent_kernels(tiny), quick) / CHAIN,
    )


def _seconds(run: Callable[[], Any], quick: bool, repeat: int = 1) -> float:
    """The median of several measurements, each of ``repeat`` calls and one wait for the device."""
    measured_seconds = []
    for _ in range(3):
        run()
    for _ in range(5 if quick else 21):
        report.wait_for_gpu()
        began = time.perf_counter()
        for _ in range(repeat):
            run()
        report.wait_for_gpu()
        measured_seconds.append((time.perf_counter() - began) / repeat)
    return statistics.median(measured_seconds)


def _matmul_rates(device: str, quick: bool) -> dict[str, float]:
    import torch

    size = 512 if quick else 1024 if device == "cpu" else 8192
    before = torch.backends.cuda.matmul.allow_tf32
    found = {}
    for name in ("float32",) if device == "cpu" else ("float32", "tf32", "bfloat16"):
        torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
        dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        out = torch.empty_like(a)
        multiply = _multiply(a, b, out)
        found[name] = 2 * size**3 / _seconds(multiply, quick, repeat=1 if device == "cpu" else 10)
    torch.backends.cuda.matmul.allow_tf32 = before
    return found


def _multiply(a: Any, b: Any, out: Any) -> Callable[[], Any]:
    import torch

    return lambda: torch.mm(a, b, out=out)


def _time_dependent_kernels(tiny: Any) -> Callable[[], Any]:
    """A replay of so many dependent kernels in one graph."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            tiny.add_(1.0)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CHAIN):
            tiny.add_(1.0)
    return graph.replay


# -------------------------------------------------------------------------------------- reporting


def rows(rates: Rates) -> list[list[str]]:
    """What was measured."""
    times = {
        "an operation on a tiny tensor": rates.launch,
        "reading a value off the device": rates.sync,
        "a number to the device": rates.upload,
        "a tiny kernel in a CUDA graph": rates.node,
    }
    found = [[name, f"{x:.2f} us"] for name, x in times.items() if x is not None]
    found.append(["copying memory, read and written", f"{rates.copy / 1e9:,.1f} GB/s"])
    for name, rate in rates.flops.items():
        found.append([f"matrix product, {name}", f"{rate / 1e9:,.0f} GFLOP/s"])
    return found


def share(lower_bound: float, seconds: float) -> str:
    """A fraction of a limit, in words.

    Examples:
        >>> share(0.5, 2.0), share(0.0001, 7.0)
        ('25 %', '0.0014 %')
    """
    percent = 100 * lower_bound / seconds
    digits = max(0, 1 - math.floor(math.log10(percent))) if percent > 0 else 0
    return f"{percent:.{digits}f} %"


def main() -> None:
    """Measures and reports."""
    parser = report.parser(__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    args = parser.parse_args()
    measured = report.for_each_number_of_threads(measure, args.threads, args.device, args.quick)
    report.publish(
        "calibrate",
        "What this machine can do",
        [
            (report.count_of(n, "thread"), report.markdown_table(["", "rate"], rows(rates)))
            for n, rates in measured.items()
        ],
        {"device": args.device},
        """Medians of 21 measurements. Times of operations are those of many in a row; a copy is of
        256 MiB on a CPU and 2 GiB on a GPU, a product of square matrices of 1,024 and 8,192.""",
        write=args.write and not args.quick,
        device=args.device,
    )


if __name__ == "__main__":
    main()
