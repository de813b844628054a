"""Matches between the learning policy and stored players.

A *seat* is the agents that one player controls.

Shapes: E envs, R envs with stored players, N agents of a group, S slots, K players.
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
    """The learning policy, with stored players in some seats of some envs.

    The envs are split once: in the first envs the policy plays all seats, in the next ones only the
    first seat, then only the second, and so on. In the envs in which the policy plays one seat, one
    player is sampled by ``chances`` at the start of each episode, and plays all other seats until
    the episode ends. A captured graph reads the players and their probabilities from tensors, so
    changing them does not need a new graph.

    Args:
        policy (TeamPolicy): the learning policy, which acts for all groups.
        team (TeamSpec): the groups.
        seats (sequence of mapping): for each seat, group -> indices of its agents; each agent of
            the team belongs to one seat.
        envs (sequence of int): number of envs in which the policy plays all seats, followed by the
            numbers in which it plays only the first seat, only the second, and so on.

    Keyword Args:
        n_slots (int): number S of slots for stored players.
        guests (sequence of callable): other policies, which are players S, S + 1 and so on.
        exploiters (sequence of TeamPolicy): policies that learn only to beat this one. Each
            exploiter has the same number of envs, taken from the first envs, and plays one seat in
            each of them. The policy of this class plays the other seats of these envs, without
            learning.
        exploited (sequence of int): number of envs in which an exploiter plays each seat.
        block (int): number of rows per block, see :class:`~torchrl_marl.modules.Players`.

    Attributes:
        players (list of Players): stored players' parameters, for each actor of the policy.
        chances (Tensor): probability of each of the K players (S stored players, then the guests)
            for each learning seat, ``[n_seats, K]``. Change it in place.
        learns (dict): group -> mask of the agents for which the policy acts, ``[E, N]``.
        rows (Tensor): indices of the envs with stored players, ``[R]``.
        seat (Tensor): learning seat in each of the envs ``rows``, ``[R]``.
        n_exploited (int): number of envs of one exploiter.
        exploited_seat (Tensor): seat that an exploiter plays in each of its envs,
            ``[n_exploited]``.

    Shapes:
        - ``(group, "player")``: int64 ``[E, N]``: k + 1 for player k; 0 for the policy, or if no
          player is sampled yet
        - ``(group, "learns")``: bool ``[E, N]``

    Keys:
        - reads: the inputs of the policy and the guests, and ``(group, "player")``, which the
          environment carries by :class:`~torchrl_marl.envs.remember.PlayerIndices`
        - writes: the outputs of the policy, ``(group, "player")``, also under ``"next"``, and
          ``(group, "learns")``

    Raises:
        ValueError: the seats do not fit the team, or ``envs`` does not fit the seats.

    Reduces to: the policy, if every player is a copy of it.

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
                f"matches: envs is {list(envs)}, expected {len(seats) + 1} integers, 0 or more: "
                f"number of envs in which all learn, and of envs for each of {len(seats)} seats."
            )
        _check_seats(team, seats)
        self.policy, self.team, self.n_slots = policy, team, n_slots
        self.guests = list(guests)
        self._players = nn.ModuleList(
            Players(actor, n_slots, block=block) for actor in policy.module
        )
        learning_seat = torch.repeat_interleave(torch.arange(-1, len(seats)), torch.tensor(envs))
        self.register_buffer("rows", (learning_seat >= 0).nonzero().squeeze(1), persistent=False)
        self.register_buffer("seat", learning_seat[self.rows], persistent=False)
        probabilities = torch.zeros(len(seats), n_slots + len(guests), dtype=torch.float64)
        self.register_buffer("chances", probabilities, persistent=False)
        for name, group in team.groups.items():
            learns = _learning_mask(seats, learning_seat, name, group.n_agents)
            self.register_buffer(f"_learns_{name}", learns, persistent=False)
        # For each actor: the envs in which it does not act for all agents, as positions in `rows`.
        self._groups = [[own.name for own in one.group.sources] for one in self.players]
        for i, names in enumerate(self._groups):
            acts = torch.stack([~self.learns[name][self.rows].all(-1) for name in names]).any(0)
            self.register_buffer(f"_place_{i}", acts.nonzero().squeeze(1), persistent=False)
        self._add_exploiters(exploiters, seats, exploited)
        first = next(iter(policy.parameters()), probabilities)
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
        learning_seat = torch.repeat_interleave(torch.arange(len(seats)), torch.tensor(envs))
        for name, group in self.team.groups.items():
            learns = _learning_mask(seats, learning_seat, name, group.n_agents)
            self.register_buffer(f"_exploits_{name}", learns, persistent=False)
        self.register_buffer("exploited_seat", learning_seat, persistent=False)
        self.register_buffer("_row", torch.arange(self.n_exploited), persistent=False)

    @property
    def learns(self) -> dict[str, Tensor]:
        """Mask of the agents for which the policy acts, by group, ``[E, N]``."""
        return {name: self.get_buffer(f"_learns_{name}") for name in self.team.groups}

    @property
    def players(self) -> list[Players]:
        """The stored players of each actor."""
        return [cast(Players, one) for one in self._players]

    def in_use(self, carry: TensorDictBase | None) -> set[int]:
        """Returns the indices of the players in running episodes; waits for the device.

        Args:
            carry (TensorDictBase, optional): current step of the collector, ``[E]``.
        """
        if carry is None:
            return set()
        return set((self._current_players(carry).unique() - 1).tolist()) - {-1}

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Acts for all agents, with the policy, stored players, guests and exploiters."""
        learns = next(iter(self.learns.values()))
        if tensordict.shape != learns.shape[:1]:
            raise SpecError(
                f"matches have {len(learns)} envs, found a step of shape "
                f"{list(tensordict.shape)}; pass envs with this sum."
            )
        before = tensordict.copy()
        acted = self.policy(tensordict)
        player = self._sample_players(before)
        for i, players in enumerate(self.players):
            positions = self.get_buffer(f"_place_{i}")
            slots = player[positions].clamp_max(self.n_slots) - 1
            inputs = before.select(*players.in_keys, strict=False)[self.rows[positions]]
            self._insert_outputs(acted, players.act(inputs, slots), positions, self._groups[i])
        for i, guest in enumerate(self.guests):
            plays_here = player == self.n_slots + 1 + i
            inputs = before[self.rows]
            self._insert_outputs(
                acted, guest(inputs), slice(None), list(self.team.groups), plays_here
            )
        self._write_players(acted, player)
        for i, exploiter in enumerate(self.exploiters):
            self._insert_exploiter(acted, before, exploiter, self._row + i * self.n_exploited)
        return acted

    def _current_players(self, tensordict: TensorDictBase) -> Tensor:
        """Returns each env's player, ``[R]``, counted from 1; 0 if none is sampled yet."""
        found = []
        for group in self.team.groups.values():
            player = tensordict.get(group.key("player"), None)
            if player is None:
                raise SpecError(
                    f"group {group.name!r}: the step has no {group.key('player')!r}; wrap the "
                    "environment by torchrl_marl.envs.remember.with_players(env, groups)."
                )
            found.append(player.amax(-1))
        return torch.stack(found).amax(0)[self.rows]

    def _sample_players(self, tensordict: TensorDictBase) -> Tensor:
        """Returns each env's player, ``[R]``, counted from 1; samples it if an episode begins."""
        playing = self._current_players(tensordict)
        bounds = self.chances.cumsum(-1)[self.seat]
        point = torch.rand(bounds[:, :1].shape, dtype=bounds.dtype, device=bounds.device)
        drawn = (bounds <= point * bounds[:, -1:]).sum(-1).clamp_max(bounds.shape[1] - 1)
        return torch.where(playing == 0, drawn + 1, playing)

    def _insert_outputs(
        self,
        acted: TensorDictBase,
        other_outputs: TensorDictBase,
        positions: Tensor | slice,
        groups: Sequence[str],
        plays_here: Tensor | None = None,
    ) -> None:
        """Replaces the policy's outputs for agents that other players control.

        Args:
            acted (TensorDictBase): outputs of the policy, ``[E]``.
            other_outputs (TensorDictBase): outputs of the players in the envs
                ``self.rows[positions]``.
            positions (Tensor or slice): positions of these envs in ``self.rows``.
            groups (sequence of str): groups for which the players act.
            plays_here (Tensor, optional): bool mask of the envs at ``positions`` in which one of
                the players plays; default: all.
        """
        rows = self.rows[positions]
        others = {name: ~self.learns[name][rows] for name in groups}
        if plays_here is not None:
            others = {name: other & plays_here.unsqueeze(-1) for name, other in others.items()}
        _replace_outputs(acted, other_outputs, rows, others)

    def _write_players(self, acted: TensorDictBase, player: Tensor) -> None:
        """Writes each agent's player, and whether the learning policy controls the agent."""
        size = acted.batch_size[0]
        everywhere = player.new_zeros(size).index_copy(0, self.rows, player)
        for name, learns in self.learns.items():
            player = torch.where(learns, 0, everywhere.unsqueeze(-1))
            acted.set((name, "player"), player)
            acted.set((name, "learns"), learns.clone())
            acted.set(("next", name, "player"), player)

    def _insert_exploiter(
        self, acted: TensorDictBase, before: TensorDictBase, exploiter: nn.Module, rows: Tensor
    ) -> None:
        """Writes an exploiter's actions for its seats, and that only the exploiter learns there."""
        learns = {name: self.get_buffer(f"_exploits_{name}") for name in self.team.groups}
        _replace_outputs(acted, exploiter(before[rows]), rows, learns)
        for name, own in learns.items():
            all_learns = acted.get((name, "learns"))
            acted.set((name, "learns"), all_learns.index_copy(0, rows, own))


