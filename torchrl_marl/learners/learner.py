"""The protocol of a learner, used by training and by collectors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase

from torchrl_marl.errors import SpecError
from torchrl_marl.specs import GroupSpec

__all__ = ["LEARNER_PARTS", "Actors", "Learner", "check_learner"]


class Actors(Protocol):
    """A mapping from group names to actors, such as a ``ModuleDict``."""

    def __getitem__(self, name: str) -> TensorDictModuleBase: ...  # noqa: D105

    def values(self) -> Iterable[TensorDictModuleBase]: ...  # noqa: D102


class Learner(Protocol):
    """Trains one or more groups with the same settings on the batches of a collector.

    :func:`~torchrl_marl.learners.build_learners` builds it as
    ``Learner(groups, config, team=team, device=device, execution=execution)``. The training loop
    does not depend on the kind of learner: learners of several kinds can train on the same batch,
    each for its own groups. A subclass inherits the defaults below and overrides the methods that
    it needs.

    Attributes:
        groups (mapping): names of the groups that it trains -> their specs.
        actors (mapping): names of the groups -> their actors; collectors use the same actors, not
            copies.
        remembered (sequence of str): entries of a batch that networks with memory or communication
            read.
        over_ranks (bool): whether several ranks can train it together
            (:mod:`torchrl_marl.runtime.ranks`).
    """

    groups: Mapping[str, GroupSpec]
    actors: Any  # a mapping such as Actors
    remembered: Sequence[str] = ()
    over_ranks: bool = False

    def set_progress(self, fraction: float) -> None:
        """Moves the schedules to a fraction, 0 to 1, of the run.

        A run calls it before a batch is collected, and again before its update.
        """

    def learn(self, batch: TensorDictBase) -> TensorDict:
        """Trains on a batch ``[E, T]``; returns metrics ``(group, name)`` as tensors.

        A learner may add entries to the batch under its groups, but removes none.
        """

    def cut(self) -> None:
        """Forgets running episodes, because the next batch does not continue them."""

    def use_shards(self, own: range, total: int, seed: int) -> None:
        """Makes each later minibatch consist of equal parts from all shards of a run.

        Args:
            own (range): shards of this process.
            total (int): number of shards of the run.
            seed (int): random seed of the minibatches.
        """

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that resuming needs, such as the optimizer's state."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any:
        """Restores a saved state."""


LEARNER_PARTS = sorted(
    name for name in {*vars(Learner), *Learner.__annotations__} if not name.startswith("_")
)
"""Names of the attributes and methods of a learner."""


def check_learner(learner: Any) -> Any:
    """Returns a learner, and refuses one that lacks methods or attributes of :class:`Learner`.

    Args:
        learner (Learner): the learner of an algorithm, possibly of your own.

    Raises:
        SpecError: a part is missing, or only inherited from :class:`Learner`, where it does
            nothing; the message names it.
    """
    name, bases = type(learner).__name__, type(learner).__mro__
    missing = [part for part in LEARNER_PARTS if not hasattr(learner, part)]
    if missing:
        fix = "set them in __init__" if Learner in bases else f"let it inherit from {_LEARNER}"
        raise SpecError(f"{name} lacks {', '.join(missing)}; {fix} as well.")
    idle = [part for part in _WRITTEN if getattr(type(learner), part) is vars(Learner)[part]]
    if idle:
        raise SpecError(
            f"{name} inherits {', '.join(idle)} from Learner, where nothing is done; define what "
            "is missing, and inherit from torch.nn.Module before Learner."
        )
    return learner


_LEARNER = "torchrl_marl.learners.Learner"
_WRITTEN = ("learn", "load_state_dict", "state_dict")  # Learner has no useful default of these
