"""The command-line parser and its commands."""

from __future__ import annotations

import argparse
import importlib.metadata
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from torchrl_marl.apps.cli.train_help import HelpAll, train_epilog
from torchrl_marl.apps.export.formats import FORMATS
from torchrl_marl.errors import ConfigError, nearest, quoted
from torchrl_marl.version import __version__

__all__ = ["COMMANDS", "make_parser"]

_LIST_KINDS = ("recipes", "environments", "scenarios", "algorithms", "settings", "suites", "schema")
_RENAMED_LISTS = {"worlds": "environments"}


def _parse_seeds(text: str) -> list[int]:
    if not re.fullmatch(r"\d+(,\d+)*|\d+\.\.\d+", text):
        raise argparse.ArgumentTypeError(
            f"found {quoted(text)}, expected numbers such as 0,1,2 or 0..15"
        )
    first, _, last = text.partition("..")
    found = (
        [int(one) for one in text.split(",")] if not last else _seed_range(int(first), int(last))
    )
    if len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"found {quoted(text)}, expected each seed once")
    return found


def _seed_range(first: int, last: int) -> list[int]:
    if first > last or last - first >= 10_000:
        raise argparse.ArgumentTypeError(
            f"found {first}..{last}, expected a first seed and a larger last one"
        )
    return list(range(first, last + 1))


def _whole_number_parser(least: int, most: float, expected: str) -> Callable[[str], int]:
    """Returns a function that parses a whole number and checks its range."""

    def read(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"found {quoted(text)}, expected {expected}")
        return int(text)

    return read


def _parse_path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("found an empty path, expected a name; . is this folder")
    return Path(text)


_COUNT = _whole_number_parser(1, float("inf"), "a number of 1 or more")
_COUNT_OR_NONE = _whole_number_parser(0, 10_000, "a number of 0 or more")
_PORT = _whole_number_parser(0, 65535, "a port, 0 to 65535")
_SEED = _whole_number_parser(0, 2**32 - 1, f"a number from 0 to {2**32 - 1}")


def _word_parser(
    words: Iterable[str], renamed: Mapping[str, str] = MappingProxyType({})
) -> Callable[[str], str]:
    """Returns a function that parses one of several words; ``renamed`` maps old words to new."""

    def read(text: str) -> str:
        text = renamed.get(text, text)
        if text not in words:
            raise argparse.ArgumentTypeError(
                f"found {quoted(text)}; {nearest(text, words)}choose among {', '.join(words)}"
            )
        return text

    return read


class _Parser(argparse.ArgumentParser):
    """Argument parser that raises the package's errors, with helpers for common arguments.

    The parsed arguments have an entry ``rest``: the name of the argument that takes extra words.
    """

    late_epilog: Callable[[], str] | None = None

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)  # `--seed` is not `--seeds`

    def words(self, name: str, metavar: str, text: str, count: str = "*") -> None:
        """Adds an argument that takes several words; options may stand between them."""
        self.add_argument(name, metavar=metavar, nargs=count, help=text)
        self.set_defaults(rest=name)

    def run(self) -> None:
        """Adds the argument for the folder of a run."""
        self.add_argument("run", metavar="RUN", help="run folder, as printed by `train`")

    def option(
        self,
        name: str,
        metavar: str | None,
        text: str,
        kind: Any = None,
        default: Any = None,
        **more: Any,
    ) -> None:
        """Adds an option with a value."""
        self.add_argument(name, metavar=metavar, help=text, type=kind, default=default, **more)

    def switch(self, name: str, text: str) -> None:
        """Adds an option without a value."""
        self.add_argument(name, action="store_true", help=text)

    def trust(self) -> None:
        """Adds the option ``--trust``, to trust the folder of another user."""
        self.switch(
            "--trust",
            "trust a run of another user: import its environment module, load its pickled "
            "environments, and follow links out of its folder",
        )

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; `{self.prog} --help` shows how.")

    def format_help(self) -> str:
        if self.late_epilog is not None:
            self.epilog = self.late_epilog()
        return super().format_help()


_COMMANDS: dict[str, tuple[Callable[[_Parser], None], dict[str, Any]]] = {}


def _command(name: str, text: str, description: str, **options: Any) -> Callable[[Any], Any]:
    """Returns a decorator that registers a command; the function adds the command's arguments."""

    def register(fill: Callable[[_Parser], None]) -> Callable[[_Parser], None]:
        _COMMANDS[name] = fill, {"help": text, "description": description, **options}
        return fill

    return register


