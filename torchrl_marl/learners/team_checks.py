"""Checks of a batch: agents that compete, and agents that act in turns."""

from __future__ import annotations

import math
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
    "refuse_separate_groups",
    "rivals_among",
    "warn_of_turns",
]

_RIVAL_CORRELATION = -0.5  # groups compete if their rewards' correlation is below this value
_ROUNDING = 1e-6  # differences below this fraction of the largest reward do not count
_CERTAINTY = -3.3  # Fisher's z of a correlation that chance gives in one of 2,000 cases


def refuse_separate_groups(trained: Iterable[str]) -> None:
    """Refuses one mixer for groups that cannot be trained as one.

    Args:
        trained (iterable of str): names of the groups that are trained; groups that are joined into
            one have one name.

    Raises:
        ConfigError: there is more than one name.
    """
    names = list(trained)
    if len(names) > 1:
        raise ConfigError(
            f"groups {', '.join(names)}: their actions are of different types, expected one type "
            "where learner.mixer.over is 'team'; use learner.mixer.over=group."
        )


def check_cooperative(groups: Collection[GroupSpec], batch: TensorDictBase) -> None:
    """Refuses one mixer for groups with opposed rewards; waits for the device."""
    found = _rival_groups(list(groups), batch)
    if found is not None:
        one, other, together = found
        raise ConfigError(
            f"groups {one!r} and {other!r} compete: their rewards have a correlation of "
            f"{together:.2f} in the first batch, expected cooperative groups where "
            "learner.mixer.over is 'team'; use learner.mixer.over=group."
        )


def check_cooperative_agents(
    groups: Iterable[GroupSpec], batch: TensorDictBase, instead: str
) -> None:
    """Refuses a mixer for agents of one group with opposed rewards; waits for the device.

    Args:
        groups (iterable of GroupSpec): groups, each of which has a mixer.
        batch (TensorDictBase): the first batch, ``[E, T]``.
        instead (str): the setting without a mixer, to suggest in the message.

    Raises:
        ConfigError: agents compete; the message names two of them.
    """
    for group in groups:
        found = _rival_agents(group, batch)
        if found is not None:
            one, other, together = found
            raise ConfigError(
                f"group {group.name!r}: its agents {one!r} and {other!r} compete: their rewards "
                f"have a correlation of {together:.2f} in the first batch, expected cooperative "
                f"agents under one mixer; use {instead}."
            )


