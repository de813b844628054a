"""VMAS navigation: the recipe vmas_navigation_mappo against BenchMARL 1.5.2's MAPPO.

    python benchmarks/navigation.py --write
    python benchmarks/navigation.py --algorithm masac --frames 300000 --evaluate-every 30000 \
        --seeds 0 --write

Both train the same task (3 agents, BenchMARL's task settings) for 600,000 frames with seeds 0, 1
and 2, and are evaluated every 60,000 frames on the same 200 episodes with the likeliest actions.
BenchMARL runs with its defaults by ``benchmarl_vmas.py`` in a virtual environment, since it needs
torchrl < 0.12. That takes about 20 minutes a seed; ``--reuse FOLDER`` takes ``seed0.json``,
``seed1.json`` and ``seed2.json`` of an earlier run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import curves
import foreign
import report

if TYPE_CHECKING:
    from torchrl.envs import EnvBase

BENCHMARL = Path(__file__).parent / "benchmarl_vmas.py"
EVALUATION_SEED = 10_000
COLORS = ("#2a6fbb", "#d1662a")
LABELS = {
    "episode_reward": "over 100 steps",
    "episode_reward_to_done": "to the episode's end",
    "episode_length": "length",
}


# ------------------------------------------------------------------------------------- BenchMARL


def run_benchmarl(python: Path, seed: int, path: Path, args: argparse.Namespace) -> None:
    """Trains one seed in a process of its own."""
    print(f"BenchMARL, seed {seed} ...", file=sys.stderr)
    options = {
        "--algorithm": args.algorithm,
        "--seed": seed,
        "--frames": args.frames,
        "--episodes": args.episodes,
        "--evaluate-every": args.evaluate_every,
        "--evaluation-seed": EVALUATION_SEED,
        "--threads": args.threads,
        "--out": path,
    }
    option_args = [str(word) for option in options.items() for word in option]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment["OMP_NUM_THREADS"] = str(args.threads)
    subprocess.run([python, str(BENCHMARL), *option_args], check=True, env=environment)


def benchmarl_results(folder: Path, args: argparse.Namespace) -> list[curves.Result]:
    """The results of all seeds, from an earlier run or from one now."""
    if args.reuse is not None:
        return [read(args.reuse / f"seed{seed}.json", args) for seed in args.seeds]
    python = foreign.make_environment(args.environment, foreign.BENCHMARL)
    results = []
    for seed in args.seeds:
        path = (folder / f"seed{seed}.json").resolve()
        run_benchmarl(python, seed, path, args)
        results.append(read(path, args))
    return results


def read(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """A result, which must be of the same evaluation as ours.

    Raises:
        SystemExit: there is none, or it is of another evaluation.
    """
    if not path.is_file():
        raise SystemExit(f"{path} is not there; leave out --reuse, or name fewer --seeds.")
    result = json.loads(path.read_text(encoding="utf-8"))
    found = result["settings"]["evaluation"]
    found = (result["curve"][-1]["frames"], found["episodes"], found["every_frames"], found["seed"])
    expected = (args.frames, args.episodes, args.evaluate_every, EVALUATION_SEED)
    if found != expected:
        raise SystemExit(
            f"{path} is of another run: frames, episodes, frames between evaluations and seed of "
            f"the evaluation are {found}, expected {expected}."
        )
    return result


# ------------------------------------------------------------------------------------------ ours


def run_ours(seed: int, folder: Path, args: argparse.Namespace) -> curves.Result:
    """Trains one seed of the recipe, evaluated as BenchMARL's script does it."""
    print(f"torchrl_marl, seed {seed} ...", file=sys.stderr)
    overrides = {
        "seed": seed,
        "total_frames": args.frames,
        "threads": args.threads,
        "folder": str(folder),
    }

    def evaluation(training: Any) -> Callable[[], dict[str, float]]:
        measure = make_evaluation(training.config.env, args.episodes)
        return lambda: measure(training.policy)

    result = curves.train_with_curve(args.recipe, overrides, args.evaluate_every, evaluation)
    return {"seed": seed, **result}


