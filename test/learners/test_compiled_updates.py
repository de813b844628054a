"""Compiled updates match eager ones: metrics, errors, priorities, targets."""

import functools
import warnings

import pytest
import torch
from samples import states
from support.tiers import first_tier_cases

from torchrl_marl import TeamSpec
from torchrl_marl.capture import capture, trace
from torchrl_marl.capture.inductor import compute_before_writes
from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.envs import with_memory
from torchrl_marl.envs.toy import Arena
from torchrl_marl.errors import CaptureError
from torchrl_marl.learners import build_learners
from torchrl_marl.learners.adam import Adam
from torchrl_marl.learners.algorithms import ALGORITHMS
from torchrl_marl.learners.build import build_population
from torchrl_marl.learners.off_policy_config import ReplayConfig
from torchrl_marl.modules import (
    CriticConfig,
    MemoryConfig,
    NetworkConfig,
    RecurrentCriticConfig,
    TeamNetworkConfig,
)
from torchrl_marl.modules.config import AnyMixerConfig, QNetworkConfig

# So large that an effect of updated parameters differs clearly from rounding.
LR = 0.02
PPO = {"num_epochs": 1, "minibatch_size": 40, "lr": LR, "actor": NetworkConfig([8])}
PPO["critic"] = CriticConfig([8])
STORED = {"learning_starts": 0, "minibatch_size": 16, "updates_per_frame": 0.05}
STORED |= {"replay": ReplayConfig(capacity=400, alpha=0.6)}
VALUES = {**STORED, "lr": LR, "actor": QNetworkConfig(num_cells=[8])}
CRITICS = {**STORED, "actor": NetworkConfig([8]), "critic": CriticConfig([8])}
CRITICS |= {"actor_lr": LR, "critic_lr": LR}
OWN = CRITICS | {"actor": NetworkConfig([8], sharing="none")}
CASES = {
    "mappo": PPO | {"entropy_coeff": 0.01, "value_norm": True},
    "mappo, stopped by its KL": PPO | {"num_epochs": 3, "target_kl": 0.01},
    "mappo, simba": PPO | {"actor": NetworkConfig([8], body="simba")},
    "ippo": PPO,
    "happo": PPO | {"actor": NetworkConfig([8], sharing="none")},
    "happo, with memory": PPO
    | {"window": 5, "minibatch_size": 20}
    | {"actor": TeamNetworkConfig([8], sharing="none", memory=MemoryConfig("gru", 8))}
    | {"critic": RecurrentCriticConfig([8], memory=MemoryConfig("lstm", 8))},
    "maddpg": CRITICS,
    "maddpg, mixed": CRITICS | {"mixer": AnyMixerConfig("monotonic", 4)},
    "iddpg": CRITICS,
    "matd3": CRITICS,
    "itd3": CRITICS,
    "masac": CRITICS,
    "isac": CRITICS,
    "haddpg": OWN,
    "hatd3": OWN,
    "hasac": OWN | {"critic": CriticConfig([8, 8], body="simba")},
    "qmix": VALUES,
    "qmix, with memory": VALUES
    | {"replay": ReplayConfig(capacity=400), "window": 8, "burn_in": 2}
    | {"actor": QNetworkConfig(num_cells=[8], memory=MemoryConfig("gru", 8))},
    "vdn": VALUES | {"n_step": 3},
    "iql": VALUES,
    "bc": {**STORED, "lr": LR, "actor": NetworkConfig([8])},
    "td3_bc": CRITICS,
    "iql_offline": CRITICS,
    "pqn": {"num_epochs": 1, "minibatch_size": 40, "lr": LR, "actor": QNetworkConfig([8])},
}
ALIKE = {"replay": ReplayConfig(capacity=400)}  # members sample uniformly
MEMBERS = {"mappo": PPO, "qmix": VALUES | ALIKE, "masac": CRITICS | ALIKE}


def test_every_learning_algorithm_has_a_case():
    assert {case.split(",")[0] for case in CASES} == {*ALGORITHMS.words()} - {"random"}


FIRST = {"mappo", "qmix, with memory", "masac"}


@pytest.mark.parametrize("case", first_tier_cases(FIRST, CASES, "compiled"))
def test_compiled_updates_match_eager_updates(case):
    schema = ALGORITHMS.schema(case.split(",")[0])
    config = schema(algorithm=case.split(",")[0], **CASES[case])
    assert_same_updates(functools.partial(build_learners, default=config), Arena)


