"""Rollouts of policies with communication: traced against eager, and off-policy runs."""

import pytest
import torch
from graph_batches import assert_equal, dropout

from torchrl_marl import TeamSpec
from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.envs import with_memory
from torchrl_marl.envs.toy import Arena
from torchrl_marl.learners import OffPolicyConfig, OnPolicyConfig, ValueConfig, build_learners
from torchrl_marl.modules import (
    CommunicationConfig,
    CriticConfig,
    DrawnCommunicationConfig,
    MemoryConfig,
    QNetworkConfig,
    RecurrentNetworkConfig,
    TeamNetworkConfig,
)

TALK = {
    "bicnet": CommunicationConfig("bicnet"),
    "graph": CommunicationConfig("graph", links="nearest", nearest=2),
    "all": DrawnCommunicationConfig("tarmac", gate=True, dropout=0.3, discrete="dial"),
    "symbols": DrawnCommunicationConfig("commnet", discrete="gumbel"),
}


def collector_of(config, execution, env=None):
    env = dropout() if env is None else env
    torch.manual_seed(0)
    learners = build_learners(TeamSpec.from_env(env), config)
    policy = TeamPolicy(actor for learner in learners for actor in learner.actors.values())
    env = with_memory(env, policy)
    return learners, RolloutCollector(env, policy, frames_per_batch=30, execution=execution)


def batch_of(collector):
    torch.manual_seed(0)
    return collector.rollout()


@pytest.mark.parametrize(("name", "memory"), [*((name, "none") for name in TALK), ("all", "gru")])
def test_traced_batch_matches_eager_batch(name, memory):
    actor = TeamNetworkConfig([8], communication=TALK[name], memory=MemoryConfig(memory, size=6))
    collectors = [collector_of(OnPolicyConfig(actor=actor), how)[1] for how in ("trace", "eager")]
    first, second = map(batch_of, collectors)
    assert collectors[0].execution == "trace"
    assert_equal(first, second)
    drawn = first.get(("agents", "channel"), None)
    assert (drawn is None) is (name in ("bicnet", "graph"))
    if drawn is not None:  # each step has new draws
        assert not torch.equal(drawn[:, 0], drawn[:, 1])


def off_policy(algorithm, talk, critic="none", memory="none"):
    settings = {"communication": talk, "memory": MemoryConfig(memory, size=6)}
    start = {"learning_starts": 0, "minibatch_size": 8, "window": 5}
    if algorithm == "iql":
        return ValueConfig(algorithm, actor=QNetworkConfig([8], **settings), **start)
    critic = CriticConfig([8], communication=CommunicationConfig(critic))
    return OffPolicyConfig(
        algorithm, actor=RecurrentNetworkConfig([8], **settings), critic=critic, **start
    )


@pytest.mark.parametrize(("algorithm", "talk", "critic"), [
    ("maddpg", "bicnet", "bicnet"),
    ("iddpg", "bicnet", "bicnet"),
    ("masac", "graph", "tarmac"),
    ("iql", "bicnet", "none"),
])  # fmt: skip
def test_off_policy_learners_train_communication(algorithm, talk, critic):
    config = off_policy(algorithm, TALK[talk], critic)
    env = Arena(4, n_agents=3, years=3, lives=2, seed=0) if algorithm == "iql" else None
    [learner], collector = collector_of(config, "trace", env)
    before = {name: p.clone() for name, p in learner.named_parameters()}
    for _ in range(2):
        learner.learn(collector.rollout())
    moved = [n for n, p in learner.named_parameters() if not torch.equal(p, before[n])]
    assert any("channel" in name and "actor" in name for name in moved)
    assert critic == "none" or any("channel" in name and "actor" not in name for name in moved)


if __name__ == "__main__":
    pytest.main([__file__])
