"""Updates from a replay buffer: sampling, losses, clipping, Adam, targets and priorities.

Shapes: U updates, B rows of a minibatch, G groups that are trained as one, P members.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_marl.capture import capture
from torchrl_marl.errors import CaptureError
from torchrl_marl.functional import soft_update_
from torchrl_marl.learners.adam import Adam, start_adam
from torchrl_marl.learners.captured import Programs, unchanged, warn_of_refusal
from torchrl_marl.learners.clipping import GradientClip
from torchrl_marl.learners.replay import TeamReplay
from torchrl_marl.learners.windows import drop_burn_in
from torchrl_marl.objectives.off_policy import OffPolicyLoss
from torchrl_marl.simulator.python_state import watched

if TYPE_CHECKING:
    from torchrl_marl.learners.members import Members
    from torchrl_marl.learners.off_policy_config import ReplayLearnerConfig

__all__ = ["History", "ReplayUpdates", "Step"]

History = dict[NestedKey, Tensor]


@dataclass(frozen=True)
class Step:
    """One of the steps of an update: the loss that it minimizes, and the optimizers.

    Args:
        of ("value" or "actor"): loss that the step minimizes.
        optimizers (mapping): name -> Adam, of all parameters that the step trains.
        clips (mapping): name of a loss -> its gradient clip.
        norm (str): name under which the gradient norm is reported.
        interval (int): the step runs in every ``interval``-th update.
    """

    of: Literal["value", "actor"]
    optimizers: Mapping[str, Adam]
    clips: Mapping[str, GradientClip]
    norm: str = "grad_norm"
    interval: int = 1


class ReplayUpdates:
    """Runs updates from a replay buffer, eagerly or as graphs.

    Each update runs the steps that are due, in order; all losses read the same rows. An update
    that includes the last step also updates the targets softly.

    Args:
        losses (mapping): name -> the loss, with ``functional=False``.
        steps (sequence of Step): steps of an update in their order; each interval is a multiple of
            the one before.
        config (ReplayLearnerConfig): settings of minibatches, windows, n-step returns and targets.
        execution (str): ``eager``, or an execution of :func:`~torchrl_marl.capture.capture`; each
            update is then one graph, from the rows to the priorities.
        members (Members, optional): members of a population, which learn independently.

    Attributes:
        gamma (float or Tensor): discount factor, or one for each member, ``[P]``.
        optimizers (dict): name -> Adam, of all steps.
        count (int): number of updates so far.

    Reduces to: the eager updates, to the bit if graphs are not compiled.
    """

    def __init__(
        self,
        losses: Mapping[str, OffPolicyLoss],
        steps: Sequence[Step],
        config: ReplayLearnerConfig,
        *,
        execution: str = "eager",
        members: Members | None = None,
    ) -> None:
        self.losses, self.steps = dict(losses), list(steps)
        self.optimizers = {k: x for step in steps for k, x in step.optimizers.items()}
        self.config, self.execution, self.members = config, execution, members
        self.window = config.window if config.remembers else 0
        self.gamma: float | Tensor = config.gamma if members is None else members.full(config.gamma)
        self.count = 0
        followed = [pair for loss in losses.values() for pair in loss.followed]
        self.sources = [p for network, _ in followed for p in network.parameters()]
        self.targets = [p for _, target in followed for p in target.parameters()]
        self.device = next(p for x in self.optimizers.values() for p in x.parameters).device
        self.programs = Programs()
        self._columns: dict[int, dict[NestedKey, slice]] = {}

    @property
    def moments(self) -> dict[Tensor, dict[str, Any]]:
        """Each parameter -> its optimizer state, which is not a copy."""
        for x in self.optimizers.values():
            start_adam(x, x.parameters)
        return {p: x.state[p] for x in self.optimizers.values() for p in x.parameters}

    def run(self, replay: TeamReplay, n_updates: int) -> History:
        """Runs updates; returns their metrics, (name, metric) -> ``[U]`` or ``[U, G]``.

        A :class:`Step` runs only in every ``interval``-th update. For its metrics, U counts only
        these updates.
        """
        rows: dict[int, list[Tensor]] = {}
        for own in self._draw(replay, n_updates) if n_updates else ():
            self.count += 1
            # Intervals are nested: an update that takes a later step takes the earlier ones, too.
            n_steps = sum(self.count % step.interval == 0 for step in self.steps)
            rows.setdefault(n_steps, []).append(self._update(replay, own, n_steps))
        for program in self.programs.values():
            program.raise_failed()
        return self._history(rows)

    def _draw(self, replay: TeamReplay, n_updates: int) -> Tensor:
        if not self.window:
            return replay.rows(n_updates, self.config.minibatch_size)
        return replay.rows(n_updates, self.config.minibatch_size // self.window, self.window)

    def _history(self, rows: Mapping[int, list[Tensor]]) -> History:
        found: dict[NestedKey, list[Tensor]] = {}
        for n_steps in sorted(rows):
            table = torch.stack(rows[n_steps])
            for key, columns in self._columns[n_steps].items():
                found.setdefault(key, []).append(table[:, columns])
        joined = {key: torch.cat(values) for key, values in found.items()}
        return {key: x.squeeze(1) if x.shape[1] == 1 else x for key, x in joined.items()}

    def _update(self, replay: TeamReplay, rows: Tensor, n_steps: int) -> Tensor:
        if self.execution == "eager":
            return self._run_update(replay, rows, n_steps)
        written = self._tensors_in_use(replay)
        leaves = [rows.clone(), *{id(x): x for x in [*written, *replay.tensors]}.values()]
        if n_steps not in self.programs:
            what = sorted(name for step in self.steps[:n_steps] for name in step.optimizers)
            try:
                with unchanged(self.device, written), watched(self.losses):
                    self.programs[n_steps] = capture(
                        lambda own, *held: self._run_update(replay, own, n_steps),
                        *leaves,
                        name=f"the update of the {' and '.join(what)} of {', '.join(self.losses)}",
                        execution=self.execution,  # type: ignore[arg-type]
                    )
            except CaptureError as refusal:
                self.execution = "eager"
                warn_of_refusal(refusal)
                return self._run_update(replay, rows, n_steps)
        return self.programs[n_steps].flat(leaves)[0]

    def _tensors_in_use(self, replay: TeamReplay) -> list[Tensor]:
        priorities = [] if replay.priorities is None else replay.priorities.tensors
        moved = [x for optimizer in self.optimizers.values() for x in optimizer.tensors]
        found = [*moved, *self.targets, *priorities]
        if self.members is not None:
            found += [cast(Tensor, self.gamma), *self.members.tensors]
        return found

    def _run_update(self, replay: TeamReplay, rows: Tensor, n_steps: int) -> Tensor:
        """Runs an update; returns metrics as one row."""
        if self.window:
            recall = [loss.recall for loss in self.losses.values()]
            data = drop_burn_in(replay.windows(rows, self.window), self.config.burn_in, recall)
        else:
            data = replay.look(rows, self.config.n_step, self.gamma)
        metrics: History = {}
        due = self.steps[:n_steps]
        # All gradients are computed first: actors learn from the critics before the critics' step.
        gradients = [self._gradients(data, step, metrics) for step in due]
        values = [value.detach().reshape(-1) for value in metrics.values()]
        ends = pairwise(accumulate(map(len, values), initial=0))
        self._columns[n_steps] = {key: slice(*own) for key, own in zip(metrics, ends)}
        row = torch.cat(values)
        for step, found in zip(due, gradients):
            self._take(step, found)
        if self.targets and n_steps == len(self.steps):
            soft_update_(self.targets, self.sources, self.config.tau)
        errors = [data.get(loss.tensor_keys.priority) for loss in self.losses.values()]
        replay.update_priority(data.get("index"), torch.cat(errors, -2).squeeze(-1))
        return row

    def _take(self, step: Step, found: Sequence[Tensor | None]) -> None:
        """Takes the steps of the optimizers with the gradients of all their parameters."""
        for optimizer in step.optimizers.values():
            n_own = len(optimizer.parameters)
            optimizer.take(found[:n_own])
            found = found[n_own:]

    def _gradients(self, data: TensorDictBase, step: Step, metrics: History) -> list[Tensor | None]:
        """Returns the clipped gradients of a step's parameters; adds metrics."""
        total: Tensor | float = 0.0
        with torch.enable_grad():
            for name, objective in self.losses.items():
                value = objective.value_loss if step.of == "value" else objective.actor_loss
                loss, more = value(data)
                metrics[name, f"loss_{step.of}"] = loss
                metrics.update({(name, key): x for key, x in more.items()})
                total = total + loss.sum()
                for key in more:
                    total = total + more[key].sum() if key.startswith("loss_") else total
            parameters = [p for x in step.optimizers.values() for p in x.parameters]
            found = torch.autograd.grad(cast(Tensor, total), parameters, allow_unused=True)
        by_parameter = dict(zip(parameters, found))
        for name, clip in step.clips.items():
            norm = clip.scale([by_parameter.get(p) for p in clip.parameters])
            metrics[name, step.norm] = norm
            if self.members is not None:
                self.members.note(norm)
        return list(found)
