"""The protocol of a collector, used by training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from tensordict import TensorDictBase
from torch import Tensor

__all__ = ["Collector", "Interrupted"]


class Interrupted(Exception):
    """Raised when waiting for a batch is interrupted from outside."""


@runtime_checkable
class Collector(Protocol):
    """Steps environments with a policy and returns batches ``[E, T]``.

    Episodes continue from one batch to the next. The environments may be in this process, in others
    or on other machines, and run eagerly or as graphs; training does not depend on it.

    Attributes:
        follows (bool): whether rows continue those of the batch before.
        renewed (Tensor, optional): envs with running episodes lost before the last batch, bool
            ``[E]``; None if there are none.
    """

    follows: bool
    renewed: Tensor | None

    @property
    def frames(self) -> int:
        """Number of env steps so far."""

    @property
    def counters(self) -> Mapping[str, int]:
        """Counts of events, such as restarts, for the metrics."""

    def rollout(self) -> TensorDictBase:
        """Collects one batch.

        Raises:
            NonFiniteError: an entry of the environment is NaN or infinite, if already checked.
        """

    def finish(self, batch: TensorDictBase) -> None:
        """Checks a batch that has been learned from, and prepares the next one.

        Raises:
            NonFiniteError: an entry of the environment is NaN or infinite.
            GraphCheckError: a check of a simulator failed in the batch.
        """

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for resuming in mid-episode, with ``frames``."""

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restores a saved state; an empty one starts new episodes.

        Returns:
            bool: whether episodes continue.
        """

    def shutdown(self) -> None:
        """Closes the environments."""
