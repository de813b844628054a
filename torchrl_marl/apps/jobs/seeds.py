"""Runs of several seeds, one after the other or as tasks of Ray."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchrl_marl.training.config import TrainConfig
    from torchrl_marl.training.run import Run

__all__ = ["train_each"]


def train_each(
    configs: Sequence[TrainConfig], *, seeds: bool = False
) -> Iterator[tuple[TrainConfig, list[Run] | Exception]]:
    """Trains runs; yields each that has ended, with its members where it is a population.

    Args:
        configs (sequence of TrainConfig): settings that differ in their seed.
        seeds (bool): they are runs of several seeds; of ``distributed.backend: ray``, unless they
            have shards there, each is a task.

    Raises:
        Exception: of a run that is the only one; otherwise it is yielded, in its place.
    """
    settings = configs[0].distributed
    if seeds and settings.backend == "ray" and not settings.enabled:
        yield from _on_ray(configs)
        return
    from torchrl_marl import runs as doors

    for config in configs:
        try:
            run = doors.train(config)
        except Exception as error:
            if len(configs) == 1:
                raise
            yield config, error
            continue
        yield config, getattr(run, "members", [run])


def _on_ray(configs: Sequence[TrainConfig]) -> Iterator[tuple[TrainConfig, list[Run] | Exception]]:
    from torchrl_marl.apps.jobs.ray_runs import train_all
    from torchrl_marl.runs import draw
    from torchrl_marl.training.config import seed_folders
    from torchrl_marl.training.recorder import say
    from torchrl_marl.training.run import Run

    say(f"{len(configs)} runs are tasks of Ray, as many at once as there are CPUs")
    for left, (number, found) in zip(reversed(range(len(configs))), train_all(configs)):
        if isinstance(found, Path):
            say(f"seed {configs[number].seed} has ended, {left} to go: {str(found)!r}")
            draw(found)
            yield configs[number], [Run.load(one) for one in seed_folders(found) or [found]]
        else:
            yield configs[number], found
