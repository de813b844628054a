"""Commands that train: ``train``, ``tune`` and ``suite``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from torchrl_marl.arguments.words import TRUST, count, count_or_none, seeds
from torchrl_marl.console import settings_table

__all__ = ["add_suite", "add_train", "add_tune"]


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
        help="train the runs of --seeds side by side, in one program (all algorithms but HAPPO, "
        "PQN and FACMAC)",
    )
    train.add_argument(
        "--resume",
        metavar="RUN",
        help="go on with a run, by its own settings; total_frames, stop_at_return, evaluation.*, "
        "checkpoint.* and logging.* may be given anew",
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
