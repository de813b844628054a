"""The parser of the command line, made of its commands."""

from __future__ import annotations

import argparse
import importlib.metadata
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from torchrl_marl.apps.console import settings_table
from torchrl_marl.apps.export.formats import FORMATS
from torchrl_marl.errors import ConfigError, nearest, quoted
from torchrl_marl.version import __version__

__all__ = [
    "COMMANDS",
    "LISTS",
    "TRUST",
    "add_compare",
    "add_crossplay",
    "add_evaluate",
    "add_export",
    "add_league",
    "add_list",
    "add_plot",
    "add_report",
    "add_serve",
    "add_suite",
    "add_train",
    "add_tune",
    "count",
    "count_or_none",
    "execution",
    "list_name",
    "make_parser",
    "port",
    "program_format",
    "seed",
    "seeds",
]

TRUST = (
    "run the code that a run of somebody else's brings (its world's module, pickled worlds), and "
    "follow links out of its folder"
)
LISTS = ("recipes", "worlds", "scenarios", "algorithms", "settings", "suites", "schema")


def seeds(text: str) -> list[int]:
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


def seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a number from 0 to {2**32 - 1}")
    return int(text)


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {quoted(text)}, expected a number of 1 or more")
    return int(text)


def count_or_none(text: str) -> int:
    if not text.isdecimal() or int(text) > 10_000:
        raise argparse.ArgumentTypeError(f"found {quoted(text)}, expected a number of 0 or more")
    return int(text)


def port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"found {quoted(text)}, expected a port, 0 to 65535")
    return int(text)


def execution(text: str) -> str:
    words = ("compile", "trace", "eager")
    if text not in words:
        raise argparse.ArgumentTypeError(
            f"found {quoted(text)}; {nearest(text, words)}choose among {', '.join(words)}"
        )
    return text


def program_format(text: str) -> str:
    if text not in FORMATS:
        raise argparse.ArgumentTypeError(
            f"found {quoted(text)}; {nearest(text, FORMATS)}choose among {', '.join(FORMATS)}"
        )
    return text


def list_name(text: str) -> str:
    if text not in LISTS:
        raise argparse.ArgumentTypeError(
            f"found {quoted(text)}; {nearest(text, LISTS)}choose among {', '.join(LISTS)}"
        )
    return text


def add_train(commands: Any) -> None:
    train = commands.add_parser(
        "train",
        help="train a team",
        description="Trains a team by a recipe, and any settings that differ from it.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    train.add_argument(
        "settings",
        nargs="*",
        metavar="RECIPE|key=value",
        help="a recipe's name or a YAML file (first; default: vmas_balance_mappo), "
        "and settings as key=value",
    )
    train.add_argument(
        "--seeds", metavar="0,1,2", type=seeds, help="one run for each of these seeds; also 0..15"
    )
    train.add_argument(
        "--together",
        action="store_true",
        help="train the runs of --seeds side by side, in one program (all algorithms but HAPPO)",
    )
    train.add_argument(
        "--resume",
        metavar="RUN",
        help="go on with a run, by its own settings; total_frames, stop_at_return, evaluation.*, "
        "checkpoint.*, logging.*, device, threads, execution and where shards are, distributed.*, "
        "may be given anew",
    )
    train.add_argument("--trust", action="store_true", help=TRUST)
    train.late_epilog = _train_epilog
    train.set_defaults(rest="settings")


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


def add_tune(commands: Any) -> None:
    tune = commands.add_parser(
        "tune",
        help="find settings by trials",
        description="Tries settings that Optuna proposes, many at once as a population, and writes "
        "trials.csv, a run folder for each and best.yaml, a recipe. The same command goes on.",
    )
    tune.add_argument(
        "settings",
        metavar="RECIPE|key=LOW..HIGH[:log]|key=value",
        nargs="*",
        help="a recipe (first; the world that a YAML file names is imported), ranges such as "
        "learner.lr=1e-4..1e-2:log, and settings",
    )
    tune.add_argument("--trials", metavar="N", type=count, default=32, help="default: 32")
    tune.add_argument(
        "--together", metavar="N", type=count, default=8, help="trials at once; default: 8"
    )
    tune.add_argument(
        "--prune",
        choices=["asha"],
        help="end trials early that fall behind (successive halving); others take their place",
    )
    tune.add_argument(
        "--out", metavar="FOLDER", type=Path, help="default: tune_RECIPE in the current folder"
    )
    tune.add_argument("--trust", action="store_true", help=TRUST)
    tune.set_defaults(rest="settings")


