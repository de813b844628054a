"""Training of many runs: seeds, tuning, and runs on several processes or machines."""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.apps.jobs.jobs import train_all

__getattr__, __dir__, __all__ = attach(__name__)
