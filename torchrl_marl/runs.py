"""Functions that train, resume and plot runs."""

from __future__ import annotations

import dataclasses
import errno
import importlib.util
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_marl.envs.external_code import as_environment
from torchrl_marl.envs.libraries import find_library, library_of
from torchrl_marl.envs.make import split_name
from torchrl_marl.errors import CheckpointError, ConfigError, MissingExtraError, WriteError, quoted
from torchrl_marl.recipes import (
    DEFAULT_RECIPE,
    Recipe,
    environment_settings,
    load_config,
    read_config,
    stages_of,
    validate,
)
from torchrl_marl.runtime.applications import import_application
from torchrl_marl.runtime.torchrun import place
from torchrl_marl.runtime.trust import refuse_links, trusting
from torchrl_marl.settings import flatten, normalized, unfold, unread
from torchrl_marl.training.config import TrainConfig, read_run_config
from torchrl_marl.training.folder import check_folder, has_checkpoint
from torchrl_marl.training.origin import (
    check_environment,
    check_origin,
    check_unchanged,
    differences,
    settings_of,
)
from torchrl_marl.training.recorder import check_logging

if TYPE_CHECKING:
    from torchrl.envs import EnvBase

    from torchrl_marl.training.run import Run

__all__ = ["check_device", "draw", "iterate", "resume", "train"]


def train(
    recipe: Recipe = DEFAULT_RECIPE,
    *,
    env: Any = None,
    callbacks: Sequence[Any] | None = None,
    **overrides: Any,
) -> Run:
    """Trains a team and returns the run with its policy, folder and results.

    Args:
        recipe (str, Path, TrainConfig or dict): name of a recipe, path of a YAML file, or
            settings.
        env (EnvBase, environment, str or dict, optional): environment in place of the recipe's. An
            environment of PettingZoo or JaxMARL, or a function that makes one, is copied
            ``env.num_envs`` times. A string is a name, such as ``"vmas/wheel"``; a dict overrides
            the recipe's ``env`` settings.
        callbacks (sequence of Callback or str, optional): callbacks in place of the recipe's:
            objects, or names as ``module:Class``.
        overrides: settings, such as ``seed=1``, ``learner={"lr": 1e-3}`` or
            ``**{"learner.lr": 1e-3}``.

    Raises:
        UserError: the request cannot be met; the message says how to fix it.

    Examples:
        >>> import torchrl_marl
        >>> run = torchrl_marl.train("vmas_balance_mappo", seed=1)  # doctest: +SKIP
        >>> run.summary["return_after"]  # doctest: +SKIP
        41.2
    """
    config, env = _prepare_config(recipe, env, overrides, callbacks)
    if config.stages:
        return _train_stages(config, env)
    from torchrl_marl.training import trainer

    run = trainer.train(config, env=env, callbacks=callbacks or ())
    draw(run.folder)
    return run


def iterate(
    recipe: Recipe = DEFAULT_RECIPE,
    *,
    env: Any = None,
    callbacks: Sequence[Any] | None = None,
    **overrides: Any,
) -> Iterator[Any]:
    """Trains like :func:`train`, but as a generator that yields after every iteration.

    The settings are checked when the function is called, before the first iteration.
    """
    config, env = _prepare_config(recipe, env, overrides, callbacks)
    from torchrl_marl.training import trainer

    return trainer.iterate(config, env=env, callbacks=callbacks or ())


