"""Population-based training against as many runs without selection.

    python benchmarks/evolution.py --write

Eight members learn ``toy/speaker_listener`` for the same number of frames, three times each: with
``evolution.method=pbt`` as in the recipe, without selection, and with random settings (random
search). The best member by the run's own evaluation is then measured on other episodes than those
that selected it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import report

RECIPE = "toy_speaker_listener_mappo_pbt"
ARMS = {
    "pbt": "population-based training",
    "spread": "the same members, without selection",
    "random": "random search",
}
APART = 100  # between the first seeds of two populations, so that no member is in both
Result = dict[str, Any]


def settings_of(arm: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """What differs from the recipe."""
    from torchrl_marl.recipes import load_config

    overrides: dict[str, Any] = {"seed": APART * seed, "total_frames": args.frames}
    overrides |= {"logging.progress": False, "checkpoint.every_iterations": 0}
    if arm == "pbt":
        return overrides
    overrides["evolution.method"] = "none"
    if arm == "random":
        population = load_config(RECIPE).population
        overrides["population.vary"] = draw_settings(population.bounds(), population.size, seed)
    return overrides


def draw_settings(bounds: Mapping[str, Any], size: int, seed: int) -> dict[str, list[float]]:
    """Settings of each member, drawn from their ranges."""
    generator = random.Random(seed)
    found = {}
    for name, (low, high, log) in bounds.items():
        shares = [generator.random() for _ in range(size)]
        found[f"learner.{name}"] = [
            low * (high / low) ** x if log else low + x * (high - low) for x in shares
        ]
    return found


def train(arm: str, seed: int, args: argparse.Namespace) -> Result:
    """Trains a population, and measures all its members."""
    import torchrl_marl

    with tempfile.TemporaryDirectory() as folder:
        where = str(Path(folder) / "run")
        run = torchrl_marl.train(RECIPE, **settings_of(arm, seed, args), folder=where)
        members = run.members
        chosen = max(range(len(members)), key=lambda i: members[i].summary["return_after"])
        measured = [
            member.evaluate(episodes=args.episodes, seed=12_345)["return_mean"]
            for member in members
        ]
        return {"frames": run.frames, "members": measured, "best": measured[chosen]}


def results(args: argparse.Namespace, folder: Path) -> dict[str, list[Result]]:
    """Of each arm and seed, from an earlier run or from one now."""
    found: dict[str, list[Result]] = {}
    for arm in args.arms:
        for seed in args.seeds:
            path = folder / f"{arm}_{args.frames}_seed{seed}.json"
            if not path.is_file():
                path.write_text(json.dumps(train(arm, seed, args)) + "\n", encoding="utf-8")
            found.setdefault(arm, []).append(json.loads(path.read_text(encoding="utf-8")))
    return found


def interquartile_mean(values: list[float]) -> float:
    """The mean of the middle half of the values, as rliable has it."""
    ordered, quarter = sorted(values), len(values) // 4
    return statistics.fmean(ordered[quarter : len(ordered) - quarter])


def row_of(name: str, found: list[Result]) -> list[str]:
    """A row of the table."""
    best = [result["best"] for result in found]
    all_members = [x for result in found for x in result["members"]]
    best_returns = ", ".join(f"{x:.3f}" for x in best)
    return [
        name,
        f"{statistics.fmean(best):.3f}",
        best_returns,
        f"{interquartile_mean(all_members):.3f}",
        f"{min(all_members):.2f}",
    ]


def main() -> None:
    """Trains, measures and reports."""
    parser = report.parser(__doc__, threads=(1,))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--frames", type=int, default=192_000, help="frames of each member")
    parser.add_argument("--episodes", type=int, default=2000)
    parser.add_argument("--results", type=Path, help="folder to keep and reuse results in")
    args = parser.parse_args()
    if args.quick:
        args.write, args.seeds, args.frames, args.episodes = False, [0], 3200, 20
    report.be_quiet()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.results or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        found = results(args, folder)
    header = ["", "best member, mean", "in each population", "IQM of all members", "worst member"]
    rows = [row_of(ARMS[arm], found[arm]) for arm in found]
    report.publish(
        "evolution",
        "Population-based training against search without it",
        [("Return on toy/speaker_listener", report.markdown_table(header, rows))],
        {
            "recipe": RECIPE,
            "populations": f"{len(args.seeds)} of each, 8 members each",
            "frames": f"{args.frames:,} of each member, {8 * args.frames:,} of a population",
        },
        f"""Learning rate, entropy bonus and discount differ by member. *The same members, without
        selection*: spread over the recipe's ranges as at the start of population-based training,
        and kept. *Random search*: each drawn from its range. The best member is the one with the
        highest return in the run's own evaluation at the end; its return here is the mean of
        {args.episodes:,} other episodes, by the likeliest actions, and so is that of all members.
        By hand {-1.04}; without a word at best -11.1; uniform random actions -30.2.""",
        write=args.write,
    )


if __name__ == "__main__":
    main()
