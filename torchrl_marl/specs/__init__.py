"""Specs of agents, groups and teams."""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.specs.agents import AgentSpec
    from torchrl_marl.specs.groups import GroupSpec
    from torchrl_marl.specs.hybrid import Hybrid
    from torchrl_marl.specs.teams import TeamSpec

__getattr__, __dir__, __all__ = attach(__name__)
