"""Isaac Lab's multi-agent tasks."""

from torchrl_marl.envs.isaaclab.env import IsaacLabEnv

__all__ = ["IsaacLabEnv"]
