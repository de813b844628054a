"""Updates from stored steps of a population: each member by itself, the sick not at all.

Shapes: P members, G groups of all members, R rows of a parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_marl.learners.adam import Adam, adam_by_row_
from torchrl_marl.learners.replay import TeamReplay
from torchrl_marl.learners.replay_updates import History, ReplayUpdates, Step

__all__ = ["MemberAdam", "MemberUpdates"]


class MemberAdam(Adam):
    """Adam that moves each member by its own learning rate; a member that is sick stays.

    Args:
        parameters (iterable of Tensor): that are trained, stacked.
        lr (float): learning rate of all, until :meth:`prepare`.
        eps (float): Adam's epsilon.
        owners (mapping): parameter -> the member that each of its rows is of, ``[R]``.
        sick (Tensor): bool, ``[P]``, who is not moved; read at every step.

    Attributes:
        lr_of_members (Tensor): the learning rates, ``[P]``.

    Reduces to: :class:`Adam`, where all learning rates are equal and nobody is sick.

    Examples:
        >>> x = torch.ones(2)
        >>> owners = {x: torch.tensor([0, 1])}
        >>> adam = MemberAdam([x], 0.5, 0.0, owners, torch.zeros(2, dtype=torch.bool))
        >>> adam.prepare(torch.tensor([0.5, 0.25]))
        >>> adam.step([torch.ones(2)])
        >>> x
        tensor([0.5000, 0.7500])
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        lr: float,
        eps: float,
        owners: Mapping[Tensor, Tensor],
        sick: Tensor,
    ) -> None:
        super().__init__(parameters, lr, eps)
        self.sick = sick
        self.lr_of_members = torch.full(sick.shape, lr, device=sick.device)
        self.owners = [
            owners[p].reshape(-1, *(1,) * (p.ndim - 1)) if p.ndim else owners[p]
            for p in self.parameters
        ]

    @property
    def tensors(self) -> list[Tensor]:
        """All that a step reads and writes, the parameters included."""
        return [*super().tensors, self.lr_of_members, self.sick]

    @torch.no_grad()
    def prepare(self, lr: Tensor) -> None:
        """Takes the learning rates of the members, ``[P]``, for the next steps."""
        self.lr_of_members.copy_(lr)
        # Each takes a share of the largest, never so large that what others leave overflows.
        self.lr.copy_(self.lr_of_members.amax().clamp(torch.finfo(lr.dtype).tiny, 1.0))

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor | None]) -> None:
        """Takes a step; what has no gradient has 0."""
        shares = torch.where(self.sick, 0.0, self.lr_of_members / self.lr.to(self.lr_of_members))
        found = [
            torch.zeros_like(p) if g is None else torch.where(self.sick[rows], 0.0, g)
            for p, g, rows in zip(self.parameters, gradients, self.owners)
        ]
        adam_by_row_(
            self.parameters,
            found,
            self.means,
            self.squares,
            self.steps,
            self.lr,
            self._goes_on,
            [],
            (0.9, 0.999),
            self.eps,
            shares=[shares[rows] for rows in self.owners],
        )


class MemberUpdates(ReplayUpdates):
    """Makes updates of all members from their steps; notes whose gradients are not finite.

    Args:
        *args, **kwargs: of :class:`ReplayUpdates`.

    Attributes:
        sick (Tensor): bool, ``[P]``, written in place.
        gamma (Tensor): discount of each member, ``[P]``.
    """

    def __init__(self, *args: Any, sick: Tensor, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sick = sick
        self.gamma: Any = torch.full(sick.shape, float(self.gamma), device=sick.device)

    def _gradients(self, data: TensorDictBase, step: Step, metrics: History) -> list[Tensor | None]:
        found = super()._gradients(data, step, metrics)
        with torch.no_grad():
            for name in step.clips:
                norms = metrics[name, step.norm].unflatten(0, (len(self.sick), -1))
                self.sick.logical_or_((~norms.isfinite()).any(-1))
        return found

    def _written(self, replay: TeamReplay) -> list[Tensor]:
        clips = [clip for step in self.steps for clip in step.clips.values()]
        limits = [clip.limit for clip in clips if isinstance(clip.limit, Tensor)]
        return [*super()._written(replay), self.gamma, *limits]
