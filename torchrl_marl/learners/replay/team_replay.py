"""A replay buffer of team steps.

Shapes: S steps of the buffer, E envs, T steps of a batch, B rows of a minibatch, U updates,
L steps of a window, N agents of a group, P members of a population.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, unravel_key
from torch import Tensor

from torchrl_marl.errors import ConfigError
from torchrl_marl.functional import n_step as n_step_return
from torchrl_marl.functional import within_window
from torchrl_marl.learners.config import LearnerConfig
from torchrl_marl.learners.off_policy_config import ReplayLearnerConfig
from torchrl_marl.learners.replay.priorities import Priorities, Priority
from torchrl_marl.learners.replay.ring import Key, Ring, finalize_batch
from torchrl_marl.modules.memory.states import STATES
from torchrl_marl.runtime.memory import memory_of, refuse_too_large
from torchrl_marl.specs import GroupSpec

__all__ = ["TeamReplay", "least_bytes_per_row", "refuse_large_store"]


class TeamReplay:
    r"""Replay buffer of the last steps of all envs; a row is one step of one env with its team.

    All agents of a step are therefore replayed together. Sampling is uniform or prioritized. Masks
    are finalized when a batch is stored: an agent truncated by a time limit is unmasked in the next
    step, and masked slots hold 0. N-step returns are computed when rows are read. These returns end
    with the episode, or at the newest step, which counts as a truncation.

    Neither storing nor sampling waits for the device. Memory is allocated with the first batch and
    never replaced, so graphs may read it. Only :meth:`extend` must be called outside of graphs.

    Args:
        n_steps (int): number S of steps to keep of each env.
        num_envs (int): number E of envs.
        keys (sequence of NestedKey): entries of a batch to store, such as ``("agents", "action")``
            and ``("next", "agents", "reward")``. If a group's ``mask`` is among the keys, the
            group's entries are set to 0 in masked slots.
        priority (Priority, optional): exponents of prioritized replay; uniform by default.
        device (torch.device, optional): device of the buffer; by default that of the first batch.
        dead_earn (bool): whether agents that are not alive keep their rewards, such as team
            rewards; otherwise these are 0.
        windows (bool): whether steps are read in windows, which may span the ends of episodes.
        by_life (bool): whether n-step returns also end when an agent terminates, because it may
            come back for a new life, or because the reward is the team's and continues.
        n_members (int): number P of members of a population with ``num_envs`` envs each, sorted by
            member. A minibatch has the same number of rows for each member, namely those that the
            member would sample alone, stacked along the agents' dim. Each group then has a
            ``discount`` entry.
        shared (bool): whether all members read the same rows, which come from all envs.
        reward_keys (sequence of NestedKey, optional): rewards among the keys, under ``"next"``:
            n-step returns add them, and the reward of the step in which an agent dies is kept.
            Default: keys that end in ``"reward"``.

    Attributes:
        ring (Ring): the rows.
        priorities (Priorities, optional): priorities of the rows; None before the first batch.

    Keys read by :meth:`extend`: ``keys``, ``("next", "done")`` and the agents' done flags, if any.

    Keys written by :meth:`look`: ``keys``, ``discount``, ``index``, ``priority_weight``.

    Raises:
        ConfigError: a size below 1; with the first batch, rows that do not fit into memory.

    Reference: Mnih et al., 2015, https://www.nature.com/articles/nature14236 (experience replay).

    Reduces to: TorchRL's ``TensorDictReplayBuffer`` of single steps if ``n_step`` is 1 and no agent
    is masked.

    Examples:
        >>> from torchrl_marl.envs import VmasEnv
        >>> env = VmasEnv("balance", num_envs=4, seed=0)
        >>> keys = [("agents", "observation"), ("agents", "action"), ("next", "agents", "reward"),
        ...         ("next", "agents", "observation"), ("next", "terminated")]
        >>> replay = TeamReplay(1000, 4, keys)
        >>> replay.extend(env.rollout(10, break_when_any_done=False))
        >>> len(replay), replay.bytes_per_row
        (40, 422)
        >>> for rows in replay.rows(n_updates=3, size=16):
        ...     minibatch = replay.look(rows, n_step=5, gamma=0.99)
        >>> minibatch["next", "agents", "reward"].shape, minibatch["discount"].shape
        (torch.Size([16, 3, 1]), torch.Size([16, 1]))
    """

    def __init__(
        self,
        n_steps: int,
        num_envs: int,
        keys: Sequence[NestedKey],
        priority: Priority | None = None,
        device: torch.device | str | None = None,
        *,
        dead_earn: bool = False,
        windows: bool = False,
        by_life: bool = False,
        n_members: int = 1,
        shared: bool = False,
        reward_keys: Sequence[NestedKey] | None = None,
    ) -> None:
        if n_steps < 1 or num_envs < 1:
            raise ConfigError(
                f"TeamReplay: n_steps is {n_steps} and num_envs {num_envs}, expected 1 or more."
            )
        self.keys, self.priority = [_as_tuple(key) for key in keys], priority
        self.reward_keys = _find_reward_keys(self.keys, reward_keys)
        self.dead_earn, self.by_life = dead_earn, by_life
        self.n_members, self.shared, self.num_envs = n_members, shared, num_envs
        # Number of envs from which a member samples: its own envs, or all.
        self.num_own = n_members * num_envs if shared else num_envs
        more = 16 if priority else 0
        self.ring = Ring(n_steps, n_members * num_envs, device, more_bytes=more, windows=windows)
        self.priorities: Priorities | None = None

    def __len__(self) -> int:
        return self.ring.n_filled * self.num_own

    @property
    def capacity(self) -> int:
        """Maximum number of rows of all envs; in a population, of all envs that a member reads."""
        return self.ring.n_steps * self.num_own

    @property
    def bytes_per_row(self) -> int:
        """Bytes of a row, including its priority; 0 before the first batch."""
        return sum(x.numel() * x.element_size() for x in self.tensors) // self.ring.capacity

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors that a graph with :meth:`look` and :meth:`update_priority` reads or writes."""
        return [*self.ring.tensors, *(self.priorities.tensors if self.priorities else [])]

    @torch.no_grad()
    def extend(self, batch: TensorDictBase, cut: Tensor | None = None) -> None:
        """Stores a batch over the oldest steps.

        Args:
            batch (TensorDictBase): dense batch of the steps that follow those of the last batch.
            cut (Tensor, optional): bool, steps that the next stored step does not continue, such as
                the end of an actor's fragment.

        Shapes:
            - batch, cut: ``[E, T]``

        Raises:
            SpecError: the batch lacks a key.
            ValueError: the number of envs, the shape or type of ``cut``, or the shapes of leaves
                differ from those expected.
            ConfigError: the rows do not fit into memory.
        """
        if batch.ndim != 2 or batch.batch_size[0] != self.ring.num_envs:
            raise ValueError(
                f"TeamReplay: the batch has batch size {list(batch.batch_size)}, expected "
                f"[{self.ring.num_envs}, T], the steps of all envs."
            )
        if cut is not None and (cut.shape != batch.batch_size or cut.dtype != torch.bool):
            raise ValueError(
                f"TeamReplay: cut is {list(cut.shape)}, {cut.dtype}, expected "
                f"{list(batch.batch_size)}, torch.bool, as the batch."
            )
        leaves, ends = finalize_batch(
            batch, self.keys, self.reward_keys, self.dead_earn, self.by_life
        )
        written = self.ring.write(leaves, ends if cut is None else ends | cut, cut)
        self._start_priorities()
        if self.priorities is not None:
            n = self.ring.num_envs
            for slots in written:
                self.priorities.add(slots.start * n, (slots.stop - slots.start) * n)

    def cut(self) -> None:
        """Marks the newest steps as not continued by the next ones.

        N-step returns then end with the newest steps, as at a time limit. This call is needed if
        episodes are abandoned and restarted between two batches.
        """
        self.ring.cut()

    def _start_priorities(self) -> None:
        if self.priority is not None and self.priorities is None and self.ring.store is not None:
            self.priorities = Priorities(self.capacity, self.priority, self.ring.device)

    # ------------------------------------------------------------------------------- drawing

    def rows(self, n_updates: int, size: int, length: int = 1) -> Tensor:
        """Samples the rows of several updates at once, with replacement.

        Args:
            n_updates (int): number U of updates.
            size (int): number B of rows of each update.
            length (int): number L of steps of the windows that begin with these rows; no window
                goes beyond the newest step.

        Shapes:
            - returns: ``[U, B]``. For uniform sampling: indices of rows. For prioritized sampling:
              stratified random numbers in [0, 1), which :meth:`look` maps to rows by the priorities
              at that time

        Raises:
            ConfigError: more rows than the capacity, or windows with prioritized sampling.
            RuntimeError: the buffer is empty, or holds less than a window.
        """
        if size > self.capacity:
            raise ConfigError(
                f"TeamReplay: a minibatch has {size:,} rows, expected at most the capacity, "
                f"{self.capacity:,}; sample fewer or keep more."
            )
        if not len(self):
            raise RuntimeError("TeamReplay: nothing is stored yet; call extend(batch) first.")
        shape, device = (n_updates, size), self.ring.device
        if length > 1:
            return self._sample_window_starts(shape, length)
        if self.priorities is None:
            return torch.randint(len(self), shape, device=device)
        uniform = torch.rand(shape, dtype=torch.float64, device=device)
        return (uniform + torch.arange(size, device=device)) / size

    def _sample_window_starts(self, shape: tuple[int, int], length: int) -> Tensor:
        """Samples the first row of each window."""
        n_starts = self.ring.n_filled - length + 1
        if self.priorities is not None:
            raise ConfigError(
                "TeamReplay: windows are sampled uniformly, expected no priorities; omit priority."
            )
        if n_starts < 1:
            raise RuntimeError(
                f"TeamReplay: {self.ring.n_filled} steps of each env are stored, expected at least "
                f"{length}, a window; call extend(batch) first."
            )
        draws = torch.randint(n_starts * self.ring.num_envs, shape, device=self.ring.device)
        return self.ring.starts(draws)

    def look(self, rows: Tensor, n_step: int, gamma: float | Tensor) -> TensorDict:
        """Returns a minibatch of rows with their n-step transitions.

        ``("next", ...)`` comes from the last of up to ``n_step`` steps. Every reward is the
        discounted sum over these steps, and ``discount`` is ``gamma`` to the power of the number of
        steps. There are fewer than ``n_step`` steps if the episode ends, an agent is truncated, or
        the buffer has no newer step.

        Args:
            rows (Tensor): rows of one update, from :meth:`rows`.
            n_step (int): maximum number of steps.
            gamma (float or Tensor): discount factor, or one for each member, ``[P]``.

        Shapes:
            - rows, returns: ``[B]``; ``discount``: ``[B, 1]``; ``index``: ``[B]``;
              ``priority_weight``: ``[B]``, 1 for uniform sampling

        Raises:
            ConfigError: more steps than the buffer keeps.
        """
        if self.n_members == 1:
            return self._read_minibatch(rows, n_step, gamma)
        return self._read_minibatch_of_members(rows, n_step, gamma)

    def _read_minibatch(self, rows: Tensor, n_step: int, gamma: float | Tensor) -> TensorDict:
        """Returns a minibatch of rows of the ring."""
        index, weight = self._indices_and_weights(rows)
        path, ends = self.ring.ahead(index, n_step)
        length = within_window(ends).sum(1, keepdim=True)
        last = index if n_step == 1 else path.gather(1, length - 1).squeeze(1)
        leaves: dict[Key, Tensor] = {("index",): index, ("priority_weight",): weight}
        leaves["discount",] = gamma ** length.float()
        for key in self.keys:
            if key in self.reward_keys and n_step > 1:
                leaves[key] = n_step_return(self.ring.read(key, path), ends, gamma=gamma)[0]
            else:
                leaves[key] = self.ring.read(key, last if key[0] == "next" else index)
        return _nest_leaves(leaves, index.shape, self.ring.device)

    def _read_minibatch_of_members(
        self, rows: Tensor, n_step: int, gamma: float | Tensor
    ) -> TensorDict:
        """Returns a minibatch of all members, stacked along the agents' dim."""
        index = self._rows_of_members(rows)
        if isinstance(gamma, Tensor):
            gamma = gamma.expand(index.shape).reshape(-1, 1)
        found, n = self._read_minibatch(index.flatten(), n_step, gamma), self.n_members
        # [B * P, N, ...] to [B, P * N, ...], without a copy.
        leaves = {key: found.get(key).unflatten(0, (-1, n)).flatten(1, 2) for key in self.keys}
        discount = found.get("discount").unflatten(0, (-1, n)).unsqueeze(-2)
        for name, size in _agents_per_group(leaves).items():
            leaves[name, "discount"] = discount.expand(-1, -1, size // n, -1).flatten(1, 2)
        leaves["index",] = rows
        leaves["priority_weight",] = torch.ones_like(rows, dtype=discount.dtype)
        minibatch = TensorDict({}, rows.shape, device=self.ring.device)
        for key, value in leaves.items():
            minibatch.set(key, value)
        return minibatch

    def _rows_of_members(self, rows: Tensor) -> Tensor:
        """Returns each member's rows, ``[B, P]``, from the rows sampled for one member, ``[B]``."""
        if self.shared:
            return rows.unsqueeze(-1).expand(-1, self.n_members)
        step, env = rows // self.num_own, rows % self.num_own
        member = torch.arange(self.n_members, device=rows.device)
        own = env.unsqueeze(-1) + member * self.num_own
        return step.unsqueeze(-1) * self.ring.num_envs + own

    def windows(self, rows: Tensor, length: int) -> TensorDict:
        """Returns windows of steps that begin with the rows, for networks with memory.

        If the buffer was built with ``windows``, a window may span the ends of episodes, which
        networks detect by ``is_init``. A window ends at a step that the next stored step does not
        continue.

        Args:
            rows (Tensor): rows of one update, from :meth:`rows`.
            length (int): number L of steps of a window.

        Shapes:
            - rows: ``[B]``; returns: ``[B, L]``, with ``valid``, bool ``[B, L]``, True if the step
              belongs to the window. After the end of a window its last step is repeated. All steps
              have the hidden states of the first step

        Raises:
            ConfigError: more steps than the buffer keeps.
        """
        index, weight = self._indices_and_weights(rows)
        path, ends = self.ring.ahead(index, length, "cuts" if self.ring.windows else "ends")
        valid = within_window(ends)
        last = valid.sum(1, keepdim=True) - 1
        path = path.gather(1, torch.arange(length, device=path.device).minimum(last))
        leaves: dict[Key, Tensor] = {("index",): path, ("valid",): valid}
        leaves["priority_weight",] = weight.unsqueeze(1).expand_as(path)
        for key in self.keys:
            if key[-1] in STATES:
                first = self.ring.read(key, path[:, :1])
                leaves[key] = first.expand(*path.shape, *first.shape[2:])
            else:
                leaves[key] = self.ring.read(key, path)
        return _nest_leaves(leaves, path.shape, self.ring.device)

    def _indices_and_weights(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the indices and the importance weights of rows, ``[B]`` each."""
        if self.priorities is not None:
            return self.priorities.sample(rows)
        return rows, torch.ones(rows.shape, device=rows.device)

    @torch.no_grad()
    def update_priority(self, rows: Tensor, error: Tensor, mask: Tensor | None = None) -> None:
        """Sets each row's priority from its largest error; does nothing if sampling is uniform.

        A row whose error is NaN or infinite gets the highest priority so far.

        Args:
            rows (Tensor): ``index`` of a minibatch.
            error (Tensor): errors of any sign, such as temporal-difference errors.
            mask (Tensor, optional): bool mask of the errors that count.

        Shapes:
            - rows: ``[B]``; error: ``[B, ...]``
            - mask: the error's shape, with or without its trailing dims
        """
        if self.priorities is not None:
            self.priorities.update(rows, error, mask)

    # --------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Returns the filled slots; ``torch.load`` reads them with ``weights_only=True``.

        If all slots are filled, the tensors are those of the buffer, not copies, as in a module's
        ``state_dict``.
        """
        state = self.ring.state_dict()
        if self.priorities is not None:
            state["priorities"] = self.priorities.state_dict(len(self))
        return state

    def state_of(self, member: int, keys: Collection[NestedKey]) -> dict[str, Any]:
        """Returns a member's part of the state, in the form of a buffer without members.

        Args:
            member (int): index of the member.
            keys (collection of NestedKey): keys that the buffer without members stores.
        """
        state, num_envs = self.ring.state_dict(), self.num_envs
        envs = slice(member * num_envs, (member + 1) * num_envs)
        leaves = {}
        for key, value in state["leaves"].items():
            if key[-1].endswith("terminated") and key not in keys:  # the team has it, at the root
                leaves["next", "terminated"] = value[:, envs, 0].clone()
            else:
                leaves[key] = value[:, envs].clone()
        return {**state, "shape": [self.ring.n_steps, num_envs], "leaves": leaves}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a saved state in place.

        Raises:
            ValueError: the state belongs to a buffer of another size, with other keys, or without
                priorities.
        """
        has, needs = "priorities" in state, self.priority is not None
        if state["leaves"] and has != needs:
            raise ValueError(
                f"TeamReplay: the state has {'' if has else 'no '}priorities, expected "
                f"{'some' if needs else 'none'}; build the buffer with the same priority as before."
            )
        self.ring.load_state_dict(state)
        self._start_priorities()
        if self.priorities is not None:
            self.priorities.load_state_dict(state.get("priorities"))


def _find_reward_keys(keys: Sequence[Key], given: Sequence[NestedKey] | None) -> set[Key]:
    """Returns the keys of rewards; raises an error if their names leave this open."""
    if given is not None:
        rewards = {_as_tuple(key) for key in given}
        if missing := rewards - set(keys):
            raise ConfigError(
                f"TeamReplay: reward_keys has {sorted(missing)}, expected some of keys, {keys}."
            )
        return rewards
    next_keys = [key for key in keys if key[0] == "next"]
    rewards = {key for key in next_keys if key[-1] == "reward"}
    others = {"reward", "episode_reward"}  # the latter is the sum that TorchRL's RewardSum writes
    near = [key for key in next_keys if "reward" in key[-1] and key[-1] not in others]
    if near:
        raise ConfigError(
            f"TeamReplay: {near[0]} may be a reward, which n-step returns add; name the rewards, "
            f"such as reward_keys={sorted({*rewards, near[0]})}."
        )
    return rewards


def _as_tuple(key: NestedKey) -> Key:
    key = unravel_key(key)
    return (key,) if isinstance(key, str) else key


def _agents_per_group(leaves: Mapping[Key, Tensor]) -> dict[str, int]:
    """Returns the number of agents of each group, summed over all members."""
    return {key[0]: x.shape[1] for key, x in leaves.items() if len(key) > 1 and key[0] != "next"}


def _nest_leaves(
    leaves: Mapping[Key, Tensor], batch_size: torch.Size, device: torch.device | None
) -> TensorDict:
    """Returns leaves as a TensorDict, without the slow checks of its constructor."""
    own: dict[str, Any] = {key[0]: leaf for key, leaf in leaves.items() if len(key) == 1}
    for name in dict.fromkeys(key[0] for key in leaves if len(key) > 1):
        inner = {key[1:]: leaf for key, leaf in leaves.items() if key[0] == name and key[1:]}
        own[name] = _nest_leaves(inner, batch_size, device)
    return TensorDict._new_unsafe(own, batch_size=batch_size, device=device)


def least_bytes_per_row(groups: Iterable[GroupSpec]) -> int:
    """Returns the minimum bytes of a step: actions, rewards, and observations before and after it.

    Args:
        groups (iterable of GroupSpec): groups to store.

    Examples:
        >>> from torchrl.data import Categorical, Unbounded
        >>> from torchrl_marl import AgentSpec, TeamSpec
        >>> team = TeamSpec([AgentSpec("car", 2, Unbounded((5,)), Categorical(3))])
        >>> least_bytes_per_row(team.groups.values())  # 2 * (2 * 5 * 4 + 8 + 4)
        104
    """
    size = 0
    for group in groups:
        zeros = group.padded_spec.zero()
        seen, done = zeros.select("observation"), zeros.select("action")
        size += 2 * seen.bytes() + done.bytes() + 4 * group.n_agents
    return size


def refuse_large_store(
    config: LearnerConfig,
    groups: Iterable[GroupSpec],
    device: torch.device | str,
    n_members: int = 1,
) -> None:
    """Refuses a replay buffer that does not fit into memory, before training begins.

    Args:
        config (LearnerConfig): settings of the learner; not all algorithms have a replay buffer.
        groups (iterable of GroupSpec): groups to store.
        device (torch.device): device of the replay buffer.
        n_members (int): number of members of a population, each of which has such a replay buffer.

    Raises:
        ConfigError: too little memory; the message names the setting and both sizes.
    """
    if not isinstance(config, ReplayLearnerConfig):
        return
    row, capacity = n_members * least_bytes_per_row(groups), config.replay.capacity
    most = (memory_of(device) or 0) // (2 * row)
    refuse_too_large(
        row * capacity,
        device,
        f"learner.replay.capacity is {capacity:,}: the replay buffer, at {row:,} B a step"
        f"{f' of {n_members} members' if n_members > 1 else ''},",
        f"use learner.replay.capacity={most}",
    )
