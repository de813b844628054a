"""Writes the generated pages and tables: settings, recipes, capabilities, metrics and results.

    python docs/generate.py

Run it whenever a setting, a recipe, a metric or a limit has changed; tests check this.
``settings.md``, ``recipes.md`` and ``capabilities.md`` are generated as a whole. Other pages have
generated tables between comments::

    <!-- settings: mappo -->             settings that an algorithm reads, without its networks
    <!-- settings: ippo beside mappo --> differences between two algorithms
    <!-- settings: mappo estimator -->   some settings; the name of a section stands for all in it
    <!-- metrics: mappo -->              metrics of an algorithm, or of every run, from metrics.yaml
    <!-- results: suite -->              first tables of these files in benchmarks/results
    <!-- program: rllib -->              program in benchmarks/coming_from, as code without a test
    <!-- scenarios: vmas -->             names and arguments, from VMAS's files
    <!-- combinations: all -->           algorithms by features, from the checks of the settings
    <!-- versions: all -->               tested versions of Python and torch, from .ci/versions.csv
    <!-- end -->
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
import re
import runpy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import yaml
from capability_tables import capabilities_page, combinations_table

from torchrl_marl.apps.console import settings_markdown
from torchrl_marl.learners.algorithms import ALGORITHMS
from torchrl_marl.learners.config import OnPolicyConfig
from torchrl_marl.recipes import (
    DEFAULT_RECIPE,
    explain,
    read_config,
    recipe_names,
)
from torchrl_marl.settings import ReadWhere, Setting, read_by_others, settings_of, shown
from torchrl_marl.training.config import TrainConfig

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER.parent / "benchmarks" / "results"
CI = FOLDER.parent / ".ci"
CONFIGS = FOLDER.parent / "torchrl_marl" / "configs"

SETTINGS = f"""\
# Settings

<!-- written by `python docs/generate.py`; edit the fields of the dataclasses instead -->

This page lists every setting with its default. A recipe overrides some defaults, and the command
line overrides the recipe:

```bash
torchrl-marl train vmas_balance_mappo seed=1 learner.lr=1e-3
```

Without a recipe, `torchrl-marl train` uses `{DEFAULT_RECIPE}`, which also overrides some of these
defaults.

In Python, pass `seed=1` or `learner={{"lr": 1e-3}}` to `torchrl_marl.train`. In a YAML file,
sections are nested:

```yaml
seed: 1
learner:
    algorithm: mappo
    lr: 1e-3
```

- A recipe holds only settings that differ from these defaults.
- `torchrl-marl list settings RECIPE` shows all values of a recipe.
- `torchrl-marl list schema` prints a JSON schema for editors.
- The `config.yaml` of a run has every setting.

The name of a section alone stands for the first setting of its table: `learner=qmix` means
`learner.algorithm=qmix`.

The settings of `learner` depend on the algorithm. The section `learner` lists those of `mappo` and
`ippo`. The last sections list the differences of the other algorithms.

A *frame* is one step of one copy of the environment, with all its agents. An *env* is such a copy.

On the documentation site, the anchor of a setting is its name: `settings.html#learner.lr`. In
the last sections, the anchor also ends with the section's first algorithm:
`settings.html#learner.minibatch_size-qmix`.

"""

RECIPES = f"""\
# Recipes

<!-- written by `python docs/generate.py`; edit the comments of the recipes instead -->

A recipe is a YAML file with the settings of a run. `torchrl-marl train RECIPE` trains one; the
default is `{DEFAULT_RECIPE}`. The names below link to the files, which hold only settings that
differ from the [defaults](settings.md). Times are for one CPU core, unless stated otherwise.

