"""What the command line takes: its commands, their options, and help."""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.arguments.parser import COMMANDS, make_parser

__getattr__, __dir__, __all__ = attach(__name__, {"parser": ["COMMANDS", "make_parser"]})
