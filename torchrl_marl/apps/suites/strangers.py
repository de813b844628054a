"""Cross-play of a suite: runs of each task and algorithm with those of other seeds."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.envs import EnvBase

from torchrl_marl.apps.console import align_columns
from torchrl_marl.apps.players import format_mean, write_table
from torchrl_marl.apps.suites.board import Result, read_result, read_rows
from torchrl_marl.errors import CheckpointError, ConfigError
from torchrl_marl.specs import TeamSpec
from torchrl_marl.training.checkpoint import load_latest
from torchrl_marl.training.config import last_stage
from torchrl_marl.training.crossplay import PartnerScore, cross_play, partner_score, seats_of
from torchrl_marl.training.entrants import load_players
from torchrl_marl.training.evaluation import kind_of
from torchrl_marl.training.files import json_text, open_atomically

__all__ = ["play_other_seeds"]

RECORD = "crossplay.json"
"""File in the folder of a task and algorithm with the table of its seeds."""
_MAX_ENVS = 1000  # envs


def play_other_seeds(
    results: Sequence[Result],
    out: Path,
    *,
    trust: bool = False,
    log: Callable[[str], None] = print,
) -> dict[tuple[str, str], PartnerScore]:
    """Plays the finished seeds of each task and algorithm with each other.

    Each pair plays ``evaluation.episodes`` episodes in both orders of the seats. ``crossplay.json``
    and ``crossplay.csv`` in ``out/task/algorithm`` have the returns of all pairs, and
    ``out/crossplay.csv`` a row for each task and algorithm. A table that is there is not played
    again, unless its runs have changed. Other seeds in ``results.csv`` play, too, and rows of
    other tasks and algorithms are kept.

    Args:
        results (sequence of Result): the runs of a suite; those that have not finished, or have
            no usable checkpoint, are left out and named.
        out (Path): folder of the suite.

    Keyword Args:
        trust (bool): True to run code that another user's settings name.
        log (callable): called with a line for the runs left out, and the table of scores.

    Returns:
        dict: (task, algorithm) -> score, for those with two finished seeds or more.

    Raises:
        ConfigError: the agents of an environment are not one team.
    """
    found = _add_earlier_seeds(results, out)
    finished = [one for one in found if one.finished]
    if missing := [one.run.place.as_posix() for one in found if not one.finished]:
        log(f"left out of the cross-play, since they did not finish: {', '.join(missing)}")
    scores: dict[tuple[str, str], PartnerScore] = {}
    rows = _read_rows(out / "crossplay.csv")
    for pair in dict.fromkeys(one.run.pair for one in finished):
        own = [one for one in finished if one.run.pair == pair]
        if not _is_recorded(own, out / Path(*pair)):
            own = _with_checkpoint(own, log)
        if len(own) < 2:
            rows.pop(pair, None)
            seeds = f"{'one' if own else 'no'} finished seed"
            log(f"{' '.join(pair)}: {seeds}, which has no other to play with")
            continue
        scores[pair] = partner_score(_load_or_play(own, out / Path(*pair), trust))
        known = [x for one in scores[pair] for x in (one.value, one.low, one.high)]
        rows[pair] = [*pair, len(own), _episodes(own), *known]
        _write_rows(out / "crossplay.csv", list(rows.values()))
    if scores:
        log(_scores_text(scores))
    return scores


def _add_earlier_seeds(results: Sequence[Result], out: Path) -> list[Result]:
    """Adds the other seeds of the same tasks and algorithms, in the order of ``results.csv``."""
    firsts = {one.run.pair: one.run for one in reversed(results)}
    given = {one.run.place.as_posix(): one for one in results}
    found: dict[str, Result] = {}
    for place, row in read_rows(out).items():
        first = firsts.get((row["task"], row["algorithm"]))
        if place in given:
            found[place] = given[place]
        elif first is not None and row["seed"].isdecimal():
            seed = int(row["seed"])
            run = replace(first, seed=seed, config=replace(first.config, seed=seed))
            found[place] = read_result(out, run)
    return list({**found, **given}.values())


def _with_checkpoint(results: Sequence[Result], said: Callable[[str], None]) -> list[Result]:
    """Leaves out runs without a usable checkpoint, and reports each in a line."""
    found = []
    for one in results:
        try:
            load_latest(last_stage(one.folder))
            found.append(one)
        except CheckpointError as error:
            said(f"left out of the cross-play: {one.run.place.as_posix()}: {error}")
    return found


def _read_rows(path: Path) -> dict[tuple[str, str], list[Any]]:
    """Reads the rows of an earlier ``crossplay.csv`` by task and algorithm."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = {(row[0], row[1]): row for row in list(csv.reader(file))[1:]}
    except (OSError, ValueError, IndexError, csv.Error):
        return {}
    return {pair: row for pair, row in rows.items() if (path.parent / Path(*pair)).is_dir()}


