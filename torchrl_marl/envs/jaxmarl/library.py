"""Description of JaxMARL, which can be read without importing JaxMARL."""

from __future__ import annotations

from dataclasses import dataclass

from torchrl_marl.envs.libraries import Library
from torchrl_marl.settings import Count

__all__ = ["LIBRARY", "JaxMarlArguments"]


_SOME = (
    "HeuristicEnemySMAX, MPE_simple_spread_v3, overcooked, hanabi and the others "
    "of jaxmarl.registered_envs"
)


@dataclass(frozen=True)
class JaxMarlArguments:
    """Arguments that the adapter itself takes; others are arguments of the environment."""

    categorical_actions: bool = True
    """Discrete actions as an index; otherwise one-hot."""
    shaped_reward: float = 0.0
    """Initial weight of the environment's shaped reward. Training only."""
    shaped_reward_steps: Count | None = None
    """Env steps over which this weight decays linearly to 0. null: no decay."""


LIBRARY = Library(
    "JaxMARL environments, one jitted call per step",
    "torchrl_marl.envs.jaxmarl:JaxMarlEnv",
    settings=("num_envs", "max_steps", "continuous_actions", "info", "state", "group_map"),
    of_objects=("num_envs", "max_steps", "info", "state", "group_map"),
    arguments="torchrl_marl.envs.jaxmarl.library:JaxMarlArguments",
    environments=lambda: [_SOME],
    unlisted=True,
    owns=lambda env: callable(getattr(env, "step_env", None)),
    packages=("jax", "jaxmarl"),
)
