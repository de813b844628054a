"""Two policies, or two algorithms of several runs each, on the same starts of a world.

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
from torchrl_marl.statistics import RESAMPLES, Estimate, Paired, paired_difference
from torchrl_marl.training.config import read_run_config, seed_folders
from torchrl_marl.training.episodes import Episodes, kind_of
from torchrl_marl.training.evaluation import AT_ONCE
from torchrl_marl.training.run import Run
from torchrl_marl.trust import trusting

__all__ = ["Comparison", "Side", "compare", "difference_of_sides", "runs_of", "win_interval"]

# Where the copies of a world run, how many, and what only a critic sees: the world is the same.
_NOT_THE_WORLD: dict[str, object] = {
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
_CHUNK = 200  # resamples at once


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

    @property
    def of_policies(self) -> bool:
        """Whether each side is one run, so that nothing is said of other seeds."""
        return len(self.first.folders) == len(self.second.folders) == 1

    @property
    def verdict(self) -> str:
        """Says in a sentence which side is better, and how certain that is."""
        gap, sure = self.paired.difference, self.paired.probability
        if sure is None:
            return "one start says nothing about others; play more episodes"
        if gap.low == gap.high == 0:
            return "both earn the same from every start"
        better, other = (self.first, self.second) if sure >= 0.5 else (self.second, self.first)
        sure, of = max(sure, 1 - sure), ", of these two policies" if self.of_policies else ""
        words = f"{better.name} is better than {other.name} with a certainty of {_percent(sure)}"
        return words + of


def _percent(share: float) -> str:
    """Writes a share of resamples, of which none says that it can not be otherwise."""
    return "more than 99.9 %" if share > 0.999 else f"{100 * share:.1f} %"


def compare(
    first: str | Path,
    second: str | Path,
    *,
    episodes: int = AT_ONCE,
    deterministic: bool | None = None,
    seed: int = 0,
    device: str | None = None,
    trust: bool = False,
) -> Comparison:
    """Plays both sides on the same starts, and says how they differ.

    The interval is a bootstrap's, of starts that are drawn anew, and of the runs of a side of
    several: with one run a side it speaks of these two policies, with more of what trained them.

    Args:
        first, second (str or Path): a run folder, a population's, or a folder that holds several,
            such as ``--seeds`` makes.

    Keyword Args:
        episodes (int): starts.
        deterministic (bool, optional): the likeliest actions or drawn ones; as each run says.
        seed (int): which starts.
        device (str, optional): as in each run.
        trust (bool): run the code that a run of somebody else's brings.

    Raises:
        ConfigError: runs of different worlds, or a run that is on both sides.
        CheckpointError: no run, or one without a checkpoint.

    Examples:
        >>> compare("runs/a", "runs/b").verdict  # doctest: +SKIP
        'runs/a is better than runs/b with a certainty of 98.2 %, of these two policies'
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
        _check_worlds([folder for folders in sides.values() for folder in folders])
    how: dict[str, object] = {"episodes": episodes, "deterministic": deterministic, "seed": seed}
    one, other = (_play(name, own, device, trust, how) for name, own in sides.items())
    return Comparison(one, other, difference_of_sides(one.returns, other.returns))


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


def _check_worlds(folders: Sequence[Path]) -> None:
    first = _world(read_run_config(folders[0]).env)
    for folder in folders[1:]:
        other = _world(read_run_config(folder).env)
        differ = next((key for key in first if first[key] != other[key]), None)
        if differ is not None:
            raise ConfigError(
                f"run {quoted(str(folder))} has env.{differ}={quoted(other[differ])} and "
                f"{quoted(str(folders[0]))} {quoted(first[differ])}; expected runs of one world."
            )


def _world(env: EnvConfig) -> dict[str, object]:
    return {k: v for k, v in dataclasses.asdict(env).items() if k not in _NOT_THE_WORLD}


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


def difference_of_sides(
    first: NDArray[np.float64], second: NDArray[np.float64], *, seed: int = 0
) -> Paired:
    """Compares the mean returns of two sides on the same starts.

    In each resample the starts are drawn anew, for both sides alike, and so are the runs of a
    side that has several.

    Args:
        first, second (array): returns, ``[R, n]`` and ``[R', n]``.

    Keyword Args:
        seed (int): of the resamples.

    Reduces to: :func:`~torchrl_marl.statistics.paired_difference`, of one run each.

    Examples:
        >>> one, other = np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[0.0, 1.0]])
        >>> difference_of_sides(one, other).difference.value
        2.0
    """
    if len(first) == len(second) == 1:
        return paired_difference(first[0], second[0])
    gap = first.mean(0) - second.mean(0)
    won = float(((gap > 0) + 0.5 * (gap == 0)).mean())
    if gap.size < 2:
        why = "one start says nothing about others"
        return Paired(Estimate(float(gap.mean()), why_none=why), None, won)
    random, n = np.random.default_rng(seed), gap.size
    means = []
    for _ in range(0, RESAMPLES, _CHUNK):
        weights = [_drawn(random, len(side)) @ side for side in (first, second)]
        means.append(((weights[0] - weights[1]) * _drawn(random, n)).sum(-1))
    drawn = np.concatenate(means)
    low, high = np.quantile(drawn, (0.025, 0.975))
    runs = (len(first), len(second))
    found = Estimate(float(gap.mean()), float(low), float(high), runs=runs)
    return Paired(found, float(((drawn > 0) + 0.5 * (drawn == 0)).mean()), won)


def _drawn(random: np.random.Generator, n: int) -> NDArray[np.float64]:
    """Returns how often each of n is drawn in n draws, as shares, ``[_CHUNK, n]``."""
    return random.multinomial(n, [1 / n] * n, size=_CHUNK) / n


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
