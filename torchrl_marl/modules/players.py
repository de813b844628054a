"""Policies of several players, with one player per environment.

Shapes: K members, M rows, G blocks of B rows each; in :class:`Players`, B any batch dims.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import Tensor
from torch.func import functional_call

from torchrl_marl.errors import SpecError
from torchrl_marl.modules.actors import GroupActor
from torchrl_marl.modules.joined_actor import JoinedActor

__all__ = ["Blocks", "Players", "act_by_row", "check_shapes", "dispatch", "stored", "tensors_of"]


class Blocks(NamedTuple):
    """Layout of rows in blocks of one member each, from :func:`dispatch`."""

    place: Tensor
    """Position of each row, ``[M]``."""
    member: Tensor
    """Member of each block, ``[G]``."""
    size: int
    """Rows B of a block."""

    def gather(self, rows: Tensor) -> Tensor:
        """Gathers rows into blocks, padded with zeros: ``[M, ...]`` to ``[G, B, ...]``."""
        blocks = rows.new_zeros(len(self.member) * self.size, *rows.shape[1:])
        return blocks.index_copy(0, self.place, rows).unflatten(0, (-1, self.size))

    def scatter(self, blocks: Tensor) -> Tensor:
        """Scatters blocks back to rows: ``[G, B, ...]`` to ``[M, ...]``."""
        return blocks.flatten(0, 1).index_select(0, self.place)


def dispatch(owner: Tensor, n_members: int, block: int) -> Blocks:
    """Sorts rows by member into blocks of one member each.

    Shapes do not depend on the number of rows per member, and nothing waits for the device, so a
    CUDA graph can capture it. There are ``M // B + K`` blocks; the last ones may be empty.

    Args:
        owner (Tensor): member of each row, integers.
        n_members (int): number K of members.
        block (int): rows B per block.

    Shapes:
        - owner: ``[M]``

    Examples:
        >>> blocks = dispatch(torch.tensor([1, 0, 1, 1]), n_members=2, block=2)
        >>> blocks.place.tolist(), blocks.member.tolist()
        ([2, 0, 3, 4], [0, 1, 1, 1])
        >>> blocks.gather(torch.tensor([5, 6, 7, 8])).tolist()
        [[6, 0], [5, 7], [8, 0], [0, 0]]
    """
    n_blocks = len(owner) // block + n_members
    order = owner.argsort(stable=True)
    counts = torch.zeros(n_members, dtype=torch.int64, device=owner.device)
    counts = counts.scatter_add(0, owner, torch.ones_like(owner))
    first = counts.cumsum(0) - counts
    ends = ((counts + block - 1) // block).cumsum(0)
    begins = ends - (counts + block - 1) // block
    sorted_owner = owner[order]
    rank = torch.arange(len(owner), device=owner.device) - first[sorted_owner]
    place = torch.zeros_like(owner).scatter(0, order, begins[sorted_owner] * block + rank)
    numbers = torch.arange(n_blocks, device=owner.device)
    member = torch.searchsorted(ends, numbers, right=True).clamp_max(n_members - 1)
    return Blocks(place, member, block)


class Players(TensorDictModuleBase):
    """Stores S copies of an actor; an entry of the data says which copy acts in each environment.

    All copies act in one batched forward, in which rows are sorted into blocks of one player each.
    Copies are written in place, so a recorded graph stays valid.

    Args:
        actor (GroupActor or JoinedActor): actor of a group or of several joined groups, from
            :func:`~torchrl_marl.modules.make_actor`; every slot begins as a copy of it.
        n_slots (int): number S of players.
        block (int): rows per block.

    Attributes:
        group (GroupSpec): group that the players act for.

    Shapes:
        - ``(group, "player")``: ``[E]``, integers from 0 to S - 1; all other shapes are the actor's

    Keys:
        - reads: the actor's keys, and ``(group, "player")``
        - writes: the actor's keys

    Raises:
        SpecError: a policy that is not an actor, fewer than one slot, or data without players.

    Reduces to: the actor, if every slot is a copy of it.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import Bounded, Unbounded
        >>> from torchrl_marl import AgentSpec, TeamSpec
        >>> from torchrl_marl.modules import make_actor
        >>> team = TeamSpec([AgentSpec("car", 3, Unbounded((4,)), Bounded(-1, 1, (2,)))])
        >>> players = Players(make_actor(team.groups["car"]), n_slots=4)
        >>> players.store(1, make_actor(team.groups["car"]))
        >>> td = TensorDict({"car": {"observation": torch.zeros(5, 3, 4),
        ...                          "mask": torch.ones(5, 3, dtype=torch.bool)}}, [5])
        >>> td["car", "player"] = torch.tensor([0, 1, 1, 3, 0]).unsqueeze(-1).expand(5, 3)
        >>> players(td)["car", "action"].shape
        torch.Size([5, 3, 2])
    """

    def __init__(self, actor: TensorDictModuleBase, n_slots: int, *, block: int = 32) -> None:
        super().__init__()
        if not isinstance(actor, (GroupActor, JoinedActor)):
            raise SpecError(
                f"players are copies of {type(actor).__name__}, expected an actor from make_actor, "
                "or a learner's."
            )
        if n_slots < 1 or block < 1:
            raise SpecError(f"n_slots is {n_slots} and block {block}, expected 1 or more of each.")
        self.group, self.n_slots, self.block = actor.group, n_slots, block
        # Hidden from parameters(): the copies are not trained.
        self._actor = (copy.deepcopy(actor).requires_grad_(False),)
        self._names = list(tensors_of(actor))
        for i, value in enumerate(tensors_of(actor).values()):
            rows = value.detach().unsqueeze(0).repeat(n_slots, *(1,) * value.ndim)
            self.register_buffer(f"stored_{i}", rows)
        self.player_key: NestedKey = self.group.sources[0].key("player")
        self.in_keys = [*actor.in_keys, self.player_key]
        self.out_keys = list(actor.out_keys)

    def store(self, slot: int, actor: TensorDictModuleBase) -> None:
        """Writes a copy of an actor into a slot: parameters and statistics.

        Raises:
            SpecError: no such slot, or parameters that differ from the slots'.
        """
        self.load(slot, tensors_of(actor))

    def copy_of(self, slot: int) -> dict[str, Tensor]:
        """Returns the parameters and statistics of a slot."""
        return {name: value[slot].clone() for name, value in self._stored_tensors().items()}

    @torch.no_grad()
    def load(self, slot: int, new: Mapping[str, Tensor]) -> None:
        """Writes parameters and statistics into a slot.

        Raises:
            SpecError: no such slot, or tensors that differ from the slots'.
        """
        if not 0 <= slot < self.n_slots:
            raise SpecError(
                f"slot is {slot}, expected 0 to {self.n_slots - 1}: there are {self.n_slots}."
            )
        own = self._stored_tensors()
        found = {name: tuple(value.shape) for name, value in new.items()}
        expected = {name: tuple(value.shape[1:]) for name, value in own.items()}
        check_shapes(self.group.name, expected, found)
        for name, value in new.items():
            own[name][slot].copy_(value)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Acts in every environment with its player."""
        owner = tensordict.get(self.player_key, None)
        if owner is None:
            raise SpecError(
                f"group {self.group.name!r}: the data have no players, expected "
                f"{self.player_key!r}."
            )
        return self.act(tensordict, owner.reshape(*tensordict.shape, -1)[..., 0])

    def act(self, tensordict: TensorDictBase, owner: Tensor) -> TensorDictBase:
        """Acts in each row with the player that ``owner``, ``[E]``, gives."""
        return act_by_row(
            self._actor[0], self._stored_tensors(), owner, tensordict, block=self.block
        )

    def _stored_tensors(self) -> dict[str, Tensor]:
        return {name: self.get_buffer(f"stored_{i}") for i, name in enumerate(self._names)}


