"""The parser of the command line, made of its commands."""

from __future__ import annotations

import argparse
import importlib.metadata
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from torchrl_marl.apps.console import settings_table
from torchrl_marl.apps.export.formats import FORMATS
from torchrl_marl.errors import ConfigError, nearest, quoted
from torchrl_marl.version import __version__

__all__ = ["COMMANDS", "make_parser"]

_LISTS = ("recipes", "environments", "scenarios", "algorithms", "settings", "suites", "schema")
_RENAMED_LISTS = {"worlds": "environments"}


def _seeds(text: str) -> list[int]:
    if not re.fullmatch(r"\d+(,\d+)*|\d+\.\.\d+", text):
        raise argparse.ArgumentTypeError(
            f"found {quoted(text)}, expected numbers such as 0,1,2 or 0..15"
        )
    first, _, last = text.partition("..")
    found = [int(one) for one in text.split(",")] if not last else _range(int(first), int(last))
    if len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"found {quoted(text)}, expected each seed once")
    return found


def _range(first: int, last: int) -> list[int]:
    if first > last or last - first >= 10_000:
        raise argparse.ArgumentTypeError(
            f"found {first}..{last}, expected a first seed, and a last one that is larger"
        )
    return list(range(first, last + 1))


def _whole(least: int, most: float, expected: str) -> Callable[[str], int]:
    """Returns what reads a whole number of a range."""

    def read(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"found {quoted(text)}, expected {expected}")
        return int(text)

    return read


_COUNT = _whole(1, float("inf"), "a number of 1 or more")
_COUNT_OR_NONE = _whole(0, 10_000, "a number of 0 or more")
_PORT = _whole(0, 65535, "a port, 0 to 65535")
_SEED = _whole(0, 2**32 - 1, f"a number from 0 to {2**32 - 1}")


def _one_of(
    words: Iterable[str], renamed: Mapping[str, str] = MappingProxyType({})
) -> Callable[[str], str]:
    """Returns a reader of one of several words; ``renamed`` maps old words to new ones."""

    def read(text: str) -> str:
        text = renamed.get(text, text)
        if text not in words:
            raise argparse.ArgumentTypeError(
                f"found {quoted(text)}; {nearest(text, words)}choose among {', '.join(words)}"
            )
        return text

    return read


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are those of the package, and short words for its kinds of arguments.

    ``rest`` among what it parses names the argument that takes further words.
    """

    late_epilog: Callable[[], str] | None = None

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)  # `--seed` is not `--seeds`

    def words(self, name: str, metavar: str, text: str, count: str = "*") -> None:
        """Adds an argument that takes several words, also where options stand between them."""
        self.add_argument(name, metavar=metavar, nargs=count, help=text)
        self.set_defaults(rest=name)

    def run(self) -> None:
        """Adds the folder of a run."""
        self.add_argument("run", metavar="RUN", help="the folder that `train` printed")

    def option(
        self,
        name: str,
        metavar: str | None,
        text: str,
        kind: Any = None,
        default: Any = None,
        **more: Any,
    ) -> None:
        """Adds an option that takes a value."""
        self.add_argument(name, metavar=metavar, help=text, type=kind, default=default, **more)

    def switch(self, name: str, text: str) -> None:
        """Adds an option that is given or not."""
        self.add_argument(name, action="store_true", help=text)

    def trust(self) -> None:
        """Adds what trusts a folder of somebody else's."""
        self.switch(
            "--trust",
            "run the code that a run of somebody else's brings (its environment's module, pickled "
            "worlds), and follow links out of its folder",
        )

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; `{self.prog} --help` shows how.")

    def format_help(self) -> str:
        if self.late_epilog is not None:
            self.epilog = self.late_epilog()
        return super().format_help()


_COMMANDS: dict[str, tuple[Callable[[_Parser], None], dict[str, Any]]] = {}


def _command(name: str, text: str, description: str, **options: Any) -> Callable[[Any], Any]:
    """Makes a command of a function that adds its arguments."""

    def register(fill: Callable[[_Parser], None]) -> Callable[[_Parser], None]:
        _COMMANDS[name] = fill, {"help": text, "description": description, **options}
        return fill

    return register


