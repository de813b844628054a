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

# Attributes that say where the rows stand.
_POSITION_ATTRIBUTES = ("frames", "n_begun", "episode", "step")


class DatasetCollector:
    """Returns a dataset's steps as batches ``[R, T]``, repeatedly.

    Each row of a batch continues the same row of the last batch. A row that has read an episode to
    its end continues with the next episode that no row has read; after the last one, the first one
    follows. So all episodes are read whole, and equally often.

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
        >>> done = torch.tensor([[False], [True], [True], [True]])  # of 2, 1 and 1 steps
        >>> steps = TensorDict({"x": torch.arange(4), "next": {"done": done}}, [4])
        >>> dataset = write_dataset(Path(tempfile.mkdtemp(), "data"), steps, {})
        >>> DatasetCollector(dataset, n_rows=2, frames_per_batch=6).rollout()["x"]
        tensor([[0, 1, 0],
                [2, 3, 2]])
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
        self.n_steps = frames_per_batch // n_rows
        self.frames, self.n_begun = 0, n_rows
        self.episode = torch.arange(n_rows) % dataset.n_episodes  # of each row
        self.step = torch.zeros_like(self.episode)  # of that episode, to be read next

    def rollout(self) -> TensorDictBase:
        """Returns the next batch."""
        index = torch.stack([self._next_steps() for _ in range(self.n_steps)], 1)
        batch = self.dataset.steps[index]
        batch = batch.to(self.device) if self.device is not None else batch.clone()
        self._scale_rewards(batch.get("next"))
        self.frames += batch.numel()
        return batch

    def _next_steps(self) -> Tensor:
        """Returns the next step of each row, and moves on; episodes follow in turn."""
        index = self.dataset.starts[self.episode] + self.step
        ended = self.step + 1 == self.dataset.lengths[self.episode]
        following = (self.n_begun + ended.cumsum(0) - 1) % self.dataset.n_episodes
        self.episode = torch.where(ended, following, self.episode)
        self.step = torch.where(ended, 0, self.step + 1)
        self.n_begun += int(ended.sum())
        return index

    def _scale_rewards(self, following: TensorDictBase) -> None:
        """Multiplies all rewards, in place."""
        if self.reward_scale != 1.0:
            for key, value in following.items(True, True):
                if (key if isinstance(key, str) else key[-1]) == "reward":
                    value.mul_(self.reward_scale)

    def finish(self, batch: TensorDictBase) -> None:
        """Does nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of each row, and the digest of the dataset."""
        position = {name: getattr(self, name) for name in _POSITION_ATTRIBUTES}
        return {**position, "dataset": self.dataset.digest}

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
        for name in _POSITION_ATTRIBUTES:
            setattr(self, name, state.get(name, getattr(self, name)))
        return True

    def shutdown(self) -> None:
        """Does nothing."""
