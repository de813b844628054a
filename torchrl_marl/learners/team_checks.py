"""Checks of what a batch shows: rivals, and agents that take turns."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Sequence
from itertools import combinations
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_marl.errors import ConfigError
from torchrl_marl.functional import masked_mean
from torchrl_marl.specs import GroupSpec

__all__ = [
    "acts_in_turns",
    "check_cooperative",
    "check_cooperative_agents",
    "check_turn_based",
    "refuse_apart",
    "rivals_among",
    "warn_of_turns",
]

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


def check_cooperative(groups: Collection[GroupSpec], batch: TensorDictBase) -> None:
    """Refuses a mixer of groups of which one loses what the other earns, in its first batch.

    Waits for the device.
    """
    found = _rival_groups(list(groups), batch)
    if found is not None:
        one, other, together = found
        raise ConfigError(
            f"groups {one!r} and {other!r} compete: their rewards have a correlation of "
            f"{together:.2f} in the first batch, expected groups that earn together where "
            "learner.mixer.over is 'team'; use learner.mixer.over=group."
        )


def check_cooperative_agents(
    groups: Iterable[GroupSpec], batch: TensorDictBase, instead: str
) -> None:
    """Refuses a mixer of agents of one group of which one loses what the other earns.

    Waits for the device.

    Args:
        groups (iterable of GroupSpec): each with a mixer.
        batch (TensorDictBase): the first, ``[E, T]``.
        instead (str): the setting with which nothing is mixed.

    Raises:
        ConfigError: naming two of them.
    """
    for group in groups:
        found = _rival_agents(group, batch)
        if found is not None:
            one, other, together = found
            raise ConfigError(
                f"group {group.name!r}: its agents {one!r} and {other!r} compete, with rewards of "
                f"a correlation of {together:.2f} in the first batch, expected agents that earn "
                f"together where one value is made of theirs; use {instead}."
            )


def rivals_among(groups: Iterable[GroupSpec], batch: TensorDictBase) -> tuple[str, ...]:
    """Returns the names of two groups, or of two agents of one, that compete; empty without such.

    Args:
        groups (iterable of GroupSpec): all that there are.
        batch (TensorDictBase): ``[E, T]``.

    Examples:
        >>> from torchrl_marl import TeamSpec
        >>> from torchrl_marl.collectors import RolloutCollector
        >>> from torchrl_marl.envs.toy import ZeroSum
        >>> env = ZeroSum(8, seed=0)
        >>> batch = RolloutCollector(env, frames_per_batch=80).next()
        >>> rivals_among(TeamSpec.from_env(env).groups.values(), batch)
        ('first', 'second')
    """
    groups = list(groups)
    found = [_rival_groups(groups, batch), *(_rival_agents(group, batch) for group in groups)]
    return next((pair[:2] for pair in found if pair is not None), ())


def _rival_groups(
    groups: Sequence[GroupSpec], batch: TensorDictBase
) -> tuple[str, str, float] | None:
    rewards = (group.data(batch.get("next")).get("reward", None) for group in groups)
    earned = [
        masked_mean(reward, group.living(batch), dim=-2).flatten()
        for group, reward in zip(groups, rewards)
        if reward is not None
    ]
    if len(earned) < len(groups):
        return None  # the team has one reward
    return _least_together([group.name for group in groups], earned)


def _rival_agents(group: GroupSpec, batch: TensorDictBase) -> tuple[str, str, float] | None:
    reward = group.data(batch.get("next")).get("reward", None)
    if reward is None or group.n_agents < 2:
        return None
    reward, alive = reward.squeeze(-1), group.living(batch)
    if alive is not None:  # only while all are there
        reward = torch.where(alive.all(-1, keepdim=True), reward, 0.0)
    return _least_together(group.agent_names, list(reward.flatten(0, -2).unbind(-1)))


def _least_together(
    names: Sequence[str], earned: Sequence[Tensor]
) -> tuple[str, str, float] | None:
    """Returns the first two that compete, and the correlation of what they earn, ``[X]``."""
    if len(earned) < 2 or earned[0].numel() < 2:
        return None
    together = torch.corrcoef(torch.stack(list(earned)).float()).tolist()
    for i, j in combinations(range(len(names)), 2):
        if together[i][j] < _RIVALS:
            return names[i], names[j], together[i][j]
    return None


def acts_in_turns(group: GroupSpec, batch: TensorDictBase) -> Tensor:
    """Returns whether an agent waits after it has acted, in one episode; waits for no device.

    Who is not born yet waits, too, but has not acted; who is dead does not wait.

    Args:
        group (GroupSpec): whose agents.
        batch (TensorDictBase): ``[E, T]``, with masks and done flags.

    Returns:
        Tensor: bool, a scalar.
    """
    mask = None if group.mask_key is None else batch.get(group.mask_key, None)
    living = group.living(batch)
    if mask is None or living is None:
        return torch.zeros((), dtype=torch.bool, device=batch.device)
    goes_on = ~batch.get(("next", "done"))[..., :-1, :]
    waits = living[..., 1:, :] & ~mask[..., 1:, :]
    return (mask[..., :-1, :] & waits & goes_on).any()


def check_turn_based(groups: Iterable[GroupSpec], batch: TensorDictBase, config: Any) -> None:
    """Refuses turns with ``bootstrap="agent"``, for what does not credit them; else warns of them.

    Args:
        groups (iterable of GroupSpec): that are trained.
        batch (TensorDictBase): ``[E, T]``.
        config (TrainedConfig): the algorithm, and how agents are credited.

    Raises:
        ConfigError: agents act in turns or at their own pace.
    """
    groups = list(groups)
    warn_of_turns(groups, batch, config.bootstrap)
    for group in groups if config.bootstrap == "agent" else ():
        if bool(acts_in_turns(group, batch)):
            raise ConfigError(
                f"group {group.name!r}: agents act in turns or at their own pace, which "
                f"{config.algorithm} does not yet credit with bootstrap=agent; use "
                "algorithm=mappo, or bootstrap=team."
            )


def warn_of_turns(groups: Iterable[GroupSpec], batch: TensorDictBase, bootstrap: str) -> None:
    """Warns of ``bootstrap="team"`` where agents act in turns or at their own pace.

    Args:
        groups (iterable of GroupSpec): that are trained.
        batch (TensorDictBase): ``[E, T]``.
        bootstrap (str): how they are credited.
    """
    if bootstrap != "team":
        return
    for group in groups:
        if bool(acts_in_turns(group, batch)):
            warnings.warn(
                f"group {group.name!r}: agents act in turns or at their own pace, but "
                "learner.bootstrap is 'team', which knows no turns: what an agent earns while it "
                "waits is not credited to its last move; use learner.bootstrap=agent.",
                stacklevel=2,
            )
            return
