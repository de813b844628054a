"""The command line: ``torchrl-marl train``, ``evaluate``, ``report`` and the other commands.

Slow imports happen only after the arguments are checked.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_marl.apps.cli.arguments import COMMANDS, make_parser
from torchrl_marl.apps.cli.completion import complete
from torchrl_marl.apps.console import (
    print_error,
    print_failed,
    print_result,
    print_stopped,
    report,
    settings_markdown,
    settings_table,
    silence_libraries,
    table,
)
from torchrl_marl.errors import ConfigError, UserError, nearest, quoted
from torchrl_marl.runtime.import_path import remove_current_folder
from torchrl_marl.runtime.trust import trusting
from torchrl_marl.training.interruption import Terminated

if TYPE_CHECKING:
    from tensordict import TensorDictBase

    from torchrl_marl.apps.players import Standing
    from torchrl_marl.training.config import TrainConfig
    from torchrl_marl.training.run import Run

__all__ = ["beside", "main", "unused_path"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit code.

    Args:
        argv (sequence of str, optional): command-line arguments; default: the process's own
            arguments.

    Returns:
        int: 0 on success, 2 after a user error (printed in one line), 130 after Ctrl-C, 143 after
            SIGTERM, 129 after SIGHUP (the terminal was closed).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        remove_current_folder()
    try:
        return _run_command(arguments)
    except UserError as error:
        print_error(error)
        return 2
    except KeyboardInterrupt as stop:
        print_stopped(*(stop.args or (None,)), command=arguments[0])
        return 130
    except Terminated as stop:
        print_stopped(stop.folder, stop.saved, command=arguments[0])
        return 128 + stop.number
    except BrokenPipeError:  # `torchrl-marl list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # refused by the operating system, no bug of the program
        where = f"{error.filename!r}: " if error.filename else ""
        print(f"torchrl-marl: error: {where}{error.strerror or error}.", file=sys.stderr)
        return 2


def _run_command(arguments: list[str]) -> int:
    command = next((text for text in arguments if not text.startswith("-")), None)
    if command is not None and command not in COMMANDS:
        raise ConfigError(
            f"unknown command {quoted(command)}; {nearest(command, COMMANDS)}"
            f"choose among {', '.join(COMMANDS)}."
        )
    parser = make_parser()
    complete(parser)
    parsed, rest = parser.parse_known_args(arguments)
    if parsed.command is None and not rest:
        parser.print_help(sys.stderr)
        return 2
    # argparse wants positionals in one piece; here options may stand between them.
    more: list[str] | None = getattr(parsed, getattr(parsed, "rest", ""), None)
    unknown = [text for text in rest if text.startswith("-") or more is None]
    if unknown:
        raise ConfigError(
            f"unknown argument {quoted(unknown[0])}; {_setting_hint(parsed, unknown[0], arguments)}"
            f"`torchrl-marl {parsed.command or ''} --help` shows all.".replace("  ", " ")
        )
    if more is not None:
        more.extend(rest)
    with trusting(getattr(parsed, "trust", False)):
        _COMMAND_FUNCTIONS[parsed.command](parsed)
    return 0


def _setting_hint(parsed: argparse.Namespace, option: str, arguments: list[str]) -> str:
    """Returns ``"did you mean 'seed=1'? "`` for ``--seed 1``, if the command takes settings."""
    from torchrl_marl.recipes import explain

    name, _, value = option.removeprefix("--").partition("=")
    if parsed.command != "train" or name not in {setting.key for setting in explain()}:
        return ""
    value = value or "".join(arguments[arguments.index(option) + 1 :][:1])
    return f"did you mean '{name}={value or '...'}'? "


def _train(parsed: argparse.Namespace) -> None:
    if parsed.resume is not None:
        _resume(parsed)
        return
    from torchrl_marl import runs as listeners
    from torchrl_marl.apps.jobs.jobs import train_each
    from torchrl_marl.training.folder import check_folder
    from torchrl_marl.training.recorder import check_logging

    recipe, texts = _recipe_and_settings(parsed)
    find = _population_configs if parsed.together else _configs_of_seeds
    configs = find(recipe, texts, parsed.seeds)
    for one in configs:
        listeners.check_device(one)
        check_logging(one.logging)
        check_folder(one)
    silence_libraries()
    runs: dict[int, Run] = {}
    failed: list[int] = []
    try:
        for one, found in train_each(configs, seeds=parsed.seeds is not None):
            if isinstance(found, Exception):
                failed.append(one.seed)
                print_failed(one.seed, found)
            else:
                own = [one.seed] if len(found) == 1 else [run.config.seed for run in found]
                runs |= zip(own, found)
    finally:
        if runs:
            print_result(report([runs[seed] for seed in sorted(runs)], sorted(runs)))
    if failed:
        raise UserError(
            f"{len(failed)} of {len(configs)} seeds failed: {', '.join(map(str, failed))}."
        )


def _recipe_and_settings(parsed: argparse.Namespace) -> tuple[str, list[str]]:
    """Returns the recipe (the first argument, or the default) and the settings after it."""
    from torchrl_marl.recipes import DEFAULT_RECIPE, recipe_names

    texts = list(parsed.settings)
    recipe = texts.pop(0) if texts and "=" not in texts[0] else None
    for text in texts:
        if text in recipe_names() or ("=" not in text and text.endswith((".yaml", ".yml"))):
            if recipe:
                raise ConfigError(f"{quoted(text)} is a second recipe, expected one; drop one.")
            raise ConfigError(
                f"{quoted(text)} is a recipe after a setting, expected before all settings; use "
                f"{text} {' '.join(one for one in texts if one != text)}"[:300]
                + "."
            )
    return recipe or DEFAULT_RECIPE, texts


def _population_configs(
    recipe: str, texts: list[str], seeds: list[int] | None
) -> list[TrainConfig]:
    """Returns the settings of a population that has one member for each seed."""
    from torchrl_marl.recipes import load_config

    if seeds is None or len(seeds) < 2:
        raise ConfigError(
            "--together is given, expected --seeds with two or more; add --seeds 0..7"
        )
    if seeds != list(range(seeds[0], seeds[0] + len(seeds))):
        raise ConfigError(
            f"--seeds is {','.join(map(str, seeds))}, expected seeds without a gap beside "
            f"--together; use --seeds {min(seeds)}..{min(seeds) + len(seeds) - 1}."
        )
    _reject_seed_setting(texts)
    if any(text.startswith("population.size=") for text in texts):
        raise ConfigError(
            "population.size=... and --together are both given, expected one; drop population.size."
        )
    return [load_config(recipe, [*texts, f"seed={seeds[0]}", f"population.size={len(seeds)}"])]


def _configs_of_seeds(recipe: str, texts: list[str], seeds: list[int] | None) -> list[TrainConfig]:
    from torchrl_marl.recipes import load_config

    if seeds is None:
        return [load_config(recipe, texts)]
    _reject_seed_setting(texts)
    configs = []
    for seed in seeds:
        config = load_config(recipe, [*texts, f"seed={seed}"])
        if config.folder is not None and len(seeds) > 1:
            config = load_config(config, {"folder": str(Path(config.folder) / f"seed{seed}")})
        configs.append(config)
    return configs


def _reject_seed_setting(texts: list[str]) -> None:
    if any(text.startswith("seed=") for text in texts):
        raise ConfigError("seed=... and --seeds are both given, expected one; drop seed=...")


def _resume(parsed: argparse.Namespace) -> None:
    recipes = [text for text in parsed.settings if "=" not in text]
    more = [*recipes, *["--seeds"] * bool(parsed.seeds), *["--together"] * parsed.together]
    if more:
        raise ConfigError(
            f"{more[0]} is given with --resume {parsed.resume}, which uses the run's settings, "
            f"expected only settings such as total_frames=...; drop {more[0]}."
        )
    from torchrl_marl.runs import resume
    from torchrl_marl.settings import parse_overrides
    from torchrl_marl.training.config import read_run_config

    silence_libraries()
    run = resume(Path(parsed.resume), trust=parsed.trust, **parse_overrides(parsed.settings))
    runs = getattr(run, "members", [run])
    print_result(report(runs, [read_run_config(own.folder).seed for own in runs]))


def _evaluate(parsed: argparse.Namespace) -> None:
    import dataclasses

    from torchrl_marl.recipes import validate
    from torchrl_marl.runs import check_device
    from torchrl_marl.training.config import last_stage, read_run_config

    _reject_extra_words(parsed)
    config = read_run_config(last_stage(parsed.run))
    if parsed.device:
        config = dataclasses.replace(config, device=parsed.device)
        validate(config, own_env=True)
    check_device(config)
    silence_libraries()
    from torchrl_marl.apps.cli.evaluating import print_against, print_evaluation

    (print_evaluation if parsed.against is None else print_against)(config, parsed)


def _compare(parsed: argparse.Namespace) -> None:
    silence_libraries()
    from torchrl_marl.apps.cli.evaluating import comparison_text
    from torchrl_marl.apps.comparison import compare

    print(comparison_text(compare(**_parsed_options(parsed))))


def _parsed_options(parsed: argparse.Namespace, exclude: str = "") -> dict[str, Any]:
    """Returns a command's parsed arguments as keyword arguments, without ``exclude``."""
    others = ("command", "rest", exclude)
    return {key: value for key, value in vars(parsed).items() if key not in others}


