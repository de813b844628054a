"""Tensor functions: masked statistics, advantages, returns, and target networks."""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.functional.advantage import gae, vtrace
    from torchrl_marl.functional.returns import (
        fill_next,
        n_step,
        q_lambda,
        soft_update_,
        within_window,
    )
    from torchrl_marl.functional.statistics import (
        expand_mask,
        fit_mask,
        masked_mean,
        masked_moments,
        masked_standardize,
    )

__getattr__, __dir__, __all__ = attach(__name__)
