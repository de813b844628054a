"""The training loop, as a function and as a generator."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from pathlib import Path

from torchrl.envs import EnvBase

from torchrl_marl.collectors.collector import Interrupted
from torchrl_marl.errors import ConfigError
from torchrl_marl.torchrun import place
from torchrl_marl.training.collecting import tell_of_death
from torchrl_marl.training.config import TrainConfig, read_run_config
from torchrl_marl.training.interruption import named, terminable
from torchrl_marl.training.joined import joined
from torchrl_marl.training.run import Run
from torchrl_marl.training.start import resume_training, start_training
from torchrl_marl.training.training import Iteration, Training
from torchrl_marl.trust import trusting

__all__ = ["Iteration", "Training", "finish", "iterate", "resume", "train"]


def train(config: TrainConfig, *, env: EnvBase | None = None) -> Run:
    """Trains until ``total_frames``, or ``stop_at_return``.

    Ctrl-C ends it after the iteration, saved; so does SIGTERM, with exit status 143. Processes that
    ``torchrun`` has started train as one.

    Args:
        config (TrainConfig): a recipe.
        env (EnvBase, optional): an environment of one's own instead of the recipe's.

    Raises:
        UserError: what is asked for cannot be done; the message names the fix.
    """
    with joined(config) as ranks:
        return finish(start_training(config, env, ranks=ranks))


def resume(
    folder: str | Path,
    *,
    env: EnvBase | None = None,
    config: TrainConfig | None = None,
    trust: bool = False,
) -> Run:
    """Resumes a run exactly from its last checkpoint; without one, starts anew.

    Args:
        folder (str or Path): the run's.
        env (EnvBase, optional): the environment, for a run on one's own.
        config (TrainConfig, optional): instead of the run's settings, from now on.
        trust (bool): run the code that a run of somebody else's brings: its world's module is
            imported, and the worlds of a PettingZoo run are unpickled. Without it episodes of
            the latter begin anew. One's own runs need it not. Links out of the folder are
            followed.

    Raises:
        CheckpointError: no run, none but broken checkpoints, or another training in this folder.
        TrustError: a module would be imported that nobody has said may be.
        ConfigError: fewer ``total_frames`` than there are already.
    """
    path = Path(folder)
    with trusting(trust), joined(config or read_run_config(path)) as ranks:
        return finish(resume_training(path, env, config, trust, ranks=ranks))


def iterate(config: TrainConfig, *, env: EnvBase | None = None) -> Iterator[Iteration]:
    """Trains as :func:`train`, one iteration at a time; leaving the loop early saves the run.

    Args:
        config (TrainConfig): a recipe.
        env (EnvBase, optional): an environment of one's own instead of the recipe's.
    """
    if place() is not None:
        raise ConfigError(
            "iterate is called in one of several processes of torchrun, which train as one; use "
            "torchrl_marl.train, or start one process."
        )
    training = start_training(config, env)
    iterations = _iterate(training)
    # A generator that is never started, or held to the interpreter's end, runs no `finally`.
    training.left = weakref.finalize(iterations, training.leave)
    return iterations


def finish(training: Training) -> Run:
    """Trains to the end what was started or resumed; interrupted as :func:`train`."""
    with training.interruption:
        for _ in _iterate(training):
            pass
    return training.run


def _iterate(training: Training) -> Iterator[Iteration]:
    working = training.interruption  # outside of it signals belong to the caller
    tell_of_death(training.collector, training.folder)
    with terminable(), named(training.folder):
        try:
            with working:
                training.begin()
            while not (working.asked or training.done):
                with working, contextlib.suppress(Interrupted):
                    iteration = training.step()
                if not working.asked:
                    yield iteration
            with working:
                if working.asked:
                    training.save()
                else:
                    training.end()
            working.heed(training.folder)
        except GeneratorExit:
            training.save()
            raise
        finally:
            training.close()
