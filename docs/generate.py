"""Writes what follows from the code: three pages, and tables of settings, metrics and results.

    python docs/generate.py

Do this whenever a setting, a recipe, a metric or a limit has changed; the tests say so.
``settings.md``, ``recipes.md`` and ``capabilities.md`` are written whole. In other pages stand
tables between comments::

    <!-- settings: mappo -->             all that it reads, but for its networks
    <!-- settings: ippo beside mappo --> what differs between two
    <!-- settings: mappo estimator -->   some of them; a section's name stands for all in it
    <!-- metrics: mappo -->              of an algorithm, or of every run; from metrics.yaml
    <!-- results: suite -->              the first tables of such files in benchmarks/results
    <!-- program: rllib -->              of benchmarks/coming_from, as code that no test runs
    <!-- scenarios: vmas -->             names and arguments, read from VMAS's files
    <!-- combinations: all -->           which algorithms take which features, as the checks say
    <!-- end -->
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import yaml

from torchrl_marl.apps.console import settings_markdown
from torchrl_marl.errors import ConfigError, UserError
from torchrl_marl.learners.algorithms import ALGORITHMS
from torchrl_marl.learners.capabilities import FEATURES, RANKS, Feature
from torchrl_marl.learners.config import OnPolicyConfig
from torchrl_marl.recipes import (
    DEFAULT_RECIPE,
    explain,
    load_config,
    read_config,
    recipe_names,
)
from torchrl_marl.settings import Setting, read_by_others, settings_of
from torchrl_marl.training.config import TrainConfig

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER.parent / "benchmarks" / "results"
CONFIGS = FOLDER.parent / "torchrl_marl" / "configs"

SETTINGS = """\
# Settings

<!-- written by `python docs/generate.py`; edit the fields of the dataclasses instead -->

Every setting with its default. A recipe holds what differs from these; `torchrl-marl list settings
RECIPE` shows its values, `torchrl-marl list schema` is a JSON schema for editors, and a run's
`config.yaml` has every setting. Those of `learner` are its `algorithm`'s: first `mappo`'s, then
what differs for the others. A link to one ends in its name: `settings.html#learner.lr`, and
`settings.html#learner.minibatch_size-qmix` where another algorithm differs.

"""

RECIPES = f"""\
# Recipes

<!-- written by `python docs/generate.py`; edit the comments of the recipes instead -->

