"""Optimizer steps over epochs of minibatches, with early stop and metrics.

Shapes: F frames of a batch, M frames of a minibatch, U updates, G groups of a loss (in
:class:`KLStop`, of all losses), P members of a population.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor, nn

from torchrl_marl.functional import masked_mean
from torchrl_marl.learners.adam import move, start_adam
from torchrl_marl.learners.clipping import GradientClip
from torchrl_marl.runtime.ranks import current
from torchrl_marl.specs import GroupSpec

if TYPE_CHECKING:
    from torchrl_marl.learners.adam import Adam
    from torchrl_marl.learners.kl_rate import KLRate
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
    """Stops a group's epochs if its KL divergence from the policy of the batch exceeds a limit.

    A group that has stopped is frozen, while other groups continue. Rows of parameters that serve
    several groups of a loss stop with the first of these groups.

    Args:
        clips (mapping): name of a loss -> its gradient clip, which knows the rows of each group.
        limit (float, optional): maximum mean divergence of an epoch; None for no limit.
        device (torch.device): device of the flags.
        metric (str): name of the KL divergence in the loss's output.
        rate (KLRate, optional): learning rates that follow the divergences.

    Attributes:
        stopped (Tensor): 1 for groups that have stopped, else 0, ``[G]``.
        epochs (Tensor): number of epochs that each group has learned from, ``[G]``.
    """

    def __init__(
        self,
        clips: Mapping[str, GradientClip],
        limit: float | None,
        device: torch.device,
        metric: str = "kl_approx",
        rate: KLRate | None = None,
    ) -> None:
        self.limit, self.metric, self.rate = limit, metric, rate
        self.clips = dict(clips)
        self.stopped = torch.zeros(sum(c.n_groups for c in clips.values()), device=device)
        self.epochs = torch.zeros_like(self.stopped)

    def begin(self) -> None:
        """Begins a batch with all groups."""
        self.stopped.zero_()
        self.epochs.zero_()

    def count(self) -> None:
        """Counts the epoch that begins."""
        self.epochs += 1 - self.stopped

    def kl_of_update(self, metrics: Mapping[NestedKey, Tensor]) -> Tensor:
        """Returns the KL divergences of an update, ``[G]``; empty if nothing depends on them."""
        if not self.needs_kl:
            return self.stopped.new_zeros(0)
        kl = torch.cat([metrics[name, self.metric].reshape(-1) for name in self.clips])
        if self.rate is None:
            return kl
        # Without a living agent the mean ratio and the divergence are 0, which must raise no rate.
        ratio = torch.cat([metrics[name, "mean_ratio"].reshape(-1) for name in self.clips])
        return torch.where(ratio > 0, kl, torch.nan)

    def check(self, kl: Tensor) -> None:
        """Adapts learning rates, and stops groups that exceed the limit in an epoch.

        Args:
            kl (Tensor): estimates of the KL divergence in each update, ``[U, G]``.
        """
        if self.rate is not None:
            self.rate.adapt(kl.nanmean(0), self.stopped == 0)
            kl = kl.nan_to_num(0.0)
        if self.limit is not None:
            self.stopped.logical_or_(kl.mean(0) > self.limit)

    @property
    def needs_kl(self) -> bool:
        """True if a limit or learning rates depend on the KL divergences."""
        return self.limit is not None or self.rate is not None

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors that an update reads."""
        return [self.stopped, *([] if self.rate is None else [self.rate.values])]

    @property
    def all(self) -> Tensor:
        """1 if all groups have stopped, else 0; a scalar."""
        return self.stopped.amin()

    def by_loss(self, values: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Splits values ``[G]`` by loss; yields each name with the values of its groups."""
        sizes = [clip.n_groups for clip in self.clips.values()]
        return zip(self.clips, values.split(sizes))

    def frozen(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Returns a mask of frozen rows for each parameter; empty if there is only one group.

        Shapes:
            - each: bool, a scalar or ``[rows, 1, ...]`` with the parameter's number of dims
        """
        if self.limit is None or len(self.stopped) == 1:
            return []
        return self._rows(parameters)

    def rates_of(self, parameters: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Returns the highest learning rate, and the share of it that each row takes.

        Rows that serve several groups take the lowest rate of these groups.

        Shapes:
            - shares: a scalar or ``[rows, 1, ...]`` for each parameter; empty for one group
        """
        assert self.rate is not None
        if len(self.rate.values) == 1:
            return self.rate.values[0], []
        shares: dict[int, Tensor] = {}
        highest = self.rate.values.amax()
        for name, own in self.by_loss(self.rate.values / highest):
            clip = self.clips[name]
            shares.update(zip(map(id, clip.parameters), clip.spread_all(own, own.amin())))
        return highest, [shares[id(p)].to(p) for p in parameters]

    def _rows(self, parameters: Sequence[Tensor], shared: Tensor | None = None) -> list[Tensor]:
        flags: dict[int, Tensor] = {}
        for name, stopped in self.by_loss(self.stopped > 0):
            clip = self.clips[name]
            flags.update(zip(map(id, clip.parameters), clip.rows_of(stopped, shared)))
        return [flags[id(p)] for p in parameters]


Counts = dict[str, Tensor]
History = dict[tuple[str, str], Tensor]


class Objective(Protocol):
    """Protocol of a loss module, such as TorchRL's.

    Its output holds tensors of the same shape, a scalar or ``[G]``. Entries with names that start
    with ``loss_`` are summed and minimized; the other entries are metrics. A minibatch holds the
    entries that the attribute ``minibatch_keys`` of the loss names, or ``in_keys`` if the loss does
    not have it.
    """

    in_keys: Sequence[NestedKey]

    def __call__(self, minibatch: TensorDictBase) -> TensorDictBase: ...  # noqa: D102

    def parameters(self) -> Iterator[nn.Parameter]: ...  # noqa: D102

    def buffers(self) -> Iterator[Tensor]: ...  # noqa: D102


class Updates:
    """Runs updates on the minibatches of a batch, eagerly.

    Args:
        objectives (mapping): name -> the loss.
        optimizer (Adam): optimizer of the parameters of all losses.
        clips (mapping, optional): name of a loss -> its gradient clip; no clipping by default.
        stop (KLStop, optional): early stop of a batch's epochs.
        after (callable, optional): function without arguments, called after each step of the
            optimizer, for example to update target networks; it must write to tensors in place.
        state (sequence of Tensor): tensors that ``after`` reads or writes besides the parameters.
        prepare (callable, optional): transform that is applied to each minibatch.
        members (Members, optional): members of a population; ``optimizer`` is then an
            :class:`~torchrl_marl.learners.adam.Adam` with their parameters.

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
        """Trains on the frames of a batch, ``[F]``; ``stop.epochs`` then counts the epochs.

        Args:
            frames (TensorDictBase): frames with the entries that the objectives read.
            epochs (iterable): an iterable of minibatches for each epoch. A minibatch is a tensor of
                frame indices, ``[M]``. Minibatches are drawn lazily, because groups may stop after
                an epoch.

        Returns:
            dict, bool: metrics of all updates that counted, (name, metric) -> ``[U]`` or
            ``[U, G]``, and whether losses and gradients are known to be finite.
        """
        rows: list[History] = []
        frames = frames.select(*minibatch_keys(self.objectives.values()), strict=False)
        self.stop.begin()
        for epoch in epochs:
            self.stop.count()
            first = len(rows)
            for indices in epoch:
                rows.append(self.step(frames[indices]))
            if self.stop.needs_kl:
                self.stop.check(torch.stack([self.stop.kl_of_update(row) for row in rows[first:]]))
                if self.stop.limit is not None and bool(self.stop.all):
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

    def compute(
        self, name: str, function: Callable[[TensorDictBase], Tensor], frames: TensorDictBase
    ) -> Tensor:
        """Returns a function of the frames of a batch and of the parameters of an objective.

        Args:
            name (str): name of the objective.
            function (callable): reads the entries of a minibatch; it writes nothing.
            frames (TensorDictBase): frames of a batch, ``[F]``.
        """
        return function(frames)

    def _move(self) -> None:
        """Takes a step of the optimizer without changing groups that have stopped."""
        moved = [p for p in self.optimizer.param_groups[0]["params"] if p.grad is not None]
        frozen = self.stop.frozen(moved)
        if frozen or self.members is not None or self.stop.rate is not None:
            start_adam(self.optimizer, moved)
        gradients = [cast(Tensor, p.grad) for p in moved]
        step_options: dict[str, Any] = {"skip": self.stop.all, "frozen": frozen}
        if self.stop.rate is not None:
            lr, step_options["shares"] = self.stop.rates_of(moved)
            move(self.optimizer, moved, gradients, lr=lr, **step_options)
            return
        if self.members is not None:
            lr = cast("Adam", self.optimizer).lr
            move(self.optimizer, moved, gradients, lr=lr, members=self.members, **step_options)
            return
        if not frozen:
            self.optimizer.step()
            return
        wide = torch.float64 if self.device.type == "cpu" else torch.float32
        lr = torch.tensor(self.optimizer.param_groups[0]["lr"], dtype=wide, device=self.device)
        move(self.optimizer, moved, gradients, lr=lr, **step_options)

    def evaluate(self, minibatch: TensorDictBase) -> tuple[Tensor, History, Counts]:
        """Returns the sum of losses, the metrics of each objective, and counts over all ranks.

        With one process there are no counts.
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
    """Returns the keys that all objectives read from a minibatch; a batch may lack some keys."""
    keys = [key for o in objectives for key in getattr(o, "minibatch_keys", o.in_keys)]
    return list(dict.fromkeys(keys))


def shuffled_epochs(
    n_frames: int,
    minibatch_size: int,
    *,
    n_epochs: int,
    device: torch.device | None = None,
) -> Iterator[Sequence[Tensor]]:
    """Draws the minibatches of each epoch lazily; each frame occurs once, in random order.

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
    rates: Mapping[str, Tensor],
    epochs: Mapping[str, Tensor],
) -> TensorDict:
    """Returns the metrics of a batch, ``(group, name)``: scalars; ``[P]`` for a population.

    Args:
        history (mapping): (name of groups that are trained as one, metric) -> ``[U]``; ``[U, G]``
            for several groups.
        joined (mapping): the same names -> the groups.
        groups (mapping): all groups by name.
        rates (mapping): name of groups that are trained as one -> learning rate of each group,
            ``[G]``.
        epochs (mapping): name of groups that are trained as one -> number of epochs of each group,
            ``[G]``. Updates after these epochs changed nothing, so they do not count.
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
    for key, of_groups in (("lr", rates), ("epochs", epochs)):
        for name, values in of_groups.items():
            for group, own in joined[name].by_source(values):
                summary[group.name, key] = own.to(torch.float32, copy=True)
    return summary
