"""One actor for several groups, and views of it that act for one group each.

Shapes: B any batch dims, N agents of all groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn

from torchrl_marl.modules.actors import check_memory
from torchrl_marl.modules.memory.states import state_size
from torchrl_marl.specs import GroupSpec
from torchrl_marl.specs.joining import JoinedGroup

__all__ = ["ActorPart", "GroupActors", "JoinedActor", "merge_parts"]

_ACTION_LEAVES = ("action", "action_log_prob", "channel")
_MEMORY_LEAVES = ("hidden", "is_init")


class JoinedActor(TensorDictModuleBase):
    """Actor that acts for all agents of several groups in one call.

    Args:
        actor (TensorDictModuleBase): actor of the joined group.
        group (JoinedGroup): the groups.

    Keys:
        - reads: each group's observation, mask and action mask; with memory, its hidden state
        - writes: each group's ``action``, and ``action_log_prob`` where the actor writes it; with
          memory, the next hidden state under ``"next"``
    """

    def __init__(self, actor: TensorDictModuleBase, group: JoinedGroup) -> None:
        super().__init__()
        self.actor = actor
        self.group = group
        self.state_size = state_size(actor)
        self.extra = _MEMORY_LEAVES if self.state_size else ()
        self.in_keys = [key for own in group.sources for key in _input_keys(own, self.extra)]
        self.written = tuple(leaf for leaf in _ACTION_LEAVES if group.key(leaf) in actor.out_keys)
        self.out_keys = [key for own in group.sources for key in self.output_keys_of(own)]

    def output_keys_of(self, group: GroupSpec) -> list[NestedKey]:
        """Returns the output keys of a group."""
        state: list[NestedKey] = [("next", group.name, "hidden")] if self.extra else []
        return [*(group.key(leaf) for leaf in self.written), *state]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Acts for all groups."""
        return self.act_with(self.actor, tensordict)

    def act_with(self, act: Callable[..., TensorDictBase], tensordict: TensorDictBase) -> Any:
        """Acts for all groups with another policy of the joined group."""
        for group in self.group.sources if self.extra else ():
            check_memory(group, tensordict)
        joined = act(self.group.gather(tensordict, leaves=self.extra))
        self.group.scatter(joined, tensordict, self.written)
        if self.extra:
            state = joined.get(("next", self.group.name, "hidden"))
            for group, rows in zip(self.group.sources, self.group.split(state, state.ndim - 2)):
                tensordict.set(("next", group.name, "hidden"), rows)
        return tensordict

    def part(self, name: str) -> ActorPart:
        """Returns the actor of one group."""
        return ActorPart(self, name)


