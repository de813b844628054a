"""Updates captured as graphs.

Shapes: U updates, G groups of a loss.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor
from torch.distributions import Distribution
from torch.utils._python_dispatch import _disable_current_modes

from torchrl_marl.capture import Program, capture
from torchrl_marl.errors import CaptureError
from torchrl_marl.learners.adam import moments_of, move, start_adam
from torchrl_marl.learners.block import must_be_finite
from torchrl_marl.learners.updates import (
    History,
    Updates,
    minibatch_keys,
)
from torchrl_marl.runtime.random_state import RandomState
from torchrl_marl.runtime.ranks import current
from torchrl_marl.simulator.python_state import PythonState, watched

if TYPE_CHECKING:
    from torchrl_marl.learners.adam import Adam

__all__ = [
    "CapturedUpdates",
    "Programs",
    "make_updates",
    "random_state",
    "set_random_state",
    "unchanged",
    "warn_of_refusal",
]


class Programs(dict[Any, Program]):
    """Captured graphs; a deep copy is empty, since graphs belong to the original networks."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Programs:
        return Programs()


@contextlib.contextmanager
def unchanged(device: torch.device, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Context that restores tensors and the random state on exit.

    Within it, distributions do not validate their arguments.

    Args:
        device (torch.device): device whose random state is restored.
        tensors (sequence of Tensor): tensors that an update writes to.
    """
    before = [x.detach().clone() for x in tensors]
    validates, state = Distribution._validate_args, random_state(device)
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(validates)
        set_random_state(device, state)
        with torch.no_grad():
            for x, value in zip(tensors, before):
                x.copy_(value)


def random_state(device: torch.device) -> Tensor:
    """Returns the state of torch's random generator of a device."""
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.get_rng_state()


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Restores a state from :func:`random_state`."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def warn_of_refusal(refusal: CaptureError) -> None:
    """Warns that updates run eagerly, and why."""
    warnings.warn(
        f"updates run eagerly, since the networks cannot be captured: {refusal}", stacklevel=4
    )


def make_updates(*args: Any, execution: str = "eager", **kwargs: Any) -> Updates:
    """Builds updates that run eagerly or as captured graphs.

    Args:
        *args, **kwargs: arguments of :class:`~torchrl_marl.learners.updates.Updates`.
        execution (str): ``eager``, or an execution of :func:`~torchrl_marl.capture.capture`.
    """
    if execution == "eager":
        return Updates(*args, **kwargs)
    return CapturedUpdates(*args, execution=execution, **kwargs)


class CapturedUpdates(Updates):
    """Runs each update as one graph, without waiting for the device in between.

    A graph is captured for each size of a minibatch at its first use. Parameters, the optimizer's
    state, statistics and schedules are inputs of the graph, and the graph writes some of these
    inputs in place. Checkpoints and schedules are therefore the same as in eager execution. After
    an epoch that exceeds the KL limit, updates still run but change nothing.

    Args:
        execution (str): an execution of :func:`~torchrl_marl.capture.capture`.
        *args, **kwargs: arguments of :class:`~torchrl_marl.learners.updates.Updates`.

    Attributes:
        programs (dict): (M, F, number of ranks, keys of the frames) -> the graph for minibatches of
            M frames, drawn from F frames. A loss that reads other entries has another graph.

    Reduces to: ``Updates``, to the bit if graphs are not compiled.
    """

    def __init__(self, *args: Any, execution: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.execution = execution
        self.programs = Programs()
        self._columns: dict[NestedKey, slice] = {}
        self._columns_of: dict[Any, dict[NestedKey, slice]] = {}
        self._fixed_copies: dict[Any, list[Tensor]] = {}
        # On a CPU float64 gives the same bits as the optimizer's Python float; a GPU needs float32.
        wide = torch.float64 if self.device.type == "cpu" else torch.float32
        self._lr = torch.zeros((), dtype=wide, device=self.device)

    def run(
        self, frames: TensorDictBase, epochs: Iterable[Iterable[Tensor]]
    ) -> tuple[History, bool]:
        """Trains on the frames of a batch, ``[F]``; ``stop.epochs`` then counts the epochs.

        Args:
            frames, epochs: as for eager updates, but the minibatches of all epochs are drawn, even
                if groups stop early.

        Returns:
            dict, bool: metrics of all updates that counted, (name, metric) -> ``[U]`` or
            ``[U, G]``, and whether losses and gradients are finite.
        """
        epochs = iter(epochs)
        if self.execution != "eager" and not self.programs:
            drawn = next(epochs)
            self._try_to_capture(frames, next(iter(drawn)))
            epochs = chain([drawn], epochs)
        if self.execution == "eager":
            return super().run(frames, epochs)
        stop = self.stop
        # In a fixed order, which does not depend on the order of a batch's entries.
        needed = minibatch_keys(self.objectives.values())
        keys = [key for key in needed if frames.get(key, None) is not None]
        values = self._copy_to_fixed_memory([cast(Tensor, frames.get(key)) for key in keys])
        self._lr.fill_(self.optimizer.param_groups[0]["lr"])
        stop.begin()
        leaves: list[Tensor] = []
        rows: list[Tensor] = []
        ends: list[int] = []  # number of updates up to each epoch's end
        random_states: list[Tensor] = []
        for epoch in self._record_random_states(epochs, random_states):
            stop.count()
            first = len(rows)
            for indices in epoch:
                if not leaves:
                    if not self.optimizer.state:
                        self._start_optimizer(_minibatch(keys, values, indices))
                    leaves = [indices, *values, *self._graph_inputs()]
                leaves[0] = indices
                rows.append(self._program(keys, leaves).flat(leaves)[0])
            ends.append(len(rows))
            if stop.needs_kl:
                stop.check(torch.stack(rows[first:])[:, : len(stop.stopped)])
        table = torch.stack(rows)
        n_epochs, finite = self._count_epochs(table, ends)
        if n_epochs < len(random_states):  # undo the random draws of epochs that did not count
            set_random_state(self.device, random_states[n_epochs])
        table = table[: ends[n_epochs - 1]]
        metrics = {key: table[:, columns].contiguous() for key, columns in self._columns.items()}
        return (
            {key: x.squeeze(1) if x.shape[1] == 1 else x for key, x in metrics.items()},
            finite,
        )

    def _try_to_capture(self, frames: TensorDictBase, indices: Tensor) -> None:
        """Captures an update before the first one; updates run eagerly if that is not possible."""
        needed = minibatch_keys(self.objectives.values())
        keys = [key for key in needed if frames.get(key, None) is not None]
        values = self._copy_to_fixed_memory([cast(Tensor, frames.get(key)) for key in keys])
        before: PythonState | None = None
        random = RandomState.of_process()
        try:
            before = PythonState(self.objectives, tensors=True)
            if not self.optimizer.state:
                self._start_optimizer(_minibatch(keys, values, indices))
            self._program(keys, [indices, *values, *self._graph_inputs()])
        except CaptureError as refusal:
            if before is not None:
                before.restore()
            random.install()
            self.execution = "eager"
            warn_of_refusal(refusal)

    def _record_random_states(
        self, epochs: Iterable[Iterable[Tensor]], states: list[Tensor]
    ) -> Iterator[Iterable[Tensor]]:
        """Records the random state before each epoch is drawn, if groups may stop early."""
        remaining = iter(epochs)
        while True:
            state = None if self.stop.limit is None else random_state(self.device)
            epoch = next(remaining, None)
            if epoch is None:
                return
            if state is not None:
                states.append(state)
            yield epoch

    def _count_epochs(self, table: Tensor, ends: list[int]) -> tuple[int, bool]:
        """Returns the number of epochs that count, and whether their results are finite.

        The results are losses and gradient norms. Waits for the device.
        """
        epochs = self.stop.epochs.amax()
        watched = [c for key, c in self._columns.items() if must_be_finite(key[1])]
        finite = torch.cat([table[:, columns] for columns in watched], 1).isfinite().all(1)
        sizes = [end - begin for begin, end in pairwise([0, *ends])]
        of_epochs = torch.stack([rows.all() for rows in finite.split(sizes)])
        counted = torch.arange(len(ends), device=self.device) < epochs
        n_epochs, all_finite = torch.stack(
            [epochs, (of_epochs | ~counted).all().to(epochs)]
        ).tolist()
        for program in self.programs.values():
            program.raise_failed()
        return int(n_epochs), bool(all_finite)

    def _copy_to_fixed_memory(self, values: list[Tensor]) -> list[Tensor]:
        """Copies frames, once per batch, to the fixed memory that CUDA graphs read."""
        if self.execution != "cudagraph":
            return values
        shapes = tuple((x.shape, x.dtype) for x in values)
        if shapes in self._fixed_copies:
            torch._foreach_copy_(self._fixed_copies[shapes], values)
        else:
            copies = [x.clone(memory_format=torch.contiguous_format) for x in values]
            self._fixed_copies[shapes] = copies
        return self._fixed_copies[shapes]

    # ------------------------------------------------------------------------------ one update

    def _program(self, keys: Sequence[NestedKey], leaves: list[Tensor]) -> Program:
        n_frames = len(leaves[0])
        shape = n_frames, len(leaves[1]), current().size, *keys
        if shape in self.programs:
            self._columns = self._columns_of[shape]
            return self.programs[shape]

        def update(*inputs: Tensor) -> Tensor:
            # Networks, clips and optimizer hold the other inputs.
            return self._take_step(_minibatch(keys, inputs[1 : 1 + len(keys)], inputs[0]))

        with unchanged(self.device, self._buffers()):  # networks may fill caches in the first call
            self.evaluate(_minibatch(keys, leaves[1 : 1 + len(keys)], leaves[0]))
        name = f"the update of {', '.join(self.objectives)} on {n_frames:,} frames"
        with unchanged(self.device, leaves[1 + len(keys) :]), watched(self.objectives):
            self.programs[shape] = capture(update, *leaves, name=name, execution=self.execution)
        self._columns_of[shape] = self._columns
        return self.programs[shape]

    def compute(
        self, name: str, function: Callable[[TensorDictBase], Tensor], frames: TensorDictBase
    ) -> Tensor:
        """Returns a function of the frames as one graph, which is captured at the first use."""
        needed = minibatch_keys([self.objectives[name]])
        keys = [key for key in needed if frames.get(key, None) is not None]
        values = self._copy_to_fixed_memory([cast(Tensor, frames.get(key)) for key in keys])
        leaves = [*values, *self._graph_inputs()]
        which = name, len(frames), *keys
        if which not in self.programs:

            def compute(*inputs: Tensor) -> Tensor:
                columns = dict(zip(keys, inputs))
                return function(TensorDict(columns, [len(frames)], device=self.device))

            what = f"{function.__name__} of {name} on {len(frames):,} frames"
            with unchanged(self.device, []):
                self.programs[which] = capture(
                    compute, *leaves, name=what, execution=self.execution
                )
        return self.programs[which].flat(leaves)[0]

    def _take_step(self, minibatch: TensorDictBase) -> Tensor:
        """Takes one step of the optimizer; returns a row of metrics, the KL divergences first."""
        buffers = [] if self.stop.limit is None else self._buffers()
        before = [(x, x.clone()) for x in buffers]
        gradients, metrics = self._gradients(minibatch)
        with torch.no_grad():
            for x, old in before:
                with _disable_current_modes():
                    written = not torch.equal(x, old)
                if written:  # such as the statistics of batch normalization
                    x.copy_(torch.where(self.stop.all > 0, old, x))
            for name, clip in self.clips.items():
                of_clip = [gradients.get(parameter) for parameter in clip.parameters]
                metrics[name, "grad_norm"] = clip.scale(of_clip)
                if self.members is not None:
                    self.members.note(metrics[name, "grad_norm"])
            row = self._row(metrics)
            self._step_optimizer(gradients)
            self._call_after()
            return row

    def _gradients(self, minibatch: TensorDictBase) -> tuple[dict[Tensor, Tensor], History]:
        """Returns the gradient of each parameter that the losses reach, and the metrics."""
        total, metrics, counts = self.evaluate(minibatch)
        parameters = self._parameters_with_state
        gradients = torch.autograd.grad(total, parameters, allow_unused=True)
        found = {p: own for p, own in zip(parameters, gradients) if own is not None}
        if not counts:
            return found, metrics
        from torchrl_marl.learners.shards import reduce_gradients

        of_ranks = current(), self.objectives, [*found.values()], metrics, counts
        reduced, metrics = reduce_gradients(*of_ranks)
        return dict(zip(found, reduced)), metrics

    def _row(self, metrics: History) -> Tensor:
        """Returns the KL divergences and the metrics as one row, and remembers their columns."""
        columns = [self.stop.kl_of_update(metrics)]
        columns += [value.reshape(-1) for value in metrics.values()]
        ends = pairwise(accumulate(map(len, columns)))
        self._columns = {key: slice(*own) for key, own in zip(metrics, ends)}
        return torch.cat(columns)

    def _step_optimizer(self, gradients: Mapping[Tensor, Tensor]) -> None:
        """Moves the parameters by one step of the optimizer."""
        parameters, rate = list(gradients), self.stop.rate
        lr, shares = (self._lr, []) if rate is None else self.stop.rates_of(parameters)
        move(
            self.optimizer,
            parameters,
            list(gradients.values()),
            lr=lr,
            skip=self.stop.all,
            frozen=self.stop.frozen(parameters),
            shares=shares,
            members=self.members,
        )

    def _call_after(self) -> None:
        """Calls ``after``, and undoes its changes once all groups have stopped."""
        if self.after is None:
            return
        before = [] if self.stop.limit is None else [x.clone() for x in self.state]
        self.after()
        for x, old in zip(self.state, before):
            x.copy_(torch.where(self.stop.all > 0, old, x))

    def _graph_inputs(self) -> list[Tensor]:
        """Returns all tensors that an update reads or writes besides the frames."""
        everything = self.optimizer.param_groups[0]["params"]
        moments = [
            x for own in moments_of(self.optimizer, self._parameters_with_state) for x in own
        ]
        found = [*everything, *moments, *self._buffers(), *self.state, self._lr, *self.stop.tensors]
        if self.members is not None:
            found += [cast("Adam", self.optimizer).rates, *self.members.tensors]
        return list({id(x): x for x in found}.values())

    def _buffers(self) -> list[Tensor]:
        return [buffer for loss in self.objectives.values() for buffer in loss.buffers()]

    @property
    def _parameters_with_state(self) -> list[Tensor]:
        """The parameters that a gradient reaches."""
        state = self.optimizer.state
        return [p for p in self.optimizer.param_groups[0]["params"] if state.get(p)]

    def _start_optimizer(self, minibatch: TensorDictBase) -> None:
        """Creates Adam's state for each parameter that has a gradient."""
        parameters = [p for p in self.optimizer.param_groups[0]["params"] if p.requires_grad]
        with unchanged(self.device, self._buffers()):
            total = self.evaluate(minibatch)[0]
            gradients = torch.autograd.grad(total, parameters, allow_unused=True)
        start_adam(self.optimizer, [p for p, g in zip(parameters, gradients) if g is not None])


def _minibatch(
    keys: Sequence[NestedKey], values: Sequence[Tensor], indices: Tensor
) -> TensorDictBase:
    minibatch = TensorDict({}, [len(indices)], device=indices.device)
    for key, value in zip(keys, values):
        minibatch.set(key, value.index_select(0, indices))
    return minibatch
