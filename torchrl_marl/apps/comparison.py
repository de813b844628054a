"""Two policies, or two algorithms of several runs each, on the same starts of an environment.

Shapes: R runs of a side, n starts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from torchrl_marl.envs.config import EnvConfig
from torchrl_marl.errors import ConfigError, quoted
from torchrl_marl.runtime.trust import trusting
from torchrl_marl.training.config import read_run_config, seed_folders
from torchrl_marl.training.evaluation import AT_ONCE, Episodes, kind_of
from torchrl_marl.training.run import Run
from torchrl_marl.training.statistics import (
    CONFIDENCE,
    Paired,
    by_chance,
    difference_of_runs,
    explained,
    undecided,
)

__all__ = ["Comparison", "Side", "compare", "runs_of", "win_interval"]

# Where the copies of an environment run, how many, and what only a critic sees: the environment is
# the same.
_NOT_THE_ENVIRONMENT: dict[str, object] = {
    "num_envs": 1,
    "workers": 0,
    "worker_timeout": 60.0,
    "restart_workers": False,
    "state": None,
    "info": False,
    "group_map": {},
    "continuous_actions": True,
}
_Z = 1.959964  # of a 95 % interval


@dataclass(frozen=True)
class Side:
    """What one side of a comparison played.

    Args:
        name (str): as it was given.
        folders (list of Path): its runs.
        frames, wanted (list of int): env steps that each was trained for, and was to be.
        kinds (list of str): by which actions each played, ``likeliest`` or ``drawn``.
        played (list of Episodes): the same starts for each.
    """

    name: str
    folders: list[Path]
    frames: list[int]
    wanted: list[int]
    kinds: list[str]
    played: list[Episodes]

    @property
    def returns(self) -> NDArray[np.float64]:
        """All agents' mean return, ``[R, n]``."""
        return np.stack([own.total.double().cpu().numpy() for own in self.played])

    @property
    def unfinished(self) -> list[str]:
        """Runs that have not come to their end, and how far they are."""
        rows = zip(self.folders, self.frames, self.wanted)
        return [f"{run} at {now:,} of {all_:,} frames" for run, now, all_ in rows if now < all_]


@dataclass(frozen=True)
class Comparison:
    """How one side differs from another on the same starts."""

    first: Side
    second: Side
    paired: Paired
    """First less second."""

    by_seed: bool = False
    """Whether runs of one seed are pairs."""

    @property
    def of_policies(self) -> bool:
        """Whether a side is one run, so that nothing is said of other seeds."""
        return min(len(self.first.folders), len(self.second.folders)) == 1

    @property
    def verdict(self) -> str:
        """Says in a sentence which side is better, if the test and the interval tell."""
        gap, found = self.paired.difference, self.paired
        if found.chance is None or found.least is None:
            return "one start says nothing about others; play more episodes"
        if gap.low == gap.high == 0:
            return "both earn the same from every start"
        things = "episodes" if self.of_policies else "seeds"
        better, other = (self.first, self.second) if gap.value > 0 else (self.second, self.first)
        words = f"{better.name} is better than {other.name}"
        if found.distinguishable:
            end = f": of these {self._policies}, not the algorithms" * self.of_policies
            return f"{words}, {explained(things)}{end}"
        enough = self.of_policies or found.least <= 1 - CONFIDENCE or gap.value == 0
        if gap.low <= 0 <= gap.high and enough:
            return undecided("episodes" if self.of_policies else "runs")
        if self.of_policies:
            counts = [len(self.first.returns[0])]
        else:
            counts = [len(side.folders) for side in (self.first, self.second)]
        pairs = self.by_seed or self.of_policies
        return f"{words} among these, but " + by_chance(
            things, counts, found.chance, found.least, pairs
        )

    @property
    def _policies(self) -> str:
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
    """Plays both sides on the same starts, and says how they differ.

    The interval is Student's. With one run on a side it is of the starts, and speaks of these
    policies; with several on both it is of runs and starts, and speaks of what trained them. One
    side is called better only where the interval leaves out 0 and the exact test finds so great a
    difference by chance in at most 5 % of the cases: of 4 runs a side, or more.

    Args:
        first, second (str or Path): a run folder, a population's, or a folder that holds several,
            such as ``--seeds`` makes.

    Keyword Args:
        episodes (int): starts.
        deterministic (bool, optional): the likeliest actions or drawn ones; as each run says.
        seed (int): which starts.
        device (str, optional): as in each run.
        trust (bool): run the code that a run of somebody else's brings.
        by_seed (bool): compare runs of the same seed, pair by pair, such as two versions of one
            algorithm that start alike; tells apart from 6 pairs on.

    Raises:
        ConfigError: runs of different environments, a run that is on both sides, or pairs by seed
            where the sides have other seeds.
        CheckpointError: no run, or one without a checkpoint.

    Examples:
        >>> compare("runs/a", "runs/b").verdict  # doctest: +SKIP
        'these episodes cannot tell them apart'
    """
    with trusting(trust):
        sides = {str(name): runs_of(name) for name in (first, second)}
    if len(sides) < 2 or {p.resolve() for p in sides[str(first)]} & {
        p.resolve() for p in sides[str(second)]
    }:
        raise ConfigError(
            f"{quoted(str(second))} is on both sides, expected two different runs; name another."
        )
    with trusting(trust):
        _check_environments([folder for folders in sides.values() for folder in folders])
        sides = _by_seed(sides) if by_seed else sides
    how: dict[str, object] = {"episodes": episodes, "deterministic": deterministic, "seed": seed}
    one, other = (_play(name, own, device, trust, how) for name, own in sides.items())
    found = difference_of_runs(one.returns, other.returns, by_seed=by_seed)
    return Comparison(one, other, found, by_seed)


