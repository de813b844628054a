"""The update as one graph: it equals eager updates, does not wait, and is recorded once."""

import copy
from contextlib import contextmanager

import pytest
import torch
from meadow import make_meadow
from samples import assert_same, poisoned
from spotlights import Spotlights
from support.tiers import first_tier_cases

import torchrl_marl.learners.captured as captured
from torchrl_marl import TeamSpec
from torchrl_marl.capture import Program
from torchrl_marl.capture.folding import fold_constants
from torchrl_marl.capture.syncs import count_syncs, graph_syncs
from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.envs.toy import Arena, Nim
from torchrl_marl.errors import ConfigError, NonFiniteError
from torchrl_marl.functional import advantage
from torchrl_marl.learners import OnPolicyConfig, build_learners
from torchrl_marl.learners.adam import adam_
from torchrl_marl.modules import NetworkConfig
from torchrl_marl.modules.config import CriticConfig, TeamNetworkConfig

FRAMES = 80


def arena(**settings):
    return Arena(8, **{"n_agents": 3, "years": 3, "lives": 2, "seed": 0} | settings)


def meadow(layout="one", **settings):
    return make_meadow(8, layout, **settings)


def make_learner(env, execution="trace", **settings):
    torch.manual_seed(0)
    defaults = {
        "actor": NetworkConfig([8]),
        "critic": CriticConfig([8]),
        "num_epochs": 2,
        "minibatch_size": 32,  # the last of an epoch has 16
        "entropy_coeff": 0.01,
    }
    config = OnPolicyConfig(**(defaults | settings))
    [learner] = build_learners(TeamSpec.from_env(env), config, execution=execution)
    return learner


def make_collector(env, learner):
    return RolloutCollector(env, TeamPolicy(learner.actors.values()), frames_per_batch=FRAMES)


def train(make_env, execution, n=2, **settings):
    """The learner and its metrics after some iterations."""
    env = make_env()
    learner = make_learner(env, execution, **settings)
    collector, metrics = make_collector(env, learner), []
    for i in range(n):
        learner.set_progress(i / 4)
        metrics.append(learner.learn(collector.rollout()))
    return learner, metrics


def flat(x, path=()):
    """Paths and tensors of anything nested."""
    if isinstance(x, torch.Tensor):
        return {path: x.detach().clone()}
    items = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else ()
    return {k: v for key, y in items for k, v in flat(y, (*path, key)).items()}


def state_of(learner):
    return flat(dict(learner.state_dict()))


def assert_equal_training(one, other, rounded=(), **tolerance):
    """Parameters, statistics, Adam's state and metrics are the same; some metrics but for a bit."""
    (a, metrics), (b, found) = one, other
    a, b = state_of(a), state_of(b)
    assert a.keys() == b.keys()
    assert any("exp_avg" in path for path in a)

    def check(x, y, key):
        if tolerance:
            torch.testing.assert_close(x, y, **tolerance)
        else:
            assert_same(x, y, key)

    for path, x in a.items():
        check(x, b[path], path)
    for x, y in zip(metrics, found, strict=True):
        assert set(x.keys(True, True)) == set(y.keys(True, True))
        for key in x.keys(True, True):
            if key[-1] in rounded:
                torch.testing.assert_close(x[key], y[key], rtol=2.0**-22, atol=0)
            else:
                check(x[key], y[key], key)


