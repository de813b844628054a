"""Optional parts for custom programs; tested, but not used by the rest of the package."""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.contrib.ranking import alpha_rank
    from torchrl_marl.contrib.routed.sequential import RoutedSequential
    from torchrl_marl.contrib.splitting import SplitPolicy, parts, split
    from torchrl_marl.contrib.tree_sampler import TreeSampler

__getattr__, __dir__, __all__ = attach(__name__)
