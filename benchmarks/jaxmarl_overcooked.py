"""JaxMARL's IPPO and PQN in Overcooked beside ours: same layouts, equal frames, one core each.

    python benchmarks/jaxmarl_overcooked.py --write
    python benchmarks/jaxmarl_overcooked.py --layouts coord_ring --sides pqn_vdn_cnn pqn --seeds 0

JaxMARL trains by ``jaxmarl_overcooked_side.py`` in a virtual environment that is created for it,
with the settings of its own files for Overcooked. These files come from GitHub; ``--jaxmarl
FOLDER`` uses a checkout instead. Ours are runs of ``torchrl-marl suite overcooked``. Both sides
then play whole episodes. With ``--results FOLDER`` a stopped comparison goes on where it was.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from pathlib import Path

import jaxmarl_peers
import peers
import report
from jaxmarl_peers import Result

SCRIPT = Path(__file__).parent / "jaxmarl_overcooked_side.py"
THEIRS = {
    "ippo_ff": "JaxMARL, `ippo_ff_overcooked.py`",
    "pqn_vdn_cnn": "JaxMARL, `pqn_vdn_cnn_overcooked.py`",
}
# Ours is the suite's algorithm of this name, which follows the file of JaxMARL.
OURS = {
    "ippo": "torchrl_marl, `ippo`: settings of `ippo_ff_overcooked.py`",
    "pqn": "torchrl_marl, `pqn`: flat observations",
    "pqn_cnn": "torchrl_marl, `pqn_cnn`: settings of `pqn_vdn_cnn_overcooked.py`",
}
LAYOUTS = ["cramped_room", "asymm_advantages", "coord_ring", "forced_coord", "counter_circuit"]
BATCH = 2048  # frames; a multiple of the batches of all sides


def train(layout: str, side: str, seed: int, path: Path, args: argparse.Namespace) -> Result:
    """Trains JaxMARL's or ours, and returns its result."""
    if side in OURS:
        of_suite = ("overcooked", layout, "return", side, seed, path, args)
        return jaxmarl_peers.train_ours(*of_suite, sampled=side.startswith("ippo"))
    script_options = {"--layout": layout, "--episodes": args.episodes}
    return jaxmarl_peers.train_theirs(SCRIPT, side, seed, path, args, script_options)


def table(found: dict[str, dict[str, list[Result]]]) -> str:
    """A row for each layout and side."""
    rows = []
    for layout, of_sides in found.items():
        for side, results in of_sides.items():
            earned = [result["return"] for result in results]
            seconds = [jaxmarl_peers.seconds(result) for result in results]
            of_seeds = ", ".join(f"{x:.1f}" for x in earned)
            figures = [f"{statistics.fmean(earned):.1f}", ", ".join(f"{x:,.0f}" for x in seconds)]
            rows.append([f"`{layout}`", {**THEIRS, **OURS}[side], of_seeds, *figures])
    head = ["layout", "", "return, each seed", "mean", "seconds, each seed"]
    return report.markdown_table(head, rows)


METHOD = """Both sides train in JaxMARL's Overcooked with a shaped reward that falls to zero over
2.5 million frames. Each then plays {episodes} whole episodes of 400 steps without it: IPPO with
sampled actions, as in training, PQN with the likeliest ones. A soup earns 20. Seconds are those of
compiling, collecting and learning. Other work may run on the machine (see the load).

Theirs are JaxMARL's scripts with its files for Overcooked. Only the layout, the seed and the frames
are changed, and evaluations in between are left out. These settings are its authors' for 5 M
frames. Ours have the same numbers; `pqn` has flat observations, layers of 256 and another learning
rate. Nothing of ours was tuned in Overcooked."""


def main() -> None:
    """Trains all and reports."""
    parser = report.parser(__doc__, threads=(1,))
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS)
    args = peers.arguments(
        parser,
        "JaxMARL",
        [*THEIRS, *OURS],
        ["ippo_ff", "ippo", "pqn"],
        seeds=[0, 1, 2],
        frames=4_999_168,
        batch=BATCH,
        episodes=("--episodes", 64),
    )
    found = {one: peers.results(one, partial(train, one), args) for one in args.layouts}
    runs = {
        f"{layout} {side}": results
        for layout, of_sides in found.items()
        for side, results in of_sides.items()
    }
    jaxmarl_peers.publish(
        "jaxmarl_overcooked",
        "JaxMARL and ours in Overcooked",
        (f"Return after {args.frames:,} frames", table(found)),
        METHOD.format(episodes=args.episodes),
        runs,
        args,
    )


if __name__ == "__main__":
    main()
