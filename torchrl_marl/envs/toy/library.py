"""The toy worlds by name."""

from __future__ import annotations

import inspect
from typing import Any

from torchrl_marl.envs.config import EnvConfig, own_world_hint
from torchrl_marl.envs.libraries import Library, check_kinds
from torchrl_marl.errors import ConfigError, nearest, quoted

__all__ = ["LIBRARY", "TOY_WORLDS", "class_name", "make_toy"]

TOY_WORLDS = (
    "arena",
    "echo",
    "kuhn",
    "leduc",
    "levers",
    "matching_levers",
    "matrix_game",
    "nim",
    "paces",
    "predator_prey",
    "speaker_listener",
    "traffic_junction",
    "two_step_game",
    "zero_sum",
)
"""Names of the toy worlds."""


def class_name(name: str) -> str:
    """Returns the name of a toy world's class.

    Examples:
        >>> class_name("two_step_game")
        'TwoStepGame'
    """
    return name.title().replace("_", "")


def make_toy(name: str, **arguments: Any) -> Any:
    """Builds a toy world by its name.

    Args:
        name (str): one of :data:`TOY_WORLDS`.
        **arguments: of its class.
    """
    from torchrl_marl.envs import toy

    world = getattr(toy, class_name(name))
    continuous = arguments.pop("continuous_actions")
    if name == "arena":
        arguments.setdefault("continuous_actions", continuous)
    known = inspect.signature(world.__init__).parameters.values()
    check_kinds(arguments, {one.name: one.default for one in known})
    return world(**arguments)


def check_toy(config: EnvConfig) -> None:
    """Refuses an unknown toy world, and settings that toy worlds do not take.

    Raises:
        ConfigError: naming the setting.
    """
    if config.name not in TOY_WORLDS:
        raise ConfigError(
            f"unknown toy world {quoted(config.name)}; "
            f"{nearest(config.name, TOY_WORLDS) or own_world_hint(config.name)}"
            f"choose among {', '.join(TOY_WORLDS)}."
        )
    for name in ("seed", "device"):
        if name in config.kwargs:
            raise ConfigError(
                f"env.kwargs has {name!r}, which is no argument of the world; set the run's own."
            )


LIBRARY = Library(
    "small worlds whose best return is known",
    "torchrl_marl.envs.toy.library:make_toy",
    settings=("num_envs", "max_steps", "continuous_actions"),
    states=(),
    worlds=lambda: list(TOY_WORLDS),
    own_limit=False,
    captured=True,
    check=check_toy,
)
