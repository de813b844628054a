"""Windows: sequences of steps on which networks with memory are trained.

Shapes: E envs, T steps of a batch, L steps of a window, W windows of a batch, B windows of a
minibatch, N agents, S numbers of a hidden state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_marl.errors import SpecError
from torchrl_marl.learners.memory_config import check_batch
from torchrl_marl.modules.actors import check_links
from torchrl_marl.modules.memory.states import STATES, states_after
from torchrl_marl.objectives.flags import blank_masked_inputs
from torchrl_marl.specs import GroupSpec

__all__ = ["check_batch_memory", "cut_windows", "drop_burn_in", "hidden_states_after"]


def cut_windows(data: TensorDictBase, keys: Iterable[NestedKey], length: int) -> TensorDict:
    """Cuts a batch into windows; of the hidden states, a window keeps those of its first step.

    Args:
        data (TensorDictBase): a batch.
        keys (iterable of NestedKey): the entries to keep; missing ones are ignored.
        length (int): number L of steps of a window.

    Shapes:
        - data: ``[E, T]``; returns ``[W]``, entries ``[W, L, ...]``, states ``[W, 1, N, S]``

    Raises:
        ConfigError: T is not a multiple of L; the message names the next valid number of frames.

    Examples:
        >>> import torch
        >>> data = TensorDict({"reward": torch.arange(6).view(1, 6, 1)}, [1, 6])
        >>> cut_windows(data, ["reward"], 3)["reward"].squeeze(-1)
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


def drop_burn_in(
    windows: TensorDictBase,
    burn_in: int,
    hidden_state_functions: Iterable[Callable[[TensorDictBase], Mapping[NestedKey, Tensor]]],
) -> TensorDictBase:
    """Returns windows without their burn-in; their hidden states are those after the burn-in.

    Args:
        windows (TensorDictBase): windows with the hidden states of their first steps.
        burn_in (int): number of steps to drop.
        hidden_state_functions (iterable of callable): functions that map steps to the networks'
            hidden states after each step.

    Shapes:
        - windows: ``[B, L]``, or ``[B]`` with entries ``[B, L, ...]``; returns windows of L -
          burn_in steps

    Reference: Kapturowski et al., 2019, https://openreview.net/forum?id=r1lyTjAqYX (section 3).

    Reduces to: the windows, for ``burn_in=0``.
    """
    if not burn_in:
        return windows
    first, rest = _steps(windows, slice(0, burn_in)), _steps(windows, slice(burn_in, None))
    for states_of in hidden_state_functions:
        for key, after in states_of(first).items():
            last = after[:, -1:]
            shape = (*rest.batch_size, *last.shape[2:]) if rest.ndim > 1 else last.shape
            rest.set(key, last.expand(shape))
    return rest


def _steps(windows: TensorDictBase, steps: slice) -> TensorDictBase:
    """Returns the given steps of windows; hidden states have only one step, and are kept."""
    if windows.ndim > 1:
        return windows[:, steps]
    chosen = TensorDict({}, windows.batch_size, device=windows.device)
    for key, value in windows.items(True, True):
        state = isinstance(key, tuple) and key[-1] in STATES
        chosen.set(key, value if state else value[:, steps])
    return chosen


@torch.no_grad()
def hidden_states_after(
    networks: Iterable[TensorDictModuleBase], group: GroupSpec, data: TensorDictBase
) -> dict[NestedKey, Tensor]:
    """Returns the hidden states of actors and critics after each step of windows.

    Args:
        networks (iterable of TensorDictModuleBase): networks of the group.
        group (GroupSpec): the group.
        data (TensorDictBase): windows, dense.

    Shapes:
        - returns: key of the hidden state that a network reads -> ``[B, L, N, S]``
    """
    found: dict[NestedKey, Tensor] = {}
    for network in networks:
        inputs = data.select(*network.in_keys, strict=False)
        found |= states_after(network, blank_masked_inputs(inputs, group.mask_key, data))
    return found


def check_batch_memory(groups: Mapping[str, GroupSpec], batch: TensorDictBase, needed: Any) -> None:
    """Refuses a batch without the entries that networks with memory or communication read.

    Args:
        groups (mapping of name to GroupSpec): groups that are trained.
        batch (TensorDictBase): ``[E, T]``.
        needed (iterable of str): leaves that every group must have.

    Raises:
        SpecError: an entry is missing; the message names it.
    """
    for group in groups.values():
        for leaf in needed:
            if leaf == "links":
                check_links(group, batch)
            elif batch.get(group.key(leaf), None) is None:
                raise SpecError(
                    f"group {group.name!r}: its networks have memory, but the batch has no "
                    f"{group.key(leaf)!r}; let the environment carry it: "
                    "torchrl_marl.envs.with_memory(env, policy)."
                )
