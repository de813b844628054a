"""JaxMARL: IPPO with shared networks on MPE `simple_spread`, 327,680 steps in one program."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import jaxmarl
import optax
from jaxmarl.wrappers.baselines import MPELogWrapper

ENVS, STEPS, UPDATES, EPOCHS, MINIBATCHES = 64, 128, 40, 4, 4
LR, GAMMA, LMBDA, CLIP, ENTROPY = 1e-3, 0.99, 0.95, 0.2, 0.01
env = MPELogWrapper(jaxmarl.make("MPE_simple_spread_v3"))
ACTORS = ENVS * env.num_agents


class ActorCritic(nn.Module):
    @nn.compact
    def __call__(self, x):
        actor, critic = x, x
        for _ in range(2):
            actor, critic = nn.tanh(nn.Dense(64)(actor)), nn.tanh(nn.Dense(64)(critic))
        logits = nn.Dense(env.action_space(env.agents[0]).n)(actor)
        return jax.nn.log_softmax(logits), nn.Dense(1)(critic).squeeze(-1)


class Transition(NamedTuple):
    obs: jax.Array
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    reward: jax.Array
    done: jax.Array


def batchify(of_agents):
    return jnp.stack([of_agents[a] for a in env.agents]).reshape(ACTORS, -1)


def log_prob_of(log_probs, action):
    return jnp.take_along_axis(log_probs, action[:, None], -1).squeeze(-1)


network = ActorCritic()
optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(LR))


def env_step(carry, _):
    params, state, obs, rng = carry
    rng, rng_act, rng_step = jax.random.split(rng, 3)
    log_probs, value = network.apply(params, obs)
    action = jax.random.categorical(rng_act, log_probs)
    actions = dict(zip(env.agents, action.reshape(env.num_agents, ENVS)))
    keys = jax.random.split(rng_step, ENVS)
    next_obs, state, reward, done, info = jax.vmap(env.step)(keys, state, actions)
    reward, done = batchify(reward).squeeze(-1), jnp.tile(done["__all__"], env.num_agents)
    step = Transition(obs, action, log_prob_of(log_probs, action), value, reward, done)
    return (params, state, batchify(next_obs), rng), (step, info)


def gae_step(carry, step):
    gae, next_value = carry
    delta = step.reward + GAMMA * next_value * (1 - step.done) - step.value
    gae = delta + GAMMA * LMBDA * (1 - step.done) * gae
    return (gae, step.value), gae


def loss_fn(params, step, gae, target):
    log_probs, value = network.apply(params, step.obs)
    ratio = jnp.exp(log_prob_of(log_probs, step.action) - step.log_prob)
    gae = (gae - gae.mean()) / (gae.std() + 1e-8)
    actor = -jnp.minimum(ratio * gae, ratio.clip(1 - CLIP, 1 + CLIP) * gae).mean()
    entropy = -(jnp.exp(log_probs) * log_probs).sum(-1).mean()
    return actor + 0.5 * ((value - target) ** 2).mean() - ENTROPY * entropy


def minibatch_update(carry, minibatch):
    params, opt_state = carry
    grads = jax.grad(loss_fn)(params, *minibatch)
    changes, opt_state = optimizer.update(grads, opt_state)
    return (optax.apply_updates(params, changes), opt_state), None


def train_step(carry, _):
    params, opt_state, state, obs, rng = carry
    (_, state, obs, rng), (steps, info) = jax.lax.scan(
        env_step, (params, state, obs, rng), None, STEPS
    )
    last_value = network.apply(params, obs)[1]
    _, gae = jax.lax.scan(gae_step, (jnp.zeros(ACTORS), last_value), steps, reverse=True)
    batch = jax.tree.map(
        lambda x: x.reshape(STEPS * ACTORS, *x.shape[2:]), (steps, gae, gae + steps.value)
    )

    def epoch(carry, key):
        order = jax.random.permutation(key, STEPS * ACTORS)
        split = jax.tree.map(lambda x: x[order].reshape(MINIBATCHES, -1, *x.shape[1:]), batch)
        return jax.lax.scan(minibatch_update, carry, split)

    rng, *keys = jax.random.split(rng, EPOCHS + 1)
    (params, opt_state), _ = jax.lax.scan(epoch, (params, opt_state), jnp.stack(keys))
    ended = info["returned_episode"]
    mean_return = jnp.where(ended, info["returned_episode_returns"], 0).sum() / ended.sum()
    return (params, opt_state, state, obs, rng), mean_return


@jax.jit
def train(rng):
    rng, rng_reset, rng_params = jax.random.split(rng, 3)
    obs, state = jax.vmap(env.reset)(jax.random.split(rng_reset, ENVS))
    params = network.init(rng_params, batchify(obs))
    carry = (params, optimizer.init(params), state, batchify(obs), rng)
    return jax.lax.scan(train_step, carry, None, UPDATES)[1]


returns = jax.vmap(train)(jax.random.split(jax.random.PRNGKey(0), 2))  # two seeds at once
print("return (JaxMARL multiplies it by the number of agents):", returns[:, 0], returns[:, -1])
