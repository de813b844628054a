"""One training by JaxMARL in a particle environment: a process of jaxmarl_mpe.py.

JaxMARL's script trains with the settings of its file for MPE. Changed are the environment, the seed
and the frames; evaluations in between are left out. Its policy then plays episodes by the
likeliest actions.
"""

from __future__ import annotations

import argparse
import json
import os
import types
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import yaml
from jaxmarl import make
from jaxmarl.wrappers.baselines import CTRolloutManager, LogWrapper
from jaxmarl_smax_side import PACKAGES, script, train

# Algorithm -> JaxMARL's script, and its settings for MPE.
FILES = {
    "ippo_ff": ("IPPO/ippo_ff_mpe.py", "IPPO/config/ippo_ff_mpe.yaml"),
    "ippo_rnn": ("IPPO/ippo_rnn_mpe.py", "IPPO/config/ippo_rnn_mpe.yaml"),
    "mappo_rnn": ("MAPPO/mappo_rnn_mpe.py", "MAPPO/config/mappo_homogenous_rnn_mpe.yaml"),
    "pqn_vdn_ff": ("QLearning/pqn_vdn_ff.py", "QLearning/config/alg/pqn_vdn_ff_mpe.yaml"),
}
STEPS = 25  # of an episode that count; JaxMARL ends it one step later
# Maps hidden states, observations and ends of the step before, ``[N, B, ...]``, to the next hidden
# states and actions.
Policy = Callable[[Any, Any, Any], tuple[Any, Any]]


def number(value: Any) -> Any:
    """Returns a number that YAML 1.1 reads as text, such as ``5e-4``."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """Returns JaxMARL's settings, with what is changed here."""
    path = args.source / "baselines" / FILES[args.algorithm][1]
    read = yaml.safe_load(path.read_text(encoding="utf-8"))
    settings = {"ENV_KWARGS": {}} | {name: number(value) for name, value in read.items()}
    changed = {"ENV_NAME": args.task, "SEED": args.seed, "TOTAL_TIMESTEPS": args.frames}
    return {**settings, **changed, "WANDB_MODE": "disabled", "TEST_DURING_TRAINING": False}


def policy_of(
    module: types.ModuleType, settings: dict[str, Any], state: Any, n_actions: int
) -> tuple[Policy, int]:
    """Returns the policy with the likeliest actions, and the width of its hidden state."""
    if "QNetwork" in vars(module):
        norm, dueling = settings["NORM_TYPE"], settings.get("DUELING", False)
        sizes = {"hidden_size": settings["HIDDEN_SIZE"], "num_layers": settings["NUM_LAYERS"]}
        q_network = module.QNetwork(action_dim=n_actions, norm_type=norm, dueling=dueling, **sizes)
        held = {"params": state[0].params, "batch_stats": state[0].batch_stats}
        return lambda h, seen, done: (h, jnp.argmax(q_network.apply(held, seen), -1)), 1
    if "ActorCritic" in vars(module):
        network = module.ActorCritic(n_actions, settings["ACTIVATION"])
        of = lambda seen: network.apply(state[0].params, seen)[0].logits  # noqa: E731
        return lambda h, seen, done: (h, jnp.argmax(of(seen), -1)), 1
    trained = state[0][0]  # of actor and critic, or a pair of both
    trained = trained if hasattr(trained, "params") else trained[0]
    kind = module.ActorRNN if "ActorRNN" in vars(module) else module.ActorCriticRNN
    recurrent = kind(n_actions, config=settings)

    def act(hidden: Any, seen: Any, done: Any) -> tuple[Any, Any]:
        shape = done.shape
        flat = [x.reshape(-1, *x.shape[2:]) for x in (hidden, seen, done)]
        hidden, pi, *_ = recurrent.apply(trained.params, flat[0], (flat[1][None], flat[2][None]))
        return hidden.reshape(*shape, -1), jnp.argmax(pi.logits[0], -1).reshape(shape)

    return act, settings["GRU_HIDDEN_DIM"]


def returns(env: Any, policy: Policy, width: int, episodes: int, with_ids: bool) -> float:
    """Returns an agent's mean return over the first steps of episodes.

    Args:
        env (LogWrapper): environment.
        policy (callable): from :func:`policy_of`.
        width (int): of a hidden state.
        episodes (int): number of copies.
        with_ids (bool): whether observations end with the agent's index, as for Q-networks.
    """
    manager = CTRolloutManager(env, batch_size=episodes, preprocess_obs=with_ids)

    def stacked(of_agents: dict[str, Any]) -> Any:
        return jnp.stack([of_agents[agent] for agent in env.agents])

    def step(carry: Any, key: Any) -> tuple[Any, Any]:
        hidden, seen, done, state = carry
        hidden, actions = policy(hidden, seen, done)
        by_agent = dict(zip(env.agents, actions))
        seen, state, reward, done, _ = manager.batch_step(key, state, by_agent)
        return (hidden, stacked(seen), stacked(done), state), (stacked(reward), stacked(done))

    keys = jax.random.split(jax.random.PRNGKey(12345), STEPS + 1)
    seen, state = manager.batch_reset(keys[0])
    none = jnp.zeros((env.num_agents, episodes), dtype=bool)
    hidden = jnp.zeros((env.num_agents, episodes, width))
    _, (rewards, ends) = jax.lax.scan(step, (hidden, stacked(seen), none, state), keys[1:])
    if bool(ends[:-1].any()):
        raise SystemExit(f"an episode has fewer than {STEPS} steps.")
    return float(rewards.sum(0).mean())


def main() -> None:
    """Trains, plays, and writes the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", type=Path, required=True, help="checkout of JaxMARL")
    parser.add_argument("--algorithm", choices=list(FILES), required=True)
    parser.add_argument("--task", required=True, help="environment, such as MPE_simple_spread_v3")
    for name in ("--seed", "--frames", "--episodes"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    settings = settings_of(args)
    module = script(args.source / "baselines" / FILES[args.algorithm][0])
    env = LogWrapper(make(args.task))
    found = train(module, settings, env)
    n_actions = env.action_space(env.agents[0]).n
    policy, width = policy_of(module, settings, found.pop("state"), n_actions)
    earned = returns(env, policy, width, args.episodes, args.algorithm.startswith("pqn"))
    result = {"return": earned, **found, "settings": settings, "load": os.getloadavg()[0]}
    result["versions"] = {name: version(name) for name in PACKAGES}
    args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
