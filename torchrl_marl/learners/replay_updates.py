"""Updates from stored steps: rows, losses, gradients, limits, Adam, targets and priorities.

Shapes: U updates, B rows of a minibatch, G groups that are trained as one.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import NamedTuple, cast

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor

from torchrl_marl.capture import capture
from torchrl_marl.functional import soft_update_
from torchrl_marl.learners.adam import Adam
from torchrl_marl.learners.clipping import GradientClip
from torchrl_marl.learners.recording import Programs, unchanged
from torchrl_marl.learners.replay import TeamReplay
from torchrl_marl.modules.random_actor import RandomActor
from torchrl_marl.objectives.off_policy import OffPolicyLoss
from torchrl_marl.specs import GroupSpec

__all__ = ["Clips", "ReplayUpdates"]

History = dict[NestedKey, Tensor]


class Clips(NamedTuple):
    """Limits of the gradients of an actor, and of its critics."""

    actor: GradientClip
    critic: GradientClip

    @classmethod
    def of_loss(cls, loss: OffPolicyLoss, seen: GroupSpec | None, limit: float | None) -> Clips:
        """Finds out which rows of a loss's networks serve which group.

        Args:
            loss (OffPolicyLoss): with plain networks.
            seen (GroupSpec, optional): the agents that a critic across groups sees.
            limit (float, optional): the largest norm of each; None for none.
        """
        group, actor, critic = loss.group, loss.actor_network, loss.qvalue_network
        act = RandomActor(group, next(critic.parameters()).device)

        def outputs(td: TensorDict) -> Tensor:
            if group.discrete:
                return actor.get_dist(td).logits.clamp_min(-100.0).sum(-1)
            if group.key("scale") in actor.out_keys:  # a stochastic one
                dist = actor.get_dist(td)
                return (dist.loc + dist.scale).sum(-1)
            return actor(td).get(group.action_key).sum(-1)

        def values(td: TensorDict) -> Tensor:
            return loss.values(act(td)).sum(-1)

        return cls(
            GradientClip.of_outputs(group, actor.parameters(), outputs, limit),
            GradientClip.of_outputs(group, critic.parameters(), values, limit, seen=seen),
        )


class ReplayUpdates:
    """Makes updates of actors and critics from a replay, eagerly or as graphs.

    Each takes all losses' steps from the same rows: critics, and in every ``interval``-th update
    actors, then the targets.

    Args:
        losses (mapping): name -> the loss, with ``functional=False``.
        clips (mapping): name -> the limits of its gradients.
        actors, critics (Adam): of all their parameters.
        minibatch_size, n_step, gamma, tau: as in
            :class:`~torchrl_marl.learners.off_policy_config.OffPolicyConfig`.
        interval (int): updates of the critics for one of actors and targets.
        temperatures (Adam, optional): of the losses that learn one, ``log_alpha``; moves when
            actors do.
        execution (str): ``eager``, or of :func:`~torchrl_marl.capture.capture`: each update is then
            one graph, from the rows to the priorities.

    Attributes:
        count (int): updates so far.

    Reduces to: the eager updates; to the bit, where graphs are not compiled.
    """

    def __init__(
        self,
        losses: Mapping[str, OffPolicyLoss],
        clips: Mapping[str, Clips],
        actors: Adam,
        critics: Adam,
        *,
        minibatch_size: int,
        n_step: int,
        gamma: float,
        tau: float,
        interval: int = 1,
        temperatures: Adam | None = None,
        execution: str = "eager",
    ) -> None:
        self.losses, self.clips = dict(losses), dict(clips)
        self.actors, self.critics, self.temperatures = actors, critics, temperatures
        self.minibatch_size, self.n_step, self.gamma = minibatch_size, n_step, gamma
        self.tau, self.interval, self.execution = tau, interval, execution
        self.count = 0
        self.device = critics.parameters[0].device
        self.sources = [p for loss in losses.values() for n in _networks(loss) for p in n]
        self.targets = [
            p for loss in losses.values() for n in _networks(loss, "target_") for p in n
        ]
        self.programs = Programs()
        self._columns: dict[bool, dict[NestedKey, slice]] = {}

    def run(self, replay: TeamReplay, n_updates: int) -> History:
        """Makes updates; returns their metrics, (name, metric) -> ``[U]`` or ``[U, G]``.

        Metrics of the actors are of those updates in which they moved.
        """
        rows: dict[bool, list[Tensor]] = {False: [], True: []}
        for own in replay.rows(n_updates, self.minibatch_size) if n_updates else ():
            self.count += 1
            with_actor = self.count % self.interval == 0
            rows[with_actor].append(self._update(replay, own, with_actor))
        for program in self.programs.values():
            program.raise_failed()
        return self._history(rows)

    def _history(self, rows: Mapping[bool, list[Tensor]]) -> History:
        found: dict[NestedKey, list[Tensor]] = {}
        for with_actor, own in rows.items():
            if not own:
                continue
            table = torch.stack(own)
            for key, columns in self._columns[with_actor].items():
                found.setdefault(key, []).append(table[:, columns])
        joined = {key: torch.cat(values) for key, values in found.items()}
        return {key: x.squeeze(1) if x.shape[1] == 1 else x for key, x in joined.items()}

    def _update(self, replay: TeamReplay, rows: Tensor, with_actor: bool) -> Tensor:
        if self.execution == "eager":
            return self._row(replay, rows, with_actor)
        written = self._written(replay)
        leaves = [rows.clone(), *{id(x): x for x in [*written, *replay.tensors]}.values()]
        if with_actor not in self.programs:
            what = "actors and critics" if with_actor else "critics"
            with unchanged(self.device, written):
                self.programs[with_actor] = capture(
                    lambda own, *held: self._row(replay, own, with_actor),
                    *leaves,
                    name=f"the update of the {what} of {', '.join(self.losses)}",
                    execution=self.execution,  # type: ignore[arg-type]
                )
        return self.programs[with_actor].flat(leaves)[0]

    def _written(self, replay: TeamReplay) -> list[Tensor]:
        priorities = [] if replay.priorities is None else replay.priorities.tensors
        alphas = [] if self.temperatures is None else self.temperatures.tensors
        return [*self.actors.tensors, *self.critics.tensors, *alphas, *self.targets, *priorities]

    def _row(self, replay: TeamReplay, rows: Tensor, with_actor: bool) -> Tensor:
        """Makes an update; returns metrics as one row."""
        data = replay.look(rows, self.n_step, self.gamma)
        metrics: History = {}
        # All gradients come first: actors learn from the critics as they were.
        value_gradients = self._gradients(data, "value", metrics)
        actor_gradients = self._gradients(data, "actor", metrics) if with_actor else None
        self.critics.step(value_gradients)
        if actor_gradients is not None:
            n_actors = len(self.actors.parameters)
            self.actors.step(actor_gradients[:n_actors])
            if self.temperatures is not None:
                self.temperatures.step(actor_gradients[n_actors:])
            soft_update_(self.targets, self.sources, self.tau)
        errors = [data.get(loss.tensor_keys.priority) for loss in self.losses.values()]
        replay.update_priority(data.get("index"), torch.cat(errors, -2).squeeze(-1))
        values = [value.detach().reshape(-1) for value in metrics.values()]
        ends = pairwise(accumulate(map(len, values), initial=0))
        self._columns[with_actor] = {key: slice(*own) for key, own in zip(metrics, ends)}
        return torch.cat(values)

    def _gradients(self, data: TensorDictBase, of: str, metrics: History) -> list[Tensor | None]:
        """Returns the limited gradients of the actors or the critics; notes metrics.

        Behind those of the actors are those of the temperatures.
        """
        total: Tensor | float = 0.0
        optimizer = self.critics if of == "value" else self.actors
        with torch.enable_grad():
            for name, objective in self.losses.items():
                value = objective.value_loss if of == "value" else objective.actor_loss
                loss, more = value(data)
                metrics[name, f"loss_{of}"] = loss
                metrics.update({(name, key): x for key, x in more.items()})
                total = total + loss.sum()
                if "loss_alpha" in more:
                    total = total + more["loss_alpha"].sum()
            parameters = list(optimizer.parameters)
            if of == "actor" and self.temperatures is not None:
                parameters += self.temperatures.parameters
            found = torch.autograd.grad(cast(Tensor, total), parameters, allow_unused=True)
        by_parameter = dict(zip(parameters, found))
        for name, clips in self.clips.items():
            clip = clips.critic if of == "value" else clips.actor
            norm = clip.scale([by_parameter.get(p) for p in clip.parameters])
            metrics[name, f"grad_norm_{'critic' if of == 'value' else 'actor'}"] = norm
        return list(found)


def _networks(loss: OffPolicyLoss, which: str = "") -> list[list[Tensor]]:
    names = loss.with_target
    return [list(getattr(loss, f"{which}{name}").parameters()) for name in names]
