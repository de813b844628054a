"""Forecast of an iteration's time on several actors, from measurements of one process.

python benchmarks/forecast.py        # a table for three kinds of environments; runs nothing

An iteration of W actors, with n copies of the environment each and T steps::

    collect      T * (a + b n) * slowest(W)      a: fixed cost of a step, b: cost of a copy
    transport    bytes / memory + bytes from other machines / network + a call
    learn        frames * l / learners
    synchronous  collect + transport + learn
    overlapped   max(collect, transport + learn), no less than all work over all cores

``slowest(W)`` is the mean of the largest of W times that vary by 3 %.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

import report

CALL = 3e-3  # seconds to put weights, ask all actors and hear that they have played
MEMORY = 1.5e9  # bytes a second of the one copy from shared memory
NETWORK = 1.25e9  # 10 Gbit/s
PER_MACHINE = 16  # actors


@dataclasses.dataclass(frozen=True)
class Workload:
    """Times that a workload takes on one core.

    Args:
        name (str): in the table.
        copies (int): E of the whole run.
        steps (int): T.
        step (float): seconds of a step, whatever the number of copies.
        copy (float): seconds of a step for each copy.
        learn (float): seconds of learning for each env step.
        frame_bytes (int): of an env step in a batch.
    """

    name: str
    copies: int
    steps: int
    step: float
    copy: float
    learn: float
    frame_bytes: int = 1000

    def iteration(
        self, actors: int, overlap: bool = False, learners: int = 1, cores: float = math.inf
    ) -> float:
        """Returns the seconds of an iteration; 0 actors are one process."""
        share = self.copies / max(actors, 1)
        collect = self.steps * (self.step + self.copy * share)
        learn = self.copies * self.steps * self.learn / learners
        if not actors:
            return collect + learn
        work = (collect * actors + learn) / min(cores, actors + learners)
        collect *= slowest(actors)
        size = self.copies * self.steps * self.frame_bytes
        elsewhere = 1 - 1 / math.ceil(actors / PER_MACHINE)
        transport = size / MEMORY + size * elsewhere / NETWORK + CALL
        if overlap:
            return max(collect, transport + learn, work) + CALL
        return collect + transport + learn


WORKLOADS = [
    Workload("VMAS `balance`, eager, 96 copies", 96, 100, 2.4e-3, 1e-6, 9e-5),
    Workload("PettingZoo `simple_spread`, 32 copies", 32, 100, 0.6e-3, 60e-6, 6e-5),
    Workload("a simulator of 5 ms a copy and step, 64 copies", 64, 32, 0.5e-3, 5e-3, 6e-5, 2000),
]


def slowest(n: int, spread: float = 0.03) -> float:
    """Returns the mean of the largest of n times around 1 (Blom's approximation)."""
    if n < 2:
        return 1.0
    return 1.0 + spread * statistics.NormalDist().inv_cdf((n - 0.375) / (n + 0.25))


def rows(workloads: Sequence[Workload], numbers: Sequence[int] = (2, 4, 8, 64)) -> list[list[str]]:
    """How many times as fast as one process each is."""
    found = []
    for workload in workloads:
        one_process_seconds = workload.iteration(0)
        found.append(
            [workload.name, f"{workload.copies * workload.steps / one_process_seconds:,.0f}"]
        )
        for n in numbers:
            if n > workload.copies:
                found[-1].append("")
                continue
            speedups = (
                one_process_seconds / workload.iteration(n, overlap) for overlap in (False, True)
            )
            found[-1].append(" / ".join(f"{ratio:.1f}" for ratio in speedups))
    return found


def main() -> None:
    """Prints the table."""
    header = ["", "frames/s of one process", *(f"{n} actors" for n in (2, 4, 8, 64))]
    print(report.markdown_table(header, rows(WORKLOADS)))


if __name__ == "__main__":
    main()