def add_suite(commands: Any) -> None:
    suite = commands.add_parser(
        "suite",
        help="train many tasks, algorithms and seeds",
        description="Trains all the tasks of a suite with each algorithm and seed, by one table of "
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
    suite.add_argument(
        "settings",
        metavar="SUITE|key=value",
        nargs="*",
        help="a suite's name or YAML file (first; the worlds that it names are imported); which "
        "runs: algorithms=mappo,ippo, tasks=balance,wheel, seeds=5 (so many; seeds=3..7: those), "
        "frames=600000; and settings of all of them, as `train` takes them",
    )
    suite.add_argument(
        "--out", metavar="FOLDER", type=Path, help="default: suite_NAME in the current folder"
    )
    suite.add_argument(
        "--resume",
        action="store_true",
        help="go on in that folder; what is not given is as it was begun with",
    )
    suite.add_argument(
        "--jobs",
        metavar="N",
        type=count_or_none,
        default=1,
        help="runs at once, each a process of one thread; default: 1; 0: in this process",
    )
    suite.add_argument(
        "--dry-run", action="store_true", help="show tasks, frames and a forecast, and leave"
    )
    suite.add_argument("--trust", action="store_true", help=TRUST)
    suite.set_defaults(rest="settings")


def add_evaluate(commands: Any) -> None:
    evaluate = commands.add_parser(
        "evaluate",
        help="measure a trained team",
        description="Plays whole episodes with the policy of a run's last checkpoint, by the "
        "likeliest actions and by drawn ones, from the same starts for every run of a world. "
        "Prints means with their 95 % intervals, and adds the results to RUN/evaluations.jsonl.",
    )
    evaluate.add_argument("run", metavar="RUN", help="the folder that `train` printed")
    evaluate.add_argument(
        "--against",
        metavar="PLAYER",
        help="in a world of two sides: win rate against another run, RUN/players/NAME.pt, "
        "`random` or `heuristic`, from both seats; printed only",
    )
    _add_measuring(evaluate, "both kinds, beside each other")
    evaluate.add_argument("--gif", action="store_true", help="write RUN/episode.gif, too")
    evaluate.add_argument(
        "--mp4", action="store_true", help="write RUN/episode.mp4, too (extra [video])"
    )
    evaluate.add_argument(
        "--episodes-shown",
        metavar="N",
        type=count,
        default=1,
        help="in an animation, side by side; default: 1",
    )
    evaluate.set_defaults(rest="")


def add_compare(commands: Any) -> None:
    compare = commands.add_parser(
        "compare",
        help="say whether one run is better than another",
        description="Plays two runs of a world, or two folders of several seeds, from the same "
        "starts. Prints the difference of their returns with its 95 % interval, and whether one is "
        "better: by more than chance among episodes, or among seeds, explains.",
    )
    for name, metavar in (("first", "RUN_A"), ("second", "RUN_B")):
        compare.add_argument(name, metavar=metavar, help="a run folder, or one that holds several")
    _add_measuring(compare, "as each run says")
    compare.add_argument(
        "--by-seed",
        action="store_true",
        help="compare runs of the same seed, pair by pair; needs 6 pairs to tell them apart",
    )
    compare.set_defaults(rest="")


def _add_measuring(command: Any, kinds: str) -> None:
    """Adds what commands that measure runs have in common.

    Args:
        command: the command's parser.
        kinds (str): which actions are taken by default.
    """
    command.add_argument("--episodes", metavar="N", type=count, default=200, help="default: 200")
    how = command.add_mutually_exclusive_group()
    how.add_argument("--stochastic", action="store_true", help="drawn actions only")
    how.add_argument(
        "--deterministic",
        action="store_true",
        help=f"the likeliest actions only; default: {kinds}",
    )
    command.add_argument(
        "--seed", metavar="S", type=seed, default=0, help="other starts; default: 0"
    )
    command.add_argument("--device", metavar="DEVICE", help="cpu or cuda; default: as in the run")
    command.add_argument("--trust", action="store_true", help=TRUST)


def add_crossplay(commands: Any) -> None:
    crossplay = commands.add_parser(
        "crossplay",
        help="play runs against, or with, each other",
        description="Plays the policies of runs of one world against each other, in a world of two "
        "sides, or with each other, in a world of one team. Prints ratings with their intervals, "
        "the Nash average and the table, and writes them with a picture.",
    )
    crossplay.add_argument(
        "players",
        metavar="PLAYER",
        nargs="+",
        help="folders that `train` printed, files of stored players (RUN/players/NAME.pt), "
        "`random`, and `heuristic`, the world's own",
    )
    crossplay.add_argument(
        "--out",
        metavar="FOLDER",
        type=Path,
        help="for crossplay.csv, ratings.csv and crossplay.png; default: a new folder `crossplay` "
        "beside the runs",
    )
    _add_matches(crossplay)
    crossplay.set_defaults(rest="players")


def add_league(commands: Any) -> None:
    league = commands.add_parser(
        "league",
        help="rate the stored players of a run",
        description="Plays the stored players of a run, its policy of today and `random` against, "
        "or with, each other. Prints ratings with their intervals, the Nash average and the table, "
        "and writes them with pictures of the table and of the ratings over frames.",
    )
    league.add_argument("run", metavar="RUN", help="the folder that `train` printed")
    league.add_argument(
        "--players",
        metavar="N",
        type=count,
        default=10,
        help="stored players that are taken, evenly from first to last; default: 10",
    )
    league.add_argument(
        "--out", metavar="FOLDER", type=Path, help="for tables and pictures; default: RUN/league"
    )
    _add_matches(league)
    league.set_defaults(rest="")


def _add_matches(command: Any) -> None:
    """Adds what commands that play matches have in common."""
    command.add_argument(
        "--episodes", metavar="N", type=count, default=100, help="of a pair; default: 100"
    )
    command.add_argument(
        "--deterministic", action="store_true", help="the likeliest actions; default: sampled"
    )
    command.add_argument("--seed", metavar="S", type=seed, default=0, help="default: 0")
    command.add_argument("--device", metavar="DEVICE", help="default: as in the first run")
    command.add_argument("--trust", action="store_true", help=TRUST)


def add_plot(commands: Any) -> None:
    plot = commands.add_parser(
        "plot",
        help="draw learning curves",
        description="Draws the learning curves of runs; seeds of a recipe become mean and range, "
        "and each world has axes of its own. Writes what is drawn as CSV beside the picture.",
    )
    plot.add_argument("runs", metavar="RUN", nargs="+", help="folders that hold runs, however deep")
    plot.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        help="default: learning_curve.png in the folder, or beside several, over no file there",
    )
    plot.add_argument(
        "--key", metavar="COLUMN", help="a column of metrics.csv or evaluation.csv; default: return"
    )
    plot.set_defaults(rest="runs")


