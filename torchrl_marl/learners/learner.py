"""The protocol of a learner: what training and collecting ask of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase

from torchrl_marl.specs import GroupSpec

__all__ = ["LEARNER_PARTS", "Actors", "Learner"]


class Actors(Protocol):
    """A mapping from names of groups to their actors, a ``ModuleDict`` for one."""

    def __getitem__(self, name: str) -> TensorDictModuleBase: ...  # noqa: D105

    def values(self) -> Iterable[TensorDictModuleBase]: ...  # noqa: D102


class Learner(Protocol):
    """Trains one or more groups of equal settings, on the batches of a collector.

    Made as ``Learner(groups, config, team=team, device=device, execution=execution)`` by
    :func:`~torchrl_marl.learners.build_learners`. The loop of training asks no learner what it is:
    learners of several kinds train on one batch, each its groups. A class that inherits from this
    one has what stands here, and overrides what it needs.

    Attributes:
        groups (mapping): names of the groups that it trains -> their specs.
        actors (mapping): names of the groups -> their actors, which collectors use as they are.
        remembered (sequence of str): what a batch has for networks with memory or communication.
        over_ranks (bool): it can learn as one with the same learner of other processes
            (:mod:`torchrl_marl.runtime.ranks`).
    """

    groups: Mapping[str, GroupSpec]
    actors: Any  # of the form of Actors
    remembered: Sequence[str] = ()
    over_ranks: bool = False

    def set_progress(self, fraction: float) -> None:
        """Moves the schedules to a fraction, 0 to 1, of the run."""

    def learn(self, batch: TensorDictBase) -> TensorDict:
        """Trains on a batch ``[E, T]``; returns metrics ``(group, name)`` that stay tensors.

        The batch may gain entries under the learner's groups, and loses none.
        """

    def cut(self) -> None:
        """Forgets running episodes: the next batch does not go on with those of the last."""

    def use_shards(self, own: range, total: int, seed: int) -> None:
        """Draws minibatches of parts of every shard of a run from now on.

        Args:
            own (range): the shards of this process.
            total (int): number of shards of the run.
            seed (int): of the draws.
        """

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that resuming needs, such as the optimizer's state."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any:
        """Goes on from a saved state."""


LEARNER_PARTS = sorted(
    name for name in {*vars(Learner), *Learner.__annotations__} if not name.startswith("_")
)
"""Names of what a learner has."""
