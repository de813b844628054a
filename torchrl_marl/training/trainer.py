"""Functions that start, resume and finish runs."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import math
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrl.envs import EnvBase

from torchrl_marl.collectors.collector import Interrupted
from torchrl_marl.errors import CheckpointError, ConfigError
from torchrl_marl.learners.build import partition
from torchrl_marl.runtime.ranks import SINGLE_PROCESS, SingleProcess
from torchrl_marl.runtime.torchrun import place
from torchrl_marl.runtime.trust import trusting
from torchrl_marl.training.checkpoint import (
    explain_misfit,
    latest_checkpoint,
    load_latest,
    set_aside_later,
)
from torchrl_marl.training.config import TrainConfig, read_run_config
from torchrl_marl.training.environments import time_limit
from torchrl_marl.training.files import open_atomically
from torchrl_marl.training.folder import RunFolder, has_checkpoint
from torchrl_marl.training.interruption import named, terminable
from torchrl_marl.training.messages import print_message
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
    "write_config",
]


def start_training(
    config: TrainConfig,
    env: EnvBase | None,
    *,
    ranks: SingleProcess = SINGLE_PROCESS,
    trials: Trials = None,
    callbacks: Sequence[Any] = (),
) -> Training:
    """Starts a run in a new folder.

    Args:
        config (TrainConfig): config of the run.
        env (EnvBase, optional): environment to use in place of the one in the settings.
        ranks (SingleProcess): the ranks of the run.
        trials (callable, optional): function that makes a part of the run, as for
            :class:`Training`.
        callbacks (sequence of Callback or str): callbacks of the run, in place of those in the
            settings.
    """
    _refuse_stages(config, "torchrl_marl.train(...)")
    config, callback_objects = _resolve_callbacks(config, callbacks, ranks, trials)
    config = resolve_config(config, ranks, own_env=env is not None)
    _check_shards(config)
    folder = open_run_folder(ranks, lambda: RunFolder.new(config))
    try:
        with named(folder.path):
            return _start_new_run(folder, config, env, ranks, trials, callback_objects)
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
    callbacks: Sequence[Any] = (),
) -> Training:
    """Resumes a run from its last checkpoint; a run without a checkpoint starts over."""
    before = read_run_config(path)
    requested = config or before
    _refuse_stages(before, "torchrl_marl.resume(folder)")
    _check_shards(requested)
    if env is None:
        check_environment(path, before.env, trust)
    if config is None:
        with trusting(trust):
            check_origin(path / "config.yaml", before, own_env=env is not None)
    requested, callback_objects = _resolve_callbacks(requested, callbacks, ranks, trials)
    config = resolve_config(requested, ranks, own_env=env is not None, resumed=True)
    folder = open_run_folder(ranks, lambda: RunFolder(path))
    try:
        with named(path):
            _refuse_missing_environment(before, env)
            if not on_rank_zero(ranks, lambda: has_checkpoint(path)):
                return _start_over(folder, config, env, ranks, trials, callback_objects)
            checkpoint_path, state = on_rank_zero(ranks, lambda: load_latest(path, resuming=True))
            trained = settings_of(state, checkpoint_path) or before
            check_unchanged(trained, requested, before, path / "config.yaml")
            _refuse_trials(state, trials, path)
            if config.execution == "auto":  # from a version that had only eager execution
                config = dataclasses.replace(config, execution="eager")
            options: dict[str, Any] = {"ranks": ranks, "trials": trials}
            options["callbacks"] = callback_objects
            training = Training(config, folder, env, **options)
            with trusting(trust), explain_misfit(checkpoint_path):
                training.load_state_dict(state)
            if folder.writes:
                set_aside_later(checkpoint_path)
                warn_of_versions(state, checkpoint_path)
            _continue_run(training, before, folder, trained)
            return training
    except BaseException:
        folder.release()
        raise


def _refuse_missing_environment(config: TrainConfig, env: EnvBase | None) -> None:
    """Refuses to resume without the environment object with which the run was started."""
    if config.env.library == "own" and env is None:
        raise ConfigError(
            "this run was started with an environment object; pass it in Python: "
            "torchrl_marl.training.resume(folder, env=...)."
        )


def _refuse_trials(state: Mapping[str, Any], trials: Trials, path: Path) -> None:
    """Refuses to resume the trials of a tuning as an ordinary population."""
    if "trials" in state and trials is None:
        raise CheckpointError(
            f"{str(path)!r} holds the trials of a tuning; resume it with the "
            "`torchrl-marl tune` command that started it, or resume the folder of one "
            "trial in it."
        )


def _resolve_callbacks(
    config: TrainConfig, given: Sequence[Any], ranks: SingleProcess, trials: Trials
) -> tuple[TrainConfig, list[Any]]:
    """Returns the settings with the names of the callbacks, and the callbacks."""
    if not given and not config.callbacks:
        return config, []
    from torchrl_marl.training.callbacks import callbacks_of, names_of

    if trials is not None:
        raise ConfigError(
            "callbacks is given, but the trials of a tuning with --prune start and end within a "
            "run; use callbacks=[], or leave --prune out."
        )
    if given:
        config = dataclasses.replace(config, callbacks=names_of(given))
    return config, callbacks_of(config, given) if ranks.rank == 0 else []


def _refuse_stages(config: TrainConfig, use: str) -> None:
    """Refuses to train several stages as one run."""
    if config.stages:
        raise ConfigError(
            f"stages is {', '.join(config.stages)}, but this function trains a single run; use "
            f"{use}, or stages={{}}."
        )


def _check_shards(config: TrainConfig) -> None:
    """Refuses settings that need shards if the run has none."""
    overlap = config.distributed.overlap
    if overlap and not config.distributed.enabled:
        raise ConfigError(
            f"distributed.overlap is {overlap}, but distributed.collectors is null, and only "
            "shards can run ahead; use distributed.collectors=1 or more, or distributed.overlap=0."
        )
    if config.distributed.backend == "ray" and not config.distributed.enabled:
        raise ConfigError(
            "distributed.backend is 'ray', but distributed.collectors is null, expected the number "
            "of shards of the run; use for example distributed.collectors=8, or --seeds 0..7, "
            "which makes each run a task."
        )


def _start_new_run(
    folder: RunFolder,
    config: TrainConfig,
    env: EnvBase | None,
    ranks: SingleProcess,
    trials: Trials,
    callbacks: Sequence[Any],
) -> Training:
    from torchrl_marl.learners.replay.team_replay import refuse_large_store

    config = dataclasses.replace(config, data=config.data.absolute())
    source, given = None, config.init_from
    if given is not None:
        from torchrl_marl.training.start_from import read_source, start_from

        source = on_rank_zero(ranks, lambda: read_source(given))
        config = dataclasses.replace(config, init_from=source.name)  # with its frames
    if env is not None:
        config = _with_own_environment(config, env)
    _write_settings(folder, config)  # early, to allow a restart if the run is killed meanwhile
    training = Training(config, folder, env, ranks=ranks, trials=trials, callbacks=callbacks)
    if source is not None:
        start_from(training, source)
    for learner, groups in partition(training.team, config.learner, config.groups):
        refuse_large_store(
            learner, groups.values(), training.device, training.config.population.size
        )
    _write_settings(folder, training.config)  # now with the clusters and execution that were found
    training.open()
    _report_rounded_frames(training)
    return training


def _with_own_environment(config: TrainConfig, env: EnvBase) -> TrainConfig:
    """Returns settings that describe an environment object."""
    env_config = dataclasses.replace(
        config.env,
        library="own",
        name=type(env).__name__,
        num_envs=env.batch_size.numel(),
        max_steps=time_limit(env),
        kwargs={},
    )
    config = dataclasses.replace(config, env=env_config)
    config.check_learners()
    return config


def _write_settings(folder: RunFolder, config: TrainConfig) -> None:
    """Writes and signs the settings of a run, unless another process does."""
    if folder.writes:
        write_config(folder.path, config)
        sign_run(folder.path, config)


def _report_rounded_frames(training: Training) -> None:
    """Prints the number of frames if whole batches have more than ``total_frames``."""
    config = training.config
    frames, num_envs = config.total_frames, training.num_envs // config.population.size
    batch = math.ceil(config.frames_per_batch / num_envs) * num_envs
    if frames % batch:
        n = math.ceil(frames / batch)
        print_message(f"total_frames is {frames:,}; {n * batch:,} are trained: {n} times {batch:,}")


def _start_over(
    folder: RunFolder,
    config: TrainConfig,
    env: EnvBase | None,
    ranks: SingleProcess,
    trials: Trials,
    callbacks: Sequence[Any],
) -> Training:
    if (folder.path / "summary.json").exists():
        latest_checkpoint(folder.path)  # raises the error
    folder.clear()
    print_message(f"run {str(folder.path)!r} has no checkpoint yet, and starts over")
    return _start_new_run(folder, config, env, ranks, trials, callbacks)


def _continue_run(
    training: Training, before: TrainConfig, folder: RunFolder, trained: TrainConfig
) -> None:
    """Continues a run with settings that may have changed."""
    extended = training.config.total_frames != trained.total_frames
    if extended:
        _check_total_frames(training, before, trained)
        for part in training.parts.values():
            part.extend()
    if training.environments.own is None and folder.writes:
        sign_run(training.folder, training.config)  # the run is trusted already
    if not training.done:
        summary = training.run.summary
        for key in [k for k in summary if k.endswith("return_after")]:
            del summary[key]
    _report_continuation(training, extended)
    training.open()
    if training.config != before and folder.writes:
        write_config(folder.path, training.config)  # late, since opening tables may fail


def _check_total_frames(training: Training, before: TrainConfig, trained: TrainConfig) -> None:
    """Refuses fewer frames than the run has already."""
    total, frames = training.config.total_frames, training.frames
    if total >= frames:
        return
    fix = "leave it out"
    if total == before.total_frames:  # the file was edited
        fix = f"restore {trained.total_frames} in {str(training.folder / 'config.yaml')!r}"
    raise ConfigError(
        f"total_frames is {total}, but the run has {frames} already; give more, or {fix}."
    )


def _report_continuation(training: Training, extended: bool) -> None:
    """Prints that a run is finished already, or that it has been extended."""
    frames, total = training.frames, training.config.total_frames
    stopping = training.results.stopping
    if training.done and "return_after" in training.run.summary:
        hint = f"total_frames={2 * total}"
        if stopping.reached:
            hint = f"a higher stop_at_return than {stopping.limit:g}"
        print_message(
            f"run {str(training.folder)!r} is finished, with {frames:,} frames; "
            f"add {hint} to --resume to train further"
        )
    if extended and not training.done:
        print_message(
            f"continues from {frames:,} to {total:,} frames; linear schedules and "
            "unshare_at follow the new total"
        )


def write_config(folder: Path, config: TrainConfig) -> None:
    """Writes a run's ``config.yaml``."""
    with open_atomically(folder / "config.yaml") as file:
        file.write(signed_yaml(config))


