"""Arrays with the current steps of all clients, and a recorder that cuts them into fragments.

Shapes: C slots, n slots of a batch, N agents of a group, O observation features, S numbers
of a hidden state.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from torchrl_marl.apps.external.declaration import Declared, DeclaredKind
from torchrl_marl.apps.external.graph_acting import Leaves
from torchrl_marl.apps.external.wire import InvalidMessageError
from torchrl_marl.errors import nearest, quoted

__all__ = ["ClientSlots", "Fragments"]

_NUMBER_TYPES = (float, int)
_MAX_FLOAT32 = 3.4028234e38  # float32


class GroupSlots:
    """The agents of one group in all slots.

    Args:
        name (str): name of the kind.
        kind (DeclaredKind): number of agents, and description of observation and action.
        capacity (int): number C of slots.
    """

    def __init__(self, name: str, kind: DeclaredKind, capacity: int) -> None:
        shape = (capacity, kind.n)
        self.names = tuple(f"{name}_{i}" for i in range(kind.n))
        self.kind = kind
        self.observation = np.zeros((*shape, kind.observation), np.float32)
        self.mask = np.zeros(shape, bool)
        self.reward = np.zeros(shape, np.float32)
        self.ending = np.zeros(shape, bool)  # terminated by the last message
        self.dead = np.zeros(shape, bool)
        self.born = np.zeros(shape, bool)
        self.legal = None
        if kind.mask:
            self.legal = np.ones((*shape, kind.n_actions or 0), bool)

    def read_all(self, slot: int, observations: list[Any]) -> bool:
        """Reads the observations of all agents from bytes, in the order of the agents.

        Returns:
            bool: False if the observations have another format.
        """
        try:
            numbers = np.frombuffer(b"".join(observations), "<f4")
        except (TypeError, ValueError):
            return False
        width = self.kind.observation
        if any(len(own) != 4 * width for own in observations):
            return False
        self.observation[slot] = numbers.reshape(-1, width)
        self.mask[slot] = True
        return True

    def read_some(self, slot: int, observations: Mapping[str, Any]) -> int:
        """Reads the observations of the agents present, and returns their number."""
        acts, found, width = self.mask[slot], 0, self.kind.observation
        acts[:] = False
        for i, name in enumerate(self.names):
            if name in observations:
                self.observation[slot, i] = read_numbers(name, observations[name], width)
                acts[i] = True
                found += 1
        return found


class ClientSlots:
    """Observations, rewards, flags and hidden states of all clients, one slot per client.

    A waiting agent keeps its last observation. A terminated agent stays terminated until the
    episode ends. Rewards count from an agent's first step to its termination.

    Args:
        declared (Declared): description of the agents.
        capacity (int): number C of slots.
        largest (float): largest absolute value of an observation, reward or state.

    Attributes:
        groups (dict of str to GroupSlots): groups by name.
        hidden (dict of str to array): group -> hidden states of its actors, ``[C, N, S]``.
    """

    def __init__(self, declared: Declared, capacity: int, largest: float = 1e6) -> None:
        self.largest = largest
        kinds = declared.kinds.items()
        self.declared = declared
        self.groups = {name: GroupSlots(name, kind, capacity) for name, kind in kinds}
        self._index = {
            agent: (group, i)
            for group in self.groups.values()
            for i, agent in enumerate(group.names)
        }
        self._agent_names = tuple(self._index)
        self._masked_agents = {name for name, (own, _) in self._index.items() if own.kind.mask}
        size = declared.state_size
        self.state = None if size is None else np.zeros((capacity, size), np.float32)
        self.ends, self.cut = np.zeros(capacity, bool), np.zeros(capacity, bool)
        self.hidden: dict[str, np.ndarray] = {}
        self._tracks_hidden = False

    def begin(self, slot: int) -> None:
        """Begins an episode; no agent has been born or terminated in it yet."""
        for group in self.groups.values():
            for rows in (group.observation, group.dead, group.born):
                rows[slot] = 0
        for rows in self.hidden.values():
            rows[slot] = 0
        if self.state is not None:
            self.state[slot] = 0

    # --------------------------------------------------------------------------- client messages

    def read(self, slot: int, message: Mapping[str, Any], last: bool) -> None:
        """Reads a message: observations, rewards and terminations.

        Args:
            slot (int): slot of the client.
            message (mapping): a message of type ``step`` or ``end``.
            last (bool): whether the message ends the episode.

        Raises:
            InvalidMessageError: the message has unknown agents or wrong shapes.
        """
        self._read_observations(slot, _read_map(message, "observations"))
        if self.state is not None and (message.get("state") is not None or not last):
            self.state[slot] = read_numbers("state", message.get("state"), self.state.shape[1])
        self._read_rewards(slot, _read_map(message, "rewards"))
        self._read_terminated(slot, message.get("terminated"))
        legal = message.get("action_masks")
        for group in self.groups.values():
            if group.legal is not None and (legal is not None or not last):
                self._read_action_masks(group, slot, legal)
        self._check_declared(_read_map(message, "action_masks"), message.get("state"))
        self.ends[slot] = last
        truncated = message.get("truncated")
        if truncated not in (None, False, True):
            raise InvalidMessageError(f"truncated is {quoted(truncated)}, expected true or false.")
        self.cut[slot] = last and bool(truncated)

    def _read_observations(self, slot: int, observations: Mapping[str, Any]) -> None:
        if tuple(observations) == self._agent_names:  # the common case, read without a loop
            values, first, complete = list(observations.values()), 0, True
            for group in self.groups.values():
                own = values[first : first + len(group.names)]
                complete, first = complete and group.read_all(slot, own), first + len(own)
            if complete:
                return
        known = sum(group.read_some(slot, observations) for group in self.groups.values())
        if known < len(observations):
            self._check_names(observations)

    def _check_names(self, names: Mapping[str, Any]) -> None:
        for name in names:
            if name not in self._index:
                raise InvalidMessageError(
                    f"agent {quoted(name)} is not declared; "
                    f"{nearest(str(name), self._index)}expected {', '.join(list(self._index)[:8])}."
                )

    def _read_rewards(self, slot: int, rewards: Mapping[str, Any]) -> None:
        for group in self.groups.values():
            group.reward[slot] = 0
        for name, reward in rewards.items():
            if name not in self._index:
                self._check_names(rewards)
            if type(reward) not in _NUMBER_TYPES or not -_MAX_FLOAT32 <= reward <= _MAX_FLOAT32:
                raise InvalidMessageError(
                    f"agent {name!r}: its reward is {quoted(reward)}, expected a number."
                )
            group, i = self._index[name]
            group.reward[slot, i] = reward

    def _read_terminated(self, slot: int, names: Any) -> None:
        for group in self.groups.values():
            group.ending[slot] = False
        if not names:
            return
        if not isinstance(names, list):
            raise InvalidMessageError(
                f"terminated is {quoted(names)}, expected a list of agents' names."
            )
        self._check_names(dict.fromkeys(map(str, names)))
        for name in names:
            group, i = self._index[name]
            group.ending[slot, i] = True

    def _read_action_masks(self, group: GroupSlots, slot: int, given: Any) -> None:
        assert group.legal is not None
        for i in np.flatnonzero(group.mask[slot]):
            name = group.names[i]
            own = given.get(name) if isinstance(given, dict) else None
            if isinstance(own, bytes):
                own = list(own)
            if not isinstance(own, list) or len(own) != group.legal.shape[2]:
                raise InvalidMessageError(
                    f"agent {name!r}: its action_mask is {quoted(own)}, expected "
                    f"{group.legal.shape[2]} flags, one for each action."
                )
            group.legal[slot, i] = [bool(x) for x in own]

    def _check_declared(self, legal: Mapping[str, Any], state: Any) -> None:
        """Checks that masks and a state were declared: they would have no effect."""
        if state and self.state is None:
            raise InvalidMessageError("a state is sent, expected none; declare its state_size.")
        if legal and not self._masked_agents.issuperset(legal):
            self._check_names(legal)
            name = next(name for name in legal if name not in self._masked_agents)
            raise InvalidMessageError(
                f"agent {name!r}: an action_mask is sent, expected none; declare "
                '{"n_actions": ..., "mask": true} as its action.'
            )

    def faults(self, slots: np.ndarray) -> dict[int, str]:
        """Returns the errors found in the messages, as a dict: slot -> a sentence."""
        found: dict[int, str] = {}
        for group in self.groups.values():
            acts = group.mask[slots]
            text = "has terminated in this episode, expected no observation of it"
            kinds = {text: acts & group.dead[slots] & ~self.ends[slots, None]}
            fits = self._within_limit(group.observation[slots]).all(-1) & self._within_limit(
                group.reward[slots]
            )
            if not fits.all():
                text = f"has NaN or a number above {self.largest:g} (max_number)"
                kinds[text] = ~fits
            if group.legal is not None:
                text = "acts without a legal action, expected at least one, such as a no-op"
                kinds[text] = acts & ~group.legal[slots].any(-1)
            for text, broken in kinds.items():
                for row, i in np.argwhere(broken):
                    found.setdefault(int(slots[row]), f"agent {group.names[i]!r} {text}.")
        if self.state is not None:
            for row in np.flatnonzero(~self._within_limit(self.state[slots]).all(-1)):
                text = f"the state has NaN or a number above {self.largest:g} (max_number)."
                found.setdefault(int(slots[row]), text)
        return found

    def _within_limit(self, numbers: np.ndarray) -> np.ndarray:
        """Returns a mask that is True for numbers that are neither NaN nor too large."""
        return np.abs(numbers) <= self.largest

    # ------------------------------------------------------------------------- steps of a batch

    def inputs(self, slots: np.ndarray) -> Leaves:
        """Returns the policy's inputs for the given slots, and the done flags before a step."""
        leaves: Leaves = {}
        for name, group in self.groups.items():
            mask, dead = group.mask[slots], group.dead[slots][..., None]
            leaves[name, "observation"] = group.observation[slots]
            leaves[name, "mask"] = mask
            if group.legal is not None:
                leaves[name, "action_mask"] = group.legal[slots]
            if self._tracks_hidden:
                leaves[name, "is_init"] = ~group.born[slots][..., None]
            if name in self.hidden:
                leaves[name, "hidden"] = self.hidden[name][slots]
            leaves[name, "done"] = leaves[name, "terminated"] = dead
            leaves[name, "truncated"] = np.zeros_like(dead)
            group.born[slots] |= mask
        if self.state is not None:
            leaves["state",] = self.state[slots]
        for flag in ("done", "terminated", "truncated"):
            leaves[flag,] = np.zeros((len(slots), 1), bool)
        return leaves

    def outcome(self, slots: np.ndarray) -> Leaves:
        """Returns the outcome of the last step of the given slots; marks terminated agents as dead.

        The keys omit the prefix ``"next"``.
        """
        dead = {n: g.dead[slots] | g.ending[slots] for n, g in self.groups.items()}
        over = np.stack([x.all(-1) for x in dead.values()]).all(0)
        ends = self.ends[slots] | over
        truncated = (self.cut[slots] & ~over)[:, None]
        terminated = ends[:, None] & ~truncated
        leaves: Leaves = {}
        for name, group in self.groups.items():
            before, living = group.dead[slots], ~dead[name]
            earns = group.born[slots] & ~before
            group.dead[slots] = dead[name]
            group.mask[slots] &= living
            leaves[name, "observation"] = group.observation[slots]
            # A truncated agent is bootstrapped, even if it was waiting.
            leaves[name, "mask"] = living & (group.mask[slots] | truncated) & ~terminated
            if group.legal is not None:
                leaves[name, "action_mask"] = group.legal[slots]
            leaves[name, "reward"] = np.where(earns, group.reward[slots], 0)[..., None]
            leaves[name, "terminated"] = (dead[name] | terminated)[..., None]
            leaves[name, "truncated"] = (living & truncated)[..., None]
            leaves[name, "done"] = (dead[name] | ends[:, None])[..., None]
            leaves[name, "earns"] = earns
            if self._tracks_hidden:
                leaves[name, "is_init"] = ~group.born[slots][..., None]
        if self.state is not None:
            leaves["state",] = self.state[slots]
        leaves["done",], leaves["terminated",] = ends[:, None], terminated
        leaves["truncated",] = truncated
        return leaves

    def store_hidden(self, slots: np.ndarray, acted: Leaves) -> None:
        """Stores the hidden states after a step."""
        for name, rows in self.hidden.items():
            after = acted.get(("next", name, "hidden"))
            if after is not None:
                rows[slots] = after

    def track_hidden(self, sizes: Mapping[str, int] | None) -> None:
        """Allocates the hidden states, and provides ``is_init`` from now on.

        Args:
            sizes (mapping, optional): group -> size of an agent's hidden state; None: no actor
                reads a hidden state or ``is_init``.
        """
        self._tracks_hidden = sizes is not None
        for name, size in (sizes or {}).items():
            shape = (*self.groups[name].mask.shape, size)
            self.hidden[name] = np.zeros(shape, np.float32)


