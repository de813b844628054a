"""Commands that play with trained teams: ``evaluate``, ``crossplay`` and ``league``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchrl_marl.arguments.words import TRUST, count, seed

__all__ = ["add_crossplay", "add_evaluate", "add_league"]


def add_evaluate(commands: Any) -> None:
    evaluate = commands.add_parser(
        "evaluate",
        help="measure a trained team",
        description="Plays whole episodes with the policy of a run's last checkpoint, and adds "
        "the result to RUN/evaluations.jsonl.",
    )
    evaluate.add_argument("run", metavar="RUN", help="the folder that `train` printed")
    evaluate.add_argument("--episodes", metavar="N", type=count, help="default: as in the run")
    how = evaluate.add_mutually_exclusive_group()
    how.add_argument("--stochastic", action="store_true", help="sample the actions")
    how.add_argument(
        "--deterministic",
        action="store_true",
        help="the likeliest actions; default: as in the run",
    )
    evaluate.add_argument(
        "--seed", metavar="S", type=seed, help="other episodes; default: the run's seed"
    )
    evaluate.add_argument("--gif", action="store_true", help="write RUN/episode.gif, too")
    evaluate.add_argument("--device", metavar="DEVICE", help="cpu or cuda; default: as in the run")
    evaluate.add_argument("--trust", action="store_true", help=TRUST)
    evaluate.set_defaults(rest="")


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
        default=Path(),
        help="for crossplay.csv, ratings.csv and crossplay.png; default: the current one",
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
