"""The protocol of a collector: what training asks of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from tensordict import TensorDictBase
from torch import Tensor

__all__ = ["Collector", "Interrupted"]


class Interrupted(Exception):
    """Waiting for a batch was ended from outside."""


@runtime_checkable
class Collector(Protocol):
    """Steps environments with a policy and returns batches ``[E, T]``.

    Episodes go on from one batch to the next. Where the environments are, in this process, in
    others or on other machines, and whether graphs step them, is the collector's own affair.

    Attributes:
        follows (bool): whether rows go on from those of the batch before.
        renewed (Tensor, optional): the envs whose running episodes were lost before the last batch,
            bool ``[E]``; None: none were.
    """

    follows: bool
    renewed: Tensor | None

    @property
    def frames(self) -> int:
        """Env steps so far."""

    @property
    def counters(self) -> Mapping[str, int]:
        """What befell the environments, for the metrics."""

    def rollout(self) -> TensorDictBase:
        """Collects one batch.

        Raises:
            NonFiniteError: what an environment gave is NaN or infinite, as far as it was looked at.
        """

    def finish(self, batch: TensorDictBase) -> None:
        """Checks a batch that has been learned from, and prepares the next one.

        Raises:
            NonFiniteError: what an environment gave is NaN or infinite.
            GraphCheckError: a check of a simulator failed in the batch.
        """

    def state_dict(self) -> dict[str, Any]:
        """Returns what is needed to go on in mid-episode, with ``frames``."""

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Goes on from a saved state; from an empty one, new episodes begin.

        Returns:
            bool: whether episodes go on where they were.
        """

    def shutdown(self) -> None:
        """Closes the environments."""
