"""Runs in which several processes (ranks) train the same networks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from torchrl_marl.errors import ConfigError
from torchrl_marl.learners.capabilities import RANKS
from torchrl_marl.runtime.ranks import SingleProcess
from torchrl_marl.settings import flatten, shown
from torchrl_marl.training.config import TrainConfig
from torchrl_marl.version import __version__

__all__ = ["check_ranks", "gather_state", "refuse_disagreement", "state_of_rank", "with_shards"]


def with_shards(config: TrainConfig, n_ranks: int) -> TrainConfig:
    """Returns the settings with one shard per rank, unless the number of shards is already set."""
    if config.distributed.enabled:
        return config
    one_each = dataclasses.replace(config.distributed, collectors=n_ranks)
    return dataclasses.replace(config, distributed=one_each)


def check_ranks(config: TrainConfig, n_ranks: int, *, own_env: bool = False) -> None:
    """Refuses settings that do not work with several ranks.

    Args:
        config (TrainConfig): config of the run, with shards.
        n_ranks (int): number of ranks.
        own_env (bool): whether the caller passes an environment.

    Raises:
        ConfigError: a setting does not work; the message names it and the fix.
    """
    if own_env:
        raise ConfigError(
            f"an environment object is given, but each of {n_ranks} ranks builds its own; "
            "name an environment (env.name, or env.library=module:Class), or start one process."
        )
    RANKS.check(config)
    number = config.distributed.collectors or 0
    if number % n_ranks:
        raise ConfigError(
            f"distributed.collectors is {number}, expected a multiple of the {n_ranks} processes "
            "that torchrun has started; use "
            f"distributed.collectors={-(-number // n_ranks) * n_ranks}, or start another number."
        )
    config.check_features()
    config.check_learners()


def refuse_disagreement(ranks: SingleProcess, config: TrainConfig) -> None:
    """Refuses to run if ranks have different versions or settings.

    Raises:
        ConfigError: ranks differ; the message names the first difference.
    """
    own = {"torchrl_marl": __version__, "torch": torch.__version__}
    own |= flatten(dataclasses.asdict(config))
    found = ranks.all_gather({name: shown(value) for name, value in own.items()})
    for rank, theirs in enumerate(found):
        name = _find_difference(found[0], theirs)
        if name is not None:
            raise ConfigError(
                f"ranks disagree: {name} is {found[0].get(name, 'missing')} on rank 0 and "
                f"{theirs.get(name, 'missing')} on rank {rank}, expected the same; start all "
                "ranks with the same command, in the same Python environment."
            )


def _find_difference(one: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    return next((key for key in {**one, **other} if one.get(key) != other.get(key)), None)


# State that a learner keeps for each env.
_ENTRIES_PER_ENV = ("critic_states", "born")


def gather_state(state: dict[str, Any], ranks: SingleProcess) -> dict[str, Any]:
    """Combines the ranks' states on the first rank, in the format of a run in a single process.

    Args:
        state (dict): state of this rank; ranks other than the first return it unchanged.
        ranks (SingleProcess): the ranks of the run.
    """
    parts = ranks.gather(_env_entries(state))
    return state if parts is None else _combine_states(state, parts)


def state_of_rank(
    state: dict[str, Any], ranks: SingleProcess, shards: range, n_envs: int
) -> dict[str, Any]:
    """Returns this rank's part of a state from :func:`gather_state`.

    Args:
        state (dict): state of the run.
        ranks (SingleProcess): the ranks of the run.
        shards (range): shards of this rank.
        n_envs (int): number of envs per rank.
    """
    rows = slice(ranks.rank * n_envs, (ranks.rank + 1) * n_envs)
    return _slice_state(state, shards, rows, ranks.size)


def _env_entries(state: dict[str, Any]) -> dict[str, Any]:
    """Returns the entries of a rank's state that belong to its environments."""
    extra = [learner.get("_extra_state", {}) for learner in state["learners"]]
    kept = [{name: own[name] for name in _ENTRIES_PER_ENV if name in own} for own in extra]
    found = {"collector": state["collector"], "tracker": state["tracker"], "learners": kept}
    # Without this, unpickling would allocate the tensors on the sending rank's GPU.
    return pytree.tree_map_only(Tensor, Tensor.cpu, found)


def _combine_states(own: dict[str, Any], parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Combines the first rank's state with the entries of all ranks' environments."""
    whole, collectors = dict(own), [part["collector"] for part in parts]
    whole["collector"] = dict(collectors[0], frames=sum(one["frames"] for one in collectors))
    if collectors[0].get("shards") is not None:
        whole["collector"]["shards"] = [x for one in collectors for x in one["shards"]]
    whole["tracker"] = _concatenate([part["tracker"] for part in parts])
    for learner, *kept in zip(whole["learners"], *(part["learners"] for part in parts)):
        for name in kept[0]:
            learner["_extra_state"][name] = _concatenate([own[name] for own in kept])
    return whole


def _concatenate(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _slice_state(whole: dict[str, Any], shards: range, rows: slice, n_ranks: int) -> dict[str, Any]:
    """Returns a rank's part of a state that has the format of a run in a single process."""
    part, collector = dict(whole), dict(whole["collector"])
    collector["frames"] //= n_ranks
    if collector.get("shards") is not None:
        collector["shards"] = [collector["shards"][i] for i in shards]
    part["collector"] = collector
    part["tracker"] = {name: x[rows] for name, x in whole["tracker"].items()}
    part["learners"] = [_slice_learner(learner, rows) for learner in whole["learners"]]
    return part


def _slice_learner(learner: dict[str, Any], rows: slice) -> dict[str, Any]:
    extra = learner.get("_extra_state", {})
    kept = {
        name: {key: x[rows] for key, x in extra[name].items()}
        for name in _ENTRIES_PER_ENV
        if name in extra
    }
    return learner | {"_extra_state": extra | kept} if kept else learner
