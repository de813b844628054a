"""Shards: parts of a run's environments, each with a collector and a random state.

Shapes: E envs of the shard, T steps.
"""

from __future__ import annotations

import contextlib
import copy
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.envs import EnvBase

from torchrl_marl.capture.execution import Execution
from torchrl_marl.collectors.rollout import RolloutCollector
from torchrl_marl.runtime.random_state import RandomState
from torchrl_marl.runtime.trust import trusting
from torchrl_marl.specs import TeamSpec

__all__ = [
    "Note",
    "Shard",
    "ShardActor",
    "from_arrays",
    "is_exact",
    "pack",
    "shard_seed",
    "to_arrays",
    "unpack",
]


class Note(Protocol):
    """Callable that adds entries to every batch of a shard."""

    def __call__(self, batch: TensorDictBase) -> None: ...  # noqa: D102

    def state_dict(self) -> dict[str, Any]: ...  # noqa: D102

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...  # noqa: D102


def shard_seed(seed: int, shard: int, n_restarts: int = 0) -> int:
    """Returns the random seed of a shard.

    Args:
        seed (int): random seed of the run.
        shard (int): index of the shard.
        n_restarts (int): number of restarts without a snapshot. It changes the seed, to avoid
            repeating the first episodes.

    Examples:
        >>> len({shard_seed(0, 0), shard_seed(0, 1), shard_seed(1, 0), shard_seed(0, 0, 1)})
        4
    """
    return int(np.random.SeedSequence([seed, shard, n_restarts]).generate_state(1)[0]) >> 1


class Shard:
    """Part of a run's environments, with a collector and a separate random state.

    A shard has its own random state and its own number of threads. Its results are therefore the
    same in any process, and next to any other shards.

    Args:
        env (EnvBase): environment with dense groups.
        policy (TensorDictModuleBase): policy of the team: the learner's own, or a copy that loads
            the learner's weights.
        random (RandomState): random state in which the environment was built.
        frames_per_batch (int): environment steps of this shard per batch.
        execution (str): as in :class:`RolloutCollector`.
        team (TeamSpec): groups whose observations and rewards must be finite.
        n_restarts (int): number of restarts without a snapshot.
        threads (int): number of CPU threads of torch.
        note (Note, optional): callable that adds entries to every batch.

    Examples:
        >>> from torchrl_marl.envs import VmasEnv
        >>> random = RandomState(shard_seed(0, 0))
        >>> with random.active():
        ...     env = VmasEnv("balance", num_envs=4, max_steps=100, seed=0)
        >>> shard = Shard(env, env.rand_action, random, frames_per_batch=40,
        ...               team=TeamSpec.from_env(env))
        >>> shard.rollout().shape
        torch.Size([4, 10])
    """

    def __init__(
        self,
        env: EnvBase,
        policy: TensorDictModuleBase,
        random: RandomState,
        *,
        frames_per_batch: int,
        team: TeamSpec,
        execution: Execution = "eager",
        n_restarts: int = 0,
        threads: int = 1,
        note: Note | None = None,
    ) -> None:
        self.note = note
        self.policy, self.random, self.n_restarts, self.threads = (
            policy,
            random,
            n_restarts,
            threads,
        )
        self.num_envs = env.batch_size.numel()
        with self._active_state():
            self.collector = RolloutCollector(
                env, policy, frames_per_batch=frames_per_batch, execution=execution, team=team
            )

    @contextlib.contextmanager
    def _active_state(self) -> Iterator[None]:
        n_threads = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            with self.random.active():
                yield
        finally:
            torch.set_num_threads(n_threads)

    def rollout(self, weights: Mapping[str, Tensor] | None = None) -> TensorDictBase:
        """Collects a batch and checks it.

        Args:
            weights (mapping, optional): weights to load; None if the policy is the learner's own.

        Raises:
            NonFiniteError: a value is NaN or infinite; the message names the entry.
            GraphCheckError: a check of the simulator failed.
        """
        if weights is not None:
            self.policy.load_state_dict(weights)
        with self._active_state():
            batch = self.collector.rollout()
            self.collector.finish(batch)
            if self.note is not None:
                self.note(batch)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Returns a deep copy of the complete state except the policy."""
        with self._active_state():
            state = self.collector.state_dict()
        state.pop("policy_state_dict", None)
        own = {"random": self.random.state_dict(), "life": self.n_restarts}
        if self.note is not None:
            own["note"] = self.note.state_dict()
        return copy.deepcopy({"collector": state, **own})

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restores a saved state.

        Returns:
            bool: True if no episode is lost; without a snapshot of the environment, new episodes
                start.
        """
        state = copy.deepcopy(dict(state))
        with self._active_state():
            continues = self.collector.load_state_dict(state["collector"])
        if continues or "carry" not in state["collector"]:
            self.random.load_state_dict(state["random"])
            self.n_restarts = state["life"]
            if self.note is not None:
                self.note.load_state_dict(state.get("note", {}))
            return True
        return False

    def close(self) -> None:
        """Closes the environment."""
        self.collector.shutdown()


