"""Cost of a league: a batch with stored players against one of plain self-play.

python benchmarks/leagues.py --write
python benchmarks/leagues.py --execution compile --write
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import report

STEPS = 16
TEXT = """Collecting and learning by `toy_kuhn_ippo`'s settings, 256 envs, 16 steps a batch: plain
    self-play, and with 16 stored players of whom one is drawn for each episode, in half of the envs
    and in all. *Graphs* were recorded by the rollout in all, with a player stored after every
    batch of the warm-up, 50 of them. All alternate in one process."""
RUNS = {"self-play": None, "stored players in half": 0.5, "in all envs": 0.0}


def loop_of(num_envs: int, self_play: float | None, execution: str) -> tuple[Any, Any, Any]:
    """A learner, its collector, and its matches with stored players, if there are such."""
    import torch

    from torchrl_marl import TeamSpec
    from torchrl_marl.collectors import MatchPolicy, RolloutCollector, TeamPolicy
    from torchrl_marl.envs.remember import with_players
    from torchrl_marl.envs.toy import Kuhn
    from torchrl_marl.learners.build import build_learners
    from torchrl_marl.recipes import load_config
    from torchrl_marl.training.league import envs_of_seats

    torch.manual_seed(0)
    env: Any = Kuhn(num_envs, seed=0)
    config = load_config("toy_kuhn_ippo")
    team = TeamSpec.from_env(env)
    [learner] = build_learners(team, config.learner, execution=execution)
    policy = TeamPolicy(learner.actors.values())
    match = None
    if self_play is not None:
        env = with_players(env, team.groups)
        envs = envs_of_seats(num_envs, 2, self_play)
        match = MatchPolicy(policy, team, [{"first": [0]}, {"second": [0]}], envs, n_slots=16)
        match.chances.fill_(1.0)
    acts = policy if match is None else match
    frames = num_envs * STEPS
    collector = RolloutCollector(env, acts, frames_per_batch=frames, execution=execution)
    return learner, collector, match


def measure(args: argparse.Namespace) -> list[list[str]]:
    """A row for every kind of opponents."""
    runs: dict[str, Callable[[], Any]] = {}
    graphs = {}
    for name, self_play in RUNS.items():
        learner, collector, match = loop_of(args.envs, self_play, args.execution)
        runs[name] = iteration(learner, collector)
        for i in range(args.snapshots):
            collector.rollout()
            for players, actor in zip(match.players if match else (), learner.actors.children()):
                players.store(i % 16, actor)
        captured = collector._captured
        graphs[name] = 0 if captured is None else len(captured._programs)
    timings = report.alternate(runs, args.rounds, seconds=args.seconds, warmup=2, shortest=0.0)
    return [
        [
            name,
            f"{1e3 * timings.median(name):.1f}",
            f"{args.envs * STEPS / timings.median(name):,.0f}",
            timings.ratio_text("self-play", name),
            str(graphs[name]),
            str(timings.rounds()),
        ]
        for name in RUNS
    ]


def iteration(learner: Any, collector: Any) -> Callable[[], Any]:
    """Collecting and learning, once."""
    return lambda: learner.learn(collector.rollout())


def main() -> None:
    """Measures and reports."""
    parser = report.parser(__doc__, threads=(1,))
    parser.add_argument("--envs", type=int, default=256)
    parser.add_argument("--execution", choices=["eager", "compile", "cudagraph"], default="eager")
    parser.add_argument("--snapshots", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit of the rounds")
    args = parser.parse_args()
    if args.quick:
        args.write, args.rounds, args.envs, args.snapshots = False, 2, 16, 3
    header = ["", "ms", "frames/s", "times self-play", "graphs", "rounds"]
    sections = [
        (
            f"{args.envs} envs, {args.execution}, {report.count_of(n, 'thread')}",
            report.markdown_table(header, rows),
        )
        for n, rows in report.for_each_number_of_threads(measure, args.threads, args).items()
    ]
    report.publish(
        f"leagues_{args.execution}", "A league's batch", sections, {}, TEXT, write=args.write
    )


if __name__ == "__main__":
    main()