def rivals_among(groups: Iterable[GroupSpec], batch: TensorDictBase) -> tuple[str, ...]:
    """Returns the names of two groups that compete, or of two agents of a group; empty if none do.

    Args:
        groups (iterable of GroupSpec): all groups of the environment.
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
        masked_mean(reward, group.living(batch), dim=-2).squeeze(-1)
        for group, reward in zip(groups, rewards)
        if reward is not None
    ]
    if len(earned) < len(groups):
        return None  # the team has one reward
    return _find_rivals([group.name for group in groups], earned)


def _rival_agents(group: GroupSpec, batch: TensorDictBase) -> tuple[str, str, float] | None:
    reward = group.data(batch.get("next")).get("reward", None)
    if reward is None or group.n_agents < 2:
        return None
    reward, alive = reward.squeeze(-1), group.living(batch)
    if alive is not None:  # only steps in which all agents are alive
        reward = torch.where(alive.all(-1, keepdim=True), reward, 0.0)
    return _find_rivals(group.agent_names, list(reward.unbind(-1)))


def _find_rivals(names: Sequence[str], earned: Sequence[Tensor]) -> tuple[str, str, float] | None:
    """Returns the first two names with opposed rewards, and the rewards' correlation.

    The changes from step to step must be opposed, too: the rewards of independent agents are often
    correlated by trends, such as that one agent approaches its goal while another one leaves it.

    Shapes:
        - earned: ``[*B, T]`` for each name
    """
    rewards = torch.stack(list(earned)).double()
    flat = rewards.flatten(1)
    levels = flat - flat[:, :1]
    changes = rewards.diff(dim=-1).flatten(1) if rewards.shape[-1] > 1 else levels
    number = changes.shape[1]
    if len(rewards) < 2 or number < 4:
        return None
    largest = flat.abs().amax(-1, keepdim=True)
    of_levels, of_changes = (_correlations(values, largest) for values in (levels, changes))
    limit = min(_RIVAL_CORRELATION, math.tanh(_CERTAINTY / math.sqrt(number - 3)))
    for i, j in combinations(range(len(names)), 2):
        if of_levels[i][j] < _RIVAL_CORRELATION and of_changes[i][j] < limit:
            return names[i], names[j], of_levels[i][j]
    return None


def _correlations(values: Tensor, largest: Tensor) -> list[list[float]]:
    """Returns correlations, NaN of constants; rounding would correlate equal rewards by 1 or -1.

    Args:
        values (Tensor): rewards minus the first, or changes, ``[K, F]``.
        largest (Tensor): size of the largest reward, ``[K, 1]``.
    """
    counts = values.abs() > _ROUNDING * largest
    return torch.corrcoef(torch.where(counts, values, 0.0)).tolist()


def acts_in_turns(group: GroupSpec, batch: TensorDictBase) -> Tensor:
    """Returns whether an agent waits after acting in an episode; does not wait for the device.

    Agents that are not born yet have not acted, and dead agents do not wait.

    Args:
        group (GroupSpec): the group of the agents.
        batch (TensorDictBase): ``[E, T]``, with masks and done flags.

    Returns:
        Tensor: bool, a scalar.
    """
    mask = None if group.mask_key is None else batch.get(group.mask_key, None)
    living = group.living(batch)
    if mask is None or living is None:
        return torch.zeros((), dtype=torch.bool, device=batch.device)
    continues = ~batch.get(("next", "done"))[..., :-1, :]
    waits = living[..., 1:, :] & ~mask[..., 1:, :]
    return (mask[..., :-1, :] & waits & continues).any()


_CREDITS_TURNS = "learner.algorithm=mappo with learner.bootstrap=agent"  # of other algorithms


def check_turn_based(groups: Iterable[GroupSpec], batch: TensorDictBase, config: Any) -> None:
    """Refuses ``bootstrap="agent"`` if agents act in turns; warns of ``bootstrap="team"``.

    Args:
        groups (iterable of GroupSpec): groups that are trained.
        batch (TensorDictBase): ``[E, T]``.
        config (TrainedConfig): settings of the learner.

    Raises:
        ConfigError: agents act in turns or at different rates.
    """
    groups = list(groups)
    warn_of_turns(groups, batch, config.bootstrap, fix=_CREDITS_TURNS)
    for group in groups if config.bootstrap == "agent" else ():
        if bool(acts_in_turns(group, batch)):
            raise ConfigError(
                f"group {group.name!r}: agents act in turns or at their own pace, which "
                f"{config.algorithm} does not yet credit with bootstrap=agent; use "
                "algorithm=mappo, or bootstrap=team."
            )


def warn_of_turns(
    groups: Iterable[GroupSpec],
    batch: TensorDictBase,
    bootstrap: str,
    fix: str = "learner.bootstrap=agent",
) -> None:
    """Warns of ``bootstrap="team"`` if agents act in turns or at different rates.

    Args:
        groups (iterable of GroupSpec): groups that are trained.
        batch (TensorDictBase): ``[E, T]``.
        bootstrap (str): value of the setting ``bootstrap``.
        fix (str): settings of a learner that credits turns.
    """
    if bootstrap != "team":
        return
    for group in groups:
        if bool(acts_in_turns(group, batch)):
            warnings.warn(
                f"group {group.name!r}: agents act in turns or at their own pace, but "
                "learner.bootstrap is 'team', which ignores turns: rewards while an agent waits "
                f"are not credited to its last action; use {fix}.",
                stacklevel=2,
            )
            return