def train(config: TrainConfig, *, env: EnvBase | None = None, callbacks: Sequence[Any] = ()) -> Run:
    """Trains until ``total_frames`` or ``stop_at_return`` is reached.

    After Ctrl-C, SIGTERM or SIGHUP, the current iteration is finished, and the run is saved and
    ends. After SIGTERM the exit status is 143, after SIGHUP 129. The processes of ``torchrun``
    train one policy together.

    Args:
        config (TrainConfig): config of the run.
        env (EnvBase, optional): environment to use in place of the one in the settings.
        callbacks (sequence of Callback or str): callbacks of the run, in place of those in the
            settings.

    Raises:
        UserError: the request cannot be met; the message says how to fix it.
    """
    with joined(config) as ranks:
        return finish(start_training(config, env, ranks=ranks, callbacks=callbacks))


def resume(
    folder: str | Path,
    *,
    env: EnvBase | None = None,
    config: TrainConfig | None = None,
    trust: bool = False,
    callbacks: Sequence[Any] = (),
) -> Run:
    """Resumes a run exactly from its last checkpoint; a run without a checkpoint starts over.

    Args:
        folder (str or Path): folder of the run.
        env (EnvBase, optional): the environment, if the run was started with an environment object.
        config (TrainConfig, optional): settings from now on, in place of the run's.
        trust (bool): whether to trust a run of another user: to import the module of its
            environment, unpickle PettingZoo environments, and follow links out of the folder. If
            False, PettingZoo environments start new episodes. Runs of the same user need no trust.
        callbacks (sequence of Callback or str): the callbacks, if the run was started with objects.

    Raises:
        CheckpointError: the folder has no run or only damaged checkpoints, or is in use.
        TrustError: the run is another user's, and needs ``trust``.
        ConfigError: ``total_frames`` is below the number of finished frames.
    """
    path = Path(folder)
    with trusting(trust), joined(config or read_run_config(path)) as ranks:
        options: dict[str, Any] = {"ranks": ranks, "callbacks": callbacks}
        return finish(resume_training(path, env, config, trust, **options))


