"""Matches: a policy that learns, and stored players who act where it does not.

Shapes: E envs, R of them with stored players, N agents of a group, S slots, K players.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from torchrl_marl.collectors.team import TeamPolicy
from torchrl_marl.errors import SpecError
from torchrl_marl.functional import expand_mask
from torchrl_marl.modules.players import Players
from torchrl_marl.specs import TeamSpec

__all__ = ["MatchPolicy"]

Policy = Callable[[TensorDictBase], TensorDictBase]
Seat = Mapping[str, Sequence[int]]


class MatchPolicy(TensorDictModuleBase):
    """A joint policy that learns, and in some envs and seats stored players instead of it.

    Which seats are played by others is a fixed split of the envs: in the first it has all seats, in
    the following it has the first seat, then the second, and so on. *Who* the others are is data:
    one player an env, drawn by ``chances`` when an episode begins, who plays all other seats to its
    end. So neither a new player nor other chances record a graph again.

    Args:
        policy (TeamPolicy): acts for all groups, and is learned from.
        team (TeamSpec): the groups.
        seats (sequence of mapping): group -> the numbers of its agents, of each seat; all agents
            of the team once.
        envs (sequence of int): envs in which the policy has all seats, then those of each seat.

    Keyword Args:
        n_slots (int): number S of stored copies.
        guests (sequence of callable): other policies, which act one after the other: players
            S, S + 1, ...
        exploiters (sequence of TeamPolicy): others that only learn how to beat this one. Each has
            as many of the first envs, in which it has one seat, and this one, which is not learned
            from there, has all others.
        exploited (sequence of int): of each exploiter, in how many envs it has each seat.
        block (int): rows of a block of one player, see :class:`~torchrl_marl.modules.Players`.

    Attributes:
        players (list of Players): of each actor of the policy.
        chances (Tensor): with which each of the K = S + G players is drawn, by seat that learns,
            ``[n_seats, K]``; written in place.
        learns (dict): group -> for whom the policy acts, ``[E, N]``.
        rows (Tensor): the envs with stored players, ``[R]``.
        seat (Tensor): which seat learns in each of them, ``[R]``.
        n_exploited (int): envs of one exploiter.
        exploited_seat (Tensor): which seat one has in each of them, ``[n_exploited]``.

    Shapes:
        - ``(group, "player")``: int64 ``[E, N]``: 0 where the policy acts, or an episode is new;
          k where stored player k - 1 does
        - ``(group, "learns")``: bool ``[E, N]``

    Keys:
        - reads: what policy and guests read, and ``(group, "player")`` of an environment with
          :class:`~torchrl_marl.envs.remember.WhoPlays`
        - writes: what the policy writes, ``(group, "player")``, here and under ``"next"``, and
          ``(group, "learns")``

    Raises:
        ValueError: seats and envs that do not fit.

    Reduces to: the policy, where every player is a copy of it.

    Examples:
        >>> from torchrl_marl.envs.remember import with_players
        >>> from torchrl_marl.envs.toy import ZeroSum
        >>> from torchrl_marl.modules import make_actor
        >>> env = with_players(ZeroSum(8, seed=0), ["first", "second"])
        >>> team = TeamSpec.from_env(env)
        >>> policy = TeamPolicy(make_actor(group) for group in team.groups.values())
        >>> seats = [{"first": [0]}, {"second": [0]}]
        >>> match = MatchPolicy(policy, team, seats, envs=[4, 2, 2], n_slots=3)
        >>> match.chances[:, 1] = 1.0
        >>> step = match(env.reset())
        >>> step["second", "player"].flatten().tolist()
        [0, 0, 0, 0, 2, 2, 0, 0]
    """

    rows: Tensor
    seat: Tensor
    exploited_seat: Tensor
    _row: Tensor

    def __init__(
        self,
        policy: TeamPolicy,
        team: TeamSpec,
        seats: Sequence[Seat],
        envs: Sequence[int],
        *,
        n_slots: int,
        guests: Sequence[Policy] = (),
        exploiters: Sequence[TeamPolicy] = (),
        exploited: Sequence[int] = (),
        block: int = 32,
    ) -> None:
        super().__init__()
        if len(envs) != len(seats) + 1 or not all(isinstance(n, int) and n >= 0 for n in envs):
            raise ValueError(
                f"matches: envs is {list(envs)}, expected {len(seats) + 1} whole numbers, 0 or "
                f"more: of envs in which all learn, and of those of each of {len(seats)} seats."
            )
        _check_seats(team, seats)
        self.policy, self.team, self.n_slots = policy, team, n_slots
        self.guests = list(guests)
        self._players = nn.ModuleList(
            Players(actor, n_slots, block=block) for actor in policy.module
        )
        whose = torch.repeat_interleave(torch.arange(-1, len(seats)), torch.tensor(envs))
        self.register_buffer("rows", (whose >= 0).nonzero().squeeze(1), persistent=False)
        self.register_buffer("seat", whose[self.rows], persistent=False)
        chances = torch.zeros(len(seats), n_slots + len(guests), dtype=torch.float64)
        self.register_buffer("chances", chances, persistent=False)
        for name, group in team.groups.items():
            learns = _learns(seats, whose, name, group.n_agents)
            self.register_buffer(f"_learns_{name}", learns, persistent=False)
        # Of the envs with stored players, those in which one acts for some agent of each actor.
        self._groups = [[own.name for own in one.group.sources] for one in self.players]
        for i, names in enumerate(self._groups):
            acts = torch.stack([~self.learns[name][self.rows].all(-1) for name in names]).any(0)
            self.register_buffer(f"_place_{i}", acts.nonzero().squeeze(1), persistent=False)
        self._add_exploiters(exploiters, seats, exploited)
        first = next(iter(policy.parameters()), chances)
        self.to(first.device)
        player_keys = [group.key("player") for group in team.groups.values()]
        self.in_keys = [*policy.in_keys, *player_keys]
        learn_keys = [group.key("learns") for group in team.groups.values()]
        following: list[NestedKey] = [("next", *key) for key in player_keys]
        self.out_keys = [*policy.out_keys, *player_keys, *learn_keys, *following]

    def _add_exploiters(
        self, exploiters: Sequence[TeamPolicy], seats: Sequence[Seat], envs: Sequence[int]
    ) -> None:
        self.exploiters, self.n_exploited = nn.ModuleList(exploiters), sum(envs)
        if not exploiters:
            return
        whose = torch.repeat_interleave(torch.arange(len(seats)), torch.tensor(envs))
        for name, group in self.team.groups.items():
            learns = _learns(seats, whose, name, group.n_agents)
            self.register_buffer(f"_exploits_{name}", learns, persistent=False)
        self.register_buffer("exploited_seat", whose, persistent=False)
        self.register_buffer("_row", torch.arange(self.n_exploited), persistent=False)

    @property
    def learns(self) -> dict[str, Tensor]:
        """For whom the policy acts, by group, ``[E, N]``."""
        return {name: self.get_buffer(f"_learns_{name}") for name in self.team.groups}

    @property
    def players(self) -> list[Players]:
        """The stored players of each actor."""
        return [cast(Players, one) for one in self._players]

    def in_use(self, carry: TensorDictBase | None) -> set[int]:
        """Returns the players of running episodes; it waits for the device.

        Args:
            carry (TensorDictBase, optional): the collector's, ``[E]``.
        """
        if carry is None:
            return set()
        return set((self._playing(carry).unique() - 1).tolist()) - {-1}

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Acts."""
        learns = next(iter(self.learns.values()))
        if tensordict.shape != learns.shape[:1]:
            raise SpecError(
                f"matches are played in {len(learns)} envs, found a step of shape "
                f"{list(tensordict.shape)}; give envs that add up to it."
            )
        before = tensordict.copy()
        acted = self.policy(tensordict)
        who = self._draw(before)
        for i, players in enumerate(self.players):
            place = self.get_buffer(f"_place_{i}")
            stored = who[place].clamp_max(self.n_slots) - 1
            seen = before.select(*players.in_keys, strict=False)[self.rows[place]]
            self._put(acted, players.act(seen, stored), place, self._groups[i])
        for i, guest in enumerate(self.guests):
            own = who == self.n_slots + 1 + i
            seen = before[self.rows]
            self._put(acted, guest(seen), slice(None), list(self.team.groups), own)
        self._note(acted, who)
        for i, exploiter in enumerate(self.exploiters):
            self._exploit(acted, before, exploiter, self._row + i * self.n_exploited)
        return acted

    def _playing(self, tensordict: TensorDictBase) -> Tensor:
        """Returns each env's player, ``[R]``, 0 where none is drawn yet."""
        found = []
        for group in self.team.groups.values():
            player = tensordict.get(group.key("player"), None)
            if player is None:
                raise SpecError(
                    f"group {group.name!r}: the step has no {group.key('player')!r}; play in "
                    "torchrl_marl.envs.remember.with_players(env, groups)."
                )
            found.append(player.amax(-1))
        return torch.stack(found).amax(0)[self.rows]

    def _draw(self, tensordict: TensorDictBase) -> Tensor:
        """Returns each env's player, ``[R]``, from 1; new ones where episodes begin."""
        playing = self._playing(tensordict)
        reach = self.chances.cumsum(-1)[self.seat]
        point = torch.rand(reach[:, :1].shape, dtype=reach.dtype, device=reach.device)
        drawn = (reach <= point * reach[:, -1:]).sum(-1).clamp_max(reach.shape[1] - 1)
        return torch.where(playing == 0, drawn + 1, playing)

    def _put(
        self,
        acted: TensorDictBase,
        theirs: TensorDictBase,
        place: Tensor | slice,
        groups: Sequence[str],
        own: Tensor | None = None,
    ) -> None:
        """Replaces what the policy wrote for agents that another plays.

        Args:
            acted (TensorDictBase): ``[E]``, by the policy.
            theirs (TensorDictBase): by players, in the envs at ``place`` of ``rows``.
            groups (sequence of str): for whom they act.
            own (Tensor, optional): bool, in which of these envs they do.
        """
        rows = self.rows[place]
        others = {name: ~self.learns[name][rows] for name in groups}
        if own is not None:
            others = {name: other & own.unsqueeze(-1) for name, other in others.items()}
        _replace(acted, theirs, rows, others)

    def _note(self, acted: TensorDictBase, who: Tensor) -> None:
        """Writes who plays and who is learned from."""
        size = acted.batch_size[0]
        everywhere = who.new_zeros(size).index_copy(0, self.rows, who)
        for name, learns in self.learns.items():
            player = torch.where(learns, 0, everywhere.unsqueeze(-1))
            acted.set((name, "player"), player)
            acted.set((name, "learns"), learns.clone())
            acted.set(("next", name, "player"), player)

    def _exploit(
        self, acted: TensorDictBase, before: TensorDictBase, exploiter: nn.Module, rows: Tensor
    ) -> None:
        """Lets an exploiter act for its seat in its envs, where it alone learns."""
        learns = {name: self.get_buffer(f"_exploits_{name}") for name in self.team.groups}
        _replace(acted, exploiter(before[rows]), rows, learns)
        for name, own in learns.items():
            everybody = acted.get((name, "learns"))
            acted.set((name, "learns"), everybody.index_copy(0, rows, own))


