"""What the command line takes: its commands, their options, and help."""

from __future__ import annotations

import argparse
import importlib.metadata
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torchrl_marl
from torchrl_marl.console import settings_table
from torchrl_marl.errors import ConfigError, nearest, quoted
from torchrl_marl.export.formats import FORMATS

__all__ = ["COMMANDS", "make_parser"]

COMMANDS = ("train", "tune", "evaluate", "crossplay", "league", "export", "serve", "plot", "list")
_TRUST = "run the code that a run of somebody else's brings: its world's module, pickled worlds"
_LISTS = ("recipes", "worlds", "scenarios", "algorithms", "settings", "schema")


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
    adds = [_add_train, _add_tune, _add_evaluate, _add_crossplay, _add_league]
    for add in (*adds, _add_export, _add_serve, _add_plot, _add_list):
        add(commands)
    return parser


class _Version(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="show the versions and leave")

    def __call__(self, *_: Any) -> NoReturn:
        versions = [f"torchrl-marl {torchrl_marl.__version__}"]
        for package in ("torchrl", "torch"):
            try:
                versions.append(f"{package} {importlib.metadata.version(package)}")
            except importlib.metadata.PackageNotFoundError:
                versions.append(f"{package} is not installed")
        print(f"{versions[0]} ({', '.join(versions[1:])})")
        raise SystemExit(0)


def _add_train(commands: Any) -> None:
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
        "--seeds", metavar="0,1,2", type=_seeds, help="one run for each of these seeds; also 0..15"
    )
    train.add_argument(
        "--together",
        action="store_true",
        help="train the runs of --seeds side by side, in one program (MAPPO and IPPO)",
    )
    train.add_argument(
        "--resume",
        metavar="RUN",
        help="go on with a run, by its own settings; total_frames, stop_at_return, evaluation.*, "
        "checkpoint.* and logging.* may be given anew",
    )
    train.add_argument("--trust", action="store_true", help=_TRUST)
    train.late_epilog = _train_epilog
    train.set_defaults(rest="settings")


def _add_tune(commands: Any) -> None:
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
        help="a recipe (first), ranges such as learner.lr=1e-4..1e-2:log, and settings",
    )
    tune.add_argument("--trials", metavar="N", type=_count, default=32, help="default: 32")
    tune.add_argument(
        "--together", metavar="N", type=_count, default=8, help="trials at once; default: 8"
    )
    tune.add_argument(
        "--prune",
        choices=["asha"],
        help="end trials early that fall behind (successive halving); others take their place",
    )
    tune.add_argument(
        "--out", metavar="FOLDER", type=Path, help="default: tune_RECIPE in the current folder"
    )
    tune.set_defaults(rest="settings")


def _add_evaluate(commands: Any) -> None:
    evaluate = commands.add_parser(
        "evaluate",
        help="measure a trained team",
        description="Plays whole episodes with the policy of a run's last checkpoint, and adds "
        "the result to RUN/evaluations.jsonl.",
    )
    evaluate.add_argument("run", metavar="RUN", help="the folder that `train` printed")
    evaluate.add_argument("--episodes", metavar="N", type=_count, help="default: as in the run")
    how = evaluate.add_mutually_exclusive_group()
    how.add_argument("--stochastic", action="store_true", help="sample the actions")
    how.add_argument(
        "--deterministic",
        action="store_true",
        help="the likeliest actions; default: as in the run",
    )
    evaluate.add_argument(
        "--seed", metavar="S", type=_seed, help="other episodes; default: the run's seed"
    )
    evaluate.add_argument("--gif", action="store_true", help="write RUN/episode.gif, too")
    evaluate.add_argument("--device", metavar="DEVICE", help="cpu or cuda; default: as in the run")
    evaluate.add_argument("--trust", action="store_true", help=_TRUST)
    evaluate.set_defaults(rest="")


def _add_crossplay(commands: Any) -> None:
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
        default=Path(),
        help="for crossplay.csv, ratings.csv and crossplay.png; default: the current one",
    )
    _add_matches(crossplay)
    crossplay.set_defaults(rest="players")


def _add_league(commands: Any) -> None:
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
        type=_count,
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
        "--episodes", metavar="N", type=_count, default=100, help="of a pair; default: 100"
    )
    command.add_argument(
        "--deterministic", action="store_true", help="the likeliest actions; default: sampled"
    )
    command.add_argument("--seed", metavar="S", type=_seed, default=0, help="default: 0")
    command.add_argument("--device", metavar="DEVICE", help="default: as in the first run")
    command.add_argument("--trust", action="store_true", help=_TRUST)


