"""Listings of the command line, and where its files go."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path

from torchrl_marl.apps.console import settings_markdown, settings_table, silence_others, table
from torchrl_marl.errors import ConfigError, quoted

__all__ = ["beside", "free", "print_list"]


def beside(folders: Iterable[str | Path]) -> Path:
    """Returns the folder in which all of these lie; that of the first where they share none.

    Args:
        folders (iterable of paths): run folders.

    Examples:
        >>> beside(["runs/a/seed0", "runs/b"]).as_posix()
        'runs'
    """
    parents = [os.path.dirname(os.path.abspath(folder)) for folder in folders]
    try:
        found = os.path.commonpath(parents)
    except ValueError:  # of several drives
        found = parents[0]
    if os.path.dirname(found) == found:
        found = parents[0]
    near = os.path.relpath(found)
    return Path(found if near.startswith(os.pardir) else near)


def free(path: Path) -> Path:
    """Returns the path, or one with a number where there is something already.

    Args:
        path (Path): a file or a folder.
    """
    if not os.path.lexists(path):
        return path
    numbered = (path.with_name(f"{path.stem}_{i}{path.suffix}") for i in count(2))
    return next(one for one in numbered if not os.path.lexists(one))


def print_list(
    what: str | None, recipe: str | None, *, markdown: bool = False, world: str | None = None
) -> None:
    """Prints recipes, worlds, algorithms, suites, settings or the schema of recipes.

    Args:
        what (str, optional): which; by default the first three.
        recipe (str, optional): whose settings.
        markdown (bool): settings as a table, with their defaults.
        world (str, optional): a world or a recipe: which algorithms fit it.

    Raises:
        ConfigError: words that do not go together.
    """
    from torchrl_marl import recipes

    if recipe is not None and what != "settings":
        raise ConfigError(
            f"found {quoted(recipe)} after {what!r}, expected nothing; "
            "`torchrl-marl list settings RECIPE` shows the values of a recipe."
        )
    if markdown and what != "settings":
        raise ConfigError(
            "--markdown is given without `settings`, expected: list settings --markdown."
        )
    if world is not None:
        if what != "algorithms":
            raise ConfigError(
                f"--for is given without `algorithms`, expected: list algorithms --for {world}."
            )
        _list_fitting(world)
        return
    if what == "settings":
        _list_settings(recipe, markdown)
        return
    if what == "schema":
        from torchrl_marl.settings import json_schema
        from torchrl_marl.training.config import TrainConfig

        print(json.dumps(json_schema(TrainConfig, "a recipe of torchrl_marl"), indent=2))
        return
    from torchrl_marl.envs.libraries import world_rows
    from torchrl_marl.learners.algorithms import ALGORITHMS

    lists: dict[str, Callable[[], list[tuple[str, str]]]] = {
        "recipes": recipes.recipe_rows,
        "worlds": world_rows,
        "scenarios": world_rows,
        "suites": _suites,
        "algorithms": lambda: list(ALGORITHMS.words().items()),
    }
    for one in [what] if what else ("recipes", "scenarios", "algorithms"):
        print(f"{one}:")
        print(table(lists[one]()))


def _suites() -> list[tuple[str, str]]:
    from torchrl_marl.apps.suites.running import suite_rows

    return suite_rows()


def _list_fitting(world: str) -> None:
    silence_others()
    from torchrl_marl.apps.choosing import algorithms_for

    print(algorithms_for(world).text())


def _list_settings(recipe: str | None, markdown: bool) -> None:
    from torchrl_marl.recipes import DEFAULT_RECIPE, explain, read_config
    from torchrl_marl.settings import read_by_others

    if markdown:
        values = None if recipe is None else read_config(recipe)
        print(settings_markdown(explain(values)))
        return
    recipe = recipe or DEFAULT_RECIPE
    config = read_config(recipe)
    idle = tuple(f"{key}." for key in read_by_others(config))
    chosen = [one for one in explain(config) if not f"{one.key}.".startswith(idle)]
    print(f"settings, with their values in {recipe}:")
    print(settings_table(chosen, words=True))
