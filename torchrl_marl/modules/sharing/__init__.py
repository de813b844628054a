"""Parameter sharing: the networks of all agents as one batched network.

``ways`` has a function for each way of sharing. ``builder`` has the tools that these functions use
to build networks.
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
