"""Routing: each agent of a group to the module that plays it.

``sequential`` is what one uses. Below: ``group`` says who runs on whom, ``data`` stacks and writes
the agents' entries, ``distribution`` joins the distributions of several modules.
"""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.modules.routing.distribution import RoutedDistribution
    from torchrl_marl.modules.routing.sequential import RoutedSequential

__getattr__, __dir__, __all__ = attach(
    __name__,
    {"distribution": ["RoutedDistribution"], "sequential": ["RoutedSequential"]},
)
