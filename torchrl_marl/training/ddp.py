"""Runs over several processes (ranks), one learner in all of them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.utils._pytree as pytree
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs import EnvBase

from torchrl_marl.errors import ConfigError
from torchrl_marl.learners.capabilities import RANKS
from torchrl_marl.runtime.ranks import ALONE, Alone, Ranks
from torchrl_marl.settings import flatten, shown
from torchrl_marl.training.checkpoint import save_checkpoint
from torchrl_marl.training.config import TrainConfig
from torchrl_marl.training.evaluation import Episodes
from torchrl_marl.training.folder import RunFolder
from torchrl_marl.training.interruption import Interruption
from torchrl_marl.training.recorder import Recorder
from torchrl_marl.training.training import Training
from torchrl_marl.version import __version__

__all__ = [
    "NoFolder",
    "RankTraining",
    "check_ranks",
    "refuse_disagreement",
    "with_shards",
]


def with_shards(config: TrainConfig, n_ranks: int) -> TrainConfig:
    """Returns the settings with a shard for each rank, where they leave the number open."""
    if config.distributed.enabled:
        return config
    one_each = dataclasses.replace(config.distributed, collectors=n_ranks)
    return dataclasses.replace(config, distributed=one_each)


def check_ranks(config: TrainConfig, n_ranks: int, *, own_env: bool = False) -> None:
    """Refuses what several processes cannot learn as one.

    Args:
        config (TrainConfig): the settings, with shards.
        n_ranks (int): how many processes.
        own_env (bool): the caller brings an environment.

    Raises:
        ConfigError: naming the setting and the fix.
    """
    if own_env:
        raise ConfigError(
            f"an environment of your own is given, but {n_ranks} processes learn as one, each of "
            "which makes its own; name a world (env.name, or env.library=module:Class), or start "
            "one process."
        )
    RANKS.check(config)
    number = config.distributed.collectors or 0
    if number % n_ranks:
        raise ConfigError(
            f"distributed.collectors is {number}, expected a multiple of the {n_ranks} processes "
            "that torchrun has started; use "
            f"distributed.collectors={-(-number // n_ranks) * n_ranks}, or another number of them."
        )
    config.check_features()
    config.check_learners()


def refuse_disagreement(ranks: Alone, config: TrainConfig) -> None:
    """Refuses ranks of other versions or settings than the first.

    Raises:
        ConfigError: naming the first difference.
    """
    own = {"torchrl_marl": __version__, "torch": torch.__version__}
    own |= flatten(dataclasses.asdict(config))
    found = ranks.of_all({name: shown(value) for name, value in own.items()})
    for rank, theirs in enumerate(found):
        name = _difference(found[0], theirs)
        if name is not None:
            raise ConfigError(
                f"ranks disagree: {name} is {found[0].get(name, 'not there')} on rank 0 and "
                f"{theirs.get(name, 'not there')} on rank {rank}, expected the same; start all "
                "with the same line, in the same environment."
            )


def _difference(one: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    return next((key for key in {**one, **other} if one.get(key) != other.get(key)), None)


# What a learner keeps of each environment.
_BY_ENV = ("critic_states", "born")


class NoFolder:
    """The run folder for a rank that writes nothing; the first one owns it.

    Args:
        path (Path): where it is, for the first.
    """

    writes = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self.release = _Nothing()

    def clear(self) -> None:
        """Does nothing, as the other methods."""

    def give_up(self) -> None:  # noqa: D102
        pass


class _Nothing:
    alive = True

    def __call__(self) -> None:
        self.alive = False


class _NoRecorder(Recorder):
    """Writes and shows nothing."""

    def __init__(self) -> None:
        pass

    def iteration(self, row: Mapping[str, Any], returns: Sequence[float]) -> None:
        pass

    def evaluation(self, progress: Mapping[str, Any], result: Mapping[str, float]) -> None:
        pass

    def working(self, what: str) -> None:
        pass

    def close_bar(self) -> None:
        pass

    def close(self) -> None:
        pass


class RankInterruption(Interruption):
    """Ctrl-C and SIGTERM, heeded by all ranks after the same iteration.

    A second Ctrl-C does not stop at once: ``torchrun`` passes the terminal's on once more.

    Args:
        ranks (Ranks): who trains.
    """

    _hint = ""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks
        self._agreed: int | None = None

    @property
    def asked(self) -> bool:
        """Whether one has come to any rank before they last agreed."""
        return self._agreed is not None

    def agree(self) -> None:
        """Finds out together whether to stop."""
        self._agreed = max(self._ranks.of_all(self._number or 0)) or None

    def heed(self, folder: Path) -> None:
        """Raises what the ranks have agreed on, once."""
        self._number, self._agreed = self._agreed, None
        super().heed(folder)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._number is None:
            super()._note(number, frame)


class RankTraining(Training):
    """One rank's part of a training: its shards are collected from here, all learn as one.

    The first rank has the folder, the tables, evaluations and checkpoints, which are those of one
    process with all shards.

    Args:
        config (TrainConfig): a recipe with shards, the same on all ranks.
        folder (RunFolder or NoFolder): where the run is kept.
        env (None): each rank makes its own.
        ranks (Ranks): who trains.
    """

    def __init__(
        self, config: TrainConfig, folder: RunFolder, env: EnvBase | None, *, ranks: Ranks
    ) -> None:
        self.ranks = ranks
        super().__init__(config, folder, env)
        self.interruption: RankInterruption = RankInterruption(ranks)

    def _build(self, env: EnvBase | None) -> None:
        super()._build(env)
        if self.environments.shared:
            raise ConfigError(
                f"a process holds one {self.config.env.name!r} only, which the first rank cannot "
                "be evaluated on while it trains; start one process."
            )
        states = [x for one in self.learners for x in one.state_dict().values()]
        tensors = [x for x in states if isinstance(x, Tensor)]
        for x, first in zip(tensors, self.ranks.send([x.cpu() for x in tensors])):
            x.copy_(first)

    def open(self) -> None:
        """Opens the tables and loggers, on the first rank."""
        if self.ranks.rank == 0:
            super().open()
            return
        self.recorder = _NoRecorder()

    @property
    def shards(self) -> range:
        """The shards that this rank collects from."""
        n = (self.config.distributed.collectors or 0) // self.ranks.size
        return range(self.ranks.rank * n, (self.ranks.rank + 1) * n)

    @property
    def frames(self) -> int:
        """Number of env steps so far, of all ranks."""
        return self.collector.frames * self.ranks.size

    def _count(self, batch: TensorDictBase) -> int:
        return batch.numel() * self.ranks.size

    def step(self) -> Any:
        """Collects and learns together; finds out together whether to stop."""
        iteration = super().step()
        self.interruption.agree()
        return iteration

    def begin(self) -> None:
        """Evaluates, as one process does; finds out together whether to stop."""
        super().begin()
        self.interruption.agree()

    def _learn_and_count(self, batch: TensorDictBase) -> dict[str, Tensor]:
        with self.ranks.active():
            found = super()._learn_and_count(batch)
        counts = "agent_frames", "episodes"
        return found | dict(zip(counts, self.ranks.sum_all([found[name] for name in counts])))

    def _late(self) -> bool:
        minutes = self.config.checkpoint.every_minutes  # by the first one's clock
        return minutes is not None and self.ranks.send(super()._late())

    def _measure(self, policy: Any, other: bool = False) -> Episodes | None:
        found = None
        with self.ranks.turn_of_first() as first, ALONE.active():
            if first:
                found = super()._measure(policy, other)
        return self.ranks.send(found)  # type: ignore[no-any-return]

    def save(self) -> None:
        """Writes a checkpoint, unless this iteration has one, on the first rank."""
        if self.saved_at != self.iteration:
            with self.interruption.unbroken():
                state = self.state_dict()
                if self.ranks.rank == 0:
                    keep = self.config.checkpoint.keep
                    save_checkpoint(self.folder, self.iteration, state, keep)
            self.saved_at = self.iteration
            self._saved_when = time.monotonic()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of a run in one process, on the first rank; on others their own."""
        own = super().state_dict()
        parts = self.ranks.gather(_of_envs(own))
        return own if parts is None else _with_all(own, parts)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores this rank's part of a checkpoint."""
        super().load_state_dict(_part(state, self.shards, self._rows, self.ranks.size))

    @property
    def _rows(self) -> slice:
        n = self.config.env.num_envs // self.ranks.size
        return slice(self.ranks.rank * n, (self.ranks.rank + 1) * n)

    @property
    def num_envs(self) -> int:
        """Number of envs that this rank collects from."""
        return self.config.env.num_envs // self.ranks.size


