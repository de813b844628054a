"""Collectors: they step environments with a policy, or read a dataset, and return batches."""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.collectors.collector import Collector
    from torchrl_marl.collectors.dataset import Dataset, write_dataset
    from torchrl_marl.collectors.dataset_collector import DatasetCollector
    from torchrl_marl.collectors.expert import ExpertLabels
    from torchrl_marl.collectors.matches import MatchPolicy
    from torchrl_marl.collectors.rollout import RolloutCollector
    from torchrl_marl.collectors.team import TeamPolicy

__getattr__, __dir__, __all__ = attach(
    __name__,
    moved={
        "ExternalCollector": "torchrl_marl.apps.external",
        **dict.fromkeys(["SplitPolicy", "parts", "split"], "torchrl_marl.contrib"),
    },
)
