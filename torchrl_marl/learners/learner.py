"""The protocol of a learner: what training and collecting ask of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase

from torchrl_marl.specs import GroupSpec

__all__ = ["Actors", "Learner"]


class Actors(Protocol):
    """A mapping from names of groups to their actors, a ``ModuleDict`` for one."""

    def __getitem__(self, name: str) -> TensorDictModuleBase: ...  # noqa: D105

    def values(self) -> Iterable[TensorDictModuleBase]: ...  # noqa: D102


class Learner(Protocol):
    """Trains one or more groups of equal settings, on the batches of a collector.

    Made as ``Learner(groups, config, team=team, device=device, execution=execution)`` by
    :func:`~torchrl_marl.learners.build_learners`. The loop of training asks no learner what it is:
    learners of several kinds train on one batch, each its groups.

    A learner may have more: ``use_shards(own, total, seed)``, after which it draws minibatches of
    parts of every shard of a run, and ``over_ranks = True``, if it can then learn as one with the
    same learner of other processes (:mod:`torchrl_marl.runtime.ranks`).

    Attributes:
        groups (mapping): names of the groups that it trains -> their specs.
        actors (mapping): names of the groups -> their actors, which collectors use as they are.
    """

    groups: Mapping[str, GroupSpec]
    actors: Any  # of the form of Actors

    def set_progress(self, fraction: float) -> None:
        """Moves the schedules to a fraction, 0 to 1, of the run."""

    def learn(self, batch: TensorDictBase) -> TensorDict:
        """Trains on a batch ``[E, T]``; returns metrics ``(group, name)`` that stay tensors.

        The batch may gain entries under the learner's groups, and loses none.
        """

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that resuming needs, such as the optimizer's state."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any:
        """Goes on from a saved state."""
