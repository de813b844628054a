"""The update as one graph: minibatch, losses, gradients, limits and Adam of all groups.

Shapes: F frames of a batch, M frames of a minibatch, U updates, G groups that are trained as one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor
from torch.distributions import Distribution

from torchrl_marl.capture import Program, capture
from torchrl_marl.learners.adam import adam_
from torchrl_marl.learners.clipping import GradientClip
from torchrl_marl.learners.config import OnPolicyConfig
from torchrl_marl.learners.stopping import KLStop
from torchrl_marl.learners.summary import must_be_finite
from torchrl_marl.objectives.ppo import MAPPOLoss

__all__ = ["CapturedUpdate", "evaluate_losses", "kl_of"]


class _Programs(dict[Any, Program]):
    """Recorded graphs, which belong to the networks that they were recorded with."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Programs:
        return _Programs()


class CapturedUpdate:
    """The epochs of a batch; each update is one graph, and nothing waits for the device between.

    A graph is recorded for each size of a minibatch, when it is first met. Parameters, the
    optimizer's state, statistics and schedules are its inputs, some written in place, so that
    checkpoints and schedules are those of eager execution. After an epoch that moved too far,
    updates still run, but change nothing.

    Args:
        losses (dict): name of a group -> its loss.
        clips (dict): name of a group -> the limit of its gradient.
        optimizer (Adam): of all their parameters.
        config (OnPolicyConfig): minibatches and epochs.
        execution (str): of :func:`~torchrl_marl.capture.capture`.
        stop (KLStop): which groups have moved too far to go on with a batch.

    Attributes:
        programs (dict): (M, F) -> its graph.

    Reduces to: the learner's eager updates; to the bit, where graphs are not compiled.
    """

    def __init__(
        self,
        losses: dict[str, MAPPOLoss],
        clips: dict[str, GradientClip],
        optimizer: torch.optim.Adam,
        config: OnPolicyConfig,
        execution: Any,
        stop: KLStop,
    ) -> None:
        self.stop = stop
        self.losses, self.clips, self.optimizer = losses, clips, optimizer
        self.config, self.execution = config, execution
        self.programs = _Programs()
        self._columns: dict[NestedKey, slice] = {}
        self._placed: list[Tensor] = []
        self._device = optimizer.param_groups[0]["params"][0].device
        # A CPU reads it as the number that the optimizer has, to the bit; a GPU wants floats.
        wide = torch.float64 if self._device.type == "cpu" else torch.float32
        self._lr = torch.zeros((), dtype=wide, device=self._device)

    def epochs(self, frames: TensorDictBase) -> tuple[dict[NestedKey, Tensor], bool]:
        """Trains on the frames of a batch, ``[F]``; ``stop.epochs`` then tells how often.

        Returns:
            metrics of all updates that counted for a group, ``[U]`` or ``[U, G]``, and whether
            all is finite that must be.
        """
        stop, size = self.stop, self.config.minibatch_size
        keys = list(frames.keys(True, True))
        values = self._place([cast(Tensor, frames.get(key)) for key in keys])
        self._lr.fill_(self.optimizer.param_groups[0]["lr"])
        stop.begin()
        leaves: list[Tensor] = []
        rows: list[Tensor] = []
        random_states: list[Tensor] = []
        for _ in range(self.config.num_epochs):
            if stop.limit is not None:
                random_states.append(self._random_state())
            stop.count()
            first = len(rows)
            for indices in torch.randperm(frames.shape[0], device=self._device).split(size):
                if not leaves:
                    self._start_optimizer(_minibatch(keys, values, indices))
                    leaves = [indices, *values, *self._state()]
                leaves[0] = indices
                rows.append(self._program(keys, leaves).flat(leaves)[0])
            stop.look(torch.stack(rows[first:])[:, : len(stop.stopped)])
        table = torch.stack(rows)
        n_epochs, finite = self._read(table)
        if n_epochs < len(random_states):  # as if nothing had been drawn for those that did not
            self._set_random_state(random_states[n_epochs])
        table = table[: n_epochs * len(rows) // self.config.num_epochs]
        metrics = {key: table[:, columns].contiguous() for key, columns in self._columns.items()}
        return (
            {key: x.squeeze(1) if x.shape[1] == 1 else x for key, x in metrics.items()},
            finite,
        )

    def _read(self, table: Tensor) -> tuple[int, bool]:
        """Waits for the device, once: how many epochs counted, and whether they are finite."""
        epochs = self.stop.epochs.amax()
        watched = [c for key, c in self._columns.items() if must_be_finite(key[1])]
        finite = torch.cat([table[:, columns] for columns in watched], 1).isfinite().all(1)
        counted = torch.arange(self.config.num_epochs, device=self._device) < epochs
        finite = (finite.view(len(counted), -1) | ~counted.unsqueeze(1)).all()
        n_epochs, all_finite = torch.stack([epochs, finite.to(epochs)]).tolist()
        for program in self.programs.values():
            program.raise_failed()
        return int(n_epochs), bool(all_finite)

    def _place(self, values: list[Tensor]) -> list[Tensor]:
        """Where graphs are replayed on fixed memory, frames are copied there once a batch."""
        if self.execution != "cudagraph":
            return values
        if [(x.shape, x.dtype) for x in values] != [(x.shape, x.dtype) for x in self._placed]:
            self._placed = [x.clone(memory_format=torch.contiguous_format) for x in values]
        else:
            torch._foreach_copy_(self._placed, values)
        return self._placed

    # ------------------------------------------------------------------------------ one update

    def _program(self, keys: Sequence[NestedKey], leaves: list[Tensor]) -> Program:
        shape = len(leaves[0]), len(leaves[1])
        if shape in self.programs:
            return self.programs[shape]

        def update(*inputs: Tensor) -> Tensor:
            # Networks, limits and optimizer hold the other inputs themselves.
            return self._update(_minibatch(keys, inputs[1 : 1 + len(keys)], inputs[0]))

        name = f"the update of {', '.join(self.losses)} on {shape[0]:,} frames"
        with self._unchanged(leaves[1 + len(keys) :]):
            self.programs[shape] = capture(update, *leaves, name=name, execution=self.execution)
        return self.programs[shape]

    def _update(self, minibatch: TensorDictBase) -> Tensor:
        """One step of the optimizer; metrics as one row, the KL of each loss first."""
        total, metrics = evaluate_losses(self.losses, minibatch)
        parameters, means, squares, steps = self._moments()
        found = dict(zip(parameters, torch.autograd.grad(total, parameters)))
        with torch.no_grad():
            for name, clip in self.clips.items():
                own = [found.get(parameter) for parameter in clip.parameters]
                metrics[name, "grad_norm"] = clip.scale(own)
            settings = self.optimizer.param_groups[0]
            adam_(
                parameters,
                list(found.values()),
                means,
                squares,
                steps,
                self._lr,
                self.stop.all,
                self.stop.frozen(parameters),
                settings["betas"],
                settings["eps"],
            )
            kl = kl_of(metrics, self.losses)
            columns = [kl, *(value.reshape(-1) for value in metrics.values())]
            ends = pairwise(accumulate(map(len, columns)))
            self._columns = {key: slice(*own) for key, own in zip(metrics, ends)}
            return torch.cat(columns)

    def _state(self) -> list[Tensor]:
        """All that an update reads or writes beside the frames."""
        everything = self.optimizer.param_groups[0]["params"]
        moments = [x for own in self._moments()[1:] for x in own]
        buffers = [buffer for loss in self.losses.values() for buffer in loss.buffers()]
        found = [*everything, *moments, *buffers, self._lr, self.stop.stopped]
        return list({id(x): x for x in found}.values())

    def _moments(self) -> tuple[list[Tensor], ...]:
        """Parameters that a gradient reaches, and Adam's state of them."""
        state = self.optimizer.state
        parameters = [p for p in self.optimizer.param_groups[0]["params"] if state.get(p)]
        names = ("exp_avg", "exp_avg_sq", "step")
        return parameters, *([state[p][name] for p in parameters] for name in names)

    def _start_optimizer(self, minibatch: TensorDictBase) -> None:
        """Gives Adam's state to the parameters that a gradient reaches, as its first step does."""
        if self.optimizer.state:
            return
        parameters = [p for p in self.optimizer.param_groups[0]["params"] if p.requires_grad]
        with self._unchanged([]):
            total, _ = evaluate_losses(self.losses, minibatch)
            gradients = torch.autograd.grad(total, parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients):
            if gradient is not None:
                self.optimizer.state[parameter] = {
                    "step": torch.zeros((), device=self._device),
                    "exp_avg": torch.zeros_like(parameter).detach(),
                    "exp_avg_sq": torch.zeros_like(parameter).detach(),
                }

    # ------------------------------------------------------------------- what recording undoes

    @contextlib.contextmanager
    def _unchanged(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Recording runs an update, which is undone; distributions do not look at values."""
        before = [x.detach().clone() for x in tensors]
        validates, state = Distribution._validate_args, self._random_state()
        Distribution.set_default_validate_args(False)
        try:
            yield
        finally:
            Distribution.set_default_validate_args(validates)
            self._set_random_state(state)
            with torch.no_grad():
                for x, value in zip(tensors, before):
                    x.copy_(value)

    def _random_state(self) -> Tensor:
        if self._device.type == "cuda":
            return torch.cuda.get_rng_state(self._device)
        return torch.get_rng_state()

    def _set_random_state(self, state: Tensor) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(state, self._device)
        else:
            torch.set_rng_state(state)


@torch.enable_grad()
def evaluate_losses(
    losses: Mapping[str, MAPPOLoss], minibatch: TensorDictBase
) -> tuple[Tensor, dict[NestedKey, Tensor]]:
    """The sum of all losses, and the metrics of each."""
    metrics: dict[NestedKey, Tensor] = {}
    total: Tensor | float = 0.0
    for name, loss in losses.items():
        for key, value in loss(minibatch).items():
            if key.startswith("loss_"):
                total = total + value.sum()
            metrics[name, key] = value.detach()
    return cast(Tensor, total), metrics


def kl_of(metrics: Mapping[NestedKey, Tensor], losses: Iterable[str]) -> Tensor:
    """The divergence of every group of all losses after an update, ``[G]``."""
    return torch.cat([metrics[name, "kl_approx"].reshape(-1) for name in losses])


def _minibatch(
    keys: Sequence[NestedKey], values: Sequence[Tensor], indices: Tensor
) -> TensorDictBase:
    minibatch = TensorDict({}, [len(indices)], device=indices.device)
    for key, value in zip(keys, values):
        minibatch.set(key, value.index_select(0, indices))
    return minibatch