def add_report(commands: Any) -> None:
    report = commands.add_parser(
        "report",
        help="compare many runs, with intervals over seeds",
        description="Compares the algorithms of runs world by world and over all worlds, with "
        "intervals over seeds, as a page for a browser, Markdown and CSV.",
    )
    report.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        help="folders that hold runs, or tables such as evaluations.csv",
    )
    report.add_argument(
        "--out", metavar="FOLDER", type=Path, default=Path("report"), help="default: report"
    )
    report.add_argument(
        "--references",
        metavar="FILE",
        type=Path,
        help="returns of the random policy and the best known, in YAML; default: the package's own",
    )
    report.set_defaults(rest="runs")


def add_list(commands: Any) -> None:
    lists = commands.add_parser(
        "list",
        help="see what there is",
        description="Lists recipes, scenarios and algorithms, every setting of a recipe, or the "
        "JSON schema of recipes, by which editors complete and check them.",
    )
    lists.add_argument("what", metavar="WHAT", nargs="?", type=list_name, help=", ".join(LISTS))
    lists.add_argument("recipe", metavar="RECIPE", nargs="?", help="whose values `settings` shows")
    lists.add_argument(
        "--markdown", action="store_true", help="`settings` as a table, with their defaults"
    )
    lists.add_argument(
        "--for",
        dest="world",
        metavar="WORLD",
        help="`algorithms` that fit a world (vmas/balance), a recipe's or a YAML file's (which is "
        "imported and built), with which settings, and why others do not",
    )
    lists.add_argument("--trust", action="store_true", help=TRUST)
    lists.set_defaults(rest="")


