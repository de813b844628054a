"""The clients' running steps side by side, and the fragments in which they are recorded.

Shapes: C seats, n of them in a batch, N agents of a group, O observation features.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from torchrl_marl.apps.external.declaration import Declared, DeclaredKind
from torchrl_marl.apps.external.graph_acting import Leaves
from torchrl_marl.apps.external.wire import Refused
from torchrl_marl.errors import nearest, quoted

__all__ = ["Fragments", "Seats"]

_NUMBERS = (float, int)
_LARGEST = 3.4028234e38  # of float32


class GroupSeats:
    """The agents of one group on all seats.

    Args:
        name (str): of the kind.
        kind (DeclaredKind): what it is.
        capacity (int): number C of seats.
    """

    def __init__(self, name: str, kind: DeclaredKind, capacity: int) -> None:
        shape = (capacity, kind.n)
        self.names = tuple(f"{name}_{i}" for i in range(kind.n))
        self.kind = kind
        self.observation = np.zeros((*shape, kind.observation), np.float32)
        self.mask = np.zeros(shape, bool)
        self.reward = np.zeros(shape, np.float32)
        self.ending = np.zeros(shape, bool)  # said to be terminated with the last message
        self.dead = np.zeros(shape, bool)
        self.born = np.zeros(shape, bool)
        self.legal = None
        if kind.mask:
            self.legal = np.ones((*shape, kind.n_actions or 0), bool)

    def read_all(self, seat: int, seen: list[Any]) -> bool:
        """Takes what all agents see, in their order, as bytes; returns whether it was that."""
        try:
            numbers = np.frombuffer(b"".join(seen), "<f4")
        except (TypeError, ValueError):
            return False
        width = self.kind.observation
        if any(len(own) != 4 * width for own in seen):
            return False
        self.observation[seat] = numbers.reshape(-1, width)
        self.mask[seat] = True
        return True

    def read_some(self, seat: int, seen: Mapping[str, Any]) -> int:
        """Takes what some agents see; returns of how many."""
        acts, found = self.mask[seat], 0
        acts[:] = False
        for i, name in enumerate(self.names):
            if name in seen:
                self.observation[seat, i] = numbers_of(name, seen[name], self.kind.observation)
                acts[i] = True
                found += 1
        return found


class Seats:
    """What all clients' agents see, earn and are, by seat; a client sits on one.

    Who waits keeps its last observation. An agent that ended stays so until its episode's end. An
    agent earns from its first own step to its end.

    Args:
        declared (Declared): the agents.
        capacity (int): number C of seats.
        largest (float): number, either way, that may be seen or earned.

    Attributes:
        groups (dict of str to GroupSeats): by name.
        remembered (dict of str to array): group -> what actors remember, ``[C, N, S]``.
    """

    def __init__(self, declared: Declared, capacity: int, largest: float = 1e6) -> None:
        self.largest = largest
        kinds = declared.kinds.items()
        self.declared = declared
        self.groups = {name: GroupSeats(name, kind, capacity) for name, kind in kinds}
        self._place = {
            agent: (group, i)
            for group in self.groups.values()
            for i, agent in enumerate(group.names)
        }
        self._names = tuple(self._place)
        size = declared.state_size
        self.state = None if size is None else np.zeros((capacity, size), np.float32)
        self.ends, self.cut = np.zeros(capacity, bool), np.zeros(capacity, bool)
        self.remembered: dict[str, np.ndarray] = {}
        self._tracked = False

    def begin(self, seat: int) -> None:
        """Begins an episode: nobody has come or ended yet."""
        for group in self.groups.values():
            for rows in (group.observation, group.dead, group.born):
                rows[seat] = 0
        for rows in self.remembered.values():
            rows[seat] = 0
        if self.state is not None:
            self.state[seat] = 0

    # ------------------------------------------------------------------------ what a client says

    def read(self, seat: int, message: Mapping[str, Any], last: bool) -> None:
        """Takes a message: what agents see, what they have earned, who has ended.

        Args:
            seat (int): the client's.
            message (mapping): of type ``step``, or ``end``.
            last (bool): whether the episode ends with it.

        Raises:
            Refused: unknown agents, wrong shapes.
        """
        self._read_observations(seat, _map(message, "observations"))
        if self.state is not None and (message.get("state") is not None or not last):
            self.state[seat] = numbers_of("state", message.get("state"), self.state.shape[1])
        self._read_rewards(seat, _map(message, "rewards"))
        self._read_ends(seat, message.get("terminated"))
        legal = message.get("action_masks")
        for group in self.groups.values():
            if group.legal is not None and (legal is not None or not last):
                self._read_legal(group, seat, legal)
        self.ends[seat] = last
        self.cut[seat] = last and bool(message.get("truncated", False))

    def _read_observations(self, seat: int, seen: Mapping[str, Any]) -> None:
        if tuple(seen) == self._names:  # as a rule
            values, first, complete = list(seen.values()), 0, True
            for group in self.groups.values():
                own = values[first : first + len(group.names)]
                complete, first = complete and group.read_all(seat, own), first + len(own)
            if complete:
                return
        if sum(group.read_some(seat, seen) for group in self.groups.values()) < len(seen):
            self._refuse_strangers(seen)

    def _refuse_strangers(self, names: Mapping[str, Any]) -> None:
        for name in names:
            if name not in self._place:
                raise Refused(
                    f"agent {quoted(name)} is none of those declared; "
                    f"{nearest(str(name), self._place)}expected {', '.join(list(self._place)[:8])}."
                )

    def _read_rewards(self, seat: int, rewards: Mapping[str, Any]) -> None:
        for group in self.groups.values():
            group.reward[seat] = 0
        for name, reward in rewards.items():
            if name not in self._place:
                self._refuse_strangers(rewards)
            if type(reward) not in _NUMBERS or not -_LARGEST <= reward <= _LARGEST:
                raise Refused(f"agent {name!r}: its reward is {quoted(reward)}, expected a number.")
            group, i = self._place[name]
            group.reward[seat, i] = reward

    def _read_ends(self, seat: int, names: Any) -> None:
        for group in self.groups.values():
            group.ending[seat] = False
        if not names:
            return
        if not isinstance(names, list):
            raise Refused(f"terminated is {quoted(names)}, expected a list of agents' names.")
        self._refuse_strangers(dict.fromkeys(map(str, names)))
        for name in names:
            group, i = self._place[name]
            group.ending[seat, i] = True

    def _read_legal(self, group: GroupSeats, seat: int, given: Any) -> None:
        assert group.legal is not None
        for i in np.flatnonzero(group.mask[seat]):
            name = group.names[i]
            own = given.get(name) if isinstance(given, dict) else None
            if isinstance(own, bytes):
                own = list(own)
            if not isinstance(own, list) or len(own) != group.legal.shape[2]:
                raise Refused(
                    f"agent {name!r}: its action_mask is {quoted(own)}, expected "
                    f"{group.legal.shape[2]} flags, one for each action."
                )
            group.legal[seat, i] = [bool(x) for x in own]

    def faults(self, seats: np.ndarray) -> dict[int, str]:
        """Returns what is wrong with what was taken: seat -> a sentence."""
        found: dict[int, str] = {}
        for group in self.groups.values():
            seen, acts, earned = group.observation[seats], group.mask[seats], group.reward[seats]
            what = "has terminated in this episode, expected no observation of it"
            kinds = {what: acts & group.dead[seats] & ~self.ends[seats, None]}
            fits = self._fits(seen).all(-1) & self._fits(earned)
            if not fits.all():
                what = f"sees or earns NaN, or more than {self.largest:g} (max_number)"
                kinds[what] = ~fits
            if group.legal is not None:
                what = "acts and has no legal action, expected one such as a no-op"
                kinds[what] = acts & ~group.legal[seats].any(-1)
            for what, broken in kinds.items():
                for row, i in np.argwhere(broken):
                    found.setdefault(int(seats[row]), f"agent {group.names[i]!r} {what}.")
        if self.state is not None:
            for row in np.flatnonzero(~self._fits(self.state[seats]).all(-1)):
                what = f"the state has NaN, or more than {self.largest:g} (max_number)."
                found.setdefault(int(seats[row]), what)
        return found

    def _fits(self, numbers: np.ndarray) -> np.ndarray:
        """Returns which numbers are neither NaN nor too large."""
        return np.abs(numbers) <= self.largest

    # ------------------------------------------------------------------------- steps of a batch

    def inputs(self, seats: np.ndarray) -> Leaves:
        """Returns what policies read of some seats, and the flags with which their steps begin."""
        leaves: Leaves = {}
        for name, group in self.groups.items():
            mask, dead = group.mask[seats], group.dead[seats][..., None]
            leaves[name, "observation"] = group.observation[seats]
            leaves[name, "mask"] = mask
            if group.legal is not None:
                leaves[name, "action_mask"] = group.legal[seats]
            if self._tracked:
                leaves[name, "is_init"] = ~group.born[seats][..., None]
            if name in self.remembered:
                leaves[name, "hidden"] = self.remembered[name][seats]
            leaves[name, "done"] = leaves[name, "terminated"] = dead
            leaves[name, "truncated"] = np.zeros_like(dead)
            group.born[seats] |= mask
        if self.state is not None:
            leaves["state",] = self.state[seats]
        for flag in ("done", "terminated", "truncated"):
            leaves[flag,] = np.zeros((len(seats), 1), bool)
        return leaves

    def outcome(self, seats: np.ndarray) -> Leaves:
        """Returns what the last step of some seats led to, and lets their agents end.

        Keys are those under ``"next"``.
        """
        dead = {n: g.dead[seats] | g.ending[seats] for n, g in self.groups.items()}
        over = np.stack([x.all(-1) for x in dead.values()]).all(0)
        ends = self.ends[seats] | over
        truncated = (self.cut[seats] & ~over)[:, None]
        terminated = ends[:, None] & ~truncated
        leaves: Leaves = {}
        for name, group in self.groups.items():
            before, living = group.dead[seats], ~dead[name]
            earns = group.born[seats] & ~before
            group.dead[seats] = dead[name]
            group.mask[seats] &= living
            leaves[name, "observation"] = group.observation[seats]
            # Who is cut off is bootstrapped, also one that waited.
            leaves[name, "mask"] = living & (group.mask[seats] | truncated) & ~terminated
            if group.legal is not None:
                leaves[name, "action_mask"] = group.legal[seats]
            leaves[name, "reward"] = np.where(earns, group.reward[seats], 0)[..., None]
            leaves[name, "terminated"] = (dead[name] | terminated)[..., None]
            leaves[name, "truncated"] = (living & truncated)[..., None]
            leaves[name, "done"] = (dead[name] | ends[:, None])[..., None]
            leaves[name, "earns"] = earns
            if self._tracked:
                leaves[name, "is_init"] = ~group.born[seats][..., None]
        if self.state is not None:
            leaves["state",] = self.state[seats]
        leaves["done",], leaves["terminated",] = ends[:, None], terminated
        leaves["truncated",] = truncated
        return leaves

    def remember(self, seats: np.ndarray, acted: Leaves) -> None:
        """Keeps what actors remember behind a step."""
        for name, rows in self.remembered.items():
            after = acted.get(("next", name, "hidden"))
            if after is not None:
                rows[seats] = after

    def carry_memory(self, sizes: Mapping[str, int] | None) -> None:
        """Lets actors remember, group -> the numbers of each agent, and know where they begin.

        Args:
            sizes (mapping, optional): None: no actor asks for either.
        """
        self._tracked = sizes is not None
        for name, size in (sizes or {}).items():
            shape = (*self.groups[name].mask.shape, size)
            self.remembered[name] = np.zeros(shape, np.float32)


class Fragments:
    """Recorder of the steps of all clients: cuts each one's play into fragments of T steps.

    A fragment may hold several episodes, and the begin of one whose rest is in the next. Where a
    client leaves in the middle of a fragment, its episode is truncated, and the next client that
    begins a fragment goes on with this one, so that no step is lost.

    With ``hold`` a batch is played with one policy: of each batch just so many fragments are
    begun as it has, and who has given its part waits. Without, clients play on until the fragments
    of a whole batch lie ready.

    Args:
        n_steps (int): number T.
        per_batch (int): fragments of a batch.
        groups (sequence of str): names of the groups, whose returns are summed.
        capacity (int): number C of seats.
        hold (bool): as above.

    Attributes:
        ready (deque of dict): those that are complete: key -> array ``[T, ...]``.
        changed (threading.Condition): notified when one is.
    """

    def __init__(
        self, n_steps: int, per_batch: int, groups: tuple[str, ...], capacity: int, hold: bool
    ) -> None:
        self.n_steps, self.per_batch, self.hold, self.groups = n_steps, per_batch, hold, groups
        self.ready: deque[Leaves] = deque()
        self.changed = threading.Condition()
        self.to_begin = 0
        self._rows: dict[tuple[str, ...], np.ndarray] = {}
        self._count = np.zeros(capacity, int)  # of whole steps
        self._begun = np.zeros(capacity, bool)  # a fragment, maybe without a whole step yet
        self._left: list[int] = []  # seats of clients who went away from a fragment
        self._returns = {name: np.zeros(capacity, np.float32) for name in groups}
        self._lengths = np.zeros(capacity, np.int64)
        self._whole = np.zeros(capacity, bool)
        self._episode = np.zeros(capacity, np.int64)
        self._episodes = 0

    # ------------------------------------------------------------------------- the learner's side

    def take(self) -> list[Leaves] | None:
        """Returns the fragments of a batch, or None where they are not complete."""
        with self.changed:
            if len(self.ready) < self.per_batch:
                return None
            return [self.ready.popleft() for _ in range(self.per_batch)]

    def release(self) -> None:
        """Lets the fragments of the next batch begin."""
        self.to_begin = self.per_batch - len(self.ready) - int(self._begun.sum())

    # -------------------------------------------------------------------------- the server's side

    def begin(self, seat: int, whole: bool) -> None:
        """Is told that an episode begins, or goes on of which the begin is not known."""
        for returns in self._returns.values():
            returns[seat] = 0
        self._lengths[seat] = 0
        self._whole[seat] = whole
        self._episode[seat] = self._episodes
        self._episodes += 1

    def may_open(self, seat: int) -> bool:
        """Whether a client's next step may begin now; begins a fragment for it, where it may."""
        if self._begun[seat]:
            if seat in self._left:  # who sat here before went away
                self._left.remove(seat)
            return True
        if self._left:
            self._inherit(seat, self._left.pop())
            return True
        if self.hold:
            if self.to_begin < 1:
                return False
            self.to_begin -= 1
        elif len(self.ready) >= self.per_batch:
            return False
        self._begun[seat] = True
        return True

    def _inherit(self, seat: int, other: int) -> None:
        """Goes on with a fragment that another client left."""
        if seat != other:
            n = self._count[other]
            for rows in self._rows.values():
                rows[seat, :n] = rows[other, :n]
            self._count[seat], self._count[other] = n, 0
            self._begun[other] = False
        self._begun[seat] = True

    def open(self, seats: np.ndarray, leaves: Leaves, version: int) -> None:
        """Takes the begin of steps: what was seen and done."""
        count = self._count[seats]
        for key, value in leaves.items():
            self._row(key, value)[seats, count] = value
        n = len(seats)
        self._row(("collector", "policy_version"), np.zeros(1, np.int64))[seats, count] = version
        ids = self._episode[seats]
        self._row(("collector", "traj_ids"), np.zeros(n, np.int64))[seats, count] = ids

    def _row(self, key: tuple[str, ...], like: np.ndarray) -> np.ndarray:
        """Returns the steps of all seats under a key, ``[C, T, ...]``."""
        rows = self._rows.get(key)
        if rows is None:
            shape = (len(self._count), self.n_steps, *like.shape[1:])
            rows = self._rows[key] = np.zeros(shape, like.dtype)
        return rows

    def close(self, seats: np.ndarray, outcome: Leaves) -> None:
        """Takes what the open steps of some seats led to."""
        count = self._count[seats]
        for key, value in outcome.items():
            if key[-1] != "earns":
                self._row(("next", *key), value)[seats, count] = value
        self._sum(seats, count, outcome)
        count = self._count[seats] = count + 1
        for seat in seats[count == self.n_steps].tolist():
            self._complete(seat)

    def _sum(self, seats: np.ndarray, count: np.ndarray, outcome: Leaves) -> None:
        """Adds to the returns of running episodes; a group's is the mean over who earns."""
        self._lengths[seats] += 1
        sums = {"episode_known": self._whole[seats]}
        for name, returns in self._returns.items():
            earns = outcome[name, "earns"]
            total = np.where(earns, outcome[name, "reward"][..., 0], 0).sum(1, dtype=np.float32)
            returns[seats] += total / np.maximum(earns.sum(1), 1)
            sums[f"{name}/episode_reward"] = returns[seats]
            sums[f"{name}/episode_length"] = self._lengths[seats]
        for name, value in sums.items():
            self._row(("collector", name), value)[seats, count] = value

    def _complete(self, seat: int) -> None:
        fragment = {key: rows[seat].copy() for key, rows in self._rows.items()}
        self._count[seat], self._begun[seat] = 0, False
        with self.changed:
            self.ready.append(fragment)
            self.changed.notify_all()

    def cut(self, seat: int) -> None:
        """Leaves out an open step, and truncates the episode before it."""
        last = self._count[seat] - 1
        done = self._rows.get(("next", "done"))
        if last < 0 or done is None or done[seat, last, 0]:
            return
        self._rows["collector", "episode_known"][seat, last] = False
        done[seat, last] = self._rows["next", "truncated"][seat, last] = True
        for name in self.groups:
            living = ~self._rows["next", name, "done"][seat, last]
            self._rows["next", name, "truncated"][seat, last] |= living
            self._rows["next", name, "done"][seat, last] = True
            self._rows["next", name, "mask"][seat, last] = living[..., 0]

    def leave(self, seat: int) -> None:
        """Gives a seat free; its fragment is for the next client."""
        if self._begun[seat]:
            self._left.append(seat)


def numbers_of(what: str, given: Any, size: int) -> np.ndarray:
    """Returns numbers, of float32 bytes in little endian or of a list.

    Raises:
        Refused: something else, or another number of them.
    """
    if isinstance(given, bytes):
        if len(given) != 4 * size:
            raise Refused(f"{what!r} has {len(given)} bytes, expected {size} float32, {4 * size}.")
        return np.frombuffer(given, "<f4")
    if not isinstance(given, list) or len(given) != size:
        found = f"{len(given)} numbers" if isinstance(given, list) else quoted(given)
        raise Refused(f"{what!r} sees {found}, expected {size}.")
    for x in given:
        if type(x) not in _NUMBERS or not -_LARGEST <= x <= _LARGEST:
            raise Refused(f"{what!r} sees {quoted(x)}, expected finite numbers of float32.")
    return np.array(given, np.float32)


def _map(message: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = message.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise Refused(f"{key} are {quoted(value)}, expected a map from agents' names.")
    return value
