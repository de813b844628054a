"""Networks that read and write TensorDicts."""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.modules.action_critics import make_action_critic
    from torchrl_marl.modules.build import make_actor
    from torchrl_marl.modules.config import (
        CommunicationConfig,
        CriticConfig,
        DrawnCommunicationConfig,
        MemoryConfig,
        MixerConfig,
        NetworkConfig,
        QNetworkConfig,
        RecurrentCriticConfig,
        RecurrentNetworkConfig,
        TeamNetworkConfig,
    )
    from torchrl_marl.modules.critics import make_critic
    from torchrl_marl.modules.exploration import Explore, RandomActor
    from torchrl_marl.modules.mixers import make_mixed_critic, make_mixer
    from torchrl_marl.modules.normalization import ObservationNorm, ValueNorm
    from torchrl_marl.modules.players import Players
    from torchrl_marl.modules.q_actor import make_deterministic_actor, make_q_actor
    from torchrl_marl.modules.registry import register_body, register_sharing
    from torchrl_marl.modules.stacks.members import StackModule
    from torchrl_marl.modules.stacks.module_stack import ModuleStack, cat, expand, stack

__getattr__, __dir__, __all__ = attach(__name__, moved={"RoutedSequential": "torchrl_marl.contrib"})