def resume(
    folder: str | Path,
    /,
    *,
    env: EnvBase | Mapping[str, Any] | None = None,
    trust: bool = False,
    callbacks: Sequence[Any] | None = None,
    **overrides: Any,
) -> Run:
    """Resumes a run from its last checkpoint; a run without a checkpoint starts over.

    Args:
        folder (str or Path): folder of the run.
        env (EnvBase, optional): the environment, if the run was started with an environment object.
        trust (bool): whether to trust a run of another user. If True, the environment's module is
            imported, pickled PettingZoo environments are loaded (otherwise they start new
            episodes), links out of the folder are followed, and the cluster, addresses and
            services in the settings are used.
        callbacks (sequence of Callback or str, optional): the callbacks of the run, if it was
            started with objects.
        overrides: settings to change, which are also written to ``config.yaml``: ``total_frames``,
            ``stop_at_return``, ``evaluation``, ``checkpoint``, ``logging``, ``device``,
            ``threads``, ``execution`` and ``distributed`` (except the number of shards). Linear
            schedules and ``unshare_at`` follow the new ``total_frames``.

    Raises:
        UserError: the request cannot be met; the message says how to fix it.
    """
    if isinstance(env, Mapping):
        overrides, env = {**overrides, "env": env}, None
    overrides |= _callback_overrides(callbacks)
    with trusting(trust):
        before = read_run_config(folder)
        refuse_links(Path(folder))
    if env is None:
        check_environment(Path(folder), before.env, trust)
    config = read_config(before, overrides)
    given = flatten(normalized(TrainConfig, unfold(overrides)))
    with trusting(trust):
        file = Path(folder) / "config.yaml"
        check_origin(file, config, overridden=given, own_env=env is not None)
    if differences(before, config):  # with an edited file, overrides may restore the run's settings
        _check_unchanged_settings(Path(folder), before, config)
    if config != before:
        try:
            validate(config, own_env=env is not None or config.env.library == "own")
        except ConfigError:
            # A setting of an edited file may contradict others.
            _check_unchanged_settings(Path(folder), before, config)
            raise
    for key, text in unread(config).items():
        if key in given:
            raise ConfigError(f"{text}; leave {key} out.")
    check_compiler_cache()
    check_device(config)
    check_logging(config.logging)
    if config.stages:
        return _resume_stages(Path(folder), before, config, given, {"env": env, "trust": trust})
    from torchrl_marl.training import trainer

    options: dict[str, Any] = {"env": env, "callbacks": callbacks or ()}
    run = trainer.resume(Path(folder), config=config, trust=trust, **options)
    draw(run.folder)
    return run


def _train_stages(config: TrainConfig, env: Any) -> Run:
    """Trains the stages of a run in a new folder."""
    from torchrl_marl.training.stages import check_fits, check_stages, new_folder, train_stages

    stages = stages_of(config)
    check_stages(config, stages, env)
    for own in stages.values():
        check_device(own)
        check_logging(own.logging)
    check_fits(stages)
    folder = new_folder(config)
    try:
        config = dataclasses.replace(config, folder=str(folder.path))
        run = train_stages(folder, stages_of(config), lambda name, path: resume(path))
    except BaseException:
        folder.give_up()
        raise
    draw(folder.path)
    return run


def _resume_stages(
    path: Path,
    before: TrainConfig,
    config: TrainConfig,
    given: Mapping[str, Any],
    origin: Mapping[str, Any],
) -> Run:
    """Continues a run with stages; settings that a stage has itself win over the given ones.

    Args:
        path (Path): folder of the run.
        before, config (TrainConfig): its settings, without and with the given ones.
        given (mapping): the given settings, by dotted name.
        origin (mapping): ``env`` and ``trust``, as for :func:`resume`.
    """
    from torchrl_marl.training.folder import RunFolder
    from torchrl_marl.training.stages import check_stages, train_stages
    from torchrl_marl.training.trainer import write_config

    if own := given.keys() & {"total_frames", "stop_at_return"}:
        raise ConfigError(
            f"{min(own)} is given, but {str(path)!r} has stages, which keep theirs; leave it out, "
            "or resume a stage by itself."
        )
    stages = stages_of(dataclasses.replace(config, folder=str(path)))
    check_stages(config, stages, origin["env"])

    def resume_stage(name: str, folder: Path) -> Run:
        applicable = given.keys() - flatten(unfold(before.stages[name] or {}))
        return resume(folder, trust=origin["trust"], **{key: given[key] for key in applicable})

    with trusting(origin["trust"]):
        folder = RunFolder(path)
        if config != before:
            write_config(path, config)
        run = train_stages(folder, stages, resume_stage)
    draw(path)
    return run


