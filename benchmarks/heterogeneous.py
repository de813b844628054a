"""Networks of their own against one shared padded network, and masks against none.

    python benchmarks/heterogeneous.py --write

Three comparisons, at equal frames, three seeds each:

- ``speech``: the speaker and the listener, two kinds of agents that differ in what they see and do;
- ``tag``: VMAS ``simple_tag``, whose predators and prey learn together; the predators are then
  measured against a random prey, and against the other sides' prey;
- ``arena``: agents that die in mid-episode, with losses that leave out the dead, and ones that do
  not, for what environments leave in the place of the dead.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import report

EVALUATION_SEED = 10_000
SPEECH, TAG, ARENA = "toy_speaker_listener_mappo", "vmas_simple_tag_mappo", "toy_arena_mappo"
SHARING = {
    "a network for each kind (ours)": "group",
    "one shared padded network": "full",
    "one shared padded network that reads the agent's number": "agent_id",
}
OURS = next(iter(SHARING))
ONE_GROUP = {"continuous_speech": True, "one_group": True}
QUICK: dict[str, Any] = {
    "env": {"n_envs": 8},
    "frames_per_batch": 80,
    "total_frames": 160,
    "learner": {"minibatch_size": 40, "num_epochs": 2},
    "evaluation": {"episodes": 8},
}
FILLINGS = ("zeros", "what they would see", "positions outside")


# ------------------------------------------------------------------------------ what is trained


class Trainer:
    """Trains recipes with changes, each seed in a folder of its own.

    Args:
        folder (Path): for the runs.
        args (Namespace): seeds, threads, sizes.
    """

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.folder = folder
        self.args = args
        self._count = 0

    def __call__(
        self,
        recipe: str,
        what: str,
        changes: Mapping[str, Any],
        make_env: Callable[..., Any] | None = None,
    ) -> list[Any]:
        """One run for each seed."""
        import torchrl_marl

        runs = []
        for seed in self.args.seeds:
            print(f"{recipe}, {what}, seed {seed} ...", file=sys.stderr, flush=True)
            self._count += 1
            settings = {**changes, "logging.progress": False, "checkpoint.every_iterations": 0}
            settings |= {"seed": seed, "threads": self.args.threads}
            settings["folder"] = str(self.folder / f"run{self._count}")
            env = None
            if make_env is not None:
                env = make_env(seed)
                settings.pop("env", None)
            runs.append(torchrl_marl.train(recipe, env=env, **nested(settings)))
        return runs


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """``{"a.b": 1}`` as ``{"a": {"b": 1}}``."""
    out: dict[str, Any] = {}
    for key, value in settings.items():
        own = out
        *parents, last = key.split(".")
        for parent in parents:
            own = own.setdefault(parent, {})
        own[last] = value
    return out


def shared(how: str, args: argparse.Namespace, **changes: Any) -> dict[str, Any]:
    """Changes to a recipe: who shares actor and critic."""
    return sizes(args) | {
        "learner.actor.sharing": how,
        "learner.critic.sharing": how,
        **changes,
    }


def sizes(args: argparse.Namespace) -> dict[str, Any]:
    """Tiny sizes, where they are asked for."""
    from torchrl_marl.schema import flatten

    return flatten(QUICK) if args.quick else {}