class Fragments:
    """Recorder that cuts the steps of each client into fragments of T steps.

    A fragment may hold several episodes, and the last one may continue in the next fragment. If a
    client leaves in the middle of a fragment, its episode is truncated. The rest of the fragment is
    filled by the next client that needs one, so no step is lost.

    With ``hold``, one policy plays the whole batch. Only as many fragments are begun as the batch
    needs, and a client whose fragment is complete waits. Without ``hold``, clients play on until
    enough fragments for a batch are complete.

    Args:
        n_steps (int): number T of steps in a fragment.
        per_batch (int): number of fragments in a batch.
        groups (sequence of str): names of the groups; a return is recorded for each.
        capacity (int): number C of slots.
        hold (bool): whether clients wait during an update.

    Attributes:
        ready (deque of dict): complete fragments, each a dict: key -> array ``[T, ...]``.
        changed (threading.Condition): notified when a fragment is complete.
    """

    def __init__(
        self, n_steps: int, per_batch: int, groups: tuple[str, ...], capacity: int, hold: bool
    ) -> None:
        self.n_steps, self.per_batch, self.hold, self.groups = n_steps, per_batch, hold, groups
        self.ready: deque[Leaves] = deque()
        self.changed = threading.Condition()
        self.to_begin = 0
        self._rows: dict[tuple[str, ...], np.ndarray] = {}
        self._n_recorded = np.zeros(capacity, int)  # complete steps
        self._has_fragment = np.zeros(capacity, bool)  # also a fragment without a complete step
        self._abandoned_slots: list[int] = []  # slots whose client left in the middle of a fragment
        self._episode_returns = {name: np.zeros(capacity, np.float32) for name in groups}
        self._has_lived = {name: np.zeros(capacity, bool) for name in groups}
        self._episode_lengths = np.zeros(capacity, np.int64)
        self._episode_is_whole = np.zeros(capacity, bool)
        self._episode_ids = np.zeros(capacity, np.int64)
        self._n_episodes = 0

    # ------------------------------------------------------------------------- the learner's side

    def take(self) -> list[Leaves] | None:
        """Returns the fragments of a batch, or None while too few are complete."""
        with self.changed:
            if len(self.ready) < self.per_batch:
                return None
            return [self.ready.popleft() for _ in range(self.per_batch)]

    def release(self) -> None:
        """Allows clients to begin the fragments of the next batch."""
        self.to_begin = self.per_batch - len(self.ready) - int(self._has_fragment.sum())

    # -------------------------------------------------------------------------- the server's side

    def begin(self, slot: int, whole: bool) -> None:
        """Records that an episode begins.

        Args:
            slot (int): slot of the client.
            whole (bool): False if the client is already in the middle of an episode.
        """
        for rows in (*self._episode_returns.values(), *self._has_lived.values()):
            rows[slot] = 0
        self._episode_lengths[slot] = 0
        self._episode_is_whole[slot] = whole
        self._episode_ids[slot] = self._n_episodes
        self._n_episodes += 1

    def may_begin_step(self, slot: int) -> bool:
        """Returns whether a client may begin its next step; begins a fragment if needed."""
        if self._has_fragment[slot]:
            if slot in self._abandoned_slots:  # the slot's former client left
                self._abandoned_slots.remove(slot)
            return True
        if self._abandoned_slots:
            self._take_over_fragment(slot, self._abandoned_slots.pop())
            return True
        if self.hold:
            if self.to_begin < 1:
                return False
            self.to_begin -= 1
        elif len(self.ready) >= self.per_batch:
            return False
        self._has_fragment[slot] = True
        return True

    def _take_over_fragment(self, slot: int, other: int) -> None:
        """Assigns to a slot the unfinished fragment of a client that has left."""
        if slot != other:
            n = self._n_recorded[other]
            for rows in self._rows.values():
                rows[slot, :n] = rows[other, :n]
            self._n_recorded[slot], self._n_recorded[other] = n, 0
            self._has_fragment[other] = False
        self._has_fragment[slot] = True

    def open(self, slots: np.ndarray, leaves: Leaves, version: int) -> None:
        """Records the first half of a step for the given slots: observations and actions."""
        count = self._n_recorded[slots]
        for key, value in leaves.items():
            self._rows_of_key(key, value)[slots, count] = value
        n = len(slots)
        self._rows_of_key(("collector", "policy_version"), np.zeros(1, np.int64))[slots, count] = (
            version
        )
        ids = self._episode_ids[slots]
        self._rows_of_key(("collector", "traj_ids"), np.zeros(n, np.int64))[slots, count] = ids

    def _rows_of_key(self, key: tuple[str, ...], like: np.ndarray) -> np.ndarray:
        """Returns the recorded values of a key for all slots, ``[C, T, ...]``."""
        rows = self._rows.get(key)
        if rows is None:
            shape = (len(self._n_recorded), self.n_steps, *like.shape[1:])
            rows = self._rows[key] = np.zeros(shape, like.dtype)
        return rows

    def close(self, slots: np.ndarray, outcome: Leaves) -> None:
        """Records the second half of a step for the given slots: the outcomes."""
        count = self._n_recorded[slots]
        for key, value in outcome.items():
            if key[-1] != "earns":
                self._rows_of_key(("next", *key), value)[slots, count] = value
        self._record_returns(slots, count, outcome)
        count = self._n_recorded[slots] = count + 1
        for slot in slots[count == self.n_steps].tolist():
            self._finish_fragment(slot)

    def _record_returns(self, slots: np.ndarray, count: np.ndarray, outcome: Leaves) -> None:
        """Adds each group's reward, the mean over its living agents, to the returns of episodes."""
        self._episode_lengths[slots] += 1
        sums = {"episode_known": self._episode_is_whole[slots]}
        for name, returns in self._episode_returns.items():
            earns = outcome[name, "earns"]
            total = np.where(earns, outcome[name, "reward"][..., 0], 0).sum(1, dtype=np.float32)
            returns[slots] += total / np.maximum(earns.sum(1), 1)
            self._has_lived[name][slots] |= earns.any(1)
            sums[f"{name}/lived"] = self._has_lived[name][slots]
            sums[f"{name}/episode_reward"] = returns[slots]
            sums[f"{name}/episode_length"] = self._episode_lengths[slots]
        for name, value in sums.items():
            self._rows_of_key(("collector", name), value)[slots, count] = value

    def _finish_fragment(self, slot: int) -> None:
        fragment = {key: rows[slot].copy() for key, rows in self._rows.items()}
        self._n_recorded[slot], self._has_fragment[slot] = 0, False
        with self.changed:
            self.ready.append(fragment)
            self.changed.notify_all()

    def cut(self, slot: int) -> None:
        """Discards a step without an outcome, and truncates the episode at the step before it."""
        last = self._n_recorded[slot] - 1
        done = self._rows.get(("next", "done"))
        if last < 0 or done is None or done[slot, last, 0]:
            return
        self._rows["collector", "episode_known"][slot, last] = False
        done[slot, last] = self._rows["next", "truncated"][slot, last] = True
        for name in self.groups:
            living = ~self._rows["next", name, "done"][slot, last]
            self._rows["next", name, "truncated"][slot, last] |= living
            self._rows["next", name, "done"][slot, last] = True
            self._rows["next", name, "mask"][slot, last] = living[..., 0]

    def leave(self, slot: int) -> None:
        """Frees a slot; the next client continues its fragment."""
        if self._has_fragment[slot]:
            self._abandoned_slots.append(slot)


def read_numbers(name: str, value: Any, size: int) -> np.ndarray:
    """Reads numbers from little-endian float32 bytes or from a list.

    Args:
        name (str): name of the agent, or ``state``, for error messages.
        value: the value received.
        size (int): expected count of numbers.

    Raises:
        InvalidMessageError: the value has another type or another size.
    """
    if isinstance(value, bytes):
        if len(value) != 4 * size:
            raise InvalidMessageError(
                f"{name!r} has {len(value)} bytes, expected {size} float32, {4 * size}."
            )
        return np.frombuffer(value, "<f4")
    if not isinstance(value, list) or len(value) != size:
        found = f"{len(value)} numbers" if isinstance(value, list) else quoted(value)
        raise InvalidMessageError(f"{name!r} has {found}, expected {size}.")
    for x in value:
        if type(x) not in _NUMBER_TYPES or not -_MAX_FLOAT32 <= x <= _MAX_FLOAT32:
            raise InvalidMessageError(f"{name!r} has {quoted(x)}, expected finite float32 numbers.")
    return np.array(value, np.float32)


def _read_map(message: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = message.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidMessageError(f"{key} are {quoted(value)}, expected a map from agents' names.")
    return value
