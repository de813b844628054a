"""The help of ``torchrl-marl train``, in which rare settings are folded."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from torchrl_marl.apps.console import settings_table

__all__ = ["HelpAll", "train_epilog"]


class HelpAll(argparse.Action):
    """Prints the help of ``train`` with every setting."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        text = "show this help message with every setting, and exit"
        super().__init__(option_strings, dest, nargs=0, help=text, default=argparse.SUPPRESS)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        """Prints the help."""
        parser.late_epilog = lambda: train_epilog(every=True)  # type: ignore[attr-defined]
        parser.print_help()
        raise SystemExit(0)


# Settings that most runs set; `train --help` folds the others.
_COMMON_SETTINGS = (
    *("seed", "device", "execution", "total_frames", "frames_per_batch", "stop_at_return"),
    *("folder", "init_from", "env.library", "env.name", "env.num_envs", "env.max_steps"),
    *("env.continuous_actions", "env.state", "env.kwargs", "env.randomize", "learner.algorithm"),
    *("learner.gamma", "learner.lmbda", "learner.lr", "learner.num_epochs"),
    *("learner.minibatch_size", "learner.clip_epsilon", "learner.entropy_coeff"),
    *("learner.normalize_observations", "learner.actor.num_cells", "learner.actor.sharing"),
    *("learner.actor.communication.kind", "learner.actor.memory.kind"),
    *("learner.critic.num_cells", "evaluation.every_frames", "evaluation.episodes"),
    *("checkpoint.every_iterations", "logging.backends", "population.size"),
)


def _count_by_section(keys: Iterable[str]) -> str:
    """Returns how many settings each section has, such as ``league.* (12)``."""
    sections = Counter(key.partition(".")[0] + ".*" * ("." in key) for key in keys)
    return ", ".join(f"{name} ({n})" if "*" in name else name for name, n in sections.items())


def train_epilog(*, every: bool = False) -> str:
    """Returns examples and settings for the end of the help of ``train``.

    Args:
        every (bool): True to list every setting, not only the usual ones.
    """
    from torchrl_marl.recipes import DEFAULT_RECIPE, explain, read_config

    known = explain(read_config(DEFAULT_RECIPE))
    chosen = [setting for setting in known if every or setting.key in _COMMON_SETTINGS]
    rest = [setting.key for setting in known if setting not in chosen]
    folded = f"\n\nMore settings by --help-all: {_count_by_section(rest)}." if rest else ""
    return (
        "examples:\n"
        "  torchrl-marl train\n"
        "  torchrl-marl train vmas_navigation_ippo seed=1 learner.lr=1e-3\n"
        "  torchrl-marl train vmas_balance_mappo env.kwargs.n_agents=4 --seeds 0,1,2\n"
        "  torchrl-marl train vmas_balance_mappo --seeds 0..15 --together\n"
        "  torchrl-marl train my_recipe.yaml device=cuda\n"
        "  torchrl-marl train --resume runs/my_run\n"
        "  torchrl-marl train --resume runs/my_run total_frames=2000000\n\n"
        f"settings, with their values in {DEFAULT_RECIPE}:\n"
        + settings_table(chosen)
        + folded
        + "\n\nOther algorithms have other learner settings: "
        "`torchrl-marl list settings vmas_balance_matd3`."
    )
