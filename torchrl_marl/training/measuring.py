"""What a run cannot do without evaluations, and what it cannot do on external simulators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrl_marl.errors import ConfigError, quoted

if TYPE_CHECKING:
    from torchrl_marl.training.config import TrainConfig

__all__ = ["check_external_run", "check_measuring"]


def check_measuring(run: TrainConfig) -> None:
    """Refuses to leave out evaluations that a run needs.

    Raises:
        ConfigError: naming the setting that needs them.
    """
    if run.evaluation.episodes:
        return
    needs = {
        "evaluation.every_frames": run.evaluation.every_frames,
        "population.size": run.population.size if run.population.size > 1 else None,
        "league.opponents or league.partners": "given" if run.league.enabled else None,
    }
    for key, value in needs.items():
        if value is not None:
            raise ConfigError(
                f"evaluation.episodes is 0, but {key} is {value}, which measures players; use "
                "evaluation.episodes=1 or more."
            )


def check_external_run(run: TrainConfig) -> None:
    """Refuses what external simulators cannot do for a run.

    Raises:
        ConfigError: naming the setting and the fix.
    """
    if run.evaluation.episodes:
        raise ConfigError(
            f"evaluation.episodes is {run.evaluation.episodes}, but an external simulator plays "
            "for training alone; use evaluation.episodes=0, and read the returns of training in "
            "metrics.csv."
        )
    for key, found, use in (
        ("population.size", run.population.size if run.population.size > 1 else None, "1"),
        ("league.opponents", "given" if run.league.enabled else None, "null"),
        ("distributed.collectors", run.distributed.collectors, "null"),
        ("evaluation.gif", run.evaluation.gif or None, "false"),
        ("evaluation.animate_every", run.evaluation.animate_every, "null"),
    ):
        if found is not None:
            raise ConfigError(
                f"{key} is {quoted(found)}, expected none on an external simulator, whose clients "
                f"are where they are; use {key}={use}."
            )
