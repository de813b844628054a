"""Finds the group and the population member to which each row of a stacked parameter belongs.

Shapes: P members, R rows of a parameter, N agents of all groups, G groups.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from torchrl_marl.learners.adam import start_adam
from torchrl_marl.specs import GroupSpec

if TYPE_CHECKING:
    from torchrl_marl.learners.clipping import GradientClip

__all__ = [
    "MemberView",
    "Rows",
    "copy_rows",
    "groups_served_by_rows",
    "make_member_view",
    "statistics_of",
]

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Rows:
    """Maps each row of a parameter to its member of a population.

    Args:
        n_members (int): number P of members.

    Attributes:
        owners (dict): parameter of a network or a target network -> the member of each row,
            ``[R]``.
    """

    def __init__(self, n_members: int) -> None:
        self.n_members = n_members
        self.owners: dict[Tensor, Tensor] = {}

    def add(self, clip: GradientClip) -> None:
        """Adds the parameters of a gradient clip; the groups of the clip are sorted by member."""
        assert clip.row_groups is not None and int(clip.row_groups.max()) < clip.n_groups
        members = clip.row_groups // (clip.n_groups // self.n_members)
        self.owners.update(zip(clip.parameters, members.split(clip.sizes)))

    def add_parameter(self, parameter: Tensor) -> None:
        """Adds a parameter with one row per group, such as a temperature, unless it is known."""
        if parameter not in self.owners:
            members = torch.arange(self.n_members, device=parameter.device)
            self.owners[parameter] = members.repeat_interleave(len(parameter) // self.n_members)

    def follow(self, sources: Iterable[Tensor], targets: Iterable[Tensor]) -> None:
        """Adds the parameters of target networks; their rows belong to the sources' members."""
        for source, target in zip(sources, targets):
            self.owners[target] = self.owners[source]

    def of(self, parameter: Tensor) -> Tensor:
        """Returns the member of each row, ``[R, 1, ...]`` with the parameter's number of dims."""
        return self.owners[parameter].reshape(-1, *(1,) * (parameter.ndim - 1))

    @torch.no_grad()
    def note_broken(self, diverged: Tensor) -> None:
        """Flags members, ``[P]``, if the norm of a parameter is not finite."""
        for p, rows in self.owners.items():
            broken = ~p.reshape(len(rows), -1).square().sum(1).isfinite()
            diverged.index_put_((rows,), broken, accumulate=True)

    @torch.no_grad()
    def put_back(self, before: Mapping[Tensor, Tensor], diverged: Tensor) -> None:
        """Restores the parameters ``before`` for the flagged members; flags: ``[P]``."""
        for p in self.owners:
            p.copy_(torch.where(diverged[self.of(p)], before[p], p))

    @torch.no_grad()
    def copy(self, learner: Any, parent: Tensor) -> None:
        """Copies to each member its parent's parameters, moments and statistics, in place."""
        states = _states_of(learner)
        for p, owner in self.owners.items():
            moments = (states[p][name] for name in _MOMENTS) if p in states else ()
            copy_rows([p, *moments], owner, parent)
        for x in statistics_of(learner):
            x.copy_(x.unflatten(0, (len(parent), -1))[parent].flatten(0, 1))


def copy_rows(tensors: Iterable[Tensor], owner: Tensor, parent: Tensor) -> None:
    """Copies to each member its parent's rows of tensors, in place.

    Args:
        tensors (iterable of Tensor): a parameter and its moments in the optimizer.
        owner (Tensor): member of each row.
        parent (Tensor): parent of each member.

    Shapes:
        - each tensor: ``[R, ...]``; owner: ``[R]``; parent: ``[P]``

    Examples:
        >>> weight = torch.tensor([1.0, 2.0, 3.0, 4.0])
        >>> copy_rows([weight], torch.tensor([0, 1, 0, 1]), torch.tensor([1, 1]))
        >>> weight
        tensor([2., 2., 4., 4.])
    """
    rows = owner.argsort(stable=True).view(len(parent), -1)
    source = torch.empty_like(owner)
    source[rows] = rows[parent]
    for x in tensors:
        x.copy_(x[source])


