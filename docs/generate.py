"""Writes the pages that follow from the code: ``settings.md`` and ``recipes.md``.

    python docs/generate.py

Do this whenever a setting or a recipe has changed; the tests say so.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from torchrl_marl.console import settings_markdown
from torchrl_marl.learners.algorithms import ALGORITHMS
from torchrl_marl.learners.config import OnPolicyConfig
from torchrl_marl.recipes import DEFAULT_RECIPE, explain, read_config, recipe_names
from torchrl_marl.settings import Setting, settings_of

FOLDER = Path(__file__).resolve().parent
CONFIGS = FOLDER.parent / "torchrl_marl" / "configs"

SETTINGS = """\
# Settings

<!-- written by `python docs/generate.py`; edit the fields of the dataclasses instead -->

Every setting with its default. A recipe holds what differs from these; `torchrl-marl list settings
RECIPE` shows its values, `torchrl-marl list schema` is a JSON schema for editors, and a run's
`config.yaml` has every setting. Those of `learner` are its `algorithm`'s: first `mappo`'s, then
what differs for the others.

"""

RECIPES = f"""\
# Recipes

<!-- written by `python docs/generate.py`; edit the comments of the recipes instead -->

`torchrl-marl train RECIPE` trains one; `{DEFAULT_RECIPE}` is the default. The names link to the
files, which hold what differs from the [defaults](settings.md). Times are for one CPU core, where
nothing else is said.

| recipe | world | frames | what it is |
|---|---|---:|---|
"""


def settings_page() -> str:
    """Returns ``settings.md``."""
    common = settings_markdown(explain()) + "\n"
    return SETTINGS + common + "".join(_family(*family) for family in _families().items())


def _families() -> dict[type, list[str]]:
    """Returns the schemas of ``learner`` and the algorithms that have them."""
    families: dict[type, list[str]] = {}
    for name in ALGORITHMS.words():
        families.setdefault(ALGORITHMS.schema(name), []).append(name)
    return families


def _help(setting: Setting) -> str:
    """Returns the meaning, and where a setting is read."""
    where = " and ".join(where.in_words("") for where in setting.read_where())
    return f"{setting.help} Read where {where}." if where else setting.help


def _told(setting: Setting) -> tuple[object, ...]:
    return setting.default, setting.help, dict(setting.words)


def _family(schema: type, algorithms: list[str]) -> str:
    """Returns what of a family's settings differs from those of ``mappo``."""
    first, own = settings_of(OnPolicyConfig()), settings_of(schema())
    differ = [
        dataclasses.replace(setting, key=f"learner.{key}", help=_help(setting))
        for key, setting in own.items()
        if key != "algorithm" and (key not in first or _told(setting) != _told(first[key]))
    ]
    if schema is OnPolicyConfig or not differ:
        return ""
    names = ", ".join(f"`{name}`" for name in algorithms)
    sections = {key.partition(".")[0] for key in own}
    lacking = {
        key if key.partition(".")[0] in sections else key.partition(".")[0]: None
        for key in first
        if key not in own
    }
    without = f" There is no {', '.join(f'`learner.{key}`' for key in lacking)}." if lacking else ""
    return (
        f"\n## {names}\n\nWhat is new or has another default or meaning than above.{without}\n\n"
        f"{settings_markdown(differ)}\n"
    )


def recipes_page() -> str:
    """Returns ``recipes.md``."""
    return RECIPES + "".join(_recipe_row(name) + "\n" for name in recipe_names())


def _recipe_row(name: str) -> str:
    config = read_config(name)
    link = f"[`{name}`](../torchrl_marl/configs/{name}.yaml)"
    world = f"`{config.env.library}/{config.env.name}`"
    cells = link, world, f"{config.total_frames:,}", _comment(CONFIGS / f"{name}.yaml")
    return f"| {' | '.join(cells)} |"


def _comment(path: Path) -> str:
    """Returns the comment with which a recipe begins."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    return " ".join(lines).replace("|", "\\|")


PAGES = {"settings.md": settings_page, "recipes.md": recipes_page}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")
        print(FOLDER / name)
