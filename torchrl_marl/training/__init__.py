"""Training: the training loop, evaluation, checkpoints and metrics."""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.training.callbacks import Callback, Control
    from torchrl_marl.training.config import TrainConfig
    from torchrl_marl.training.crossplay import cross_play
    from torchrl_marl.training.evaluation import evaluate
    from torchrl_marl.training.run import Run
    from torchrl_marl.training.trainer import iterate, resume, train

__getattr__, __dir__, __all__ = attach(__name__)
