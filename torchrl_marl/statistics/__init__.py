"""What a few runs say, and how sure it is: estimates, differences, and the sentences on them."""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.statistics.chance import (
        exact_chance,
        least_chance,
        sign_flip_chance,
        student_chance,
        student_quantile,
    )
    from torchrl_marl.statistics.differences import (
        Paired,
        difference_of_runs,
        paired_difference,
    )
    from torchrl_marl.statistics.estimates import (
        CONFIDENCE,
        RESAMPLES,
        Estimate,
        estimate,
        interquartile_mean,
        mean,
        median,
        optimality_gap,
        probability_of_improvement,
        score_distribution,
    )
    from torchrl_marl.statistics.verdicts import (
        by_chance,
        explained,
        undecided,
    )

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "chance": [
            "exact_chance",
            "least_chance",
            "sign_flip_chance",
            "student_chance",
            "student_quantile",
        ],
        "differences": [
            "Paired",
            "difference_of_runs",
            "paired_difference",
        ],
        "estimates": [
            "CONFIDENCE",
            "RESAMPLES",
            "Estimate",
            "estimate",
            "interquartile_mean",
            "mean",
            "median",
            "optimality_gap",
            "probability_of_improvement",
            "score_distribution",
        ],
        "verdicts": [
            "by_chance",
            "explained",
            "undecided",
        ],
    },
)
