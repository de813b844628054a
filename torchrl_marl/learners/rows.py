"""Whose the rows of parameters are: which groups they serve, and of which member they are.

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

__all__ = ["MemberView", "Rows", "copy_rows", "rows_of", "rows_served", "statistics_of"]

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Rows:
    """Says which member each row of a parameter is of.

    Args:
        n_members (int): number P of members.

    Attributes:
        owners (dict): parameter, of networks and targets -> the member that each row is of,
            ``[R]``.
    """

    def __init__(self, n_members: int) -> None:
        self.n_members = n_members
        self.owners: dict[Tensor, Tensor] = {}

    def add(self, clip: GradientClip) -> None:
        """Adds the parameters of a limit, whose groups lie one member after the other."""
        assert clip.row_groups is not None and int(clip.row_groups.max()) < clip.n_groups
        members = clip.row_groups // (clip.n_groups // self.n_members)
        self.owners.update(zip(clip.parameters, members.split(clip.sizes)))

    def add_parameter(self, parameter: Tensor) -> None:
        """Adds a number of each group, such as a temperature, unless it is known."""
        if parameter not in self.owners:
            members = torch.arange(self.n_members, device=parameter.device)
            self.owners[parameter] = members.repeat_interleave(len(parameter) // self.n_members)

    def follow(self, sources: Iterable[Tensor], targets: Iterable[Tensor]) -> None:
        """Adds targets, whose rows are those of what they follow."""
        for source, target in zip(sources, targets):
            self.owners[target] = self.owners[source]

    def of(self, parameter: Tensor) -> Tensor:
        """Returns the member that each row is of, with as many dims as the parameter."""
        return self.owners[parameter].reshape(-1, *(1,) * (parameter.ndim - 1))

    @torch.no_grad()
    def note_broken(self, diverged: Tensor) -> None:
        """Flags members, ``[P]``, whose parameters have a norm that is not finite."""
        for p, rows in self.owners.items():
            broken = ~p.reshape(len(rows), -1).square().sum(1).isfinite()
            diverged.index_put_((rows,), broken, accumulate=True)

    @torch.no_grad()
    def put_back(self, before: Mapping[Tensor, Tensor], diverged: Tensor) -> None:
        """Gives flagged members, ``[P]``, the parameters that they had."""
        for p in self.owners:
            p.copy_(torch.where(diverged[self.of(p)], before[p], p))

    @torch.no_grad()
    def copy(self, learner: Any, parent: Tensor) -> None:
        """Gives each member its parent's parameters, moments and statistics, in place."""
        states = _states_of(learner)
        for p, owner in self.owners.items():
            moments = (states[p][name] for name in _MOMENTS) if p in states else ()
            copy_rows([p, *moments], owner, parent)
        for x in statistics_of(learner):
            x.copy_(x.unflatten(0, (len(parent), -1))[parent].flatten(0, 1))


def copy_rows(tensors: Iterable[Tensor], owner: Tensor, parent: Tensor) -> None:
    """Gives each member its parent's rows of tensors, in place.

    Args:
        tensors (iterable of Tensor): a parameter, and its optimizer's moments.
        owner (Tensor): whose each row is.
        parent (Tensor): whose copy each member becomes.

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
    """Returns what a learner saves beside parameters and how it explores.

    Of a population, members' rows lie one after the other.

    Args:
        learner (BlockLearner): of one or of many.
    """
    exploring = (x for own in learner.explorers for x in own.buffers())
    left = {id(x) for x in (*learner.parameters(), *exploring)}
    saved = learner.state_dict(keep_vars=True).values()
    found = {id(x): x for x in saved if isinstance(x, Tensor) and id(x) not in left}
    return list(found.values())


@dataclass(frozen=True)
class _Pair:
    """A tensor of a population, a member's rows in it, and the same of an ordinary learner."""

    all: Tensor
    rows: Tensor
    own: Tensor

    def take(self) -> None:
        self.own.copy_(self.all[self.rows].reshape(self.own.shape))

    def give(self) -> None:
        self.all[self.rows] = self.own.reshape(len(self.rows), *self.all.shape[1:])


