"""Joins a learner's groups into blocks that are trained in one call."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from torchrl_marl.capture import check_execution
from torchrl_marl.errors import NonFiniteError
from torchrl_marl.learners.networks import (
    NetworkBuilder,
    ObservationNorms,
    check_channels,
    check_networks_of_members,
    critic_input_group,
    need_separate_networks,
)
from torchrl_marl.modules.config import carries, communicates, gives_links
from torchrl_marl.modules.joined_actor import GroupActors
from torchrl_marl.modules.precision import matmul_in_tf32
from torchrl_marl.objectives.flags import ALIVE, BOOTSTRAPS, Births, Flags, flags_of
from torchrl_marl.specs import GroupSpec, TeamSpec
from torchrl_marl.specs.groups import check_flags
from torchrl_marl.specs.joining import PopulationGroup, can_join, fold, join, of_members

if TYPE_CHECKING:
    from torchrl_marl.learners.adam import Adam
    from torchrl_marl.learners.clipping import GradientClip
    from torchrl_marl.learners.members import Members
    from torchrl_marl.modules.exploration import Explore

__all__ = ["Block", "BlockLearner", "check_finite", "must_be_finite"]

_READ_AT_NEXT_STEP = ("is_init", "links")
Gathered = tuple[GroupSpec, TensorDictBase, TensorDictBase]


class Block:
    """Joins groups with actions of the same type, and converts batches to their layout.

    Args:
        groups (mapping of name to GroupSpec): the groups of a learner.
        apart (bool): whether every group stays separate.
        input_group (GroupSpec, optional): the agents in the input of critics across groups.
        acted (sequence of str): entries that policies write when they act, such as ``action``.
        remembered (sequence of str): entries that networks with memory or communication read;
            ``is_init`` and ``links`` are read at the next step, too.
        n_members (int): number P of members of a population. Each member's groups are separate
            groups, and the envs of a batch are split among members in order.
        reads_state (bool): whether critics or mixers of a population read the environment's state.

    Attributes:
        joined (dict): names such as ``"a"`` or, for several groups, ``"a+b"`` -> the group that is
            trained.
        births (Births): which agents have been born in the running episodes.

    Examples:
        >>> from torchrl_marl import TeamSpec
        >>> from torchrl_marl.envs import VmasEnv
        >>> groups = TeamSpec.from_env(VmasEnv("simple_tag", num_envs=2, seed=0)).groups
        >>> list(Block(groups).joined), list(Block(groups, apart=True).joined)
        (['adversary+agent'], ['adversary', 'agent'])
    """

    def __init__(
        self,
        groups: Mapping[str, GroupSpec],
        *,
        apart: bool = False,
        input_group: GroupSpec | None = None,
        acted: Sequence[str] = ("action", "action_log_prob"),
        remembered: Sequence[str] = (),
        n_members: int = 1,
        reads_state: bool = False,
    ) -> None:
        self.reads_state = reads_state
        self.groups, self.input_group, self.acted = dict(groups), input_group, tuple(acted)
        self.remembered = tuple(remembered)
        self.n_members = n_members
        joinable = (
            [[group] for group in groups.values()]
            if apart
            else _partition_joinable(groups.values())
        )
        teams = [join(own) for own in joinable]
        if n_members > 1:
            teams = [of_members(team, n_members) for team in teams]
        self.joined = {group.name: group for group in teams}
        all_groups = [*teams] if input_group is None else [*teams, input_group]
        self.births = Births({own.name: own for group in all_groups for own in group.sources})

    def gather(self, batch: TensorDictBase) -> TensorDictBase:
        """Returns a copy of the batch with the joined groups in dense form, and their flags.

        The flags are those of :mod:`torchrl_marl.objectives.flags`. Batches must be passed in
        order, because births are tracked from one batch to the next.

        Shapes:
            - batch: ``[E, T]``, or ``[P * E, T]`` for a population
            - returns: ``[E, T]`` in both cases
        """
        data, following = self._make_empty_batch(batch), batch.get("next")
        for group in self.groups.values():
            own = group.data(following) if group.agent_done else following
            check_flags(group, own)
        gathered = [*self._gather_trained(batch, data)]
        apart = self.input_group is not None and self.input_group.name not in self.joined
        if apart:
            gathered.append(self._gather_seen(batch, data))
        born, groups = self.births.update(batch), self.births.groups.items()
        known = {name: flags_of(group, batch, born.get(name)) for name, group in groups}
        for group, now, then in gathered:
            self._add_flags(group, known, now, then)
            if apart and group is self.input_group and group.mask_key is not None:
                then.set("mask", then.get(BOOTSTRAPS))  # networks across groups read it
        return data

    def _gather_trained(self, batch: TensorDictBase, data: TensorDictBase) -> Iterator[Gathered]:
        for group in self.joined.values():
            states = () if group.agent_state_key is None else ("state",)
            leaves = (*self.acted, *self.remembered, *states)
            if batch.get(group.sources[0].key("learns"), None) is not None:
                leaves += ("learns",)
            now = group.gather(batch, leaves=leaves, flags=True)
            leaves = ("reward", *states, *(x for x in self.remembered if x in _READ_AT_NEXT_STEP))
            then = group.gather(batch.get("next"), leaves=leaves, flags=True)
            yield _write_gathered(group, now, then, data)

    def _make_empty_batch(self, batch: TensorDictBase) -> TensorDictBase:
        """Returns a TensorDict for joined groups: a copy of the batch.

        For a population it holds the members' states only, if critics or mixers read them.
        """
        if self.n_members == 1:
            return batch.copy()
        n_envs, *others = batch.shape
        data = TensorDict({}, [n_envs // self.n_members, *others], device=batch.device)
        group = next(iter(self.joined.values()))
        if self.reads_state and group.state_key is not None:
            assert isinstance(group, PopulationGroup)
            for key in (group.state_key, ("next", group.state_key)):
                data.set(key, group.gather_state(batch.get(key)))
        return data

    def _gather_seen(self, batch: TensorDictBase, data: TensorDictBase) -> Gathered:
        group = self.input_group
        assert group is not None
        now = group.gather(batch, flags=True)
        then = group.gather(batch.get("next"), flags=True)
        return _write_gathered(group, now, then, data)

    def _add_flags(
        self,
        group: GroupSpec,
        known: Mapping[str, Flags],
        now: TensorDictBase,
        then: TensorDictBase,
    ) -> None:
        """Writes the flags of a joined group, taken from the groups of which it consists."""
        if group.mask_key is None:
            return
        for leaf, place, key in (("alive", now, ALIVE), ("bootstraps", then, BOOTSTRAPS)):
            rows = []
            for own in group.sources:
                flag = getattr(known[own.name], leaf)
                rows.append(self._all_true(own, now) if flag is None else flag)
            place.set(key, self._fold(torch.cat(rows, -1), now.ndim - 1))

    def _all_true(self, group: GroupSpec, now: TensorDictBase) -> Tensor:
        n_envs, *others = now.shape[:-1]
        shape = (n_envs * self.n_members, *others, group.n_agents)
        return torch.ones(shape, dtype=torch.bool, device=now.device)

    def _fold(self, rows: Tensor, dim: int) -> Tensor:
        return rows if self.n_members == 1 else fold(rows, self.n_members, dim)

    def scatter(self, data: TensorDictBase, batch: TensorDictBase, leaves: Sequence[str]) -> None:
        """Copies leaves, if they exist, from the joined groups to the groups of the batch.

        Args:
            data (TensorDictBase): the result of :meth:`gather`, to which the leaves have been
                written.
            batch (TensorDictBase): batch with dense or lazily stacked groups; the leaves are
                written to it.
            leaves (sequence of str): names of the leaves, such as ``advantage``.
        """
        for group in self.joined.values():
            written = [leaf for leaf in leaves if data.get(group.key(leaf), None) is not None]
            group.scatter(data, batch, written)


def _write_gathered(
    group: GroupSpec, now: TensorDictBase, then: TensorDictBase, data: TensorDictBase
) -> Gathered:
    """Writes a gathered group into a batch; returns it with the stored entries."""
    data.set(group.name, now.get(group.name))
    data.set(("next", group.name), then.get(group.name))
    return group, data.get(group.name), data.get(("next", group.name))


def _partition_joinable(groups: Iterable[GroupSpec]) -> list[list[GroupSpec]]:
    """Partitions groups into lists that can be joined."""
    joinable: list[list[GroupSpec]] = []
    for group in groups:
        for known in joinable:
            if can_join(known[0], group):
                known.append(group)
                break
        else:
            joinable.append([group])
    return joinable


class BlockLearner(nn.Module):
    """Base class of learners that join groups with actions of the same type.

    Args:
        groups (mapping of name to GroupSpec): the groups that it trains.
        config (TrainedConfig): settings of the learner.
        team (TeamSpec, optional): all groups of the environment, for networks across groups.
        device (torch.device, optional): device of the networks.
        execution ("eager", "compile" or "cudagraph"): execution of the updates.
        members (Members, optional): members of a population, each of which learns from its envs of
            a batch. ``settings`` and ``diverged`` are then those of the members.

    Attributes:
        block (Block): joins the groups, and converts batches to their layout.
        observation_norms (ObservationNorms): the running statistics of observations.
        builder (NetworkBuilder): builds actors, critics and mixers.
        remembers (bool): whether the actor or the critic carries state from step to step.
        remembered (tuple of str): entries of a batch that networks with memory read, and the
            communication links of the environment.
        communicates (bool): whether agents exchange messages when they act.
        actors (GroupActors): group -> its actor; empty until a subclass adds actors.
        losses (dict): name of one or several groups (``"a+b"``) -> the loss; empty until a subclass
            adds losses.

    Raises:
        ConfigError: an execution that the device does not have.
    """

    acted: ClassVar[tuple[str, ...]] = ("action",)
    """Entries written in acting that the losses read."""
    rates: ClassVar[str] = "learner.lr"
    """Settings to lower if a loss is not finite, for the message."""
    over_ranks = False
    unshared = False
    """True if the shared networks have been un-shared."""

    def __init__(
        self,
        groups: Mapping[str, GroupSpec],
        config: Any,
        *,
        team: TeamSpec | None = None,
        device: torch.device | str | None = None,
        execution: str = "eager",
        members: Members | None = None,
    ) -> None:
        super().__init__()
        if execution != "trace":  # for tests: a graph, run operation by operation
            check_execution(execution, device, type(self).__name__)
        self.execution, self.members = execution, members
        self.n_members = n_members = 1 if members is None else members.n
        if members is not None:
            self.settings, self.diverged = members.settings, members.diverged
        self.groups, self.config = dict(groups), config
        self.remembers = getattr(config, "remembers", False)
        self.remembered = _required_entries(config)
        self.communicates = communicates(config.actor)
        seen = critic_input_group((self.groups if team is None else team.groups).values(), config)
        if seen is not None and n_members > 1:
            seen = of_members(seen, n_members, same_actions=False)
        apart = need_separate_networks(config)
        self.block = Block(
            self.groups,
            apart=apart,
            input_group=seen,
            acted=self.acted,
            remembered=self.remembered,
            n_members=n_members,
            reads_state=getattr(config, "central_input", None) == "state",
        )
        check_channels(self.block.joined, config, team)
        if n_members > 1:
            check_networks_of_members(self.block.joined.values(), config)
        self.observation_norms = ObservationNorms(config.normalize_observations, device)
        self.builder = NetworkBuilder(config, self.observation_norms, seen, device)
        self.actors = GroupActors()
        self.losses: dict[str, Any] = {}
        self.explorers: list[Explore] = []
        self.critic_states: dict[str, Tensor] = {}
        self.progress = 0.0

    @property
    @abstractmethod
    def optimizer_of(self) -> Mapping[str, Adam]:
        """Name of each learning-rate setting -> its optimizer."""

    @property
    @abstractmethod
    def trained(self) -> list[Tensor]:
        """Parameters that an update changes, target networks included."""

    @property
    @abstractmethod
    def clips(self) -> list[GradientClip]:
        """Gradient clips of all losses."""

    @abstractmethod
    def _learn(self, batch: TensorDictBase) -> TensorDict:
        """Trains on a batch; called by :meth:`learn`."""

    def learn(self, batch: TensorDictBase) -> TensorDict:
        """Trains on a batch; returns metrics ``(group, name)``: scalars; ``[P]`` for a population.

        Raises:
            NonFiniteError: a loss or gradient is not finite; in a population, for every member.
        """
        with contextlib.ExitStack() as stack:
            if self.members is not None:
                stack.enter_context(self.members.learning(self, batch))
            if self.config.precision == "tf32":
                stack.enter_context(matmul_in_tf32())
            return self._learn(batch)

    def copy_members(self, parent: Tensor) -> None:
        """Replaces members of a population by copies of others.

        Networks, moments and statistics are copied; settings and replay buffers are not. A copy has
        diverged only if its parent has.

        Args:
            parent (Tensor): index of each member's parent, ``[P]``; a member with its own index
                stays as it is.
        """
        assert self.members is not None
        self.members.copy(self, parent)

    def take_member(self, population: Any, member: int, *, replay: bool = True) -> None:
        """Copies a population member's state, except networks and statistics, to this learner.

        Args:
            population (BlockLearner): learner of the same kind, with members.
            member (int): index of the member.
            replay (bool): whether to copy the replay buffer, too.
        """

    def check_remembered(self, batch: TensorDictBase) -> None:
        """Refuses a batch ``[E, T]`` without the entries that memory or communication needs.

        Raises:
            SpecError: an entry is missing; the message names it.
        """
        if self.remembered:
            from torchrl_marl.learners.windows import check_batch_memory

            check_batch_memory(self.groups, batch, self.remembered)

    def add_communication(self, metrics: TensorDict, data: TensorDictBase) -> None:
        """Adds metrics of communication, if agents communicate.

        Args:
            metrics (TensorDict): metrics by group; the new metrics are added to them.
            data (TensorDictBase): a batch ``[E, T]`` in the block's layout.
        """
        if self.communicates:
            from torchrl_marl.learners.communication_metrics import add_communication_metrics

            add_communication_metrics(metrics, self.actors, self.block.joined, data)

    def refuse_diverged(self, values: Mapping[Any, Tensor]) -> None:
        """Refuses NaN and infinite losses and gradients; waits for the device.

        Args:
            values (mapping): (name of groups, metric) -> values of the updates.

        Raises:
            NonFiniteError: a loss or gradient is not finite; in a population, for every member.
        """
        if self.members is not None:
            self.members.refuse_all_diverged(self.rates)
            return
        check_finite(values, f"{self.rates} or learner.max_grad_norm")

    def unshare(self) -> None:
        """Replaces shared networks by one copy for each agent; the outputs do not change."""
        raise NotImplementedError

    def use_shards(self, own: range, total: int, seed: int) -> None:
        """Does nothing: minibatches do not depend on shards."""

    def cut(self) -> None:
        """Forgets running episodes, because the next batch does not continue them."""
        self.block.births.forget()

    def _births_state(self) -> dict[str, Any]:
        """Returns the agents born in the running episodes, for a checkpoint."""
        born = self.block.births.state_dict()
        return {"born": born} if born else {}

    def _load_births(self, state: Mapping[str, Any]) -> None:
        """Restores the agents born in the running episodes; older checkpoints lack them."""
        self.block.births.load_state_dict(state.get("born", {}))

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Restores a saved state; un-shares the networks if the saved ones were un-shared."""
        if state_dict.get("_extra_state", {}).get("unshared"):
            self.unshare()
        return super().load_state_dict(state_dict, *args, **kwargs)


