"""Cross-play: the payoffs of every player against every other player."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.envs import EnvBase

from torchrl_marl.envs.transforms import with_dense_groups
from torchrl_marl.errors import ConfigError
from torchrl_marl.modules.communication.channel import channel_module, channel_of
from torchrl_marl.specs import GroupSpec, TeamSpec
from torchrl_marl.training.evaluation import first_episodes, seeded_play
from torchrl_marl.training.statistics import CONFIDENCE, RESAMPLES, Estimate, estimate, mean

__all__ = ["PartnerScore", "Payoffs", "Seats", "cross_play", "partner_score", "seats_of"]

_ACTION_SEED_OFFSET = 4_256_233
Policy = Callable[[TensorDictBase], TensorDictBase]


@dataclass(frozen=True)
class Seats:
    """Agents that the two players of an episode control.

    Args:
        agents (pair of dict): for each seat, group -> indices of its agents, ``[n]``.
        apart (bool): True if each seat is a separate group, with a separate return.
        alike (bool): True if players can swap seats.
    """

    agents: tuple[dict[str, Tensor], dict[str, Tensor]]
    apart: bool
    alike: bool


def seats_of(team: TeamSpec) -> Seats:
    """Returns the two seats of a team: its two groups, or the halves of its only group.

    Raises:
        ConfigError: the team has a single agent, or more than two groups.
    """
    groups = list(team.groups.values())
    if team.n_agents < 2:
        raise ConfigError("the environment has one agent, expected two or more for two players.")
    if len(groups) > 2:
        raise ConfigError(
            f"the environment has {len(groups)} groups ({', '.join(team.groups)}), expected two "
            "sides or one team; group its agents by group_map."
        )
    if len(groups) == 1:
        [group] = groups
        halves = torch.arange(group.n_agents).tensor_split(2)
        return Seats(({group.name: halves[0]}, {group.name: halves[1]}), apart=False, alike=True)
    first, second = ({group.name: torch.arange(group.n_agents)} for group in groups)
    return Seats(
        (first, second),
        apart=True,
        alike=_group_signature(groups[0]) == _group_signature(groups[1]),
    )


def _group_signature(group: GroupSpec) -> tuple[object, ...]:
    n_actions = group.n_actions if group.discrete else group.action_dim
    return group.n_agents, group.observation_shapes, group.discrete, group.branches, n_actions


def cross_play(
    players_a: Sequence[Policy],
    players_b: Sequence[Policy],
    env: EnvBase,
    episodes: int,
    *,
    deterministic: bool = False,
    swap: bool | None = None,
    seed: int = 0,
    longest: int = 10_000,
) -> TensorDict:
    """Plays every player of one list against, or with, every player of the other list.

    The two seats are the environment's two groups; in an environment with one group, each player
    controls half of the team. All pairs and episodes are batched over the envs of one environment.
    Each policy is called once per step, on the envs in which it has a seat, so players may have
    different network structures.

    Args:
        players_a, players_b (sequence of callable): joint policies, which act for all groups.
        env (EnvBase): environment, which is reset and seeded with ``seed``. It must carry the
            players' hidden states.
        episodes (int): number of episodes per pair, rounded up to an even number if seats are
            swapped.

    Keyword Args:
        deterministic (bool): True for the likeliest actions, False for sampled ones.
        swap (bool, optional): True to swap seats in every second episode; by default True if both
            seats have the same shapes.
        seed (int): random seed of the environment and the actions.
        longest (int): largest number of steps of an episode; a longer one is an error.

    Shapes:
        - returns: ``[A, B]``, with a row for each of ``players_a``. ``wins``, ``draws`` and
          ``games`` are int64; the mean return, ``returns``, and its standard error, ``error``, are
          float64. The player with the larger return wins; the halves of a team always draw

    Raises:
        ConfigError: there are no players or no episodes, the seats cannot be swapped, agents of
            different players would hear each other, or :func:`seats_of` raises it.

    Examples:
        >>> from torchrl_marl.collectors import TeamPolicy
        >>> from torchrl_marl.envs.toy import ZeroSum
        >>> from torchrl_marl.modules import RandomActor
        >>> env = ZeroSum(64, seed=0)
        >>> def always(action):
        ...     def act(td):
        ...         for name in ("first", "second"):
        ...             td[name, "action"] = torch.full((*td.shape, 1), action)
        ...         return td
        ...     return act
        >>> rock, paper = always(0), always(1)
        >>> table = cross_play([rock, paper], [rock, paper], env, episodes=10)
        >>> table["wins"].tolist(), table["draws"].tolist()
        ([[0, 0], [10, 0]], [[10, 0], [0, 10]])
    """
    team = TeamSpec.from_env(env)
    if any("action" in group.paddings for group in team.groups.values()):
        env = with_dense_groups(env)  # actions of two players go into one tensor
    seats = seats_of(team)
    swap = seats.alike if swap is None else swap
    _check_players([players_a, players_b], episodes, swap, seats)
    _check_channels([*players_a, *players_b], team, seats)
    episodes += episodes % 2 if swap else 0
    shape = len(players_a), len(players_b)
    players = list(dict.fromkeys([*players_a, *players_b]))
    places_a = torch.tensor([players.index(one) for one in players_a])
    places_b = torch.tensor([players.index(one) for one in players_b])
    sums = torch.zeros(5, shape[0] * shape[1], dtype=torch.float64)
    num_envs = env.batch_size.numel()
    with seeded_play(env, deterministic, seed, _ACTION_SEED_OFFSET):
        for game in torch.arange(sums.shape[1] * episodes).split(num_envs):
            entry, swapped = game // episodes, (game % 2 == 1) & swap
            pair = torch.stack([places_a[entry // shape[1]], places_b[entry % shape[1]]])
            seated = torch.where(swapped, pair.flip(0), pair)
            act = _JointPolicy(players, team, seats, _pad_to_envs(seated, num_envs))
            returns, _ = first_episodes(env, act, team, len(game), longest)
            sums.index_add_(1, entry, _game_outcomes(returns, seats, swapped))
    wins, draws, games, total, squares = sums.view(5, *shape)
    counts = {"wins": wins.long(), "draws": draws.long(), "games": games.long()}
    mean = total / games
    error = ((squares / games - mean**2).clamp_min(0) / (games - 1)).sqrt()  # NaN for a single game
    return TensorDict({**counts, "returns": mean, "error": error}, shape)


def _check_players(
    players: Sequence[Sequence[Policy]], episodes: int, swap: bool, seats: Seats
) -> None:
    if not all(players):
        raise ConfigError("one side has no players, expected at least one on each side.")
    if episodes < 1:
        raise ConfigError(f"cross-play: episodes is {episodes}, expected 1 or more.")
    if swap and not seats.alike:
        raise ConfigError(
            "players cannot swap seats: the sides differ in agents, observations or actions; "
            "use swap=False."
        )


def _check_channels(players: Sequence[Policy], team: TeamSpec, seats: Seats) -> None:
    """Refuses messages between agents of two players that no mask can stop."""
    for player in players:
        module = channel_module(player) if isinstance(player, nn.Module) else None
        if module is None:
            continue
        across = channel_of(module).config.across_groups
        for name, group in team.groups.items():
            shares_channel = across or all(name in own for own in seats.agents)
            if shares_channel and group.mask_key is None:
                raise ConfigError(
                    f"the agents of group {name!r} communicate, and the environment has no mask "
                    "that would keep them from hearing agents of other players; use policies with "
                    "actor.communication=none."
                )


def _pad_to_envs(seated: Tensor, num_envs: int) -> Tensor:
    """Pads the players of each game to all envs, ``[2, E]``, by repeating the last game."""
    return torch.cat([seated, seated[:, -1:].expand(-1, num_envs - seated.shape[1])], 1)


def _game_outcomes(returns: dict[str, Tensor], seats: Seats, swapped: Tensor) -> Tensor:
    """Returns each game's win, draw, 1, return and squared return, for player 1, ``[5, games]``."""
    by_seat = torch.stack([returns[name].double().cpu() for own in seats.agents for name in own])
    own, other = torch.where(swapped, by_seat.flip(0), by_seat)
    close = torch.isclose(own, other, rtol=1e-6, atol=1e-6)
    return torch.stack(
        [(own > other) & ~close, close, torch.ones_like(close), own, own**2]
    ).double()


