"""Steps of an optimizer over epochs of minibatches, what stops them, and their metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor, nn

from torchrl_marl.functional import masked_mean
from torchrl_marl.learners.adam import freeze, moments_of, move, start_adam
from torchrl_marl.learners.clipping import GradientClip
from torchrl_marl.runtime.ranks import current
from torchrl_marl.specs import GroupSpec

if TYPE_CHECKING:
    from torchrl_marl.learners.adam import Adam
    from torchrl_marl.learners.members import Members

__all__ = [
    "KLStop",
    "Objective",
    "Updates",
    "evaluate",
    "minibatch_keys",
    "shuffled_epochs",
    "summarize",
]


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


Counts = dict[str, Tensor]
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
        members (Members, optional): of a population; ``optimizer`` is then an
            :class:`~torchrl_marl.learners.adam.Adam` of theirs.

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
        members: Members | None = None,
    ) -> None:
        self.objectives, self.optimizer = dict(objectives), optimizer
        if clips is None:
            clips = {name: GradientClip(o.parameters()) for name, o in objectives.items()}
        self.clips = dict(clips)
        self.device = optimizer.param_groups[0]["params"][0].device
        self.stop = KLStop(self.clips, None, self.device) if stop is None else stop
        self.after, self.state, self.prepare = after, list(state), prepare
        self.members = members

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
        if counts:
            from torchrl_marl.learners.shards import reduce_gradients

            gradients, metrics = reduce_gradients(current(), self.objectives, own, metrics, counts)
            torch._foreach_copy_(own, gradients)
        for name, clip in self.clips.items():
            metrics[name, "grad_norm"] = clip()
            if self.members is not None:
                self.members.note(metrics[name, "grad_norm"])
        self._move()
        if self.after is not None:
            with torch.no_grad():
                self.after()
        return metrics

    def _move(self) -> None:
        """Takes a step of the optimizer that leaves groups that have stopped as they were."""
        moved = [p for p in self.optimizer.param_groups[0]["params"] if p.grad is not None]
        frozen = self.stop.frozen(moved)
        if frozen or self.members is not None:
            start_adam(self.optimizer, moved)
        if self.members is not None:
            gradients, lr = [cast(Tensor, p.grad) for p in moved], cast("Adam", self.optimizer).lr
            how: dict[str, Any] = {"skip": self.stop.all, "frozen": frozen}
            move(self.optimizer, moved, gradients, lr=lr, members=self.members, **how)
            return
        if not frozen:
            self.optimizer.step()
            return
        with torch.no_grad(), freeze(frozen, moved, *moments_of(self.optimizer, moved)):
            self.optimizer.step()

    def evaluate(self, minibatch: TensorDictBase) -> tuple[Tensor, History, Counts]:
        """Returns the sum of all losses, the metrics of each objective, and everybody's counts.

        One process alone has no counts of others.
        """
        prepared, ranks = minibatch if self.prepare is None else self.prepare(minibatch), current()
        if ranks.size == 1:
            return *evaluate(self.objectives, prepared), {}
        from torchrl_marl.learners.shards import global_counts

        with global_counts(ranks, self.objectives, prepared) as counts:
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


def summarize(
    history: Mapping[NestedKey, Tensor],
    joined: Mapping[str, GroupSpec],
    groups: Mapping[str, GroupSpec],
    *,
    lr: float,
    epochs: Mapping[str, Tensor],
) -> TensorDict:
    """Returns the metrics of a batch as tensors, ``(group, name)``; of a population ``[P]``.

    Args:
        history (mapping): (name of groups that are trained as one, metric) -> ``[U]``, or
            ``[U, G]`` where they are several.
        joined (mapping): those names -> the groups.
        groups (mapping): all groups by name.
        lr (float): the learning rate.
        epochs (mapping): name of groups that are trained as one -> how often each has passed
            over the batch, ``[G]``; updates behind that changed nothing, and do not count.
    """
    device = next(iter(history.values())).device
    summary = TensorDict({name: {} for name in groups}, [], device=device)
    longest = torch.cat(list(epochs.values())).amax()
    for (name, key), values in cast(Mapping[tuple[str, str], Tensor], history).items():
        values = values.reshape(len(values), -1)
        update = torch.arange(len(values), device=device).unsqueeze(1)
        counts = update * longest < epochs[name] * len(values)
        if key == "max_ratio":
            value = values.masked_fill(~counts, -torch.inf).amax(0)
        else:
            value = masked_mean(values, counts, 0)
        for group, own in joined[name].by_source(value):
            summary[group.name, key] = own
    for name, passes in epochs.items():
        for group, own in joined[name].by_source(passes):
            # Filled on the device: nothing is copied there.
            summary[group.name, "lr"] = torch.full(own.shape, lr, device=device)
            summary[group.name, "epochs"] = own.clone()
    return summary
