"""Multi-agent reinforcement learning on TorchRL: one batched tensor program."""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.runs import iterate, resume, train
    from torchrl_marl.specs import AgentSpec, GroupSpec, TeamSpec

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "specs": ["AgentSpec", "GroupSpec", "TeamSpec"],
        "runs": ["iterate", "resume", "train"],
    },
)
