"""Description of the foraging tasks, which are built by their names."""

from __future__ import annotations

import inspect
from typing import Any

from torchrl_marl.envs.config import EnvConfig
from torchrl_marl.envs.foraging.names import TASKS, read_task
from torchrl_marl.envs.libraries import Library, check_kinds
from torchrl_marl.errors import ConfigError, nearest, quoted

__all__ = ["LIBRARY", "make_foraging"]


def make_foraging(name: str, **arguments: Any) -> Any:
    """Builds a foraging task by its name.

    Args:
        name (str): a name that :func:`~torchrl_marl.envs.foraging.names.read_task` understands.
        **arguments: arguments of the environment's class; they override those of the name.
    """
    from torchrl_marl.envs import foraging

    task = read_task(name)
    if task is None:
        raise ConfigError(_unknown_task_message(name))
    env = getattr(foraging, task[0])
    known = inspect.signature(env.__init__).parameters.values()
    check_kinds(arguments, {parameter.name: parameter.default for parameter in known})
    return env(**{**task[1], **arguments})


def check_foraging(config: EnvConfig) -> None:
    """Raises an error if a task is unknown, or an argument is a setting of the run.

    Raises:
        ConfigError: a task or argument is unknown; the message names it.
    """
    name = str(config.name)
    if read_task(name) is None:
        raise ConfigError(_unknown_task_message(name))
    for name in ("seed", "device"):
        if name in config.kwargs:
            raise ConfigError(
                f"env.kwargs has {name!r}, which is not an argument of the environment; use the "
                "run's setting."
            )


def _unknown_task_message(name: str) -> str:
    original = "grid" if "grid" in name else "img" if "img" in name else None
    if original is not None:
        package = "rware" if "rware" in name else "lbforaging"
        return (
            f"{quoted(name)} has observations that are images ({original}), which foraging lacks; "
            f"install the original package and use env=pettingzoo/{package}/NAME."
        )
    return (
        f"unknown foraging task {quoted(name)}; {nearest(name, TASKS)}expected a name such as "
        f"{', '.join(TASKS)}."
    )


LIBRARY = Library(
    "level-based foraging (LBF) and the robotic warehouse (RWARE), in one batch",
    "torchrl_marl.envs.foraging.library:make_foraging",
    settings=("num_envs", "max_steps"),
    of_objects=(),
    states=(),
    environments=lambda: list(TASKS),
    unlisted=True,
    captured=True,
    check=check_foraging,
)
"""Level-based foraging and the robotic warehouse."""