class MemberView:
    """Copies a member's numbers between a population's learner and an ordinary one.

    Networks and targets, the optimizers' moments, statistics, and (to read) what is stored.

    Args:
        many (BlockLearner): of P members.
        one (BlockLearner): of the same groups and settings.

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

    def __init__(self, many: Any, one: Any) -> None:
        self.many, self.one = many, one

    @torch.no_grad()
    def read(self, member: int) -> Any:
        """Returns the ordinary learner, with the numbers and the stored steps of a member."""
        many, one = self.many, self.one
        for pair in self._pairs(member):
            pair.take()
        for every, own in self._states():
            own["step"].copy_(every["step"])
        for name, optimizer in one.optimizer_of.items():
            optimizer.lr.fill_(rate := float(many.settings[name][member]))
            optimizer.param_groups[0]["lr"] = rate
        one.take_member(many, member)
        return one

    @torch.no_grad()
    def write(self, member: int) -> None:
        """Gives a member the numbers of the ordinary learner; moments of 0 where it has none."""
        for pair in self._pairs(member):
            pair.give()

    def _pairs(self, member: int) -> Iterator[_Pair]:
        owners = self.many.members.rows.owners
        for p, q in zip(self.many.trained, self.one.trained, strict=True):
            yield _Pair(p.data, self._rows(owners[p], member), q.data)
        for every, own in self._states():
            rows = self._rows(owners[every["of"]], member)
            yield from (_Pair(every[name], rows, own[name]) for name in _MOMENTS)
        for x, y in zip(statistics_of(self.many), statistics_of(self.one), strict=True):
            n = x.shape[0] // self.many.n_members
            yield _Pair(x, torch.arange(member * n, (member + 1) * n, device=x.device), y)

    @staticmethod
    def _rows(owner: Tensor, member: int) -> Tensor:
        return (owner == member).nonzero().squeeze(-1)

    def _states(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """The moments of each parameter that the members have any of, and the ordinary one's."""
        for name, optimizer in self.many.optimizer_of.items():
            other = self.one.optimizer_of[name]
            for p, q in zip(optimizer.parameters, other.parameters):
                if optimizer.state.get(p):
                    start_adam(other, [q])
                    yield {**optimizer.state[p], "of": p}, other.state[q]


def _states_of(learner: Any) -> dict[Tensor, dict[str, Any]]:
    optimizers = learner.optimizer_of.values()
    return {p: own for x in optimizers for p, own in x.state.items() if own}


def rows_of(many: Any, one: Any) -> MemberView:
    """Returns what copies a member's numbers between a population's learner and an ordinary one.

    Args:
        many (BlockLearner): of P members.
        one (BlockLearner): of the same groups and settings.
    """
    return MemberView(many, one)


def rows_served(
    index: Sequence[int],
    group: GroupSpec,
    seen: GroupSpec | None,
    outputs: Callable[[TensorDict], Tensor],
    parameters: list[nn.Parameter],
    states: Mapping[str, int] | None = None,
) -> list[Tensor]:
    """Returns for each row of each parameter the group that it serves, G where it serves several.

    By autograd: a row serves those whose outputs depend on it.

    Args:
        index (sequence of int): whose each agent is.
        group (GroupSpec): the agents.
        seen (GroupSpec, optional): other agents that a network sees.
        outputs (callable): of what agents see and do, ``[B]``, the networks' outputs, ``[B, N]``.
        parameters (list of Parameter): of the networks.
        states (mapping, optional): leaf -> the numbers of an agent that networks read besides.
    """
    n_groups = max(index) + 1
    serves = [torch.zeros(_n_rows(p), n_groups, device=p.device) for p in parameters]
    device = parameters[0].device
    with torch.random.fork_rng(), _awake_weights(parameters):
        batch = _random_batch(group, seen, device, states)
        _mark_served(serves, outputs(batch), index, parameters)
    return [torch.where(rows.sum(1) == 1, rows.argmax(1), n_groups) for rows in serves]


def _mark_served(
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
def _awake_weights(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Puts in weights with which no unit is always 0, for a while."""
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
    seen: GroupSpec | None,
    device: torch.device,
    states: Mapping[str, int] | None = None,
) -> TensorDict:
    batch = 64
    td = TensorDict({}, [batch], device=device)
    # Where both are the same agents they have one name, and the actor reads more.
    for known in [group] if seen is None else [seen, group]:
        rows: dict[Any, Tensor] = {
            key[1:]: torch.randn(batch, *shape)
            for key, shape in zip(known.observation_keys, known.observation_shapes)
        }
        if known.mask_key is not None:
            rows["mask"] = torch.ones(batch, known.n_agents, dtype=torch.bool)
        if known.action_mask_key is not None:
            rows["action_mask"] = torch.ones(batch, known.n_agents, known.n_actions).bool()
        for leaf, size in (states or {}).items():
            rows[leaf] = torch.randn(batch, known.n_agents, size)
            rows["is_init"] = torch.zeros(batch, known.n_agents, 1, dtype=torch.bool)
        td[known.name] = TensorDict(rows, [batch, known.n_agents]).to(device)
    if group.state_spec is not None:
        td["state"] = torch.randn(batch, *group.state_spec.shape, device=device)
    return td
