"""Episodes that were played for an evaluation, and what they say.

Shapes: n episodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchrl_marl.training.statistics import Paired, estimate, mean, paired_difference

__all__ = [
    "Episodes",
    "after_training",
    "figures_of_all",
    "kind_of",
    "matters",
    "where_they_differ",
]

_SMALL = 0.2  # standard deviations that make a difference worth a sentence


@dataclass(frozen=True)
class Episodes:
    """Whole episodes, in the order of their starts.

    Args:
        returns (dict): group -> return of each episode, ``[n]``; the mean over its agents.
        lengths (Tensor): steps, ``[n]``.
        sizes (dict): group -> its number of agents.
    """

    returns: Mapping[str, Tensor]
    lengths: Tensor
    sizes: Mapping[str, int]

    @property
    def total(self) -> Tensor:
        """All agents' mean return of each episode, ``[n]``."""
        weighted = [self.returns[name] * size for name, size in self.sizes.items()]
        return torch.stack(weighted).sum(0) / sum(self.sizes.values())

    def figures(self) -> dict[str, float]:
        """Returns what :func:`~torchrl_marl.training.evaluate` returns."""
        total, lengths = self.total, self.lengths
        found = {
            "return_mean": total.mean().item(),
            "return_std": total.std(correction=0).item(),
            "length_mean": lengths.float().mean().item(),
            "episodes": len(lengths),
        }
        found |= {f"{name}/episode_reward": own.mean().item() for name, own in self.returns.items()}
        found |= {"return_min": total.min().item(), "return_max": total.max().item()}
        found |= _interval("return", total)
        found |= {"length_min": lengths.min().item(), "length_max": lengths.max().item()}
        for name, own in self.returns.items() if len(self.returns) > 1 else ():
            found |= _interval(f"{name}/episode_reward", own)
        return found

    def against(self, other: Episodes) -> Paired:
        """Compares the returns with another policy's from the same starts, start by start."""
        return paired_difference(self.total.double().cpu(), other.total.double().cpu())


def _interval(name: str, values: Tensor) -> dict[str, float]:
    """Returns the mean's interval, where there is more than one episode."""
    if len(values) < 2 or not bool(values.isfinite().all()):
        return {}
    found = estimate(mean, [values.double().cpu()])
    return {f"{name}_low": found.low, f"{name}_high": found.high}


def figures_of_all(played: Episodes | None) -> dict[str, float]:
    """Returns the figures of episodes; nothing where none were played."""
    return {} if played is None else played.figures()


def kind_of(deterministic: bool) -> str:
    """Returns the word for a kind of actions."""
    return "likeliest" if deterministic else "drawn"


def where_they_differ(likeliest: Episodes, drawn: Episodes) -> str | None:
    """Returns a sentence where both kinds of actions differ by an amount that matters, or None.

    It matters where the interval and the exact test tell both apart, which takes 6 episodes, and
    beside the spread of the episodes' returns it is at least what Cohen calls small: of many
    episodes the least difference is beyond chance.

    Args:
        likeliest, drawn (Episodes): from the same starts.

    Reference: Cohen, 1988, Statistical Power Analysis for the Behavioral Sciences, section 2.2.
    """
    if len(likeliest.lengths) < 2:
        return None
    found = likeliest.against(drawn)
    if not found.told_apart:
        return None
    gap = found.difference
    spread = _spread(likeliest.total, drawn.total)
    if not matters(gap.value, spread):
        return None
    one, other = likeliest.total.mean().item(), drawn.total.mean().item()
    beside = f", {abs(gap.value) / spread:.2g} standard deviations of episodes" if spread else ""
    return (
        f"the likeliest actions earn {one:.4g} and drawn ones {other:.4g} from the same starts, "
        f"which is more than chance (they differ by {gap.low:.3g} to {gap.high:.3g}{beside})"
    )


def matters(gap: float, spread: float) -> bool:
    """Whether a difference of mean returns is large beside the episodes' standard deviation.

    Examples:
        >>> matters(0.1, 1.0), matters(-0.3, 1.0), matters(0.1, 0.0)
        (False, True, True)
    """
    return abs(gap) >= _SMALL * spread


def _spread(one: Tensor, other: Tensor) -> float:
    """The root of the mean variance of both."""
    variance = one.double().var(correction=0) + other.double().var(correction=0)
    return float((variance / 2).sqrt())


def after_training(own: Episodes, other: Episodes | None, deterministic: bool) -> dict[str, Any]:
    """Returns what a run's summary says of its last evaluation.

    Args:
        own (Episodes): as the run's settings say.
        other (Episodes, optional): by the other kind of actions.
        deterministic (bool): whether the run's own are the likeliest.
    """
    found = {kind_of(deterministic): own.figures()}
    if other is None:
        return {"evaluation": found}
    found[kind_of(not deterministic)] = other.figures()
    pair = (own, other) if deterministic else (other, own)
    return {"evaluation": found, "actions_differ": where_they_differ(*pair)}
