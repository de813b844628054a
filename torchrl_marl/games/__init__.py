"""Game theory in float64: matchmaking, ratings and equilibria, as pure functions."""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.games.equilibrium import (
        Nash,
        SequenceForm,
        exploitability,
        nash,
        nash_average,
        nash_conv,
    )
    from torchrl_marl.games.ratings import (
        WEIGHTINGS,
        Ratings,
        bradley_terry,
        interval,
        pfsp,
        smoothed,
    )

__getattr__, __dir__, __all__ = attach(__name__, moved={"alpha_rank": "torchrl_marl.contrib"})
