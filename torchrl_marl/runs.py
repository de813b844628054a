"""Runs: trained, iterated over, resumed, and drawn."""

from __future__ import annotations

import errno
import importlib.util
import os
import warnings
from collections.abc import Iterator, Mapping
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
    validate,
)
from torchrl_marl.runtime.applications import application
from torchrl_marl.runtime.torchrun import place
from torchrl_marl.runtime.trust import refuse_links, trusting
from torchrl_marl.settings import flatten, normalized, unfold
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


def train(recipe: Recipe = DEFAULT_RECIPE, *, env: Any = None, **overrides: Any) -> Run:
    """Trains a team and returns the run: its policy, its folder, its figures.

    Args:
        recipe (str, Path, TrainConfig or dict): a recipe's name, the path of a YAML file, or
            the settings themselves.
        env (EnvBase, environment, str or dict, optional): what is played instead of the recipe's:
            an environment; an environment of PettingZoo or JaxMARL or what makes one, of which
            there are then ``env.num_envs`` copies; a name, such as ``"vmas/wheel"``; or a dict that
            overrides the recipe's ``env`` settings.
        overrides: settings, such as ``seed=1``, ``learner={"lr": 1e-3}`` or
            ``**{"learner.lr": 1e-3}``.

    Raises:
        UserError: what is asked for cannot be done; the message names the fix.

    Examples:
        >>> import torchrl_marl
        >>> run = torchrl_marl.train("vmas_balance_mappo", seed=1)  # doctest: +SKIP
        >>> run.summary["return_after"]  # doctest: +SKIP
        41.2
    """
    config, env = _prepared(recipe, env, overrides)
    from torchrl_marl.training import trainer

    run = trainer.train(config, env=env)
    draw(run.folder)
    return run


def iterate(recipe: Recipe = DEFAULT_RECIPE, *, env: Any = None, **overrides: Any) -> Iterator[Any]:
    """As :func:`train`, as a generator: yields after every iteration.

    Settings are checked at the call, before the first iteration.
    """
    config, env = _prepared(recipe, env, overrides)
    from torchrl_marl.training import trainer

    return trainer.iterate(config, env=env)


def resume(
    folder: str | Path,
    /,
    *,
    env: EnvBase | Mapping[str, Any] | None = None,
    trust: bool = False,
    **overrides: Any,
) -> Run:
    """Goes on with a run from its last checkpoint; one without a checkpoint begins anew.

    Args:
        folder (str or Path): the run's.
        env (EnvBase, optional): for a run on an environment of one's own.
        trust (bool): run the code that a run of somebody else's brings: its environment's module,
            and the pickled environments of a PettingZoo run, whose episodes begin anew otherwise;
            follow links out of its folder; and use the cluster, addresses and services that it
            names.
        overrides: settings that change from now on, as ``config.yaml`` then says:
            ``total_frames``, ``stop_at_return``, those of ``evaluation``, ``checkpoint`` and
            ``logging``, and where and how it is computed: ``device``, ``threads``, ``execution``
            and ``distributed``, but for the number of shards. Linear schedules and ``unshare_at``
            are those of a run of the new ``total_frames``.

    Raises:
        UserError: what is asked for cannot be done; the message names the fix.
    """
    if isinstance(env, Mapping):
        overrides, env = {**overrides, "env": env}, None
    with trusting(trust):
        before = read_run_config(folder)
        refuse_links(Path(folder))
    if env is None:
        check_environment(Path(folder), before.env, trust)
    config = read_config(before, overrides)
    given = flatten(normalized(TrainConfig, unfold(overrides)))
    with trusting(trust):
        file = Path(folder) / "config.yaml"
        check_origin(file, config, given=given, own_env=env is not None)
    if differences(before, config):  # beside a changed file they may be the run's own settings
        _check_given(Path(folder), before, config)
    if config != before:
        try:
            validate(config, own_env=env is not None or config.env.library == "own")
        except ConfigError:
            _check_given(
                Path(folder), before, config
            )  # an edited file's setting may not fit others
            raise
    check_compiler_cache()
    check_device(config)
    check_logging(config.logging)
    from torchrl_marl.training import trainer

    run = trainer.resume(Path(folder), env=env, config=config, trust=trust)
    draw(run.folder)
    return run


def _check_given(folder: Path, before: TrainConfig, config: TrainConfig) -> None:
    """Refuses settings that a run does not have, before anything is made.

    Raises:
        ConfigError: naming each, and what the run has.
    """
    made = None
    if has_checkpoint(folder):
        from torchrl_marl.training.checkpoint import load_latest

        used, state = load_latest(folder)
        made = settings_of(state, used)
    check_unchanged(made or before, config, before, folder / "config.yaml")


def check_device(config: TrainConfig) -> None:
    """Refuses a CUDA device that is not there; imports torch only where one is asked for.

    Raises:
        ConfigError: naming the devices that there are.
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
    """Refuses a folder for compiled code that cannot be made or written, before torch meets it.

    Raises:
        WriteError: naming the variable that says where it is.
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
            f"({error.strerror}); set it to a folder that can, or unset it."
        ) from None


def draw(folder: Path) -> None:
    """Draws a run's learning curve into its folder, where matplotlib is installed."""
    here = place()
    if here is not None and here.rank:
        return
    if importlib.util.find_spec("matplotlib") is not None:
        learning_curve = application("plotting").learning_curve
        try:
            learning_curve([folder], path=folder / "learning_curve.png")
        except (CheckpointError, MissingExtraError, WriteError) as error:
            warnings.warn(str(error), stacklevel=2)  # the run is whole without its picture


def _prepared(
    recipe: Recipe, env: Any, overrides: dict[str, Any]
) -> tuple[TrainConfig, EnvBase | None]:
    given, kind = None, None
    if isinstance(env, Mapping):
        overrides = {**overrides, "env": env}
    elif isinstance(env, str):
        overrides = {**_environment_of(recipe, *split_name(env)), **overrides}
    elif env is not None:
        given, kind = env, library_of(env)
        if kind is not None:
            name = getattr(env, "__name__", type(env).__name__)
            _refuse_beside(
                overrides, "env.kwargs.", "an environment, which takes no arguments from here"
            )
            overrides = {**_environment_of(recipe, kind, name), **overrides}
        else:
            _refuse_beside(overrides, "env.", "an environment that is built already")
    built = given is not None and (kind is None or find_library(kind).one_per_process)
    config = load_config(recipe, overrides, own_env=built)
    check_compiler_cache()
    check_device(config)
    check_logging(config.logging)
    check_folder(config)
    return config, given if given is None else as_environment(given, config.env, config.device)


def _refuse_beside(overrides: Mapping[str, Any], idle: str, what: str) -> None:
    """Refuses settings that nothing reads beside what is given as ``env``."""
    for key in flatten(unfold(overrides)):
        if key.startswith(idle):
            raise ConfigError(f"{key} is given beside {what}; build it so, or leave {key} out.")


def _environment_of(recipe: Recipe, library: str, name: str) -> dict[str, Any]:
    """Overrides for an environment of a library, with its own time limit where it may have one."""
    before = read_config(recipe).env.library
    return flatten({"env": environment_settings(library, name, before)})
