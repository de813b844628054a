"""Population training on mpe2's simple_speaker_listener_v4: ours against AgileRL 2.58's.

    python benchmarks/against_agilerl.py speed --write
    python benchmarks/against_agilerl.py learning --write

Both evolve eight members that learn by IPPO, each in 16 copies of mpe2's environment with
continuous actions. ``speed`` measures env steps a second over two generations of 10,000 steps of
each member, with learning and selection. ``learning`` compares the best members after equal env
steps. AgileRL runs by ``agilerl_population.py`` in a virtual environment created for it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import foreign
import report
from curves import mean_and_range
from mpe2_episodes import Episodes, random_actions, scripted
from speaker_listener import EVALUATION_SEED, acting

RECIPE = "pettingzoo_simple_speaker_listener_ippo"
SCRIPT = Path(__file__).parent / "agilerl_population.py"
MEMBERS, GENERATION = 8, 10_000
SETTINGS: dict[str, Any] = {
    "population.size": MEMBERS,
    "population.vary": {"learner.lr": {"low": 1e-3, "high": 1e-2, "log": True}},
    "evolution.method": "pbt",
    "evolution.every_frames": GENERATION,
    "env.num_envs": 16,
}
OURS, THEIRS = "torchrl_marl IPPO", "AgileRL IPPO"
Result = dict[str, Any]


def train_agilerl(seed: int, path: Path, args: argparse.Namespace) -> None:
    """A population of theirs, in a process of its own."""
    options = {
        "--members": MEMBERS,
        "--seed": seed,
        "--frames": args.frames,
        "--episodes": args.episodes,
        "--evaluation-seed": EVALUATION_SEED,
        "--out": path,
    }
    option_args = [str(word) for option in options.items() for word in option]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment["OMP_NUM_THREADS"] = "1"
    subprocess.run([args.python, str(SCRIPT), *option_args], check=True, env=environment)


def train_ours(seed: int, path: Path, args: argparse.Namespace) -> None:
    """A population of ours; measured are members as they were when the last batch was learned."""
    from torchrl_marl.recipes import load_config
    from torchrl_marl.training.trainer import start_training

    with tempfile.TemporaryDirectory() as folder:
        overrides = {"seed": 100 * seed, "total_frames": args.frames, "folder": f"{folder}/run"}
        overrides |= {"logging.progress": False, "checkpoint.every_iterations": 0}
        training = start_training(load_config(RECIPE, SETTINGS | overrides), None)
        began = time.perf_counter()
        while not training.done:
            training.step()
        seconds = time.perf_counter() - began
        training.end()
        members = [
            evaluate_member(member_run, args.episodes) for member_run in training.run.members
        ]
        training.close()
    result = {"members": members, "frames": MEMBERS * training.frames, "seconds": seconds}
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def evaluate_member(run: Any, episodes: int) -> dict[str, float]:
    """Returns a member's own evaluation, and its returns in the episodes that all members play."""
    from torchrl.envs.utils import ExplorationType

    from torchrl_marl import TeamSpec

    env = run.make_env()
    side: Any = SimpleNamespace(team=TeamSpec.from_env(env), policy=run.policy)
    env.close()
    episodes_played = Episodes(episodes, EVALUATION_SEED)
    return {
        "fitness": run.summary["return_after"],
        "return": episodes_played.play(acting(side, ExplorationType.DETERMINISTIC)),
        "sampled": episodes_played.play(acting(side, ExplorationType.RANDOM)),
    }


def results(args: argparse.Namespace, folder: Path) -> dict[str, list[Result]]:
    """Of each side and seed, in turn; from an earlier run or from one now."""
    results_of_sides: dict[str, list[Result]] = {OURS: [], THEIRS: []}
    for seed in args.seeds:
        for name, train in ((OURS, train_ours), (THEIRS, train_agilerl)):
            file = f"{'ours' if name == OURS else 'agilerl'}_{args.frames}_seed{seed}.json"
            path = (folder / file).resolve()
            if not path.is_file():
                print(f"{name}, seed {seed} ...", file=sys.stderr)
                train(seed, path, args)
            results_of_sides[name].append(json.loads(path.read_text(encoding="utf-8")))
    return results_of_sides


