"""Agents with communication and memory, against the same agents without.

    python benchmarks/talk_and_remember.py --write
    python benchmarks/talk_and_remember.py --worlds levers --seeds 0 --write

Each recipe is trained as it is, and with the same settings but without communication or without
memory. The environments have known optima, and each gets a table.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import report

SILENT = {"learner": {"actor": {"communication": {"kind": "none"}}}}


class Row(NamedTuple):
    """A row of a table: a recipe, and what differs from it."""

    name: str
    recipe: str
    differs: dict[str, Any] = {}
    most_seeds: int = 100


class TableSpec(NamedTuple):
    """A table: what is measured after training, and by whom."""

    title: str
    measure: Callable[[Any, int], float]
    """``measure(run, episodes)``, of the likeliest actions."""
    unit: str
    known: str
    rows: list[Row]
    aim: float | None = None
    """Mean return, by the best of echo, from which it counts as learned."""


def memory(kind: str) -> dict[str, Any]:
    """Settings of an actor's memory."""
    return {"learner": {"actor": {"memory": {"kind": kind}}}}


def mean_return(run: Any, episodes: int) -> float:
    """The mean return."""
    return run.evaluate(episodes=episodes, deterministic=True)["return_mean"]


def share_of_best(run: Any, episodes: int) -> float:
    """Returns the mean return as a share of the optimum."""
    return mean_return(run, episodes) / best_of(run)


def best_of(run: Any) -> float:
    """The best mean return of echo, where a step counts the mean of those who live then."""
    from torchrl_marl.envs import make_env

    env = make_env(run.config.env)
    return env.max_steps - env.lag


def mean_length(run: Any, episodes: int) -> float:
    """The mean number of steps."""
    return run.evaluate(episodes=episodes, deterministic=True)["length_mean"]


def share_without_collision(run: Any, episodes: int) -> float:
    """The share of the episodes in which no car earns -10 or less in a step."""
    import dataclasses

    import torch
    from torchrl.envs.utils import ExplorationType, set_exploration_type

    from torchrl_marl.envs import make_env, with_memory

    config = dataclasses.replace(run.config.env, num_envs=episodes)
    env = with_memory(make_env(config, seed=10_000 + run.config.seed), run.policy)
    with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
        steps = env.rollout(config.max_steps, run.policy, break_when_any_done=False)
    collided = (steps["next", "agents", "reward"] <= -10).flatten(1).any(1)
    return 1 - collided.float().mean().item()


def table_specs() -> dict[str, TableSpec]:
    """The tables by name."""
    born = {"env": {"kwargs": {"late_spawn": 1, "years": 4}}}
    memories = [Row(kind, "toy_echo_rmappo", memory(kind)) for kind in ("gru", "lru")]
    return {
        "echo": TableSpec(
            "Echo: the own symbol of three steps ago",
            share_of_best,
            "share of the best return",
            "without memory 0.25",
            [*memories, Row("no memory", "toy_echo_rmappo", memory("none"), 1)],
            aim=0.99,
        ),
        "echo_talk": TableSpec(
            "Echo: the next agent's symbol of three steps ago",
            share_of_best,
            "share of the best return",
            "without memory or words 0.25",
            [
                Row("words and memory", "toy_echo_rmappo_talk"),
                Row("the same, lru", "toy_echo_rmappo_talk", memory("lru")),
                Row("no memory", "toy_echo_rmappo_talk", memory("none"), 1),
                Row("no words", "toy_echo_rmappo_talk", SILENT, 1),
                Row("late births and deaths", "toy_echo_rmappo_talk", born),
            ],
            aim=0.99,
        ),
        "levers": TableSpec(
            "Levers",
            mean_return,
            "share of the levers",
            "best 1, without a word 0.6740, random 0.6723",
            [
                Row("CommNet", "toy_levers_mappo"),
                Row("BicNet", "toy_levers_mappo_bicnet"),
                Row("no words", "toy_levers_mappo", SILENT, 1),
            ],
            aim=0.94,
        ),
        "predator_prey": TableSpec(
            "Predators and prey",
            mean_length,
            "steps of an episode",
            "by hand 8.9, if all knew where the prey is 4.7, at most 20",
            [
                Row("words and memory", "toy_predator_prey_rmappo"),
                Row("no words", "toy_predator_prey_rmappo", SILENT, 1),
            ],
        ),
        "traffic_junction": TableSpec(
            "Traffic junction",
            share_without_collision,
            "episodes without a collision",
            "by hand 0.96, by gas alone 0.29",
            [
                Row("words", "toy_traffic_junction_mappo"),
                Row("no words", "toy_traffic_junction_mappo", SILENT, 1),
            ],
        ),
        "switch_riddle": TableSpec(
            "The switch riddle",
            mean_return,
            "return",
            "best 0.7407, by counting days and own visits 0.535, without memory 0",
            [
                Row("memory", "jaxmarl_switch_riddle_rpqn"),
                Row("no memory", "jaxmarl_switch_riddle_rpqn", memory("none"), 1),
            ],
            aim=0.70,
        ),
        "simple_reference": TableSpec(
            "mpe2's simple_reference",
            mean_return,
            "return",
            "both see the other's goal, and speak by their actions",
            [Row("as it is", "pettingzoo_simple_reference_mappo")],
        ),
    }