def _tune(parsed: argparse.Namespace) -> None:
    from torchrl_marl.apps.jobs.tuning import parse_choice, tune

    recipe, texts = _recipe_and_settings(parsed)
    found = [(text, parse_choice(text)) for text in texts]
    silence_libraries()
    best = tune(
        recipe,
        [choice for _, choice in found if choice is not None],
        [text for text, choice in found if choice is None],
        trials=parsed.trials,
        together=parsed.together,
        folder=parsed.out or Path(f"tune_{Path(recipe).stem}"),
        prune=parsed.prune,
    )
    print(best)


def _suite(parsed: argparse.Namespace) -> None:
    from torchrl_marl.apps.suites.running import suite_command

    suite_command(parsed.settings, **_parsed_options(parsed, exclude="settings"))


def _sweep(parsed: argparse.Namespace) -> None:
    from torchrl_marl.apps.suites.sweep import sweep_command

    recipe, texts = _recipe_and_settings(parsed)
    sweep_command(recipe, texts, **_parsed_options(parsed, exclude="settings"))


def _record(parsed: argparse.Namespace) -> None:
    from torchrl_marl.apps.record import record_command

    record_command(parsed.settings, **_parsed_options(parsed, exclude="settings"))


def beside(folders: Iterable[str | Path]) -> Path:
    """Returns the folders' common parent, or the first folder's parent if there is none.

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


def unused_path(path: Path) -> Path:
    """Returns the path, or the first unused numbered variant if the path exists.

    Args:
        path (Path): a file or a folder.
    """
    if not os.path.lexists(path):
        return path
    numbered = (path.with_name(f"{path.stem}_{i}{path.suffix}") for i in count(2))
    return next(one for one in numbered if not os.path.lexists(one))


def _crossplay(parsed: argparse.Namespace) -> None:
    from torchrl_marl.training.config import seed_folders
    from torchrl_marl.training.entrants import runs_of_players

    given = [str(one) for name in parsed.players for one in seed_folders(name) or [name]]
    folders = runs_of_players(given) or [Path()]
    _play_all_pairs(given, given, parsed.out or unused_path(beside(folders) / "crossplay"), parsed)


def _league(parsed: argparse.Namespace) -> None:
    from torchrl_marl.apps import players
    from torchrl_marl.training.pool import stored_players

    run = Path(parsed.run)
    all_players = stored_players(run)
    chosen = players.evenly(all_players, parsed.players)
    if len(chosen) < len(all_players):
        print(f"{len(chosen)} of {len(all_players)} stored players; --players N takes more")
    paths, names = ([str(one.path) for one in chosen], [one.path.stem for one in chosen])
    out = run / "league" if parsed.out is None else parsed.out
    found, rows = _play_all_pairs(
        [*paths, str(run), "random"], [*names, "now", "random"], out, parsed
    )
    when = {rows[i]: one.frames for i, one in enumerate(chosen) if one.kind == "snapshot"}
    if len(when) > 1:
        print(players.rating_curve(when, found, path=out / "ratings.png"))


def _play_all_pairs(
    player_paths: list[str], names: list[str], out: Path, parsed: argparse.Namespace
) -> tuple[Standing | TensorDictBase, list[int]]:
    """Plays all players against each other, then prints and writes the results.

    Returns:
        tuple: the results, and each player's index in the results; equal policies share an index.
    """
    silence_libraries()
    from torchrl_marl.apps import players
    from torchrl_marl.apps.pictures.drawing import check_matplotlib
    from torchrl_marl.specs import TeamSpec
    from torchrl_marl.training.crossplay import cross_play, seats_of
    from torchrl_marl.training.entrants import load_players, same_players

    check_matplotlib()
    games = parsed.episodes * len(names) ** 2
    env, policies = load_players(
        player_paths, min(games, 1000), device=parsed.device, trust=parsed.trust
    )
    sides, first = seats_of(TeamSpec.from_env(env)), same_players(policies)
    label = dict(zip(player_paths, names))
    once = list(dict.fromkeys(first.values()))
    names = [" = ".join(label[x] for x in player_paths if first[x] == name) for name in once]
    all_players = [policies[name] for name in once]
    options = {"deterministic": parsed.deterministic, "seed": parsed.seed}
    table_of_all = cross_play(all_players, all_players, env, parsed.episodes, **options)
    env.close()
    found = players.standing(table_of_all) if sides.alike else None
    # In an environment with asymmetric sides, the row's player has the first side.
    what = players.PARTNERS if sides.alike else f"return as {next(iter(sides.agents[0]))}"
    print(players.standing_text(names, table_of_all, found, what))
    paths = players.write_table(out, names, table_of_all, found)
    path = out / "crossplay.png"
    players.heat_map(names, table_of_all, found, path=path)
    print("\n".join(map(str, (*paths, path))))
    return table_of_all if found is None else found, [once.index(first[x]) for x in player_paths]


def _export(parsed: argparse.Namespace) -> None:
    from torchrl_marl.apps.export.formats import check_format

    check_format(parsed.format)
    silence_libraries()
    from torchrl_marl.training.run import Run

    other = _parse_env_settings(parsed)
    run = Run.load(Path(parsed.run), device="cpu", trust=parsed.trust, settings=other)
    made = run.export(parsed.agent, format=parsed.format, folder=parsed.out)
    print(table([(name, str(folder)) for name, folder in made.agents.items()]))
    print(f"checked against the team: {made.comparison}")


def _plot(parsed: argparse.Namespace) -> None:
    silence_libraries()
    from torchrl_marl.apps.plotting import learning_curve

    folders, path, name = [Path(run) for run in parsed.runs], parsed.out, "learning_curve.png"
    if path is None:
        path = folders[0] / name if len(folders) == 1 else unused_path(beside(folders) / name)
    learning_curve(folders, key=parsed.key, path=path, table=path.with_suffix(".csv"))
    print(path, path.with_suffix(".csv"), sep="\n")


def _report(parsed: argparse.Namespace) -> None:
    from torchrl_marl.apps.reports.answers import answers
    from torchrl_marl.apps.reports.page import write_report

    found = write_report(parsed.runs, parsed.out, parsed.references, parsed.json)
    for sentence in found.left_out:
        print(f"left out: {sentence}", file=sys.stderr)
    print("\n".join([*answers(found), str(parsed.out / "report.html")]))


def _serve(parsed: argparse.Namespace) -> None:
    silence_libraries()
    from torchrl_marl.apps.serving import serve

    serve(
        parsed.run,
        **{**_parsed_options(parsed, exclude="run"), "settings": _parse_env_settings(parsed)},
    )


def _parse_env_settings(parsed: argparse.Namespace) -> dict[str, Any] | None:
    """Returns the settings of another environment than in training; None if none are given."""
    from torchrl_marl.settings import parse_overrides

    _reject_extra_words(parsed)
    return parse_overrides(parsed.settings) or None


def _reject_extra_words(parsed: argparse.Namespace) -> None:
    """Raises an error for an argument that is no setting."""
    unknown = next((text for text in parsed.settings if "=" not in text), None)
    if unknown is not None:
        raise ConfigError(
            f"unknown argument {quoted(unknown)}; `torchrl-marl {parsed.command} --help` shows all."
        )


def _list(parsed: argparse.Namespace) -> None:
    what, recipe, environment = parsed.what, parsed.recipe, parsed.environment
    if recipe is not None and what != "settings":
        raise ConfigError(
            f"found {quoted(recipe)} after {what!r}, expected nothing; "
            "`torchrl-marl list settings RECIPE` shows the values of a recipe."
        )
    if parsed.markdown and what != "settings":
        raise ConfigError(
            "--markdown is given without `settings`, expected: list settings --markdown."
        )
    if environment is not None and what != "algorithms":
        raise ConfigError(
            f"--for is given without `algorithms`, expected: list algorithms --for {environment}."
        )
    if environment is not None:
        _list_fitting_algorithms(environment)
    elif what == "settings":
        _list_settings(recipe, parsed.markdown)
    elif what == "schema":
        _list_schema()
    else:
        for one in [what] if what else ("recipes", "scenarios", "algorithms"):
            print(f"{one}:")
            print(table(_list_rows(one)))


def _list_rows(what: str) -> list[tuple[str, str]]:
    from torchrl_marl import recipes
    from torchrl_marl.envs.libraries import environment_rows
    from torchrl_marl.learners.algorithms import ALGORITHMS

    if what == "recipes":
        return recipes.recipe_rows()
    if what == "algorithms":
        return list(ALGORITHMS.words().items())
    if what == "suites":
        from torchrl_marl.apps.suites.running import suite_rows

        return suite_rows()
    return environment_rows()


def _list_schema() -> None:
    from torchrl_marl.settings import json_schema
    from torchrl_marl.training.config import TrainConfig

    print(json.dumps(json_schema(TrainConfig, "a recipe of torchrl_marl"), indent=2))


def _list_fitting_algorithms(environment: str) -> None:
    silence_libraries()
    from torchrl_marl.apps.choosing import algorithms_for

    print(algorithms_for(environment).text())


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


_COMMAND_FUNCTIONS = {
    "train": _train,
    "evaluate": _evaluate,
    "compare": _compare,
    "tune": _tune,
    "sweep": _sweep,
    "suite": _suite,
    "record": _record,
    "crossplay": _crossplay,
    "league": _league,
    "export": _export,
    "serve": _serve,
    "plot": _plot,
    "report": _report,
    "list": _list,
}
