"""Connect Four with both sides learning by self-play, against a random player.

    python benchmarks/connect_four.py --write

Trains the recipe by ``torchrl_marl.train``, seeds 0, 1 and 2 in turn. Each side then plays 1,000
games against uniform legal moves, with its likeliest and with its sampled moves. A check of the
credit follows: over 1,000 random games, with a value of 0, gamma 1 and lambda 1, the advantage of
each side's first move must equal the game's result on the last board.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report

RECIPE = "pettingzoo_connect_four_ippo"
SIDES = ("player_0", "player_1")
LONGEST = 42
COPIES = 50
SEED = 10_000
GOAL = 95.0
HEADER = ("", "side", "won, %", "drawn, %", "lost, %", "won, sampled, %", "won, untrained, %")
QUICK = {
    "total_frames": 320,
    "frames_per_batch": 160,
    "env": {"num_envs": 8, "workers": 0},
    "learner": {"minibatch_size": 80},
    "evaluation": {"episodes": 8},
}


def make_games(workers: int, seed: int = SEED, copies: int = COPIES) -> Any:
    """Copies of the game, in two groups of one."""
    from torchrl_marl.envs import make_env

    sides = {side: [side] for side in SIDES}
    return make_env(
        "pettingzoo/classic/connect_four_v3",
        num_envs=copies,
        workers=workers,
        group_map=sides,
        seed=seed,
    )


# ------------------------------------------------------------------------------------- playing


def play(policy: Any, side: str, games: int, workers: int, deterministic: bool) -> list[float]:
    """Percentages of games won, drawn and lost by a side against random moves."""
    import torch
    from torchrl.envs.utils import ExplorationType, set_exploration_type

    mode = ExplorationType.DETERMINISTIC if deterministic else ExplorationType.RANDOM
    env = make_games(workers)
    torch.manual_seed(SEED)
    results = []
    with torch.no_grad(), set_exploration_type(mode):
        for _ in range(0, games, COPIES):
            results.append(returns_of_first_games(env, against_random(env, policy, side))[side])
    env.close()
    result = torch.cat(results)[:games]
    return [100 * (result == x).float().mean().item() for x in (1.0, 0.0, -1.0)]


def against_random(env: Any, policy: Any, side: str) -> Callable[[Any], Any]:
    """One side moves by the policy, the other at random."""

    def act(td: Any) -> Any:
        moves = policy(td.clone(recurse=False)).get((side, "action"))
        return env.rand_action(td).set((side, "action"), moves)

    return act


def returns_of_first_games(env: Any, act: Any) -> dict[str, Any]:
    """What each side earns in one game of each copy, ``[E]``."""
    import torch

    carry = env.reset()
    earned = {side: torch.zeros(env.num_envs) for side in SIDES}
    running = torch.ones(env.num_envs, dtype=torch.bool)
    for _ in range(LONGEST):
        step, carry = env.step_and_maybe_reset(act(carry))
        for side in SIDES:
            earned[side] += torch.where(running, step["next", side, "reward"].flatten(), 0.0)
        running = running & ~step["next", "done"].flatten()
    return earned


# -------------------------------------------------------------------------------------- credit


def count_credited_games(games: int, workers: int) -> dict[str, int]:
    """Over random games: how many there are, and how many each side is credited exactly."""
    env, counts = make_games(workers), dict.fromkeys(("games", "draws", *SIDES), 0)
    for _ in range(0, games, COPIES):
        td = env.rollout(LONGEST, break_when_any_done=False)
        end = td["next", "done"].flatten(1).int().argmax(1)
        result = outcome_of_board(
            td["next", "player_0", "observation"][range(len(end)), end].squeeze(1)
        )
        counts["games"] += len(end)
        counts["draws"] += int((result == 0).sum())
        for side, expected in zip(SIDES, (result, -result)):
            counts[side] += int((advantage_of_first_move(env, td, side) == expected).sum())
    env.close()
    return counts


def advantage_of_first_move(env: Any, td: Any, side: str) -> Any:
    """The sum of all that a side earns from turn to turn, ``[E]``."""
    from tensordict.nn import TensorDictModule

    from torchrl_marl import TeamSpec
    from torchrl_marl.objectives import TeamGAE

    nothing = TensorDictModule(
        lambda mask: 0.0 * mask.unsqueeze(-1), [(side, "mask")], [(side, "state_value")]
    )
    group = TeamSpec.from_env(env).groups[side]
    TeamGAE(gamma=1.0, lmbda=1.0, value_network=nothing, group=group, bootstrap="agent")(td)
    first = td[side, "mask"].flatten(1).int().argmax(1, keepdim=True)
    return td[side, "advantage"].flatten(1).gather(1, first).squeeze(1)


def outcome_of_board(board: Any) -> Any:
    """1 where the first plane of ``[E, 6, 7, 2]`` has four in a row, -1 the second, 0 nobody."""
    import torch

    row, column = torch.zeros(4, 4), torch.zeros(4, 4)
    row[0], column[:, 0] = 1.0, 1.0
    lines = torch.stack([row, column, torch.eye(4), torch.eye(4).flip(0)]).unsqueeze(1)
    planes = board.movedim(-1, 1).reshape(-1, 1, 6, 7).float()
    found = torch.nn.functional.conv2d(planes, lines, padding=3) == 4
    first, second = found.flatten(1).any(1).view(-1, 2).float().unbind(1)
    return first - second


# ------------------------------------------------------------------------------------- training


def train(seed: int, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Trains one seed and lets both sides play."""
    import torch

    import torchrl_marl
    from torchrl_marl import TeamSpec
    from torchrl_marl.collectors import TeamPolicy
    from torchrl_marl.learners import build_learners

    report.be_quiet()
    overrides: dict[str, Any] = dict(QUICK) if args.quick else {}
    overrides["logging"] = {"progress": sys.stderr.isatty()}
    run = torchrl_marl.train(RECIPE, seed=seed, folder=str(folder), **overrides)
    torch.manual_seed(seed)
    learners = build_learners(TeamSpec.from_env(make_games(0, copies=1)), run.config.learner)
    untrained = TeamPolicy(actor for learner in learners for actor in learner.actors.values())
    rows = {}
    for side in SIDES:
        shares = play(run.policy, side, args.games, args.workers, True)
        sampled = play(run.policy, side, args.games, args.workers, False)
        untrained_result = play(untrained, side, args.games, args.workers, False)
        rows[side] = [*shares, sampled[0], untrained_result[0]]
    return {**run.summary, "threads": run.config.threads, "rows": rows}


