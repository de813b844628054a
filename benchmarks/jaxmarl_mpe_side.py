"""One training by JaxMARL in a particle environment: a process of jaxmarl_mpe.py.

JaxMARL's script trains with the settings of its file for MPE. Changed are the environment, the seed
and the frames; evaluations in between are left out. Its policy then plays episodes by the
likeliest actions.
"""

from __future__ import annotations

import types
from typing import Any

import jax.numpy as jnp
import jaxmarl_side
from jaxmarl import make
from jaxmarl.wrappers.baselines import LogWrapper
from jaxmarl_side import Policy

# Algorithm -> JaxMARL's script, and its settings for MPE.
FILES = {
    "ippo_ff": ("IPPO/ippo_ff_mpe.py", "IPPO/config/ippo_ff_mpe.yaml"),
    "ippo_rnn": ("IPPO/ippo_rnn_mpe.py", "IPPO/config/ippo_rnn_mpe.yaml"),
    "mappo_rnn": ("MAPPO/mappo_rnn_mpe.py", "MAPPO/config/mappo_homogenous_rnn_mpe.yaml"),
    "pqn_vdn_ff": ("QLearning/pqn_vdn_ff.py", "QLearning/config/alg/pqn_vdn_ff_mpe.yaml"),
}
STEPS = 25  # of an episode that count; JaxMARL ends it one step later


def policy_of(
    module: types.ModuleType, settings: dict[str, Any], state: Any, n_actions: int
) -> tuple[Policy, int]:
    """Returns the policy with the likeliest actions, and the width of its hidden state."""
    if "QNetwork" in vars(module):
        norm, dueling = settings["NORM_TYPE"], settings.get("DUELING", False)
        sizes = {"hidden_size": settings["HIDDEN_SIZE"], "num_layers": settings["NUM_LAYERS"]}
        q_network = module.QNetwork(action_dim=n_actions, norm_type=norm, dueling=dueling, **sizes)
        variables = {"params": state[0].params, "batch_stats": state[0].batch_stats}
        return lambda h, observation, done: (
            h,
            jnp.argmax(q_network.apply(variables, observation), -1),
        ), 1
    if "ActorCritic" in vars(module):
        network = module.ActorCritic(n_actions, settings["ACTIVATION"])
        logits_of = lambda observation: network.apply(state[0].params, observation)[0].logits  # noqa: E731
        return lambda h, observation, done: (h, jnp.argmax(logits_of(observation), -1)), 1
    return jaxmarl_side.recurrent_policy(module, settings, state, n_actions)


def returns(env: Any, policy: Policy, width: int, episodes: int, with_ids: bool) -> float:
    """Returns an agent's mean return over the first steps of episodes.

    Args:
        env, policy, width, episodes, with_ids: as in :func:`jaxmarl_side.play`.
    """
    rewards, ends, _ = jaxmarl_side.play(env, policy, width, episodes, STEPS, with_ids=with_ids)
    if any(bool(ends[agent][:-1].any()) for agent in env.agents):
        raise SystemExit(f"an episode has fewer than {STEPS} steps.")
    return float(jnp.stack([rewards[agent] for agent in env.agents], 1).sum(0).mean())


def main() -> None:
    """Trains, plays, and writes the result."""
    env_help = "environment, such as MPE_simple_spread_v3"
    args = jaxmarl_side.arguments(__doc__, FILES, "--task", "--episodes", env_help)
    program, file = FILES[args.algorithm]
    settings = {"ENV_KWARGS": {}} | jaxmarl_side.settings_of(file, args, ENV_NAME=args.task)
    module = jaxmarl_side.script(program, args)
    env = LogWrapper(make(args.task))
    found = jaxmarl_side.train(module, settings, env)
    n_actions = env.action_space(env.agents[0]).n
    policy, width = policy_of(module, settings, found.pop("state"), n_actions)
    earned = returns(env, policy, width, args.episodes, args.algorithm.startswith("pqn"))
    jaxmarl_side.write({"return": earned}, {**found, "settings": settings}, args.out)


if __name__ == "__main__":
    main()
