"""One training by JaxMARL on SMAX: a process of jaxmarl_smax.py.

JaxMARL's script trains with the settings of its file for SMAX. Changed are the map, the seed, the
frames and the evaluations in between, which are left out. Its policy then plays battles to their
end, the first of each copy, by the likeliest actions.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
import types
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import yaml
from jaxmarl import make
from jaxmarl.environments.smax import map_name_to_scenario
from jaxmarl.wrappers.baselines import CTRolloutManager, SMAXLogWrapper

# Algorithm -> JaxMARL's script, and its settings for SMAX.
FILES = {
    "ippo_rnn": ("IPPO/ippo_rnn_smax.py", "IPPO/config/ippo_rnn_smax.yaml"),
    "mappo_rnn": ("MAPPO/mappo_rnn_smax.py", "MAPPO/config/mappo_homogenous_rnn_smax.yaml"),
    "pqn_vdn_rnn": ("QLearning/pqn_vdn_rnn.py", "QLearning/config/alg/pqn_vdn_rnn_smax.yaml"),
}
PACKAGES = ("jaxmarl", "jax", "flax", "distrax", "optax")
Policy = Callable[[Any, Any, Any, Any], tuple[Any, Any]]


# ------------------------------------------------------------------------------------ training


def script(path: Path) -> types.ModuleType:
    """Imports a script of JaxMARL without the tools that only its ``main`` needs."""
    for name in ("hydra", "omegaconf", "wandb"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["hydra"].main = lambda **options: lambda function: function
    sys.modules["omegaconf"].OmegaConf = None
    sys.modules["wandb"].log = lambda *given, **named: None
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """Returns JaxMARL's settings, with what is changed here."""
    path = args.source / "baselines" / FILES[args.algorithm][1]
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    changed = {"MAP_NAME": args.map, "SEED": args.seed, "TOTAL_TIMESTEPS": args.frames}
    return {**settings, **changed, "WANDB_MODE": "disabled", "TEST_DURING_TRAINING": False}


def train(module: types.ModuleType, settings: dict[str, Any], env: Any) -> dict[str, Any]:
    """Trains; returns the script's last state, and the seconds of compiling and of training."""
    own = {**settings}  # the script adds to it
    function = module.make_train(own, env) if "QNetwork" in vars(module) else module.make_train(own)
    key, began = jax.random.PRNGKey(settings["SEED"]), time.perf_counter()
    run = jax.jit(function).lower(key).compile()
    compiled = time.perf_counter()
    state = jax.block_until_ready(run(key))["runner_state"]
    ended = time.perf_counter()
    return {"state": state, "compiling": compiled - began, "training": ended - compiled}


# ------------------------------------------------------------------------------------- playing


def policy_of(
    module: types.ModuleType, settings: dict[str, Any], state: Any, n_actions: int
) -> tuple[Policy, int]:
    """Returns the policy with the likeliest actions, and the width of its hidden state.

    The policy maps hidden states, observations, ends of the step before and legal actions of all
    agents, ``[N, B, ...]``, to the next hidden states and actions.
    """
    if "QNetwork" in vars(module):
        norm = {"norm_type": settings["NORM_TYPE"], "norm_input": settings["NORM_INPUT"]}
        sizes = {"hidden_size": settings["HIDDEN_SIZE"], "num_layers": settings["NUM_LAYERS"]}
        network = module.QNetwork(action_dim=n_actions, **norm, **sizes)
        held = {"params": state[0].params, "batch_stats": state[0].batch_stats}

        def act_by_value(hidden: Any, seen: Any, done: Any, legal: Any) -> tuple[Any, Any]:
            over = jax.vmap(network.apply, in_axes=(None, 0, 0, 0, None))
            hidden, values = over(held, hidden, seen[:, None], done[:, None], False)
            return hidden, jnp.argmax(values[:, 0] - (1 - legal) * 1e10, -1)

        return act_by_value, settings["HIDDEN_SIZE"]

    trained = state[0][0]  # of actor and critic, or a pair of both
    trained = trained if hasattr(trained, "params") else trained[0]
    kind = module.ActorRNN if "ActorRNN" in vars(module) else module.ActorCriticRNN
    network = kind(n_actions, config=settings)

    def act_by_policy(hidden: Any, seen: Any, done: Any, legal: Any) -> tuple[Any, Any]:
        shape = legal.shape[:2]
        flat = [x.reshape(-1, *x.shape[2:]) for x in (hidden, seen, done, legal)]
        hidden, pi, *_ = network.apply(
            trained.params, flat[0], (flat[1][None], flat[2][None], flat[3])
        )
        return hidden.reshape(*shape, -1), jnp.argmax(pi.logits[0], -1).reshape(shape)

    return act_by_policy, settings["GRU_HIDDEN_DIM"]


def battles_won(env: Any, policy: Policy, width: int, battles: int, with_ids: bool) -> float:
    """Returns the share of battles won, of the first battle of each copy.

    Args:
        env (SMAXLogWrapper): environment.
        policy (callable): from :func:`policy_of`.
        width (int): of a hidden state.
        battles (int): number of copies.
        with_ids (bool): whether observations end with the agent's index, as for Q-networks.
    """
    manager = CTRolloutManager(env, batch_size=battles, preprocess_obs=with_ids)

    def stacked(of_agents: dict[str, Any]) -> Any:
        return jnp.stack([of_agents[agent] for agent in env.agents])

    def step(carry: Any, key: Any) -> tuple[Any, None]:
        hidden, seen, done, state, running, won = carry
        legal = stacked(manager.get_valid_actions(state.env_state))
        hidden, actions = policy(hidden, seen, done, legal)
        by_agent = dict(zip(env.agents, actions))
        seen, state, _, done, info = manager.batch_step(key, state, by_agent)
        ended = running & done["__all__"]
        won = won + ended * info["returned_won_episode"][:, 0]
        return (hidden, stacked(seen), stacked(done), state, running & ~ended, won), None

    keys = jax.random.split(jax.random.PRNGKey(12345), env.max_steps + 2)
    seen, state = manager.batch_reset(keys[0])
    none = jnp.zeros((env.num_agents, battles), dtype=bool)
    hidden = jnp.zeros((env.num_agents, battles, width))
    carry = hidden, stacked(seen), none, state, ~none[0], jnp.zeros(battles)
    carry, _ = jax.lax.scan(step, carry, keys[1:])
    if bool(carry[4].any()):
        raise SystemExit("battles did not end within the environment's max_steps.")
    return float(carry[5].mean())


def main() -> None:
    """Trains, plays, and writes the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", type=Path, required=True, help="checkout of JaxMARL")
    parser.add_argument("--algorithm", choices=list(FILES), required=True)
    parser.add_argument("--map", required=True)
    for name in ("--seed", "--frames", "--battles"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    settings = settings_of(args)
    module = script(args.source / "baselines" / FILES[args.algorithm][0])
    scenario = map_name_to_scenario(args.map)
    env = SMAXLogWrapper(make("HeuristicEnemySMAX", scenario=scenario, **settings["ENV_KWARGS"]))
    found = train(module, settings, env)
    n_actions = env.action_space(env.agents[0]).n
    policy, width = policy_of(module, settings, found.pop("state"), n_actions)
    won = battles_won(env, policy, width, args.battles, args.algorithm.startswith("pqn"))
    result = {"won": won, **found, "settings": settings, "load": os.getloadavg()[0]}
    result["versions"] = {name: version(name) for name in PACKAGES}
    args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
