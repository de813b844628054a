"""Routing of agents to different modules, for custom policies; not used in training.

``sequential`` has the public classes. ``group`` decides which module runs on which agents, and
reads and writes the agents' entries.
"""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.contrib.routed.sequential import RoutedDistribution, RoutedSequential

__getattr__, __dir__, __all__ = attach(__name__)
