"""What cannot be under one mixer: groups that compete, and groups that are trained apart.

Shapes: E envs, T steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import combinations

import torch
from tensordict import TensorDictBase

from torchrl_marl.errors import ConfigError
from torchrl_marl.functional import masked_mean
from torchrl_marl.specs import GroupSpec

__all__ = ["refuse_apart", "refuse_rivals"]

_RIVALS = -0.5  # correlation of rewards below which groups compete


def refuse_apart(trained: Iterable[str]) -> None:
    """Refuses one mixer of groups that cannot be trained as one.

    Args:
        trained (iterable of str): names of what is trained, each of one or of several groups.

    Raises:
        ConfigError: there are several.
    """
    names = list(trained)
    if len(names) > 1:
        raise ConfigError(
            f"groups {', '.join(names)}: their actions are of different types, so that "
            "they are trained apart, expected one type where learner.mixer.over is 'team'; "
            "use learner.mixer.over=group."
        )


def refuse_rivals(groups: Collection[GroupSpec], batch: TensorDictBase) -> None:
    """Refuses a mixer of groups of which one loses what the other earns, in its first batch.

    Waits for the device.
    """
    rewards = (group.data(batch.get("next")).get("reward", None) for group in groups)
    earned = [
        masked_mean(reward, group.living(batch), dim=-2).flatten()
        for group, reward in zip(groups, rewards)
        if reward is not None
    ]
    if len(earned) < len(groups):
        return  # the team has one reward
    together = torch.corrcoef(torch.stack(earned))
    for (i, one), (j, other) in combinations(enumerate(groups), 2):
        if bool(together[i, j] < _RIVALS):
            raise ConfigError(
                f"groups {one.name!r} and {other.name!r} compete: their rewards have a correlation "
                f"of {together[i, j]:.2f} in the first batch, expected groups that earn together "
                "where learner.mixer.over is 'team'; use learner.mixer.over=group."
            )
