"""The ring buffer inside a replay buffer, and the masks of the batches stored in it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchrl_marl.errors import ConfigError, SpecError
from torchrl_marl.functional import expand_mask
from torchrl_marl.modules.memory.states import STATES
from torchrl_marl.objectives.flags import ALIVE, BOOTSTRAPS, bootstrap_mask
from torchrl_marl.runtime.memory import refuse_too_large

__all__ = ["Ring", "finalize_batch"]

Key = tuple[str, ...]


class Ring:
    """Ring buffer of the last S steps of E envs, in tensors allocated once and written in place.

    The row of env ``e`` in slot ``s`` has the index ``s * E + e``.

    Args:
        n_steps (int): number S of steps to keep.
        num_envs (int): number E of envs.
        device (torch.device, optional): device of the buffer; by default that of the first batch.
        more_bytes (int): bytes per row that are stored outside of the ring; they count when the
            available memory is checked.
        windows (bool): whether steps are read in windows, which may span the ends of episodes.

    Attributes:
        store (TensorDict): ``[S, E]``, time-major; None before the first batch.
        marks (dict): masks, bool ``[S, E]``: ``ends``, the ends of episodes, and with ``windows``
            also ``cuts``, the steps that the next stored step does not continue.
        n_filled (int): number of filled slots.
        head (int): the slot to write next.
    """

    def __init__(
        self,
        n_steps: int,
        num_envs: int,
        device: torch.device | str | None = None,
        more_bytes: int = 0,
        windows: bool = False,
    ) -> None:
        self.windows = windows
        self.n_steps, self.num_envs, self.more_bytes = n_steps, num_envs, more_bytes
        self.device = None if device is None else torch.device(device)
        self.store: TensorDict | None = None
        self.marks: dict[str, Tensor] = {}
        self.n_filled = self.head = 0

    @property
    def capacity(self) -> int:
        """Maximum number of rows, of all envs."""
        return self.n_steps * self.num_envs

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors that a graph reads; none before the first batch."""
        if self.store is None:
            return []
        return [*self.store.values(True, True), *self.marks.values(), self._head]

    # ------------------------------------------------------------------------------- writing

    def write(
        self, leaves: Mapping[Key, Tensor], ends: Tensor, cuts: Tensor | None = None
    ) -> list[slice]:
        """Overwrites the oldest steps; returns the slots that were written, in order.

        Args:
            leaves (mapping): key -> values.
            ends (Tensor): bool, ends of episodes; no n-step return goes beyond them.
            cuts (Tensor, optional): bool, steps that the next stored step does not continue; no
                window goes beyond them.

        Shapes:
            - leaves: ``[E, T, ...]``; ends, cuts: ``[E, T]``

        Raises:
            ValueError: shapes or types differ from those of the first batch.
            ConfigError: the rows do not fit into memory.
        """
        self._allocate({key: (x.shape[2:], x.dtype) for key, x in leaves.items()}, ends.device)
        written = []
        for slots, steps in self._slots_to_write(ends.shape[1]):
            for key, value in leaves.items():
                self.leaf(key)[slots].copy_(value[:, steps].transpose(0, 1))
            for name, mark in self.marks.items():
                given = {"ends": ends, "cuts": cuts}[name]
                mark[slots] = False if given is None else given[:, steps].T
            self._set_head(slots.stop % self.n_steps, max(self.n_filled, slots.stop))
            written.append(slots)
        return written

    def cut(self) -> None:
        """Ends all n-step returns and windows at the newest steps."""
        for mark in self.marks.values() if self.n_filled else ():
            mark[self.head - 1].fill_(True)

    def _slots_to_write(self, n: int) -> Iterator[tuple[slice, slice]]:
        """Yields slots with their new steps: first up to the ring's end, then from its start."""
        first, head = max(n - self.n_steps, 0), self.head
        while first < n:
            size = min(n - first, self.n_steps - head)
            yield slice(head, head + size), slice(first, first + size)
            first, head = first + size, 0

    def _set_head(self, head: int, n_filled: int) -> None:
        self.head, self.n_filled = head, n_filled
        self._head.fill_(head)

    def _allocate(
        self, rows: Mapping[Key, tuple[torch.Size, torch.dtype]], device: torch.device
    ) -> None:
        """Allocates the ring, or checks rows against the shapes and types of the allocated ring."""
        if self.store is not None:
            for key, found in rows.items():
                known = self.leaf(key).shape[2:], self.leaf(key).dtype
                if found != known:
                    raise ValueError(
                        f"TeamReplay: {key!r} has rows of {list(found[0])}, {found[1]}, expected "
                        f"{list(known[0])}, {known[1]}, as in the first batch."
                    )
            return
        self.device = device if self.device is None else self.device
        size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in rows.values())
        size += 1 + self.windows + self.more_bytes
        refuse_too_large(
            size * self.capacity,
            self.device,
            f"a replay buffer of {self.capacity:,} rows of {size:,} B",
            "keep fewer rows",
        )
        shape = (self.n_steps, self.num_envs)
        self.store = TensorDict({}, shape, device=self.device)
        for key, (features, dtype) in rows.items():
            self.store.set(key, torch.zeros(*shape, *features, dtype=dtype, device=self.device))
        for name in ("ends", "cuts") if self.windows else ("ends",):
            self.marks[name] = torch.zeros(shape, dtype=torch.bool, device=self.device)
        self._head = torch.zeros((), dtype=torch.long, device=self.device)

    # ------------------------------------------------------------------------------- reading

    def leaf(self, key: Key) -> Tensor:
        """Returns all rows of a leaf, ``[S, E, ...]``."""
        if self.store is None:
            raise RuntimeError("TeamReplay: nothing is stored yet; call extend(batch) first.")
        return self.store.get(key)

    def read(self, key: Key, index: Tensor) -> Tensor:
        """Returns a leaf of the rows ``index``, ``[*B]``, as ``[*B, ...]``."""
        rows = self.leaf(key).flatten(0, 1).index_select(0, index.flatten())
        return rows if index.ndim == 1 else rows.unflatten(0, index.shape)

    def ahead(
        self, index: Tensor, length: int, marks: Literal["ends", "cuts"] = "ends"
    ) -> tuple[Tensor, Tensor]:
        """Returns each row with the next L - 1 rows, and a mask of the rows after which to stop.

        The mask is True at the newest step and at the marked steps. ``marks`` are the ends of
        episodes, or only the steps that the next stored step does not continue (``cuts``).

        Shapes:
            - index: ``[B]``; returns: ``[B, L]`` each

        Raises:
            ConfigError: more steps than the ring keeps.
        """
        if not 1 <= length <= self.n_steps:
            raise ConfigError(
                f"TeamReplay: a sequence has {length} steps, expected 1 to {self.n_steps}, the "
                "steps kept of each env; read fewer or keep more."
            )
        if length == 1:
            alone = index.unsqueeze(1)
            return alone, torch.ones_like(alone, dtype=torch.bool)
        # Without divisions, which a compiled graph would repeat for every number it reads.
        path = index.unsqueeze(1) + torch.arange(length, device=index.device) * self.num_envs
        path = torch.where(path < self.capacity, path, path - self.capacity)
        newest = (self._head - 1) % self.n_steps * self.num_envs  # the first env's row
        is_newest = (path >= newest) & (path < newest + self.num_envs)
        ends = self.marks[marks].flatten().index_select(0, path.flatten()).view(path.shape)
        return path, ends | is_newest

    def starts(self, draws: Tensor) -> Tensor:
        """Returns the rows with these indices; index 0 is the oldest step of the first env."""
        oldest = self.head if self.n_filled == self.n_steps else 0
        return (draws + oldest * self.num_envs) % self.capacity

    # --------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Returns the filled slots; if all are filled, the ring's tensors themselves."""
        shape = [self.n_steps, self.num_envs]
        state = {"shape": shape, "head": self.head, "n_filled": self.n_filled, "leaves": {}}
        if self.store is None:
            return state
        leaves = {key: self.leaf(key) for key in self._keys()}
        leaves |= {(name,): mark for name, mark in self.marks.items()}
        if self.n_filled < self.n_steps:  # a slice would be saved with all of its memory
            leaves = {key: value[: self.n_filled].clone() for key, value in leaves.items()}
        return {**state, "leaves": leaves}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores filled slots in place.

        Raises:
            ValueError: the state belongs to a ring of another size or with other leaves.
        """
        if state["shape"] != [self.n_steps, self.num_envs]:
            raise ValueError(
                f"TeamReplay: the state is of {state['shape'][0]} steps of {state['shape'][1]} "
                f"envs, expected {self.n_steps} of {self.num_envs}; keep as many as before."
            )
        leaves = dict(state["leaves"])
        if leaves:
            names = [key for key in leaves if key in (("ends",), ("cuts",))]
            marks = {key[0]: leaves.pop(key) for key in names}
            device = marks["ends"].device
            self._allocate({key: (x.shape[2:], x.dtype) for key, x in leaves.items()}, device)
            for key, value in leaves.items():
                self.leaf(key)[: len(value)].copy_(value)
            for name, mark in marks.items():
                self.marks[name][: len(mark)].copy_(mark)
        if self.store is not None:
            self._set_head(state["head"], state["n_filled"])

    def _keys(self) -> list[Key]:
        assert self.store is not None
        return [(k,) if isinstance(k, str) else k for k in self.store.keys(True, True)]


_FLAGS = ("done", "terminated", "truncated", "team_terminated", "mask")
_KEPT_WHEN_MASKED = ("is_init", *STATES)  # entries that are kept for masked agents, too
_NEVER_ZEROED = [(leaf,) for leaf in (*_FLAGS, *_KEPT_WHEN_MASKED)]


def finalize_batch(
    batch: TensorDictBase,
    keys: Sequence[Key],
    rewards: Collection[Key],
    dead_earn: bool = False,
    by_life: bool = False,
) -> tuple[dict[Key, Tensor], Tensor]:
    """Returns the leaves of a batch to store, with final masks, and the ends of n-step returns.

    A ``mask`` among the keys applies to its group's entries. In the next step it is True also for
    agents truncated by a time limit. Such agents are known from the flags of a gathered batch, or
    else from :func:`~torchrl_marl.objectives.flags.bootstrap_mask`. Observations, actions and
    action masks of masked slots, and rewards of agents that were not alive, are set to 0.

    Args:
        batch (TensorDictBase): ``[E, T]``, with the keys, the root's ``done`` and, if they exist,
            done flags of the agents.
        keys (sequence of tuple): keys to store.
        rewards (collection of tuple): those of rewards.
        dead_earn (bool): whether agents that were not alive keep their rewards.
        by_life (bool): whether the termination of an agent is an end, too.

    Shapes:
        - returns: key -> leaf ``[E, T, ...]``, and bool ``[E, T]``, True at the end of an episode
          and at the truncation of an agent

    Raises:
        SpecError: the batch lacks a key.
    """
    leaves = {key: _get_required(batch, key) for key in keys}
    ends = _get_required(batch, ("next", "done")).squeeze(-1)
    for group in (key[:-1] for key in keys if key[-1] == "mask" and key[0] != "next" and key[1:]):
        mask, then = _get_required(batch, (*group, "mask")), ("next", *group, "mask")
        alive = _alive_mask(batch, group, mask)
        truncated, terminated = _truncated_and_terminated(batch, group)
        next_mask = batch.get(("next", *group, *BOOTSTRAPS), None)
        if next_mask is None:
            next_mask = bootstrap_mask(alive, _get_required(batch, then), truncated, terminated)
        _zero_masked(leaves, _zeroable_keys(leaves, group), mask)
        following = set(_zeroable_keys(leaves, ("next", *group)))
        _zero_masked(leaves, following - set(rewards), next_mask)
        if not dead_earn:
            _zero_masked(leaves, following & set(rewards), alive)
        if then in leaves:
            leaves[then] = next_mask
        # An agent that is truncated alone has no observation after this step.
        last = truncated | terminated if by_life else truncated & ~terminated
        ends = ends | (alive & last.squeeze(-1)).any(-1)
    return leaves, ends


def _get_required(batch: TensorDictBase, key: Key) -> Tensor:
    found = batch.get(key, None)
    if found is None:
        known = ", ".join(sorted(map(str, batch.keys(True, True))))
        raise SpecError(f"the batch has no {key}, which the replay buffer needs; it has {known}.")
    return found


def _alive_mask(batch: TensorDictBase, group: Key, mask: Tensor) -> Tensor:
    """Returns a mask of living agents, from the learner's flags or the agents' done flags."""
    flagged = batch.get((*group, *ALIVE), None)
    if flagged is not None:
        return flagged
    done = batch.get((*group, "done"), None)
    return mask if done is None else ~done.squeeze(-1)


def _truncated_and_terminated(batch: TensorDictBase, group: Key) -> tuple[Tensor, Tensor]:
    """Returns the truncated and terminated flags, ``[E, T, N, 1]``; N is 1 for a team's flags."""
    own = batch.get(("next", *group, "terminated"), None) is not None
    own = own and batch.get(("next", *group, "done"), None) is not None
    source = batch.get(("next", *group) if own else "next")
    done, terminated = source.get("done"), source.get("terminated")
    truncated = source.get("truncated", None)
    truncated = done & ~terminated if truncated is None else truncated
    return (truncated, terminated) if own else (truncated.unsqueeze(-2), terminated.unsqueeze(-2))


def _zero_masked(leaves: dict[Key, Tensor], keys: Iterable[Key], kept: Tensor) -> None:
    for key in keys:
        value = leaves[key]
        if value.shape[: kept.ndim] == kept.shape:
            leaves[key] = value.masked_fill(~expand_mask(kept, value), 0)


def _zeroable_keys(leaves: dict[Key, Tensor], group: Key) -> Iterator[Key]:
    for key in list(leaves):
        if key[: len(group)] == group and key[len(group) :] not in _NEVER_ZEROED:
            yield key
