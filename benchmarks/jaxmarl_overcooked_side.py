"""One training by JaxMARL in Overcooked: a process of jaxmarl_overcooked.py.

JaxMARL's script trains with the settings of its file for Overcooked. Changed are the layout, the
seed and the frames; evaluations in between are left out. Its policy then plays whole episodes
without the shaped reward: IPPO with sampled actions, as in training, PQN with the likeliest ones.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jaxmarl_side
from jaxmarl import make
from jaxmarl.environments.overcooked import overcooked_layouts
from jaxmarl.wrappers.baselines import LogWrapper

# Algorithm -> JaxMARL's script, and its settings for Overcooked. ippo_cnn_overcooked.py does not
# run with jaxmarl 0.2.0: it calls action_space() without an agent.
FILES = {
    "ippo_ff": ("IPPO/ippo_ff_overcooked.py", "IPPO/config/ippo_ff_overcooked.yaml"),
    "pqn_vdn_cnn": (
        "QLearning/pqn_vdn_cnn_overcooked.py",
        "QLearning/config/alg/pqn_vdn_cnn_overcooked.yaml",
    ),
}
# Maps a random key and the cooks' observations, ``[N, height, width, channels]``, to actions.
Policy = Callable[[Any, Any], Any]


def policy_of(
    module: types.ModuleType, settings: dict[str, Any], trained: Any, n_actions: int
) -> Policy:
    """Returns the policy with which episodes are played."""
    if "QNetwork" in vars(module):
        norm = {"norm_type": settings["NORM_TYPE"], "norm_input": settings["NORM_INPUT"]}
        sizes = {"hidden_size": settings["HIDDEN_SIZE"], "num_layers": settings["NUM_LAYERS"]}
        q_network = module.QNetwork(action_dim=n_actions, **norm, **sizes)
        variables = {"params": trained.params, "batch_stats": trained.batch_stats}
        return lambda key, seen: jnp.argmax(q_network.apply(variables, seen), -1)
    network = module.ActorCritic(n_actions, activation=settings["ACTIVATION"])

    def act(key: Any, seen: Any) -> Any:
        return network.apply(trained.params, seen.reshape(len(seen), -1))[0].sample(seed=key)

    return act


def returns(env: Any, policy: Policy, episodes: int) -> float:
    """Returns the mean return of whole episodes, which is the same for both cooks."""

    def step(carry: Any, key: Any) -> tuple[Any, Any]:
        observations, state = carry
        act_key, step_key = jax.random.split(key)
        actions = policy(act_key, jnp.stack([observations[agent] for agent in env.agents]))
        by_agent = dict(zip(env.agents, actions))
        observations, state, reward, done, _ = env.step(step_key, state, by_agent)
        return (observations, state), (reward[env.agents[0]], done["__all__"])

    def play(key: Any) -> Any:
        first, *keys = jax.random.split(key, env.max_steps + 1)
        reward, done = jax.lax.scan(step, env.reset(first), jnp.stack(keys))[1]
        return reward.sum(), done.sum()

    found, ends = jax.jit(jax.vmap(play))(jax.random.split(jax.random.PRNGKey(12345), episodes))
    if not bool((ends == 1).all()):
        raise SystemExit("an episode does not end exactly at the environment's max_steps.")
    return float(found.mean())


def main() -> None:
    """Trains, plays, and writes the result."""
    args = jaxmarl_side.arguments(__doc__, FILES, "--layout", "--episodes")
    program, file = FILES[args.algorithm]
    settings = jaxmarl_side.settings_of(file, args, ENV_KWARGS={"layout": args.layout})
    module = jaxmarl_side.script(program, args)
    layout = {"layout": overcooked_layouts[args.layout]}
    env = make("overcooked", **layout)
    found = jaxmarl_side.train(module, {**settings, "ENV_KWARGS": layout}, LogWrapper(env))
    state, n_actions = found.pop("state"), env.action_space(env.agents[0]).n
    policy = policy_of(module, settings, state[0], n_actions)
    earned = returns(env, policy, args.episodes)
    jaxmarl_side.write({"return": earned}, {**found, "settings": settings}, args.out)


if __name__ == "__main__":
    main()