@_command(
    "train",
    "train a team",
    "Trains a team with a recipe and further settings.",
    formatter_class=argparse.RawDescriptionHelpFormatter,
)
def _train(train: _Parser) -> None:
    train.words(
        "settings",
        "RECIPE|key=value",
        "a recipe's name or YAML file (first; default: vmas_balance_mappo), then settings as "
        "key=value",
    )
    train.option("--seeds", "0,1,2", "one run for each of these seeds; also 0..15", _parse_seeds)
    train.switch(
        "--together",
        "train the runs of --seeds in parallel, in one program (all algorithms but "
        "HAPPO, HADDPG, HATD3 and HASAC)",
    )
    train.option(
        "--resume",
        "RUN",
        "resume a run with its settings; new values are allowed for: total_frames, "
        "stop_at_return, evaluation.*, checkpoint.*, logging.*, device, threads, execution and "
        "the placement of shards (distributed.*)",
    )
    train.trust()
    train.add_argument("--help-all", action=HelpAll)
    train.late_epilog = train_epilog


@_command(
    "tune",
    "search hyperparameters",
    "Searches hyperparameters with Optuna, training many trials at once as a population. Writes "
    "trials.csv, a run folder for each trial, and best.yaml, a recipe. The same command resumes.",
)
def _tune(tune: _Parser) -> None:
    tune.words(
        "settings",
        "RECIPE|key=LOW..HIGH[:log]|key=value",
        "a recipe (first; the environment named in a YAML file is imported), ranges such as "
        "learner.lr=1e-4..1e-2:log, and settings",
    )
    tune.option("--trials", "N", "number of trials; default: 32", _COUNT, 32)
    tune.option("--together", "N", "parallel trials; default: 8", _COUNT, 8)
    tune.add_argument(
        "--prune",
        choices=["asha"],
        help="end poor trials early by successive halving, and start others in their place",
    )
    tune.option(
        "--out", "FOLDER", "folder; default: tune_RECIPE in the current folder", _parse_path
    )
    tune.trust()


@_command(
    "sweep",
    "train a grid of settings",
    "Trains every combination of the values given for some settings, each with several seeds. "
    "Writes a run folder OUT/RECIPE/COMBINATION/seedN for each run, and results.csv. Ctrl-C stops "
    "it; the same command with --resume resumes it.",
    epilog="examples:\n"
    "  torchrl-marl sweep vmas_balance_mappo learner.lr=1e-4,3e-4,1e-3 --seeds 0..2 --jobs 2\n"
    "  torchrl-marl sweep vmas_balance_mappo learner.lr=1e-3,3e-4 learner.gamma=0.9,0.99\n"
    "  torchrl-marl sweep vmas_balance_mappo learner.lr=1e-4,1e-3 --seeds 0..4 --together\n"
    "  torchrl-marl sweep vmas_balance_mappo 'learner.actor.num_cells=[64],[128,128]' --dry-run",
    formatter_class=argparse.RawDescriptionHelpFormatter,
)
def _sweep(sweep: _Parser) -> None:
    sweep.words(
        "settings",
        "RECIPE|key=a,b|key=value",
        "a recipe's name or YAML file (first; default: vmas_balance_mappo), settings with several "
        "values, and settings of all runs",
    )
    sweep.option("--seeds", "0..2", "seeds of each combination; default: 0,1,2", _parse_seeds)
    sweep.option(
        "--out", "FOLDER", "folder; default: sweep_RECIPE in the current folder", _parse_path
    )
    sweep.switch("--resume", "skip finished runs in that folder, and resume the others")
    sweep.switch(
        "--together",
        "train all runs in parallel, in one program; for settings that may differ between the "
        "members of a population, such as learner.lr",
    )
    _add_job_options(sweep)
    sweep.switch("--dry-run", "show the number of runs and a forecast, and exit")
    sweep.trust()


def _add_job_options(parser: _Parser) -> None:
    parser.option(
        "--jobs",
        "N",
        "parallel runs, each a process of one thread; default: 1; 0: in this process",
        _COUNT_OR_NONE,
        1,
    )
    parser.option(
        "--launcher",
        "WHERE",
        "processes (default), ray (a task for each run), or slurm (a job for each run; needs the "
        "extra [slurm])",
        _word_parser(("processes", "ray", "slurm")),
        "processes",
    )
    parser.add_argument(
        "--slurm",
        metavar="key=value",
        action="append",
        default=[],
        help="option for Slurm, such as timeout_min=60 or slurm_partition=gpu; may be repeated",
    )


