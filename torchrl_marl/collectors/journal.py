"""What shards have played since their last snapshots, so that they can play it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["Entry", "Journal", "Weights"]

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Entry:
    """A batch that was begun."""

    weights: Weights
    """Of the policy that plays it."""
    with_state: bool = False
    """Whether the shards' states behind it are wanted."""


class Journal:
    """Snapshots of all shards, and the batches that were begun after them.

    From both a shard comes back to where it is, wherever it is put: it plays the batches of
    ``entries`` again, of which the first ``taken`` have been learned from already.

    Args:
        keeps (bool): False where a shard that is lost begins anew; what was taken is then
            forgotten.

    Attributes:
        snapshots (list of dict, optional): of every shard; None: as they were made.
        entries (list of Entry): the batches begun since.
        taken (int): how many of these batches have been taken.

    Examples:
        >>> journal = Journal()
        >>> journal.begin(Entry({})), journal.begin(Entry({})), journal.take(None)
        (None, None, None)
        >>> len(journal.entries), journal.taken
        (2, 1)
        >>> journal.take([{"random": 0}])
        >>> len(journal.entries), journal.taken
        (0, 0)
    """

    def __init__(self, keeps: bool = True) -> None:
        self.keeps = keeps
        self.snapshots: list[dict[str, Any]] | None = None
        self.entries: list[Entry] = []
        self.taken = 0

    def begin(self, entry: Entry) -> None:
        """Notes a batch that is begun."""
        self.entries.append(entry)

    def take(self, snapshots: Sequence[dict[str, Any]] | None) -> None:
        """Notes that the oldest batch was taken.

        Args:
            snapshots (sequence of dict, optional): the shards' states behind it.
        """
        self.taken += 1
        if snapshots is not None:
            self.snapshots = list(snapshots)
        if snapshots is not None or not self.keeps:
            del self.entries[: self.taken]
            self.taken = 0

    def state_dict(self) -> dict[str, Any]:
        """Returns what shards are put back from."""
        entries = [dict(entry.weights) for entry in self.entries]
        return {"shards": self.snapshots, "weights": entries, "taken": self.taken}
