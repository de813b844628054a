"""The update: losses of a minibatch, their gradients, limits and one step of the optimizer.

Shapes: F frames of a batch, M frames of a minibatch, U updates, G groups of all objectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, cast

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn

from torchrl_marl.learners.clipping import GradientClip
from torchrl_marl.learners.stopping import KLStop
from torchrl_marl.learners.sums import Counts, counted_by_all, sum_of_all
from torchrl_marl.ranks import current

__all__ = ["Objective", "Updates", "evaluate", "minibatch_keys", "shuffled_epochs"]

History = dict[tuple[str, str], Tensor]


class Objective(Protocol):
    """A loss module: TorchRL's, or any of the same form.

    Its output holds tensors of one form, a scalar or ``[G]``: the entries whose names start with
    ``loss_`` are summed and minimized, the others are metrics. ``minibatch_keys``, where there
    are such, or else ``in_keys`` say what a minibatch holds.
    """

    in_keys: Sequence[NestedKey]

    def __call__(self, minibatch: TensorDictBase) -> TensorDictBase: ...  # noqa: D102

    def parameters(self) -> Iterator[nn.Parameter]: ...  # noqa: D102

    def buffers(self) -> Iterator[Tensor]: ...  # noqa: D102


class Updates:
    """Runs updates on minibatches of a batch, operation by operation.

    Args:
        objectives (mapping): name -> the loss.
        optimizer (Adam): of all their parameters.
        clips (mapping, optional): name -> the limit of its gradient; none by default.
        stop (KLStop, optional): which groups have moved too far to go on with a batch.
        after (callable, optional): called after each step of the optimizer, such as to move
            target networks; without arguments, it writes to tensors in place.
        state (sequence of Tensor): what ``after`` reads and writes beside the parameters.
        prepare (callable, optional): what is done to each minibatch first.

    Examples:
        >>> from tensordict import TensorDict
        >>> class Square(nn.Module):
        ...     in_keys = ["x"]
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.weight = nn.Parameter(torch.zeros(()))
        ...     def forward(self, minibatch):
        ...         error = (minibatch["x"] - self.weight).square().mean()
        ...         return TensorDict({"loss_square": error}, [])
        >>> loss = Square()
        >>> updates = Updates({"all": loss}, torch.optim.Adam(loss.parameters(), lr=0.1))
        >>> frames = TensorDict({"x": torch.ones(4)}, [4])
        >>> history, _ = updates.run(frames, shuffled_epochs(4, 2, n_epochs=3))
        >>> history["all", "loss_square"].shape
        torch.Size([6])
    """

    def __init__(
        self,
        objectives: Mapping[str, Objective],
        optimizer: torch.optim.Adam,
        *,
        clips: Mapping[str, GradientClip] | None = None,
        stop: KLStop | None = None,
        after: Callable[[], None] | None = None,
        state: Sequence[Tensor] = (),
        prepare: Callable[[TensorDictBase], TensorDictBase] | None = None,
    ) -> None:
        self.objectives, self.optimizer = dict(objectives), optimizer
        if clips is None:
            clips = {name: GradientClip(o.parameters()) for name, o in objectives.items()}
        self.clips = dict(clips)
        self.device = optimizer.param_groups[0]["params"][0].device
        self.stop = KLStop(self.clips, None, self.device) if stop is None else stop
        self.after, self.state, self.prepare = after, list(state), prepare

    def run(
        self, frames: TensorDictBase, epochs: Iterable[Iterable[Tensor]]
    ) -> tuple[History, bool]:
        """Trains on the frames of a batch, ``[F]``; ``stop.epochs`` then says how often.

        Args:
            frames (TensorDictBase): with what the objectives read.
            epochs (iterable): each an iterable of the indices ``[M]`` of minibatches, after which
                groups may stop; drawn only as they are needed. One epoch serves a replay buffer.

        Returns:
            dict, bool: metrics of all updates that counted, (name, metric) -> ``[U]`` or
            ``[U, G]``, and whether all is known to be finite that must be.
        """
        rows: list[History] = []
        frames = frames.select(*minibatch_keys(self.objectives.values()), strict=False)
        self.stop.begin()
        for epoch in epochs:
            self.stop.count()
            first = len(rows)
            for indices in epoch:
                rows.append(self.step(frames[indices]))
            if self.stop.limit is not None:
                self.stop.look(torch.stack([self.stop.watched(row) for row in rows[first:]]))
                if bool(self.stop.all):
                    break
        return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}, False

    def step(self, minibatch: TensorDictBase) -> History:
        """Takes one step of the optimizer on all objectives; returns their metrics."""
        total, metrics, counts = self.evaluate(minibatch)
        self.optimizer.zero_grad(set_to_none=True)
        total.backward()
        parameters = self.optimizer.param_groups[0]["params"]
        own = [p.grad for p in parameters if p.grad is not None]
        gradients, metrics = sum_of_all(current(), self.objectives, own, metrics, counts)
        if counts:
            torch._foreach_copy_(own, gradients)
        for name, clip in self.clips.items():
            metrics[name, "grad_norm"] = clip()
        self.stop.saw({name: metrics[name, "grad_norm"] for name in self.clips})
        self.stop.step(self.optimizer)
        if self.after is not None:
            with torch.no_grad():
                self.after()
        return metrics

    def evaluate(self, minibatch: TensorDictBase) -> tuple[Tensor, History, Counts]:
        """Returns the sum of all losses, the metrics of each objective, and everybody's counts."""
        prepared = minibatch if self.prepare is None else self.prepare(minibatch)
        with counted_by_all(current(), self.objectives, prepared) as counts:
            return *evaluate(self.objectives, prepared), counts


@torch.enable_grad()
def evaluate(
    objectives: Mapping[str, Objective], minibatch: TensorDictBase
) -> tuple[Tensor, History]:
    """Returns the sum of all losses, and the metrics of each objective."""
    metrics: History = {}
    total: Tensor | float = 0.0
    for name, objective in objectives.items():
        for key, value in objective(minibatch).items():
            if key.startswith("loss_"):
                total = total + value.sum()
            metrics[name, key] = value.detach()
    return cast(Tensor, total), metrics


def minibatch_keys(objectives: Iterable[Objective]) -> list[NestedKey]:
    """Returns the entries that a minibatch for all objectives holds, as far as there are such."""
    keys = [key for o in objectives for key in getattr(o, "minibatch_keys", o.in_keys)]
    return list(dict.fromkeys(keys))


def shuffled_epochs(
    n_frames: int,
    minibatch_size: int,
    *,
    n_epochs: int,
    device: torch.device | None = None,
) -> Iterator[Sequence[Tensor]]:
    """Draws the minibatches of each epoch when it begins: each frame once, in random order.

    Examples:
        >>> [sorted(torch.cat(epoch).tolist()) for epoch in shuffled_epochs(3, 2, n_epochs=2)]
        [[0, 1, 2], [0, 1, 2]]
    """
    for _ in range(n_epochs):
        yield torch.randperm(n_frames, device=device).split(minibatch_size)
