"""Support for external simulators: clients that send observations and receive actions."""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.apps.external.collector import ExternalCollector
    from torchrl_marl.apps.external.declaration import Declared
    from torchrl_marl.apps.external.env import ExternalEnv
    from torchrl_marl.apps.external.listener import Listener
    from torchrl_marl.apps.external.server import ActionServer

__getattr__, __dir__, __all__ = attach(__name__)
