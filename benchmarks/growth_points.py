"""One point of ``growth.py``, measured in this process and printed as JSON in the last line.

    python benchmarks/growth_points.py '{"sweep": "agents", "scenario": "navigation", "size": 4}'

``growth.py`` starts such a process for each point, with its own compiler cache, and ends it at its
time limit. What does not fit into memory prints ``{"failed": "memory"}``.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import report

MAX_STEPS, CELLS, EPOCHS, MINIBATCHES = 100, 64, 2, 4
ROOMY = 4  # agents for which the default area of `navigation` is made
MOST_ROUNDS, DRAWN, MIB = 20, 1024, 2**20


class Shape(NamedTuple):
    """Sizes of a point beside the one that grows.

    Args:
        num_envs (int): number of envs; of each member in a population.
        n_steps (int): steps of a batch.
    """

    num_envs: int
    n_steps: int


SHAPES = {
    "agents": Shape(60, 100),
    "envs": Shape(0, 25),  # the number of envs grows
    "groups": Shape(64, 32),
    "members": Shape(8, MAX_STEPS),
    "rows": Shape(60, 100),  # of an added batch
}
QUICK = Shape(4, 4)


class Loop(NamedTuple):
    """Training loop of a point, which is timed.

    Args:
        sample (callable): collects a batch.
        iteration (callable): collects a batch and learns from it.
        frames (int): agent-frames of a batch.
    """

    sample: Callable[[], Any]
    iteration: Callable[[], Any]
    frames: int

    @classmethod
    def of(cls, learner: Any, collector: Any) -> Loop:
        """The loop of a learner and its collector."""
        return cls(
            collector.rollout,
            lambda: learner.learn(collector.rollout()),
            collector.frames_per_batch * n_agents_of(collector.env),
        )


def n_agents_of(env: Any) -> int:
    """Agents of all groups."""
    from torchrl_marl import TeamSpec

    return sum(group.n_agents for group in TeamSpec.from_env(env).groups.values())


# ------------------------------------------------------------------------------- the sweeps


def with_agents(scenario: str, size: int, shape: Shape, point: dict[str, Any]) -> dict[str, Any]:
    """So many agents; a whole iteration of IPPO for `navigation` only."""
    scenario_kwargs = arguments_of(scenario, size)
    time_iteration = scenario == "navigation"
    return measure_loop(
        lambda: vmas_loop(scenario, shape, point["execution"], **scenario_kwargs),
        point,
        time_iteration,
    )


def arguments_of(scenario: str, n_agents: int) -> dict[str, Any]:
    """A scenario's arguments; the area of `navigation` grows, so that all agents find room."""
    if scenario != "navigation":
        return {"n_agents": n_agents}
    side = max(1.0, math.sqrt(n_agents / ROOMY))
    return {"n_agents": n_agents, "world_spawning_x": side, "world_spawning_y": side}


def with_envs(scenario: str, size: int, shape: Shape, point: dict[str, Any]) -> dict[str, Any]:
    """So many envs."""
    of_size = Shape(size, shape.n_steps)
    return measure_loop(lambda: vmas_loop(scenario, of_size, point["execution"]), point)