def _check_unchanged_settings(folder: Path, before: TrainConfig, config: TrainConfig) -> None:
    """Refuses settings that differ from those of the run, before anything is built.

    Raises:
        ConfigError: a setting differs; the message names each one, and its value in the run.
    """
    trained_config = None
    if has_checkpoint(folder):
        from torchrl_marl.training.checkpoint import load_latest

        checkpoint_path, state = load_latest(folder, resuming=True)
        trained_config = settings_of(state, checkpoint_path)
    check_unchanged(trained_config or before, config, before, folder / "config.yaml")


def check_device(config: TrainConfig) -> None:
    """Refuses a missing CUDA device; imports torch only for a CUDA device.

    Raises:
        ConfigError: the device is missing; the message names the available devices.
    """
    if not config.device.startswith("cuda"):
        return
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = int(config.device.partition(":")[2] or 0)
    if index >= count:
        there = ", ".join(f"cuda:{i}" for i in range(count)) or "no CUDA device"
        raise ConfigError(
            f"device is {quoted(config.device)}, but torch finds {there} here; use device=cpu."
        )


def check_compiler_cache() -> None:
    """Refuses a compiler cache that cannot be written, before torch uses it.

    Raises:
        WriteError: the cache cannot be written; the message names its environment variable.
    """
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if not folder:
        return
    try:
        os.makedirs(folder, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise WriteError(
            f"TORCHINDUCTOR_CACHE_DIR is {quoted(folder)}, which cannot be written "
            f"({error.strerror}); set it to a writable folder, or unset it."
        ) from None


def draw(folder: Path) -> None:
    """Plots the learning curve of a run into its folder, if matplotlib is installed."""
    here = place()
    if here is not None and here.rank:
        return
    if importlib.util.find_spec("matplotlib") is not None:
        learning_curve = import_application("plotting").learning_curve
        try:
            learning_curve([folder], path=folder / "learning_curve.png")
        except (CheckpointError, MissingExtraError, WriteError) as error:
            warnings.warn(str(error), stacklevel=2)  # the run is complete without its plot


def _prepare_config(
    recipe: Recipe, env: Any, overrides: dict[str, Any], callbacks: Sequence[Any] | None
) -> tuple[TrainConfig, EnvBase | None]:
    overrides, given, kind = {**overrides, **_callback_overrides(callbacks)}, None, None
    if isinstance(env, Mapping):
        overrides = {**overrides, "env": env}
    elif isinstance(env, str):
        overrides = {**_environment_overrides(recipe, *split_name(env)), **overrides}
    elif env is not None:
        given, kind = env, library_of(env)
        if kind is not None:
            name = getattr(env, "__name__", type(env).__name__)
            _refuse_overrides(
                overrides, "env.kwargs.", "an environment object, which takes no arguments"
            )
            for key in ("env.randomize", "env.reward_scale", "env.other_play"):
                _refuse_overrides(overrides, key, "an environment object")
            overrides = {**_environment_overrides(recipe, kind, name), **overrides}
        else:
            _refuse_overrides(overrides, "env.", "an environment object")
    is_prebuilt = given is not None and (kind is None or find_library(kind).one_per_process)
    config = load_config(recipe, overrides, own_env=is_prebuilt)
    check_compiler_cache()
    check_device(config)
    check_logging(config.logging)
    check_folder(config)
    return config, given if given is None else as_environment(given, config.env, config.device)


def _callback_overrides(callbacks: Sequence[Any] | None) -> dict[str, Any]:
    """Returns overrides that name the given callbacks."""
    if callbacks is None:
        return {}
    from torchrl_marl.training.callbacks import names_of

    return {"callbacks": names_of(callbacks)}


def _refuse_overrides(overrides: Mapping[str, Any], idle: str, what: str) -> None:
    """Refuses overrides that have no effect on an environment given by the caller."""
    for key in flatten(unfold(overrides)):
        if key.startswith(idle):
            raise ConfigError(
                f"{key} is given with {what}; build the environment with it, or leave it out."
            )


def _environment_overrides(recipe: Recipe, library: str, name: str) -> dict[str, Any]:
    """Returns overrides for an environment of a library, with its own time limit if it has one."""
    before = read_config(recipe).env.library
    return flatten({"env": environment_settings(library, name, before)})
