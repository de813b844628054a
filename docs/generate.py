"""Writes the pages that follow from the code: ``settings.md`` and ``recipes.md``.

    python docs/generate.py

Do this whenever a setting or a recipe has changed; the tests say so.
"""

from __future__ import annotations

from pathlib import Path

from torchrl_marl.console import settings_markdown
from torchrl_marl.recipes import DEFAULT_RECIPE, explain, read_config, recipe_names

FOLDER = Path(__file__).resolve().parent
CONFIGS = FOLDER.parent / "torchrl_marl" / "configs"

SETTINGS = """\
# Settings

<!-- written by `python docs/generate.py`; edit the fields of the dataclasses instead -->

Every setting with its default. A recipe holds what differs from these; `torchrl-marl list settings
RECIPE` shows its values, `torchrl-marl list schema` is a JSON schema for editors, and a run's
`config.yaml` has every setting. Those of `learner` are its `algorithm`'s, here `mappo`.

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
    return SETTINGS + settings_markdown(explain()) + "\n"


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