def vmas_loop(scenario: str, shape: Shape, execution: Any, **scenario_kwargs: Any) -> Loop:
    """IPPO on a scenario, all in graphs."""
    import torch

    from torchrl_marl import TeamSpec
    from torchrl_marl.collectors import RolloutCollector, TeamPolicy
    from torchrl_marl.envs import VmasEnv
    from torchrl_marl.learners import OnPolicyConfig, OnPolicyLearner
    from torchrl_marl.modules import NetworkConfig

    torch.manual_seed(0)
    env = VmasEnv(scenario, num_envs=shape.num_envs, max_steps=MAX_STEPS, seed=0, **scenario_kwargs)
    frames = shape.num_envs * shape.n_steps
    network: Any = NetworkConfig([CELLS, CELLS])
    config = OnPolicyConfig(
        algorithm="ippo",
        actor=network,
        critic=network,
        num_epochs=EPOCHS,
        minibatch_size=max(1, frames // MINIBATCHES),
    )
    learner = OnPolicyLearner(TeamSpec.from_env(env).groups, config, execution=execution)
    policy = TeamPolicy(learner.actors.values())
    return Loop.of(
        learner, RolloutCollector(env, policy, frames_per_batch=frames, execution=execution)
    )


def with_groups(scenario: str, size: int, shape: Shape, point: dict[str, Any]) -> dict[str, Any]:
    """Agents that share nothing, in so many groups of one size."""
    import groups

    n_agents = size if point["quick"] else groups.N_AGENTS
    if n_agents % size:
        raise ValueError(f"{n_agents} agents do not form {size} groups of one size")
    args = argparse.Namespace(
        agents=n_agents, steps=shape.n_steps, execution=point["execution"], device="cpu"
    )

    def build() -> Loop:
        side = groups.Side(size, shape.num_envs, args)
        return Loop(side.sample, side.iteration, side.frames * n_agents)

    return measure_loop(build, point)


def with_members(scenario: str, size: int, shape: Shape, point: dict[str, Any]) -> dict[str, Any]:
    """A population of so many members, each with a few envs."""
    import populations

    populations.MAX_STEPS = shape.n_steps
    return measure_loop(
        lambda: Loop.of(*populations.loop_of(size, shape.num_envs, EPOCHS, point["execution"])),
        point,
    )


# ---------------------------------------------------------------------- sampling and learning


def measure_loop(
    build: Callable[[], Loop], point: dict[str, Any], time_iteration: bool = True
) -> dict[str, Any]:
    """Compiles and times a loop; the memory of sampling is read before anything is learned."""
    began = time.perf_counter()
    loop = build()
    loop.sample()
    first = time.perf_counter() - began
    with count_program_runs() as ran:
        loop.sample()
    if not ran:
        raise RuntimeError("the step was not captured as a graph")
    values = {
        **describe_program(ran.most_common(1)[0][0]),
        "first": first,
        "sampling": loop.frames / seconds_of(loop.sample, point["seconds"]),
        "memory": peak_memory(),
    }
    if time_iteration:
        values["training"] = loop.frames / seconds_of(loop.iteration, point["seconds"])
        values["training_memory"] = peak_memory()
    return values


@contextlib.contextmanager
def count_program_runs() -> Iterator[Counter[Any]]:
    """Counts how often each program runs; the one that runs most is the step of the batch."""
    from torchrl_marl.capture.program import Program

    ran: Counter[Any] = Counter()
    checked = Program.checked

    def counted(self: Program, leaves: Any) -> Any:
        ran[self] += 1
        return checked(self, leaves)

    with mock.patch.object(Program, "checked", counted):
        yield ran


def describe_program(program: Any) -> dict[str, Any]:
    """Operations and kernels of a program, and the seconds of recording and compiling it."""
    return {
        "recorded": getattr(program, "n_recorded", None),
        "operations": program.n_operations,
        "kernels": program.n_kernels,
        "compile": program.seconds,
    }


def seconds_of(run: Callable[[], Any], seconds: float) -> float:
    """Median seconds of a call, after two calls that do not count; as many as fit in a time."""
    run()
    began = time.perf_counter()
    run()
    rounds = max(2, min(MOST_ROUNDS, int(seconds / (time.perf_counter() - began))))
    timings = report.alternate({"": run}, rounds, warmup=0, shortest=0.0)
    return timings.median("")


def peak_memory() -> float | None:
    """Largest memory of this process so far, in MiB.

    The kernel's number for the program that runs now: ``getrusage`` would count the memory of the
    process that started this one.
    """
    try:
        text = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        return None
    [line] = [line for line in text.splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


# ----------------------------------------------------------------------------------- replay


def with_rows(scenario: str, size: int, shape: Shape, point: dict[str, Any]) -> dict[str, Any]:
    """A full buffer of so many rows: adding a batch of frames, and drawing a minibatch."""
    import replay
    import torch

    torch.manual_seed(0)
    n_steps = max(1, size // replay.N_ENVS)
    n_sampled = min(DRAWN, n_steps * replay.N_ENVS)
    with tempfile.TemporaryDirectory() as folder:
        batch = replay._batch()[:, : min(n_steps, shape.n_steps)]
        add, draw, n_bytes = BUFFERS[scenario](n_steps, n_sampled, folder)
        began = time.perf_counter()
        for _ in range(math.ceil(n_steps / batch.shape[1])):
            add(batch)
        filled = time.perf_counter() - began
        return {
            "fill": filled,
            "add": 1e3 * seconds_of(lambda: add(batch), point["seconds"]),
            "sample": 1e3 * seconds_of(draw, point["seconds"]),
            "stored": n_bytes() / MIB,
            "memory": peak_memory(),
        }


Buffer = tuple[Callable[[Any], Any], Callable[[], Any], Callable[[], int]]


def in_memory(n_steps: int, n_sampled: int, folder: str, priority: bool = False) -> Buffer:
    """Returns functions that add to and sample from a replay buffer in memory, and its bytes."""
    import replay

    from torchrl_marl.learners import Priority, TeamReplay

    store = TeamReplay(n_steps, replay.N_ENVS, replay.KEYS, Priority() if priority else None)

    def n_bytes() -> int:
        return sum(x.numel() * x.element_size() for x in store.tensors)

    return store.extend, lambda: replay._read_minibatch(store, n_sampled, 1), n_bytes


def memory_mapped(n_steps: int, n_sampled: int, folder: str) -> Buffer:
    """The same for TorchRL's buffer in files."""
    import replay
    from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer

    capacity = n_steps * replay.N_ENVS
    storage = LazyMemmapStorage(capacity, scratch_dir=folder)
    buffer = TensorDictReplayBuffer(storage=storage)

    def n_bytes() -> int:
        return sum(file.stat().st_size for file in Path(folder).rglob("*.memmap"))

    return lambda batch: buffer.extend(batch.reshape(-1)), lambda: buffer.sample(n_sampled), n_bytes


BUFFERS: dict[str, Callable[[int, int, str], Buffer]] = {
    "in memory": in_memory,
    "prioritized": functools.partial(in_memory, priority=True),
    "memory-mapped": memory_mapped,
}


# ------------------------------------------------------------------------------- one point

SWEEPS = {
    "agents": with_agents,
    "envs": with_envs,
    "groups": with_groups,
    "members": with_members,
    "rows": with_rows,
}


def limit_memory(gib: float | None) -> None:
    """Makes allocations fail beyond so much memory, before the machine ends other processes."""
    if gib is None:
        return
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (int(gib * 2**30),) * 2)
    except (ImportError, ValueError, OSError):  # the system has no such limit
        return


def measure(point: dict[str, Any]) -> dict[str, Any]:
    """The values of a point, or why there are none."""
    import torch

    from torchrl_marl.runtime.memory import is_out_of_memory

    torch.set_num_threads(point["threads"])
    report.be_quiet()
    shape = QUICK if point["quick"] else SHAPES[point["sweep"]]
    try:
        values = SWEEPS[point["sweep"]](point["scenario"], point["size"], shape, point)
    except Exception as error:
        if is_out_of_memory(error) or "of memory;" in str(error):
            return {"failed": "memory"}
        raise
    return {"values": values}


def main() -> None:
    """Measures the point that the command line names."""
    point = json.loads(sys.argv[1])
    limit_memory(point["memory"])
    print("\n" + json.dumps(measure(point)), flush=True)


if __name__ == "__main__":
    main()
