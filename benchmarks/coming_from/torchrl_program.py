"""TorchRL: multi-agent PPO on VMAS `navigation`, 60,000 frames in ten iterations."""

import torch
from tensordict.nn import TensorDictModule
from tensordict.nn.distributions import NormalParamExtractor
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.envs import RewardSum, TransformedEnv
from torchrl.envs.libs.vmas import VmasEnv
from torchrl.modules import MultiAgentMLP, ProbabilisticActor, TanhNormal
from torchrl.objectives import ClipPPOLoss, ValueEstimators

FRAMES_PER_BATCH, ITERATIONS, MAX_STEPS = 6_000, 10, 100
torch.manual_seed(0)

env = VmasEnv("navigation", num_envs=60, max_steps=MAX_STEPS, n_agents=3, seed=0)
env = TransformedEnv(
    env, RewardSum(in_keys=[env.reward_key], out_keys=[("agents", "episode_reward")])
)
n_observed = env.observation_spec["agents", "observation"].shape[-1]
n_actions = env.full_action_spec_unbatched["agents", "action"].shape[-1]


def mlp(outputs, centralised):
    return MultiAgentMLP(
        n_agent_inputs=n_observed,
        n_agent_outputs=outputs,
        n_agents=env.n_agents,
        centralised=centralised,
        share_params=True,
        depth=2,
        num_cells=64,
        activation_class=torch.nn.Tanh,
    )


parameters = TensorDictModule(
    torch.nn.Sequential(mlp(2 * n_actions, centralised=False), NormalParamExtractor()),
    in_keys=[("agents", "observation")],
    out_keys=[("agents", "loc"), ("agents", "scale")],
)
policy = ProbabilisticActor(
    parameters,
    spec=env.full_action_spec_unbatched["agents", "action"],
    in_keys=[("agents", "loc"), ("agents", "scale")],
    out_keys=[env.action_key],
    distribution_class=TanhNormal,
    return_log_prob=True,
    log_prob_key=("agents", "sample_log_prob"),
)
critic = TensorDictModule(
    mlp(1, centralised=True),
    in_keys=[("agents", "observation")],
    out_keys=[("agents", "state_value")],
)
collector = Collector(
    env, policy, frames_per_batch=FRAMES_PER_BATCH, total_frames=FRAMES_PER_BATCH * ITERATIONS
)
buffer = TensorDictReplayBuffer(
    storage=LazyTensorStorage(FRAMES_PER_BATCH),
    sampler=SamplerWithoutReplacement(),
    batch_size=400,
)
loss = ClipPPOLoss(policy, critic, clip_epsilon=0.2, entropy_coeff=1e-4, normalize_advantage=False)
loss.set_keys(
    reward=env.reward_key,
    action=env.action_key,
    value=("agents", "state_value"),
    sample_log_prob=("agents", "sample_log_prob"),
    done=("agents", "done"),
    terminated=("agents", "terminated"),
)
loss.make_value_estimator(ValueEstimators.GAE, gamma=0.99, lmbda=0.9)
optimizer = torch.optim.Adam(loss.parameters(), 3e-4)

for batch in collector:
    for key in ("done", "terminated"):  # of the episode: the loss wants one for each agent
        flag = batch["next", key].unsqueeze(-1).expand(batch["next", *env.reward_key].shape)
        batch["next", "agents", key] = flag
    with torch.no_grad():
        loss.value_estimator(batch)
    buffer.extend(batch.reshape(-1))
    for _ in range(10 * (FRAMES_PER_BATCH // 400)):
        values = loss(buffer.sample())
        sum(values[f"loss_{name}"] for name in ("objective", "critic", "entropy")).backward()
        torch.nn.utils.clip_grad_norm_(loss.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    ended = batch["next", "done"].squeeze(-1)
    print("return:", batch["next", "agents", "episode_reward"][ended].mean().item())
collector.shutdown()
