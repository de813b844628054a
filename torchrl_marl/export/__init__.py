"""Agents that run alone: one agent's part of a team's policy, as programs without torchrl_marl."""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.export.player import Player
    from torchrl_marl.export.write import Export, export_agents

__getattr__, __dir__, __all__ = attach(
    __name__, {"player": ["Player"], "write": ["Export", "export_agents"]}
)