def is_exact(state: Mapping[str, Any]) -> bool:
    """Returns whether a saved state restores a shard exactly."""
    collector = state["collector"]
    return "carry" not in collector or collector.get("env") is not None


def to_arrays(tensors: Mapping[Any, Tensor]) -> dict[Any, tuple[np.ndarray, bool]]:
    """Returns tensors as arrays, each with a flag for ``bfloat16``, which numpy lacks.

    Examples:
        >>> sent = to_arrays({"a": torch.ones(2), "b": torch.ones(2, dtype=torch.bfloat16)})
        >>> [x.dtype for x in from_arrays(sent).values()]
        [torch.float32, torch.bfloat16]
    """
    return {key: _to_array(value) for key, value in tensors.items()}


def from_arrays(arrays: Mapping[Any, tuple[np.ndarray, bool]]) -> dict[Any, Tensor]:
    """Returns tensors as views of arrays; do not write to them if the arrays belong to Ray."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writ")
        found = {key: (torch.from_numpy(array), half) for key, (array, half) in arrays.items()}
    return {key: x.view(torch.bfloat16) if half else x for key, (x, half) in found.items()}


def pack(batch: TensorDictBase) -> dict[str, Any]:
    """Returns a TensorDict as arrays and batch sizes, with those of its nested TensorDicts.

    Examples:
        >>> batch = TensorDict({"cars": TensorDict({"x": torch.ones(2, 3)}, [2, 3])}, [2])
        >>> unpack(pack(batch))["cars"].batch_size
        torch.Size([2, 3])
    """
    leaves = dict(batch.items(True, True))
    nested = {key: x for key, x in batch.items(True) if isinstance(x, TensorDictBase)}
    sizes = {(): tuple(batch.batch_size), **{key: tuple(x.batch_size) for key, x in nested.items()}}
    return {"leaves": to_arrays(leaves), "sizes": sizes}


def unpack(packed: Mapping[str, Any]) -> TensorDict:
    """Inverts :func:`pack`; the tensors are views of the arrays, as for :func:`from_arrays`."""
    sizes = dict(packed["sizes"])
    batch = TensorDict({}, sizes.pop(()))
    for key, size in sizes.items():
        batch.set(key, TensorDict({}, size))
    for key, value in from_arrays(packed["leaves"]).items():
        batch.set(key, value)
    return batch


def _to_array(value: Tensor) -> tuple[np.ndarray, bool]:
    value = value.detach().cpu().contiguous()
    half = value.dtype is torch.bfloat16
    return (value.view(torch.int16) if half else value).numpy(), half


class ShardActor:
    """Ray actor: a separate process that holds one or more of a run's shards.

    Examples:
        >>> ShardActor().ready()
        True
    """

    def __init__(self) -> None:
        self.shards: dict[int, Shard] = {}

    def ready(self, *makers: Callable[[int], Shard]) -> bool:
        """Returns True; the call makes the process import the modules for building shards."""
        return True

    def process(self) -> int:
        """Returns the actor's process ID, for tests and tools."""
        return os.getpid()

    def make(
        self,
        makers: Mapping[int, Callable[[int], Shard]],
        lives: Mapping[int, int],
        states: Mapping[int, Mapping[str, Any]],
        trust: bool,
    ) -> dict[int, bool]:
        """Builds shards, which replace the current ones.

        Args:
            makers (mapping): index of a shard -> ``maker(n_restarts)``.
            lives (mapping): index -> number of restarts without a snapshot.
            states (mapping): index -> saved state, for shards that have one.
            trust (bool): whether to unpickle the environments that the states contain.

        Returns:
            dict: index -> True if the shard has lost no episode.
        """
        for shard in self.shards.values():
            shard.close()
        self.shards = {i: make(lives[i]) for i, make in makers.items()}
        kept = dict.fromkeys(self.shards, True)
        with trusting(trust):
            for i, state in states.items():
                kept[i] = is_exact(state) and self.shards[i].load_state_dict(state)
        return kept

    def play(self, weights: Mapping[str, Any], with_state: bool) -> list[tuple[dict, dict | None]]:
        """Returns a batch of each shard as arrays; if ``with_state``, also the shard's state."""
        given = from_arrays(weights)
        played = []
        for shard in self.shards.values():
            batch = pack(shard.rollout(given))
            played.append((batch, shard.state_dict() if with_state else None))
        return played

    def states(self) -> dict[int, dict[str, Any]]:
        """Returns the states of the actor's shards."""
        return {i: shard.state_dict() for i, shard in self.shards.items()}

    def close(self) -> None:
        """Closes the environments."""
        for shard in self.shards.values():
            shard.close()
        self.shards = {}
