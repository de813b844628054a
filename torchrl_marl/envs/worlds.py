"""Which worlds there are, told without importing their libraries."""

from __future__ import annotations

import textwrap

from torchrl_marl.envs.config import EnvConfig
from torchrl_marl.envs.own import check_own
from torchrl_marl.envs.pettingzoo.library import known_names
from torchrl_marl.envs.vmas.library import check_scenario, scenario_names
from torchrl_marl.errors import ConfigError, MissingExtraError, nearest, quoted

__all__ = ["TOY_WORLDS", "check_world_name", "world_rows"]

TOY_WORLDS = ("arena", "matrix_game", "nim", "paces", "speaker_listener", "two_step_game")
"""Worlds of ``library: toy``."""


def check_world_name(env: EnvConfig) -> None:
    """Refuses a world that its library does not have, and arguments that it would not read.

    Args:
        env (EnvConfig): of a known library, or with a world of one's own.

    Raises:
        ConfigError: naming what is unknown and what comes nearest.
        MissingExtraError: the library is not installed.
    """
    if ":" in env.library:
        check_own(env.library)
    elif env.library == "vmas":
        check_scenario(env.name, env.kwargs)
    elif env.library == "toy" and env.name not in TOY_WORLDS:
        raise ConfigError(
            f"unknown toy world {quoted(env.name)}; {nearest(env.name, TOY_WORLDS)}"
            f"choose among {', '.join(TOY_WORLDS)}."
        )


def world_rows() -> list[tuple[str, str]]:
    """Returns rows for ``torchrl-marl list worlds``: library and names of its worlds."""
    rows = []
    for library, names_of in (("vmas", scenario_names), ("pettingzoo", known_names)):
        try:
            text = ", ".join(names_of())
        except MissingExtraError as error:
            text = str(error)
        lines = textwrap.wrap(text, 88, break_on_hyphens=False)
        rows += [(library, lines[0]), *(("", line) for line in lines[1:])]
    return [
        *rows,
        ("jaxmarl", "HeuristicEnemySMAX, MPE_simple_spread_v3, overcooked, hanabi and the others"),
        ("", "of jaxmarl.registered_envs"),
        ("isaaclab", "your Isaac Lab's multi-agent tasks: Isaac-Cart-Double-Pendulum-Direct-v0"),
        ("toy", ", ".join(TOY_WORLDS)),
        ("module:Class", "a world of your own, as env.library; path/to/file.py:Class will do, too"),
    ]
