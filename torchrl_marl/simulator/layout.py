"""The nesting of a TensorDict's leaves, to flatten it for a graph and to build it again.

Shapes: E envs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDict, TensorDictBase
from torch import Tensor

from torchrl_marl.errors import CaptureError

__all__ = ["TensorDictLayout"]


class TensorDictLayout:
    """The keys of a TensorDict ``[E]``, and the batch sizes of the TensorDicts in it.

    Args:
        example (TensorDictBase): what is to be taken apart.

    Raises:
        CaptureError: a group that is stacked lazily.

    Examples:
        >>> td = TensorDict({"done": torch.zeros(3, 1),
        ...                  "cats": TensorDict({"reward": torch.ones(3, 2, 1)}, [3, 2])}, [3])
        >>> nesting = TensorDictLayout(td)
        >>> nesting.keys
        [('cats', 'reward'), 'done']
        >>> nesting.build(nesting.leaves(td), [3])["cats"].batch_size
        torch.Size([3, 2])
    """

    def __init__(self, example: TensorDictBase) -> None:
        self.device = example.device
        self._batch = example.batch_size
        self.keys: list[NestedKey] = []
        # TensorDicts within -> their batch dims beyond those of the whole.
        self.inner: dict[tuple[str, ...], torch.Size] = {}
        self._enter(example, ())

    @classmethod
    def of(
        cls,
        keys: Sequence[NestedKey],
        inner: dict[tuple[str, ...], torch.Size],
        device: torch.device | None,
    ) -> TensorDictLayout:
        """Builds a layout from another one's attributes."""
        nesting = cls(TensorDict({}, [], device=device))
        nesting.keys, nesting.inner = list(keys), dict(inner)
        return nesting

    def _enter(self, td: TensorDictBase, path: tuple[str, ...]) -> None:
        if isinstance(td, LazyStackedTensorDict):
            raise CaptureError(
                f"{'.'.join(path)!r} is stacked lazily; torchrl_marl.envs.PadAgents makes it dense"
            )
        for name in sorted(td.keys()):
            value = td.get(name)
            if isinstance(value, TensorDictBase):
                self.inner[*path, name] = value.batch_size[len(self._batch) :]
                self._enter(value, (*path, name))
            elif isinstance(value, Tensor):
                self.keys.append((*path, name) if path else name)

    def leaves(self, td: TensorDictBase) -> list[Tensor]:
        """Returns the tensors of a TensorDict that is nested like the example."""
        return [td.get(key) for key in self.keys]

    def build(self, leaves: Sequence[Tensor], batch_size: Sequence[int]) -> TensorDict:
        """Builds the TensorDict of these leaves.

        Args:
            leaves (sequence of Tensor): in the order of :attr:`keys`.
            batch_size (sequence of int): the leaves' leading dims, such as ``[E, T]``.
        """
        made: dict[tuple[str, ...], TensorDict] = {}
        for path, own in {(): (), **self.inner}.items():
            size = torch.Size((*batch_size, *own))
            made[path] = TensorDict._new_unsafe({}, batch_size=size, device=self.device)
            if path:
                made[path[:-1]]._tensordict[path[-1]] = made[path]
        for key, leaf in zip(self.keys, leaves):
            path = key if isinstance(key, tuple) else (key,)
            made[path[:-1]]._tensordict[path[-1]] = leaf
        return made[()]