def _table_key(results: Sequence[Result]) -> dict[str, Any]:
    """Returns what a table is played for; its record is only read if it is for the same."""
    kind = kind_of(results[0].run.config.evaluation.deterministic)
    return {
        "seeds": [one.run.seed for one in results],
        "runs": [[one.summary["frames"], one.summary.get("return_after")] for one in results],
        "episodes": _episodes(results),
        "actions": kind,
    }


def _is_recorded(results: Sequence[Result], folder: Path) -> bool:
    known = _read_record(folder / RECORD)
    return all(known.get(key) == value for key, value in _table_key(results).items())


def _load_or_play(results: Sequence[Result], folder: Path, trust: bool) -> torch.Tensor:
    """Returns the table of a task and algorithm, ``[A, A]``, from its record or from new games."""
    asked, record = _table_key(results), folder / RECORD
    if _is_recorded(results, folder):
        returns = _read_record(record)["returns"]  # null stands for NaN, after a diverged run
        rows = [[math.nan if x is None else x for x in row] for row in returns]
        return torch.tensor(rows, dtype=torch.float64)
    table = _play_seeds(results, trust)
    write_table(folder, [f"seed{seed}" for seed in asked["seeds"]], table, None)
    with open_atomically(record) as file:
        values = {key: table[key].tolist() for key in ("returns", "error")}
        file.write(json_text({**asked, **values}))
    return table["returns"]


def _play_seeds(results: Sequence[Result], trust: bool) -> TensorDict:
    config, names = results[0].run.config, [str(one.folder) for one in results]
    threads, episodes = torch.get_num_threads(), _episodes(results)
    torch.set_num_threads(config.threads or threads)
    try:
        env, players = load_players(names, min(episodes * len(names) ** 2, _MAX_ENVS), trust=trust)
        _check_seats(env, results[0])
        everybody = list(players.values())
        kind = config.evaluation.deterministic
        table = cross_play(everybody, everybody, env, episodes, deterministic=kind)
        env.close()
    finally:
        torch.set_num_threads(threads)
    return table


def _check_seats(env: EnvBase, result: Result) -> None:
    if seats_of(TeamSpec.from_env(env)).apart:
        raise ConfigError(
            f"the suite has score: crossplay, but {result.run.task} has two sides, expected one "
            "team of partners; leave score out, and use `torchrl-marl crossplay` for ratings."
        )


def _episodes(results: Sequence[Result]) -> int:
    return results[0].run.config.evaluation.episodes


def _read_record(record: Path) -> dict[str, Any]:
    try:
        found = json.loads(record.read_text(encoding="utf-8"))
        return found if len(found["returns"]) == len(found["seeds"]) else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _write_rows(path: Path, rows: Sequence[Sequence[Any]]) -> None:
    ends = ("", "_low", "_high")
    scores = [f"{name}{end}" for name in ("self_play", "cross_play") for end in ends]
    with open_atomically(path, newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["task", "algorithm", "seeds", "episodes", *scores])
        writer.writerows(rows)


def _scores_text(scores: dict[tuple[str, str], PartnerScore]) -> str:
    rows = [["task", "algorithm", "seeds", "with itself", "with others"]]
    for pair, score in scores.items():
        seeds = str(score.cross_play.runs[0])
        rows.append([*pair, seeds, *(format_mean(one) for one in score)])
    return align_columns(rows, slice(2, None), indent="")
