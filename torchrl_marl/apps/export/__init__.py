"""Export of the agents of a team's policy as programs that run without torchrl_marl."""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.apps.export.agent import find_agents
    from torchrl_marl.apps.export.check import check_players
    from torchrl_marl.apps.export.parameters import TeamParameters, read_parameters
    from torchrl_marl.apps.export.player import Player
    from torchrl_marl.apps.export.write import Export, export_agents, refuse_agents_but

__getattr__, __dir__, __all__ = attach(__name__)
