"""Evolution of a population: who is copied to whom, and how copies differ. Pure functions."""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.evolution.mutation import Bounds, perturb
    from torchrl_marl.evolution.selection import tournament, truncation

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "mutation": ["Bounds", "perturb"],
        "selection": ["tournament", "truncation"],
    },
)