def act_by_row(
    actor: TensorDictModuleBase,
    tensors: Mapping[str, Tensor],
    owner: Tensor,
    tensordict: TensorDictBase,
    *,
    block: int = 32,
) -> TensorDictBase:
    """Acts in every row with the parameters of its member, in one batched forward.

    Args:
        actor (GroupActor or JoinedActor): actor with the members' structure.
        tensors (mapping): name -> parameters and statistics of K members, from :func:`stored`.
        owner (Tensor): member of each row, integers.
        tensordict (TensorDictBase): inputs of the actor; actions are written there.
        block (int): rows per block, see :func:`~torchrl_marl.modules.players.dispatch`.

    Shapes:
        - tensors: ``[K, ...]``; owner: ``[*B]``; tensordict: ``[*B]``
    """
    if isinstance(actor, JoinedActor):
        act = partial(act_by_row, actor.actor, tensors, owner, block=block)
        return cast(TensorDictBase, actor.act_with(act, tensordict))
    actor = cast(GroupActor, actor)
    first, *rest = _flatten_modules(actor)
    network, data = first.module, actor.group.dense(tensordict)
    batch = data.ndim
    blocks = dispatch(owner.reshape(-1), len(next(iter(tensors.values()))), block)
    rows = [cast(Tensor, data.get(key)).flatten(0, batch - 1) for key in first.in_keys]
    own = {name: x.index_select(0, blocks.member) for name, x in tensors.items()}

    def run(tensors: dict[str, Tensor], *inputs: Tensor) -> Any:
        return functional_call(network, tensors, inputs)

    outputs = torch.vmap(run, randomness="different")(own, *map(blocks.gather, rows))
    acted = data.copy()
    for key, value in zip(first.out_keys, outputs if isinstance(outputs, tuple) else (outputs,)):
        acted.set(key, blocks.scatter(value).unflatten(0, data.shape))
    for step in rest:
        acted = step(acted)
    for key in actor.out_keys:
        if len(key) == 2 and key[0] == actor.group.name:
            actor.group.write(tensordict, key[1], acted.get(key))
        else:
            tensordict.set(key, acted.get(key))
    return tensordict


