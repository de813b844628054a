"""mpe2's simple_speaker_listener_v4: our recipes against AgileRL 2.58's algorithms.

    python benchmarks/speaker_listener.py --write
    python benchmarks/speaker_listener.py --algorithms maddpg matd3 --agilerl maddpg matd3 \
        --frames 102400 --evaluate-every 20480 --seeds 0 --write

All train with continuous actions for the same number of frames, seeds 0, 1 and 2 in turn. They are
evaluated every 51,200 frames on the same 200 episodes of mpe2's own environment. AgileRL runs by
``agilerl_speaker_listener.py`` in a virtual environment created for it. ``--results FOLDER`` keeps
the results of each seed, and reuses those of an earlier run.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import curves
import foreign
import report
from curves import Result
from mpe2_episodes import Arrays, Episodes, random_actions, scripted

OURS = {
    algorithm: f"pettingzoo_simple_speaker_listener_{algorithm}"
    for algorithm in ("mappo", "ippo", "maddpg", "matd3")
}
THEIRS = {x: f"AgileRL {x.upper()}" for x in ("ippo", "maddpg", "matd3")}
SCRIPT = Path(__file__).parent / "agilerl_speaker_listener.py"
EVALUATION_SEED = 10_000
COLORS = ("#2a6fbb", "#6fae5c", "#d1662a", "#8a5fbf")


def results(
    name: str, train: Callable[[int, Path], None], folder: Path, args: argparse.Namespace
) -> list[Result]:
    """A result for each seed, from an earlier run or from one now.

    Args:
        name (str): of the files.
        train (callable): trains a seed and writes its result to a file.

    Raises:
        SystemExit: an earlier result is of another evaluation.
    """
    frames = args.agilerl_frames if name.startswith("agilerl") else args.frames
    expected = [frames, args.episodes, args.evaluate_every, EVALUATION_SEED]
    found = []
    for seed in args.seeds:
        path = (folder / f"{name}_seed{seed}.json").resolve()
        if not path.is_file():
            print(f"{name}, seed {seed} ...", file=sys.stderr)
            train(seed, path)
        found.append(json.loads(path.read_text(encoding="utf-8")))
        if found[-1]["evaluation"] != expected:
            raise SystemExit(
                f"{path} is of another run: frames, episodes, frames between evaluations and seed "
                f"of the evaluation are {found[-1]['evaluation']}, expected {expected}."
            )
    return found


def train_agilerl(
    seed: int, path: Path, algorithm: str, python: Path, args: argparse.Namespace
) -> None:
    """Trains one seed in a process of its own."""
    options = {
        "--algorithm": algorithm,
        "--seed": seed,
        "--frames": args.agilerl_frames,
        "--episodes": args.episodes,
        "--evaluate-every": args.evaluate_every,
        "--evaluation-seed": EVALUATION_SEED,
        "--out": path,
    }
    option_args = [str(word) for option in options.items() for word in option]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment["OMP_NUM_THREADS"] = "1"
    subprocess.run([python, str(SCRIPT), *option_args], check=True, env=environment)


def train_ours(seed: int, path: Path, recipe: str, args: argparse.Namespace) -> None:
    """Trains one seed of a recipe, evaluated as AgileRL's script does it."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = {"seed": seed, "total_frames": args.frames, "folder": f"{folder}/run"}
        episodes = Episodes(args.episodes, EVALUATION_SEED)
        evaluation = functools.partial(make_evaluation, episodes=episodes)
        result = curves.train_with_curve(recipe, overrides, args.evaluate_every, evaluation)
    result = {
        "seed": seed,
        "evaluation": [args.frames, args.episodes, args.evaluate_every, EVALUATION_SEED],
        "curve": result["curve"],
        "seconds": round(result["seconds_training"], 1),
    }
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def make_evaluation(training: Any, episodes: Episodes) -> Callable[[], dict[str, float]]:
    """What measures the policy of a training, by the likeliest and by drawn actions."""
    from torchrl.envs.utils import ExplorationType

    from torchrl_marl.runtime.random_state import RandomState

    def measure() -> dict[str, float]:
        with RandomState(EVALUATION_SEED).active():
            return {
                "return": episodes.play(acting(training, ExplorationType.DETERMINISTIC)),
                "sampled": episodes.play(acting(training, ExplorationType.RANDOM)),
            }

    return measure


def acting(training: Any, mode: Any) -> Callable[[Arrays], Arrays]:
    """The trained policy, from arrays to arrays."""
    import torch
    from tensordict import TensorDict
    from torchrl.envs.utils import set_exploration_type

    def act(observations: Arrays) -> Arrays:
        count = len(next(iter(observations.values())))
        groups = {name: name.partition("_")[0] for name in observations}
        data = TensorDict(
            {
                group: {
                    "observation": torch.from_numpy(observations[name]).unsqueeze(1),
                    "mask": torch.ones(count, 1, dtype=torch.bool),
                }
                for name, group in groups.items()
            },
            batch_size=[count],
        )
        with torch.no_grad(), set_exploration_type(mode):
            done = training.policy(data)
        return {name: done[group, "action"].squeeze(1).numpy() for name, group in groups.items()}

    return act


# ---------------------------------------------------------------------------------------- report