`torchrl-marl train RECIPE` trains one; `{DEFAULT_RECIPE}` is the default. The names link to the
files, which hold only what differs from the [defaults](settings.md). Times are for one CPU core
unless stated otherwise. [Notes](#notes) follow the table.

| recipe | environment | frames | description |
|---|---|---:|---|
"""

CAPABILITIES = """\
# What goes together

<!-- written by `python docs/generate.py`; edit torchrl_marl/learners/capabilities.py instead -->

The features that each algorithm supports, found by the settings' checks. A run with an unsupported
combination is refused with the message below, before training. For an environment of yours run
`torchrl-marl list algorithms --for ENVIRONMENT`. Networks, estimators and kinds of replay are in
[another table](algorithms/index.md#features-and-combinations).

"""


def settings_page() -> str:
    """Returns ``settings.md``."""
    sections: dict[str, list[Setting]] = {}
    for setting in explain():
        sections.setdefault(_section_of(setting.key), []).append(setting)
    # The run itself, then its sections, each whole.
    parts = {f"`{name}`" if name else "The run": own for name, own in sections.items()}
    common = [
        f"## {title}\n\n{with_anchors(settings_markdown(own))}\n" for title, own in parts.items()
    ]
    families = [_family(*family) for family in _families().items()]
    text = "\n".join([*common, *filter(None, families)])
    return f"{SETTINGS}{contents(text)}\n\n{text}"


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


def with_anchors(table: str, of: str = "") -> str:
    """Returns a table of settings with an anchor in each row, its setting's name."""
    return re.sub(r"^\| `([\w.]+)` \|", rf'| <a id="\1{of}"></a>`\1` |', table, flags=re.M)


def _families() -> dict[type, list[str]]:
    """Returns the schemas of ``learner`` and the algorithms that have them."""
    families: dict[type, list[str]] = {}
    for name in ALGORITHMS.words():
        families.setdefault(ALGORITHMS.schema(name), []).append(name)
    return families


def _help(setting: Setting, known: str = "") -> str:
    """Returns the meaning, and where a setting is read, but for what is known."""
    where = " and ".join(x.in_words("") for x in setting.read_where() if x.key != known)
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
        f"## {names}\n\nWhat is new or has another default or meaning than above.{without}\n\n"
        f"{with_anchors(settings_markdown(differ), f'-{algorithms[0]}')}\n"
    )


def recipes_page() -> str:
    """Returns ``recipes.md``."""
    names = recipe_names()
    notes = [(name, _comment(CONFIGS / f"{name}.yaml")[1]) for name in names]
    items = "".join(f"- `{name}`: {note}\n" for name, note in notes if note)
    rows = "".join(_recipe_row(name) + "\n" for name in names)
    return f"{RECIPES}{rows}\n## Notes\n\n{items}"


def _recipe_row(name: str) -> str:
    config = read_config(name)
    link = f"[`{name}`](../torchrl_marl/configs/{name}.yaml)"
    environment = f"`{config.env.library}/{config.env.name}`"
    cells = link, environment, f"{config.total_frames:,}", _comment(CONFIGS / f"{name}.yaml")[0]
    return f"| {' | '.join(cells)} |"


def _comment(path: Path) -> tuple[str, str]:
    """Returns the first sentence of a recipe's opening comment, and the rest."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    first, _, rest = " ".join(lines).replace("|", "\\|").partition(". ")
    return first.rstrip(".") + ".", rest


# ------------------------------------------------------------------- tables in other pages

_KINDS = "settings|metrics|results|program|scenarios|combinations"
_TABLE = re.compile(rf"(<!-- ({_KINDS}): (.*?) -->\n).*?(<!-- end -->)", re.S)
_NETWORKS = ("actor.", "critic.")


def filled(page: str) -> str:
    """Returns a page with the tables of today."""
    text = (FOLDER / page).read_text(encoding="utf-8")
    return _TABLE.sub(lambda x: f"{x[1]}\n{_MAKERS[x[2]](*x[3].split())}\n\n{x[4]}", text)


def read_by(algorithm: str) -> dict[str, Setting]:
    """Returns the settings that an algorithm reads, without ``learner.``."""
    config = ALGORITHMS.schema(algorithm)(algorithm)
    idle = {
        f"{key.removeprefix('learner.')}." for key in read_by_others(TrainConfig(learner=config))
    }
    idle.add("algorithm.")
    return {k: x for k, x in settings_of(config).items() if not f"{k}.".startswith(tuple(idle))}


def settings_table_of(algorithm: str, *words: str) -> str:
    """Returns the table of an algorithm's settings, of some of them, or of what differs."""
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
        if key not in of_networks or _told(setting) != _told(of_networks[key])
    ]
    lacking = _named(of_networks.keys() - own.keys(), own)
    without = f", but there is no {lacking}" if lacking else ""
    text = (
        "All stand under `learner` (`learner.gamma=0.95`). Those of networks are on "
        f"[their page](networks.md){without}; here are only those with another default or meaning."
    )
    return f"{text}\n\n{_rows(rows)}"


def _beside(own: dict[str, Setting], other: str) -> str:
    others = read_by(other)
    rows = [x for k, x in own.items() if k not in others or _told(x) != _told(others[k])]
    lacking = _named(others.keys() - own.keys(), own)
    text = f"Those of [{other.upper()}]({other}.md#settings)"
    text += f", but there is no {lacking}." if lacking else "."
    if not rows:
        return text
    return f"{text} What is new, or has another default or meaning:\n\n{_rows(rows)}"


