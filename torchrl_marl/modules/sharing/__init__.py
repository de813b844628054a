"""Parameter sharing: the networks of all agents as one batched network, whoever shares what.

``ways`` has a function for each way, ``builder`` what they build with, ``layers`` what an agent
has of a network that it shares.
"""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.modules.sharing.builder import (
        AgentId,
        AgentMask,
        NetworkBuilder,
        make_shared_mlp,
        share,
    )

__getattr__, __dir__, __all__ = attach(__name__)