def stored(actors: Sequence[GroupActor]) -> dict[str, Tensor]:
    """Returns the stacked parameters and statistics of actors with the same structure.

    Shapes:
        - each: ``[K, ...]``
    """
    every = [tensors_of(actor) for actor in actors]
    return {name: torch.stack([own[name] for own in every]) for name in every[0]}


def check_shapes(
    group: str, expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuses a player with parameter names or shapes that differ from the group's.

    Raises:
        SpecError: a parameter differs; the message names the first.
    """
    if found != expected:
        wrong = next(n for n in {**found, **expected} if found.get(n) != expected.get(n))
        raise SpecError(
            f"group {group!r}: {wrong} of the player has shape "
            f"{found.get(wrong, 'nowhere')}, expected {expected.get(wrong, 'nowhere')}; store "
            "players of the same networks."
        )


def tensors_of(actor: TensorDictModuleBase) -> dict[str, Tensor]:
    """Returns the parameters and statistics in which copies of an actor may differ."""
    actor = cast(GroupActor, actor.actor if isinstance(actor, JoinedActor) else actor)
    saved = _flatten_modules(actor)[0].module.state_dict(keep_vars=True)
    return {name: value for name, value in saved.items() if isinstance(value, Tensor)}


def _flatten_modules(actor: GroupActor) -> list[TensorDictModule]:
    """Returns the modules of an actor in sequence, without nesting; the first has the
    parameters."""
    found: list[Any] = []
    for step in actor.module:
        found += list(step.module) if isinstance(step, TensorDictSequential) else [step]
    return found
