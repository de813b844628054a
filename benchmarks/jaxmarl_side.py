"""Training and evaluation by JaxMARL's own scripts, for MPE, SMAX and Overcooked.

It runs in JaxMARL's environment, so it needs nothing of ours.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
import types
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import yaml
from jaxmarl.wrappers.baselines import CTRolloutManager

__all__ = [
    "Policy",
    "arguments",
    "play",
    "recurrent_policy",
    "script",
    "settings_of",
    "train",
    "write",
]

PACKAGES = ("jaxmarl", "jax", "flax", "distrax", "optax")
# Maps hidden states, observations and ends of the step before, ``[N, B, ...]``, to the next hidden
# states and actions. With masks, the legal actions come last.
Policy = Callable[..., tuple[Any, Any]]


# ------------------------------------------------------------------------------------- training


def arguments(
    description: str | None,
    algorithms: Mapping[str, Any],
    env_option: str,
    episodes: str,
    env_help: str | None = None,
) -> argparse.Namespace:
    """Reads the command line.

    Args:
        description (str, optional): the script's docstring.
        algorithms (mapping): what JaxMARL can train.
        env_option, episodes (str): options for the environment's name and the number of episodes.
        env_help (str, optional): what the former means.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", type=Path, required=True, help="checkout of JaxMARL")
    parser.add_argument("--algorithm", choices=list(algorithms), required=True)
    parser.add_argument(env_option, required=True, help=env_help)
    for name in ("--seed", "--frames", episodes):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def settings_of(file: str, args: argparse.Namespace, **env_settings: Any) -> dict[str, Any]:
    """Returns JaxMARL's settings, with what is changed here.

    Args:
        file (str): of the settings, in JaxMARL's folder ``baselines``.
        args (Namespace): from :func:`arguments`.
        **env_settings: setting that names the environment.
    """
    read = yaml.safe_load((args.source / "baselines" / file).read_text(encoding="utf-8"))
    settings = {name: _number(value) for name, value in read.items()}
    changed = {**env_settings, "SEED": args.seed, "TOTAL_TIMESTEPS": args.frames}
    return {**settings, **changed, "WANDB_MODE": "disabled", "TEST_DURING_TRAINING": False}


def _number(value: Any) -> Any:
    """Returns a number that YAML 1.1 reads as text, such as ``5e-4``."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def script(file: str, args: argparse.Namespace) -> types.ModuleType:
    """Imports a script of JaxMARL without the tools that only its ``main`` needs."""
    path = args.source / "baselines" / file
    for name in ("hydra", "omegaconf", "wandb"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["hydra"].main = lambda **options: lambda function: function
    sys.modules["omegaconf"].OmegaConf = None
    sys.modules["wandb"].log = lambda *_args, **_kwargs: None
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(module: types.ModuleType, settings: dict[str, Any], env: Any) -> dict[str, Any]:
    """Trains; returns the script's last state, and the seconds of compiling and of training."""
    script_settings = {**settings}  # the script adds to it
    function = (
        module.make_train(script_settings, env)
        if "QNetwork" in vars(module)
        else module.make_train(script_settings)
    )
    key, began = jax.random.PRNGKey(settings["SEED"]), time.perf_counter()
    run = jax.jit(function).lower(key).compile()
    compiled = time.perf_counter()
    state = jax.block_until_ready(run(key))["runner_state"]
    ended = time.perf_counter()
    return {"state": state, "compiling": compiled - began, "training": ended - compiled}


# -------------------------------------------------------------------------------------- playing


def recurrent_policy(
    module: types.ModuleType, settings: dict[str, Any], state: Any, n_actions: int
) -> tuple[Policy, int]:
    """Returns a recurrent actor's likeliest actions, and the width of its hidden state.

    Args:
        module, settings, state: a script, its settings and its last state.
        n_actions (int): number of actions.
    """
    trained = state[0][0]  # of actor and critic, or a pair of both
    trained = trained if hasattr(trained, "params") else trained[0]
    kind = module.ActorRNN if "ActorRNN" in vars(module) else module.ActorCriticRNN
    network = kind(n_actions, config=settings)

    def act(hidden: Any, observation: Any, done: Any, *legal: Any) -> tuple[Any, Any]:
        shape = done.shape
        hidden, observation, done, *legal = (
            x.reshape(-1, *x.shape[2:]) for x in (hidden, observation, done, *legal)
        )
        hidden, pi, *_ = network.apply(
            trained.params, hidden, (observation[None], done[None], *legal)
        )
        return hidden.reshape(*shape, -1), jnp.argmax(pi.logits[0], -1).reshape(shape)

    return act, settings["GRU_HIDDEN_DIM"]


def play(
    env: Any,
    policy: Policy,
    width: int,
    episodes: int,
    steps: int,
    *,
    with_ids: bool,
    masked: bool = False,
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Returns rewards, ends and info of steps of an environment, each ``[steps, episodes, ...]``.

    Args:
        env (JaxMARLWrapper): environment that logs.
        policy (callable): a policy.
        width (int): of a hidden state.
        episodes (int): number of copies.
        steps (int): of each copy.

    Keyword Args:
        with_ids (bool): whether observations end with the agent's index, as for Q-networks.
        masked (bool): whether the policy gets the legal actions.
    """
    manager = CTRolloutManager(env, batch_size=episodes, preprocess_obs=with_ids)

    def stacked(of_agents: dict[str, Any]) -> Any:
        return jnp.stack([of_agents[agent] for agent in env.agents])

    def step(carry: Any, key: Any) -> tuple[Any, Any]:
        hidden, observations, done, state = carry
        legal = [stacked(manager.get_valid_actions(state.env_state))] if masked else []
        hidden, actions = policy(hidden, observations, done, *legal)
        by_agent = dict(zip(env.agents, actions))
        observations, state, reward, done, info = manager.batch_step(key, state, by_agent)
        return (hidden, stacked(observations), stacked(done), state), (reward, done, info)

    keys = jax.random.split(jax.random.PRNGKey(12345), steps + 1)
    observations, state = manager.batch_reset(keys[0])
    not_done = jnp.zeros((env.num_agents, episodes), dtype=bool)
    hidden = jnp.zeros((env.num_agents, episodes, width))
    return jax.lax.scan(step, (hidden, stacked(observations), not_done, state), keys[1:])[1]


def write(measured: dict[str, float], found: dict[str, Any], out: Path) -> None:
    """Writes a result.

    Args:
        measured (dict): what the episodes gave.
        found (dict): seconds and settings of the training.
        out (Path): file.
    """
    result = {**measured, **found, "load": os.getloadavg()[0]}
    result["versions"] = {name: version(name) for name in PACKAGES}
    out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
