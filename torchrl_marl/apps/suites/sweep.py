"""Sweeps: a grid of settings, each combination trained with several seeds (``sweep``)."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import re
import shlex
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torchrl_marl.apps.console import number, silence_libraries
from torchrl_marl.apps.jobs.slurm import parse_slurm
from torchrl_marl.apps.suites.board import Result, known_values, results_table
from torchrl_marl.apps.suites.folder import check_folder
from torchrl_marl.apps.suites.plan import (
    PER_RUN_SETTINGS,
    Plan,
    Suite,
    SuiteRun,
    explain_population_errors,
    seeds_of,
)
from torchrl_marl.apps.suites.running import (
    Gather,
    check_symmetries,
    plan_table,
    refuse_unfinished,
    train_plan,
    train_separately,
)
from torchrl_marl.errors import ConfigError, quoted
from torchrl_marl.learners.capabilities import varying_of
from torchrl_marl.recipes import load_config
from torchrl_marl.runtime.naming import file_name
from torchrl_marl.runtime.trust import trusting
from torchrl_marl.settings import flatten, normalized, parse_overrides, shown
from torchrl_marl.training.config import TrainConfig, read_run_config

__all__ = ["best_combination", "make_sweep", "parse_grid", "run_sweep", "sweep_command"]

Grid = Mapping[str, Sequence[Any]]
_MAX_COMBINATIONS = 10_000  # combinations
_MAX_LABEL_LENGTH = 120  # letters of a label


def run_sweep(
    recipe: str | Path,
    grid: Grid,
    *,
    seeds: int | Sequence[int] = 3,
    out: str | Path | None = None,
    resume: bool = False,
    together: bool = False,
    jobs: int = 1,
    launcher: str = "processes",
    slurm: Mapping[str, Any] = MappingProxyType({}),
    trust: bool = False,
    log: Callable[[str], None] = print,
    **settings: Any,
) -> list[Result]:
    """Trains every combination of a grid of settings, in folders ``out/RECIPE/COMBINATION/seedN``.

    A failed run is logged and does not stop the others. ``results.csv`` gets a row for each run.

    Args:
        recipe (str or Path): name of a recipe, or path of a YAML file.
        grid (mapping): setting -> values, such as ``{"learner.lr": [1e-4, 1e-3]}``.

    Keyword Args:
        seeds (int or list of int): number of seeds from 0 on, or list of seeds.
        out (str or Path, optional): output folder; default: ``sweep_RECIPE``.
        resume (bool): True to skip finished runs in that folder and resume the others.
        together (bool): True to train all runs in one program, as members of a population.
        jobs (int): number of concurrent runs, each in a process with one thread; 0: one by one
            in this process.
        launcher (str): ``processes`` of this machine, ``ray`` tasks, or ``slurm`` jobs.
        slurm (mapping): options for Slurm, such as ``{"timeout_min": 60}``.
        trust (bool): True to run code and follow links of a folder that another user owns.
        log (callable): called with a line for each run that has ended.
        **settings: settings of all runs.

    Returns:
        list of Result: result of each run, in the order of the plan.

    Raises:
        ConfigError: settings are invalid, or, with ``together``, may not differ between members;
            this is checked before the first run starts.

    Examples:
        >>> import tempfile
        >>> found = run_sweep("toy_matrix_game_mappo", {"learner.lr": [1e-3, 1e-2]}, seeds=1,
        ...                   out=tempfile.mkdtemp(), jobs=0, log=lambda text: 0,
        ...                   total_frames=512, evaluation={"both": False})
        >>> [(result.run.algorithm, result.state) for result in found]
        [('lr=0.001', 'finished'), ('lr=0.01', 'finished')]
    """
    with trusting(trust):
        plan = make_sweep(recipe, grid, seeds=seeds, settings=settings)
        folder = Path(f"sweep_{plan.suite.name}" if out is None else out)
        options: dict[str, Any] = {"launcher": launcher, "slurm": slurm}
        options["gather"] = _make_gather(recipe, grid, plan, together, log)
        return train_plan(plan, folder, resume=resume, jobs=jobs, log=log, **options)


def make_sweep(
    recipe: str | Path,
    grid: Grid,
    *,
    seeds: int | Sequence[int] | str = 3,
    settings: Mapping[str, Any] | None = None,
) -> Plan:
    """Returns the runs of a grid, ordered by seed, with checked settings.

    Args:
        recipe (str or Path): name of a recipe, or path of a YAML file.
        grid (mapping): setting -> values.

    Keyword Args:
        seeds (int, list of int or str): as for :func:`run_sweep`, or a text such as ``"0..2"``.
        settings (mapping, optional): settings of all runs.

    Raises:
        ConfigError: an unknown setting or value, a setting without values, equal values, or a
            setting that the sweep sets for each run.

    Examples:
        >>> grid = {"learner.lr": [1e-3, 1e-2], "learner.gamma": [0.9, 0.99]}
        >>> [run.algorithm for run in make_sweep("toy_arena_mappo", grid, seeds=1).runs]
        ['lr=0.001_gamma=0.9', 'lr=0.001_gamma=0.99', 'lr=0.01_gamma=0.9', 'lr=0.01_gamma=0.99']
    """
    base, name = flatten(normalized(TrainConfig, settings or {})), Path(recipe).stem
    _check_grid(grid, base)
    combinations = _combinations(grid)
    runs = []
    for seed in seeds_of(seeds):
        for label, own in combinations.items():
            config = load_config(recipe, {**base, **own, "seed": seed, "recipe": label})
            runs.append(SuiteRun(name, label, seed, config))
    table = Suite(name, f"{len(combinations)} combinations", tuple(combinations), {}, {}, {})
    selection = {
        "algorithms": list(combinations),
        "tasks": [name],
        "seeds": seeds_of(seeds),
        "settings": base,
    }
    return Plan(table, tuple(runs), selection)


def _check_grid(grid: Grid, base: Mapping[str, Any]) -> None:
    for key in (*grid, *base):
        if key.partition(".")[0] in PER_RUN_SETTINGS:
            raise ConfigError(
                f"{key} cannot be given, since the sweep sets it for each run; use --seeds for "
                "several seeds, and population.vary for members of one program."
            )
    for key, values in grid.items():
        if key in base:
            raise ConfigError(f"{key} is in the grid and in the settings; leave one out.")
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise ConfigError(f"{key} is {quoted(values)}, expected a list of values.")
        different = {shown(float(x) if type(x) is int else x) for x in values}
        if len(different) < len(values):
            texts = ", ".join(map(shown, values))
            raise ConfigError(f"{key} is {texts}, expected different values.")
    if not grid:
        raise ConfigError(
            "the grid is empty, expected a setting with several values, such as "
            "learner.lr=1e-4,1e-3."
        )


def _make_gather(
    recipe: str | Path, grid: Grid, plan: Plan, together: bool, log: Callable[[str], None]
) -> Gather:
    """Returns a function that gathers runs into trainings, after checks of the population."""
    population = partial(_population_config, recipe, grid, plan.selection["settings"])
    if together:
        population(plan.runs)

    def gather(out: Path, runs: Sequence[SuiteRun]) -> list[tuple[TrainConfig, list[SuiteRun]]]:
        folder, config = out / plan.suite.name, None
        new = [run for run in runs if not (out / run.place / "config.yaml").is_file()]
        if (folder / "config.yaml").is_file():
            config = read_run_config(folder)
        elif together and len(new) > 1:
            _refuse_separate_runs(folder)
            config = population(new)
        names = [] if config is None else config.population.folders
        members = [run for run in runs if _member_name(run) in names]
        others = [run for run in runs if _member_name(run) not in names]
        if config is None or not members:
            return train_separately(out, others)
        if others:
            log(f"trained alone, since the program of the others has begun: {len(others)} runs")
        return [
            (dataclasses.replace(config, folder=str(folder)), members),
            *train_separately(out, others),
        ]

    return gather


def _refuse_separate_runs(folder: Path) -> None:
    """Refuses to start a population in a folder with runs that were trained alone."""
    known = sorted(path.parent for path in folder.glob("*/seed*/config.yaml"))
    if known:
        raise ConfigError(
            f"{str(known[0])!r} was trained alone, so that the others cannot be one program in "
            "this folder; leave --together out, or choose another --out."
        )


def _member_name(run: SuiteRun) -> str:
    """Returns the folder of a run in that of the population."""
    return run.place.relative_to(run.task).as_posix()


def _population_config(
    recipe: str | Path, grid: Grid, base: Mapping[str, Any], runs: Sequence[SuiteRun]
) -> TrainConfig:
    """Returns the settings of a population whose members are the runs."""
    first = runs[0].config
    if not varying_of(first.learner):
        raise ConfigError(
            f"learner.algorithm is {first.learner.algorithm!r}, whose runs cannot be one program; "
            "leave --together out."
        )
    known = [f"learner.{name}" for name in varying_of(first.learner)]
    for key in grid:
        name = key.removeprefix("learner.")
        own = [f"groups.{group}" for group, found in first.groups.items() if name in flatten(found)]
        if key not in known or own:
            why = f"{own[0]} overrides it" if own else f"only {', '.join(known)} may"
            raise ConfigError(
                f"{key} cannot differ between runs of one program, since {why}; leave --together "
                "out."
            )
    vary = {key: [flatten(dataclasses.asdict(run.config))[key] for run in runs] for key in grid}
    folders = [_member_name(run) for run in runs]
    population = {"size": len(runs), "vary": vary, "folders": folders}
    with explain_population_errors():
        return load_config(recipe, {**base, "seed": runs[0].seed, "population": population})


def _combinations(grid: Grid) -> dict[str, dict[str, Any]]:
    """Returns the settings of each combination, by its label."""
    if math.prod(map(len, grid.values())) > _MAX_COMBINATIONS:
        raise ConfigError(
            f"the grid has more than {_MAX_COMBINATIONS:,} combinations; give fewer values."
        )
    names = _short_names(list(grid))
    products = list(itertools.product(*grid.values()))
    labels = [
        file_name("_".join(f"{name}={_value_text(value)}" for name, value in zip(names, values)))
        for values in products
    ]
    count = Counter(labels)
    return {
        label
        if count[label] == 1 and len(label) <= _MAX_LABEL_LENGTH
        else _hashed_label(label, values): dict(zip(grid, values))
        for label, values in zip(labels, products)
    }


def _hashed_label(label: str, values: Sequence[Any]) -> str:
    """Returns a label that is unique for its values, whatever their place in the grid."""
    digest = hashlib.sha256(repr(values).encode()).hexdigest()
    return f"{label[:_MAX_LABEL_LENGTH]}_{digest[:8]}"


def _value_text(value: Any) -> str:
    """Returns a value as a part of a folder name, without brackets, quotes and spaces."""
    text = value if isinstance(value, str) else shown(value)
    return re.sub(r"[\[\]{}'\" ]", "", text)


def _short_names(keys: Sequence[str]) -> list[str]:
    """Returns the shortest endings of dotted keys that tell the keys apart.

    Examples:
        >>> _short_names(["learner.lr", "learner.actor.depth", "learner.critic.depth"])
        ['lr', 'actor.depth', 'critic.depth']
    """
    names = []
    for key in keys:
        parts, others = key.split("."), [one.split(".") for one in keys if one != key]
        sizes = range(1, len(parts) + 1)
        size = next(
            (n for n in sizes if all(parts[-n:] != other[-n:] for other in others)), len(parts)
        )
        names.append(".".join(parts[-size:]))
    return names


def best_combination(results: Sequence[Result]) -> tuple[str, float] | None:
    """Returns the combination with the highest mean return over its finished seeds.

    Combinations with a diverged seed are left out.

    Returns:
        tuple, optional: its label and mean ``return_after``; None if no run has finished.
    """
    found: dict[str, list[Mapping[str, Any]]] = {}
    for one in results:
        found.setdefault(one.run.algorithm, []).append(one.summary)
    returns = {label: known_values(own, "return_after") for label, own in found.items()}
    means = {label: statistics.fmean(own) for label, own in returns.items() if own}
    means = {label: mean for label, mean in means.items() if math.isfinite(mean)}
    best = max(means, key=means.__getitem__, default=None)
    return None if best is None else (best, means[best])


def sweep_command(
    recipe: str,
    texts: Sequence[str],
    *,
    seeds: Sequence[int] | None,
    out: Path | None,
    dry_run: bool,
    slurm: Sequence[str] = (),
    **options: Any,
) -> None:
    """Trains a sweep, or shows its plan.

    Args:
        recipe (str): name of a recipe, or path of a YAML file.
        texts (sequence of str): ``key=value,value`` and ``key=value``.

    Keyword Args:
        seeds (sequence of int, optional): seeds of each combination; default: 0, 1, 2.
        out (Path, optional): output folder.
        dry_run (bool): True to show the plan without training.
        slurm (sequence of str): options for Slurm, as ``key=value``.
        **options: as for :func:`run_sweep`: ``resume``, ``together``, ``jobs``, ``trust``,
            ``launcher``.

    Raises:
        UserError: settings are invalid, or a run failed.
    """
    grid, settings = parse_grid(texts)
    arguments: dict[str, Any] = {"seeds": 3 if seeds is None else seeds}
    if dry_run:
        plan = make_sweep(recipe, grid, **arguments, settings=settings)
        with trusting(options["trust"]):
            check_symmetries(plan)
        _make_gather(recipe, grid, plan, options["together"], print)
        folder = Path(f"sweep_{plan.suite.name}") if out is None else out
        check_folder(folder, plan, resume=options["resume"])
        print(plan_table(plan, folder, options["jobs"] or 1, "settings"))
        return
    silence_libraries()
    arguments |= {"out": out, "slurm": parse_slurm(slurm), **options}
    results = run_sweep(recipe, grid, **arguments, **settings)
    print(results_table(results, ("recipe", "settings")))
    folder = results[0].folder.parents[2]
    if (best := best_combination(results)) is not None:
        print(f"best: {best[0]}, return {number(best[1])}")
    print(f"compare them: torchrl-marl report {shlex.quote(str(folder))}")
    refuse_unfinished(results)


def parse_grid(texts: Sequence[str]) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """Splits ``key=value`` texts into a grid, and settings with a single value.

    Commas within brackets, braces and quotes belong to a value.

    Examples:
        >>> parse_grid(["learner.lr=1e-4,1e-3", "learner.gamma=0.9"])
        ({'learner.lr': [0.0001, 0.001]}, {'learner.gamma': 0.9})
        >>> parse_grid(["learner.actor.num_cells=[64,64],[32]"])[0]
        {'learner.actor.num_cells': [[64, 64], [32]]}
    """
    grid: dict[str, list[Any]] = {}
    settings: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        values = _split_values(value)
        if key in grid or key in settings:
            raise ConfigError(f"{key} is given twice, expected once; leave one out.")
        if any(not one.strip() for one in values) and len(values) > 1:
            raise ConfigError(f"{key} is {quoted(value)}, which has an empty value; drop a comma.")
        read = [
            flatten(parse_overrides([f"{key}{equals}{one}"]), stop={key})[key] for one in values
        ]
        if len(read) > 1:
            grid[key] = read
        else:
            settings[key] = read[0]
    return grid, settings


def _split_values(text: str) -> list[str]:
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        depth += 0 if quote else (letter in "[{(") - (letter in "]})")
        if letter == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return parts