def make_evaluation(config: Any, episodes: int) -> Callable[[Any], dict[str, float]]:
    """What plays the same episodes as BenchMARL's side: TorchRL's own env with its seed."""
    import torchrl.envs

    from torchrl_marl.runtime.random_state import RandomState

    with RandomState(EVALUATION_SEED).active():
        env = torchrl.envs.VmasEnv(
            config.name,
            num_envs=episodes,
            max_steps=config.max_steps,
            seed=EVALUATION_SEED,
            clamp_actions=True,
            **config.kwargs,
        )

    def measure(policy: Any) -> dict[str, float]:
        with RandomState(EVALUATION_SEED).active():
            return play(env, policy, config.max_steps)

    return measure


def play(env: EnvBase, policy: Any, steps: int) -> dict[str, float]:
    """One episode in every env by the likeliest actions.

    ``episode_reward`` sums the rewards of all steps and averages over episodes and agents; an
    episode that the task ends early is stepped on. ``episode_reward_to_done`` stops there.
    """
    import torch
    from torchrl.envs.utils import ExplorationType, set_exploration_type, step_mdp

    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        env.set_seed(EVALUATION_SEED)
        state = env.reset()
        running = torch.ones(env.batch_size, dtype=torch.bool)
        total, to_done, length = 0.0, 0.0, 0.0
        for _ in range(steps):
            state = env.step(policy(state))
            reward = state["next", "agents", "reward"].squeeze(-1).mean(-1)
            total += reward.mean().item()
            to_done += torch.where(running, reward, 0.0).mean().item()
            length += running.float().mean().item()
            running = running & ~state["next", "done"].squeeze(-1)
            state = step_mdp(state)
    return {"episode_reward": total, "episode_reward_to_done": to_done, "episode_length": length}


# ---------------------------------------------------------------------------------------- report


def final_rows(sides: dict[str, list[curves.Result]]) -> list[list[str]]:
    """Everything about the last evaluation."""
    rows = [
        [label, *(curves.mean_and_range(curves.column(x, -1, key), ".3f") for x in sides.values())]
        for key, label in LABELS.items()
    ]
    seconds = [[result["seconds_training"] for result in x] for x in sides.values()]
    rows.append(["seconds of training", *(curves.mean_and_range(x, ".0f") for x in seconds)])
    return rows


def parse_args() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--algorithm", default="mappo", help="BenchMARL's algorithm, such as masac")
    parser.add_argument("--recipe", help="our recipe; default: vmas_navigation_ALGORITHM")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--frames", type=int, default=600_000)
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument(
        "--evaluate-every", type=int, default=60_000, help="frames between evaluations"
    )
    parser.add_argument("--threads", type=int, default=1, help="torch's threads, for both sides")
    parser.add_argument("--reuse", type=Path, help="folder with BenchMARL's seed0.json ...")
    parser.add_argument(
        "--environment",
        type=Path,
        default=foreign.environments() / "benchmarl",
        help="folder of BenchMARL's virtual environment; created if missing",
    )
    parser.add_argument("--results", type=Path, help="folder for the results of both sides")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, as a smoke test")
    parser.add_argument("--write", action="store_true", help="write table and picture to results")
    args = parser.parse_args()
    args.recipe = args.recipe or f"vmas_navigation_{args.algorithm}"
    args.title = f"VMAS navigation, {args.recipe.rpartition('_')[2].upper()}"
    args.name = "navigation" if args.algorithm == "mappo" else f"navigation_{args.algorithm}"
    if args.quick:
        args.seeds, args.frames, args.evaluate_every = args.seeds[:1], 12_000, 6_000
        args.episodes, args.write = 20, False
    return args