def statistics_of(learner: Any) -> list[Tensor]:
    """Returns the saved tensors of a learner, except parameters and exploration.

    For a population, their rows are sorted by member.

    Args:
        learner (BlockLearner): a learner with or without members.
    """
    exploring = (x for own in learner.explorers for x in own.buffers())
    left = {id(x) for x in (*learner.parameters(), *exploring)}
    saved = learner.state_dict(keep_vars=True).values()
    found = {id(x): x for x in saved if isinstance(x, Tensor) and id(x) not in left}
    return list(found.values())


@dataclass(frozen=True)
class _TensorPair:
    """A tensor of a population, a member's rows in it, and an ordinary learner's same tensor."""

    all: Tensor
    rows: Tensor
    own: Tensor

    def take(self) -> None:
        self.own.copy_(self.all[self.rows].reshape(self.own.shape))

    def give(self) -> None:
        self.all[self.rows] = self.own.reshape(len(self.rows), *self.all.shape[1:])


class MemberView:
    """Copies a member's state between a population's learner and an ordinary one.

    The state consists of networks, targets, statistics and the optimizers' moments. :meth:`read`
    can also copy the replay buffer.

    Args:
        population (BlockLearner): a learner with P members.
        single (BlockLearner): an ordinary learner with the same groups and settings.

    Examples:
        >>> from torchrl_marl import TeamSpec
        >>> from torchrl_marl.envs import VmasEnv
        >>> from torchrl_marl.learners.config import OnPolicyConfig
        >>> from torchrl_marl.learners.members import learner_of_members
        >>> from torchrl_marl.learners.on_policy import OnPolicyLearner
        >>> groups = TeamSpec.from_env(VmasEnv("balance", num_envs=2, seed=0)).groups
        >>> many = learner_of_members(groups, OnPolicyConfig(), n_members=3)
        >>> one = OnPolicyLearner(groups, OnPolicyConfig())
        >>> MemberView(many, one).write(1)
        >>> first, again = next(one.parameters()), next(many.parameters())[1]
        >>> torch.equal(first, again)
        True
    """

    def __init__(self, population: Any, single: Any) -> None:
        self.population, self.single = population, single

    @torch.no_grad()
    def read(self, member: int, *, replay: bool = True) -> Any:
        """Returns the ordinary learner with the state of a member.

        Args:
            member (int): index of the member.
            replay (bool): whether to copy the replay buffer, too.
        """
        population, single = self.population, self.single
        for pair in self._pairs(member):
            pair.take()
        for every, own in self._states():
            own["step"].copy_(every["step"])
        for name, optimizer in single.optimizer_of.items():
            optimizer.lr.fill_(rate := float(population.settings[name][member]))
            optimizer.param_groups[0]["lr"] = rate
        single.take_member(population, member, replay=replay)
        return single

    @torch.no_grad()
    def write(self, member: int) -> None:
        """Copies the ordinary learner's state to a member; missing moments are 0."""
        for pair in self._pairs(member):
            pair.give()

    def _pairs(self, member: int) -> Iterator[_TensorPair]:
        owners = self.population.members.rows.owners
        for p, q in zip(self.population.trained, self.single.trained, strict=True):
            yield _TensorPair(p.data, self._rows(owners[p], member), q.data)
        for every, own in self._states():
            rows = self._rows(owners[every["of"]], member)
            yield from (_TensorPair(every[name], rows, own[name]) for name in _MOMENTS)
        for x, y in zip(statistics_of(self.population), statistics_of(self.single), strict=True):
            n = x.shape[0] // self.population.n_members
            yield _TensorPair(x, torch.arange(member * n, (member + 1) * n, device=x.device), y)

    @staticmethod
    def _rows(owner: Tensor, member: int) -> Tensor:
        return (owner == member).nonzero().squeeze(-1)

    def _states(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Yields the moments of each parameter in both learners, if it has moments."""
        for name, optimizer in self.population.optimizer_of.items():
            other = self.single.optimizer_of[name]
            for p, q in zip(optimizer.parameters, other.parameters):
                if optimizer.state.get(p):
                    start_adam(other, [q])
                    yield {**optimizer.state[p], "of": p}, other.state[q]


def _states_of(learner: Any) -> dict[Tensor, dict[str, Any]]:
    optimizers = learner.optimizer_of.values()
    return {p: own for x in optimizers for p, own in x.state.items() if own}


def make_member_view(population: Any, single: Any) -> MemberView:
    """Returns a :class:`MemberView` of a population's learner and an ordinary one.

    Args:
        population (BlockLearner): a learner with P members.
        single (BlockLearner): an ordinary learner with the same groups and settings.
    """
    return MemberView(population, single)


def groups_served_by_rows(
    index: Sequence[int],
    group: GroupSpec,
    input_group: GroupSpec | None,
    outputs: Callable[[TensorDict], Tensor],
    parameters: list[nn.Parameter],
    states: Mapping[str, int] | None = None,
) -> list[Tensor]:
    """Returns the group that each row of each parameter serves; G if a row serves several groups.

    A row serves the groups whose outputs depend on it; autograd finds this dependence.

    Args:
        index (sequence of int): group of each agent.
        group (GroupSpec): the agents.
        input_group (GroupSpec, optional): other agents in a network's input.
        outputs (callable): maps observations and actions, ``[B]``, to the networks' outputs,
            ``[B, N]``.
        parameters (list of Parameter): parameters of the networks.
        states (mapping, optional): leaf -> width per agent, for the networks' other inputs.
    """
    n_groups = max(index) + 1
    serves = [torch.zeros(_n_rows(p), n_groups, device=p.device) for p in parameters]
    device = parameters[0].device
    with torch.random.fork_rng(), _random_weights(parameters):
        batch = _random_batch(group, input_group, device, states)
        _mark_rows_served(serves, outputs(batch), index, parameters)
    return [torch.where(rows.sum(1) == 1, rows.argmax(1), n_groups) for rows in serves]


def _mark_rows_served(
    serves: list[Tensor], outputs: Tensor, index: Sequence[int], parameters: list[nn.Parameter]
) -> None:
    owners = torch.tensor(index, device=outputs.device)
    for i in range(max(index) + 1):
        total = outputs[..., owners == i].sum()
        for rows, gradient in zip(
            serves, torch.autograd.grad(total, parameters, retain_graph=True, allow_unused=True)
        ):
            if gradient is not None:
                rows[:, i] = (gradient.reshape(len(rows), -1) != 0).any(1).to(rows.dtype)


@contextlib.contextmanager
def _random_weights(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Within the context, replaces weights by random weights with which no unit is always 0."""
    torch.manual_seed(0)
    before = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter in parameters:
            width = parameter.shape[-1] if parameter.ndim else 1
            parameter.copy_(torch.randn(parameter.shape) / width**0.5)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, before):
                parameter.copy_(value)