def _add_export(commands: Any) -> None:
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
        "--format", metavar="FORMAT", type=_format, default="onnx", help=f"{words}; default: onnx"
    )
    export.add_argument("--out", metavar="FOLDER", type=Path, help="default: RUN/export")
    export.add_argument("--trust", action="store_true", help=_TRUST)
    export.set_defaults(rest="")


def _add_serve(commands: Any) -> None:
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
    serve.add_argument("--port", type=_port, default=7777, help="default: 7777; 0: a free one")
    serve.add_argument(
        "--token-file",
        metavar="FILE",
        help="with the token that clients prove to have; default: TORCHRL_MARL_TOKEN, if set",
    )
    serve.add_argument("--tls-cert", metavar="FILE", help="certificate, for TLS")
    serve.add_argument("--tls-key", metavar="FILE", help="its key; default: in the certificate's")
    serve.add_argument(
        "--max-clients", metavar="N", type=_count, default=256, help="at once; default: 256"
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
        type=_execution,
        default="compile",
        help="compile (default: some seconds at the start, then quickest), trace or eager",
    )
    serve.add_argument("--trust", action="store_true", help=_TRUST)
    serve.set_defaults(rest="")


def _add_plot(commands: Any) -> None:
    plot = commands.add_parser(
        "plot",
        help="draw learning curves",
        description="Draws the learning curves of runs; seeds of a recipe become mean and range.",
    )
    plot.add_argument("runs", metavar="RUN", nargs="+", help="folders that `train` printed")
    plot.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        help="default: learning_curve.png, in the run's folder if it is one run",
    )
    plot.add_argument(
        "--key", metavar="COLUMN", help="a column of metrics.csv or evaluation.csv; default: return"
    )
    plot.set_defaults(rest="runs")


def _add_list(commands: Any) -> None:
    lists = commands.add_parser(
        "list",
        help="see what there is",
        description="Lists recipes, scenarios and algorithms, every setting of a recipe, or the "
        "JSON schema of recipes, by which editors complete and check them.",
    )
    lists.add_argument("what", metavar="WHAT", nargs="?", type=_what, help=", ".join(_LISTS))
    lists.add_argument("recipe", metavar="RECIPE", nargs="?", help="whose values `settings` shows")
    lists.add_argument(
        "--markdown", action="store_true", help="`settings` as a table, with their defaults"
    )
    lists.set_defaults(rest="")


def _range(first: int, last: int) -> list[int]:
    if first > last or last - first >= 10_000:
        raise argparse.ArgumentTypeError(
            f"found {first}..{last}, expected a first seed, and a last one that is larger"
        )
    return list(range(first, last + 1))


def _seeds(text: str) -> list[int]:
    if not re.fullmatch(r"\d+(,\d+)*|\d+\.\.\d+", text):
        raise argparse.ArgumentTypeError(
            f"found {quoted(text)}, expected numbers such as 0,1,2 or 0..15"
        )
    first, _, last = text.partition("..")
    seeds = [int(seed) for seed in text.split(",")] if not last else _range(int(first), int(last))
    if len(set(seeds)) < len(seeds):
        raise argparse.ArgumentTypeError(f"found {quoted(text)}, expected each seed once")
    return seeds


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {quoted(text)}, expected a number of 1 or more")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a number from 0 to {2**32 - 1}")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"found {quoted(text)}, expected a port, 0 to 65535")
    return int(text)


def _execution(text: str) -> str:
    words = ("compile", "trace", "eager")
    if text not in words:
        raise argparse.ArgumentTypeError(
            f"found {quoted(text)}; {nearest(text, words)}choose among {', '.join(words)}"
        )
    return text


def _format(text: str) -> str:
    if text not in FORMATS:
        raise argparse.ArgumentTypeError(
            f"found {quoted(text)}; {nearest(text, FORMATS)}choose among {', '.join(FORMATS)}"
        )
    return text


def _what(text: str) -> str:
    if text not in _LISTS:
        raise argparse.ArgumentTypeError(
            f"found {quoted(text)}; {nearest(text, _LISTS)}choose among {', '.join(_LISTS)}"
        )
    return text