def main() -> None:
    """Trains both and reports."""
    args = parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if args.results is None else args.results
        folder.mkdir(parents=True, exist_ok=True)
        their_results = benchmarl_results(folder, args)
        report.be_quiet()
        our_results = []
        for seed in args.seeds:
            our_results.append(run_ours(seed, Path(temporary) / f"run{seed}", args))
            path = folder / f"ours_seed{seed}.json"
            path.write_text(json.dumps(our_results[-1], indent=2) + "\n", encoding="utf-8")
        sides = {"torchrl_marl": our_results, "BenchMARL": their_results}
        picture = report.file_name(args.name, "png")
        path = picture if args.write else folder / picture.name
        label = "episode return, likeliest actions"
        curves.draw(sides, "episode_reward", path, COLORS, title=args.title, ylabel=label)
    publish(sides, picture, args)


def settings_text(used: dict[str, Any]) -> str:
    """The settings of BenchMARL that say most."""
    everything = used["experiment_config"] | used["algorithm_config"] | used["model_config"]
    policy = "on_policy" if "lmbda" in everything else "off_policy"
    keys_of_policy = {
        "on_policy": ["n_minibatch_iters", "minibatch_size"],
        "off_policy": ["n_optimizer_steps", "train_batch_size", "memory_size"],
    }
    sizes = ["collected_frames_per_batch", "n_envs_per_worker", *keys_of_policy[policy]]
    keys = ["lr", "gamma", *(f"{policy}_{size}" for size in sizes), "lmbda", "alpha_init"]
    return ", ".join(f"{k} {everything[k]}" for k in [*keys, "num_cells"] if k in everything)


def publish(sides: dict[str, list[curves.Result]], picture: Path, args: argparse.Namespace) -> None:
    """Prints and writes."""
    ours, theirs = (sum(curves.column(x, -1, "episode_reward")) / len(x) for x in sides.values())
    rows = curves.curve_rows(sides, "episode_reward", ".3f")
    sections = [
        ("Return", report.markdown_table(["frames", *sides], rows)),
        (
            f"After {args.frames:,} frames",
            report.markdown_table(["", *sides], final_rows(sides))
            + f"\n\ntorchrl_marl minus BenchMARL: {ours - theirs:+.3f}.",
        ),
    ]
    if args.write:
        sections.insert(1, ("Learning curves", f"![learning curves]({picture.name})"))
    result = sides["BenchMARL"][0]
    used = {k: v for k, v in result["settings"].items() if k.endswith("config")}
    report.publish(
        args.name,
        f"{args.title}: {args.recipe} and BenchMARL's {args.algorithm.upper()}",
        sections,
        {
            "task": json.dumps(result["settings"]["task_config"]),
            "seeds": ", ".join(str(seed) for seed in args.seeds),
            "threads of torch": f"{args.threads}, BenchMARL {result['settings']['threads']}",
            "BenchMARL's versions": ", ".join(f"{k} {v}" for k, v in result["versions"].items()),
            "BenchMARL's settings, its defaults": settings_text(used),
        },
        f"""Mean (least to most) over the seeds. A return is the mean over {args.episodes} episodes
        and the agents of the rewards summed over 100 steps; an episode that the task ends early,
        with all agents at their goals, is stepped on ("over 100 steps") or cut there ("to the
        episode's end"). Both sides are evaluated in TorchRL's VmasEnv with the same seed, so they
        play the same episodes, by the likeliest actions; the time of evaluating is not in the
        seconds of training. BenchMARL runs in an environment of its own by
        `benchmarks/benchmarl_vmas.py`, with its defaults for task, experiment, algorithm and
        model; ours is the recipe. The two were trained one after the other and not side by side, so
        the seconds are a rough comparison. They differ in more than the library: number of envs,
        networks, learning rate, epochs and minibatches are each side's own.""",
        write=args.write,
    )


if __name__ == "__main__":
    main()
