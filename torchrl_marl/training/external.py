"""Training on external simulators: what their clients declared, and who collects from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tensordict.nn import TensorDictModuleBase
from torchrl.envs import EnvBase, TransformedEnv

from torchrl_marl.collectors.external import ExternalCollector
from torchrl_marl.envs.external.env import ExternalEnv
from torchrl_marl.training.config import TrainConfig

__all__ = ["external_collector", "with_declared"]


def with_declared(config: TrainConfig, env: EnvBase) -> TrainConfig:
    """Returns the settings with the agents that the first client declared.

    Args:
        config (TrainConfig): the run's.
        env (EnvBase): its environment.
    """
    base = _base_of(env)
    if not isinstance(base, ExternalEnv):
        return config
    kwargs = {**config.env.kwargs, **base.declared.settings()}
    return dataclasses.replace(config, env=dataclasses.replace(config.env, kwargs=kwargs))


def external_collector(
    config: TrainConfig,
    env: EnvBase,
    policy: TensorDictModuleBase,
    remembers: bool,
    asked: Callable[[], bool],
) -> ExternalCollector:
    """Returns the collector of a run on external simulators.

    Args:
        config (TrainConfig): the run's.
        env (EnvBase): its environment.
        policy (TensorDictModuleBase): who acts.
        remembers (bool): networks read what they remember, or where episodes begin.
        asked (callable): whether waiting for a batch should end.
    """
    base = _base_of(env)
    assert isinstance(base, ExternalEnv)
    return ExternalCollector(
        base,
        policy,
        frames_per_batch=config.frames_per_batch,
        total_frames=config.total_frames,
        remembers=remembers,
        asked=asked,
    )


def _base_of(env: EnvBase) -> EnvBase:
    while isinstance(env, TransformedEnv):
        env = env.base_env
    return env
