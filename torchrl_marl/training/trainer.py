"""Starts, resumes and finishes runs."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

from torchrl.envs import EnvBase

from torchrl_marl.collectors.collector import Interrupted
from torchrl_marl.errors import CheckpointError, ConfigError
from torchrl_marl.learners.build import partition
from torchrl_marl.runtime.ranks import SINGLE_PROCESS, SingleProcess
from torchrl_marl.runtime.torchrun import place
from torchrl_marl.runtime.trust import trusting
from torchrl_marl.training.checkpoint import (
    fitting,
    latest_checkpoint,
    load_latest,
    set_aside_later,
)
from torchrl_marl.training.config import TrainConfig, read_run_config
from torchrl_marl.training.environments import time_limit
from torchrl_marl.training.files import whole_file
from torchrl_marl.training.folder import RunFolder, has_checkpoint
from torchrl_marl.training.interruption import named, terminable
from torchrl_marl.training.origin import (
    check_environment,
    check_origin,
    check_unchanged,
    settings_of,
    sign_run,
    signed_yaml,
    warn_of_versions,
)
from torchrl_marl.training.part import Part
from torchrl_marl.training.process_group import (
    joined,
    on_rank_zero,
    open_run_folder,
    resolve_config,
)
from torchrl_marl.training.recorder import print_message
from torchrl_marl.training.run import Run
from torchrl_marl.training.training import Iteration, Training

Trials = Callable[..., Part] | None

__all__ = [
    "Iteration",
    "Training",
    "finish",
    "iterate",
    "resume",
    "resume_training",
    "start_training",
    "train",
]


def start_training(
    config: TrainConfig,
    env: EnvBase | None,
    *,
    ranks: SingleProcess = SINGLE_PROCESS,
    trials: Trials = None,
) -> Training:
    """Starts a run in a new folder.

    Args:
        config (TrainConfig): a recipe.
        env (EnvBase, optional): an environment of one's own.
        ranks (Alone): the processes that train as one.
        trials (callable, optional): of :class:`Training`.
    """
    config = resolve_config(config, ranks, own_env=env is not None)
    _check_shards(config)
    folder = open_run_folder(ranks, lambda: RunFolder.new(config))
    try:
        with named(folder.path):
            return _begin(folder, config, env, ranks, trials)
    except BaseException:
        folder.give_up()
        raise


def resume_training(
    path: Path,
    env: EnvBase | None,
    config: TrainConfig | None = None,
    trust: bool = False,
    *,
    ranks: SingleProcess = SINGLE_PROCESS,
    trials: Trials = None,
) -> Training:
    """Resumes a run from its last checkpoint; one without any starts from the beginning."""
    before = read_run_config(path)
    asked = config or before
    _check_shards(asked)
    if env is None:
        check_environment(path, before.env, trust)
    if config is None:
        with trusting(trust):
            check_origin(path / "config.yaml", before, own_env=env is not None)
    config = resolve_config(asked, ranks, own_env=env is not None, resumed=True)
    folder = open_run_folder(ranks, lambda: RunFolder(path))
    try:
        with named(path):
            if before.env.library == "own" and env is None:
                raise ConfigError(
                    "this run was trained on an environment of your own; in Python, "
                    "torchrl_marl.training.resume(folder, env=...) takes it."
                )
            if not on_rank_zero(ranks, lambda: has_checkpoint(path)):
                return _restart(folder, config, env, ranks, trials)
            used, state = on_rank_zero(ranks, lambda: load_latest(path))
            made = settings_of(state, used) or before
            check_unchanged(made, asked, before, path / "config.yaml")
            if "trials" in state and trials is None:
                raise CheckpointError(
                    f"{str(path)!r} holds trials, which begin and end as a tuning says; go on with "
                    "the `torchrl-marl tune` command that began it, or with one trial's folder in "
                    "it."
                )
            if config.execution == "auto":  # of a version that knew no other than eager
                config = dataclasses.replace(config, execution="eager")
            training = Training(config, folder, env, ranks=ranks, trials=trials)
            with trusting(trust), fitting(used):
                training.load_state_dict(state)
            if folder.writes:
                set_aside_later(used)
                warn_of_versions(state, used)
            _go_on(training, before, folder, made)
            return training
    except BaseException:
        folder.release()
        raise


def _check_shards(config: TrainConfig) -> None:
    """Refuses what is done with shards, for a run that is in one piece."""
    overlap = config.distributed.overlap
    if overlap and not config.distributed.enabled:
        raise ConfigError(
            f"distributed.overlap is {overlap}, but distributed.collectors is null, and only "
            "shards play ahead; use distributed.collectors=1, or more, or distributed.overlap=0."
        )
    if config.distributed.backend == "ray" and not config.distributed.enabled:
        raise ConfigError(
            "distributed.backend is 'ray', but distributed.collectors is null, expected the number "
            "of shards of the run; use distributed.collectors=8, or so, or --seeds 0..7, which "
            "makes each run a task."
        )


def _begin(
    folder: RunFolder,
    config: TrainConfig,
    env: EnvBase | None,
    ranks: SingleProcess,
    trials: Trials,
) -> Training:
    from torchrl_marl.learners.replay.team_replay import refuse_large_store

    if env is not None:
        own = dataclasses.replace(
            config.env,
            library="own",
            name=type(env).__name__,
            num_envs=env.batch_size.numel(),
            max_steps=time_limit(env),
            kwargs={},
        )
        config = dataclasses.replace(config, env=own)
        config.check_learners()
    if folder.writes:  # before anything that takes long: what is killed then begins again by it
        _write_config(folder.path, config)
        sign_run(folder.path, config)
    training = Training(config, folder, env, ranks=ranks, trials=trials)
    for learner, groups in partition(training.team, config.learner, config.groups):
        refuse_large_store(
            learner, groups.values(), training.device, training.config.population.size
        )
    if folder.writes:  # again: clusters and execution are known by now
        _write_config(folder.path, training.config)
        sign_run(folder.path, training.config)
    training.open()
    frames = config.total_frames
    num_envs = training.num_envs // config.population.size
    batch = math.ceil(config.frames_per_batch / num_envs) * num_envs
    if frames % batch:
        n = math.ceil(frames / batch)
        print_message(f"total_frames is {frames:,}; {n * batch:,} are trained: {n} times {batch:,}")
    return training


def _restart(
    folder: RunFolder,
    config: TrainConfig,
    env: EnvBase | None,
    ranks: SingleProcess,
    trials: Trials,
) -> Training:
    if (folder.path / "summary.json").exists():
        latest_checkpoint(folder.path)  # raises that there is none
    folder.clear()
    print_message(f"run {str(folder.path)!r} has no checkpoint yet: it starts from the beginning")
    return _begin(folder, config, env, ranks, trials)


def _go_on(training: Training, before: TrainConfig, folder: RunFolder, made: TrainConfig) -> None:
    """Continues a run with settings that may have changed."""
    frames, summary, stopping = training.frames, training.run.summary, training.results.stopping
    total, was = training.config.total_frames, made.total_frames
    if total != was and total < frames:
        edited = total == before.total_frames
        fix = (
            f"put {was} back in {str(folder.path / 'config.yaml')!r}" if edited else "leave it out"
        )
        raise ConfigError(
            f"total_frames is {total}, but the run has {frames} already; give more, or {fix}."
        )
    if training.environments.own is None and folder.writes:
        sign_run(training.folder, training.config)  # already trusted
    if not training.done:
        for key in [k for k in summary if k.endswith("return_after")]:
            del summary[key]
    elif "return_after" in summary:
        more = f"total_frames={2 * total}"
        if stopping.reached:
            more = f"a higher stop_at_return than {stopping.limit:g}"
        print_message(
            f"run {str(training.folder)!r} is finished, with {frames:,} frames; "
            f"{more} beside --resume trains on"
        )
    if total != was and not training.done:
        print_message(
            f"trains on from {frames:,} to {total:,} frames; linear schedules and "
            "unshare_at go on as in a run of that length"
        )
    training.open()
    if (
        training.config != before and folder.writes
    ):  # only now: tables or loggers may have refused to continue
        _write_config(folder.path, training.config)


def _write_config(folder: Path, config: TrainConfig) -> None:
    with whole_file(folder / "config.yaml") as file:
        file.write(signed_yaml(config))


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
        trust (bool): run the code that a run of somebody else's brings: its environment's module is
            imported, and the environments of a PettingZoo run are unpickled. Without it episodes of
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
    if training.config.distributed.backend == "ray":
        from torchrl_marl.training.shards import report_death

        report_death(training.collector, training.folder)
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
            working.handle_signal(training.folder)
        except GeneratorExit:
            training.save()
            raise
        finally:
            training.close()
