"""TorchRL environments: adapters for simulators, and base classes for custom environments."""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.envs.check import check_marl_env
    from torchrl_marl.envs.config import EnvConfig
    from torchrl_marl.envs.isaaclab import IsaacLabEnv
    from torchrl_marl.envs.jaxmarl import JaxMarlEnv
    from torchrl_marl.envs.make import make_env
    from torchrl_marl.envs.marl_env import MarlEnv
    from torchrl_marl.envs.mjlab import MjlabEnv
    from torchrl_marl.envs.mujoco import MujocoEnv
    from torchrl_marl.envs.pettingzoo import PettingZooEnv
    from torchrl_marl.envs.randomization import randomized
    from torchrl_marl.envs.remember import Remember, with_memory
    from torchrl_marl.envs.symmetries import Labels, with_other_play
    from torchrl_marl.envs.transforms import AgentInitTracker, PadAgents
    from torchrl_marl.envs.vmas import VmasEnv

__getattr__, __dir__, __all__ = attach(
    __name__, moved={"ExternalEnv": "torchrl_marl.apps.external"}
)
