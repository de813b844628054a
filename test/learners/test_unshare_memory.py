"""Un-sharing networks with memory keeps outputs and states; parameters are separate."""

import copy

import pytest
import torch
from support.tiers import second_tier_cases

from torchrl_marl import TeamSpec
from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.envs import with_memory
from torchrl_marl.envs.remember import hidden_sizes
from torchrl_marl.envs.toy import Arena
from torchrl_marl.learners import OnPolicyConfig, ValueConfig, build_learners
from torchrl_marl.learners.off_policy_config import OffPolicyConfig
from torchrl_marl.modules import (
    MemoryConfig,
    QNetworkConfig,
    RecurrentCriticConfig,
    RecurrentNetworkConfig,
)
from torchrl_marl.modules.memory.cells import AgentLinear


def config_of(algorithm, sharing="group", kind="gru", layers=1):
    memory = {"sharing": sharing, "memory": MemoryConfig(kind, size=6, layers=layers)}
    index = {"sharing_index": [0, 1, 0, 1]} if sharing == "index" else {}
    settings = {"window": 5, "minibatch_size": 40, "unshare_at": 0.5}
    if algorithm in ("mappo", "ippo"):
        actor = RecurrentNetworkConfig([8], **memory, **index)
        critic = RecurrentCriticConfig([8], memory=MemoryConfig(kind, size=6))
        return OnPolicyConfig(algorithm, actor=actor, critic=critic, num_epochs=1, **settings)
    settings |= {"learning_starts": 0, "updates_per_frame": 0.05}
    if algorithm == "vdn":
        return ValueConfig(algorithm, actor=QNetworkConfig([8], **memory, **index), **settings)
    actor = RecurrentNetworkConfig([8], **memory, **index)
    return OffPolicyConfig(algorithm, actor=actor, **settings)


def make(config, execution="eager"):
    env = Arena(4, n_agents=4, years=3, lives=2, late_spawn=1, seed=0)
    torch.manual_seed(0)
    [learner] = build_learners(TeamSpec.from_env(env), config, execution=execution)
    policy = TeamPolicy(learner.actors.values())
    env = with_memory(env, hidden_sizes(policy))
    return learner, RolloutCollector(env, policy, frames_per_batch=80)


@pytest.mark.parametrize(("sharing", "kind"), [
    ("group", "gru"), ("group", "lstm"), ("full", "lru"), ("trunk", "mingru"), ("agent_id", "gru"),
    ("index", "lru"), ("none", "gru"),
])  # fmt: skip
def test_unsharing_keeps_outputs_and_separates_parameters(sharing, kind):
    learner, collector = make(config_of("ippo", sharing, kind, layers=2))
    learner.learn(collector.rollout())
    batch = collector.rollout()[:, -1].exclude("next")
    before = learner.actor.get_dist(batch).logits
    state = learner.actor(batch.clone())["next", "agents", "hidden"]
    moments = {tuple(p.shape[1:]) for p in learner.optimizer.state if p.ndim == 3}
    learner.unshare()
    after = learner.actor(batch.clone())["next", "agents", "hidden"]
    torch.testing.assert_close(learner.actor.get_dist(batch).logits, before, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(after, state, rtol=1e-5, atol=1e-6)
    parameters = list(learner.parameters())
    trained = {id(p) for group in learner.optimizer.param_groups for p in group["params"]}
    assert trained == {id(p) for p in parameters if p.requires_grad}
    assert all(p in learner.optimizer.state for p in learner.actor.parameters())
    assert moments <= {tuple(p.shape[1:]) for p in learner.optimizer.state if p.ndim == 3}
    learner.learn(collector.rollout())
    for linear in (m for m in learner.actor.modules() if isinstance(m, AgentLinear)):
        assert len(linear.weight) == 4 and not torch.equal(linear.weight[0], linear.weight[2])


@pytest.mark.parametrize("execution", ["eager", "trace"])
@pytest.mark.parametrize("algorithm", ["mappo", *second_tier_cases("runs", "vdn", "matd3")])
def test_unshared_learner_resumes_exactly(algorithm, execution):
    learner, collector = make(config_of(algorithm), execution)
    learner.learn(collector.rollout())
    learner.set_progress(0.5)
    assert learner.unshared
    learner.learn(collector.rollout())
    resumed, _ = make(config_of(algorithm), execution)
    resumed.load_state_dict(copy.deepcopy(learner.state_dict()))
    batch = collector.rollout()
    for each in (learner, resumed):
        torch.manual_seed(1)
        each.learn(batch.clone())
    for a, b in zip(learner.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def test_first_ratio_after_unsharing_is_one():
    learner, collector = make(config_of("mappo"))
    learner.learn(collector.rollout())
    batch = collector.rollout()
    learner.unshare()
    [loss] = learner.losses.values()
    data = learner.block.gather(batch)
    learner.add_targets(data)
    assert loss(learner._frames(data))["max_ratio"] == pytest.approx(1.0, abs=1e-6)
