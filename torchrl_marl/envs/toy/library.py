"""Description of the toy environments, which are built by their names."""

from __future__ import annotations

import inspect
from typing import Any

from torchrl_marl.envs.config import EnvConfig, own_environment_hint
from torchrl_marl.envs.libraries import Library, check_kinds
from torchrl_marl.errors import ConfigError, nearest, quoted

__all__ = ["LIBRARY", "TOY_ENVIRONMENTS", "class_name", "make_toy"]

TOY_ENVIRONMENTS = (
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
"""Names of the toy environments."""


def class_name(name: str) -> str:
    """Returns the class name of a toy environment.

    Examples:
        >>> class_name("two_step_game")
        'TwoStepGame'
    """
    return name.title().replace("_", "")


def make_toy(name: str, **arguments: Any) -> Any:
    """Builds a toy environment by its name.

    Args:
        name (str): one of :data:`TOY_ENVIRONMENTS`.
        **arguments: arguments of the environment's class.
    """
    from torchrl_marl.envs import toy

    env = getattr(toy, class_name(name))
    continuous = arguments.pop("continuous_actions")
    if name == "arena":
        continuous = continuous and not arguments.get("hybrid_actions")
        arguments.setdefault("continuous_actions", continuous)
    known = inspect.signature(env.__init__).parameters.values()
    check_kinds(arguments, {one.name: one.default for one in known})
    return env(**arguments)


def check_toy(config: EnvConfig) -> None:
    """Raises an error if a toy environment is unknown, or does not take a given setting.

    Raises:
        ConfigError: an environment or setting is unknown; the message names it.
    """
    if config.name not in TOY_ENVIRONMENTS:
        raise ConfigError(
            f"unknown toy environment {quoted(config.name)}; "
            f"{nearest(config.name, TOY_ENVIRONMENTS) or own_environment_hint(config.name)}"
            f"choose among {', '.join(TOY_ENVIRONMENTS)}."
        )
    for name in ("seed", "device"):
        if name in config.kwargs:
            raise ConfigError(
                f"env.kwargs has {name!r}, which is not an argument of the environment; use the "
                "run's setting."
            )


LIBRARY = Library(
    "small environments with known optimal returns",
    "torchrl_marl.envs.toy.library:make_toy",
    settings=("num_envs", "max_steps", "continuous_actions"),
    states=(),
    environments=lambda: list(TOY_ENVIRONMENTS),
    own_limit=False,
    captured=True,
    check=check_toy,
)
