"""Communication between agents: who hears whom, what is said, and what is made of it."""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.modules.communication.channel import Channel, Links, listening
    from torchrl_marl.modules.communication.rounds import Attention, Chain, Mean

__getattr__, __dir__, __all__ = attach(__name__)
