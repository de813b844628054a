"""QMIX and VDN on VMAS simple_spread, with the mixing network of PyMARL2 beside ours.

    python benchmarks/qmix_spread.py --write

Trains the recipes ``vmas_simple_spread_vdn`` and ``vmas_simple_spread_qmix``; then QMIX with the
mixing network that PyMARL2 describes: hypernetworks of two layers with 64 hidden units. Learner,
replay buffer, exploration and seeds are equal. Rewards are negative, about -6 a step, so that the
units of a mixing network start where their gradient is small. Each row is therefore also trained
with 6 added to every reward; returns are without it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import report
import torch
from torch import Tensor, nn
from torchrl.envs import RewardScaling

from torchrl_marl.modules import mixers, stack

RECIPES = {
    "VDN": "vmas_simple_spread_vdn",
    "QMIX": "vmas_simple_spread_qmix",
    "QMIX with PyMARL2's mixing network": "vmas_simple_spread_qmix",
}
SHIFT = 6.0
QUICK = {
    "total_frames": 1_600,
    "frames_per_batch": 800,
    "env": {"num_envs": 8},
    "learner": {"minibatch_size": 32, "learning_starts": 400},
    "evaluation": {"episodes": 8},
}


class PyMARL2Hypernetworks(nn.Module):
    """Weights and biases of both layers, from hypernetworks of two layers.

    Args:
        width (int): width of the state.
        n_agents (int): number of values to mix.
        hidden (int): hidden units of the mixing network.
    """

    def __init__(self, width: int, n_agents: int, hidden: int) -> None:
        super().__init__()
        self.first, self.last = (
            self._weights(width, n_agents * hidden),
            self._weights(width, hidden),
        )
        self.bias = nn.Linear(width, hidden)

    @staticmethod
    def _weights(width: int, n_weights: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, n_weights))

    def forward(self, state: Tensor) -> Tensor:
        """Returns the weights in the order that ``MonotonicMixer`` reads."""
        return torch.cat([self.first(state), self.bias(state), self.last(state)], -1)


class PyMARL2Mixer(mixers.MonotonicMixer):
    """The mixing network with PyMARL2's hypernetworks."""

    def __init__(self, group: Any, features: Any, columns: Any, hidden: int, *args: Any) -> None:
        super().__init__(group, features, columns, hidden, *args)
        max_agents = max(each_group.n_agents for each_group in group.groups)
        networks = [
            PyMARL2Hypernetworks(len(each_group), max_agents, hidden) for each_group in columns
        ]
        self.weights = stack(networks) if len(networks) > 1 else networks[0]


def shift_rewards(transform: RewardScaling, scale: float, in_keys: Any) -> None:
    """Starts the transform of scaled rewards with a shift."""
    RewardScaling.__init__(transform, SHIFT, 1.0, in_keys=in_keys)
    transform._is_measured = False  # type: ignore[assignment]


def train(name: str, shift: bool, seeds: int, folder: Path, quick: bool) -> list[float]:
    """Returns the returns of all seeds after training, which is one population."""
    import torchrl_marl

    settings: dict[str, Any] = QUICK if quick else {"evaluation": {"episodes": 200}}
    settings = {**settings, "logging": {"progress": False}}
    settings |= {"population": {"size": seeds}, "execution": "eager" if quick else "compile"}
    with mock.patch.object(
        mixers, "MonotonicMixer", PyMARL2Mixer if "PyMARL2" in name else mixers.MonotonicMixer
    ):
        if shift:  # any scale but 1 adds the transform
            settings["env"] = {**settings.get("env", {}), "reward_scale": 0.5}
            with mock.patch("torchrl_marl.envs.reward_scale.ScaledRewards.__init__", shift_rewards):
                torchrl_marl.train(RECIPES[name], folder=str(folder), **settings)
        else:
            torchrl_marl.train(RECIPES[name], folder=str(folder), **settings)
    found = sorted(folder.glob("seed*/summary.json"))
    return [json.loads(path.read_text(encoding="utf-8"))["return_after"] for path in found]


def main() -> None:
    """Trains all rows and reports."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, as a smoke test")
    parser.add_argument("--write", action="store_true", help="write the table to results")
    args = parser.parse_args()
    report.be_quiet()
    runs, rows = Path(tempfile.mkdtemp()), []
    try:
        for name in RECIPES:
            row = [name]
            for shift in (False, True):
                found = train(name, shift, args.seeds, runs / f"{name}{shift}", args.quick)
                each = ", ".join(f"{x:.0f}" for x in found)
                row.append(f"{statistics.mean(found):.0f} ({each})")
                print(*row, flush=True)
            rows.append(row)
    finally:
        shutil.rmtree(runs, ignore_errors=True)
    header = ("algorithm", "rewards as they are", "6 added to each reward")
    report.publish(
        "qmix_spread",
        "QMIX and VDN on VMAS simple_spread",
        [("Return after training", report.markdown_table(header, rows))],
        {"threads of torch": 1, "seeds": args.seeds},
        """300,000 frames, the recipes' settings, 200 evaluation episodes with the likeliest
        actions; in brackets the seeds, which are trained in one program. Random actions: -591.
        PyMARL2's mixing network has hypernetworks of two layers with 64 hidden units; everything
        else is equal. The rewards with 6 added are those of training only.""",
        write=args.write and not args.quick,
    )


if __name__ == "__main__":
    main()
