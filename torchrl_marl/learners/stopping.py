"""Who learns from an update: groups that have not moved too far, and agents whose turn it is.

Shapes: U updates of an epoch, G groups of all losses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import NestedKey
from torch import Tensor

from torchrl_marl.learners.adam import adam_, freeze, start_adam
from torchrl_marl.learners.clipping import GradientClip

__all__ = ["KLStop", "Turns"]


class KLStop:
    """Ends the epochs of each group by its own divergence from the policy that collected.

    A group that has stopped stays as it is, while others go on. Rows of parameters that serve
    several groups of one loss stop with the first of them.

    Args:
        clips (mapping): name of a loss -> which rows of its parameters serve which group.
        limit (float, optional): the largest mean divergence of an epoch; None for none.
        device (torch.device): where the flags are.
        metric (str): the loss's entry that is the divergence, read where there is a limit.

    Attributes:
        stopped (Tensor): 1 for groups that have stopped, else 0, ``[G]``.
        epochs (Tensor): how many epochs each has learned from, ``[G]``.
    """

    def __init__(
        self,
        clips: Mapping[str, GradientClip],
        limit: float | None,
        device: torch.device,
        metric: str = "kl_approx",
    ) -> None:
        self.limit, self.metric = limit, metric
        self.clips = dict(clips)
        self.stopped = torch.zeros(sum(c.n_groups for c in clips.values()), device=device)
        self.epochs = torch.zeros_like(self.stopped)

    def begin(self) -> None:
        """Begins a batch, from which all groups learn."""
        self.stopped.zero_()
        self.epochs.zero_()

    def count(self) -> None:
        """Counts an epoch that begins."""
        self.epochs += 1 - self.stopped

    def watched(self, metrics: Mapping[NestedKey, Tensor]) -> Tensor:
        """Returns the divergences of an update, ``[G]``; nothing, ``[0]``, without a limit."""
        if self.limit is None:
            return self.stopped.new_zeros(0)
        return torch.cat([metrics[name, self.metric].reshape(-1) for name in self.clips])

    def look(self, kl: Tensor) -> None:
        """Stops groups after an epoch.

        Args:
            kl (Tensor): estimates of each update, ``[U, G]``.
        """
        if self.limit is not None:
            self.stopped.logical_or_(kl.mean(0) > self.limit)

    @property
    def tensors(self) -> list[Tensor]:
        """What an update reads of it."""
        return [self.stopped]

    @property
    def all(self) -> Tensor:
        """1 where all groups have stopped, else 0; a scalar."""
        return self.stopped.amin()

    def by_loss(self, values: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Splits values ``[G]``: the name of a loss, and those of its groups."""
        sizes = [clip.n_groups for clip in self.clips.values()]
        return zip(self.clips, values.split(sizes))

    def saw(self, norms: Mapping[str, Tensor]) -> None:
        """Looks at the norms of an update's gradients, before its step.

        Args:
            norms (mapping): name of a loss -> those of its groups, a scalar or ``[G]``.
        """

    def adam(
        self,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        moments: Sequence[Sequence[Tensor]],
        lr: Tensor,
        settings: Mapping[str, Any],
    ) -> None:
        """Takes a step of Adam that leaves groups that have stopped as they were, in a graph.

        Args:
            parameters, gradients (sequence of Tensor): of the same shapes.
            moments (sequence): means, squares and steps.
            lr (Tensor): learning rate, a scalar.
            settings (mapping): ``betas`` and ``eps``.
        """
        means, squares, steps = moments
        how = self.all, self.frozen(parameters), settings["betas"], settings["eps"]
        adam_(parameters, gradients, means, squares, steps, lr, *how)

    def step(self, optimizer: torch.optim.Adam) -> None:
        """Takes a step of the optimizer that leaves groups that have stopped as they were."""
        moved = [p for p in optimizer.param_groups[0]["params"] if p in optimizer.state]
        names = ("exp_avg", "exp_avg_sq", "step")
        states = [[optimizer.state[p][name] for p in moved] for name in names]
        with torch.no_grad(), freeze(self.frozen(moved), moved, *states):
            optimizer.step()

    def frozen(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Returns which rows of each parameter stay as they are; nothing where one flag says it.

        Shapes:
            - each: bool, a scalar, or as many dims as the parameter, 1 behind the first
        """
        if self.limit is None or len(self.stopped) == 1:
            return []
        return self._rows(parameters)

    def _rows(self, parameters: Sequence[Tensor], common: Tensor | None = None) -> list[Tensor]:
        flags: dict[int, Tensor] = {}
        for name, stopped in self.by_loss(self.stopped > 0):
            clip = self.clips[name]
            flags.update(zip(map(id, clip.parameters), clip.rows_of(stopped, common)))
        return [flags[id(p)] for p in parameters]


class Turns(KLStop):
    """Lets one agent of each group learn at a time; the others' networks stay as they are.

    Whose turn it is is data, so that a graph of an update serves all agents.

    Args:
        *args, **kwargs: of :class:`KLStop`, to which each agent is a group of its own.

    Attributes:
        resting (Tensor): 1 for agents whose turn it is not, else 0, ``[N]`` of all losses.
        common (Tensor): 1 where what serves several agents stays, such as the critic; else 0.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.resting = torch.zeros_like(self.stopped)
        self.common = torch.zeros((), device=self.stopped.device)

    def give(self, active: Tensor, *, common: bool) -> None:
        """Begins a turn.

        Args:
            active (Tensor): whose it is, bool, ``[N]``.
            common (bool): what serves several agents learns, too.
        """
        self.resting.copy_(~active)
        self.common.fill_(0.0 if common else 1.0)
        self.begin()

    def begin(self) -> None:
        """Begins a batch, from which the agents learn whose turn it is."""
        super().begin()
        self.stopped.copy_(self.resting)

    @property
    def tensors(self) -> list[Tensor]:
        """What an update reads of it."""
        return [self.stopped, self.common]

    def step(self, optimizer: torch.optim.Adam) -> None:
        """Takes a step of the optimizer that moves nobody else."""
        parameters = optimizer.param_groups[0]["params"]
        start_adam(optimizer, [p for p in parameters if p.grad is not None])
        super().step(optimizer)

    def frozen(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Returns which rows of each parameter stay as they are, as :class:`KLStop` does."""
        return [] if len(self.stopped) == 1 else self._rows(parameters, self.common > 0)
