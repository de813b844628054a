"""Copies of a population's members: what becomes of the others' rows.

Shapes: P members, R rows of a parameter.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from torchrl_marl.errors import ConfigError

__all__ = ["check_parents", "copy_rows", "copy_statistics", "statistics_of"]


def check_parents(parent: Tensor, n_members: int) -> None:
    """Refuses what says not whose copy each member becomes.

    Raises:
        ConfigError: another length, or numbers that are no members.
    """
    if parent.shape != (n_members,) or not set(parent.tolist()) <= set(range(n_members)):
        raise ConfigError(
            f"copy_members: parent is {parent.tolist()}, expected the number of a member, 0 to "
            f"{n_members - 1}, for each of {n_members}."
        )


def copy_rows(tensors: Iterable[Tensor], owner: Tensor, parent: Tensor) -> None:
    """Gives each member its parent's rows of tensors, in place.

    Args:
        tensors (iterable of Tensor): a parameter, and its optimizer's moments.
        owner (Tensor): whose each row is.
        parent (Tensor): whose copy each member becomes.

    Shapes:
        - each tensor: ``[R, ...]``; owner: ``[R]``; parent: ``[P]``

    Examples:
        >>> weight = torch.tensor([1.0, 2.0, 3.0, 4.0])
        >>> copy_rows([weight], torch.tensor([0, 1, 0, 1]), torch.tensor([1, 1]))
        >>> weight
        tensor([2., 2., 4., 4.])
    """
    rows = owner.argsort(stable=True).view(len(parent), -1)
    source = torch.empty_like(owner)
    source[rows] = rows[parent]
    for x in tensors:
        x.copy_(x[source])


def copy_statistics(statistics: Iterable[Tensor], parent: Tensor) -> None:
    """Gives each member its parent's statistics, which lie one member after the other."""
    for x in statistics:
        x.copy_(x.unflatten(0, (len(parent), -1))[parent].flatten(0, 1))


def statistics_of(learner: nn.Module, without: Iterable[Tensor] = ()) -> list[Tensor]:
    """Returns what a learner saves beside parameters; of a population, one after the other.

    Args:
        learner (nn.Module): of one or of many.
        without (iterable of Tensor): what is no statistic either.
    """
    left = {id(x) for x in (*learner.parameters(), *without)}
    saved = learner.state_dict(keep_vars=True).values()
    found = {id(x): x for x in saved if isinstance(x, Tensor) and id(x) not in left}
    return list(found.values())