def train(row: Row, seed: int, evaluations: int, quick: bool) -> tuple[Any, float, list[Any]]:
    """A run, its seconds, and its evaluations on the way: frames and mean return."""
    import torchrl_marl
    from torchrl_marl.recipes import load_config

    total = load_config(row.recipe).total_frames
    settings: dict[str, Any] = {"seed": seed, "logging": {"progress": False}, **row.differs}
    settings["evaluation"] = {"every_frames": max(1, total // evaluations)}
    if quick:
        settings |= {"total_frames": load_config(row.recipe).frames_per_batch}
    folder = Path(tempfile.mkdtemp()) / "run"
    began = time.perf_counter()
    run = torchrl_marl.train(row.recipe, folder=str(folder), **settings)
    seconds = time.perf_counter() - began
    with (folder / "evaluation.csv").open() as file:
        found = [(int(x["frames"]), float(x["return_mean"])) for x in csv.DictReader(file)]
    return run, seconds, found


def table(spec: TableSpec, seeds: list[int], args: argparse.Namespace) -> str:
    """What each row reaches, with every seed."""
    rows = []
    for row in spec.rows:
        reached, until, spent, frames = [], [], [], 0
        for seed in seeds[: row.most_seeds]:
            run, seconds, curve = train(row, seed, args.evaluations, args.quick)
            reached.append(spec.measure(run, args.episodes))
            spent.append(seconds)
            frames = run.frames
            best = best_of(run) if spec.measure is share_of_best else 1.0
            enough = [x for x, value in curve if spec.aim and value / best >= spec.aim]
            until.append(f"{enough[0]:,}" if enough else "-")
            print(row.name, seed, reached[-1], until[-1], f"{seconds:.0f} s", flush=True)
        each = ", ".join(f"{x:.3f}" for x in reached)
        line = [row.name, f"`{row.recipe}`", f"{statistics.mean(reached):.3f}", each]
        line += [f"{frames:,}", f"{statistics.mean(spent):.0f}"]
        rows.append(line + ([", ".join(until)] if spec.aim is not None else []))
    header = ["", "recipe", spec.unit, "each seed", "frames", "seconds a seed"]
    header += [f"frames until {spec.aim:g}"] if spec.aim is not None else []
    return report.markdown_table(header, rows)


def main() -> None:
    """Trains and reports, a file for each environment."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worlds", nargs="+", choices=table_specs(), default=list(table_specs()))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--episodes", type=int, default=2000, help="episodes after training")
    parser.add_argument("--evaluations", type=int, default=25, help="evaluations during training")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, as a smoke test")
    parser.add_argument("--write", action="store_true", help="write the tables to results")
    args = parser.parse_args()
    report.be_quiet()
    seeds = args.seeds[:1] if args.quick else args.seeds
    for name in args.worlds:
        spec = table_specs()[name]
        report.publish(
            f"talk_and_remember_{name}",
            f"What talking and remembering is worth: {name.replace('_', ' ')}",
            [(spec.title, f"{table(spec, seeds, args)}\n\nKnown: {spec.known}.")],
            {"seeds": ", ".join(map(str, seeds)), "threads of torch": 1},
            f"""Each recipe as it is, and without words or memory by the same settings, with the
            first seed. The figure is that of the likeliest actions in {args.episodes:,} episodes
            after training; the frames are those of the first of {args.evaluations} evaluations on
            the way, of the recipe's own number of episodes, that is good enough. Seconds are of
            the whole run, with compiling and evaluations, on one core.""",
            write=args.write and not args.quick,
        )


if __name__ == "__main__":
    main()
