"""Commands that play with trained teams: ``evaluate``, ``compare``, ``crossplay``, ``league``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchrl_marl.arguments.words import TRUST, count, seed

__all__ = ["add_compare", "add_crossplay", "add_evaluate", "add_league"]


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
