"""The settings that differ between the members of a population, as tensors.

Shapes: P members.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchrl_marl.errors import ConfigError
from torchrl_marl.learners.population_config import varying_of

__all__ = ["settings_of_members"]


def settings_of_members(
    config: Any,
    n_members: int,
    given: Mapping[str, Tensor],
    device: torch.device | str | None = None,
) -> dict[str, Tensor]:
    """Returns the learning rates of all members, and what else differs, ``[P]`` each.

    Args:
        config (LearnerConfig): how they learn.
        n_members (int): number P of members, 2 or more.
        given (mapping): name -> a setting of each member, ``[P]``.
        device (torch.device, optional): of the tensors.

    Raises:
        ConfigError: less than two members, or a setting that cannot differ.

    Examples:
        >>> from torchrl_marl.learners.config import OnPolicyConfig
        >>> settings_of_members(OnPolicyConfig(lr=0.5), 2, {"gamma": torch.tensor([0.5, 0.25])})
        {'lr': tensor([0.5000, 0.5000]), 'gamma': tensor([0.5000, 0.2500])}
    """
    if n_members < 2:
        raise ConfigError(f"n_members is {n_members}, expected 2 or more.")
    known = varying_of(config)
    for name, values in given.items():
        if name not in known or len(values) != n_members:
            raise ConfigError(
                f"settings[{name!r}] has {len(values)} values, expected {n_members}, one for "
                f"each member, of {', '.join(known)}."
            )
    rates = [name for name in known if name == "lr" or name.endswith("_lr")]
    found = {name: torch.full((n_members,), getattr(config, name)) for name in rates} | dict(given)
    return {
        name: torch.as_tensor(values, dtype=torch.float32).to(device).clone()
        for name, values in found.items()
    }
