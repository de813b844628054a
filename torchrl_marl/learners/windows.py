"""Windows: stretches of steps on which networks with memory are trained.

Shapes: E envs, T steps of a batch, L steps of a window, W windows of a batch, N agents.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tensordict import NestedKey, TensorDict, TensorDictBase

from torchrl_marl.errors import SpecError
from torchrl_marl.learners.memory_config import check_batch
from torchrl_marl.modules.memory.network import STATES
from torchrl_marl.specs import GroupSpec

__all__ = ["refuse_forgotten", "windows_of"]


def windows_of(data: TensorDictBase, keys: Iterable[NestedKey], length: int) -> TensorDict:
    """Cuts a batch into windows, each with what was remembered at its first step.

    Args:
        data (TensorDictBase): a batch.
        keys (iterable of NestedKey): the entries that are wanted, as far as there are such.
        length (int): number L of steps of a window.

    Shapes:
        - data: ``[E, T]``; returns ``[W]``, entries ``[W, L, ...]``, states ``[W, 1, N, S]``

    Raises:
        ConfigError: T is no multiple of L; naming the next good number of frames.

    Examples:
        >>> import torch
        >>> data = TensorDict({"reward": torch.arange(6).view(1, 6, 1)}, [1, 6])
        >>> windows_of(data, ["reward"], 3)["reward"].squeeze(-1)
        tensor([[0, 1, 2],
                [3, 4, 5]])
    """
    num_envs, n_steps = data.shape
    check_batch(n_steps, num_envs, length, "learner.")
    n_windows = num_envs * n_steps // length
    windows = TensorDict({}, [n_windows], device=data.device)
    for key in keys:
        value = data.get(key, None)
        if value is None:
            continue
        value = value.reshape(n_windows, length, *value.shape[2:])
        state = isinstance(key, tuple) and key[-1] in STATES
        windows.set(key, value[:, :1].contiguous() if state else value)
    return windows


def refuse_forgotten(groups: Mapping[str, GroupSpec], batch: TensorDictBase, needed: Any) -> None:
    """Refuses a batch of an environment that does not say when agents begin, or carries nothing.

    Args:
        groups (mapping of name to GroupSpec): that are trained.
        batch (TensorDictBase): ``[E, T]``.
        needed (iterable of str): leaves that every group must have.

    Raises:
        SpecError: naming the entry.
    """
    for group in groups.values():
        for leaf in needed:
            if batch.get(group.key(leaf), None) is None:
                raise SpecError(
                    f"group {group.name!r}: its networks remember, but the batch has no "
                    f"{group.key(leaf)!r}; let the environment carry it: "
                    "torchrl_marl.envs.with_memory(env, policy)."
                )
