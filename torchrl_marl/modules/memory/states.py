"""Hidden states of networks, as leaves of a TensorDict.

Shapes: B any batch dims, T steps, N agents, S size of a state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase, TensorDictSequential
from torch import Tensor, nn
from torchrl.modules import set_recurrent_mode

if TYPE_CHECKING:
    from torchrl_marl.modules.memory.cells import Memory

__all__ = ["STATES", "has_cells", "over_time", "state_size", "states_after"]

STATES = ("hidden", "critic_hidden", "target_hidden")
"""Leaves of the hidden states of actors, critics, and target actors."""


def has_cells(network: nn.Module) -> bool:
    """Returns whether a network has a recurrent cell."""
    return bool(_find_memories(network))


def over_time(network: nn.Module) -> contextlib.AbstractContextManager:
    """Within a context, a network with memory reads sequences; time is the last batch dim."""
    return set_recurrent_mode(True) if has_cells(network) else contextlib.nullcontext()


def states_after(network: TensorDictModuleBase, inputs: TensorDictBase) -> dict[Any, Tensor]:
    """Returns the hidden states after each step of sequences; empty without memory.

    Only an actor's network is run, without sampling actions.

    Args:
        network (TensorDictModuleBase): an actor or a critic.
        inputs (TensorDictBase): inputs of the network, with zeros in masked slots.

    Shapes:
        - returns: input key of the state -> ``[*B, T, N, S]``
    """
    keys = [key for key in network.in_keys if isinstance(key, tuple) and key[-1] in STATES]
    if not keys:
        return {}
    alone = network[0] if isinstance(network, TensorDictSequential) else network
    with over_time(network):
        after = alone(inputs)
    return {key: after.get(("next", *key)) for key in keys}


def state_size(network: nn.Module) -> int:
    """Returns the size S of an agent's hidden state; 0 without memory.

    Examples:
        >>> state_size(nn.Linear(2, 2))
        0
    """
    return sum(memory.state_size for memory in _find_memories(network))


def _find_memories(network: nn.Module) -> list[Memory]:
    """Returns the memories of the first submodule that has any."""
    found: Iterator[list[Memory]] = (getattr(one, "memories", []) for one in network.modules())
    return next((memories for memories in found if memories), [])
