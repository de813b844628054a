"""Who plays: batches of experience."""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.collectors.collector import Collector
    from torchrl_marl.collectors.external import ExternalCollector
    from torchrl_marl.collectors.matches import MatchPolicy
    from torchrl_marl.collectors.rollout import RolloutCollector
    from torchrl_marl.collectors.splitting import SplitPolicy, parts, split
    from torchrl_marl.collectors.team import TeamPolicy

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "collector": ["Collector"],
        "external": ["ExternalCollector"],
        "matches": ["MatchPolicy"],
        "rollout": ["RolloutCollector"],
        "splitting": ["SplitPolicy", "parts", "split"],
        "team": ["TeamPolicy"],
    },
)