def moves_per_second(workers: int, copies: int, steps: int) -> float:
    """With random legal moves, games beginning anew as they end."""
    env = make_games(workers, copies=copies)
    carry = env.reset()
    began = time.perf_counter()
    for _ in range(steps):
        _, carry = env.step_and_maybe_reset(env.rand_action(carry))
    seconds = time.perf_counter() - began
    env.close()
    return steps * copies / seconds


def main() -> None:
    """Trains, plays and reports."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--games", type=int, default=1000, help="a multiple of 50")
    parser.add_argument("--workers", type=int, default=2, help="processes of the games played")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, as a smoke test")
    parser.add_argument("--write", action="store_true", help="write the tables to results")
    args = parser.parse_args()
    if args.quick:
        args.write, args.games, args.seeds, args.workers = False, COPIES, [0], 0

    summaries = []
    folder = Path(tempfile.mkdtemp())
    try:
        for seed in args.seeds:
            print(f"training seed {seed} ...", file=sys.stderr)
            summaries.append(train(seed, folder / f"seed{seed}", args))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sections = [
        (f"Games against a random player, {args.games:,} a side", games_table(summaries)),
        ("Training", training_table(summaries)),
        ("Credit over random games", credit_table(count_credited_games(args.games, args.workers))),
        ("Moves per second", speed_table(2 if args.quick else 100)),
    ]
    report.publish(
        "connect_four",
        "Connect Four, both sides learning",
        sections,
        {
            "recipe": f"{RECIPE}, {'tiny' if args.quick else 'unchanged'}",
            "threads of torch": summaries[0]["threads"],
        },
        f"""Each seed is trained by `torchrl_marl.train` from games of the policy against itself
        only: no random player, no opponent of the past. Both sides share one network, which sees
        the board from the mover's side. Afterwards it moves for one side by its likeliest actions
        ("won", "drawn", "lost") or by sampled ones, and the other side's moves are drawn uniformly
        from the legal ones; the goal is {GOAL:.0f} % from either side by the likeliest actions.
        "untrained" samples from the network before training. Credit is exact where the advantage
        of a side's first move (value 0, gamma 1, lambda 1, `bootstrap: agent`) equals the result
        that four in a row on the last board tell; the loser is paid in the winner's turn.
        "frames" are moves.""",
        write=args.write,
    )


def games_table(summaries: list[dict[str, Any]]) -> str:
    """A row for each seed and side, and the worst of each column that should be high."""
    rows = [
        [f"seed {summary['seed']}", side, *(f"{x:.1f}" for x in summary["rows"][side])]
        for summary in summaries
        for side in SIDES
    ]
    for side in SIDES:
        columns = zip(*(summary["rows"][side] for summary in summaries))
        rows.append(["mean", side, *(f"{statistics.mean(x):.1f}" for x in columns)])
    return report.markdown_table(HEADER, rows)


def training_table(summaries: list[dict[str, Any]]) -> str:
    """Frames and time of each seed."""
    header = ("", "frames", "training, s", "frames/s")
    rows = [
        [
            f"seed {x['seed']}",
            f"{x['frames']:,}",
            f"{x['seconds']:.0f}",
            f"{x['frames_per_second']:,.0f}",
        ]
        for x in summaries
    ]
    return report.markdown_table(header, rows)


def credit_table(counts: dict[str, int]) -> str:
    """How many games each side is credited exactly."""
    header = ("games", "draws", *(f"{side} exact" for side in SIDES))
    return report.markdown_table(header, [[f"{x:,}" for x in counts.values()]])


def speed_table(steps: int) -> str:
    """Moves per second in this process and in two others."""
    rows = [
        [f"{workers}", f"{copies}", f"{moves_per_second(workers, copies, steps):,.0f}"]
        for workers, copies in ((0, 128), (2, 128))
    ]
    return report.markdown_table(("workers", "copies", "moves/s"), rows)


if __name__ == "__main__":
    main()
