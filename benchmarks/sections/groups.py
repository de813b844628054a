"""What groups cost a captured rollout and update."""

from __future__ import annotations

import argparse

from groups import N_AGENTS, Side

from sections.case import Case, Settings

TITLE = "Eight groups against one"
TEXT = """VMAS navigation, eight agents with networks of their own (two layers of 64, IPPO): as
eight groups of one agent, and as one group of eight. ``times`` is how many times faster one group
is than eight; 1 means that groups cost nothing, and at most 1.15 is what we aim at. ``groups.py``
has the rows for a learner for each group, too."""
ONE, EIGHT = "one group", "eight groups"


def measure(settings: Settings) -> list[Case]:
    """Two cases for every number of envs."""
    return [
        case
        for num_envs in ([4] if settings.quick else [64, 512])
        for case in measure_size(num_envs, settings)
    ]


def measure_size(num_envs: int, settings: Settings) -> list[Case]:
    """A rollout, and learning from a batch."""
    steps, agents = (4, 2) if settings.quick else (32, N_AGENTS)
    sizes = argparse.Namespace(
        agents=agents, steps=steps, execution=settings.execution, device=settings.device
    )
    sides = {EIGHT: Side(agents, num_envs, sizes), ONE: Side(1, num_envs, sizes)}
    cases = []
    for method in ("sample", "learn"):
        timings = settings.timings(
            {name: getattr(side, method) for name, side in sides.items()}, warmup=3
        )
        cases.append(
            Case(
                f"{agents} agents, {num_envs} envs x {steps} steps, {_NAMES[method]}",
                timings,
                frames=num_envs * steps,
                baselines={EIGHT: EIGHT},
                ours=ONE,
            )
        )
    return cases


_NAMES = {"sample": "rollout", "learn": "learning"}