class ActorPart(TensorDictModuleBase):
    """View of a joined actor that acts for one group; the other groups may be missing.

    In a :class:`~torchrl_marl.collectors.TeamPolicy` all views together act in one call.

    Args:
        whole (JoinedActor): actor of this and other groups.
        name (str): name of the group.

    Keys:
        - reads: the group's observation, mask and action mask; with memory, its hidden state
        - writes: its ``action``, and ``action_log_prob`` where the actor writes it; with memory,
          the next hidden state under ``"next"``
    """

    def __init__(self, whole: JoinedActor, name: str) -> None:
        super().__init__()
        self.whole = whole
        [self.group] = [group for group in whole.group.sources if group.name == name]
        self.in_keys = _input_keys(self.group, whole.extra)
        self.out_keys = whole.output_keys_of(self.group)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Acts for the group."""
        team = TensorDict({}, tensordict.batch_size, device=tensordict.device)
        for group in self.whole.group.sources:
            present = group.name == self.group.name
            group_data = (
                group.data(tensordict).copy() if present else self._placeholder_data(group, team)
            )
            team.set(group.name, group_data)
        acted = self.whole(team)
        self.group.scatter(acted, tensordict, self.whole.written)
        if self.whole.extra:
            key = ("next", self.group.name, "hidden")
            tensordict.set(key, acted.get(key))
        return tensordict

    def _placeholder_data(self, group: GroupSpec, like: TensorDictBase) -> TensorDict:
        """Returns placeholder data of a group in which no agent lives; any network can read it."""
        batch, size = (*like.batch_size, group.n_agents), self.whole.state_size
        data = TensorDict({}, batch, device=like.device)
        for key in group.observation_keys:
            leaf = group.padded_spec[key[1:]]
            shape = (*like.batch_size, *leaf.shape)
            data.set(key[1:], torch.zeros(shape, dtype=leaf.dtype, device=like.device))
        bool_options = {"dtype": torch.bool, "device": like.device}
        if group.mask_key is not None:
            data.set("mask", torch.zeros(batch, **bool_options))
        if group.action_mask_key is not None:
            data.set("action_mask", torch.ones(*batch, group.n_options, **bool_options))
        if size:
            data.set("hidden", torch.zeros(*batch, size, device=like.device))
            data.set("is_init", torch.ones(*batch, 1, **bool_options))
        return data


class GroupActors(nn.Module):
    """Actors of a learner by group; several may be views of one joined actor.

    It is a mapping by group name. Its ``state_dict`` has the trained actors, each under the name of
    its group or groups, such as ``"a+b"``.

    Examples:
        >>> from torchrl.data import Bounded, Unbounded
        >>> from torchrl_marl import AgentSpec, TeamSpec
        >>> from torchrl_marl.specs.joining import join
        >>> from torchrl_marl.modules import make_actor
        >>> bounded = Bounded(-1, 1, (2,))
        >>> team = TeamSpec([AgentSpec("cat", 1, Unbounded((4,)), bounded),
        ...                  AgentSpec("mouse", 2, Unbounded((3,)), bounded)])
        >>> group = join(tuple(team.groups.values()))
        >>> actors = GroupActors()
        >>> actors.add(group, make_actor(group))
        >>> list(actors), actors["mouse"].out_keys[0]
        (['cat', 'mouse'], ('mouse', 'action'))
    """

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[str, str] = {}

    def add(self, group: GroupSpec, actor: TensorDictModuleBase) -> None:
        """Adds the actor of a group, or of several groups joined into one."""
        whole = JoinedActor(actor, group) if isinstance(group, JoinedGroup) else actor
        self.add_module(group.name, whole)
        self._names.update({own.name: group.name for own in group.sources})

    def __getitem__(self, name: str) -> TensorDictModuleBase:
        whole = self._modules[self._names[name]]
        return whole.part(name) if isinstance(whole, JoinedActor) else whole  # type: ignore[return-value]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def keys(self) -> list[str]:
        """Returns the names of the groups."""
        return list(self._names)

    def values(self) -> list[TensorDictModuleBase]:
        """Returns the actor of each group."""
        return [self[name] for name in self._names]

    def items(self) -> list[tuple[str, TensorDictModuleBase]]:
        """Returns the name and the actor of each group."""
        return [(name, self[name]) for name in self._names]


def merge_parts(actors: Iterable[TensorDictModuleBase]) -> list[TensorDictModuleBase]:
    """Returns the actors; if all views of a joined actor are given, it replaces them."""
    actors = list(actors)
    wholes = [actor.whole if isinstance(actor, ActorPart) else None for actor in actors]
    merged: list[TensorDictModuleBase] = []
    for actor, whole in zip(actors, wholes):
        parts = [part for part, other in zip(actors, wholes) if other is whole]
        if whole is None or len(parts) < len(whole.group.sources):
            merged.append(actor)
        elif actor is parts[0]:
            merged.append(whole)
    return merged


def _input_keys(group: GroupSpec, extra: Iterable[str] = ()) -> list[NestedKey]:
    masks = [key for key in (group.mask_key, group.action_mask_key) if key is not None]
    return [*group.observation_keys, *masks, *(group.key(leaf) for leaf in extra)]
