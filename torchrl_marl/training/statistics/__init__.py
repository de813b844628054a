"""What a few runs say, and how sure it is: estimates, differences, and the sentences on them."""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.training.statistics.differences import (
        Paired,
        by_chance,
        difference_of_runs,
        explained,
        paired_difference,
        undecided,
    )
    from torchrl_marl.training.statistics.estimates import (
        CONFIDENCE,
        RESAMPLES,
        Estimate,
        estimate,
        exact_chance,
        interquartile_mean,
        least_chance,
        mean,
        median,
        optimality_gap,
        probability_of_improvement,
        score_distribution,
        sign_flip_chance,
        student_chance,
        student_quantile,
    )

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "differences": [
            "Paired",
            "by_chance",
            "difference_of_runs",
            "explained",
            "paired_difference",
            "undecided",
        ],
        "estimates": [
            "CONFIDENCE",
            "RESAMPLES",
            "Estimate",
            "estimate",
            "exact_chance",
            "interquartile_mean",
            "least_chance",
            "mean",
            "median",
            "optimality_gap",
            "probability_of_improvement",
            "score_distribution",
            "sign_flip_chance",
            "student_chance",
            "student_quantile",
        ],
    },
)
