"""Un-sharing networks of off-policy learners: targets, optimizers and graphs."""

import copy

import learner_twins
import pytest
import torch

from torchrl_marl.envs.toy import Arena
from torchrl_marl.learners import build_learners
from torchrl_marl.learners.adam import moments_of
from torchrl_marl.learners.algorithms import ALGORITHMS
from torchrl_marl.learners.off_policy_config import ReplayConfig
from torchrl_marl.modules import CriticConfig, NetworkConfig
from torchrl_marl.settings import settings_of

SMALL = {"learning_starts": 80, "minibatch_size": 16, "actor": NetworkConfig([8])}


def trained(algorithm, execution="eager", unshare_at=0.5, n_batches=4):
    schema = ALGORITHMS.schema(algorithm)
    settings = {**SMALL, "unshare_at": unshare_at, "replay": ReplayConfig(500, alpha=0.6)}
    if "critic.num_cells" in settings_of(schema):
        settings["critic"] = CriticConfig([8])
    config = schema(algorithm, **settings)
    env = Arena(4, n_agents=4, n_groups=2, continuous_actions=False, seed=0)

    def make(team):
        [learner] = build_learners(team, config, execution=execution)
        return learner

    return learner_twins.train_on_batches(make, env, n_batches)[0]


def weights(learner):
    return {name: x.clone() for name, x in learner.state_dict().items() if torch.is_tensor(x)}


@pytest.mark.parametrize("algorithm", ["itd3", "isac", "maddpg", "qmix"])
def test_each_agent_gets_a_copy(algorithm):
    learner = trained(algorithm, unshare_at=None)
    before, moments = learner.updates, list(learner.updates.optimizers.values())
    shared, steps = (
        [p.clone() for p in before.targets],
        [moments_of(x, x.parameters)[2][0].clone() for x in moments],
    )
    learner.unshare()
    learner.unshare()
    assert learner.updates is not before and learner.updates.count == before.count > 0
    grown = 0
    for target, old in zip(learner.updates.targets, shared, strict=True):
        assert not target.requires_grad
        if target.shape != old.shape:  # 4 agents of 2 groups: each has a copy of its group's row
            grown += 1
            assert torch.equal(target, old.repeat_interleave(2, 0))
    alone = algorithm in ("itd3", "isac")  # others have a network over the whole team
    assert grown == len(shared) if alone else 0 < grown < len(shared)
    now = [moments_of(x, x.parameters) for x in learner.updates.optimizers.values()]
    assert [own[0] for _, _, own in now] == steps
    assert all(bool(means[0].any()) for means, _, _ in now)
    for source, target in zip(learner.updates.sources, learner.updates.targets, strict=True):
        assert source.shape == target.shape and source.requires_grad


@pytest.mark.parametrize("algorithm", ["itd3", "iql"])
def test_traced_updates_match_eager_updates(algorithm):
    eager, traced = (trained(algorithm, execution) for execution in ("eager", "trace"))
    assert eager.unshared and traced.unshared
    found, expected = weights(traced), weights(eager)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_unshared_learner_resumes_exactly():
    learner, resumed = trained("isac"), trained("isac", n_batches=0)
    resumed.load_state_dict(copy.deepcopy(learner.state_dict()))
    assert resumed.unshared
    for one in (learner, resumed):
        torch.manual_seed(1)
        one.updates.run(one.replay, 3)
    found, expected = weights(resumed), weights(learner)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