@_command(
    "suite",
    "train many tasks, algorithms and seeds",
    "Trains each algorithm and seed on all tasks of a suite, with one table of settings. Writes "
    "a run folder OUT/TASK/ALGORITHM/seedN for each run, and results.csv. Ctrl-C stops it, "
    "--resume resumes it.",
    epilog="examples:\n"
    "  torchrl-marl suite toy seeds=2\n"
    "  torchrl-marl suite vmas algorithms=mappo,ippo tasks=balance,wheel seeds=3 --jobs 8\n"
    "  torchrl-marl suite vmas --resume --jobs 8\n"
    "  torchrl-marl suite vmas --dry-run\n"
    "  torchrl-marl list suites",
    formatter_class=argparse.RawDescriptionHelpFormatter,
)
def _suite(suite: _Parser) -> None:
    suite.words(
        "settings",
        "SUITE|key=value",
        "a suite's name or YAML file (first; the environments named in it are imported); a "
        "selection of runs: algorithms=mappo,ippo, tasks=balance,wheel, seeds=5 (five seeds) or "
        "seeds=3..7 (these seeds), frames=600000; and settings of all runs, as for `train`",
    )
    suite.option(
        "--out", "FOLDER", "folder; default: suite_NAME in the current folder", _parse_path
    )
    suite.switch("--resume", "resume the suite in that folder, with the options it was begun with")
    _add_job_options(suite)
    suite.switch("--together", "train all seeds of a task and algorithm as one population")
    suite.switch("--dry-run", "show tasks, frames and a forecast, and exit")
    suite.trust()


@_command(
    "evaluate",
    "evaluate a trained team",
    "Plays whole episodes with the last checkpoint of a run, with the likeliest and with sampled "
    "actions. All runs of an environment start from the same initial states. Prints means with "
    "95 % intervals, and appends the results to RUN/evaluations.jsonl.",
)
def _evaluate(evaluate: _Parser) -> None:
    evaluate.run()
    evaluate.words(
        "settings",
        "env.NAME=VALUE",
        "another environment to play in, such as env.kwargs.n_agents=8; values or ranges to play "
        "with, such as env.randomize.agent_mass=1.3, with all others nominal; "
        "evaluation.randomize=true: the ranges of the training",
    )
    evaluate.option(
        "--against",
        "PLAYER",
        "in an environment of two sides: win rate against another run, RUN/players/NAME.pt, "
        "`random` or `heuristic`, playing both sides; printed only",
    )
    _add_evaluation_options(evaluate, "both")
    evaluate.switch("--gif", "also write RUN/episode.gif")
    evaluate.switch("--mp4", "also write RUN/episode.mp4 (extra [video])")
    evaluate.option("--episodes-shown", "N", "episodes in an animation; default: 1", _COUNT, 1)


@_command(
    "compare",
    "test whether one run is better than another",
    "Plays two runs of an environment, or two folders of several seeds, from the same initial "
    "states. Prints the difference of their returns with its 95 % interval, and whether it is "
    "significant over episodes, or over seeds.",
)
def _compare(compare: _Parser) -> None:
    for name, metavar in (("first", "RUN_A"), ("second", "RUN_B")):
        compare.add_argument(name, metavar=metavar, help="a run folder, or a folder of several")
    _add_evaluation_options(compare, "as set in each run")
    compare.switch(
        "--by-seed",
        "compare runs of the same seed in pairs; a significant result needs 6 pairs",
    )


def _add_evaluation_options(command: _Parser, kinds: str) -> None:
    """Adds the common options of commands that evaluate runs.

    Args:
        command (ArgumentParser): the command's parser.
        kinds (str): text for the help that says which actions are the default.
    """
    command.option("--episodes", "N", "number of episodes; default: 200", _COUNT, 200)
    group = command.add_mutually_exclusive_group()
    group.add_argument(
        "--stochastic",
        action="store_const",
        const=False,
        dest="deterministic",
        help="sampled actions only",
    )
    group.add_argument(
        "--deterministic",
        action="store_const",
        const=True,
        help=f"likeliest actions only; default: {kinds}",
    )
    command.option("--seed", "S", "random seed of the initial states; default: 0", _SEED, 0)
    command.option("--device", "DEVICE", "cpu or cuda; default: as in the run")
    command.trust()


