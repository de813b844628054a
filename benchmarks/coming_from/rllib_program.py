"""RLlib: PPO with a shared policy on mpe2's `simple_spread`, 24,000 environment steps."""

from mpe2 import simple_spread_v3
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.env.wrappers.pettingzoo_env import ParallelPettingZooEnv
from ray.tune.registry import register_env

register_env(
    "spread", lambda config: ParallelPettingZooEnv(simple_spread_v3.parallel_env(max_cycles=25))
)
config = (
    PPOConfig()
    .environment("spread")
    .env_runners(num_env_runners=0, num_envs_per_env_runner=1)
    .multi_agent(policies={"shared"}, policy_mapping_fn=lambda agent, episode, **kwargs: "shared")
    .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[64, 64], vf_share_layers=False))
    .training(
        train_batch_size_per_learner=4_000,
        minibatch_size=400,
        num_epochs=10,
        lr=7e-4,
        vf_clip_param=1e4,
        gamma=0.99,
        lambda_=0.95,
        entropy_coeff=0.01,
    )
    .debugging(seed=0)
)
algorithm = config.build_algo()
for _ in range(6):
    result = algorithm.train()
    env = result["env_runners"]
    print(env["num_env_steps_sampled_lifetime"], env["episode_return_mean"])
algorithm.stop()