def _named(lacking: Iterable[str], present: Iterable[str]) -> str:
    """Returns settings by name, or the section in which nothing else is."""
    names = {}
    for key in sorted(lacking):
        parts = key.split(".")
        for i in range(1, len(parts) + 1):
            name = ".".join(parts[:i])
            if not any(f"{other}.".startswith(f"{name}.") for other in present):
                break
        names[f"`{name}`"] = None
    return ", ".join(names)


def _rows(settings: Iterable[Setting]) -> str:
    return settings_markdown([dataclasses.replace(x, help=_help(x, "algorithm")) for x in settings])


def metrics_table_of(algorithm: str) -> str:
    """Returns the glossary of what an algorithm logs."""
    known = yaml.safe_load((FOLDER / "metrics.yaml").read_text(encoding="utf-8"))
    lines = ["| metric | what it is | what is healthy |", "|---|---|---|"]
    for name in known["logged"][algorithm]:
        own = known["metrics"].get(f"{name} of {algorithm}") or known["metrics"][name]
        lines.append(f"| `{name}` | {own['is']} | {own.get('healthy', '')} |")
    return "\n".join(lines)


def results_tables_of(name: str) -> str:
    """Returns the first table of each result whose name begins so, with a link to all of it."""
    found = [_first_table(path) for path in sorted(RESULTS.glob(f"{name}*.md"))]
    return "\n\n".join(found) or "Its tables are not written yet."


