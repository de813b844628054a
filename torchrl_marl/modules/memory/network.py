"""Memory inside a network: which step is which, who begins, who waits.

Shapes: B any batch dims, T steps, N agents, F features, S numbers of a state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchrl.modules import recurrent_mode

from torchrl_marl.modules.config import MemoryConfig, NetworkConfig, sharing_of
from torchrl_marl.modules.memory.cells import CELLS, Layers, Memory

__all__ = [
    "cell_index",
    "make_memory",
    "remember",
]


def make_memory(
    in_features: int,
    config: MemoryConfig,
    index: Sequence[int] = (0,),
    device: torch.device | str | None = None,
) -> Memory:
    """Builds a memory.

    Args:
        in_features (int): F.
        config (MemoryConfig): kind, size and layers.
        index (sequence of int): the network of each agent; or ``[0]``, one for all.
        device (torch.device, optional): of the parameters.

    Examples:
        >>> make_memory(8, MemoryConfig("lstm", size=4, layers=2)).state_size
        16
    """
    widths = [in_features, *[config.size] * config.layers]
    cells = [
        CELLS[config.kind](width, config.size, index, device=device)  # type: ignore[call-arg]
        for width in widths[:-1]
    ]
    return cells[0] if len(cells) == 1 else Layers(cells)


def cell_index(config: NetworkConfig, kinds: Sequence[int]) -> list[int]:
    """Returns the number of each agent's memory; ``[0]`` where all have the same.

    Args:
        config (NetworkConfig): who shares what.
        kinds (sequence of int): group and kind of each agent.

    Examples:
        >>> cell_index(NetworkConfig(sharing="group"), [0, 0, 1])
        [0, 0, 1]
        >>> cell_index(NetworkConfig(sharing="trunk"), [0, 0, 1])
        [0]
    """
    sharing = sharing_of(config)
    index: Sequence[int] = [0]
    if sharing == "none":
        index = range(len(kinds))
    elif sharing == "group":
        numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
        index = [numbers[kind] for kind in kinds]
    elif sharing in ("index", "clusters"):
        index = config.sharing_index or [0]
    return [0] if max(index) == 0 else list(index)


def remember(
    memory: Memory, x: Tensor, state: Tensor, init: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Runs a memory over one step, or over a sequence in TorchRL's recurrent mode.

    What stands in the state of an agent that does not act before its episode begins, such as a
    dead one's, reaches no output and no gradient; who waits keeps its state.

    Args:
        memory (Memory): what to run.
        x (Tensor): features.
        state (Tensor): before the step; of a sequence, the first step's counts.
        init (Tensor): bool, an agent's episode begins.
        mask (Tensor, optional): bool, the agent acts.

    Shapes:
        - x: ``[*B, N, F]``; state: ``[*B, N, S]``; init: ``[*B, N, 1]``; mask: ``[*B, N]``
        - returns: ``[*B, N, H]`` and the state after the step, ``[*B, N, S]``; in recurrent mode
          ``[*B, T, N, ...]``, and the state's T may be 1

    Examples:
        >>> memory = make_memory(4, MemoryConfig("gru", size=3))
        >>> init = torch.ones(5, 2, 1, dtype=torch.bool)
        >>> remember(memory, torch.zeros(5, 2, 4), torch.zeros(5, 2, 3), init, None)[1].shape
        torch.Size([5, 2, 3])
    """
    mask = None if mask is None else mask.unsqueeze(-1)
    if not recurrent_mode():
        inputs = x.unsqueeze(0), init.unsqueeze(0), None if mask is None else mask.unsqueeze(0)
        output, states = _over_steps(memory, inputs[0], state, *inputs[1:])
        return output.squeeze(0), states.squeeze(0)
    time_first = x.movedim(-3, 0), init.movedim(-3, 0)
    masks = None if mask is None else mask.movedim(-3, 0)
    output, states = _over_steps(memory, time_first[0], state[..., 0, :, :], time_first[1], masks)
    return output.movedim(0, -3), states.movedim(0, -3)


def _over_steps(
    memory: Memory, x: Tensor, state: Tensor, init: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Runs a memory over ``[T, *B, N, F]``."""
    later = None if len(x) == 1 else init
    if mask is None:
        return memory(x, torch.where(init[0], 0.0, state), later, None)
    ended = init.cumsum(0) > 0
    needed = (mask & ~ended).any(0)
    output, states = memory(x, torch.where(needed, state, 0.0), later, mask)
    idle = (mask | ended).cumsum(0) == 0
    return output, torch.where(idle, state, states)