@_command(
    "train",
    "train a team",
    "Trains a team by a recipe, and any settings that differ from it.",
    formatter_class=argparse.RawDescriptionHelpFormatter,
)
def _train(train: _Parser) -> None:
    train.words(
        "settings",
        "RECIPE|key=value",
        "a recipe's name or a YAML file (first; default: vmas_balance_mappo), and settings as "
        "key=value",
    )
    train.option("--seeds", "0,1,2", "one run for each of these seeds; also 0..15", _seeds)
    train.switch(
        "--together",
        "train the runs of --seeds side by side, in one program (all algorithms but HAPPO)",
    )
    train.option(
        "--resume",
        "RUN",
        "go on with a run, by its own settings; total_frames, stop_at_return, evaluation.*, "
        "checkpoint.*, logging.*, device, threads, execution and where shards are, distributed.*, "
        "may be given anew",
    )
    train.trust()
    train.late_epilog = _train_epilog


def _train_epilog() -> str:
    from torchrl_marl.recipes import DEFAULT_RECIPE, explain, read_config

    return (
        "examples:\n"
        "  torchrl-marl train\n"
        "  torchrl-marl train vmas_navigation_ippo seed=1 learner.lr=1e-3\n"
        "  torchrl-marl train vmas_balance_mappo env.kwargs.n_agents=4 --seeds 0,1,2\n"
        "  torchrl-marl train vmas_balance_mappo --seeds 0..15 --together\n"
        "  torchrl-marl train my_recipe.yaml device=cuda\n"
        "  torchrl-marl train --resume runs/my_run\n"
        "  torchrl-marl train --resume runs/my_run total_frames=2000000\n\n"
        f"settings, with their values in {DEFAULT_RECIPE}:\n"
        + settings_table(explain(read_config(DEFAULT_RECIPE)))
        + "\n\nOther algorithms have other settings of learner: "
        "`torchrl-marl list settings vmas_balance_matd3`."
    )


@_command(
    "tune",
    "find settings by trials",
    "Tries settings that Optuna proposes, many at once as a population, and writes trials.csv, a "
    "run folder for each and best.yaml, a recipe. The same command goes on.",
)
def _tune(tune: _Parser) -> None:
    tune.words(
        "settings",
        "RECIPE|key=LOW..HIGH[:log]|key=value",
        "a recipe (first; the environment that a YAML file names is imported), ranges such as "
        "learner.lr=1e-4..1e-2:log, and settings",
    )
    tune.option("--trials", "N", "default: 32", _COUNT, 32)
    tune.option("--together", "N", "trials at once; default: 8", _COUNT, 8)
    tune.add_argument(
        "--prune",
        choices=["asha"],
        help="end trials early that fall behind (successive halving); others take their place",
    )
    tune.option("--out", "FOLDER", "default: tune_RECIPE in the current folder", Path)
    tune.trust()


@_command(
    "suite",
    "train many tasks, algorithms and seeds",
    "Trains all the tasks of a suite with each algorithm and seed, by one table of "
    "settings; writes a run folder OUT/TASK/ALGORITHM/seedN for each and results.csv. Stops "
    "after Ctrl-C, and goes on with --resume.",
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
        "a suite's name or YAML file (first; the environments that it names are imported); which "
        "runs: algorithms=mappo,ippo, tasks=balance,wheel, seeds=5 (so many; seeds=3..7: those), "
        "frames=600000; and settings of all of them, as `train` takes them",
    )
    suite.option("--out", "FOLDER", "default: suite_NAME in the current folder", Path)
    suite.switch("--resume", "go on in that folder; what is not given is as it was begun with")
    suite.option(
        "--jobs",
        "N",
        "runs at once, each a process of one thread; default: 1; 0: in this process",
        _COUNT_OR_NONE,
        1,
    )
    suite.switch("--dry-run", "show tasks, frames and a forecast, and leave")
    suite.trust()