def _first_table(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = itertools.dropwhile(lambda line: not line.startswith("|"), lines)
    table = "\n".join(itertools.takewhile(lambda line: line.startswith("|"), rows))
    title = lines[0].lstrip("# ")
    return f"**{title}** ([all of it](../benchmarks/results/{path.name})):\n\n{table}"


def program_of(name: str) -> str:
    """Returns a program of another library, which stands beside ours on a page."""
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


# A feature, the settings that ask for it, and its page.
_FEATURES = (
    ("memory (RMAPPO, RQMIX, RMADDPG, ...)", "learner.actor.memory=gru", "../memory.md"),
    (
        "messages (CommNet, TarMAC, BicNet, IC3Net, DIAL)",
        "learner.actor.communication=tarmac",
        "../communication.md",
    ),
    (
        "the environment's state for critics and mixers",
        "learner.central_input=state",
        "../teams.md",
    ),
    ("credit of each agent alone, turns", "learner.bootstrap=agent", "../turns.md"),
    ("a network for each agent", "learner.actor.sharing=none", "../sharing.md"),
    ("sharing that ends in mid-training", "learner.unshare_at=0.5", "../sharing.md"),
    ("one value of all, mixed (FACMAC)", "learner.mixer.kind=monotonic", "facmac.md"),
    ("V-trace", "learner.estimator=vtrace", "vtrace.md"),
    ("prioritized replay", "learner.replay.alpha=0.6", "../replay.md"),
    ("returns of several steps", "learner.n_step=3", "../replay.md"),
    ("stored opponents and partners", "league.opponents=pfsp", "../leagues.md"),
    ("many runs in one program", "population.size=2", "../populations.md"),
    ("shards", "distributed.collectors=2", "../ray.md"),
    ("compiled graphs", "execution=compile", "../one_program.md"),
)


def combinations_table(_: str) -> str:
    """Returns which algorithms go with which features, by asking the settings' own checks."""
    lines = ["| feature | setting | goes with | page |", "|---|---|---|---|"]
    names = [name for name in ALGORITHMS.names() if name != "random"]
    for feature, setting, page in _FEATURES:
        fits = [name for name in names if not _refusal(name, setting)]
        lacking = [name for name in names if name not in fits]
        shown = f"all but {', '.join(lacking)}" if len(lacking) < len(fits) else ", ".join(fits)
        words = shown if lacking else "all"
        lines.append(f"| {feature} | `{setting}` | {words} | [page]({page}) |")
    return "\n".join(lines)


def _refusal(algorithm: str, *settings: str, ranks: bool = False) -> str:
    """Returns why an algorithm does not go with some settings; nothing where it does."""
    run = {
        "env": {"library": "toy", "name": "arena", "num_envs": 8},
        "learner": {"algorithm": algorithm, "minibatch_size": 256},
        "frames_per_batch": 1024,
        "total_frames": 102_400,
    }
    try:
        config = load_config(run, settings)
        if ranks:
            RANKS.check(config)
    except ConfigError as error:
        return str(error)
    return ""


# A column of the page of capabilities, and the settings that ask for it.
_COLUMNS = {
    "[league](leagues.md)": ["league.opponents=pfsp"],
    "[population](populations.md)": ["population.size=2"],
    "[shards](ray.md)": ["distributed.collectors=2"],
    "[asynchronous](ray.md)": [
        "distributed={backend: ray, collectors: 2, asynchronous: true}",
    ],
    "[ranks](ranks.md)": [],
    "[turns](turns.md)": ["learner.bootstrap=agent"],
    "[communication](communication.md)": ["learner.actor.communication=tarmac"],
    "[memory](memory.md)": ["learner.actor.memory=gru"],
}
_ACTIONS = ("discrete actions", "continuous actions")


def capabilities_page() -> str:
    """Returns ``capabilities.md``: algorithms by features, and all that does not go together."""
    names = [name for name in ALGORITHMS.names() if name != "random"]
    refusals = {
        column: {name: _refusal(name, *settings, ranks="ranks" in column) for name in names}
        for column, settings in _COLUMNS.items()
    }
    refusals |= {kind: {name: _refused_actions(name, kind) for name in names} for kind in _ACTIONS}
    lines = [f"| algorithm | {' | '.join(refusals)} |", "|---|" + "---|" * len(refusals)]
    for name in names:
        cells = ["no" if refused[name] else "yes" for refused in refusals.values()]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    lines += ["", "Teams with discrete and continuous actions need an algorithm with both.", ""]
    lines += ["## Unsupported features", "", "| feature | algorithms | message |"]
    lines += ["|---|---|---|"]
    for column, refused in refusals.items():
        lines += _reasons(column, {name: why for name, why in refused.items() if why})
    limits = [_limits_of(feature) for feature in (*FEATURES, RANKS)]
    return CAPABILITIES + "\n".join(lines) + "\n\n" + "\n".join(limits)


def _refused_actions(algorithm: str, kind: str) -> str:
    """Returns why an algorithm does not learn actions of a kind."""
    from torchrl_marl.envs.toy import Arena
    from torchrl_marl.learners.build import build_learners
    from torchrl_marl.specs import TeamSpec

    env = Arena(num_envs=2, continuous_actions=kind == "continuous actions", seed=0)
    try:
        build_learners(TeamSpec.from_env(env), ALGORITHMS.schema(algorithm)(algorithm), {})
    except UserError as error:
        return str(error)
    return ""


def _reasons(column: str, refused: dict[str, str]) -> Iterator[str]:
    """Yields a row for each reason, with the algorithms that give it."""
    names: dict[str, list[str]] = {}
    for name, why in refused.items():
        names.setdefault(re.sub(rf"'?\b{name}\b'?", "...", why), []).append(name)
    for why, own in names.items():
        yield f"| {column} | {', '.join(own)} | `{why}` |"


def _limits_of(feature: Feature) -> str:
    """Returns the table of all settings that a feature excludes."""
    lines = [f"## With {feature.name}", "", "| setting | reason | allowed |", "|---|---|---|"]
    rows = [("", limit) for limit in feature.run] + [("learner.", own) for own in feature.learner]
    for at, limit in rows:
        if limit.key != "algorithm":  # which the table above has
            goes = "" if limit.goes is None else f"`{limit.instead}`"
            lines.append(
                f"| `{at}{limit.key}` | {limit.why.format('given').removeprefix('but ')} | {goes} |"
            )
    return "\n".join(lines) + "\n"


_MAKERS = {
    "settings": settings_table_of,
    "metrics": metrics_table_of,
    "results": results_tables_of,
    "program": program_of,
    "scenarios": scenario_table,
    "combinations": combinations_table,
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
