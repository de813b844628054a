"""One training by JaxMARL on SMAX: a process of jaxmarl_smax.py.

JaxMARL's script trains with the settings of its file for SMAX. Changed are the map, the seed, the
frames and the evaluations in between, which are left out. Its policy then plays battles to their
end, the first of each copy, by the likeliest actions.
"""

from __future__ import annotations

import types
from typing import Any

import jax
import jax.numpy as jnp
import jaxmarl_side
from jaxmarl import make
from jaxmarl.environments.smax import map_name_to_scenario
from jaxmarl.wrappers.baselines import SMAXLogWrapper
from jaxmarl_side import Policy

# Algorithm -> JaxMARL's script, and its settings for SMAX.
FILES = {
    "ippo_rnn": ("IPPO/ippo_rnn_smax.py", "IPPO/config/ippo_rnn_smax.yaml"),
    "mappo_rnn": ("MAPPO/mappo_rnn_smax.py", "MAPPO/config/mappo_homogenous_rnn_smax.yaml"),
    "pqn_vdn_rnn": ("QLearning/pqn_vdn_rnn.py", "QLearning/config/alg/pqn_vdn_rnn_smax.yaml"),
}


def policy_of(
    module: types.ModuleType, settings: dict[str, Any], state: Any, n_actions: int
) -> tuple[Policy, int]:
    """Returns the policy with the likeliest actions, and the width of its hidden state."""
    if "QNetwork" not in vars(module):
        return jaxmarl_side.recurrent_policy(module, settings, state, n_actions)
    norm = {"norm_type": settings["NORM_TYPE"], "norm_input": settings["NORM_INPUT"]}
    sizes = {"hidden_size": settings["HIDDEN_SIZE"], "num_layers": settings["NUM_LAYERS"]}
    network = module.QNetwork(action_dim=n_actions, **norm, **sizes)
    variables = {"params": state[0].params, "batch_stats": state[0].batch_stats}

    def act(hidden: Any, observation: Any, done: Any, legal: Any) -> tuple[Any, Any]:
        batched_apply = jax.vmap(network.apply, in_axes=(None, 0, 0, 0, None))
        hidden, values = batched_apply(
            variables, hidden, observation[:, None], done[:, None], False
        )
        return hidden, jnp.argmax(values[:, 0] - (1 - legal) * 1e10, -1)

    return act, settings["HIDDEN_SIZE"]


def battles_won(env: Any, policy: Policy, width: int, battles: int, with_ids: bool) -> float:
    """Returns the share of battles won, of the first battle of each copy.

    Args:
        env, policy, width, battles, with_ids: as in :func:`jaxmarl_side.play`.
    """
    steps = env.max_steps + 1
    _, ends, info = jaxmarl_side.play(
        env, policy, width, battles, steps, with_ids=with_ids, masked=True
    )
    ended = ends["__all__"]
    if not bool(ended.any(0).all()):
        raise SystemExit("battles did not end within the environment's max_steps.")
    first = ended & (jnp.cumsum(ended, 0) == 1)
    return float((first * info["returned_won_episode"][..., 0]).sum(0).mean())


def main() -> None:
    """Trains, plays, and writes the result."""
    args = jaxmarl_side.arguments(__doc__, FILES, "--map", "--battles")
    program, file = FILES[args.algorithm]
    settings = jaxmarl_side.settings_of(file, args, MAP_NAME=args.map)
    module = jaxmarl_side.script(program, args)
    scenario = map_name_to_scenario(args.map)
    env = SMAXLogWrapper(make("HeuristicEnemySMAX", scenario=scenario, **settings["ENV_KWARGS"]))
    found = jaxmarl_side.train(module, settings, env)
    n_actions = env.action_space(env.agents[0]).n
    policy, width = policy_of(module, settings, found.pop("state"), n_actions)
    won = battles_won(env, policy, width, args.battles, args.algorithm.startswith("pqn"))
    jaxmarl_side.write({"won": won}, {**found, "settings": settings}, args.out)


if __name__ == "__main__":
    main()