class PartnerScore(NamedTuple):
    """Mean returns of partners, with intervals over the players.

    Args:
        self_play (Estimate): return of each player with itself.
        cross_play (Estimate): return of each player with each other one.
    """

    self_play: Estimate
    cross_play: Estimate


def partner_score(returns: Tensor, *, seed: int = 0) -> PartnerScore:
    """Computes the mean returns of self-play and cross-play, with intervals over the players.

    The interval is a percentile bootstrap, in which players are drawn with replacement, such as the
    seeds of one algorithm. Two draws of the same player are not a pair of strangers.

    Args:
        returns (Tensor): return of each player with each player, ``[A, A]``.

    Keyword Args:
        seed (int): random seed of the resampling.

    Returns:
        PartnerScore: the two means; the second has no interval for two players. A mean over returns
        that are not finite, such as those of a diverged player, is NaN and has no interval.

    Raises:
        ConfigError: there are fewer than two players.

    Examples:
        >>> score = partner_score(torch.tensor([[8.0, 1.0, 2.0], [3.0, 6.0, 4.0], [5.0, 6.0, 7.0]]))
        >>> float(score.self_play.value), float(score.cross_play.value)
        (7.0, 3.5)
    """
    table = returns.double().cpu().numpy()
    n = len(table)
    if n < 2 or table.shape != (n, n):
        raise ConfigError(
            f"the returns have shape {list(table.shape)}, expected two players or more on both "
            "sides."
        )
    broken = Estimate(math.nan, runs=(n,), why_none="a return is not finite")
    own = table.diagonal()
    alone = estimate(mean, [own], seed=seed) if np.isfinite(own).all() else broken
    if not np.isfinite(table).all():
        return PartnerScore(alone, broken)
    others = Estimate(_mean_over_pairs(table, np.ones((1, n)))[0], runs=(n,))
    if n == 2:
        reason = "two players are one pair, which says nothing about how much pairs differ"
        return PartnerScore(alone, dataclasses.replace(others, why_none=reason))
    drawn = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), RESAMPLES)
    drawn = drawn[(drawn < n).all(1)]  # one player, n times, has no partners
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(_mean_over_pairs(table, drawn), (tail, 1 - tail))
    return PartnerScore(alone, dataclasses.replace(others, low=low, high=high))