@_command(
    "record",
    "record episodes as a dataset",
    "Plays whole episodes with the last checkpoint of a run, with the heuristic of an environment, "
    "or with random actions, and writes them to a folder. Learn from it by data.folder=FOLDER.",
)
def _record(record: _Parser) -> None:
    text = "run folder, `heuristic` of the environment, `random`, or an OG-MARL vault"
    record.add_argument("player", metavar="PLAYER", help=text)
    record.words(
        "settings",
        "[RECIPE] env.NAME=VALUE",
        "recipe of the environment, except for a run, and settings of the environment",
    )
    record.option("--out", "FOLDER", "new folder of the dataset", _parse_path, required=True)
    record.option("--episodes", "N", "whole episodes; default: 1000", _COUNT, 1000)
    record.switch("--deterministic", "likeliest actions; default: sampled actions")
    record.option("--seed", "S", "random seed of the episodes; default: 0", _SEED, 0)
    record.option("--device", "DEVICE", "cpu or cuda; default: as in the settings")
    record.trust()


@_command(
    "crossplay",
    "play runs against, or with, each other",
    "Plays the policies of several runs against each other in an environment of two sides, or "
    "with each other in an environment of one team. Prints ratings with intervals, the Nash "
    "average and the table of payoffs, and writes them with a heat map.",
)
def _crossplay(crossplay: _Parser) -> None:
    crossplay.words(
        "players",
        "PLAYER",
        "run folders, folders of seeds (RUN of --seeds, OUT/TASK/ALGORITHM of a suite), files of "
        "stored players (RUN/players/NAME.pt), `random`, and `heuristic` (of the environment)",
        "+",
    )
    crossplay.option(
        "--out",
        "FOLDER",
        "folder of crossplay.csv, ratings.csv and crossplay.png; default: a new folder "
        "`crossplay` next to the runs",
        _parse_path,
    )
    _add_match_options(crossplay)


@_command(
    "league",
    "rate the stored players of a run",
    "Plays the stored players of a run, its current policy and `random` against, or with, each "
    "other. Prints ratings with intervals, the Nash average and the table of payoffs, and writes "
    "them with a heat map and a plot of ratings over frames.",
)
def _league(league: _Parser) -> None:
    league.run()
    league.option(
        "--players",
        "N",
        "stored players to include, evenly spaced over the run; default: 10",
        _COUNT,
        10,
    )
    league.option("--out", "FOLDER", "folder of tables and plots; default: RUN/league", _parse_path)
    _add_match_options(league)


def _add_match_options(command: _Parser) -> None:
    """Adds the common options of commands that play matches."""
    command.option("--episodes", "N", "episodes of each pair; default: 100", _COUNT, 100)
    command.switch("--deterministic", "likeliest actions; default: sampled actions")
    command.option("--seed", "S", "random seed; default: 0", _SEED, 0)
    command.option("--device", "DEVICE", "cpu or cuda; default: as in the first run")
    command.trust()


def _add_env_settings(command: _Parser) -> None:
    """Adds settings of the environment in which a run's policy is used."""
    meaning = "another environment than in training, such as env.kwargs.n_agents=8"
    command.words("settings", "env.NAME=VALUE", meaning)


@_command(
    "export",
    "export agents that run without torch",
    "Exports each agent of a run's last checkpoint as programs that need numpy and onnxruntime "
    "only, and compares its actions with the team's over whole episodes.",
)
def _export(export: _Parser) -> None:
    export.run()
    _add_env_settings(export)
    export.option("--agent", "NAME", "a single agent; default: all")
    words = ", ".join(f"{word} ({meaning})" for word, meaning in FORMATS.items())
    export.option("--format", "FORMAT", f"{words}; default: onnx", _word_parser(FORMATS), "onnx")
    export.option("--out", "FOLDER", "folder; default: RUN/export", _parse_path)
    export.trust()


