"""Base class of learners with a replay buffer.

Shapes: E envs, T steps, N agents of a group, G groups that are trained as one, P members of a
population, S steps of the replay buffer.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase, TensorDictSequential
from torch import Tensor, nn

from torchrl_marl.learners.adam import Adam, moments_of, start_adam
from torchrl_marl.learners.block import BlockLearner
from torchrl_marl.learners.clipping import GradientClip
from torchrl_marl.learners.off_policy_config import ReplayLearnerConfig
from torchrl_marl.learners.replay import Priority, TeamReplay
from torchrl_marl.learners.replay_updates import History, ReplayUpdates, Step
from torchrl_marl.learners.team_checks import check_turn_based
from torchrl_marl.learners.unshare import unshare_parts
from torchrl_marl.modules.exploration import Explore
from torchrl_marl.objectives.off_policy import OffPolicyLoss
from torchrl_marl.specs import GroupSpec
from torchrl_marl.specs.joining import fold, unfold

__all__ = ["ReplayLearner"]


class ReplayLearner(BlockLearner):
    """Base class of learners with a replay buffer, for groups that have the same settings.

    Groups with actions of the same type are trained as one: their agents are stacked and padded.
    Each batch is stored completely. Then the learner runs ``updates_per_frame`` updates per frame
    of the batch, each on a minibatch of steps of the whole team. Before ``learning_starts`` frames,
    agents act at random and the metrics are NaN.

    A subclass builds a group's networks and loss (``build``), and the steps of an update
    (``make_steps``). ``state_dict()`` holds everything that resuming needs, including the replay
    buffer.

    Args:
        groups (mapping of name to GroupSpec): the groups that it trains.
        config (ReplayLearnerConfig): settings of the learner.
        team (TeamSpec, optional): all groups of the environment, for networks across groups.
        device (torch.device, optional): device of the networks and the replay buffer.
        execution ("eager", "compile" or "cudagraph"): how updates run: eagerly, or as compiled
            graphs. One graph is a whole update, from reading the rows to updating the target
            networks.
        members (Members, optional): members of a population, each of which learns independently
            from its envs of a batch.

    Attributes:
        actors (GroupActors): actors by group, including exploration.
        replay (TeamReplay or None): the replay buffer; None before the first batch.
        frames (int): number of env steps seen.

    Shapes:
        - batch: ``[E, T]``, or ``[P * E, T]`` for a population; heterogeneous groups are padded
        - metrics: scalars; ``[P]`` for a population

    Keys:
        - reads: the inputs of networks and losses
        - writes: nothing into the batch

    Raises:
        NonFiniteError: a loss or gradient is NaN or infinite.
        ConfigError: the first batch is larger than the replay buffer.
    """

    losses: dict[str, OffPolicyLoss]
    updating: ClassVar[type[ReplayUpdates]] = ReplayUpdates
    """Class of the object that runs updates."""
    explores = True
    """False if actors never explore while steps are collected."""
    rate_of: ClassVar[Mapping[str, str]]
    """Name of an optimizer -> its learning-rate setting."""

    def __init__(
        self,
        groups: Mapping[str, GroupSpec],
        config: ReplayLearnerConfig,
        *,
        device: torch.device | str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(groups, config, device=device, **kwargs)
        self.noisy = config.noisy
        for name, group in self.block.joined.items():
            actor, loss = self.build(group)
            explore = Explore(group, device=device)
            self.actors.add(group, self.exploring(actor, explore))
            self.explorers.append(explore)
            self.losses[name] = loss
            if self.members is not None:  # members may differ in the discount
                loss.set_keys(discount=group.key("discount"))
        self.targets = nn.ModuleDict(
            {
                name: nn.ModuleList([target for _, target in loss.followed])
                for name, loss in self.losses.items()
            }
        )
        self.updates = self._make_updates()
        self.replay: TeamReplay | None = None
        self.device = None if device is None else torch.device(device)
        self.frames, self.owed = 0, 0.0
        self._explore()

    @abstractmethod
    def build(self, group: GroupSpec) -> tuple[TensorDictModuleBase, OffPolicyLoss]:
        """Builds the actor and the loss of a group.

        Args:
            group (GroupSpec): a group, or several groups joined into one.
        """

    def exploring(self, actor: TensorDictModuleBase, explore: Explore) -> TensorDictModuleBase:
        """Returns the module that acts while steps are collected."""
        return TensorDictSequential(actor, explore) if self.explores else actor

    @abstractmethod
    def make_steps(self) -> list[Step]:
        """Returns the steps of which an update consists; they serve all losses."""

    def _make_updates(self) -> ReplayUpdates:
        """Creates the object that runs the updates of the learner's networks."""
        steps, members = self.make_steps(), self.members
        if members is not None:
            clips = (clip for step in steps for clip in step.clips.values())
            members.take_over(clips, (x for step in steps for x in step.optimizers.values()))
        updates = self.updating(
            self.losses, steps, self.config, execution=self.execution, members=members
        )
        if members is not None:
            members.rows.follow(updates.sources, updates.targets)
        return updates

    @property
    def optimizer_of(self) -> dict[str, Adam]:
        """Name of each learning-rate setting -> its optimizer."""
        return {self.rate_of[name]: x for name, x in self.updates.optimizers.items()}

    @property
    def trained(self) -> list[Tensor]:
        """Parameters that an update changes, target networks included."""
        return [*self.updates.moments, *self.updates.targets]

    @property
    def clips(self) -> list[GradientClip]:
        """Gradient clips of all losses."""
        return [clip for step in self.updates.steps for clip in step.clips.values()]

    def set_progress(self, fraction: float) -> None:
        """Moves the schedules to a fraction, 0 to 1, of the run."""
        self.progress = fraction
        self._explore()
        self._anneal_importance_exponent()
        if self.config.unshare_at is not None and fraction >= self.config.unshare_at:
            self.unshare()

    def unshare(self) -> None:
        """Replaces shared networks and targets by a copy for each agent; outputs do not change.

        Networks that read a single agent's observation are un-shared; a network that reads the
        whole team is not. Optimizers keep their state.
        """
        if self.unshared:
            return
        joined, losses = self.block.joined, self.losses.items()
        sizes: dict[nn.Module, int] = {loss: joined[name].n_agents for name, loss in losses}
        known, count = unshare_parts(sizes, self.updates.moments), self.updates.count
        self.updates = self._make_updates()
        self.updates.count, self.unshared = count, True
        for parameter, moments in self.updates.moments.items():
            for name, value in moments.items():
                value.copy_(known[parameter][name])

    def _explore(self) -> None:
        """Sets epsilon and sigma of the exploration for the current progress."""
        epsilon = self._scheduled("epsilon") if self.started else 1.0
        for explore in self.explorers:
            explore.epsilon.fill_(epsilon)
            if self.noisy:
                explore.sigma.fill_(self._scheduled("sigma"))
        if self.members is not None:
            self.members.explore(self)

    def _anneal_importance_exponent(self) -> None:
        """Sets the importance-sampling exponent of prioritized replay for the current progress."""
        settings = self.config.replay
        priorities = None if self.replay is None else self.replay.priorities
        if priorities is not None and settings.beta_end is not None:
            beta = settings.beta + self.progress * (settings.beta_end - settings.beta)
            priorities.beta.fill_(beta)

    def _scheduled(self, name: str) -> float:
        settings = cast(Any, self.config).exploration  # a different class in each family
        first, last = getattr(settings, name), getattr(settings, f"{name}_end")
        return first + self.annealed * (last - first)

    @property
    def annealed(self) -> float:
        """Progress of the exploration schedule, 0 to 1."""
        annealing = cast(Any, self.config).exploration.annealing
        return min(1.0, self.progress / annealing) if annealing else 1.0

    @property
    def started(self) -> bool:
        """True if the replay buffer holds enough steps to learn from."""
        if self.frames < self.config.learning_starts:
            return False
        steps = 0 if self.replay is None else self.replay.ring.n_filled
        return not self.remembers or steps >= self.config.window

    def _learn(self, batch: TensorDictBase) -> TensorDict:
        """Stores a batch and runs its updates."""
        self.check_remembered(batch)
        batch = batch.reshape(-1, batch.shape[-1])
        data = self._store(batch)
        n_updates = 0
        if self.started:
            self.owed += self.config.updates_per_frame * (batch.numel() // self.n_members)
            n_updates = int(self.owed)
            self.owed -= n_updates
        history = self.updates.run(cast(TeamReplay, self.replay), n_updates)
        self.refuse_diverged(history)
        metrics = self._summary(history, n_updates)  # with the epsilon of this batch
        self._explore()
        self.add_communication(metrics, data)
        return metrics

    def cut(self) -> None:
        """Forgets running episodes, because the next batch does not continue them."""
        super().cut()
        if self.replay is not None:
            self.replay.cut()

    def _store(self, batch: TensorDictBase) -> TensorDictBase:
        """Stores a batch; returns it in the block's layout."""
        if self.replay is None:
            self.inspect_first_batch(batch)
            num_envs, frames = len(batch) // self.n_members, batch.numel() // self.n_members
            self.config.check_store(num_envs, frames, "learner.")
            self.replay = self._make_replay(num_envs)
        data = self.block.gather(batch)
        for loss in self.losses.values():
            loss.settle_rewards(data)
        self.replay.extend(self._rows_of(data, batch))
        self._anneal_importance_exponent()
        if self.observation_norms:
            self.observation_norms.update_all(data)
        self.frames += batch.numel() // self.n_members
        return data

    def _rows_of(self, data: TensorDictBase, batch: TensorDictBase) -> TensorDictBase:
        """Returns a batch in the layout of the replay buffer.

        Args:
            data (TensorDictBase): the batch in the block's layout.
            batch (TensorDictBase): the batch from the collector.

        In this layout, members are stacked along the envs' dim.
        """
        if self.members is None:
            return data
        rows = TensorDict({}, batch.batch_size, device=data.device)
        rows.set(("next", "done"), batch.get(("next", "done")))
        for key, value in data.items(True, True):
            rows.set(key, unfold(value, self.n_members, batch.ndim))
        return rows

    @property
    def _stored_keys(self) -> list[NestedKey]:
        """Entries of a step that the replay buffer holds."""
        return list(dict.fromkeys(key for loss in self.losses.values() for key in loss.stored_keys))

    def _make_replay(self, num_envs: int) -> TeamReplay:
        """Returns an empty replay buffer; ``num_envs`` is the number of envs of each member."""
        settings = self.config.replay
        return TeamReplay(
            math.ceil(settings.capacity / num_envs),
            num_envs,
            self._stored_keys,
            Priority(settings.alpha, settings.beta) if settings.alpha else None,
            self.device,
            dead_earn=self.config.bootstrap == "team",
            windows=self.remembers,
            by_life=self.config.bootstrap == "agent"
            # The team's reward continues after an agent's death, for which it does not count.
            and any(x.respawns or x.reward_key != x.key("reward") for x in self.groups.values()),
            n_members=self.n_members,
            shared=self.members is not None and self.members.share_replay,
        )

    def inspect_first_batch(self, batch: TensorDictBase) -> None:
        """Refuses ``bootstrap="agent"`` if agents act in turns in the first batch."""
        check_turn_based(self.groups.values(), batch, self.config)

    def _summary(self, history: History, n_updates: int) -> TensorDict:
        device = self.explorers[0].epsilon.device
        nothing = torch.full((), torch.nan, device=device)
        shape = [] if self.members is None else [self.n_members]
        summary: dict[str, dict[str, Tensor]] = {name: {} for name in self.groups}
        joined = zip(self.losses.items(), self.block.joined.values(), self.explorers)
        for (name, loss), whole, explore in joined:
            for key in (*loss.out_keys, *(step.norm for step in self.updates.steps)):
                values = history.get((name, key))
                mean = nothing if values is None else values.mean(0).reshape(-1)
                for group, own in whole.by_source(mean):
                    summary[group.name][key] = own
            for group in whole.sources:
                found = summary[group.name]
                if self.explores:
                    found["epsilon"] = self._value_per_member(explore.epsilon, whole).clone()
                if self.noisy:
                    found["sigma"] = explore.sigma.expand(shape).clone()
                for key, number in (("updates", n_updates), ("stored", len(self.replay or ()))):
                    found[key] = torch.full(shape, float(number), device=device)
        return TensorDict(cast(dict[str, Any], summary), shape, device=device)

    def _value_per_member(self, values: Tensor, group: GroupSpec) -> Tensor:
        """Returns values of a group; for a population, one for each member."""
        if self.members is None:
            return values
        return self.members.first_of(values.expand(group.n_agents))

    # ------------------------------------------------------------------------------- state

    def get_extra_state(self) -> dict[str, Any]:
        """The part of ``state_dict()`` in addition to networks and statistics."""
        state = {
            **{name: _optimizer_state(x) for name, x in self.updates.optimizers.items()},
            "updates": self.updates.count,
            "frames": self.frames,
            "owed": self.owed,
            "progress": self.progress,
            "unshared": self.unshared,
            **self._births_state(),
            "replay": None if self.replay is None else self.replay.state_dict(),
        }
        return state if self.members is None else {**state, **self.members.state_dict()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restores the state from :meth:`get_extra_state`."""
        self._load_births(state)
        for name, optimizer in self.updates.optimizers.items():
            _load_optimizer(optimizer, state[name])
        self.updates.count, self.frames = state["updates"], state["frames"]
        self.owed, self.progress = state["owed"], state["progress"]
        if state["replay"] is not None:
            if self.replay is None:
                self.replay = self._make_replay(state["replay"]["shape"][1] // self.n_members)
            self.replay.load_state_dict(self._with_team_rewards(state["replay"]))
        if self.members is not None:
            self.members.load_state_dict(state)

    def take_member(self, population: ReplayLearner, member: int, *, replay: bool = True) -> None:
        """Copies a population member's exploration and, on request, its replay buffer."""
        for own, every in zip(self.explorers, population.explorers):
            own.epsilon.copy_(population._value_per_member(every.epsilon, every.group)[member])
            own.sigma.copy_(every.sigma)
        self.frames, self.owed, self.progress = (
            population.frames,
            population.owed,
            population.progress,
        )
        self.updates.count = population.updates.count
        if population.replay is not None and replay:
            if self.replay is None:
                self.replay = self._make_replay(population.replay.num_envs)
            self.replay.load_state_dict(population.replay.state_of(member, self._stored_keys))

    def _with_team_rewards(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns a replay buffer's state; adds team rewards if an older checkpoint lacks them."""
        leaves = dict(state["leaves"])
        for loss in self.losses.values():
            loss.add_team_reward(leaves, self._to_loss_layout, self._to_replay_layout)
        return {**state, "leaves": leaves}

    def _to_loss_layout(self, rows: Tensor) -> Tensor:
        """Converts rows of the replay buffer, ``[S, E, N, 1]``, to the layout of the losses."""
        if self.members is None:
            return rows
        return fold(rows.transpose(0, 1), self.n_members, 2)

    def _to_replay_layout(self, rows: Tensor) -> Tensor:
        """Converts rows from the layout of the losses to that of the replay buffer."""
        if self.members is None:
            return rows
        return unfold(rows, self.n_members, 2).transpose(0, 1).contiguous()


def _optimizer_state(optimizer: Adam) -> dict[str, list[Tensor]]:
    """Returns Adam's moments and step counts in the form of a checkpoint."""
    start_adam(optimizer, optimizer.parameters)
    return dict(zip(("means", "squares", "steps"), moments_of(optimizer, optimizer.parameters)))


@torch.no_grad()
def _load_optimizer(optimizer: Adam, state: Mapping[str, Any]) -> None:
    """Restores Adam's moments and step counts in place.

    Raises:
        ValueError: the saved moments belong to other parameters.
    """
    for name, own in _optimizer_state(optimizer).items():
        if [x.shape for x in state[name]] != [x.shape for x in own]:
            raise ValueError("Adam: the state is of other parameters, expected the same shapes.")
        for x, value in zip(own, state[name]):
            x.copy_(value)
