"""JaxMARL's IPPO, MAPPO and PQN on SMAX beside ours: same maps, equal frames, one core each.

    python benchmarks/jaxmarl_smax.py --write
    python benchmarks/jaxmarl_smax.py --map 6h_vs_8z --frames 9994240 --write

JaxMARL trains by ``jaxmarl_smax_side.py`` in a virtual environment that is created for it, with the
settings of its own files for SMAX. These files come from GitHub; ``--jaxmarl FOLDER`` uses a
checkout instead. Ours are runs of ``torchrl-marl suite smax``. Both sides then play battles to
their end by the likeliest actions. With ``--results FOLDER`` a stopped comparison goes on where it
was.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import jaxmarl_peers
import peers
import report
from jaxmarl_peers import Result

SCRIPT = Path(__file__).parent / "jaxmarl_smax_side.py"
THEIRS = {
    "ippo_rnn": "JaxMARL, `ippo_rnn_smax.py`",
    "mappo_rnn": "JaxMARL, `mappo_rnn_smax.py`",
    "pqn_vdn_rnn": "JaxMARL, `pqn_vdn_rnn.py`",
}
OURS = {
    "rmappo": "torchrl_marl, `rmappo`: settings of `mappo_rnn_smax.py`",
    "rmappo_team": "torchrl_marl, `rmappo_team`: those, with one value of the team",
    "rpqn": "torchrl_marl, `rpqn`: settings of `pqn_vdn_rnn.py`",
    "mappo": "torchrl_marl, `mappo`: no memory, the suite's settings",
    "pqn": "torchrl_marl, `pqn`: no memory, the suite's settings",
}
BATCH = 128 * 128  # frames of a batch of both sides


def train(side: str, seed: int, path: Path, args: argparse.Namespace) -> Result:
    """Trains JaxMARL's or ours, and returns its result."""
    if side in OURS:
        return jaxmarl_peers.train_ours("smax", args.map, "won", side, seed, path, args)
    script_options = {"--map": args.map, "--battles": args.episodes}
    return jaxmarl_peers.train_theirs(SCRIPT, side, seed, path, args, script_options)


def table(found: dict[str, list[Result]], frames: int) -> str:
    """A row for each side."""
    rows = []
    for side, results in found.items():
        won = [result["won"] for result in results]
        seconds = statistics.fmean(jaxmarl_peers.seconds(result) for result in results)
        of_seeds = ", ".join(f"{x:.3f}" for x in won)
        name = {**THEIRS, **OURS}[side]
        figures = [f"{statistics.fmean(won):.3f}", f"{seconds:,.0f}", f"{frames / seconds:,.0f}"]
        rows.append([name, of_seeds, *figures])
    return report.markdown_table(["", "won, each seed", "mean", "seconds", "frames/s"], rows)


METHOD = """Both sides train in JaxMARL's `HeuristicEnemySMAX` with 128 copies and its defaults,
which JaxMARL's settings repeat (`see_enemy_actions`, `walls_cause_death`, `attack_mode="closest"`).
Each then plays {battles} battles to their end by the likeliest actions, the first of each copy.
Random actions win none. Seconds are those of compiling, collecting and learning. Other work may run
on the other core (see the load).

Theirs are JaxMARL's scripts with its files for SMAX. Only the map, the seed and the frames are
changed, and evaluations in between are left out. These settings are its authors' for 10 M frames.
`rmappo` and `rpqn` have the same numbers, as far as our settings can say them; `rpqn` has layer
norm in place of batch norm. `mappo` was tuned by us on 3m and 2s3z, and its number of epochs on
5m_vs_6m. On harder maps nothing was tuned."""


def main() -> None:
    """Trains all and reports."""
    parser = report.parser(__doc__, threads=(1,))
    parser.add_argument("--map", default="5m_vs_6m")
    args = peers.arguments(
        parser,
        "JaxMARL",
        [*THEIRS, *OURS],
        ["ippo_rnn", "mappo_rnn", "rmappo", "mappo"],
        seeds=[0],
        frames=9_994_240,
        batch=BATCH,
        episodes=("--battles", 500),
    )
    found = peers.results(args.map, train, args)
    jaxmarl_peers.publish(
        f"jaxmarl_smax_{args.map}",
        f"JaxMARL and ours on SMAX {args.map}",
        (f"Battles won after {args.frames:,} frames", table(found, args.frames)),
        METHOD.format(battles=args.episodes),
        found,
        args,
    )


if __name__ == "__main__":
    main()
