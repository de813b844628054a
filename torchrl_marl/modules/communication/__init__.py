"""Communication between agents: channel, links and rounds of messages."""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.modules.communication.channel import Channel, Links, listening
    from torchrl_marl.modules.communication.rounds import Attention, Chain, Mean

__getattr__, __dir__, __all__ = attach(__name__)