def _replace_outputs(
    acted: TensorDictBase, other_outputs: TensorDictBase, rows: Tensor, others: Mapping[str, Tensor]
) -> None:
    """Replaces a policy's outputs for agents that another policy controls.

    Args:
        acted (TensorDictBase): outputs of the policy, ``[E]``.
        other_outputs (TensorDictBase): outputs of the other policy, ``[R]``.
        rows (Tensor): indices of the envs of the other policy, ``[R]``.
        others (mapping): group -> mask of the agents that the other policy controls, ``[R, N]``.
    """
    for name, other in others.items():
        for key in _written_keys(name, other_outputs):
            own = acted.get(key, None)
            if own is not None:
                value = torch.where(
                    expand_mask(other, own[rows]), other_outputs.get(key), own[rows]
                )
                acted.set(key, own.index_copy(0, rows, value))


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


def _learning_mask(
    seats: Sequence[Seat], learning_seat: Tensor, group: str, n_agents: int
) -> Tensor:
    """Returns a mask of the agents of a group for which a policy acts, ``[E, N]``.

    Args:
        seats: as in :class:`MatchPolicy`.
        learning_seat (Tensor): index of the policy's seat in each env, -1 for all seats, ``[E]``.
        group (str): name of the group.
        n_agents (int): number of agents of the group.
    """
    seat = torch.full((n_agents,), -1)
    for i, seat_agents in enumerate(seats):
        seat[list(seat_agents.get(group, ()))] = i
    return (learning_seat.unsqueeze(-1) == seat) | (learning_seat < 0).unsqueeze(-1)


def _written_keys(group: str, outputs: TensorDictBase) -> list[NestedKey]:
    """Returns the keys of a group's actions and hidden states that a policy wrote."""
    keys: list[NestedKey] = [(group, leaf) for leaf in ("action", "action_log_prob", "channel")]
    keys.append(("next", group, "hidden"))
    return [key for key in keys if outputs.get(key, None) is not None]