def _by_seed(sides: dict[str, list[Path]]) -> dict[str, list[Path]]:
    """Returns the runs of both sides in the order of their seeds."""
    seeds = {
        name: {read_run_config(folder).seed: folder for folder in own}
        for name, own in sides.items()
    }
    found = {name: sorted(own) for name, own in seeds.items()}
    one, other = found.values()
    if one != other or any(len(own) != len(sides[name]) for name, own in seeds.items()):
        both = " and ".join(f"{quoted(name)} has {own}" for name, own in found.items())
        raise ConfigError(
            f"pairs by seed need a run of each seed on both sides, and of the seeds {both}; "
            "compare without --by-seed."
        )
    return {name: [own[seed] for seed in found[name]] for name, own in seeds.items()}


def runs_of(given: str | Path) -> list[Path]:
    """Returns the run folders that a path stands for: one, a population's, or those inside.

    Raises:
        CheckpointError: no run there.
    """
    folder = Path(given)
    if (folder / "config.yaml").is_file():
        return [folder] if read_run_config(folder).population.size == 1 else seed_folders(folder)
    inside = seed_folders(folder) or sorted(p.parent for p in folder.glob("*/config.yaml"))
    if not inside:
        read_run_config(folder)  # says what is there instead
    return inside


def _check_environments(folders: Sequence[Path]) -> None:
    first = _environment(read_run_config(folders[0]).env)
    for folder in folders[1:]:
        other = _environment(read_run_config(folder).env)
        differ = next((key for key in first if first[key] != other[key]), None)
        if differ is not None:
            raise ConfigError(
                f"run {quoted(str(folder))} has env.{differ}={quoted(other[differ])} and "
                f"{quoted(str(folders[0]))} {quoted(first[differ])}; expected runs of one "
                "environment."
            )


def _environment(env: EnvConfig) -> dict[str, object]:
    return {k: v for k, v in dataclasses.asdict(env).items() if k not in _NOT_THE_ENVIRONMENT}


def _play(
    name: str, folders: list[Path], device: str | None, trust: bool, how: dict[str, object]
) -> Side:
    side = Side(name, folders, [], [], [], [])
    for folder in folders:
        run = Run.load(folder, device=device, trust=trust)
        own = how["deterministic"]
        own = run.config.evaluation.deterministic if own is None else own
        side.played.append(run.play(**how))  # type: ignore[arg-type]
        side.kinds.append(kind_of(bool(own)))
        side.frames.append(run.frames)
        side.wanted.append(run.config.total_frames)
    return side


def win_interval(won: float, games: int) -> tuple[float, float]:
    """Returns Wilson's 95 % interval of a win rate; draws may count half, which makes it wider.

    Args:
        won (float): games won.
        games (int): how many were played.

    Reference: Wilson, 1927, https://doi.org/10.1080/01621459.1927.10502953.

    Examples:
        >>> [round(end, 3) for end in win_interval(50, 100)]
        [0.404, 0.596]
    """
    share, z = won / games, _Z**2 / games
    middle, half = share + z / 2, _Z * math.sqrt(share * (1 - share) / games + z / (4 * games))
    return max((middle - half) / (1 + z), 0.0), min((middle + half) / (1 + z), 1.0)
