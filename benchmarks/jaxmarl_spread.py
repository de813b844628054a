"""JaxMARL's MPE simple_spread with random actions or training; worker process of one_program.py.

``one_program.py`` runs it in JaxMARL's virtual environment. ``--mode step`` makes --steps steps
of --envs envs with random actions in one ``lax.scan``. ``--mode train`` makes one iteration of
IPPO in one jitted program, written like JaxMARL's baseline ``ippo_ff_mpe.py``: actor and critic of
two layers of 64 with tanh, shared by the agents; rollout in a ``lax.scan``, GAE, epochs of shuffled
minibatches, Adam with gradient norm clipping.

On a CPU the process is bound to --threads cores before JAX starts.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import foreign

GAMMA, LMBDA, CLIP, CRITIC, ENTROPY = 0.99, 0.95, 0.2, 0.5, 0.01
LR, LARGEST_NORM = 2.5e-4, 0.5
CELLS = 64


def make_stepper(env: Any, args: argparse.Namespace) -> tuple[Callable[..., Any], Any]:
    """A jitted function of a carry to the next one and results, and the first carry."""
    import jax

    n_actions = env.action_space(env.agents[0]).n

    def step(carry: Any, _: Any) -> Any:
        key, state = carry
        key, acting, stepping = jax.random.split(key, 3)
        shape = (len(env.agents), args.envs)
        random_actions = jax.random.randint(acting, shape, 0, n_actions)
        actions = dict(zip(env.agents, random_actions))
        keys = jax.random.split(stepping, args.envs)
        obs, state, reward, done, _ = jax.vmap(env.step)(keys, state, actions)
        # Results are summed up, so that the compiler must work them out.
        total = sum(x.sum() for x in (*obs.values(), *reward.values()))
        return (key, state), (total, done["__all__"].sum())

    key = jax.random.PRNGKey(0)
    _, state = jax.vmap(env.reset)(jax.random.split(key, args.envs))
    return jax.jit(lambda carry: jax.lax.scan(step, carry, None, args.steps)), (key, state)


class Transition(NamedTuple):
    """A step of all actors: agents of all envs, agent by agent."""

    obs: Any
    action: Any
    log_prob: Any
    value: Any
    reward: Any
    done: Any


def make_trainer(env: Any, args: argparse.Namespace) -> tuple[Callable[..., Any], Any]:
    """A jitted training iteration of a carry to the next one and metrics, and the first carry."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    import optax
    from flax.linen.initializers import constant, orthogonal

    agents, n_actions = env.agents, env.action_space(env.agents[0]).n
    n_actors = args.envs * len(agents)

    class Networks(nn.Module):
        @nn.compact
        def __call__(self, x):
            outputs = []
            for size, gain in ((n_actions, 0.01), (1, 1.0)):
                h = x
                for _ in range(2):
                    h = nn.tanh(nn.Dense(CELLS, kernel_init=orthogonal(2**0.5))(h))
                outputs.append(nn.Dense(size, orthogonal(gain), bias_init=constant(0.0))(h))
            return jax.nn.log_softmax(outputs[0]), outputs[1].squeeze(-1)

    networks = Networks()
    optimizer = optax.chain(optax.clip_by_global_norm(LARGEST_NORM), optax.adam(LR, eps=1e-5))

    def rows(of_agents):
        return jnp.stack([of_agents[a] for a in agents]).reshape(n_actors, -1)

    def pick(log_probs, action):
        return jnp.take_along_axis(log_probs, action[..., None], -1).squeeze(-1)

    def act_and_step(carry, _):
        params, state, obs, key = carry
        key, acting, stepping = jax.random.split(key, 3)
        log_probs, value = networks.apply(params, obs)
        action = jax.random.categorical(acting, log_probs)
        actions = dict(zip(agents, action.reshape(len(agents), args.envs)))
        keys = jax.random.split(stepping, args.envs)
        following, state, reward, done, _ = jax.vmap(env.step)(keys, state, actions)
        ends = jnp.tile(done["__all__"], len(agents))
        step = Transition(
            obs, action, pick(log_probs, action), value, rows(reward).squeeze(-1), ends
        )
        return (params, state, rows(following), key), step

    def advantage(carry, step):
        gae, following = carry
        not_done = 1 - step.done
        delta = step.reward + GAMMA * following * not_done - step.value
        gae = delta + GAMMA * LMBDA * not_done * gae
        return (gae, step.value), gae

    def loss(params, step, gae, target):
        log_probs, value = networks.apply(params, step.obs)
        clipped = step.value + (value - step.value).clip(-CLIP, CLIP)
        critic = 0.5 * jnp.maximum((value - target) ** 2, (clipped - target) ** 2).mean()
        ratio = jnp.exp(pick(log_probs, step.action) - step.log_prob)
        gae = (gae - gae.mean()) / (gae.std() + 1e-8)
        actor = -jnp.minimum(ratio * gae, ratio.clip(1 - CLIP, 1 + CLIP) * gae).mean()
        entropy = -(jnp.exp(log_probs) * log_probs).sum(-1).mean()
        return actor + CRITIC * critic - ENTROPY * entropy

    def update(carry, minibatch):
        params, opt_state = carry
        value, gradient = jax.value_and_grad(loss)(params, *minibatch)
        changes, opt_state = optimizer.update(gradient, opt_state)
        return (optax.apply_updates(params, changes), opt_state), value

    def iterate(carry):
        params, opt_state, state, obs, key = carry
        rollout = (params, state, obs, key)
        (_, state, obs, key), steps = jax.lax.scan(act_and_step, rollout, None, args.steps)
        last = networks.apply(params, obs)[1]
        start = (jnp.zeros_like(last), last)
        _, gae = jax.lax.scan(advantage, start, steps, reverse=True)
        batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (steps, gae, gae + steps.value))

        def epoch(carry, key):
            order = jax.random.permutation(key, args.steps * n_actors)
            minibatches = jax.tree.map(
                lambda x: x[order].reshape(args.minibatches, -1, *x.shape[1:]), batch
            )
            return jax.lax.scan(update, carry, minibatches)

        key, *epochs = jax.random.split(key, args.epochs + 1)
        (params, opt_state), values = jax.lax.scan(epoch, (params, opt_state), jnp.stack(epochs))
        return (params, opt_state, state, obs, key), (values.mean(), steps.reward.mean())

    key = jax.random.PRNGKey(0)
    obs, state = jax.vmap(env.reset)(jax.random.split(key, args.envs))
    params = networks.init(key, rows(obs))
    return jax.jit(iterate), (params, optimizer.init(params), state, rows(obs), key)


def parse_args() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=("step", "train"), required=True)
    parser.add_argument("--envs", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--minibatches", type=int, default=4)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


def main() -> None:
    """Works as long as it is asked."""
    channel, args = foreign.Channel(), parse_args()
    warnings.filterwarnings("ignore")
    if args.device == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
        if hasattr(os, "sched_setaffinity"):
            cores = sorted(os.sched_getaffinity(0))[: args.threads]
            os.sched_setaffinity(0, cores)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import importlib.metadata

    import jax
    import jaxmarl

    env = jaxmarl.make("MPE_simple_spread_v3")
    work, carry = {"step": make_stepper, "train": make_trainer}[args.mode](env, args)
    carry, _ = jax.block_until_ready(work(carry))
    names = ("jaxmarl", "jax", "jaxlib", "flax", "optax")
    facts = {"versions": {name: importlib.metadata.version(name) for name in names}}
    facts["versions"]["on"] = str(jax.devices()[0])
    for _ in channel.requests(facts):
        carry, _ = jax.block_until_ready(work(carry))


if __name__ == "__main__":
    main()
