"""Settings that nothing reads, such as the workers of a world that has none."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torchrl_marl.config_rules import group_config
from torchrl_marl.errors import ConfigError
from torchrl_marl.learners.config import OnPolicyConfig
from torchrl_marl.schema import flatten, settings_of, shown, unfold
from torchrl_marl.training.config import TrainConfig

__all__ = ["refuse_unread", "unread"]


@dataclass(frozen=True)
class _Where:
    """Where a setting is read: another one has one of these values, or (``but``) none of them."""

    key: str
    values: tuple[Any, ...]
    but: bool = False

    def holds(self, settings: Any) -> bool:
        return (attrgetter(self.key)(settings) in self.values) is not self.but

    def words(self, prefix: str) -> str:
        values = " or ".join(shown(value).strip("'") for value in self.values)
        return f"{prefix}{self.key} is {'not ' if self.but else ''}{values}"


_CLASS = "module:Class"
"""Any library of one's own: its worlds take what their constructor names."""


def _libraries(*names: str) -> _Where:
    return _Where("env.library", (*names, _CLASS))


_ENV = {
    "env.info": (_libraries("vmas", "pettingzoo", "jaxmarl"),),
    "env.group_map": (_libraries("vmas", "pettingzoo", "jaxmarl", "isaaclab"),),
    "env.workers": (_libraries("pettingzoo"),),
    "env.worker_timeout": (_libraries("pettingzoo"), _Where("env.workers", (0,), but=True)),
    "env.restart_workers": (_libraries("pettingzoo"),),
}
_MAPPO = _Where("algorithm", ("mappo",))
_NOT_RANDOM = _Where("algorithm", ("random",), but=True)
_LEARNER: dict[str, tuple[_Where, ...]] = {
    "central_input": (_MAPPO,),
    "critic.architecture": (_MAPPO,),
    "critic.value_per": (_MAPPO,),
    "huber_delta": (_Where("loss_critic_type", ("huber",)),),
    "entropy_schedule": (_Where("entropy_coeff", (0,), but=True),),
    "value_norm_decay": (_Where("value_norm", (True,)),),
}
for _network in ("actor", "critic"):
    _shares = f"{_network}.sharing"
    _LEARNER |= {
        f"{_network}.sharing_index": (_Where(_shares, ("index", "clusters")),),
        f"{_network}.agent_id": (_Where(_shares, ("agent_id",)),),
        f"{_network}.agent_id_size": (
            _Where(_shares, ("agent_id",)),
            _Where(f"{_network}.agent_id", ("embedding",)),
        ),
        f"{_network}.mask_ratio": (_Where(_shares, ("masks",)),),
        f"{_network}.mask_seed": (_Where(_shares, ("masks",)),),
        f"{_network}.n_clusters": (_Where(_shares, ("clusters",)),),
        f"{_network}.clustering_frames": (_Where(_shares, ("clusters",)),),
    }


def unread(config: TrainConfig) -> dict[str, str]:
    """Settings that differ from their defaults although nothing reads them.

    What stands under ``learner`` may be read by any group; what a group takes over from there is
    no setting of the group's.

    Returns:
        dict: dotted key -> the setting in words, and where it would be read.

    Examples:
        >>> from torchrl_marl.envs.config import EnvConfig
        >>> unread(TrainConfig(env=EnvConfig(workers=2)))
        {'env.workers': 'env.workers is 2, which is read only where env.library is pettingzoo \
or module:Class'}
    """
    if ":" in config.env.library:
        own = dataclasses.replace(config.env, library=_CLASS)
        config = dataclasses.replace(config, env=own)
    found = _idle(config, _ENV, "")
    learner = _idle_of_learner(config.learner, "learner.")
    for name, given in config.groups.items():
        idle = _idle_of_learner(group_config(config, name), prefix := f"groups.{name}.")
        found |= {
            prefix + key: idle[prefix + key]
            for key in flatten(unfold(given or {}))
            if prefix + key in idle
        }
        learner = {
            key: text
            for key, text in learner.items()
            if prefix + key.removeprefix("learner.") in idle
        }
    return found | learner


def refuse_unread(config: TrainConfig, *, own_env: bool = False) -> None:
    """Refuses settings that do nothing.

    Args:
        config (TrainConfig): what is to be run.
        own_env (bool): the caller brings an environment, so ``env`` is not looked at.

    Raises:
        ConfigError: naming the first of them, and where it would be read.
    """
    for key, text in unread(config).items():
        if not (own_env and key.startswith("env.")):
            raise ConfigError(f"{text}; leave {key} out.")


def _idle_of_learner(learner: OnPolicyConfig, prefix: str) -> dict[str, str]:
    if learner.algorithm != "random":
        return _idle(learner, _LEARNER, prefix)
    keys = settings_of(OnPolicyConfig).keys() - {"algorithm"}
    return _idle(learner, dict.fromkeys(sorted(keys), (_NOT_RANDOM,)), prefix)


def _idle(settings: Any, table: Mapping[str, tuple[_Where, ...]], prefix: str) -> dict[str, str]:
    defaults, idle = type(settings)(), {}
    for key, needed in table.items():
        value = attrgetter(key)(settings)
        if value != attrgetter(key)(defaults) and not all(w.holds(settings) for w in needed):
            where = " and ".join(where.words(prefix) for where in needed)
            idle[prefix + key] = (
                f"{prefix}{key} is {shown(value)}, which is read only where {where}"
            )
    return idle
