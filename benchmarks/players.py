"""Cost of stored players, one for each env, against one policy for all.

python benchmarks/players.py --write
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import report

STORES = 50
TEXT = """A step of acting on VMAS balance, 3 agents, networks of two layers of 64: one policy for
    all envs, and stored players (`modules.Players`), whose rows are sorted into blocks of one
    player each, drawn anew for every env. All alternate in one process. The last column says how
    many graphs rollouts record which 50 calls of `store` lie between, and how often the graph of a
    step waits for the device."""


def make_policies(n_envs: int, n_players: int, block: int, execution: str) -> dict[str, Callable]:
    """One policy for all envs, and so many stored ones, as functions of nothing."""
    import torch
    from torchrl.envs.utils import ExplorationType, set_exploration_type

    from torchrl_marl import TeamSpec
    from torchrl_marl.capture import capture
    from torchrl_marl.envs import VmasEnv
    from torchrl_marl.modules import Players, make_actor

    torch.manual_seed(0)
    env = VmasEnv("balance", num_envs=n_envs, seed=0)
    group = TeamSpec.from_env(env).groups["agents"]
    actor = make_actor(group)
    players = Players(actor, n_players, block=block)
    for i in range(n_players):
        players.store(i, make_actor(group))
    step = env.reset()
    player_ids = torch.randint(n_players, (n_envs, 1)).expand(-1, group.n_agents).contiguous()
    step["agents", "player"] = player_ids
    leaves = [step["agents", "observation"], player_ids]

    def capture_policy(policy: Any) -> Callable:
        def act(observation: Any, player: Any) -> Any:
            step_input = step.empty()
            step_input["agents", "observation"], step_input["agents", "player"] = (
                observation,
                player,
            )
            with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
                return policy(step_input)["agents", "action"]

        if execution == "eager":
            return lambda: act(*leaves)
        inputs = [*leaves, *policy.parameters(), *policy.buffers()]
        program = capture(lambda *args: act(*args[:2]), *inputs, name="acting", execution=execution)
        return lambda: program.flat(inputs)

    return {
        "one policy": capture_policy(actor),
        f"{n_players} stored players": capture_policy(players),
    }


def count_recorded_graphs(n_players: int, execution: str) -> tuple[int, int]:
    """How many graphs rollouts record that 50 stores lie between, and waits in that of a step."""
    import torch
    from tensordict.nn import TensorDictModule, TensorDictSequential

    from torchrl_marl import TeamSpec
    from torchrl_marl.capture import trace
    from torchrl_marl.capture.syncs import graph_syncs
    from torchrl_marl.collectors import RolloutCollector
    from torchrl_marl.envs import VmasEnv
    from torchrl_marl.modules import Players, make_actor

    env = VmasEnv("balance", num_envs=64, max_steps=100, seed=0)
    group = TeamSpec.from_env(env).groups["agents"]
    players = Players(make_actor(group), n_players)
    player_ids = torch.randint(n_players, (64, 1)).expand(-1, group.n_agents).contiguous()
    choose_players = TensorDictModule(
        lambda observation: player_ids, [("agents", "observation")], [("agents", "player")]
    )
    policy = TensorDictSequential(choose_players, players)
    collector = RolloutCollector(env, policy, frames_per_batch=640, execution=execution)
    collector.rollout()
    rollout = collector._captured
    assert rollout is not None
    before = len(rollout._programs)
    for i in range(STORES):
        players.store(i % n_players, make_actor(group))
        collector.rollout()
    step = env.reset()

    def act(observation: Any) -> Any:
        step_input = step.empty()
        step_input["agents", "observation"] = observation
        return policy(step_input)["agents", "action"]

    traced = trace(act, step["agents", "observation"])
    waits = graph_syncs(traced.module, [step["agents", "observation"], *traced.captured])
    return len(rollout._programs) - before, len(waits)


def measure(args: argparse.Namespace) -> list[list[str]]:
    """A row for one policy, and one for the players."""
    runs = make_policies(args.envs, args.players, args.block, args.execution)
    timings = report.alternate(runs, args.rounds, seconds=args.seconds, warmup=5, shortest=0.0)
    graphs, waits = count_recorded_graphs(args.players, args.captured)
    one = next(iter(runs))
    return [
        [
            name,
            f"{1e3 * timings.median(name):.2f}",
            timings.ratio_text(one, name),
            str(timings.rounds()),
            "" if name == one else f"{graphs} graphs, {waits} waits",
        ]
        for name in runs
    ]


def main() -> None:
    """Measures and reports."""
    parser = report.parser(__doc__, threads=(1,))
    parser.add_argument("--envs", type=int, default=1024)
    parser.add_argument("--players", type=int, default=16)
    parser.add_argument("--block", type=int, default=32, help="rows of a block")
    parser.add_argument("--execution", choices=["eager", "compile", "cudagraph"], default="eager")
    parser.add_argument(
        "--captured", default="compile", help="execution of the rollout that stores players"
    )
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=30.0, help="time limit of the rounds")
    args = parser.parse_args()
    if args.quick:
        args.write, args.rounds, args.envs, args.captured = False, 2, 32, "trace"
    header = ["", "ms a step", "times one policy", "rounds", "50 stores, a step"]
    sections = [
        (
            f"{args.envs:,} envs, blocks of {args.block}, {args.execution}, "
            f"{report.count_of(n, 'thread')}",
            report.markdown_table(header, rows),
        )
        for n, rows in report.for_each_number_of_threads(measure, args.threads, args).items()
    ]
    name = f"players_{args.players}_{args.envs}_{args.execution}"
    report.publish(name, "Stored players", sections, {}, TEXT, write=args.write)


if __name__ == "__main__":
    main()
