"""Reads batches from a dataset.

Shapes: R rows, T steps of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_marl.collectors.dataset import Dataset
from torchrl_marl.errors import DatasetError, quoted

__all__ = ["DatasetCollector"]


class DatasetCollector:
    """Returns a dataset's steps as batches ``[R, T]``, repeatedly.

    Each row of a batch continues the same row of the last batch. A row ends in the last step of the
    dataset, which is marked as truncated, and then starts over.

    Args:
        dataset (Dataset): the recorded steps.
        n_rows (int): number of rows R.
        frames_per_batch (int): steps of a batch, a multiple of R.
        device (torch.device, optional): device of the batches.
        reward_scale (float): factor of the rewards.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from tensordict import TensorDict
        >>> from torchrl_marl.collectors.dataset import write_dataset
        >>> done = torch.tensor([[False], [True], [True], [True]])
        >>> steps = TensorDict({"x": torch.arange(4), "next": {"done": done}}, [4])
        >>> dataset = write_dataset(Path(tempfile.mkdtemp(), "data"), steps, {})
        >>> DatasetCollector(dataset, n_rows=2, frames_per_batch=4).rollout()["x"]
        tensor([[0, 1],
                [2, 3]])
    """

    follows = True
    renewed: Tensor | None = None
    counters: Mapping[str, int] = {}

    def __init__(
        self,
        dataset: Dataset,
        n_rows: int,
        frames_per_batch: int,
        device: torch.device | str | None = None,
        reward_scale: float = 1.0,
    ) -> None:
        self.dataset, self.device, self.reward_scale = dataset, device, reward_scale
        self.index = dataset.rows(n_rows)
        self.n_steps = frames_per_batch // n_rows
        self.frames = 0

    def rollout(self) -> TensorDictBase:
        """Returns the next batch."""
        n_rows, length = self.index.shape
        first = self.frames // n_rows
        columns = torch.arange(first, first + self.n_steps) % length
        batch = self.dataset.steps[self.index[:, columns]]
        batch = batch.to(self.device) if self.device is not None else batch.clone()
        ends = (columns == length - 1).to(batch.device).reshape(1, -1, 1)
        done = batch.get(("next", "done"))
        if "truncated" in batch.get("next").keys():
            cut = batch.get(("next", "truncated")) | (ends & ~done)
            batch.set(("next", "truncated"), cut)
        batch.set(("next", "done"), done | ends)
        self._scale(batch.get("next"))
        self.frames += batch.numel()
        return batch

    def _scale(self, following: TensorDictBase) -> None:
        """Multiplies all rewards, in place."""
        if self.reward_scale != 1.0:
            for key, value in following.items(True, True):
                if (key if isinstance(key, str) else key[-1]) == "reward":
                    value.mul_(self.reward_scale)

    def finish(self, batch: TensorDictBase) -> None:
        """Does nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of steps read, and the digest of the dataset."""
        return {"frames": self.frames, "dataset": self.dataset.digest}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Continues after the steps that were read.

        Raises:
            DatasetError: the state belongs to another dataset.
        """
        if state.get("dataset", self.dataset.digest) != self.dataset.digest:
            raise DatasetError(
                f"dataset {quoted(str(self.dataset.folder))} is not the one that this run has read "
                "so far; put that one back, or start a new run."
            )
        self.frames = state.get("frames", self.frames)
        return True

    def shutdown(self) -> None:
        """Does nothing."""
