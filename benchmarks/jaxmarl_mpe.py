"""JaxMARL's IPPO, MAPPO and PQN in particle environments beside ours, at equal frames.

    python benchmarks/jaxmarl_mpe.py --write
    python benchmarks/jaxmarl_mpe.py --sides ippo_rnn mappo_rnn --seeds 0 --write

JaxMARL trains by ``jaxmarl_mpe_side.py`` in a virtual environment that is created for it, with the
settings of its own files for MPE. These files come from GitHub; ``--jaxmarl FOLDER`` uses a
checkout instead. Ours are runs of ``torchrl-marl suite mpe``. Both sides then play episodes by the
likeliest actions. With ``--results FOLDER`` a stopped comparison goes on where it was.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import jaxmarl_peers
import peers
import report
from jaxmarl_peers import Result

SCRIPT = Path(__file__).parent / "jaxmarl_mpe_side.py"
THEIRS = {
    "ippo_ff": "JaxMARL, `ippo_ff_mpe.py`",
    "ippo_rnn": "JaxMARL, `ippo_rnn_mpe.py`, memory",
    "mappo_rnn": "JaxMARL, `mappo_rnn_mpe.py`, memory",
    "pqn_vdn_ff": "JaxMARL, `pqn_vdn_ff.py`",
}
OURS = {
    "mappo": "torchrl_marl, `mappo`",
    "ippo": "torchrl_marl, `ippo`",
    "pqn": "torchrl_marl, `pqn`",
}
BATCH = 102_400  # frames; a multiple of the batches of both sides


def train(side: str, seed: int, path: Path, args: argparse.Namespace) -> Result:
    """Trains JaxMARL's or ours, and returns its result."""
    if side in OURS:
        task = f"jaxmarl_{args.task}"
        return jaxmarl_peers.train_ours("mpe", task, "return", side, seed, path, args)
    script_options = {"--task": f"MPE_{args.task}_v{args.version}", "--episodes": args.episodes}
    return jaxmarl_peers.train_theirs(SCRIPT, side, seed, path, args, script_options)


def table(found: dict[str, list[Result]]) -> str:
    """A row for each side."""
    rows = []
    for side, results in found.items():
        earned = [result["return"] for result in results]
        seconds = [jaxmarl_peers.seconds(result) for result in results]
        of_seeds = ", ".join(f"{x:.2f}" for x in earned)
        figures = [f"{statistics.fmean(earned):.2f}", ", ".join(f"{x:,.0f}" for x in seconds)]
        rows.append([{**THEIRS, **OURS}[side], of_seeds, *figures])
    return report.markdown_table(["", "return, each seed", "mean", "seconds, each seed"], rows)


METHOD = """Both sides train in JaxMARL's environment, with discrete actions. A return is the sum of
an agent's rewards in the first 25 steps of an episode: the mean over the agents and {episodes}
episodes, by the likeliest actions. Training episodes have 25 steps with ours, 26 with JaxMARL's.
Seconds are those of compiling, collecting and learning. Other work may run on the machine (see the
load).

Theirs are JaxMARL's scripts with its files for MPE. Only the environment, the seed and the frames
are changed, and evaluations in between are left out. These settings are its authors' for 10 M
frames. Ours are those of the suite, which were tuned for about a million frames."""


def main() -> None:
    """Trains all and reports."""
    parser = report.parser(__doc__, threads=(1,))
    parser.add_argument("--task", default="simple_spread", help="environment of MPE")
    parser.add_argument("--version", type=int, default=3, help="its version in JaxMARL")
    args = peers.arguments(
        parser,
        "JaxMARL",
        [*THEIRS, *OURS],
        ["ippo_ff", "pqn_vdn_ff", "mappo", "ippo", "pqn"],
        seeds=[0, 1, 2],
        frames=2_048_000,
        batch=BATCH,
        episodes=("--episodes", 1000),
    )
    found = peers.results(args.task, train, args)
    jaxmarl_peers.publish(
        f"jaxmarl_mpe_{args.task}",
        f"JaxMARL and ours on MPE's {args.task}",
        (f"Return of an agent after {args.frames:,} frames", table(found)),
        METHOD.format(episodes=args.episodes),
        found,
        args,
    )


if __name__ == "__main__":
    main()
