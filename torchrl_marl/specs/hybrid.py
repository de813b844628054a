"""Spec of actions that are choices and numbers at once.

Shapes: A action features, K choices and D numbers of an action; A = K + D.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchrl.data import Bounded, TensorSpec, Unbounded

__all__ = ["Hybrid"]


class Hybrid(TensorSpec):
    """Spec of hybrid actions: discrete choices and continuous numbers in one tensor of floats.

    An action is one vector: first the index of each choice, then the numbers. It is a plain tensor,
    so buffers, datasets and exports treat it as any other action.

    Args:
        branches (sequence of int): number of options of each choice.
        continuous (Bounded or Unbounded): spec of the numbers, of floats.

    Shapes:
        - continuous: ``[*, D]``; the spec itself: ``[*, A]``

    Raises:
        ValueError: there is no choice, or the numbers are not floats.

    Reference: Fan et al., 2019, https://arxiv.org/abs/1903.01344 (hybrid action spaces).

    Examples:
        >>> spec = Hybrid([3], Bounded(-1, 1, (2,)))  # one of three gears, and a force
        >>> spec.shape, spec.is_in(torch.tensor([2.0, -0.5, 1.0]))
        (torch.Size([3]), True)
        >>> spec.is_in(torch.tensor([1.5, 0.0, 0.0])), spec.is_in(torch.tensor([3.0, 0.0, 0.0]))
        (False, False)
    """

    def __init__(self, branches: Sequence[int], continuous: TensorSpec) -> None:
        counts = tuple(branches) if isinstance(branches, Iterable) else ()
        if not counts or any(int(n) != n or n < 1 for n in counts):
            raise ValueError(
                f"branches are {branches!r}, expected the number of options of each choice, "
                "such as [3]."
            )
        self.branches = tuple(map(int, counts))
        numbers = isinstance(continuous, (Bounded, Unbounded))
        found = f" {list(continuous.shape)} of {continuous.dtype}" if numbers else ""
        floats = numbers and continuous.dtype.is_floating_point
        if not floats or not continuous.ndim or not continuous.shape[-1]:
            raise ValueError(
                f"the numbers of a hybrid action are {type(continuous).__name__}{found}, "
                "expected Bounded or Unbounded [D] of floats; declare integers as choices."
            )
        self.continuous = continuous
        shape = torch.Size((*continuous.shape[:-1], len(self.branches) + continuous.shape[-1]))
        super().__init__(shape, None, continuous.device, continuous.dtype, "continuous")
        self.encode = self._encode_eager

    # ---------------------------------------------------------------------------------- values

    def rand(self, shape: Sequence[int] | None = None) -> Tensor:
        """Draws choices uniformly, and numbers as their spec does."""
        numbers = self.continuous.rand(torch.Size(shape or ()))
        size = (*numbers.shape[:-1], len(self.branches))
        drawn = torch.rand(size, dtype=self.dtype, device=self.device)
        return torch.cat([(drawn * self._numbers_of_options(drawn)).floor(), numbers], -1)

    def is_in(self, val: Tensor) -> bool:
        """Returns whether choices are indices of their options, and numbers are in their spec."""
        if val.dtype != self.dtype or val.shape[-self.ndim :] != self.shape:
            return False
        return bool(self.fits(val).all()) and bool(
            self.continuous.is_in(self._split_choices_and_numbers(val)[1])
        )

    def fits(self, val: Tensor) -> Tensor:
        """Returns a mask of the choices that are indices of their options, ``[*, K]``."""
        choice = self._split_choices_and_numbers(val)[0]
        return (
            (choice == choice.floor()) & (choice >= 0) & (choice < self._numbers_of_options(choice))
        )

    def _project(self, val: Tensor) -> Tensor:
        choice, numbers = self._split_choices_and_numbers(val)
        last = self._numbers_of_options(choice) - 1
        choice = torch.minimum(choice.round().clamp_min(0), last)
        return torch.cat([choice, self.continuous.project(numbers)], -1)

    def _split_choices_and_numbers(self, val: Tensor) -> Sequence[Tensor]:
        n = len(self.branches)
        return val.split([n, val.shape[-1] - n], -1)

    def _numbers_of_options(self, like: Tensor) -> Tensor:
        return torch.tensor(self.branches, dtype=like.dtype, device=like.device)

    def cardinality(self) -> float:  # type: ignore[override]
        """Returns infinity."""
        return float("inf")

    def index(self, index: Any, tensor_to_index: Any) -> Any:
        """Is not defined."""
        raise NotImplementedError("Indexing not implemented for Hybrid.")

    def enumerate(self, use_mask: bool = False) -> Any:
        """Is not defined."""
        raise NotImplementedError("Hybrid actions cannot be enumerated.")

    # ---------------------------------------------------------------------------------- shapes

    def expand(self, *shape: Any) -> Hybrid:
        """Returns the spec with larger batch dims."""
        return self._with_numbers(self.continuous.expand(self._shape_of_numbers(shape)))

    def squeeze(self, dim: int | None = None) -> Hybrid:
        """Returns the spec without batch dims of size 1."""
        if dim is None:
            return self._reshape([*(n for n in self.shape[:-1] if n != 1), self.shape[-1]])
        return self._with_numbers(self.continuous.squeeze(self._check_batch_dim(dim)))

    def unsqueeze(self, dim: int) -> Hybrid:
        """Returns the spec with a further batch dim of size 1."""
        return self._with_numbers(self.continuous.unsqueeze(self._check_batch_dim(dim, 1)))

    def unbind(self, dim: int = 0) -> tuple[Hybrid, ...]:
        """Returns the specs along a batch dim."""
        return tuple(map(self._with_numbers, self.continuous.unbind(self._check_batch_dim(dim))))

    def __getitem__(self, index: Any) -> Hybrid:
        """Returns the spec of some entries of the batch dims."""
        found = self.continuous[index]
        if found.shape[-1:] != self.continuous.shape[-1:]:
            raise IndexError(f"the index {index} of a Hybrid spec takes parts of an action.")
        return self._with_numbers(found)

    def _reshape(self, shape: Sequence[int]) -> Hybrid:
        return self._with_numbers(self.continuous.reshape(self._shape_of_numbers((shape,))))

    def _unflatten(self, dim: int, sizes: Sequence[int]) -> Hybrid:
        return self._with_numbers(
            self.continuous.unflatten(self._check_batch_dim(dim), tuple(sizes))
        )

    def _check_batch_dim(self, dim: int, n_new_dims: int = 0) -> int:
        """Returns a dim counted from the front; refuses the last, which holds an action."""
        position = dim + self.ndim + n_new_dims if dim < 0 else dim
        if position >= self.ndim - 1 + n_new_dims:
            raise ValueError("the last dim of a Hybrid spec must remain unchanged.")
        return position

    def _shape_of_numbers(self, shape: Sequence[Any]) -> torch.Size:
        """Returns the shape of the numbers for a shape of the whole spec."""
        shape = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if shape[-1] not in (-1, self.shape[-1]):
            raise ValueError(
                f"the shape {list(shape)} of a Hybrid spec must end with {self.shape[-1]}."
            )
        return torch.Size((*shape[:-1], self.continuous.shape[-1]))

    # --------------------------------------------------------------------------------- the rest

    def to(self, dest: Any) -> Hybrid:
        """Returns the spec on another device, or of another type of floats."""
        return self._with_numbers(self.continuous.to(dest))

    def clone(self) -> Hybrid:
        """Returns a copy."""
        return self._with_numbers(self.continuous.clone())

    def _with_numbers(self, continuous: TensorSpec) -> Hybrid:
        return Hybrid(self.branches, continuous)

    def __eq__(self, other: object) -> bool:
        """Returns whether choices and numbers are the same."""
        if not isinstance(other, Hybrid):
            return False
        return self.branches == other.branches and self.continuous == other.continuous

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """Returns the parts."""
        return f"Hybrid(branches={list(self.branches)}, continuous={self.continuous})"
