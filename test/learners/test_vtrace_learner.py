"""Learners with V-trace: equality with GAE on policy, older policies, and joined groups."""

from dataclasses import replace

import pytest
import torch
from meadow import make_meadow
from on_policy_learners import make_arena, make_batch, make_learner
from team_learners import config_of

from torchrl_marl import TeamSpec
from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.envs import with_memory
from torchrl_marl.envs.remember import hidden_sizes
from torchrl_marl.envs.toy import Arena
from torchrl_marl.learners import OnPolicyConfig, build_learners
from torchrl_marl.learners.happo_config import HAPPOConfig
from torchrl_marl.modules import (
    DrawnCommunicationConfig,
    MemoryConfig,
    RecurrentCriticConfig,
    TeamNetworkConfig,
)

LEAVES = ("advantage", "value_target", "state_value")


def targets_of(config, **settings):
    """The second batch of a learner's policy, with its advantages."""
    torch.manual_seed(0)
    env = Arena(4, n_agents=3, years=3, lives=2, late_spawn=1, seed=0, **settings)
    [learner] = build_learners(TeamSpec.from_env(env), config)
    policy = TeamPolicy(learner.actors.values())
    collector = RolloutCollector(
        with_memory(env, hidden_sizes(policy)), policy, frames_per_batch=80
    )
    for _ in range(2):
        data = learner.block.gather(collector.rollout())
        learner.add_advantage(data)
    return data


REMEMBERING = TeamNetworkConfig(num_cells=[8], memory=MemoryConfig("gru", size=6))
TALKING = replace(
    REMEMBERING, communication=DrawnCommunicationConfig("tarmac", gate=True, message_size=4)
)


@pytest.mark.parametrize("bootstrap", ["team", "agent"])
@pytest.mark.parametrize("actor", [TeamNetworkConfig(num_cells=[8]), REMEMBERING, TALKING])
def test_on_policy_targets_match_gae(actor, bootstrap):
    memory = MemoryConfig("gru", size=4) if actor.memory.kind != "none" else MemoryConfig()
    config = OnPolicyConfig(
        actor=actor,
        critic=RecurrentCriticConfig(num_cells=[8], memory=memory),
        minibatch_size=20,
        bootstrap=bootstrap,
        normalize_observations=True,
        window=5,
    )
    expected = targets_of(config)
    found = targets_of(replace(config, estimator="vtrace", ratio="joint"))
    assert not found["agents", "mask"].all()
    for leaf in LEAVES:
        torch.testing.assert_close(
            found["agents", leaf], expected["agents", leaf], rtol=1e-4, atol=1e-5
        )


def test_on_policy_targets_of_happo_match_gae():
    config = HAPPOConfig(actor=TeamNetworkConfig([8], sharing="none"), minibatch_size=20)
    expected, found = targets_of(config), targets_of(replace(config, estimator="vtrace"))
    for leaf in LEAVES:
        torch.testing.assert_close(
            found["agents", leaf], expected["agents", leaf], rtol=1e-4, atol=1e-5
        )


def test_batch_of_an_older_policy_is_corrected():
    """After an update, targets of V-trace depend on the ratio, those of GAE on the critic only."""
    env = make_arena()
    corrected = make_learner(env, estimator="vtrace", lr=0.03)
    batch = make_batch(env, corrected)
    first = corrected.learn(batch.clone())["agents", "kl_approx"]
    uncorrected = make_learner(env, lr=0.03)
    uncorrected.load_state_dict(corrected.state_dict())
    assert first > 1e-3
    targets = []
    for learner in (corrected, uncorrected):
        data = learner.block.gather(batch.clone())
        learner.add_advantage(data)
        targets.append(data["agents", "value_target"])
    acts = batch["agents", "mask"].unsqueeze(-1)
    assert ((targets[0] - targets[1])[acts].abs() > 1e-4).double().mean() > 0.5


def test_joined_groups_have_separate_ratios():
    """Targets of an unchanged group do not depend on the ratios of the other group."""
    env = make_meadow(4, "two")
    config = config_of(estimator="vtrace", ratio="joint", normalize_advantage="none")
    targets, batch = [], None
    for drift in (0.0, 1.0):
        torch.manual_seed(0)
        [learner] = build_learners(TeamSpec.from_env(env), config)
        if batch is None:
            policy = TeamPolicy(learner.actors.values())
            batch = RolloutCollector(env, policy, frames_per_batch=40).rollout()
        one, other = learner.groups
        data = batch.clone()
        data[one, "action_log_prob"] = data[one, "action_log_prob"] - drift
        gathered = learner.block.gather(data)
        learner.add_advantage(gathered)
        learner.block.scatter(gathered, data, learner.written)
        targets.append({name: data[name, "value_target"] for name in (one, other)})
    assert torch.equal(targets[0][other], targets[1][other])
    assert not torch.allclose(targets[0][one], targets[1][one])
