"""Which values the settings may have: choices, ranges, and what must fit together."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re
from dataclasses import dataclass
from typing import Any

from torchrl_marl.capture.execution import EXECUTIONS
from torchrl_marl.envs.config import EnvConfig
from torchrl_marl.envs.own import check_own
from torchrl_marl.envs.vmas.library import check_scenario
from torchrl_marl.errors import ConfigError, MissingExtraError, nearest, quoted
from torchrl_marl.learners.config import OnPolicyConfig
from torchrl_marl.modules.config import (
    AGENT_IDS,
    ARCHITECTURES,
    SHARINGS,
    NetworkConfig,
    sharing_of,
)
from torchrl_marl.schema import flatten, merge, settings_of
from torchrl_marl.training.config import TrainConfig

__all__ = ["ALGORITHMS", "TOY_WORLDS", "check_device", "group_config", "validate"]

ALGORITHMS = {
    "mappo": "PPO for a team; the critic sees what all agents of the group see, or the state",
    "ippo": "PPO for a team; each agent's critic sees what the agent sees",
    "random": "random actions, nothing is learned: for a group that the others play against",
}
"""Name of an algorithm -> what it is."""

TOY_WORLDS = ("arena", "matrix_game", "nim", "paces", "speaker_listener", "two_step_game")
"""Worlds of ``library: toy``."""

LIBRARIES = ("vmas", "pettingzoo", "jaxmarl", "isaaclab", "toy")
_BACKENDS = ("tensorboard", "wandb", "mlflow")
_SCHEDULES = ("constant", "linear")
_ACTIVATIONS = ("tanh", "relu", "elu", "gelu", "silu")

_LEARNER_CHOICES: dict[str, tuple[str, ...]] = {
    "algorithm": tuple(ALGORITHMS),
    "central_input": ("observations", "team", "state"),
    "actor.activation": _ACTIVATIONS,
    "critic.activation": _ACTIVATIONS,
    "actor.sharing": SHARINGS,
    "critic.sharing": SHARINGS,
    "actor.agent_id": AGENT_IDS,
    "critic.agent_id": AGENT_IDS,
    "critic.architecture": ARCHITECTURES,
    "critic.value_per": ("agent", "team"),
    "bootstrap": ("team", "agent"),
    "lr_schedule": _SCHEDULES,
    "entropy_schedule": _SCHEDULES,
    "loss_critic_type": ("huber", "l2", "smooth_l1"),
    "normalize_advantage": ("pooled", "agent", "none"),
    "precision": ("float32", "tf32", "bf16"),
}


@dataclass(frozen=True)
class _Range:
    """From ``low`` to ``high``; ``above`` leaves out ``low``, ``below`` leaves out ``high``."""

    low: float
    high: float = math.inf
    above: bool = False
    below: bool = False

    def __contains__(self, value: float) -> bool:
        low = value > self.low if self.above else value >= self.low
        high = value < self.high if self.below else value <= self.high
        return bool(math.isfinite(value) and low and high)

    def __str__(self) -> str:
        if math.isinf(self.low):
            return "a finite number"
        low = f"above {self.low:g}" if self.above else f"{self.low:g} or more"
        if math.isinf(self.high):
            return low
        if self.above or self.below:
            return f"{low} and {'below' if self.below else 'at most'} {self.high:g}"
        return f"from {self.low:g} to {self.high:g}"


_POSITIVE, _COUNT, _WEIGHT = _Range(0, above=True), _Range(1), _Range(0)

_LEARNER_RANGES: dict[str, _Range] = {
    "unshare_at": _Range(0, 1),
    "gamma": _Range(0, 1),
    "lmbda": _Range(0, 1),
    "lr": _POSITIVE,
    "adam_eps": _POSITIVE,
    "max_grad_norm": _POSITIVE,
    "num_epochs": _COUNT,
    "minibatch_size": _COUNT,
    "clip_epsilon": _POSITIVE,
    "critic_coeff": _WEIGHT,
    "huber_delta": _POSITIVE,
    "entropy_coeff": _WEIGHT,
    "target_kl": _POSITIVE,
    "value_norm_decay": _Range(0, 1, below=True),
    **{
        f"{part}.{key}": allowed
        for part in ("actor", "critic")
        for key, allowed in (
            ("agent_id_size", _COUNT),
            ("mask_ratio", _Range(0, 1, below=True)),
            ("mask_seed", _Range(0, 2**32 - 1)),
            ("n_clusters", _COUNT),
            ("clustering_frames", _COUNT),
        )
    },
}

_RUN_RANGES: dict[str, _Range] = {
    "seed": _Range(0, 2**32 - 1),
    "threads": _COUNT,
    "total_frames": _COUNT,
    "stop_at_return": _Range(-math.inf),
    "frames_per_batch": _COUNT,
    "env.num_envs": _COUNT,
    "env.max_steps": _COUNT,
    "evaluation.every_frames": _COUNT,
    "evaluation.episodes": _COUNT,
    "checkpoint.every_iterations": _WEIGHT,
    "checkpoint.every_minutes": _POSITIVE,
    "checkpoint.keep": _COUNT,
}


def validate(config: TrainConfig, *, own_env: bool = False) -> None:
    """Refuses values that are out of range, unknown, or do not fit together.

    Args:
        config (TrainConfig): what is to be run.
        own_env (bool): the caller brings an environment, so ``env`` is not looked at.

    Raises:
        ConfigError: naming the setting, what was found, what was expected and the fix.
        MissingExtraError: the world or a logging backend is not installed.

    Examples:
        >>> validate(TrainConfig(device="gpu"))
        Traceback (most recent call last):
            ...
        torchrl_marl.errors.ConfigError: device is 'gpu', expected 'cpu', 'cuda' or 'cuda:1'; \
