"""Un-sharing during training keeps outputs and optimizer state; parameters are separate."""

import copy

import pytest
import torch

from torchrl_marl import TeamSpec
from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.envs.toy import Arena
from torchrl_marl.errors import ConfigError
from torchrl_marl.learners import OnPolicyConfig, OnPolicyLearner
from torchrl_marl.modules import NetworkConfig
from torchrl_marl.recipes import load_config
from torchrl_marl.settings import parse_overrides
from torchrl_marl.training.changes import change, changeable_settings

# Parameters of one agent: an actor with 4 outputs and a critic, 6 inputs, 8 hidden units.
OWN = (6 * 8 + 8 + 8 * 4 + 4) + (6 * 8 + 8 + 8 + 1)


def make(env, sharing, algorithm="ippo", **kwargs):
    torch.manual_seed(0)
    network = NetworkConfig([8], sharing=sharing)
    config = OnPolicyConfig(
        algorithm=algorithm, minibatch_size=40, actor=network, critic=network, **kwargs
    )
    return OnPolicyLearner(TeamSpec.from_env(env).groups, config)


def batch_of(env, learner):
    policy = TeamPolicy(learner.actors.values())
    return RolloutCollector(env, policy, frames_per_batch=80).next()


def outputs(learner, batch):
    data = learner.block.gather(batch)
    (loss,) = learner.losses.values()
    logits = loss.actor_network.get_dist(data).logits
    return logits.detach().clone(), loss.critic_network(data)[loss.tensor_keys.value].detach()


@pytest.mark.parametrize("n_groups", [1, 3])
@pytest.mark.parametrize("sharing", ["none", "full", "group", "trunk", "agent_id", "masks"])
def test_unsharing_keeps_outputs_and_separates_parameters(sharing, n_groups):
    env = Arena(8, n_agents=6, n_groups=n_groups, seed=0)
    learner = make(env, sharing)
    batch = batch_of(env, learner)
    learner.learn(batch.clone())
    before = outputs(learner, batch)
    moments = len(learner.optimizer.state)
    learner.unshare()
    for one, other in zip(before, outputs(learner, batch)):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    if sharing != "agent_id":  # its networks have six more inputs
        assert sum(p.numel() for p in learner.parameters()) == 6 * OWN
    assert len(learner.optimizer.state) == moments
    assert len({id(p) for group in learner.optimizer.param_groups for p in group["params"]}) == len(
        list(learner.parameters())
    )
    learner.learn(batch.clone())
    # Now the parameters of agents differ.
    weight = max(learner.parameters(), key=lambda p: p.ndim)
    assert not torch.equal(weight[0], weight[1])


def test_gradient_of_one_agent_changes_no_other_agent():
    env = Arena(8, n_agents=6, seed=0)
    learner = make(env, "full")
    learner.unshare()
    batch = batch_of(env, learner)
    distribution = learner.actor.get_dist(batch)
    distribution.logits[..., 2, :].sum().backward()
    for parameter in learner.actor.parameters():
        rows = parameter.grad.flatten(1).abs().sum(1) > 0
        assert not rows[[0, 1, 3, 4, 5]].any()


@pytest.mark.parametrize("sharing", ["group", "trunk"])
def test_unshared_learner_resumes_exactly(sharing):
    env = Arena(8, n_agents=6, n_groups=3, seed=0)
    learner = make(env, sharing)
    batch = batch_of(env, learner)
    learner.learn(batch.clone())
    learner.unshare()
    learner.learn(batch.clone())
    resumed = make(env, sharing)
    resumed.load_state_dict(copy.deepcopy(learner.state_dict()))
    for each in (learner, resumed):
        torch.manual_seed(1)
        each.learn(batch.clone())
    for a, b in zip(learner.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def test_unshared_copies_keep_optimizer_moments():
    """Each copy has the moments of the shared network."""
    env = Arena(8, n_agents=2, seed=0)
    learner = make(env, "full")
    learner.learn(batch_of(env, learner))
    (first, *_) = learner.optimizer.param_groups[0]["params"]
    average = learner.optimizer.state[first]["exp_avg"].clone()
    learner.unshare()
    (own, *_) = learner.optimizer.param_groups[0]["params"]
    assert own.shape == (2, *first.shape)
    for row in learner.optimizer.state[own]["exp_avg"]:
        assert torch.equal(row, average)


def test_learning_rate_changes_after_unsharing():
    """With moments of a constant gradient, Adam's steps are as long as the learning rate."""
    env = Arena(8, n_agents=2, seed=0)
    learner = make(env, "full")
    learner.learn(batch_of(env, learner))
    learner.unshare()
    assert changeable_settings(learner) == {"lr": learner.config.lr}
    change(learner, "lr", 2e-3)
    parameters = list(learner.trained)
    before = [p.detach().clone() for p in parameters]
    for p in parameters:
        state = learner.optimizer.state[p]
        for name, value in (("exp_avg", 0.9), ("exp_avg_sq", 0.81), ("step", 1e6)):
            state[name].fill_(value)
        p.grad = torch.full_like(p, 0.9)
    learner.updates._move()
    for p, old in zip(parameters, before, strict=True):
        torch.testing.assert_close(old - p, torch.full_like(p, 2e-3), rtol=1e-3, atol=1e-6)


def test_central_critic_stays_shared():
    env = Arena(8, n_agents=3, seed=0)
    learner = make(env, "group", algorithm="mappo")
    before = list(learner.critics["agents"].parameters())
    learner.unshare()
    assert all(a is b for a, b in zip(before, learner.critics["agents"].parameters(), strict=True))


def test_unshare_at_takes_effect_at_its_progress():
    env = Arena(8, n_agents=3, seed=0)
    learner = make(env, "group", unshare_at=0.5)
    learner.set_progress(0.4)
    assert not learner.unshared
    learner.set_progress(0.5)
    assert learner.unshared


@pytest.mark.parametrize(("algorithm", "given"), [
    *((algorithm, ()) for algorithm in ("mappo", "qmix", "pqn", "masac")),
    ("ippo", ("learner.critic.sharing=none",)),
])  # fmt: skip
def test_unsharing_unshared_networks_raises(algorithm, given):
    texts = [f"learner={algorithm}", "learner.unshare_at=0.5", "learner.actor.sharing=none", *given]
    with pytest.raises(ConfigError, match="nothing to un-share; use learner.actor.sharing=group"):
        load_config("toy_arena_mappo", parse_overrides(texts))


def test_unshare_at_with_shared_critic_only_is_valid():
    texts = ["learner=ippo", "learner.unshare_at=0.5", "learner.actor.sharing=none"]
    config = load_config("toy_arena_mappo", parse_overrides(texts))
    assert config.learner.unshare_at == 0.5
