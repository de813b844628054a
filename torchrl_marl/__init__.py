"""Multi-agent reinforcement learning on TorchRL: one batched tensor program."""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach, find_moved_modules
from torchrl_marl.version import __version__  # noqa: F401

if TYPE_CHECKING:
    from torchrl_marl.apps.choosing import algorithms_for
    from torchrl_marl.runs import iterate, resume, train
    from torchrl_marl.specs import AgentSpec, GroupSpec, TeamSpec
    from torchrl_marl.training.callbacks import Callback

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "apps.choosing": ["algorithms_for"],
        "runs": ["iterate", "resume", "train"],
        "specs": ["AgentSpec", "GroupSpec", "TeamSpec"],
        "training.callbacks": ["Callback"],
    },
)
find_moved_modules()
