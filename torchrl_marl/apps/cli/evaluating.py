"""Output of the commands ``evaluate`` and ``compare``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase

from torchrl_marl.apps.comparison import Comparison, Side, win_interval
from torchrl_marl.apps.console import align_columns, number, table
from torchrl_marl.errors import ConfigError, quoted
from torchrl_marl.settings import parse_overrides
from torchrl_marl.settings.layers import flatten
from torchrl_marl.specs import TeamSpec
from torchrl_marl.training.config import TrainConfig
from torchrl_marl.training.crossplay import cross_play, seats_of
from torchrl_marl.training.entrants import load_players
from torchrl_marl.training.evaluation import Episodes, describe_action_difference, kind_of
from torchrl_marl.training.run import Run

__all__ = ["comparison_text", "print_against", "print_evaluation"]

_ACTION_NAMES = {"likeliest": "most likely", "drawn": "sampled"}


def print_evaluation(config: TrainConfig, parsed: argparse.Namespace) -> None:
    """Plays episodes of a run and prints the results, by default for both kinds of actions.

    Args:
        config (TrainConfig): settings of the run, with the device given to the command.
        parsed (Namespace): arguments of the command.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    randomize, other = _parse_env_settings(parsed.settings)
    load_options = {"device": parsed.device, "trust": parsed.trust} | (
        {"settings": other} if other else {}
    )
    run = Run.load(Path(parsed.run), **load_options)
    own, kind = config.evaluation.deterministic, parsed.deterministic
    kinds = [own, not own] if kind is None else [kind]
    played: dict[bool, Episodes] = {}
    for kind in kinds:
        film = {"gif": parsed.gif, "mp4": parsed.mp4, "shown": parsed.episodes_shown}
        film = film if kind == kinds[0] else {}
        options = {"deterministic": kind, "seed": parsed.seed, "record": True, **film}
        options["randomize"] = randomize
        played[kind] = run.play(parsed.episodes, **options)
    print(evaluation_text({kind_of(kind): one.figures() for kind, one in played.items()}))
    if len(played) == 2 and (words := describe_action_difference(played[True], played[False])):
        print(f"  {words}.")
    kinds_drawn = ["gif"] * parsed.gif + ["mp4"] * parsed.mp4
    if kinds_drawn:
        print(table([("animation", str(run.folder / f"episode.{kind}")) for kind in kinds_drawn]))


def _parse_env_settings(
    texts: Sequence[str],
) -> tuple[dict[str, Any] | bool | None, dict[str, Any]]:
    """Reads the settings given to ``evaluate``.

    Returns:
        tuple: ranges to play with, or whether to play with those of the training; and other
            settings of the environment.

    Raises:
        ConfigError: a setting that is not of the environment; the message names it.
    """
    given = flatten(parse_overrides(texts), stop={"env.randomize"})
    for key in given:
        if key != "evaluation.randomize" and not key.startswith("env."):
            raise ConfigError(
                f"evaluate: {key} is given, expected settings of the environment, such as "
                "env.kwargs.n_agents=8 or env.randomize.NAME=VALUE, or evaluation.randomize=true; "
                "the run's other settings stay."
            )
    ranges = given.pop("env.randomize", None)
    on = given.pop("evaluation.randomize", None)
    return on if ranges is None else ranges, given


def evaluation_text(found: Mapping[str, Mapping[str, float]]) -> str:
    """Formats evaluation results, with a column for each kind of actions.

    Args:
        found (mapping): ``likeliest`` or ``drawn`` -> results with these actions.
    """
    lines = [["", *(f"{_ACTION_NAMES[kind]} actions" for kind in found)]]
    columns = list(found.values())
    lines.append(["return", *(_format_interval(own, "return_mean", "return") for own in columns)])
    lines.append(["least and greatest", *(_format_range(own, "return") for own in columns)])
    groups = [key for key in columns[0] if key.endswith("/episode_reward")]
    for key in groups if len(groups) > 1 else ():
        name = f"return of {key.rpartition('/')[0]}"
        lines.append([name, *(_format_interval(own, key, key) for own in columns)])
    lines.append(
        [
            "length",
            *(f"{number(own['length_mean'])} ({_format_range(own, 'length')})" for own in columns),
        ]
    )
    lines.append(["episodes", *(number(own["episodes"]) for own in columns)])
    return align_columns(lines)