def _of_envs(state: dict[str, Any]) -> dict[str, Any]:
    """Picks what a rank's own environments have left in its state."""
    extra = [learner.get("_extra_state", {}) for learner in state["learners"]]
    kept = [{name: own[name] for name in _BY_ENV if name in own} for own in extra]
    found = {"collector": state["collector"], "tracker": state["tracker"], "learners": kept}
    # A process would take others' tensors to their GPU.
    return pytree.tree_map_only(Tensor, Tensor.cpu, found)


def _with_all(own: dict[str, Any], parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Makes one process's state of the first rank's, and of what all ranks' environments left."""
    whole, collectors = dict(own), [part["collector"] for part in parts]
    whole["collector"] = dict(collectors[0], frames=sum(one["frames"] for one in collectors))
    if collectors[0].get("shards") is not None:
        whole["collector"]["shards"] = [x for one in collectors for x in one["shards"]]
    whole["tracker"] = _rows_of_all([part["tracker"] for part in parts])
    for learner, *kept in zip(whole["learners"], *(part["learners"] for part in parts)):
        for name in kept[0]:
            learner["_extra_state"][name] = _rows_of_all([own[name] for own in kept])
    return whole


def _rows_of_all(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _part(whole: dict[str, Any], shards: range, rows: slice, n_ranks: int) -> dict[str, Any]:
    """Makes a rank's state of one process's."""
    part, collector = dict(whole), dict(whole["collector"])
    collector["frames"] //= n_ranks
    if collector.get("shards") is not None:
        collector["shards"] = [collector["shards"][i] for i in shards]
    part["collector"] = collector
    part["tracker"] = {name: x[rows] for name, x in whole["tracker"].items()}
    part["learners"] = [_learner_part(learner, rows) for learner in whole["learners"]]
    return part


def _learner_part(learner: dict[str, Any], rows: slice) -> dict[str, Any]:
    extra = learner.get("_extra_state", {})
    kept = {
        name: {key: x[rows] for key, x in extra[name].items()} for name in _BY_ENV if name in extra
    }
    return learner | {"_extra_state": extra | kept} if kept else learner