def _replace(
    acted: TensorDictBase, theirs: TensorDictBase, rows: Tensor, others: Mapping[str, Tensor]
) -> None:
    """Replaces what a policy wrote for agents that another plays.

    Args:
        acted (TensorDictBase): ``[E]``, by the policy.
        theirs (TensorDictBase): by the other, ``[R]``.
        rows (Tensor): its envs, ``[R]``.
        others (mapping): group -> for whom it acts, ``[R, N]``.
    """
    for name, other in others.items():
        for key in _written(name, theirs):
            mine = acted.get(key, None)
            if mine is not None:
                value = torch.where(expand_mask(other, mine[rows]), theirs.get(key), mine[rows])
                acted.set(key, mine.index_copy(0, rows, value))


def _check_seats(team: TeamSpec, seats: Sequence[Seat]) -> None:
    for name in {name for seat in seats for name in seat if name not in team.groups}:
        raise ValueError(
            f"matches: a seat has group {name!r}, expected one of {', '.join(team.groups)}."
        )
    for name, group in team.groups.items():
        taken = sorted(agent for seat in seats for agent in seat.get(name, ()))
        if taken != list(range(group.n_agents)):
            raise ValueError(
                f"matches: seats have agents {taken} of group {name!r}, expected each of 0 to "
                f"{group.n_agents - 1} once."
            )


def _learns(seats: Sequence[Seat], whose: Tensor, group: str, n_agents: int) -> Tensor:
    """Returns for which agents of a group the policy acts, ``[E, N]``.

    Args:
        seats: as in :class:`MatchPolicy`.
        whose (Tensor): the seat that learns in each env, -1 where all do, ``[E]``.
        group (str): the group's name.
        n_agents (int): its agents.
    """
    seat = torch.full((n_agents,), -1)
    for i, own in enumerate(seats):
        seat[list(own.get(group, ()))] = i
    return (whose.unsqueeze(-1) == seat) | (whose < 0).unsqueeze(-1)


def _written(group: str, theirs: TensorDictBase) -> list[NestedKey]:
    """Returns what a policy wrote for a group: its actions, and what it remembers."""
    keys: list[NestedKey] = [(group, leaf) for leaf in ("action", "action_log_prob", "channel")]
    keys.append(("next", group, "hidden"))
    return [key for key in keys if theirs.get(key, None) is not None]