use device=cpu.
    """
    flat = flatten(dataclasses.asdict(config))
    _check_ranges(flat, _RUN_RANGES, "")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", config.device):
        raise ConfigError(
            f"device is {quoted(config.device)}, expected 'cpu', 'cuda' or 'cuda:1'; "
            "use device=cpu."
        )
    _check_choice("execution", config.execution, EXECUTIONS)
    if config.execution == "cudagraph" and not config.device.startswith("cuda"):
        raise ConfigError(
            f"execution is 'cudagraph', expected eager, compile or trace where device is "
            f"{quoted(config.device)}; use execution=compile, or device=cuda."
        )
    _check_backends(config.logging.backends)
    if not own_env:
        _check_env(config)
    if config.total_frames < config.frames_per_batch:
        raise ConfigError(
            f"total_frames is {config.total_frames}, expected at least frames_per_batch, "
            f"{config.frames_per_batch}; raise the first or lower the second."
        )
    _check_learner(config, config.learner, "learner.", own_env)
    for group in config.groups:
        _check_learner(config, group_config(config, group), f"groups.{group}.", own_env)


def group_config(config: TrainConfig, group: str) -> OnPolicyConfig:
    """The settings of a group's learner: ``learner``, overridden by ``groups``.

    Raises:
        ConfigError: an unknown key or a wrong type in ``groups``.
    """
    own = config.groups.get(group) or {}
    if not isinstance(own, dict):
        raise ConfigError(
            f"groups.{group} is {quoted(own)}, expected settings under it; "
            f"set one of them, such as groups.{group}.lr."
        )
    return merge(OnPolicyConfig, dataclasses.asdict(config.learner), own, prefix=f"groups.{group}.")


def check_device(config: TrainConfig) -> None:
    """Refuses a CUDA device that is not there; imports torch only where one is asked for.

    Raises:
        ConfigError: naming the devices that there are.
    """
    if not config.device.startswith("cuda"):
        return
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = int(config.device.partition(":")[2] or 0)
    if index >= count:
        there = ", ".join(f"cuda:{i}" for i in range(count)) or "no CUDA device"
        raise ConfigError(
            f"device is {quoted(config.device)}, but torch finds {there} here; use device=cpu."
        )


def _check_env(config: TrainConfig) -> None:
    env = config.env
    own = ":" in env.library
    if own:
        check_own(env.library)
    else:
        if env.library.endswith(".py"):
            raise ConfigError(
                f"env.library is {quoted(env.library)}, expected what makes the world behind the "
                f"file, such as env.library={env.library}:MyWorld."
            )
        _check_choice("env.library", env.library, LIBRARIES)
    if env.library == "toy":
        _check_toy(env)
    elif not own:
        states = ("observations",) if env.library == "vmas" else ("observations", "world")
        if env.state not in (None, *states):
            raise ConfigError(
                f"env.state is {quoted(env.state)}, expected {', '.join(states)} or null; "
                "use env.state=observations."
            )
    if env.library == "vmas":
        check_scenario(env.name, env.kwargs)
    if env.workers < 0 or env.worker_timeout <= 0:
        raise ConfigError(
            f"env.workers is {env.workers} and env.worker_timeout {env.worker_timeout}, expected "
            "0 or more and a number of seconds above 0."
        )
    if config.frames_per_batch % env.num_envs:
        steps = max(1, round(config.frames_per_batch / env.num_envs))
        raise ConfigError(
            f"frames_per_batch is {config.frames_per_batch}, expected a multiple of env.num_envs, "
            f"{env.num_envs}; use frames_per_batch={steps * env.num_envs}."
        )


def _check_toy(env: EnvConfig) -> None:
    if env.name not in TOY_WORLDS:
        raise ConfigError(
            f"unknown toy world {quoted(env.name)}; {nearest(env.name, TOY_WORLDS)}"
            f"choose among {', '.join(TOY_WORLDS)}."
        )
    if env.state is not None:
        raise ConfigError(
            f"env.state is {quoted(env.state)}, expected null, since toy worlds have a "
            "state of their own; use env.state=null."
        )


def _check_learner(
    config: TrainConfig, learner: OnPolicyConfig, prefix: str, own_env: bool
) -> None:
    flat = flatten(dataclasses.asdict(learner))
    for key, choices in _LEARNER_CHOICES.items():
        _check_choice(prefix + key, flat[key], choices)
    _check_ranges(flat, _LEARNER_RANGES, prefix)
    for part in ("actor", "critic"):
        widths = flat[f"{part}.num_cells"]
        if any(width < 1 for width in widths):
            raise ConfigError(
                f"{prefix}{part}.num_cells is {quoted(widths)}, expected widths of 1 or more; "
                f"use {prefix}{part}.num_cells=[64,64]."
            )
        _check_sharing(getattr(learner, part), f"{prefix}{part}.")
    _check_architecture(learner, prefix)
    _check_set_sharing(learner, prefix)
    learns = learner.algorithm != "random"
    if learns and learner.minibatch_size > config.frames_per_batch:
        raise ConfigError(
            f"{prefix}minibatch_size is {learner.minibatch_size}, expected at most "
            f"frames_per_batch, {config.frames_per_batch}; "
            f"use {prefix}minibatch_size={config.frames_per_batch}."
        )
    central = learner.algorithm == "mappo" and learner.central_input == "state"
    if central and not own_env and config.env.library == "vmas" and config.env.state is None:
        raise ConfigError(
            f"{prefix}central_input is 'state', but env.state is null and VMAS gives none; "
            "use env.state=observations."
        )


def _check_sharing(network: NetworkConfig, prefix: str) -> None:
    try:
        sharing = sharing_of(network)
    except ConfigError as error:
        raise ConfigError(f"{prefix}{error}") from None
    index = network.sharing_index
    if sharing == "index" and not index:
        raise ConfigError(
            f"{prefix}sharing is 'index', but {prefix}sharing_index is null; give the number of "
            f"each agent's network, such as {prefix}sharing_index=[0,0,1]."
        )
    if index is not None and sorted(set(index)) != list(range(len(set(index)))):
        raise ConfigError(
            f"{prefix}sharing_index is {quoted(list(index))}, expected numbers from 0 without gaps."
        )


def _check_architecture(learner: OnPolicyConfig, prefix: str) -> None:
    of_agents = learner.algorithm == "mappo" and learner.central_input != "state"
    if learner.critic.architecture != "mlp" and not of_agents:
        raise ConfigError(
            f"{prefix}critic.architecture is {learner.critic.architecture!r}, which reads the "
            f"agents' observations; use {prefix}algorithm=mappo and "
            f"{prefix}central_input=observations, or {prefix}critic.architecture=mlp."
        )
    if learner.critic.value_per == "team":
        shared = sharing_of(learner.critic) in ("group", "full")
        if learner.algorithm != "mappo" or not shared:
            raise ConfigError(
                f"{prefix}critic.value_per is 'team', which needs a central critic that no agent "
                f"has for itself; use {prefix}algorithm=mappo and {prefix}critic.sharing=group, "
                f"or {prefix}critic.value_per=agent."
            )


def _check_set_sharing(learner: OnPolicyConfig, prefix: str) -> None:
    sharing = sharing_of(learner.critic)
    if learner.critic.architecture != "mlp" and sharing not in ("group", "full"):
        raise ConfigError(
            f"{prefix}critic.sharing is {sharing!r}, but a critic of architecture "
            f"{learner.critic.architecture!r} is one network for all; "
            f"use {prefix}critic.sharing=group."
        )


def _check_backends(backends: list[str]) -> None:
    for backend in backends:
        if backend not in _BACKENDS:
            raise ConfigError(
                f"logging.backends holds {quoted(backend)}, expected any of "
                f"{', '.join(_BACKENDS)}; {nearest(backend, _BACKENDS)}"
                "use logging.backends=[tensorboard]."
            )
        if importlib.util.find_spec(backend) is None:
            raise MissingExtraError(backend, "log")


def _check_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        expected = " or ".join([", ".join(choices[:-1]), choices[-1]])
        raise ConfigError(
            f"{key} is {quoted(value)}, expected {expected}; "
            f"{nearest(value, choices)}use {key}={choices[0]}."
        )


def _check_ranges(flat: dict[str, Any], ranges: dict[str, _Range], prefix: str) -> None:
    defaults = settings_of(OnPolicyConfig if prefix else TrainConfig)
    for key, allowed in ranges.items():
        value = flat[key]
        if value is not None and value not in allowed:
            default = defaults[key].default
            use = "null" if default is None else default
            raise ConfigError(
                f"{prefix}{key} is {quoted(value)}, expected {allowed}; use {prefix}{key}={use}."
            )
