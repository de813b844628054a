"""How far each member of a population moves in an update, and who moves no more.

Shapes: P members, G groups of all losses and members.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from torchrl_marl.learners.adam import adam_by_row_, start_adam
from torchrl_marl.learners.clipping import GradientClip
from torchrl_marl.learners.stopping import KLStop

__all__ = ["MemberStop"]


class MemberStop(KLStop):
    """Moves each member by its own learning rate; a member that is sick stays as it is.

    A member is sick from the first update on in which the norm of one of its gradients is NaN or
    infinite, that update included.

    Args:
        clips, limit, device: of :class:`KLStop`.
        n_members (int): number P of members.

    Attributes:
        lr (Tensor): learning rate of each group, ``[G]``.
        sick (Tensor): 1 for groups of members that are sick, else 0, ``[G]``.
    """

    def __init__(
        self,
        clips: Mapping[str, GradientClip],
        limit: float | None,
        device: torch.device,
        n_members: int,
    ) -> None:
        super().__init__(clips, limit, device)
        self.n_members = n_members
        self.lr = torch.zeros_like(self.stopped)
        self.sick = torch.zeros_like(self.stopped)

    def prepare(self, lr: Tensor, sick: Tensor) -> None:
        """Takes the learning rates of a batch's updates, and who is sick, both ``[P]``."""
        for own, values in ((self.lr, lr), (self.sick, sick.to(self.sick))):
            for _, rows in self.by_loss(own):
                rows.copy_(values.repeat_interleave(len(rows) // self.n_members))

    @property
    def sick_members(self) -> Tensor:
        """Who is sick, bool, ``[P]``."""
        return torch.stack([self._members(x) for _, x in self.by_loss(self.sick)]).any(0)

    @property
    def largest_lr(self) -> Tensor:
        """The learning rate of which each member takes a share; a scalar.

        The largest, but never one so large that what others do not take of it could overflow.
        """
        return self.lr.amax().clamp(torch.finfo(self.lr.dtype).tiny, 1.0)

    @property
    def lr_of_members(self) -> Tensor:
        """The learning rates, ``[P]``."""
        first = next(iter(self.by_loss(self.lr)))[1]
        return first.unflatten(0, (self.n_members, -1))[:, 0]

    def _members(self, groups: Tensor) -> Tensor:
        return (groups > 0).unflatten(0, (self.n_members, -1)).any(-1)

    @property
    def tensors(self) -> list[Tensor]:
        """What an update reads of it."""
        limits = [clip.limit for clip in self.clips.values() if isinstance(clip.limit, Tensor)]
        return [self.stopped, self.lr, self.sick, *limits]

    def saw(self, norms: Mapping[str, Tensor]) -> None:
        """Notes members whose gradients are not finite."""
        broken = torch.cat([~norms[name].isfinite() for name in self.clips])
        sick = [self._members(rows) for _, rows in self.by_loss(self.sick.logical_or(broken))]
        everywhere = torch.stack(sick).any(0).to(self.sick)
        for _, rows in self.by_loss(self.sick):
            rows.copy_(everywhere.repeat_interleave(len(rows) // self.n_members))

    def step(self, optimizer: torch.optim.Adam) -> None:
        """Takes a step of Adam with the optimizer's state."""
        settings = optimizer.param_groups[0]
        moved = [p for p in settings["params"] if p.grad is not None]
        start_adam(optimizer, moved)
        names = ("exp_avg", "exp_avg_sq", "step")
        moments = [[optimizer.state[p][name] for p in moved] for name in names]
        gradients = [cast(Tensor, p.grad) for p in moved]
        lr = torch.as_tensor(settings["lr"], dtype=torch.float64, device=self.lr.device)
        with torch.no_grad():
            self.adam(moved, gradients, moments, lr, settings)

    def adam(
        self,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        moments: Sequence[Sequence[Tensor]],
        lr: Tensor,
        settings: Mapping[str, Any],
    ) -> None:
        """Takes a step of Adam with ``largest_lr``, of which each member takes its share."""
        shares = self._spread(torch.where(self.sick > 0, 0.0, self.lr / self.largest_lr))
        sick = self._of(parameters, self._spread(self.sick))
        healthy = [torch.where(s > 0, 0.0, g) for g, s in zip(gradients, sick)]
        means, squares, steps = moments
        how = self.all, self.frozen(parameters), settings["betas"], settings["eps"]
        adam_by_row_(
            parameters,
            healthy,
            means,
            squares,
            steps,
            lr,
            *how,
            shares=self._of(parameters, shares),
        )

    def _spread(self, values: Tensor) -> dict[int, Tensor]:
        """Returns the value of each row of each parameter, by its ``id``."""
        found: dict[int, Tensor] = {}
        for name, own in self.by_loss(values):
            clip = self.clips[name]
            rows = clip.spread(torch.cat([own, own[:1]]))
            found.update(zip(map(id, clip.parameters), rows))
        return found

    def _of(self, parameters: Sequence[Tensor], values: Mapping[int, Tensor]) -> list[Tensor]:
        return [values[id(p)] for p in parameters]