CASES = {
    "deaths": (arena, {"minibatch_size": 32}),  # the last of an epoch has 16
    "actions that are illegal": (lambda: arena(action_mask=True), {"clip_value": True}),
    "norms": (arena, {"normalize_observations": True, "max_grad_norm": 0.01}),
    "schedules, no limit, no norm": (
        arena,
        {
            "lr_schedule": "linear",
            "entropy_schedule": "linear",
            "lr": 0.05,
            "max_grad_norm": None,
            "value_norm": False,
        },
    ),
    "ippo, tf32": (
        arena,
        {
            "algorithm": "ippo",
            "bootstrap": "agent",
            "normalize_advantage": "agent",
            "entropy_coeff": 0.0,
            "precision": "tf32",
        },
    ),
    "turns": (lambda: Nim(8, stones=6, seed=0), {"algorithm": "ippo", "bootstrap": "agent"}),
    "as one": (lambda: arena(n_groups=3, n_agents=6), {"normalize_observations": True}),
    "as one, centered": (lambda: arena(n_groups=3, n_agents=6), {"value_centering": True}),
    "turns, centered": (
        lambda: Nim(8, stones=6, seed=0),
        {"algorithm": "ippo", "bootstrap": "agent", "value_centering": True},
    ),
    "as one, of different sizes": (
        lambda: meadow("two"),
        {
            "central_input": "team",
            "normalize_observations": True,
            "clip_value": True,
            "minibatch_size": 32,
        },
    ),
    "as one, own states": (
        lambda: meadow("three", states="own"),
        {"central_input": "agent_state", "value_centering": True},
    ),
    "as one, state": (lambda: meadow("three"), {"central_input": "state"}),
    "attention, one-hot": (
        lambda: meadow("two", actions="one_hot", mask_actions=True),
        {"critic": CriticConfig([8], architecture="attention"), "central_input": "team"},
    ),
    "own networks": (
        lambda: meadow(actions="unbounded"),
        {"actor": NetworkConfig([8], sharing="none"), "critic": CriticConfig([8], sharing="none")},
    ),
    "scales as parameters": (
        lambda: meadow("two", actions="unbounded"),
        {"actor": TeamNetworkConfig([8], sharing="none", state_independent_scale=True)},
    ),
    "pictures": (
        lambda: Spotlights(8, seed=0),
        {"actor": NetworkConfig([8], body="cnn"), "critic": CriticConfig([8], body="cnn")},
    ),
    "pictures, by the actor alone": (
        lambda: Spotlights(8, seed=0),
        {"actor": NetworkConfig([8], body="cnn"), "normalize_observations": True},
    ),
    "bf16": (
        lambda: meadow("two", actions="unbounded"),
        {"precision": "bf16", "central_input": "team"},
    ),
}


FIRST = {"deaths", "turns, centered", "as one, of different sizes", "attention, one-hot", "bf16"}