def check_finite(values: Mapping[Any, Tensor], rates: str = "the learning rate") -> None:
    """Refuses NaN and infinite losses and gradient norms; waits for the device once.

    Args:
        values (mapping): (name of groups, metric) -> values, of any shape.
        rates (str): what to lower, for the message.

    Raises:
        NonFiniteError: a loss or gradient norm is not finite; the message names it.

    Examples:
        >>> check_finite({("agents", "loss_critic"): torch.ones(2)})
    """
    keys = [key for key in values if must_be_finite(key[1])]
    finite = [values[key].isfinite().all() for key in keys]
    if not keys or bool(torch.stack(finite).all()):
        return
    name, metric = next(key for key, fine in zip(keys, finite) if not bool(fine))
    raise NonFiniteError(
        f"group {name!r}: {metric} became NaN or infinite while learning; lower {rates}, or check "
        "the rewards' scale."
    )


def must_be_finite(metric: str) -> bool:
    """Returns whether a NaN or infinite value of this metric means that learning has failed."""
    return metric.startswith(("loss_", "grad_norm"))


def _required_entries(config: Any) -> tuple[str, ...]:
    """Returns the entries of a batch that networks with memory or the environment's links need."""
    found = []
    if getattr(config, "remembers", False):
        found = ["is_init", "hidden"] if carries(config.actor) else ["is_init"]
    networks = (config.actor, getattr(config, "critic", config.actor))
    return (*found, *["links"] * any(gives_links(own) for own in networks))
