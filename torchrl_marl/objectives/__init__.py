"""Losses and their value estimators."""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.objectives.estimator import TeamGAE
    from torchrl_marl.objectives.imitation import ImitationLoss
    from torchrl_marl.objectives.implicit_q import ImplicitQLoss
    from torchrl_marl.objectives.maddpg import MADDPGLoss
    from torchrl_marl.objectives.masac import MASACLoss
    from torchrl_marl.objectives.parallel_q import ParallelQLoss
    from torchrl_marl.objectives.ppo import MAPPOLoss
    from torchrl_marl.objectives.td3_bc import TD3BCLoss
    from torchrl_marl.objectives.value_decomposition import ValueDecompositionLoss
    from torchrl_marl.objectives.vtrace import TeamVTrace

__getattr__, __dir__, __all__ = attach(__name__)
