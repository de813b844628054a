"""Agents that die during an episode: masked, or with substitute observations for dead agents.

A comparison of ``heterogeneous.py``.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from typing import TYPE_CHECKING, Any

import report

if TYPE_CHECKING:
    from heterogeneous import Trainer
    from torchrl.envs import EnvBase

ARENA = "toy_arena_mappo"
PLACES = ("zeros", "observed as before", "positions outside", "NaN")
ARENA_FRAMES, ARENA_POINTS = 12_800, 10
METHOD = """
"masked": as the library trains it. "not masked": the environment's masks are hidden from collector,
networks, losses and statistics alike, which is what a system without masks sees; the rest is the
recipe."""


def arena(train: Trainer) -> tuple[str, str]:
    """Agents that die."""
    from torchrl_marl.recipes import load_config

    config = load_config(ARENA)
    frames = ARENA_FRAMES
    rows = []
    for normalize in (False, True):
        changes = {
            "total_frames": frames,
            "evaluation.every_frames": frames // ARENA_POINTS,
            "learner.normalize_observations": normalize,
        }
        runs = arena_runs(train, config, True, PLACES[0], changes)
        check_the_same(train, config, runs, changes)
        rows.append([_yes_or_no(normalize), "yes", "any of these", *arena_cells(runs, train.args)])
        for place in PLACES:
            runs = arena_runs(train, config, False, place, changes)
            rows.append([_yes_or_no(normalize), "no", place, *arena_cells(runs, train.args)])
    heading = ["observations normalized", "masked", "in the place of the dead"]
    heading += ["return", *(f"seed {seed}" for seed in train.args.seeds)]
    heading += ["sampled, whole run", "explained variance"]
    best = make_haunted_arena(config, PLACES[0], 0).optimal_return
    return (
        "Arena: who counts the dead",
        f"{report.markdown_table(heading, rows)}\n\nThe optimum is {best}; every run takes "
        f"{frames:,} frames of the recipe, whose {config.total_frames:,} are more than it needs. "
        '"return" is by the likeliest actions at the end, "sampled, whole run" the mean return of '
        "the sampled actions over all of training (higher: learned sooner), and the explained "
        "variance is the critic's in the last iteration, over all agents that its loss counts. "
        '"zeros": as SMAC and PettingZoo\'s wrappers do it; "observed as before": a simulator '
        'that goes on observing for the dead; "positions outside": 10 to 1,000 sizes of the world '
        "away, where VMAS puts what is gone. With masks all of these gave the same training to the "
        f"bit (seed {train.args.seeds[0]}); without, `NaN` stops it in its first iteration.",
    )


def _yes_or_no(flag: bool) -> str:
    return "yes" if flag else "no"


def check_the_same(train: Trainer, config: Any, runs: Any, changes: dict[str, Any]) -> None:
    """With masks, what stands in the place of the dead changes nothing, to the bit."""
    seeds, train.args.seeds = train.args.seeds, train.args.seeds[:1]
    for place in PLACES[1:]:
        others = arena_runs(train, config, True, place, changes)
        if others is None or curve(others[0]) != curve(runs[0]):
            raise SystemExit(f"masked, but {place} changed what was learned.")
    train.args.seeds = seeds


def arena_runs(
    train: Trainer, config: Any, masked: bool, place: str, changes: dict[str, Any]
) -> list[Any] | None:
    """The runs, or None where training stops at what is not finite."""
    from torchrl.envs import ExcludeTransform, TransformedEnv

    from torchrl_marl.errors import NonFiniteError

    def make_env(seed: int) -> EnvBase:
        env = make_haunted_arena(config, place, seed)
        return env if masked else TransformedEnv(env, ExcludeTransform(("agents", "mask")))

    title = f"{'masked' if masked else 'unmasked'}, {place}"
    try:
        return train(ARENA, title, changes, make_env)
    except NonFiniteError:
        return None


def make_haunted_arena(config: Any, place: str, seed: int) -> Any:
    """The recipe's arena, with something else than zeros in the place of the dead."""
    import torch
    from torch.nn.functional import one_hot

    from torchrl_marl.envs.toy import Arena

    class HauntedArena(Arena):
        def _observe(self, **leaves: Any) -> dict[str, Any]:
            out = super()._observe(**leaves)
            observation = out["agents"]["observation"]
            if place == PLACES[1]:
                remaining = [self.lives / self.lives_at_start, self.years / self.spans]
                cue = one_hot(self.cue, self.n_actions).float()
                fill = torch.cat([cue, torch.stack(remaining, -1)], -1)
            elif place == PLACES[2]:
                generator = torch.Generator().manual_seed(0)
                fill = -torch.empty_like(observation).uniform_(10, 1000, generator=generator)
            else:
                fill = torch.full_like(observation, torch.nan)
            out["agents"]["observation"] = torch.where(self.alive.unsqueeze(-1), observation, fill)
            return out

    arena_class = Arena if place == PLACES[0] else HauntedArena
    return arena_class(
        config.env.num_envs,
        max_steps=config.env.max_steps,
        seed=seed,
        check=False,
        **config.env.kwargs,
    )


def arena_cells(runs: list[Any] | None, args: argparse.Namespace) -> list[str]:
    """Of one row."""
    if runs is None:
        return ["stops", *["-" for _ in args.seeds], "-", "-"]
    after = [run.summary["return_after"] for run in runs]
    means, variances = [], []
    for run in runs:
        rows = curve(run)
        means.append(statistics.mean(float(row["agents/episode_reward"]) for row in rows))
        variances.append(float(rows[-1]["agents/explained_variance"]))
    cells = [statistics.mean(after), *after, statistics.mean(means), statistics.mean(variances)]
    return [f"{value:.2f}" for value in cells]


def curve(run: Any) -> list[dict[str, str]]:
    """``metrics.csv`` without its times."""
    with (run.folder / "metrics.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [{key: value for key, value in row.items() if "second" not in key} for row in rows]