def iterate(
    config: TrainConfig, *, env: EnvBase | None = None, callbacks: Sequence[Any] = ()
) -> Iterator[Iteration]:
    """Trains like :func:`train`, one iteration at a time; leaving the loop early saves the run.

    Args:
        config (TrainConfig): config of the run.
        env (EnvBase, optional): environment to use in place of the one in the settings.
        callbacks (sequence of Callback or str): callbacks of the run, in place of those in the
            settings.
    """
    if place() is not None:
        raise ConfigError(
            "iterate is called in one of several processes of torchrun, expected one process; use "
            "torchrl_marl.train, or start one process."
        )
    training = start_training(config, env, callbacks=callbacks)
    iterations = _iterate(training)
    # `finally` does not run in a generator that never starts. At exit, one that is left open must
    # end before Python clears the modules.
    training.left = weakref.finalize(iterations, training.leave)
    atexit.register(_close_iterations, weakref.ref(iterations))
    return iterations


def _close_iterations(iterations: weakref.ref[Generator[Iteration, None, None]]) -> None:
    left_open = iterations()
    if left_open is not None:
        left_open.close()


def finish(training: Training) -> Run:
    """Trains a started or resumed run to its end; can be interrupted like :func:`train`."""
    with training.interruption:
        for _ in _iterate(training):
            pass
    return training.run


def _iterate(training: Training) -> Generator[Iteration, None, None]:
    working = training.interruption  # outside of this context, signals belong to the caller
    if training.config.distributed.backend == "ray":
        from torchrl_marl.training.shards import report_death

        report_death(training.collector, training.folder)
    with terminable(), named(training.folder):
        try:
            with working:
                training.begin()
            while not (working.stop_requested or training.done):
                with working, contextlib.suppress(Interrupted):
                    iteration = training.step()
                if not working.stop_requested:
                    yield iteration
            with working:
                if working.stop_requested:
                    training.save()
                else:
                    training.end()
            working.handle_signal(training.folder)
        except GeneratorExit:
            training.save()
            raise
        finally:
            training.close()