@pytest.mark.compiled
@pytest.mark.parametrize("algorithm", MEMBERS)
def test_compiled_updates_of_a_population_match_eager_updates(algorithm):
    config = ALGORITHMS.schema(algorithm)(algorithm=algorithm, **MEMBERS[algorithm])
    names = ["actor_lr", "critic_lr"] if algorithm == "masac" else ["lr"]
    settings = {name: torch.tensor([LR, LR / 4]) for name in names}
    build = functools.partial(build_population, default=config, n_members=2, settings=settings)
    assert_same_updates(build, Arena)


def assert_same_updates(build, world):
    """Metrics and all stored tensors are equal after updates with the same batches."""
    env = world(8, n_agents=2, years=2, lives=2, seed=0)
    learners = []
    for execution in ("eager", "compile"):
        torch.manual_seed(0)
        learners += build(TeamSpec.from_env(env), execution=execution)
    eager, compiled = learners
    policy = TeamPolicy(eager.actors.values())
    collector = RolloutCollector(with_memory(env, policy), policy, frames_per_batch=80)
    for i in range(2):
        batch = collector.rollout()
        metrics = []
        for learner in (eager, compiled):
            learner.set_progress(i / 2)
            torch.manual_seed(i)
            metrics.append(learner.learn(batch.clone()))
        assert_near(*({str(k): v for k, v in m.items(True, True)} for m in metrics))
    for mine, theirs in zip(kept(eager), kept(compiled), strict=True):
        torch.testing.assert_close(theirs, mine, rtol=1e-3, atol=1e-4, equal_nan=True)


def assert_near(mine, theirs):
    assert mine.keys() == theirs.keys()
    for key, value in mine.items():
        torch.testing.assert_close(
            theirs[key],
            value,
            rtol=1e-3,
            atol=1e-4,
            equal_nan=True,
            msg=lambda m, k=key: f"{k} {m}",
        )


def kept(learner):
    """Parameters, targets, moments, and the replay buffer with its priorities."""
    replay = getattr(learner, "replay", None)
    return [*states([learner]), *([] if replay is None else replay.tensors)]


# ---------------------------------------------------------------------- order of reads and writes


@pytest.mark.parametrize("large", [False, True], ids=["loaded", "stored"])
def test_layer_output_is_computed_before_its_bias_is_updated(large, monkeypatch):
    """5 rows of ones, weights of 1 and a bias of 1, moved by 0.5: 5 before, and not 4.5."""
    monkeypatch.setattr("torchrl_marl.capture.inductor._LARGE", 0 if large else 10**9)
    bias, weight, x = torch.ones(3), torch.ones(4, 3), torch.ones(5, 4)
    adam = Adam([bias], lr=0.5, eps=0.0)

    def step(x, weight, *held):
        y = torch.addmm(bias, x, weight)
        double, row = 2 * bias, y.view(-1)[:3]
        adam.take([y.sum(0)])
        return y.mean(), y - 1, double, row.exp(), bias * 3

    before = [own.clone() for own in adam.tensors]
    program = capture(step, x, weight, *adam.tensors, name="a step")
    for own, old in zip(adam.tensors, before):
        own.copy_(old)
    mean, less, double, row, moved = program(x, weight, *adam.tensors)
    assert (mean.item(), double.tolist(), moved.tolist()) == (5.0, [2.0] * 3, [1.5] * 3)
    assert less.eq(4).all()
    torch.testing.assert_close(row, torch.full((3,), 5.0).exp())
    assert bias.tolist() == [0.5] * 3


def test_views_of_stored_values_stay_views():
    """A later write to one view is visible in the other."""
    x = torch.ones(4)
    adam = Adam([x], lr=0.5, eps=0.0)

    def step(*held):
        y = 2 * x
        parts = y.view(2, 2).unbind(0)
        adam.take([torch.ones(4)])
        parts[0].add_(10)
        return y, parts[1]

    traced = trace(step, *adam.tensors)
    for own in adam.tensors[:1]:
        own.fill_(1.0)
    y, part = compute_before_writes(traced.module)(*adam.tensors, *traced.captured)
    assert y.tolist() == [12.0, 12.0, 2.0, 2.0] and part.tolist() == [2.0, 2.0]


def test_write_operation_without_ordering_argument_raises():
    library = torch.library.Library("torchrl_marl_test", "DEF")
    library.define("write_(Tensor(a!) x) -> ()")
    library.impl("write_", lambda x: None, "CompositeExplicitAutograd")
    library.impl("write_", lambda x: None, "Meta")

    def step(x):
        y = 2 * x
        torch.ops.torchrl_marl_test.write_(x)
        return y

    with warnings.catch_warnings(), pytest.raises(CaptureError, match=r"Tensor\[\] before"):
        capture(step, torch.ones(2), name="a step")
    del library