@_command(
    "evaluate",
    "measure a trained team",
    "Plays whole episodes with the policy of a run's last checkpoint, by the likeliest actions and "
    "by drawn ones, from the same starts for every run of an environment. Prints means with their "
    "95 % intervals, and adds the results to RUN/evaluations.jsonl.",
)
def _evaluate(evaluate: _Parser) -> None:
    evaluate.run()
    evaluate.option(
        "--against",
        "PLAYER",
        "in an environment of two sides: win rate against another run, RUN/players/NAME.pt, "
        "`random` or `heuristic`, from both seats; printed only",
    )
    _add_measuring(evaluate, "both kinds, beside each other")
    evaluate.switch("--gif", "write RUN/episode.gif, too")
    evaluate.switch("--mp4", "write RUN/episode.mp4, too (extra [video])")
    evaluate.option("--episodes-shown", "N", "in an animation, side by side; default: 1", _COUNT, 1)


@_command(
    "compare",
    "say whether one run is better than another",
    "Plays two runs of an environment, or two folders of several seeds, from the same starts. "
    "Prints the difference of their returns with its 95 % interval, and whether one is better: by "
    "more than chance among episodes, or among seeds, explains.",
)
def _compare(compare: _Parser) -> None:
    for name, metavar in (("first", "RUN_A"), ("second", "RUN_B")):
        compare.add_argument(name, metavar=metavar, help="a run folder, or one that holds several")
    _add_measuring(compare, "as each run says")
    compare.switch(
        "--by-seed",
        "compare runs of the same seed, pair by pair; needs 6 pairs to tell them apart",
    )


def _add_measuring(command: _Parser, kinds: str) -> None:
    """Adds what commands that measure runs have in common.

    Args:
        command (ArgumentParser): the command's parser.
        kinds (str): which actions are taken by default.
    """
    command.option("--episodes", "N", "default: 200", _COUNT, 200)
    how = command.add_mutually_exclusive_group()
    how.add_argument(
        "--stochastic",
        action="store_const",
        const=False,
        dest="deterministic",
        help="drawn actions only",
    )
    how.add_argument(
        "--deterministic",
        action="store_const",
        const=True,
        help=f"the likeliest actions only; default: {kinds}",
    )
    command.option("--seed", "S", "other starts; default: 0", _SEED, 0)
    command.option("--device", "DEVICE", "cpu or cuda; default: as in the run")
    command.trust()


@_command(
    "crossplay",
    "play runs against, or with, each other",
    "Plays the policies of runs of one environment against each other, in an environment of two "
    "sides, or with each other, in an environment of one team. Prints ratings with their "
    "intervals, the Nash average and the table, and writes them with a picture.",
)
def _crossplay(crossplay: _Parser) -> None:
    crossplay.words(
        "players",
        "PLAYER",
        "folders that `train` printed, files of stored players (RUN/players/NAME.pt), `random`, "
        "and `heuristic`, the environment's own",
        "+",
    )
    crossplay.option(
        "--out",
        "FOLDER",
        "for crossplay.csv, ratings.csv and crossplay.png; default: a new folder `crossplay` "
        "beside the runs",
        Path,
    )
    _add_matches(crossplay)


@_command(
    "league",
    "rate the stored players of a run",
    "Plays the stored players of a run, its policy of today and `random` against, or with, each "
    "other. Prints ratings with their intervals, the Nash average and the table, and writes them "
    "with pictures of the table and of the ratings over frames.",
)
def _league(league: _Parser) -> None:
    league.run()
    league.option(
        "--players",
        "N",
        "stored players that are taken, evenly from first to last; default: 10",
        _COUNT,
        10,
    )
    league.option("--out", "FOLDER", "for tables and pictures; default: RUN/league", Path)
    _add_matches(league)


def _add_matches(command: _Parser) -> None:
    """Adds what commands that play matches have in common."""
    command.option("--episodes", "N", "of a pair; default: 100", _COUNT, 100)
    command.switch("--deterministic", "the likeliest actions; default: sampled")
    command.option("--seed", "S", "default: 0", _SEED, 0)
    command.option("--device", "DEVICE", "default: as in the first run")
    command.trust()


@_command(
    "export",
    "write agents that run alone",
    "Writes what each agent of a run's last checkpoint needs to run alone, with numpy and "
    "onnxruntime only, and plays it beside the team for whole episodes.",
)
def _export(export: _Parser) -> None:
    export.run()
    export.option("--agent", "NAME", "one agent; default: all")
    words = ", ".join(f"{word} ({meaning})" for word, meaning in FORMATS.items())
    export.option("--format", "FORMAT", f"{words}; default: onnx", _one_of(FORMATS), "onnx")
    export.option("--out", "FOLDER", "default: RUN/export", Path)
    export.trust()


