"""Settings of a learner that may change within a run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchrl_marl.errors import ConfigError, quoted
from torchrl_marl.settings import check
from torchrl_marl.training.config import with_settings

__all__ = ["change", "changeable_settings"]

_EXPLORATION = ("epsilon", "epsilon_end", "sigma", "sigma_end")


def changeable_settings(learner: Any) -> dict[str, Any]:
    """Returns the settings of a learner that may change within a run, with their current values.

    These are the learning rates, the coefficient of the entropy bonus and those of the exploration.
    In a population they are the learning rates and the settings in which members differ.

    Args:
        learner (Learner): learner of one or more groups.

    Returns:
        dict: name, without the prefix ``learner.`` -> number; in a population a tensor ``[P]``.
    """
    config, members = getattr(learner, "config", None), getattr(learner, "members", None)
    if members is not None:
        return {name: values.clone() for name, values in members.settings.items()}
    names = list(getattr(learner, "optimizer_of", ()))
    if getattr(config, "lr_schedule", "constant") == "kl":  # the learner changes it
        names.remove("lr")
    if getattr(config, "entropy_coeff", 0.0) > 0.0:  # otherwise the loss has no bonus
        names.append("entropy_coeff")
    exploration = getattr(config, "exploration", None)
    names += [f"exploration.{name}" for name in _EXPLORATION if hasattr(exploration, name)]
    return {name: _read_setting(config, name) for name in names}


def change(learner: Any, name: str, value: float | Tensor) -> None:
    """Changes a setting of a learner; takes effect with its next batch.

    A schedule continues from the new value: with ``lr_schedule=linear`` it is the rate at the start
    of the run.

    Args:
        learner (Learner): learner of one or more groups, which has the setting.
        name (str): one of the names from :func:`changeable_settings`.
        value (float or Tensor): new value; in a population also one value for each member, ``[P]``.

    Raises:
        ConfigError: the value is out of range.
    """
    members = getattr(learner, "members", None)
    values = _as_tensor(value)
    if values is None or values.ndim and (members is None or values.shape != (members.n,)):
        count = "a number"
        if members is not None:
            count += f", or a tensor [{members.n}]; give one value for each member"
        raise ConfigError(f"learner.{name} is {quoted(value)}, expected {count}.")
    changed = [with_settings(learner.config, {name: x}) for x in values.reshape(-1).tolist()]
    for one in changed:
        check(one, "learner.")
    if members is not None:
        members.settings[name].copy_(values)
        return
    learner.config = changed[0]
    _write_setting(learner, name, float(values))


def _as_tensor(value: Any) -> Tensor | None:
    """Returns the value as a tensor, or None if it does not hold numbers."""
    try:
        return torch.as_tensor(value, dtype=torch.float64).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        return None


def _write_setting(learner: Any, name: str, value: float) -> None:
    """Writes a setting to the optimizers and losses that read it."""
    if name in learner.optimizer_of:
        optimizer = learner.optimizer_of[name]
        optimizer.param_groups[0]["lr"] = value
        optimizer.lr.fill_(value)
    if name == "entropy_coeff":
        for loss in learner.losses.values():
            loss.entropy_coeff.fill_(value)


def _read_setting(config: Any, name: str) -> float:
    for part in name.split("."):
        config = getattr(config, part)
    return float(config)