@_command(
    "serve",
    "serve a run's policy to external simulators",
    "Opens a port for external simulators: as clients they send observations and receive the "
    "actions of a run's last checkpoint. Clients are in the folder `clients`; they must declare "
    "the agents that this command prints.",
)
def _serve(serve: _Parser) -> None:
    serve.run()
    _add_env_settings(serve)
    where = "host to listen on; default: 127.0.0.1; any other needs a token"
    serve.option("--host", None, where, default="127.0.0.1")
    serve.option("--port", None, "port; default: 7777; 0: a free one", _PORT, 7777)
    serve.option(
        "--token-file",
        "FILE",
        "file with the token of the clients; default: TORCHRL_MARL_TOKEN, if set",
    )
    serve.option("--tls-cert", "FILE", "certificate for TLS", dest="tls_certificate")
    serve.option("--tls-key", "FILE", "key of the certificate; default: in its file")
    serve.option("--max-clients", "N", "maximum number of clients; default: 256", _COUNT, 256)
    serve.switch("--stochastic", "sampled actions; default: likeliest actions")
    serve.switch("--follow", "switch to newer checkpoints while a training writes them")
    serve.option(
        "--execution",
        "WORD",
        "compile (default: slower to start, fastest to answer), trace or eager",
        _word_parser(("compile", "trace", "eager")),
        "compile",
    )
    serve.trust()


@_command(
    "plot",
    "draw learning curves",
    "Plots the learning curves of runs. Seeds of a recipe become mean and range; each environment "
    "has separate axes. Also writes the plotted values as CSV.",
)
def _plot(plot: _Parser) -> None:
    plot.words("runs", "RUN", "folders with runs at any depth", "+")
    plot.option(
        "--out",
        "FILE",
        "file; default: learning_curve.png in the folder, or a new file next to several folders",
        _parse_path,
    )
    plot.option("--key", "COLUMN", "a column of metrics.csv or evaluation.csv; default: return")


@_command(
    "report",
    "compare many runs, with intervals over seeds",
    "Compares algorithms on each environment and over all environments, with intervals over "
    "seeds. Writes an HTML page, Markdown and CSV.",
)
def _report(report: _Parser) -> None:
    report.words(
        "runs", "RUN", "folders with runs, or tables: evaluations.csv, marl-eval's JSON", "+"
    )
    report.option("--out", "FOLDER", "folder; default: report", _parse_path, Path("report"))
    report.option("--json", "FILE", "file for the raw results, which marl-eval reads", _parse_path)
    report.option(
        "--references",
        "FILE",
        "YAML file of random and best-known returns; default: the package's file",
        _parse_path,
    )


@_command(
    "list",
    "list recipes, environments, algorithms and settings",
    "Lists recipes, scenarios and algorithms, every setting of a recipe, or the JSON schema of "
    "recipes for completion and checks in editors.",
)
def _list(lists: _Parser) -> None:
    lists.option(
        "what", "WHAT", ", ".join(_LIST_KINDS), _word_parser(_LIST_KINDS, _RENAMED_LISTS), nargs="?"
    )
    lists.option("recipe", "RECIPE", "with `settings`: the recipe whose values to show", nargs="?")
    lists.switch("--markdown", "with `settings`: a Markdown table of the defaults")
    lists.option(
        "--for",
        "ENVIRONMENT",
        "with `algorithms`: those that fit an environment (vmas/balance) or a recipe's, which is "
        "imported and built; with their settings, and the reasons why others do not fit",
        dest="environment",
    )
    lists.trust()


COMMANDS = tuple(_COMMANDS)
"""Names of all commands."""


def make_parser() -> argparse.ArgumentParser:
    """Builds the command-line parser; the result's ``rest`` names the argument for extra words."""
    parser = _Parser(
        prog="torchrl-marl",
        description="Multi-agent reinforcement learning on TorchRL.",
        epilog="first steps:\n"
        "  torchrl-marl train              train the default recipe\n"
        "  torchrl-marl list               see recipes, scenarios and algorithms\n"
        "  torchrl-marl train --help       see the usual settings; --help-all: every one",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    for name, (fill, options) in _COMMANDS.items():
        fill(commands.add_parser(name, **options))
    return parser


class _Version(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        text, no_default = "show the versions and exit", argparse.SUPPRESS
        super().__init__(option_strings, dest, nargs=0, help=text, default=no_default)

    def __call__(self, *_: Any) -> NoReturn:
        versions = [f"torchrl-marl {__version__}"]
        for package in ("torchrl", "torch"):
            try:
                versions.append(f"{package} {importlib.metadata.version(package)}")
            except importlib.metadata.PackageNotFoundError:
                versions.append(f"{package} is not installed")
        print(f"{versions[0]} ({', '.join(versions[1:])})")
        raise SystemExit(0)
