"""External simulators: clients that say what their agents see, and get actions."""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.envs.external.declaration import Declared
    from torchrl_marl.envs.external.door import Door
    from torchrl_marl.envs.external.env import ExternalEnv
    from torchrl_marl.envs.external.server import ActionServer

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "declaration": ["Declared"],
        "door": ["Door"],
        "env": ["ExternalEnv"],
        "server": ["ActionServer"],
    },
)