def _n_rows(parameter: nn.Parameter) -> int:
    return parameter.shape[0] if parameter.ndim else 1


def _random_batch(
    group: GroupSpec,
    input_group: GroupSpec | None,
    device: torch.device,
    states: Mapping[str, int] | None = None,
) -> TensorDict:
    batch = 64
    td = TensorDict({}, [batch], device=device)
    # Last, because the same agents have one name, and the actor may read more.
    for known in [group] if input_group is None else [input_group, group]:
        rows: dict[Any, Tensor] = {}
        for inputs in [known] if known.agent_state_key is None else [known, known.of_states]:
            shapes = zip(inputs.observation_keys, inputs.observation_shapes)
            rows |= {key[1:]: torch.randn(batch, *shape) for key, shape in shapes}
        if known.mask_key is not None:
            rows["mask"] = torch.ones(batch, known.n_agents, dtype=torch.bool)
        if known.action_mask_key is not None:
            rows["action_mask"] = torch.ones(batch, known.n_agents, known.n_options).bool()
        for leaf, size in (states or {}).items():
            rows[leaf] = torch.randn(batch, known.n_agents, size)
            rows["is_init"] = torch.zeros(batch, known.n_agents, 1, dtype=torch.bool)
        td[known.name] = TensorDict(rows, [batch, known.n_agents]).to(device)
    if group.state_spec is not None:
        td["state"] = torch.randn(batch, *group.state_spec.shape, device=device)
    return td