@pytest.mark.parametrize("case", first_tier_cases(FIRST, CASES, "compiled"))
def test_traced_updates_match_eager_updates(case):
    """Bitwise, where a graph is run operation by operation."""
    make_env, settings = CASES[case]
    settings = {"minibatch_size": FRAMES // 2, **settings}
    one = train(make_env, "eager", **settings)
    next_number = torch.rand(1)
    # On AMD's Zen 5 the norm with convolutions differs by a bit, but no moment of Adam.
    rounded = {"grad_norm"} if case.startswith("pictures") else ()
    assert_equal_training(one, train(make_env, "trace", **settings), rounded)
    assert torch.equal(torch.rand(1), next_number)


@pytest.mark.parametrize(
    ("make_env", "target_kl"), [(arena, 0.015), (lambda: meadow("two"), 0.004)]
)
def test_epochs_stop_at_the_target_kl(make_env, target_kl):
    """Epochs after the stop change no parameter, random number or metric."""
    settings = {"num_epochs": 4, "target_kl": target_kl, "lr": 0.02}
    one = train(make_env, "eager", n=4, **settings)
    next_number = torch.rand(1)
    epochs = [next(iter(m.values()))["epochs"].item() for m in one[1]]
    assert min(epochs) < 4  # it stops early ...
    assert len(set(epochs)) > 1  # ... and not always
    assert_equal_training(one, train(make_env, "trace", n=4, **settings))
    assert torch.equal(torch.rand(1), next_number)


@pytest.mark.compiled
@pytest.mark.parametrize("case", ["as one, of different sizes", "pictures, by the actor alone"])
def test_compiled_updates_match_eager_updates(case):
    """Two groups of different agents that spawn and die; and one group that observes images."""
    make_env, settings = CASES[case]
    settings = {**settings, "minibatch_size": 40}
    one, other = (train(make_env, execution, **settings) for execution in ("eager", "compile"))
    assert_equal_training(one, other, rtol=1e-3, atol=1e-4)
    [program] = other[0].updates.programs.values()
    assert 0 < program.n_kernels < program.n_operations / 2
    assert not program.traced.checks


# ----------------------------------------------------------------------- recording, and waiting


@contextmanager
def counted_captures():
    sizes, plain = [], captured.capture

    def capture(function, indices, *leaves, **settings):
        sizes.append(len(indices))
        return plain(function, indices, *leaves, **settings)

    captured.capture = capture
    try:
        yield sizes
    finally:
        captured.capture = plain


def test_each_minibatch_size_is_recorded_once():
    with counted_captures() as sizes:
        learner, _ = train(
            arena, "trace", lr_schedule="linear", entropy_schedule="linear", target_kl=1e-3
        )
        assert sizes == [32, 16]
        learner.unshare()
        collector = make_collector(arena(), learner)
        for _ in range(2):
            learner.learn(collector.rollout())
        assert sizes == [32, 16] * 2
        again = copy.deepcopy(learner)
        again.learn(collector.rollout())  # a copy records graphs of its own networks
        assert sizes == [32, 16] * 3


def test_unsharing_during_training_matches_eager():
    settings = {"unshare_at": 0.5, "algorithm": "ippo"}
    one, other = (train(arena, execution, n=4, **settings) for execution in ("eager", "trace"))
    assert one[0].unshared
    assert_equal_training(one, other)


@pytest.mark.parametrize(
    ("case", "limit"),
    [("norms", 1e-3), ("as one", None), ("as one, of different sizes", 1e-3)],
)
def test_update_synchronizes_with_device_once(case, limit, monkeypatch):
    """It reads two numbers at its end: the number of epochs, and whether all is finite."""
    make_env, settings = CASES[case]
    learner, _ = train(make_env, "trace", n=1, target_kl=limit, **settings)
    batch = make_collector(make_env(), learner).rollout()
    # As on a GPU; the CPU version reads numbers as bits.
    monkeypatch.setattr(
        advantage, "_where_numbers", lambda mask, a, b, like: torch.where(mask, a, b)
    )
    inputs, plain = {}, Program.flat
    monkeypatch.setattr(Program, "flat", lambda p, x: inputs.update({p: list(x)}) or plain(p, x))
    with count_syncs() as syncs:
        learner.learn(batch)
    assert [sync.operation for sync in syncs if sync.kind == "wait"] == ["Tensor.tolist"]
    assert len(inputs) == 2
    for program, leaves in inputs.items():
        fold_constants(program.traced.module)
        assert not graph_syncs(program.traced.module, [*leaves, *program.traced.captured])


# ------------------------------------------------------------------------- state, poison, errors


@pytest.mark.parametrize("executions", [("trace", "trace"), ("eager", "trace")])
def test_resumes_exactly_in_mid_training(executions):
    """Also with another execution."""
    before, after = executions
    env = arena()
    collector = make_collector(env, make_learner(env, "eager"))
    batches = [collector.rollout() for _ in range(3)]
    whole = make_learner(env, before)
    whole.learn(batches[0].clone())
    saved, chance = copy.deepcopy(whole.state_dict()), torch.get_rng_state()
    metrics = [whole.learn(batch.clone()) for batch in batches[1:]]
    resumed = make_learner(env, after, lr=0.5)
    resumed.learn(batches[2].clone())  # other parameters before loading
    resumed.load_state_dict(saved)
    torch.set_rng_state(chance)
    found = [resumed.learn(batch.clone()) for batch in batches[1:]]
    assert_equal_training((whole, metrics), (resumed, found))


def test_values_in_masked_slots_have_no_effect():
    def run(poison):
        env = arena(n_agents=2, n_groups=1, action_mask=True)
        learner = make_learner(env, normalize_observations=True)
        collector = make_collector(env, learner)
        metrics = []
        for _ in range(2):
            batch = collector.rollout()
            mask = batch["agents", "mask"]
            assert bool((~mask).any())
            if poison is not None:
                for leaf in ("observation", "action", "action_log_prob"):
                    batch = poisoned(batch, ("agents", leaf), mask, poison)
            metrics.append(learner.learn(batch))
        return learner, metrics

    assert_equal_training(run(None), run(float("nan")))


def test_non_finite_loss_raises():
    messages = []
    for execution in ("eager", "trace"):
        env = arena()
        learner = make_learner(env, execution)
        batch = make_collector(env, learner).rollout()
        batch["next", "agents", "reward"][0, 0] = torch.inf
        with pytest.raises(NonFiniteError) as error:
            learner.learn(batch)
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    assert "group 'agents': loss_" in messages[0]


def test_unknown_execution_raises():
    with pytest.raises(ConfigError, match="execution is 'compiled'; did you mean 'compile'"):
        make_learner(arena(), "compiled")
    with pytest.raises(ConfigError, match="needs a GPU"):
        make_learner(arena(), "cudagraph")


# ------------------------------------------------------------------------------------------ Adam


def test_adam_matches_torch():
    """For gradients of any memory layout; skipped steps change nothing."""
    torch.manual_seed(0)
    ours = [torch.randn(5, 3), torch.randn(7)]
    theirs = [nn_parameter(x) for x in ours]
    optimizer = torch.optim.Adam(theirs, lr=0.1, eps=1e-5, fused=True)
    means, squares = ([torch.zeros_like(x) for x in ours] for _ in range(2))
    steps = [torch.zeros(()) for _ in ours]
    lr, settings = torch.tensor(0.1, dtype=torch.float64), ((0.9, 0.999), 1e-5)
    for i in range(6):
        gradients = [torch.randn(3, 5).mT, torch.randn(7)]
        skip = torch.tensor(float(i in (2, 5)))
        adam_(ours, gradients, means, squares, steps, lr, skip, [], *settings)
        if not skip:
            for parameter, gradient in zip(theirs, gradients):
                parameter.grad = gradient.contiguous()
            optimizer.step()
        for x, parameter in zip(ours, theirs):
            assert torch.equal(x, parameter)
    for i, parameter in enumerate(theirs):
        state = optimizer.state[parameter]
        assert torch.equal(state["exp_avg"], means[i])
        assert torch.equal(state["exp_avg_sq"], squares[i])
        assert state["step"].item() == steps[i].item() == 4


@pytest.mark.parametrize("n_features", [3, 64])
def test_adam_leaves_frozen_rows_as_they_are(n_features):
    """Bitwise equal to a step of all rows, where rows fill whole vectors of the processor."""
    tolerance = {"rtol": 1e-6 if n_features == 3 else 0, "atol": 0}
    torch.manual_seed(0)
    ours = [torch.randn(5, n_features), torch.randn(7), torch.randn(5, 2, n_features).mT]
    first = [x.clone() for x in ours]
    free = [x.clone() for x in ours]
    state, other = (
        ([torch.zeros_like(x) for x in ours], [torch.zeros_like(x) for x in ours]) for _ in range(2)
    )
    steps, counts = ([torch.zeros(()) for _ in ours] for _ in range(2))
    settings = torch.tensor(0.1, dtype=torch.float64), torch.zeros(())
    rows = torch.tensor([True, False, False, True, False])
    frozen = [rows.view(5, 1), torch.tensor(True), rows.view(5, 1, 1)]
    for _ in range(3):
        gradients = [torch.randn(x.shape) for x in ours]
        adam_(ours, gradients, *state, steps, *settings, frozen, (0.9, 0.999), 1e-5)
        adam_(free, gradients, *other, counts, *settings, [], (0.9, 0.999), 1e-5)
    for i in (0, 2):
        expected = torch.where(frozen[i], first[i], free[i])
        torch.testing.assert_close(ours[i], expected, **tolerance)
        for own, whole in zip(state, other):
            expected = torch.where(frozen[i], 0.0, whole[i])
            torch.testing.assert_close(own[i], expected, **tolerance)
    assert torch.equal(ours[1], first[1]) and not state[1][1].any()
    assert [step.item() for step in steps] == [3.0, 0.0, 3.0]


@pytest.mark.parametrize("stopped", [True, False])
def test_adam_with_all_rows_frozen_or_none(stopped):
    ours, free = ([torch.ones(3, 2)] for _ in range(2))
    state, other = (([torch.zeros(3, 2)], [torch.zeros(3, 2)], [torch.zeros(())]) for _ in range(2))
    settings = torch.tensor(0.1, dtype=torch.float64), torch.zeros(())
    frozen = [torch.full((3, 1), stopped)]
    adam_(ours, [torch.ones(3, 2)], *state, *settings, frozen, (0.9, 0.999), 1e-5)
    adam_(free, [torch.ones(3, 2)], *other, *settings, [], (0.9, 0.999), 1e-5)
    assert torch.equal(ours[0], torch.ones(3, 2) if stopped else free[0])
    assert state[2][0] == (0 if stopped else 1)


def nn_parameter(x):
    return torch.nn.Parameter(x.clone())


def test_bf16_networks_return_float32():
    learners = [make_learner(arena(), "eager", precision=p) for p in ("float32", "bf16")]
    batch = make_collector(arena(), learners[0]).rollout()
    values = [learner.critics["agents"](batch.clone()) for learner in learners]
    plain, coarse = (x["agents", "state_value"] for x in values)
    assert plain.dtype == coarse.dtype == torch.float32
    assert not torch.equal(plain, coarse)
    torch.testing.assert_close(plain, coarse, rtol=0.05, atol=0.05)
    # The same policy collects and learns: its first ratio is one.
    env = arena()
    learner = make_learner(env, "trace", precision="bf16", num_epochs=1, minibatch_size=FRAMES)
    metrics = learner.learn(make_collector(env, learner).rollout())
    assert metrics["agents", "max_ratio"].item() == pytest.approx(1.0, abs=1e-5)