def _mean_over_pairs(table: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns the mean over pairs of different players, drawn ``counts`` times, ``[R]``."""
    apart = table * (1 - np.eye(len(table)))
    pairs = counts.sum(1) ** 2 - (counts**2).sum(1)
    return np.einsum("ri,ij,rj->r", counts, apart, counts) / pairs


class _JointPolicy:
    """Joint policy of several players, each of which acts in the envs in which it has a seat.

    Agents of other players are masked for a policy, so that its agents do not hear them.

    Args:
        players (sequence of callable): policies of the players.
        team (TeamSpec): the groups.
        seats (Seats): agents of each seat.
        seated (Tensor): index of the player in each seat and env, ``[2, E]``.
    """

    def __init__(
        self, players: Sequence[Policy], team: TeamSpec, seats: Seats, seated: Tensor
    ) -> None:
        self.team, self.acts = team, []
        for player, policy in enumerate(players):
            rows = (seated == player).any(0).nonzero().squeeze(1)
            if not len(rows):
                continue
            parts = []
            for seat, own in zip(seated, seats.agents):
                positions = (seat[rows] == player).nonzero().squeeze(1)
                parts += [
                    (name, positions, rows[positions], agents) for name, agents in own.items()
                ]
            self.acts.append((policy, rows, parts))

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Writes the actions of all players."""
        written: dict[NestedKey, Tensor] = {}
        for policy, own_rows, parts in self.acts:
            acted = policy(self._mask_others(tensordict[own_rows], parts))
            for name, positions, envs, agents in parts:
                for key, values in _iter_outputs(acted, name):
                    whole = (*tensordict.shape, *values.shape[1:])
                    rows = written.setdefault(key, values.new_zeros(whole))
                    rows[envs.unsqueeze(1), agents] = values[positions.unsqueeze(1), agents]
        for key, value in written.items():
            tensordict.set(key, value)
        return tensordict

    def _mask_others(self, tensordict: TensorDictBase, parts: Sequence[Any]) -> TensorDictBase:
        for name, group in self.team.groups.items():
            if group.mask_key is not None:
                mask = tensordict.get(group.mask_key)
                own_agents = torch.zeros_like(mask)
                for _, positions, _, agents in (part for part in parts if part[0] == name):
                    own_agents[positions.unsqueeze(1), agents] = True
                tensordict.set(group.mask_key, mask & own_agents)
        return tensordict


def _iter_outputs(acted: TensorDictBase, group: str) -> Iterator[tuple[NestedKey, Tensor]]:
    """Yields the actions and hidden states that a policy writes for a group."""
    keys: tuple[NestedKey, ...] = ((group, "action"), ("next", group, "hidden"))
    for key in keys:
        value = acted.get(key, None)
        if value is not None:
            yield key, value


class Payoffs:
    """Table of the first seat's payoffs; missing entries are played when they are needed.

    If the seats have the same shapes, players swap seats, and the payoffs are taken as zero-sum.

    Args:
        team (TeamSpec): team with two seats.
        env (callable): function that returns the evaluation environment.
        episodes (int): number of episodes per entry.
        seed (int): random seed of the episodes.
    """

    def __init__(
        self, team: TeamSpec, env: Callable[[], EnvBase], *, episodes: int, seed: int
    ) -> None:
        self._team, self._env, self.episodes, self.seed = team, env, episodes, seed
        self._policies: dict[str, Policy] = {}
        self._entries: dict[tuple[str, str], float] = {}

    def register(self, name: str, policy: Policy) -> None:
        """Registers a player, but does not play its games yet."""
        self._policies[name] = policy

    def add(self, name: str, policy: Policy, others: Sequence[str]) -> None:
        """Registers a new player, and plays it against others and against itself.

        Args:
            name (str): name of the player.
            policy (callable): policy of the player.
            others (sequence of str): names of registered players to play against.
        """
        self.register(name, policy)
        alike = seats_of(self._team).alike
        others = [other for other in others if other != name]
        if not alike:
            others = [*others, name]
        rows = self._play_games([name], others)[0]
        columns = -rows if alike else self._play_games(others, [name])[:, 0]
        for other, row, column in zip(others, rows.tolist(), columns.tolist()):
            self._entries[name, other] = row
            self._entries[other, name] = column
        if alike:
            self._entries[name, name] = 0.0

    def _play_games(self, first: Sequence[str], second: Sequence[str]) -> Tensor:
        if not second or not first:
            return torch.zeros(len(first), len(second), dtype=torch.float64)
        own, other = ([self._policies[name] for name in names] for names in (first, second))
        return cross_play(own, other, self._env(), self.episodes, seed=self.seed)["returns"]

    def table(self, names: Sequence[str]) -> Tensor:
        """Returns the return of each player in seat 1 against each player in seat 2, ``[A, A]``."""
        alike = seats_of(self._team).alike
        for own, other in ((own, other) for own in names for other in names):
            if (own, other) in self._entries:
                continue
            # Players that were only registered.
            itself = alike and own == other
            value = 0.0 if itself else float(self._play_games([own], [other]))
            self._entries[own, other] = value
            if alike and not itself:
                self._entries[other, own] = -value
        return torch.tensor(
            [[self._entries[own, other] for other in names] for own in names], dtype=torch.float64
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {"entries": [[*pair, value] for pair, value in self._entries.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a saved state."""
        self._entries = {(own, other): value for own, other, value in state["entries"]}
