"""TorchRL's prioritized sampler over a sum tree in torch.

Shapes: C capacity, M indices.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.types import Device
from torchrl.data.replay_buffers.samplers import PrioritizedSampler
from torchrl.data.replay_buffers.storages import Storage
from torchrl.data.replay_buffers.utils import unravel_index

from torchrl_marl.functional.sum_tree import SumTree

__all__ = ["TreeSampler"]


class TreeSampler(PrioritizedSampler):
    r"""TorchRL's ``PrioritizedSampler`` without its compiled extension.

    Arguments, priorities, weights, keys and methods are those of TorchRL's sampler. Three things
    differ. Sums have double precision, and samples come from torch's random generator (or the
    buffer's), not numpy's. For an index given twice in one update, the larger priority counts.
    ``state_dict`` holds plain tensors, which ``torch.load`` reads with ``weights_only=True``.

    Args:
        max_capacity (int): capacity C of the buffer.
        alpha (float): exponent of the priorities; 0 samples uniformly.
        beta (float): exponent of the importance weights.
        eps (float): number added to every priority.
        dtype (torch.dtype): dtype of the importance weights.
        reduction (str): reduction over the errors of a trajectory: ``max``, ``min``, ``median`` or
            ``mean``.
        max_priority_within_buffer (bool): whether new rows get the highest priority in the buffer
            instead of the highest so far.
        device (torch.device, optional): device of the tree; default: the CPU, or the GPU of the
            storage.

    Raises:
        ValueError: a negative or infinite exponent.

    Reference: Schaul et al., 2016, https://arxiv.org/abs/1511.05952.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> buffer = TensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(100),
        ...     sampler=TreeSampler(100, alpha=1.0, beta=0.5),
        ...     priority_key="td_error",
        ...     batch_size=4,
        ... )
        >>> _ = buffer.extend(TensorDict({"x": torch.arange(10)}, [10]))
        >>> buffer.update_priority(torch.arange(10), torch.tensor([0.0] * 9 + [1.0]))
        >>> buffer.sample()["x"]
        tensor([9, 9, 9, 9])
    """

    def __init__(
        self,
        max_capacity: int,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        reduction: str = "max",
        max_priority_within_buffer: bool = False,
        device: Device = None,
    ) -> None:
        # Without TorchRL's constructor, which warns that its extension is missing.
        for name, value in (("alpha", alpha), ("beta", beta)):
            if not 0 <= value < math.inf:
                raise ValueError(f"TreeSampler: {name} is {value}, expected 0 or more, and finite.")
        self._max_capacity = max_capacity
        self._alpha, self._beta, self._eps = alpha, beta, eps
        self.reduction, self.dtype = reduction, dtype
        self._max_priority_within_buffer = max_priority_within_buffer
        self._device = None if device is None else torch.device(device)
        self._init()

    def _init(self) -> None:
        self._sum_tree = _Sums(self._max_capacity, self.dtype, self._device)
        self._min_tree = _Minima(self._sum_tree.tree)
        self._max_priority = None

    def sample(self, storage: Storage, batch_size: int) -> tuple[Any, dict[str, Tensor]]:
        """Returns indices sampled by priority, and ``priority_weight``.

        Raises:
            RuntimeError: an empty storage, one without priorities, or a priority of 0.
        """
        self._maybe_init_from_storage(storage)
        if len(storage) == 0:
            raise RuntimeError("Cannot sample from an empty storage.")
        tree = self._sum_tree.tree
        least = self._min_tree.least
        if least.device.type == "cpu" and not 0 < least < math.inf:  # does not wait for a GPU
            raise RuntimeError(
                f"TreeSampler: the least priority is {least.item()}, expected a number above 0."
            )
        uniform = torch.rand(
            batch_size, dtype=torch.float64, device=least.device, generator=self._rng
        )
        index = tree.sample(uniform)
        weight = (tree[index] / least).pow(-self._beta).to(self.dtype)
        if storage.ndim > 1:
            index = unravel_index(index, storage.shape)
        return index, {"priority_weight": weight}

    # --------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Returns exponents and priorities; the tree is saved as its values ``[C]``."""
        return {
            "_alpha": self._alpha,
            "_beta": self._beta,
            "_eps": self._eps,
            "_max_priority": self._max_priority,
            "_sum_tree": self._sum_tree.tree.values.clone(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a saved state.

        Raises:
            ValueError: the state of a buffer with another capacity.
        """
        values = state_dict["_sum_tree"]
        if len(values) != self._max_capacity:
            raise ValueError(
                f"TreeSampler: the state is of a capacity of {len(values)}, expected "
                f"{self._max_capacity}."
            )
        self._alpha, self._beta = state_dict["_alpha"], state_dict["_beta"]
        self._eps, self._max_priority = state_dict["_eps"], state_dict["_max_priority"]
        self._sum_tree.tree.fill(0, values)
        self._min_tree = _Minima(self._sum_tree.tree)

    def dumps(self, path: str | Path) -> None:
        """Writes the state into a folder."""
        Path(path).mkdir(exist_ok=True)
        torch.save(self.state_dict(), Path(path) / "sampler.pt")

    def loads(self, path: str | Path) -> None:
        """Reads the state from a folder."""
        self.load_state_dict(torch.load(Path(path) / "sampler.pt", weights_only=True))


class _Sums:
    """A sum tree with those methods of TorchRL's compiled tree that the sampler uses."""

    def __init__(self, capacity: int, dtype: torch.dtype, device: torch.device | None) -> None:
        self.tree, self.dtype = SumTree(capacity, device=device), dtype
        self.device = self.tree.total.device

    def __getitem__(self, index: Tensor) -> Tensor:
        return self.tree[index].to(self.dtype)

    def __setitem__(self, index: Tensor, value: Tensor) -> None:
        index = index.to(self.device).reshape(-1)
        self.tree.set(index, value.to(self.device).expand(index.shape))


class _Minima:
    """Minimum of a sum tree's positive values, level by level, with 128 children per node."""

    def __init__(self, tree: SumTree) -> None:
        self.tree, self._levels = tree, list[Tensor]()
        least = torch.where(tree.values > 0, tree.values, math.inf)
        while not self._levels or len(least) > 1:
            least = F.pad(least, (0, -len(least) % 128), value=math.inf).view(-1, 128)
            self._levels.append(least)
            least = least.amin(-1)

    @property
    def least(self) -> Tensor:
        """Minimum of all values, a scalar; infinity if none was set."""
        return self._levels[-1].amin()

    def __setitem__(self, index: Tensor, value: Tensor) -> None:
        index = index.to(self.tree.total.device).reshape(-1)
        least = self.tree[index]  # the value that was kept for an index given twice
        for level in self._levels:
            level.view(-1).index_copy_(0, index, least)
            index = index // level.shape[1]
            least = level.index_select(0, index).amin(-1)
