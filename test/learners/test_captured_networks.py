"""Own networks with state: captured updates have the results of eager ones, or run eagerly."""

import random
import re
import warnings

import numpy as np
import pytest
import torch
from test_captured_update import arena, assert_equal_training, make_collector, state_of, train
from torch import nn
from torch.nn.utils import parametrizations

from torchrl_marl import TeamSpec
from torchrl_marl.learners import build_learners
from torchrl_marl.learners.off_policy_config import ValueConfig
from torchrl_marl.modules import NetworkConfig
from torchrl_marl.modules.config import CriticConfig, QNetworkConfig
from torchrl_marl.modules.registry import BODIES, Body


class Own(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(n_in, 8), nn.Tanh(), nn.Linear(8, n_out))
        self.n, self.mean = 0, torch.zeros(n_in)

    def forward(self, x):
        return self.net(x)


class Counter(Own):
    def forward(self, x):
        self.n += torch.is_grad_enabled()
        return self.net(x) * 0.9 ** min(self.n, 20)


class Normalizer(Own):
    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().flatten(0, -2).mean(0)
        return self.net(x - self.mean)


class PythonDraws(Own):
    def forward(self, x):
        return self.net(x) * (1 + 0.1 * random.random() + 0.1 * np.random.rand())


class Branch(Own):
    def forward(self, x):
        y = self.net(x)
        return y * 0.9 if y.abs().max() > 0.5 else y


class BatchNorm(Own):
    def __init__(self, n_in, n_out):
        super().__init__(n_in, n_out)
        self.norm = nn.BatchNorm1d(n_in)

    def forward(self, x):
        return self.net(self.norm(x.flatten(0, -2)).view_as(x))


class Spectral(Own):
    def __init__(self, n_in, n_out):
        super().__init__(n_in, n_out)
        parametrizations.spectral_norm(self.net[0])


class Lazy(Own):
    """Fills a cache in the first call; later calls only read it."""

    def __init__(self, n_in, n_out):
        super().__init__(n_in, n_out)
        self.tables = {}

    def forward(self, x):
        table = self.tables.setdefault(x.shape, torch.arange(x.shape[-1]) * 0.1)
        return self.net(x + table)


REFUSED = {Counter: r"changes \S*\.n,", Normalizer: r"changes \S*\.mean,"}
REFUSED |= {PythonDraws: "random numbers of numpy or Python", Branch: "depends on the state"}


@pytest.fixture
def body(monkeypatch, request):
    def network(inputs, out_features, config, **others):
        return request.param(inputs.width, out_features)

    monkeypatch.setitem(BODIES._known, "stateful", Body("a test", network=network))
    return request.param


def train_body(execution, **settings):
    random.seed(0)
    np.random.seed(0)
    both = {"actor": NetworkConfig([8], body="stateful"), "critic": CriticConfig([8])}
    trained = train(arena, execution, n=3, **both, **settings)
    return trained, (torch.rand(1).item(), random.random(), np.random.rand())


@pytest.mark.parametrize("target_kl", [None, 1e-6])
@pytest.mark.parametrize("body", [*REFUSED, BatchNorm, Spectral, Lazy], indirect=True)
def test_networks_with_state_learn_as_in_eager_updates(body, target_kl):
    expected = train_body("eager", target_kl=target_kl)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = train_body("trace", target_kl=target_kl)
    said = [str(x.message) for x in caught if "updates run eagerly" in str(x.message)]
    assert len(said) == (body in REFUSED)
    assert all(re.search(REFUSED[body], one) for one in said), said
    assert_equal_training(expected[0], found[0])
    assert expected[1] == found[1]


class Steep(Own):
    def forward(self, x):
        y = self.net(x)
        return y * 0.9 if y.abs().max() > 0.1 else y


@pytest.mark.parametrize("body", [Steep], indirect=True)
def test_off_policy_updates_of_such_networks_run_eagerly(body):
    def learn(execution):
        torch.manual_seed(0)
        env = arena()
        config = ValueConfig(
            actor=QNetworkConfig([8], body="stateful"), minibatch_size=16, learning_starts=0
        )
        [learner] = build_learners(TeamSpec.from_env(env), config, execution=execution)
        collector = make_collector(env, learner)
        for _ in range(3):
            learner.learn(collector.rollout())
        return state_of(learner)

    expected = learn("eager")
    with pytest.warns(UserWarning, match="updates run eagerly, .* depends on the state"):
        found = learn("trace")
    assert expected.keys() == found.keys()
    assert all(torch.equal(x, found[key]) for key, x in expected.items())


@pytest.mark.parametrize("body", [BatchNorm], indirect=True)
def test_batch_normalization_is_not_compiled(body):
    """Compiled, its running statistics would not follow the batches."""
    expected = train_body("eager")
    with pytest.warns(UserWarning, match="updates run eagerly, .* batch normalization"):
        found = train_body("compile")
    key = next(key for key in state_of(expected[0][0]) if "norm.running_mean" in key[0])
    torch.testing.assert_close(state_of(found[0][0])[key], state_of(expected[0][0])[key])