def speed_table(results_of_sides: dict[str, list[Result]]) -> str:
    """A row for each side."""
    rates = {
        name: [result["frames"] / result["seconds"] for result in results]
        for name, results in results_of_sides.items()
    }
    ratios = [ours / theirs for ours, theirs in zip(rates[OURS], rates[THEIRS])]
    rows = [
        [
            name,
            f"{statistics.median(own_rates):,.0f}",
            mean_and_range(ratios if name == OURS else [1.0] * len(own_rates)),
            f"{results_of_sides[name][0]['frames']:,}",
            mean_and_range([result["seconds"] for result in results_of_sides[name]], ".0f"),
        ]
        for name, own_rates in rates.items()
    ]
    header = ["", "env steps/s of all members", "times AgileRL", "env steps", "seconds"]
    return report.markdown_table(header, rows)


def learning_table(results_of_sides: dict[str, list[Result]], args: argparse.Namespace) -> str:
    """A row for each side, and for what it is to be compared with."""
    rows = []
    for name, results in results_of_sides.items():
        fittest = [
            max(result["members"], key=lambda member: member["fitness"]) for result in results
        ]
        mean_returns = [
            statistics.fmean(m["return"] for m in result["members"]) for result in results
        ]
        rows.append(
            [
                name,
                mean_and_range([member["return"] for member in fittest]),
                mean_and_range([member["sampled"] for member in fittest]),
                mean_and_range(mean_returns),
                f"{results[0]['frames']:,}",
            ]
        )
    episodes = Episodes(args.episodes, EVALUATION_SEED)
    rows.append(["scripted", f"{episodes.play(scripted):.2f}", "", "", ""])
    rows.append(["random", f"{episodes.play(random_actions(0)):.2f}", "", "", ""])
    header = ["", "best member", "of drawn actions", "mean of members", "env steps of all"]
    return report.markdown_table(header, rows)


def publish(results_of_sides: dict[str, list[Result]], args: argparse.Namespace) -> None:
    """Prints and writes."""
    theirs = results_of_sides[THEIRS][0]
    sections = [("Env steps a second", speed_table(results_of_sides))]
    if args.section == "learning":
        sections = [("Return", learning_table(results_of_sides, args))]
    report.publish(
        f"against_agilerl_{args.section}",
        "A population of eight on mpe2's simple_speaker_listener: ours and AgileRL's",
        sections,
        {
            "seeds": ", ".join(str(seed) for seed in args.seeds),
            "threads of torch": "1 on either side; environments in 2 processes, theirs 16",
            "environment": f"mpe2 {version('mpe2')}, pettingzoo {version('pettingzoo')}",
            "ours": f"recipe {RECIPE} with {json.dumps(SETTINGS)}",
            "AgileRL's versions": ", ".join(f"{k} {v}" for k, v in theirs["versions"].items()),
            "AgileRL's settings": json.dumps(theirs["settings"]),
        },
        f"""Eight members, each in 16 copies of the environment, {args.frames:,} env steps of each,
        a selection every {GENERATION:,}. AgileRL: its training function, tournament and mutations
        (architecture, parameters, learning rate, batch and length of a rollout) with the settings
        that its repository has for IPPO on this environment (configs/training/ippo.yaml; its
        population is 4 there, eight here, and torch.compile is off, since each mutated network
        would be compiled again); members learn one by one. Ours: the recipe as a population with
        population-based training of the learning rate; members learn in parallel. Seconds are
        from the first step to the last, learning, AgileRL's tests (an episode of each copy) and
        selection included; starting processes, and measuring, are not. Returns are what one agent
        earns in an episode of 25 steps, mean over {args.episodes} episodes of mpe2's own
        environment, the same for all, by the likeliest actions and by sampled ones; mean
        (least to most) over the seeds. The best member is the one with the highest
        fitness by AgileRL's last test, or by our evaluation at the end. Networks, epochs and
        minibatches are each side's own.""",
        write=args.write,
    )


def main() -> None:
    """Trains all and reports."""
    parser = report.parser(__doc__, threads=(1,))
    parser.add_argument("section", choices=["speed", "learning"])
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--frames", type=int, help="frames of each member")
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--agilerl-python", type=Path, help="Python of an environment with AgileRL")
    parser.add_argument("--results", type=Path, help="folder to keep and reuse results in")
    args = parser.parse_args()
    speed = args.section == "speed"
    args.seeds = args.seeds or ([0] if args.quick else [0, 1, 2])
    args.frames = args.frames or (1 if args.quick else 2 if speed else 5) * GENERATION
    args.write = args.write and not args.quick
    if args.quick or speed:
        args.episodes = 10
    args.python = args.agilerl_python or foreign.make_environment(
        foreign.environments() / "agilerl", foreign.AGILERL
    )
    report.be_quiet()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.results or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        results_of_sides = results(args, folder)
    publish(results_of_sides, args)


if __name__ == "__main__":
    main()