def _format_interval(own: Mapping[str, float], key: str, name: str) -> str:
    if f"{name}_low" not in own:
        return number(own[key])
    return f"{number(own[key])} ({number(own[f'{name}_low'])} to {number(own[f'{name}_high'])})"


def _format_range(own: Mapping[str, float], name: str) -> str:
    return f"{number(own[f'{name}_min'])} to {number(own[f'{name}_max'])}"


def comparison_text(found: Comparison) -> str:
    """Formats a comparison: a column for each side, then the difference and the verdict."""
    sides, gap = (found.first, found.second), found.paired.difference
    kinds = [
        " and ".join(_ACTION_NAMES[kind] for kind in dict.fromkeys(side.kinds)) for side in sides
    ]
    lines = [
        ["", *(side.name for side in sides)],
        ["runs", *(str(len(side.folders)) for side in sides)],
        ["actions", *kinds],
        ["return", *(_format_return(side) for side in sides)],
    ]
    n = found.first.returns.shape[1]
    gap_text = number(gap.value)
    if gap.has_interval:
        gap_text += f" ({number(gap.low)} to {number(gap.high)})"
    rows = [
        ("difference", f"{gap_text}, {found.first.name} less {found.second.name}"),
        ("starts", f"{n}; on {100 * found.paired.won:.1f} % the first is better (a tie is half)"),
    ]
    marked = [words for side in sides for words in side.unfinished]
    more = [("not finished", words) for words in marked]
    return "\n".join([align_columns(lines), table([*rows, *more]), f"  {found.verdict}."])


def _format_return(side: Side) -> str:
    if len(side.played) == 1:
        return _format_interval(side.played[0].figures(), "return_mean", "return")
    means = side.returns.mean(1)
    return f"{number(float(means.mean()))} (runs {number(means.min())} to {number(means.max())})"


def print_against(config: TrainConfig, parsed: argparse.Namespace) -> None:
    """Plays a run against another player, swapping sides, and prints the win rates.

    Args:
        config (TrainConfig): settings of the run.
        parsed (Namespace): arguments of the command.

    Raises:
        ConfigError: the environment has only one team, or options for animations are given.
    """
    if parsed.settings:
        raise ConfigError(
            f"{parsed.settings[0]} is given with --against, which plays with nominal values; "
            "leave it out."
        )
    if parsed.gif or parsed.mp4:
        raise ConfigError(
            "--gif or --mp4 is given with --against, expected one of them; animations show a run "
            "without an opponent."
        )
    names = [parsed.run, parsed.against]
    env, players = load_players(
        names, min(parsed.episodes, 1000), device=parsed.device, trust=parsed.trust
    )
    seats = seats_of(TeamSpec.from_env(env))
    if not seats.apart:
        env.close()
        raise ConfigError(
            f"run {quoted(parsed.run)} plays in an environment of one team, expected two opposing "
            "sides; use `torchrl-marl crossplay` for teammates, or `torchrl-marl compare`."
        )
    kind = parsed.deterministic
    kind = config.evaluation.deterministic if kind is None else kind
    options = {"deterministic": kind, "seed": parsed.seed}
    me, other = ([players[name]] for name in names)
    rows = [("actions", kind_of(kind))]
    first = cross_play(me, other, env, parsed.episodes, **options)[0, 0]
    if seats.alike:
        rows += _result_rows(first, "seats", "both, half of the games each")
    else:
        second = cross_play(other, me, env, parsed.episodes, **options)[0, 0]
        rows += _result_rows(first, "side", next(iter(seats.agents[0])))
        rows += _result_rows(second, "side", next(iter(seats.agents[1])), counts_opponent=True)
    env.close()
    print(table(rows))


def _result_rows(
    entry: TensorDictBase, label: str, seat: str, counts_opponent: bool = False
) -> list[tuple[str, str]]:
    """Returns rows for the games on one side.

    With ``counts_opponent``, the entry counts the opponent's wins.
    """
    wins, draws, games = (int(entry[key]) for key in ("wins", "draws", "games"))
    won = games - wins - draws if counts_opponent else wins
    score = won + draws / 2
    low, high = win_interval(score, games)
    rows = [
        (label, seat),
        ("games", f"{games}: {won} won, {draws} drawn, {games - won - draws} lost"),
        ("win rate", f"{number(score / games)} ({number(low)} to {number(high)}), draws half"),
    ]
    return rows if counts_opponent else [*rows, ("return", number(float(entry["returns"])))]
