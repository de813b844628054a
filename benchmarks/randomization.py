"""Domain randomization: policies trained with and without it, played with other masses and delays.

Run: python benchmarks/randomization.py [--recipes mujoco_ant_mappo] [--seeds 0 1 2]
     [--rows rows.jsonl] [--write]

Recipes are trained with and without random values, for the same number of frames:
`vmas_balance_mappo` and `mujoco_ant_mappo` with random masses, `vmas_navigation_mappo` with random
delays of observations. Each policy is then played with fixed values, which are the same for all
entities and agents. Returns are means over 200 episodes (Ant: 64) by the likeliest actions; the
tables show the mean (smallest to largest) over the seeds. One thread; steps run eagerly, those of
Ant compiled. `--rows` keeps finished runs in a file, so that the benchmark can be continued.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import report

import torchrl_marl


def masses(factor: Any) -> dict[str, Any]:
    """Returns the ranges of all masses of `balance`."""
    return {"agent_mass": factor, "landmark_mass": factor}


RANDOM, LATE = [0.7, 1.3], [0, 4]
TASKS = {
    "vmas_balance_mappo": (
        {"nominal": {}, "masses 0.7 to 1.3": masses(RANDOM)},
        {
            "nominal": {},
            **{f"masses x {factor}": masses(factor) for factor in (0.5, 0.7, 1.3, 1.6)},
            "masses 0.7 to 1.3": masses(RANDOM),
        },
    ),
    "vmas_navigation_mappo": (
        {"nominal": {}, "delays 0 to 4": {"observation_delay": LATE}},
        {
            "nominal": {},
            **{f"delay of {n}": {"observation_delay": n} for n in (2, 4, 6)},
            "delays 0 to 4": {"observation_delay": LATE},
        },
    ),
    "mujoco_ant_mappo": (
        {"nominal": {}, "masses 0.7 to 1.3": {"mass": RANDOM}},
        {
            "nominal": {},
            **{f"masses x {factor}": {"mass": factor} for factor in (0.5, 0.7, 1.3, 1.6)},
            "masses 0.7 to 1.3": {"mass": RANDOM},
        },
    ),
}
EPISODES = {"mujoco_ant_mappo": 64}  # of 1,000 steps
EXECUTIONS = {"mujoco_ant_mappo": "compile"}


def evaluate_ranges(recipe: str, trained: str, seed: int, frames: int | None, folder: Path) -> dict:
    """Trains a policy, and returns its return with each of the task's values."""
    ranges, values = TASKS[recipe]
    run = torchrl_marl.train(
        recipe,
        seed=seed,
        threads=1,
        execution="eager" if frames else EXECUTIONS.get(recipe, "eager"),
        env={"randomize": ranges[trained]},
        evaluation={"both": False, "every_frames": None},
        logging={"progress": False},
        folder=str(folder / f"{recipe}_{trained}_{seed}".replace(" ", "_")),
        **({} if frames is None else {"total_frames": frames}),
    )
    n = EPISODES.get(recipe, 200) if frames is None else 4
    found = {x: run.evaluate(n, True, randomize=evaluation) for x, evaluation in values.items()}
    returns = {x: evaluation["return_mean"] for x, evaluation in found.items()}
    return {"recipe": recipe, "trained": trained, "seed": seed, "frames": run.frames, **returns}


def format_return(x: float) -> str:
    """Returns a return with at least three digits."""
    return f"{x:.3g}" if abs(x) < 1000 else f"{x:,.0f}"


def table(recipe: str, rows: list[dict]) -> str:
    """Returns the table of a task: a line for each value played, a column for each training."""
    ranges, values = TASKS[recipe]
    lines = []
    for name in values:
        cells = []
        for trained in ranges:
            returns = [row[name] for row in rows if row["trained"] == trained]
            spread = (
                f" ({format_return(min(returns))} to {format_return(max(returns))})"
                if len(returns) > 1
                else ""
            )
            cells.append(format_return(sum(returns) / len(returns)) + spread)
        lines.append([name, *cells])
    return report.markdown_table(["played with", *(f"trained: {x}" for x in ranges)], lines)


def main() -> None:
    """Trains, plays and reports."""
    warnings.simplefilter("ignore")
    parser = report.parser(__doc__, threads=(1,))
    parser.add_argument("--recipes", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", type=Path, help="file of finished runs")
    args = parser.parse_args()
    frames = None
    if args.quick:
        args.write, args.seeds, args.rows, frames = False, [0], None, 12_000
    rows = []
    if args.rows is not None and args.rows.exists():
        rows = [json.loads(line) for line in args.rows.read_text().splitlines()]
    finished = {(row["recipe"], row["trained"], row["seed"]) for row in rows}
    with tempfile.TemporaryDirectory() as folder:
        for seed in args.seeds:
            for recipe in args.recipes:
                for trained in TASKS[recipe][0]:
                    if (recipe, trained, seed) in finished:
                        continue
                    rows.append(evaluate_ranges(recipe, trained, seed, frames, Path(folder)))
                    print(json.dumps(rows[-1]), flush=True)
                    if args.rows is not None:
                        with args.rows.open("a") as file:
                            file.write(json.dumps(rows[-1]) + "\n")
    sections = []
    for recipe in args.recipes:
        recipe_rows = [row for row in rows if row["recipe"] == recipe]
        seeds = sorted({row["seed"] for row in recipe_rows})
        named = f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
        title = f"`{recipe}`, {recipe_rows[0]['frames']:,} frames, {named}"
        sections.append((title, table(recipe, recipe_rows)))
    report.publish(
        "randomization",
        "Domain randomization",
        sections,
        {},
        __doc__.split("\n\n", 2)[2],
        write=args.write,
    )


if __name__ == "__main__":
    main()
