"""Commands that show: ``plot``, ``report`` and ``list``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchrl_marl.arguments.words import LISTS, TRUST, list_name

__all__ = ["add_list", "add_plot", "add_report"]


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
