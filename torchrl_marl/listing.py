"""What there is to choose from: rows for ``torchrl-marl list``."""

from __future__ import annotations

import textwrap

from torchrl_marl.errors import MissingExtraError

__all__ = ["algorithms", "recipes", "scenarios"]


def recipes() -> list[tuple[str, str]]:
    """Every recipe, and what it trains."""
    from torchrl_marl.config import DEFAULT_RECIPE, read_config, recipe_names

    rows = []
    for name in recipe_names():
        recipe = read_config(name)
        note = "  (default)" if name == DEFAULT_RECIPE else ""
        frames = f"{recipe.total_frames:,} frames"
        rows.append((name, f"{recipe.learner.algorithm} on {recipe.env.name}, {frames}{note}"))
    return rows


def scenarios() -> list[tuple[str, str]]:
    """The worlds of each library."""
    from torchrl_marl.config_rules import TOY_WORLDS
    from torchrl_marl.envs.pettingzoo.library import known_names
    from torchrl_marl.envs.vmas.library import scenario_names

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


def algorithms() -> list[tuple[str, str]]:
    """Every algorithm, and what it is."""
    from torchrl_marl.config_rules import ALGORITHMS

    return list(ALGORITHMS.items())