"""


def settings_page() -> str:
    """Returns ``settings.md``."""
    sections: dict[str, list[Setting]] = {}
    for setting in explain():
        sections.setdefault(_section_of(setting.key), []).append(setting)
    common, readers = [], _readers(_families()[OnPolicyConfig])
    for name, own in sections.items():
        text = ""
        if name == "learner.critic":
            own, text = _without_equal_notes(own, sections["learner.actor"]), _AS_OF_ACTORS
        title = f"`{name}`" if name else "The run"
        common.append(f"## {title}\n\n{text}{settings_table(own, '', readers=readers)}\n")
    families = [_family(*family) for family in _families().items()]
    text = "\n".join([*common, *filter(None, families)])
    return f"{SETTINGS}{contents(text)}\n\n{text}"


_AS_OF_ACTORS = """\
Options, notes and conditions that are not repeated here are the same as for
[`learner.actor`](#learneractor).

"""


def _without_equal_notes(settings: Sequence[Setting], of: Sequence[Setting]) -> list[Setting]:
    """Returns the settings of critics, without the notes that are also those of actors."""
    others = {setting.key.replace(".actor.", ".critic."): setting for setting in of}
    found = []
    for setting in settings:
        other = others.get(setting.key)
        if other is not None and _compared(setting)[1:] == _compared(other)[1:]:
            first, _ = _split_sentence(setting.markdown)
            setting = dataclasses.replace(setting, markdown=first, notes=())
        found.append(setting)
    return found


def _section_of(key: str) -> str:
    """Returns the section that a setting is listed under: ``learner.actor`` of one within it."""
    return ".".join(key.split(".")[:-1][:2])


def contents(text: str) -> str:
    """Returns a list of links to the sections of a page."""
    titles = re.findall(r"^## (.*)$", text, re.M)
    return "\n".join(f"- [{title}](#{_anchor(title)})" for title in titles)


def _anchor(title: str) -> str:
    """Returns the anchor of a heading, as GitHub and the site make it."""
    return re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-")


def settings_table(
    settings: Iterable[Setting],
    anchors: str | None = None,
    known: Collection[str] = (),
    readers: Mapping[str, Sequence[str]] | None = None,
) -> str:
    """Returns a table with the first sentence of each setting, and a list with the rest.

    Args:
        settings (iterable of Setting): rows of the table.
        anchors (str, optional): suffix of the anchors in the rows; None: no anchors.
        known (collection of str): settings that are not named in conditions.
        readers (mapping, optional): the algorithms that read a setting, if not all do.
    """
    short, notes, limited, conditions = [], [], [], {}
    for setting in settings:
        first, rest = _split_sentence(setting.markdown)
        short.append(dataclasses.replace(setting, help=first, notes=()))
        words = [f"    - `{word}`: {text}" for word, text in setting.words.items()]
        if rest or words:
            notes += [f"- `{setting.key}`: {rest or 'options:'}", *words]
        where = _conditions(setting, known)
        if setting.key in (readers or {}) and "`learner.algorithm`" not in where:
            names = _listed([f"`{name}`" for name in (readers or {})[setting.key]], False)
            where = " and ".join(filter(None, [f"`learner.algorithm` is {names}", where]))
        if where:
            conditions.setdefault(where, []).append(f"`{setting.key}`")
    for where, names in conditions.items():
        limited += [f"- {', '.join(some)}: if {where}" for some in _chunks(names)]
    notes += [_LIMITED, *limited] if limited else []
    table = settings_markdown(short)
    if anchors is not None:
        row = rf'| <a id="\1{anchors}"></a>`\1` |'
        table = re.sub(r"^\| `([\w.]+)` \|", row, table, flags=re.M)
    return "\n".join([table, "", *notes]).rstrip()


_LIMITED = "\nThese settings have an effect only under a condition:\n"


def _split_sentence(text: str) -> tuple[str, str]:
    """Splits a text into its first sentence and the rest."""
    first, *rest = re.split(r"(?<=[.!?]) +(?=\S)", text, maxsplit=1)
    return first, "".join(rest)


def _chunks(names: Sequence[str], size: int = 20) -> Iterator[Sequence[str]]:
    """Yields parts of a list, so that no sentence becomes too long."""
    yield from (names[i : i + size] for i in range(0, len(names), size))


def _conditions(setting: Setting, known: Collection[str]) -> str:
    """Returns the conditions under which a setting is read, as Markdown."""
    section = setting.key.rpartition(".")[0]
    found = []
    for where in setting.read_where():
        if where.key not in known:
            at = f"{section}." if section else ""
            if type(where).in_words is not ReadWhere.in_words:
                names = re.sub(r"\w+(?:\.\w+)+", r"`\g<0>`", where.in_words(at))
                value = r"\b(is|is not|or|above) (?!not |above )(\w+)(?=[ ,]|$)"
                found.append(re.sub(value, r"\1 `\2`", names))
                continue
            values = _listed([f"`{shown(x)}`".replace("'", "") for x in where.values], where.but)
            found.append(f"`{at}{where.key}` is {values}")
            if where.always:
                found[-1] += f" ({_listed([f'`{x}`' for x in where.always], False)}: always)"
    return " and ".join(found)


def _listed(values: Sequence[str], but: bool) -> str:
    """Returns alternatives, or with ``but`` their exclusion, as part of a sentence."""
    *others, last = values
    if but:
        return f"neither {', '.join(others)} nor {last}" if others else f"not {last}"
    return f"{', '.join(others)} or {last}" if others else last


def _families() -> dict[type, list[str]]:
    """Returns the schemas of ``learner`` and the algorithms that have them."""
    families: dict[type, list[str]] = {}
    for name in ALGORITHMS.words():
        families.setdefault(ALGORITHMS.schema(name), []).append(name)
    return families


def _readers(algorithms: Sequence[str]) -> dict[str, list[str]]:
    """Returns the algorithms that read a setting of ``learner``, for settings that some ignore."""
    reads = {name: read_by(name) for name in algorithms}
    keys = dict.fromkeys(key for own in reads.values() for key in own)
    found = {f"learner.{key}": [name for name in reads if key in reads[name]] for key in keys}
    return {key: names for key, names in found.items() if len(names) < len(reads)}


def _compared(setting: Setting) -> tuple[object, ...]:
    """Returns the content of a row of a table of settings."""
    return setting.default, setting.help, dict(setting.words)


def _family(schema: type, algorithms: list[str]) -> str:
    """Returns the section with the differences of a family's settings from those of ``mappo``."""
    first = settings_of(OnPolicyConfig())
    read = {"algorithm", *(key for name in algorithms for key in read_by(name))}
    own = {key: setting for key, setting in settings_of(schema()).items() if key in read}
    differ = [
        dataclasses.replace(setting, key=f"learner.{key}")
        for key, setting in own.items()
        if key != "algorithm" and (key not in first or _compared(setting) != _compared(first[key]))
    ]
    if schema is OnPolicyConfig or not differ:
        return ""
    names = ", ".join(f"`{name}`" for name in algorithms)
    text = "Compared with `mappo`, these settings are new, or differ in default or meaning:"
    table = settings_table(differ, f"-{algorithms[0]}", readers=_readers(algorithms))
    lacking = _not_available([key for key in first if key not in own], own, "learner.")
    return f"## {names}\n\n{text}\n\n{table}\n{lacking and f'{chr(10)}{lacking}{chr(10)}'}"


def recipes_page() -> str:
    """Returns ``recipes.md``, with a section for each library of environments."""
    sections: dict[str, list[str]] = {}
    for name in recipe_names():
        sections.setdefault(read_config(name).env.library, []).append(name)
    text = "\n".join(f"## `{library}`\n\n{_recipes(own)}\n" for library, own in sections.items())
    return f"{RECIPES}{contents(text)}\n\n{text}"


def _recipes(names: list[str]) -> str:
    """Returns a table with the first sentence about each recipe, and a list with the rest."""
    lines, notes = ["| recipe | environment | frames | purpose |", "|---|---|---:|---|"], []
    for name in names:
        config = read_config(name)
        link = f"[`{name}`](../torchrl_marl/configs/{name}.yaml)"
        first, rest = _split_sentence(_comment(CONFIGS / f"{name}.yaml"))
        cells = link, f"`{config.env.name}`", f"{config.total_frames:,}", first.replace("|", "\\|")
        lines.append(f"| {' | '.join(cells)} |")
        if rest:
            notes.append(f"- `{name}`: {rest}")
    return "\n".join([*lines, "", *notes]).rstrip()


def _comment(path: Path) -> str:
    """Returns the comment at the beginning of a recipe."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    return " ".join(lines)


# ------------------------------------------------------------------- tables in other pages

_KINDS = "settings|metrics|results|program|scenarios|combinations|versions"
_TABLE = re.compile(rf"(<!-- ({_KINDS}): (.*?) -->\n).*?(<!-- end -->)", re.S)
_NETWORKS = ("actor.", "critic.")


def filled(page: str) -> str:
    """Returns a page with its tables generated again."""
    text = (FOLDER / page).read_text(encoding="utf-8")
    return _TABLE.sub(lambda x: f"{x[1]}\n{_MAKERS[x[2]](*x[3].split())}\n\n{x[4]}", text)


def read_by(algorithm: str) -> dict[str, Setting]:
    """Returns the settings that an algorithm reads, by name without ``learner.``."""
    config = ALGORITHMS.schema(algorithm)(algorithm)
    idle = {
        f"{key.removeprefix('learner.')}." for key in read_by_others(TrainConfig(learner=config))
    }
    idle.add("algorithm.")
    return {k: x for k, x in settings_of(config).items() if not f"{k}.".startswith(tuple(idle))}


def settings_table_of(algorithm: str, *words: str) -> str:
    """Returns a table of all or some of an algorithm's settings, or of differences."""
    own = read_by(algorithm)
    if not words:
        return _all_settings(own)
    if words[0] == "beside":
        return _beside(own, *words[1:])
    return _rows(x for key, x in own.items() if key.startswith(words))


def _all_settings(own: dict[str, Setting]) -> str:
    usual = read_by("mappo")
    of_networks = {key: x for key, x in usual.items() if key.startswith(_NETWORKS)}
    rows = [
        setting
        for key, setting in own.items()
        if key not in of_networks or _compared(setting) != _compared(of_networks[key])
    ]
    lacking = _not_available(sorted(of_networks.keys() - own.keys()), own)
    text = (
        "All settings are in the section `learner`, as in `learner.gamma=0.95`. Those of networks "
        "are on [their page](networks.md); listed here are only those with a different default or "
        "meaning."
    )
    return "\n\n".join(filter(None, [text, _rows(rows), lacking]))


def _beside(own: dict[str, Setting], other: str) -> str:
    others = read_by(other)
    rows = [x for k, x in own.items() if k not in others or _compared(x) != _compared(others[k])]
    lacking = _not_available(sorted(others.keys() - own.keys()), own)
    text = f"The settings are those of [{other.upper()}]({other}.md#settings)."
    if rows:
        text += f" These are new, or differ in default or meaning:\n\n{_rows(rows)}"
    return f"{text}\n\n{lacking}" if lacking else text


def _not_available(lacking: Iterable[str], present: Iterable[str], at: str = "") -> str:
    """Returns a list of settings, or of whole sections, that an algorithm does not have."""
    names: dict[str, dict[str, None]] = {}
    for key in lacking:
        parts = key.split(".")
        for i in range(1, len(parts) + 1):
            name = ".".join(parts[:i])
            if not any(f"{other}.".startswith(f"{name}.") for other in present):
                break
        section, _, leaf = f"{at}{name}".rpartition(".")
        names.setdefault(section, {})[f"`{leaf}`"] = None
    lines = [
        f"- in `{section}`: {', '.join(some)}" if section else f"- {', '.join(some)}"
        for section, leaves in names.items()
        for some in _chunks(list(leaves))
    ]
    return "\n".join(["These settings do not exist here:", "", *lines]) if lines else ""


def _rows(settings: Iterable[Setting]) -> str:
    return settings_table(settings, known=("algorithm",))


def metrics_table_of(algorithm: str) -> str:
    """Returns the table of metrics that an algorithm logs."""
    known = yaml.safe_load((FOLDER / "metrics.yaml").read_text(encoding="utf-8"))
    lines = ["| metric | meaning | healthy values |", "|---|---|---|"]
    for name in known["logged"][algorithm]:
        own = known["metrics"].get(f"{name} of {algorithm}") or known["metrics"][name]
        lines.append(f"| `{name}` | {own['is']} | {own.get('healthy', '')} |")
    return "\n".join(lines)


def results_tables_of(name: str) -> str:
    """Returns the first table of each result with this prefix, and a link to the file."""
    found = [_first_table(path) for path in sorted(RESULTS.glob(f"{name}*.md"))]
    return "\n\n".join(found) or "There are no results yet."


def _first_table(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = itertools.dropwhile(lambda line: not line.startswith("|"), lines)
    table = "\n".join(itertools.takewhile(lambda line: line.startswith("|"), rows))
    title = lines[0].lstrip("# ")
    return f"**{title}** ([full results](../benchmarks/results/{path.name})):\n\n{table}"


def program_of(name: str) -> str:
    """Returns a program of another library, for a comparison with ours."""
    program = FOLDER.parent / "benchmarks" / "coming_from" / f"{name}_program.py"
    body = program.read_text(encoding="utf-8").partition('"""\n\n')[2]
    return f"```py\n{body}```"


def scenario_table(library: str) -> str:
    """Returns the table of VMAS's scenarios."""
    from torchrl_marl.envs.vmas.library import scenario_arguments, scenario_names

    lines = ["| scenario | arguments |", "|---|---|"]
    for scenario in scenario_names():
        taken = sorted(scenario_arguments(scenario) or ())
        shown = ", ".join(f"`{name}`" for name in taken[:16]) + (", ..." if taken[16:] else "")
        lines.append(f"| `{scenario}` | {shown or 'none'} |")
    return "\n".join(lines)


def versions_table(_: str) -> str:
    """Returns the table of tested versions, and a list of what failed or could not be tested."""
    extras = runpy.run_path(str(CI / "versions.py"))["EXTRAS"]
    with (CI / "versions.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    lines = [
        "| Python | torch | without extras | compiled | extras that pass | day |",
        "|---|---|---|---|---|---|",
    ]
    notes = []
    for (python, torch), group in itertools.groupby(rows, lambda x: (x["python"], x["torch"])):
        found = {row["part"]: row for row in group}
        notes += [
            f"- Python {python}, torch {torch}, `{part}`: {row['result']}"
            for part, row in found.items()
            if row["result"] != "passed"
        ]
        cells = [_verdict(found, "core"), _verdict(found, "compile"), _passing(found, extras)]
        days = max(row["day"] for row in found.values())
        lines.append(f"| {' | '.join([python, torch, *cells, days])} |")
    return "\n".join([*lines, *(["", *notes] if notes else [])])


def _verdict(found: dict[str, dict[str, str]], part: str) -> str:
    """Returns ``passed``, ``failed`` or ``not tested``."""
    return re.split("[: ]", found[part]["result"])[0] if part in found else "not tested"


def _passing(found: dict[str, dict[str, str]], extras: Collection[str]) -> str:
    """Returns the extras that passed, all or by name."""
    passed = [part for part in found if part in extras and found[part]["result"] == "passed"]
    if len(passed) == len(extras):
        return f"all {len(extras)}"
    return ", ".join(f"`{part}`" for part in passed) or "not tested"


_MAKERS = {
    "settings": settings_table_of,
    "metrics": metrics_table_of,
    "results": results_tables_of,
    "program": program_of,
    "scenarios": scenario_table,
    "combinations": combinations_table,
    "versions": versions_table,
}

PAGES = {
    "settings.md": settings_page,
    "recipes.md": recipes_page,
    "capabilities.md": capabilities_page,
}
PAGES |= {
    path.relative_to(FOLDER).as_posix(): partial(filled, path.relative_to(FOLDER).as_posix())
    for path in sorted(FOLDER.rglob("*.md"))
    if _TABLE.search(path.read_text(encoding="utf-8"))
}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")
        print(FOLDER / name)
