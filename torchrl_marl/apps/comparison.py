"""Comparison of two policies or of two algorithms, in episodes with the same initial states.

Shapes: R runs of a side, n starts (random initial states).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchrl_marl.envs.config import EnvConfig
from torchrl_marl.errors import ConfigError, quoted
from torchrl_marl.runtime.trust import trusting
from torchrl_marl.training.config import last_stage, read_run_config, seed_folders
from torchrl_marl.training.evaluation import AT_ONCE, Episodes, kind_of
from torchrl_marl.training.run import Run
from torchrl_marl.training.statistics import (
    Paired,
    difference_of_runs,
    needed,
    significant,
    too_few,
    undecided,
)

__all__ = ["Comparison", "Side", "compare", "find_run_folders", "win_interval"]

# Settings that do not change the task: number and device of the copies, and the critic's input.
_SETTINGS_NOT_COMPARED: dict[str, object] = {
    "num_envs": 1,
    "workers": 0,
    "worker_timeout": 60.0,
    "restart_workers": False,
    "state": None,
    "info": False,
    "group_map": {},
    "continuous_actions": True,
}
_PLACE: dict[str, Any] = {"folder": None, "device": "cpu", "threads": None}  # of a run, and how
_Z = 1.959964  # of a 95 % interval


@dataclass(frozen=True)
class Side:
    """One side of a comparison: its runs and the episodes that they played.

    Args:
        name (str): name as given by the caller.
        folders (list of Path): run folders.
        frames (list of int): env steps that each run has been trained for.
        wanted (list of int): env steps that each run was configured for.
        kinds (list of str): kind of actions of each run, ``likeliest`` or ``drawn``.
        played (list of Episodes): episodes of each run, from the same starts.
    """

    name: str
    folders: list[Path]
    frames: list[int]
    wanted: list[int]
    kinds: list[str]
    played: list[Episodes]

    @property
    def returns(self) -> NDArray[np.float64]:
        """Mean return over all agents, ``[R, n]``."""
        return np.stack([own.total.double().cpu().numpy() for own in self.played])

    @property
    def unfinished(self) -> list[str]:
        """Unfinished runs with their progress."""
        rows = zip(self.folders, self.frames, self.wanted)
        return [f"{run} at {now:,} of {all_:,} frames" for run, now, all_ in rows if now < all_]


@dataclass(frozen=True)
class Comparison:
    """Difference in return between two sides on the same starts."""

    first: Side
    second: Side
    paired: Paired
    """Return of the first side minus that of the second."""

    by_seed: bool = False
    """True if runs with the same seed are compared as pairs."""

    @property
    def of_policies(self) -> bool:
        """True if a side is a single run; the result then says nothing about other seeds."""
        return min(len(self.first.folders), len(self.second.folders)) == 1

    @property
    def verdict(self) -> str:
        """Returns a sentence that says which side is better, or that the data cannot decide."""
        gap, found = self.paired.difference, self.paired
        if found.p_value is None or found.smallest_p_value is None:
            return "one start says nothing about others; play more episodes"
        if gap.low == gap.high == 0:
            return "both earn the same from every start"
        things = "episodes" if self.of_policies else "seeds"
        better, other = (self.first, self.second) if gap.value > 0 else (self.second, self.first)
        words = f"{better.name} is better than {other.name}"
        if found.distinguishable:
            end = (
                f"; this holds for these {self._policies_text}, not the algorithms"
                * self.of_policies
            )
            return f"{words}, {significant(things)}{end}"
        pairs = self.by_seed or self.of_policies
        if gap.low <= 0 <= gap.high:
            more = "" if self.of_policies else needed(things, found.smallest_p_value, pairs)
            return undecided("episodes" if self.of_policies else "runs", more)
        if self.of_policies:
            counts = [len(self.first.returns[0])]
        else:
            counts = [len(side.folders) for side in (self.first, self.second)]
        return f"{words} among these, but " + too_few(
            things, counts, found.p_value, found.smallest_p_value, pairs
        )

    @property
    def _policies_text(self) -> str:
        count = len(self.first.folders) + len(self.second.folders)
        return "two policies" if count == 2 else f"{count} policies"


def compare(
    first: str | Path,
    second: str | Path,
    *,
    episodes: int = AT_ONCE,
    deterministic: bool | None = None,
    seed: int = 0,
    device: str | None = None,
    trust: bool = False,
    by_seed: bool = False,
) -> Comparison:
    """Plays both sides on the same starts and compares their returns.

    The interval is a Student's t interval. If a side is a single run, the interval covers the
    variation over starts, and the result holds for these policies only. With several runs on both
    sides, the interval covers the variation over runs and starts, and the result holds for the
    algorithms. A side is called better only if the interval excludes 0 and the p-value of the exact
    test is at most 0.05. This takes at least 4 runs on each side.

    Args:
        first, second (str or Path): run folder, population folder, or folder of several runs, such
            as the one that ``--seeds`` makes.

    Keyword Args:
        episodes (int): number of starts.
        deterministic (bool, optional): True for the likeliest actions, False for sampled ones;
            default: as each run is configured.
        seed (int): random seed of the starts.
        device (str, optional): device; default: as each run is configured.
        trust (bool): True to run code from the run folders.
        by_seed (bool): True to compare runs with the same seed as pairs, useful for two versions of
            one algorithm; a verdict takes at least 6 pairs.

    Raises:
        ConfigError: the runs have different environments, a run is on both sides or is there twice,
            or ``by_seed`` is given and the sides have different seeds.
        CheckpointError: there is no run at a path, or a run has no checkpoint.

    Examples:
        >>> compare("runs/a", "runs/b").verdict  # doctest: +SKIP
        'these episodes cannot tell them apart'
    """
    with trusting(trust):
        sides = {str(name): _distinct_runs(find_run_folders(name)) for name in (first, second)}
    if len(sides) < 2 or {p.resolve() for p in sides[str(first)]} & {
        p.resolve() for p in sides[str(second)]
    }:
        raise ConfigError(
            f"{quoted(str(second))} is on both sides, expected two different runs; name another."
        )
    with trusting(trust):
        _check_same_environment([folder for folders in sides.values() for folder in folders])
        sides = _sort_by_seed(sides) if by_seed else sides
    play_options: dict[str, object] = {
        "episodes": episodes,
        "deterministic": deterministic,
        "seed": seed,
    }
    one, other = (_play_side(name, own, device, trust, play_options) for name, own in sides.items())
    found = difference_of_runs(one.returns, other.returns, by_seed=by_seed)
    return Comparison(one, other, found, by_seed)


def _distinct_runs(folders: Sequence[Path]) -> list[Path]:
    """Leaves out links to other runs of the side, and refuses copies: each run counts once.

    Raises:
        ConfigError: two runs have the same seed and settings.
    """
    real: dict[Path, Path] = {}
    for folder in folders:
        real.setdefault(folder.resolve(), folder)
    own = list(real.values())
    configs = [dataclasses.replace(read_run_config(one), **_PLACE) for one in own]
    for i, config in enumerate(configs):
        if config in configs[:i]:
            raise ConfigError(
                f"{quoted(str(own[i]))} has the seed and the settings of "
                f"{quoted(str(own[configs.index(config)]))}, expected each run once; move one away."
            )
    return own


def _sort_by_seed(sides: dict[str, list[Path]]) -> dict[str, list[Path]]:
    """Sorts the runs of both sides by seed."""
    seeds = {
        name: {read_run_config(folder).seed: folder for folder in own}
        for name, own in sides.items()
    }
    found = {name: sorted(own) for name, own in seeds.items()}
    one, other = found.values()
    if one != other or any(len(own) != len(sides[name]) for name, own in seeds.items()):
        both = " and ".join(f"{quoted(name)} has {own}" for name, own in found.items())
        raise ConfigError(
            f"pairs by seed need the same seeds on both sides, but {both}; compare without "
            "--by-seed."
        )
    return {name: [own[seed] for seed in found[name]] for name, own in seeds.items()}


def find_run_folders(path: str | Path) -> list[Path]:
    """Returns the run folders at a path: the run itself, a population's members, or runs inside.

    Raises:
        CheckpointError: there is no run at the path.
    """
    folder = last_stage(path)
    if (folder / "config.yaml").is_file():
        return [folder] if read_run_config(folder).population.size == 1 else seed_folders(folder)
    inside = seed_folders(folder) or sorted(p.parent for p in folder.glob("*/config.yaml"))
    if not inside:
        read_run_config(folder)  # says what is there instead
    return [last_stage(one) for one in inside]


def _check_same_environment(folders: Sequence[Path]) -> None:
    first = _compared_env_settings(read_run_config(folders[0]).played_env)
    for folder in folders[1:]:
        other = _compared_env_settings(read_run_config(folder).played_env)
        differ = next((key for key in first if first[key] != other[key]), None)
        if differ is not None:
            raise ConfigError(
                f"run {quoted(str(folder))} has env.{differ}={quoted(other[differ])} and "
                f"{quoted(str(folders[0]))} {quoted(first[differ])}; expected runs of one "
                "environment."
            )


def _compared_env_settings(env: EnvConfig) -> dict[str, object]:
    return {k: v for k, v in dataclasses.asdict(env).items() if k not in _SETTINGS_NOT_COMPARED}


def _play_side(
    name: str, folders: list[Path], device: str | None, trust: bool, play_options: dict[str, object]
) -> Side:
    side = Side(name, folders, [], [], [], [])
    for folder in folders:
        run = Run.load(folder, device=device, trust=trust)
        deterministic = play_options["deterministic"]
        deterministic = (
            run.config.evaluation.deterministic if deterministic is None else deterministic
        )
        side.played.append(run.play(**play_options))  # type: ignore[arg-type]
        side.kinds.append(kind_of(bool(deterministic)))
        side.frames.append(run.frames)
        side.wanted.append(run.config.total_frames)
    return side


def win_interval(won: float, games: int) -> tuple[float, float]:
    """Returns Wilson's 95 % interval of a win rate.

    If draws count as half a win, the interval is wider than needed.

    Args:
        won (float): number of games won.
        games (int): number of games played.

    Reference: Wilson, 1927, https://doi.org/10.1080/01621459.1927.10502953.

    Examples:
        >>> [round(end, 3) for end in win_interval(50, 100)]
        [0.404, 0.596]
    """
    share, z = won / games, _Z**2 / games
    middle, half = share + z / 2, _Z * math.sqrt(share * (1 - share) / games + z / (4 * games))
    return max((middle - half) / (1 + z), 0.0), min((middle + half) / (1 + z), 1.0)
