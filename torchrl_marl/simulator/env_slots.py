"""The batched tensors of a simulator, by path."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchrl_marl.simulator.state import Path, SimulatorState, child, set_child, shared_storages

__all__ = ["EnvSlots"]


class EnvSlots:
    """The batched tensors of one simulator, looked up by path whatever holds them now."""

    def __init__(self, simulator: Any, state: SimulatorState) -> None:
        self.simulator = simulator
        self.exclude = state.exclude
        self.paths = state.batched
        self._views: frozenset[Path] | None = None

    def views(self) -> frozenset[Path]:
        """Returns the slots that are views of another one's memory."""
        if self._views is None:
            found = {path: x for path in self.paths if (x := self.get(path)) is not None}
            shared = shared_storages(found.values())
            self._views = frozenset(
                path for path, x in found.items() if x.untyped_storage().data_ptr() in shared
            )
        return self._views

    def get(self, path: Path) -> Tensor | None:
        """Returns the tensor, or None while the simulator has none there."""
        try:
            return child(self._holder(path), path[-1])
        except LookupError:
            return None

    def _holder(self, path: Path) -> Any:
        holder = self.simulator
        for key in path[:-1]:
            holder = child(holder, key)
        return holder

    def merge(self, values: dict[Path, Any], envs: Tensor) -> None:
        """Merges the values into the rows ``envs``; tensors that share memory keep sharing it."""
        merged: dict[tuple[int, int], Tensor] = {}
        found = {path: self.get(path) for path in values}
        old = {p: x for p, x in found.items() if x is not None and values[p] is not None}
        shared = shared_storages(old.values())
        for path, x in old.items():
            both = id(x), id(values[path])
            if both not in merged:
                rows = envs.view(-1, *[1] * (x.ndim - 1))
                new = torch.where(rows, values[path], x)
                # A view of another slot's memory must remain one.
                if path in self.views() or x.untyped_storage().data_ptr() in shared:
                    new = x.copy_(new)
                merged[both] = new
            if merged[both] is not x:
                set_child(self._holder(path), path[-1], merged[both])
