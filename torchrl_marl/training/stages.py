"""Stages of a curriculum: runs in one folder, each of which starts from the one before."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torchrl.envs import EnvBase

from torchrl_marl.envs.make import make_env
from torchrl_marl.envs.transforms import with_dense_groups
from torchrl_marl.errors import ConfigError, quoted
from torchrl_marl.learners.build import build_learners
from torchrl_marl.learners.capabilities import RANKS
from torchrl_marl.learners.config import finds_clusters
from torchrl_marl.runtime.random_state import RandomState
from torchrl_marl.runtime.torchrun import place
from torchrl_marl.specs import TeamSpec
from torchrl_marl.training.config import TrainConfig
from torchrl_marl.training.evaluation import EVALUATION_SEED
from torchrl_marl.training.folder import RunFolder, has_checkpoint
from torchrl_marl.training.interruption import Terminated
from torchrl_marl.training.messages import print_message
from torchrl_marl.training.origin import sign_run
from torchrl_marl.training.progress import write_summary
from torchrl_marl.training.run import Run
from torchrl_marl.training.start_from import future_source, load_parts
from torchrl_marl.training.trainer import train, write_config

__all__ = ["check_fits", "check_stages", "new_folder", "train_stages"]

Stages = Mapping[str, TrainConfig]
"""Name of a stage -> its settings, in order."""


def check_stages(config: TrainConfig, stages: Stages, env: Any) -> None:
    """Refuses objects, several processes, and unknown groups in ``until``.

    Args:
        config (TrainConfig): config of the whole run.
        stages (mapping): settings of the stages.
        env (EnvBase, optional): environment that the caller gives.

    Raises:
        ConfigError: an environment or callback is an object, there are several processes, or a
            group is unknown.
    """
    if place() is not None:
        RANKS.check(config)
    if env is not None:
        raise ConfigError(
            "stages is given with an environment object, but each stage makes its own; name the "
            "environment, such as env=vmas/balance."
        )
    for name, own in stages.items():
        if any(one.startswith("<object>:") for one in own.callbacks):
            raise ConfigError(
                "stages is given with a callback object, but each stage makes its own; name it, "
                "such as callbacks=[my_callbacks:Patience]."
            )
        _check_groups(name, own)


def _check_groups(name: str, config: TrainConfig) -> None:
    """Refuses an ``until`` of a group that the stage's environment does not have."""
    compared = [one for one, x in config.until.items() if x is not None]
    groups_compared = [
        one.rpartition("/")[0] for one in compared if one.endswith("/episode_reward")
    ]
    if not groups_compared or config.callbacks:
        return
    env = _make_single_env(config)
    groups = list(TeamSpec.from_env(env).groups)
    env.close()
    for one in groups_compared:
        if one not in groups:
            raise ConfigError(
                f"stages.{name}.until has {quoted(f'{one}/episode_reward')}, but the groups are "
                f"{', '.join(groups)}; use for example {groups[0]}/episode_reward."
            )


def _make_single_env(config: TrainConfig) -> EnvBase:
    """Returns one copy of a stage's environment, to read its specs."""
    options: dict[str, Any] = {"seed": EVALUATION_SEED, "device": config.device, "num_envs": 1}
    return with_dense_groups(make_env(config.played_env, **options))


def check_fits(stages: Stages) -> None:
    """Refuses stages with networks that do not fit those of the stage before.

    Untrained networks are compared, for one copy of each environment. A stage is compared when it
    begins if its simulator needs a process of its own, or if training finds its clusters.

    Args:
        stages (mapping): settings of the stages.

    Raises:
        ConfigError: an environment cannot be made, or networks do not fit.
    """
    before: list[Any] | None = None
    for name, config in stages.items():
        try:
            learners = _new_learners(config)
            if before is not None and learners is not None:
                load_parts(learners, future_source(str(config.init_from), before), config.init)
        except ConfigError as error:
            raise ConfigError(f"stages.{name}: {error}") from None
        before = learners


def _new_learners(config: TrainConfig) -> list[Any] | None:
    """Returns new learners of a stage, made apart; None if they need the run itself."""
    record = config.env.record
    is_exclusive = config.env.has_clients or (record is not None and record.one_per_process)
    if is_exclusive or any(map(finds_clusters, config.learners().values())):
        return None
    with RandomState(config.seed, config.device).active():
        env = _make_single_env(config)
        team = TeamSpec.from_env(env)
        env.close()
        return build_learners(team, config.learner, config.groups, device=config.device)


def new_folder(config: TrainConfig) -> RunFolder:
    """Creates the folder of a run with stages, and writes its settings there.

    Args:
        config (TrainConfig): config of the whole run.
    """
    folder = RunFolder.new(config)
    try:
        write_config(folder.path, config)
        sign_run(folder.path, config)
    except BaseException:
        folder.give_up()
        raise
    return folder


def train_stages(folder: RunFolder, stages: Stages, resume: Callable[[str, Path], Run]) -> Run:
    """Trains the stages that have not ended, and returns the run of the last.

    Args:
        folder (RunFolder): folder of the whole run, which is released at the end.
        stages (mapping): settings of the stages, with folders in that folder.
        resume (callable): function of a stage's name and folder that resumes it.

    Raises:
        KeyboardInterrupt, Terminated: after Ctrl-C, SIGTERM or SIGHUP, with the folder of the
            whole run.
    """
    try:
        with _name_folder_on_stop(folder.path):
            for number, (name, config) in enumerate(stages.items(), 1):
                path = folder.path / name
                if number < len(stages) and (path / "summary.json").is_file():
                    continue
                print_message(f"stage {number} of {len(stages)}: {name}, in {str(path)!r}")
                if has_checkpoint(path):
                    run = resume(name, path)
                else:
                    run = train(dataclasses.replace(config, folder=str(path)))
        write_summary(
            folder.path, {**run.summary, "stages": _read_stage_summaries(folder.path, stages)}
        )
        return run
    finally:
        folder.release()


@contextlib.contextmanager
def _name_folder_on_stop(folder: Path) -> Iterator[None]:
    """Names the folder of the whole run in exceptions that stop a stage."""
    try:
        yield
    except KeyboardInterrupt as stop:
        stop.args = folder, *stop.args[1:]
        raise
    except Terminated as stop:
        stop.folder = folder
        raise


def _read_stage_summaries(folder: Path, stages: Stages) -> dict[str, Any]:
    """Returns the returns and frames of each stage."""
    kept = ("return_before", "return_after", "frames", "seconds", "stopped")
    found = {}
    for name in stages:
        summary = json.loads((folder / name / "summary.json").read_text(encoding="utf-8"))
        found[name] = {key: summary[key] for key in kept if key in summary}
    return found
