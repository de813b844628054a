"""Protocol of the collectors that training uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from tensordict import TensorDictBase
from torch import Tensor

__all__ = ["Collector", "Interrupted"]


class Interrupted(Exception):
    """Raised if the user interrupts the run while it waits for a batch."""


@runtime_checkable
class Collector(Protocol):
    """Steps environments with a policy and returns batches ``[E, T]``.

    Episodes continue from one batch to the next. The environments may be in this process, in other
    processes or on other machines, and may run eagerly or as graphs. Training code does not depend
    on this.

    Attributes:
        follows (bool): whether each row of a batch continues the episode in the same row of the
            last batch.
        renewed (Tensor, optional): mask of the envs that lost their running episodes before the
            last batch, bool ``[E]``; None if no env did.
    """

    follows: bool
    renewed: Tensor | None

    @property
    def frames(self) -> int:
        """Number of environment steps so far."""

    @property
    def counters(self) -> Mapping[str, int]:
        """Counts of events, such as restarts, for the metrics."""

    def rollout(self) -> TensorDictBase:
        """Collects one batch.

        Raises:
            NonFiniteError: an entry of the environment is NaN or infinite. Some collectors check
                this only in :meth:`finish`.
        """

    def finish(self, batch: TensorDictBase) -> None:
        """Checks a batch that has been learned from, and prepares the next one.

        Raises:
            NonFiniteError: an entry of the environment is NaN or infinite.
            GraphCheckError: a check of a simulator failed in the batch.
        """

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for resuming in mid-episode, including ``frames``."""

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restores a saved state; an empty one starts new episodes.

        Returns:
            bool: whether episodes continue.
        """

    def shutdown(self) -> None:
        """Closes the environments."""