def add_export(commands: Any) -> None:
    export = commands.add_parser(
        "export",
        help="write agents that run alone",
        description="Writes what each agent of a run's last checkpoint needs to run alone, with "
        "numpy and onnxruntime only, and plays it beside the team for whole episodes.",
    )
    export.add_argument("run", metavar="RUN", help="the folder that `train` printed")
    export.add_argument("--agent", metavar="NAME", help="one agent; default: all")
    words = ", ".join(f"{word} ({meaning})" for word, meaning in FORMATS.items())
    export.add_argument(
        "--format",
        metavar="FORMAT",
        type=program_format,
        default="onnx",
        help=f"{words}; default: onnx",
    )
    export.add_argument("--out", metavar="FOLDER", type=Path, help="default: RUN/export")
    export.add_argument("--trust", action="store_true", help=TRUST)
    export.set_defaults(rest="")


def add_serve(commands: Any) -> None:
    serve = commands.add_parser(
        "serve",
        help="let a run act for simulators elsewhere",
        description="Opens a port at which simulators elsewhere are clients: they say what their "
        "agents see, and get the actions of a run's last checkpoint. Clients are in the folder "
        "`clients`; they declare what this command prints.",
    )
    serve.add_argument("run", metavar="RUN", help="the folder that `train` printed")
    serve.add_argument(
        "--host",
        default="127.0.0.1",
        help="where to listen; default: 127.0.0.1, any other needs a token",
    )
    serve.add_argument("--port", type=port, default=7777, help="default: 7777; 0: a free one")
    serve.add_argument(
        "--token-file",
        metavar="FILE",
        help="with the token that clients prove to have; default: TORCHRL_MARL_TOKEN, if set",
    )
    serve.add_argument("--tls-cert", metavar="FILE", help="certificate, for TLS")
    serve.add_argument("--tls-key", metavar="FILE", help="its key; default: in the certificate's")
    serve.add_argument(
        "--max-clients", metavar="N", type=count, default=256, help="at once; default: 256"
    )
    serve.add_argument(
        "--stochastic", action="store_true", help="sampled actions; default: the likeliest"
    )
    serve.add_argument(
        "--follow", action="store_true", help="newer checkpoints, as a training writes them"
    )
    serve.add_argument(
        "--execution",
        metavar="WORD",
        type=execution,
        default="compile",
        help="compile (default: some seconds at the start, then quickest), trace or eager",
    )
    serve.add_argument("--trust", action="store_true", help=TRUST)
    serve.set_defaults(rest="")


_COMMANDS: dict[str, Callable[[Any], None]] = {
    "train": add_train,
    "tune": add_tune,
    "suite": add_suite,
    "evaluate": add_evaluate,
    "compare": add_compare,
    "crossplay": add_crossplay,
    "league": add_league,
    "export": add_export,
    "serve": add_serve,
    "plot": add_plot,
    "report": add_report,
    "list": add_list,
}
COMMANDS = tuple(_COMMANDS)
"""Their names."""


class _Parser(argparse.ArgumentParser):
    """Tells a wrong argument as every other error is told."""

    late_epilog: Callable[[], str] | None = None

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)  # `--seed` is not `--seeds`

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; `{self.prog} --help` shows how.")

    def format_help(self) -> str:
        if self.late_epilog is not None:
            self.epilog = self.late_epilog()
        return super().format_help()


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
    for add in _COMMANDS.values():
        add(commands)
    return parser


class _Version(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="show the versions and leave")

    def __call__(self, *_: Any) -> NoReturn:
        versions = [f"torchrl-marl {__version__}"]
        for package in ("torchrl", "torch"):
            try:
                versions.append(f"{package} {importlib.metadata.version(package)}")
            except importlib.metadata.PackageNotFoundError:
                versions.append(f"{package} is not installed")
        print(f"{versions[0]} ({', '.join(versions[1:])})")
        raise SystemExit(0)
