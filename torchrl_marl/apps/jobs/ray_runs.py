"""Runs as tasks of Ray: one that loses its machine resumes itself on another."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from torchrl_marl.collectors.ray import ActorFailure, answer_of
from torchrl_marl.collectors.ray_connection import Connection, connect
from torchrl_marl.runtime.naming import file_name
from torchrl_marl.training.config import TrainConfig
from torchrl_marl.training.folder import check_folder

__all__ = ["train_all"]

_PATIENCE = 120.0  # seconds for a task that was asked to stop to save its run


def train_all(configs: Sequence[TrainConfig]) -> Iterator[tuple[int, Path | Exception]]:
    """Trains every run as a task of Ray, as many at once as there are CPUs.

    A run is the same as by itself. Where its process or machine dies, Ray starts the task again,
    and it goes on from its last checkpoint: folders must be where every machine sees them. Ctrl-C
    lets all save and stop.

    Args:
        configs (sequence of TrainConfig): of ``distributed.backend: ray``, whose ``address``,
            ``cpus_per_actor``, ``gpus_per_actor`` and ``max_restarts`` are those of tasks.

    Yields:
        tuple: the number of a run that has ended, in the order in which they end, and its folder,
        or what went wrong.

    Raises:
        ConfigError: no Ray, or a folder that is taken.
    """
    placed = [_placed(config, number) for number, config in enumerate(configs)]
    for config in placed:
        check_folder(config)
    connection = connect(configs[0].distributed.address, configs[0].distributed.cpus_per_actor)
    connection.tell_of_death(
        "the Ray that was started for these runs has died (its raylet), and this process with it; "
        "`torchrl-marl train --resume FOLDER` goes on with each, such as "
        f"FOLDER={shlex.quote(str(placed[0].folder))}."
    )
    try:
        yield from _as_they_end(connection, configs[0], placed)
    finally:
        connection.close()


def _placed(config: TrainConfig, number: int) -> TrainConfig:
    """Returns the settings of a run that is one task, with a folder that is known beforehand."""
    folder = config.folder
    if folder is None:
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        folder = f"runs/{file_name(config.recipe)}_seed{config.seed}_{stamp}_{number}"
    plain = dataclasses.replace(config.distributed, backend="none", address=None)
    quiet = dataclasses.replace(config.logging, progress=False)
    path = str(Path(folder).absolute())
    return dataclasses.replace(config, folder=path, distributed=plain, logging=quiet)


def _as_they_end(
    connection: Connection, first: TrainConfig, configs: Sequence[TrainConfig]
) -> Iterator[tuple[int, Path | Exception]]:
    ray, settings = connection.ray, first.distributed
    task = ray.remote(_train).options(
        num_cpus=settings.cpus_per_actor,
        num_gpus=settings.gpus_per_actor,
        max_retries=settings.max_restarts,
    )
    numbers = {task.remote(config): number for number, config in enumerate(configs)}
    left = list(numbers)
    try:
        while left:
            (ended, *_), left = connection.wait(left, 1)
            yield numbers[ended], _outcome(ray, ended, configs[numbers[ended]])
    finally:
        for result in left:
            ray.cancel(result)
        if left:
            ray.wait(left, num_returns=len(left), timeout=_PATIENCE)


def _outcome(ray: Any, result: Any, config: TrainConfig) -> Path | Exception:
    try:
        answer = answer_of(ray, result, ready=True, timeout=0.0)
    except Exception as error:
        return error
    if isinstance(answer, ActorFailure):
        return answer.error("its task", f"; torchrl-marl train --resume {config.folder} goes on.")
    return Path(str(config.folder))


def _train(config: TrainConfig) -> None:
    """Trains a run, or goes on with it where the task was begun before."""
    from torchrl_marl.training import trainer

    folder = Path(str(config.folder))
    if (folder / "config.yaml").is_file():
        trainer.resume(folder, trust=True)
    else:
        trainer.train(config)