def final_rows(sides: dict[str, list[Result]], args: argparse.Namespace) -> list[list[str]]:
    """Everything about the last evaluation, and what it is to be compared with."""
    rows = []
    for name, results in sides.items():
        rows.append(
            [
                name,
                curves.mean_and_range(curves.column(results, -1, "return")),
                curves.mean_and_range(curves.column(results, -1, "sampled")),
                f"{results[0]['curve'][-1]['frames']:,}",
                curves.mean_and_range([result["seconds"] for result in results], ".0f"),
            ]
        )
    episodes = Episodes(args.episodes, EVALUATION_SEED)
    rows.append(["scripted", f"{episodes.play(scripted):.2f}", "", "", ""])
    rows.append(["random", f"{episodes.play(random_actions(0)):.2f}", "", "", ""])
    return rows


def draw(sides: dict[str, list[Result]], path: Path) -> None:
    """Draws all curves in one picture."""
    labels = {
        "title": "mpe2 simple_speaker_listener",
        "ylabel": "episode return of an agent, likeliest actions",
    }
    curves.draw(sides, "return", path, COLORS, ylim=(-45, 0), **labels)


def publish(sides: dict[str, list[Result]], picture: Path, args: argparse.Namespace) -> None:
    """Prints and writes."""
    rows = curves.curve_rows(sides, "return")
    header = ["", "return", "of drawn actions", "frames", "seconds of training"]
    final = report.markdown_table(header, final_rows(sides, args))
    sections = [("Return", report.markdown_table(["frames", *sides], rows)), ("At the end", final)]
    if args.write:
        sections.insert(1, ("Learning curves", f"![learning curves]({picture.name})"))
    agilerl_results = {name: sides[name][0] for name in map(THEIRS.get, args.agilerl)}
    first = next(iter(agilerl_results.values()))
    report.publish(
        args.file,
        "mpe2's simple_speaker_listener: our recipes and AgileRL's",
        sections,
        {
            "seeds": ", ".join(str(seed) for seed in args.seeds),
            "threads of torch": 1,
            "environment": f"mpe2 {version('mpe2')}, pettingzoo {version('pettingzoo')}",
            "AgileRL's versions": ", ".join(f"{k} {v}" for k, v in first["versions"].items()),
            **{
                f"settings of {name}": json.dumps(x["settings"])
                for name, x in agilerl_results.items()
            },
        },
        f"""Mean (least to most) over the seeds. A return is what one agent earns in an episode of
        25 steps, mean over {args.episodes} episodes and both agents, who earn the same; AgileRL's
        own score is the sum of the two, so its documented target of -30 is -15 here. All play the
        same episodes of mpe2's own environment, without an adapter (`mpe2_episodes.py`), by the
        likeliest actions and by drawn ones, which is how AgileRL tests. "scripted": the speaker
        names the goal, the listener waits for it and goes there. AgileRL runs in an environment of
        its own, by its own training function, with the settings that its repository has for
        this environment, one agent and no evolution; ours are the recipes. They were trained in
        turn, so the seconds, without evaluations, are a rough comparison. The two differ in
        more than the library: networks, learning rate, number of envs and epochs are each side's
        own.""",
        write=args.write,
    )


def parse_args() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--frames", type=int, default=614_400)
    parser.add_argument("--algorithms", nargs="+", choices=list(OURS), default=["mappo", "ippo"])
    parser.add_argument("--agilerl", nargs="+", choices=list(THEIRS), default=["ippo"])
    parser.add_argument("--agilerl-frames", type=int, help="AgileRL's frames; default: ours")
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument(
        "--evaluate-every", type=int, default=51_200, help="frames between evaluations"
    )
    parser.add_argument("--agilerl-python", type=Path, help="Python of an environment with AgileRL")
    parser.add_argument("--results", type=Path, help="folder to keep and reuse results in")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, as a smoke test")
    parser.add_argument("--write", action="store_true", help="write table and picture to results")
    args = parser.parse_args()
    args.agilerl_frames = args.agilerl_frames or args.frames
    args.file = "speaker_listener" + ("" if args.agilerl == ["ippo"] else "_off_policy")
    if args.quick:
        args.agilerl_frames = 20_480
        args.seeds, args.frames, args.evaluate_every = args.seeds[:1], 20_480, 10_240
        args.episodes, args.write = 10, False
    return args


def main() -> None:
    """Trains all and reports."""
    args = parse_args()
    python = args.agilerl_python or foreign.make_environment(
        foreign.environments() / "agilerl", foreign.AGILERL
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if args.results is None else args.results
        folder.mkdir(parents=True, exist_ok=True)
        report.be_quiet()
        recipes = [OURS[algorithm] for algorithm in args.algorithms]
        trains = {recipe: functools.partial(train_ours, recipe=recipe) for recipe in recipes}
        for algorithm in args.agilerl:
            name = "agilerl" if algorithm == "ippo" else f"agilerl_{algorithm}"
            trains[name] = functools.partial(train_agilerl, algorithm=algorithm, python=python)
        names = [f"torchrl_marl {algorithm.upper()}" for algorithm in args.algorithms]
        names += [THEIRS[algorithm] for algorithm in args.agilerl]
        sides = {
            name: results(file, functools.partial(train, args=args), folder, args)
            for name, (file, train) in zip(names, trains.items())
        }
        picture = report.file_name(args.file, "png")
        draw(sides, picture if args.write else folder / picture.name)
    publish(sides, picture, args)


if __name__ == "__main__":
    main()
