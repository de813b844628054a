"""Memory of agents: recurrent cells over sequences, with resets of single agents."""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.modules.memory.cells import GRU, LRU, LSTM, Layers, Memory, MinGRU

__getattr__, __dir__, __all__ = attach(__name__)
