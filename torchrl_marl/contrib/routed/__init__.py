"""Routing for policies of one's own, not on the training path: each agent to the module it is for.

``sequential`` is what users call. Below: ``group`` says who runs on whom, ``data`` stacks and
writes the agents' entries, ``distribution`` joins the distributions of several modules.
"""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.contrib.routed.sequential import RoutedDistribution, RoutedSequential

__getattr__, __dir__, __all__ = attach(__name__)
