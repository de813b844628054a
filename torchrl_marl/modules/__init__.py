"""Networks: TensorDict in, TensorDict out."""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.modules.action_critics import make_action_critic
    from torchrl_marl.modules.actors import make_actor
    from torchrl_marl.modules.communication_config import (
        CommunicationConfig,
        DrawnCommunicationConfig,
    )
    from torchrl_marl.modules.config import (
        CriticConfig,
        MemoryConfig,
        MixerConfig,
        NetworkConfig,
        QNetworkConfig,
        RecurrentCriticConfig,
        RecurrentNetworkConfig,
        TeamNetworkConfig,
    )
    from torchrl_marl.modules.critics import make_critic
    from torchrl_marl.modules.deterministic_actor import make_deterministic_actor
    from torchrl_marl.modules.exploration import Explore
    from torchrl_marl.modules.mixed_critic import make_mixed_critic
    from torchrl_marl.modules.mixers import make_mixer
    from torchrl_marl.modules.normalization import ObservationNorm, ValueNorm
    from torchrl_marl.modules.players import Players
    from torchrl_marl.modules.q_actor import make_q_actor
    from torchrl_marl.modules.random_actor import RandomActor
    from torchrl_marl.modules.registry import register_body, register_sharing
    from torchrl_marl.modules.routed.sequential import RoutedSequential
    from torchrl_marl.modules.stacks.building import cat, expand, stack
    from torchrl_marl.modules.stacks.module_stack import ModuleStack
    from torchrl_marl.modules.stacks.tensordict_module import StackModule

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "action_critics": ["make_action_critic"],
        "actors": ["make_actor"],
        "communication_config": ["CommunicationConfig", "DrawnCommunicationConfig"],
        "config": [
            "CriticConfig",
            "MemoryConfig",
            "MixerConfig",
            "NetworkConfig",
            "QNetworkConfig",
            "RecurrentCriticConfig",
            "RecurrentNetworkConfig",
            "TeamNetworkConfig",
        ],
        "critics": ["make_critic"],
        "deterministic_actor": ["make_deterministic_actor"],
        "exploration": ["Explore"],
        "mixed_critic": ["make_mixed_critic"],
        "mixers": ["make_mixer"],
        "normalization": ["ObservationNorm", "ValueNorm"],
        "players": ["Players"],
        "q_actor": ["make_q_actor"],
        "random_actor": ["RandomActor"],
        "registry": ["register_body", "register_sharing"],
        "routed.sequential": ["RoutedSequential"],
        "stacks.building": ["cat", "expand", "stack"],
        "stacks.tensordict_module": ["StackModule"],
        "stacks.module_stack": ["ModuleStack"],
    },
)
