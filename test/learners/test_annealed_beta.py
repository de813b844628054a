"""Linear annealing of the exponent beta of prioritized replay, also in graphs."""

import learner_twins
import pytest
import torch

from torchrl_marl.envs.toy import Arena
from torchrl_marl.learners.off_policy_config import ReplayConfig, ValueConfig
from torchrl_marl.learners.value_learner import ValueLearner
from torchrl_marl.modules import NetworkConfig


def trained(execution="eager", n_batches=4, **replay):
    config = ValueConfig(
        "iql",
        learning_starts=40,
        minibatch_size=16,
        actor=NetworkConfig([8]),
        replay=ReplayConfig(500, alpha=1.0, beta=0.4, **replay),
    )
    env = Arena(4, continuous_actions=False, seed=0)

    def make(team):
        return ValueLearner(team.groups, config, team=team, execution=execution)

    return learner_twins.train_on_batches(make, env, n_batches)


@pytest.mark.parametrize(("n_batches", "beta"), [(1, 0.4), (2, 0.7), (4, 0.85)])
def test_beta_is_annealed_linearly(n_batches, beta):
    learner, _ = trained(n_batches=n_batches, beta_end=1.0)
    assert float(learner.replay.priorities.beta) == pytest.approx(beta)


def test_beta_is_constant_without_beta_end():
    assert float(trained()[0].replay.priorities.beta) == pytest.approx(0.4)


def test_traced_updates_read_annealed_beta():
    (eager, metrics), (traced, found) = (trained(x, beta_end=1.0) for x in ("eager", "trace"))
    for one, other in zip(metrics, found, strict=True):
        for key, value in one.items(True, True):
            torch.testing.assert_close(other[key], value, rtol=0, atol=0, equal_nan=True)
    _, constant = trained("trace")
    assert not torch.equal(constant[-1]["agents", "loss_value"], found[-1]["agents", "loss_value"])
    assert eager.replay.priorities.beta == traced.replay.priorities.beta
