"""HAPPO with memory: each agent's own recurrent policy, one learning after the other."""

import pytest
import torch

from torchrl_marl import TeamSpec
from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.envs import with_memory
from torchrl_marl.envs.remember import remembered_by
from torchrl_marl.envs.toy import Arena
from torchrl_marl.learners import OnPolicyConfig, build_learners
from torchrl_marl.learners.happo_config import HAPPOConfig
from torchrl_marl.modules import MemoryConfig, RecurrentCriticConfig, TeamNetworkConfig


def trained(n_agents=3, schema=HAPPOConfig, execution="eager", n=2, look=None, **settings):
    """The learner after some batches, and all metrics."""
    env = Arena(4, n_agents=n_agents, years=3, lives=2, late_spawn=1, seed=0)
    actor = TeamNetworkConfig([8], sharing="none", memory=MemoryConfig("gru", size=6))
    critic = RecurrentCriticConfig([8], memory=MemoryConfig("lstm", size=4))
    small = {"window": 5, "minibatch_size": 20, "num_epochs": 2, "lr": 0.01}
    torch.manual_seed(0)
    config = schema(actor=actor, critic=critic, **(small | settings))
    [learner] = build_learners(TeamSpec.from_env(env), config, execution=execution)
    if look is not None:
        look(learner)
    policy = TeamPolicy(learner.actors.values())
    env = with_memory(env, remembered_by(policy))
    collector = RolloutCollector(env, policy, frames_per_batch=80)
    return learner, [learner.learn(collector.rollout()) for _ in range(n)]


def assert_same(one, other):
    (learner, metrics), (twin, found) = one, other
    for name, x in learner.state_dict().items():
        if isinstance(x, torch.Tensor):
            assert torch.equal(x, twin.state_dict()[name]), name
    for mine, theirs in zip(metrics, found, strict=True):
        for key, x in mine.items(True, True):
            assert torch.equal(x, theirs[key]), key


@pytest.mark.parametrize("burn_in", [0, 2])
def test_one_agent_learns_as_by_mappo_to_the_bit(burn_in):
    assert_same(*(trained(1, schema, burn_in=burn_in) for schema in (HAPPOConfig, OnPolicyConfig)))


@pytest.mark.parametrize("burn_in", [0, 2])
def test_a_graph_learns_as_eager_updates_do(burn_in):
    assert_same(*(trained(execution=how, burn_in=burn_in) for how in ("eager", "trace")))


def test_each_moves_in_its_turn_alone_and_passes_its_ratio_on():
    """Who has learned is no more what it was: the next one's advantage says how much."""
    seen = []

    def look(learner):
        run, before = learner.updates.run, []

        def watched(frames, epochs):
            cells = [p for p in learner.actor.parameters() if p.ndim == 3]
            now = [p.detach().clone() for p in cells]
            if before:
                moved = [
                    {i for i in range(3) if not torch.equal(a[i], b[i])}
                    for a, b in zip(before[-1], now)
                ]
                seen.append((moved, frames["agents", "advantage"].clone()))
            before.append(now)
            return run(frames, epochs)

        learner.updates.run = watched

    trained(n=1, look=look)
    [(first, one), (second, two)] = seen
    who = set().union(*first)
    assert len(who) == 1 and len(set().union(*second)) == 1 and who != set().union(*second)
    assert not torch.equal(one, two) and torch.isfinite(two).all()