@_command(
    "serve",
    "let a run act for simulators elsewhere",
    "Opens a port at which simulators elsewhere are clients: they say what their agents see, and "
    "get the actions of a run's last checkpoint. Clients are in the folder `clients`; they declare "
    "what this command prints.",
)
def _serve(serve: _Parser) -> None:
    serve.run()
    where = "where to listen; default: 127.0.0.1, any other needs a token"
    serve.option("--host", None, where, default="127.0.0.1")
    serve.option("--port", None, "default: 7777; 0: a free one", _PORT, 7777)
    serve.option(
        "--token-file",
        "FILE",
        "with the token that clients prove to have; default: TORCHRL_MARL_TOKEN, if set",
    )
    serve.option("--tls-cert", "FILE", "certificate, for TLS", dest="tls_certificate")
    serve.option("--tls-key", "FILE", "its key; default: in the certificate's")
    serve.option("--max-clients", "N", "at once; default: 256", _COUNT, 256)
    serve.switch("--stochastic", "sampled actions; default: the likeliest")
    serve.switch("--follow", "newer checkpoints, as a training writes them")
    serve.option(
        "--execution",
        "WORD",
        "compile (default: some seconds at the start, then quickest), trace or eager",
        _one_of(("compile", "trace", "eager")),
        "compile",
    )
    serve.trust()


@_command(
    "plot",
    "draw learning curves",
    "Draws the learning curves of runs; seeds of a recipe become mean and range, and each "
    "environment has axes of its own. Writes what is drawn as CSV beside the picture.",
)
def _plot(plot: _Parser) -> None:
    plot.words("runs", "RUN", "folders that hold runs, however deep", "+")
    plot.option(
        "--out",
        "FILE",
        "default: learning_curve.png in the folder, or beside several, over no file there",
        Path,
    )
    plot.option("--key", "COLUMN", "a column of metrics.csv or evaluation.csv; default: return")


@_command(
    "report",
    "compare many runs, with intervals over seeds",
    "Compares the algorithms of runs environment by environment and over all environments, with "
    "intervals over seeds, as a page for a browser, Markdown and CSV.",
)
def _report(report: _Parser) -> None:
    report.words("runs", "RUN", "folders that hold runs, or tables such as evaluations.csv", "+")
    report.option("--out", "FOLDER", "default: report", Path, Path("report"))
    report.option(
        "--references",
        "FILE",
        "returns of the random policy and the best known, in YAML; default: the package's own",
        Path,
    )


@_command(
    "list",
    "see what there is",
    "Lists recipes, scenarios and algorithms, every setting of a recipe, or the JSON schema of "
    "recipes, by which editors complete and check them.",
)
def _list(lists: _Parser) -> None:
    lists.option("what", "WHAT", ", ".join(_LISTS), _one_of(_LISTS, _RENAMED_LISTS), nargs="?")
    lists.option("recipe", "RECIPE", "whose values `settings` shows", nargs="?")
    lists.switch("--markdown", "`settings` as a table, with their defaults")
    lists.option(
        "--for",
        "ENVIRONMENT",
        "`algorithms` that fit an environment (vmas/balance), a recipe's or a YAML file's (which "
        "is imported and built), with which settings, and why others do not",
        dest="environment",
    )
    lists.trust()


COMMANDS = tuple(_COMMANDS)
"""Their names."""


def make_parser() -> argparse.ArgumentParser:
    """Builds the parser of the command line; ``rest`` names what takes further words."""
    parser = _Parser(
        prog="torchrl-marl",
        description="Multi-agent reinforcement learning on TorchRL.",
        epilog="first steps:\n"
        "  torchrl-marl train              train the default recipe\n"
        "  torchrl-marl list               see recipes, scenarios and algorithms\n"
        "  torchrl-marl train --help       see every setting",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    for name, (fill, options) in _COMMANDS.items():
        fill(commands.add_parser(name, **options))
    return parser


class _Version(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        text, no_default = "show the versions and leave", argparse.SUPPRESS
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
