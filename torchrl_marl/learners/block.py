"""The groups of a learner side by side: what is gathered from a batch, and scattered back.

Shapes: E envs, T steps, N agents of a group, G groups that are trained as one, P members.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchrl_marl.joining import can_join, join
from torchrl_marl.objectives.births import Births
from torchrl_marl.objectives.flags import ALIVE, BOOTSTRAPS, Flags, flags_of
from torchrl_marl.population import fold, of_members
from torchrl_marl.specs import GroupSpec
from torchrl_marl.specs.checks import check_flags

__all__ = ["Block"]

_AT_NEXT = ("is_init", "links")
Gathered = tuple[GroupSpec, TensorDictBase, TensorDictBase]


class Block:
    """As few joined groups as their actions allow, and a batch in their layout.

    Args:
        groups (mapping of name to GroupSpec): the groups of a learner.
        apart (bool): leave every group by itself.
        seen (GroupSpec, optional): the agents that critics across groups see.
        acted (sequence of str): what a batch has of their acting.
        remembered (sequence of str): what it has for networks with memory or communication; of
            them ``is_init`` and ``links`` also at the next step.
        n_members (int): number P of members of a population; their groups are as many groups, and
            the envs of a batch are theirs in turn.

    Attributes:
        joined (dict): name of one or several groups, ``"a+b"`` -> the group that is trained.
        births (Births): which agents are born in the running episodes.

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
        seen: GroupSpec | None = None,
        acted: Sequence[str] = ("action", "action_log_prob"),
        remembered: Sequence[str] = (),
        n_members: int = 1,
    ) -> None:
        self.groups, self.seen, self.acted = dict(groups), seen, tuple(acted)
        self.remembered = tuple(remembered)
        self.n_members = n_members
        alike = [[group] for group in groups.values()] if apart else _alike(groups.values())
        teams = [join(own) for own in alike]
        if n_members > 1:
            teams = [of_members(team, n_members) for team in teams]
        self.joined = {group.name: group for group in teams}
        everybody = [*teams] if seen is None else [*teams, seen]
        self.births = Births({own.name: own for group in everybody for own in group.sources})

    def gather(self, batch: TensorDictBase) -> TensorDictBase:
        """Returns the batch with the groups that are trained, dense; the batch stays as it is.

        With them come the flags of :mod:`torchrl_marl.objectives.flags`. Batches follow each
        other, so that it is known who was born before.

        Shapes:
            - batch: ``[E, T]``, ``[P * E, T]`` of a population; returns ``[E, T]``
        """
        data, following = self._blank(batch), batch.get("next")
        for group in self.groups.values():
            own = group.data(following) if group.agent_done else following
            check_flags(group, own)
        gathered = [*self._gather_trained(batch, data)]
        apart = self.seen is not None and self.seen.name not in self.joined
        if apart:
            gathered.append(self._gather_seen(batch, data))
        born, groups = self.births.update(batch), self.births.groups.items()
        known = {name: flags_of(group, batch, born.get(name)) for name, group in groups}
        for group, now, then in gathered:
            self._add_flags(group, known, now, then)
            if apart and group is self.seen and group.mask_key is not None:
                then.set("mask", then.get(BOOTSTRAPS))  # networks across groups read it
        return data

    def _gather_trained(self, batch: TensorDictBase, data: TensorDictBase) -> Iterator[Gathered]:
        for group in self.joined.values():
            leaves = (*self.acted, *self.remembered)
            if batch.get(group.sources[0].key("learns"), None) is not None:
                leaves += ("learns",)
            now = group.gather(batch, leaves=leaves, flags=True)
            leaves = ("reward", *(leaf for leaf in self.remembered if leaf in _AT_NEXT))
            then = group.gather(batch.get("next"), leaves=leaves, flags=True)
            yield _put(group, now, then, data)

    def _blank(self, batch: TensorDictBase) -> TensorDictBase:
        """Returns what joined groups are set into: of a population, only they are the members'."""
        if self.n_members == 1:
            return batch.copy()
        n_envs, *others = batch.shape
        return TensorDict({}, [n_envs // self.n_members, *others], device=batch.device)

    def _gather_seen(self, batch: TensorDictBase, data: TensorDictBase) -> Gathered:
        group = self.seen
        assert group is not None
        now = group.gather(batch, flags=True)
        then = group.gather(batch.get("next"), flags=True)
        return _put(group, now, then, data)

    def _add_flags(
        self,
        group: GroupSpec,
        known: Mapping[str, Flags],
        now: TensorDictBase,
        then: TensorDictBase,
    ) -> None:
        """Writes the flags of the groups of which a group is made."""
        if group.mask_key is None:
            return
        for leaf, place, key in (("alive", now, ALIVE), ("bootstraps", then, BOOTSTRAPS)):
            rows = []
            for own in group.sources:
                flag = getattr(known[own.name], leaf)
                rows.append(self._always(own, now) if flag is None else flag)
            place.set(key, self._side_by_side(torch.cat(rows, -1), now.ndim - 1))

    def _always(self, group: GroupSpec, now: TensorDictBase) -> Tensor:
        n_envs, *others = now.shape[:-1]
        shape = (n_envs * self.n_members, *others, group.n_agents)
        return torch.ones(shape, dtype=torch.bool, device=now.device)

    def _side_by_side(self, rows: Tensor, dim: int) -> Tensor:
        return rows if self.n_members == 1 else fold(rows, self.n_members, dim)

    def scatter(self, data: TensorDictBase, batch: TensorDictBase, leaves: Sequence[str]) -> None:
        """Writes leaves, as far as there are such, from the joined groups into the batch's.

        Args:
            data (TensorDictBase): from :meth:`gather`, and what was written since.
            batch (TensorDictBase): its groups dense or lazily stacked; written to.
            leaves (sequence of str): such as ``advantage``.
        """
        for group in self.joined.values():
            written = [leaf for leaf in leaves if data.get(group.key(leaf), None) is not None]
            group.scatter(data, batch, written)


def _put(
    group: GroupSpec, now: TensorDictBase, then: TensorDictBase, data: TensorDictBase
) -> Gathered:
    """Sets a gathered group into a batch; returns it as it stands there."""
    data.set(group.name, now.get(group.name))
    data.set(("next", group.name), then.get(group.name))
    return group, data.get(group.name), data.get(("next", group.name))


def _alike(groups: Iterable[GroupSpec]) -> list[list[GroupSpec]]:
    """Sorts groups by whether they can be joined."""
    alike: list[list[GroupSpec]] = []
    for group in groups:
        for known in alike:
            if can_join(known[0], group):
                known.append(group)
                break
        else:
            alike.append([group])
    return alike
