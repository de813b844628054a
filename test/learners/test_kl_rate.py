"""Learning rates that follow the KL divergence."""

import copy

import pytest
import torch
from meadow import make_meadow
from samples import assert_same, poisoned, states

from torchrl_marl import TeamSpec
from torchrl_marl.capture.syncs import count_syncs
from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.envs.toy import Arena
from torchrl_marl.errors import ConfigError
from torchrl_marl.functional import advantage
from torchrl_marl.learners import OnPolicyConfig, build_learners
from torchrl_marl.learners.clipping import GradientClip
from torchrl_marl.learners.happo_config import HAPPOConfig
from torchrl_marl.learners.kl_rate import KLRate
from torchrl_marl.learners.updates import KLStop
from torchrl_marl.modules import CriticConfig, NetworkConfig
from torchrl_marl.recipes import load_config

CPU = torch.device("cpu")
BASE = {"lr_schedule": "kl", "lr": 4e-3, "lr_kl": 2e-3, "minibatch_size": 40, "num_epochs": 2}


def arena(**settings):
    return Arena(8, **{"n_agents": 3, "years": 3, "lives": 2, "seed": 0} | settings)


def meadow():
    return make_meadow(8, "two")


def make(env, execution="eager", schema=OnPolicyConfig, sharing="group", **settings):
    torch.manual_seed(0)
    actor, critic = NetworkConfig([8], sharing=sharing), CriticConfig([8])
    config = schema(actor=actor, critic=critic, **{**BASE, **settings})
    [learner] = build_learners(TeamSpec.from_env(env), config, execution=execution)
    return learner


def batches_of(env, learner, n):
    policy = TeamPolicy(learner.actors.values())
    collector = RolloutCollector(env, policy, frames_per_batch=80)
    for i in range(n):
        torch.manual_seed(i)
        yield collector.rollout()


def train(make_env, n=3, **settings):
    """The learner after n batches, and their metrics."""
    env = make_env()
    learner = make(env, **settings)
    return learner, [learner.learn(batch) for batch in batches_of(env, learner, n)]


def assert_equal_training(one, other):
    (a, metrics), (b, found) = one, other
    for x, y in zip(states([a]), states([b]), strict=True):
        assert_same(x, y)
    for x, y in zip(metrics, found, strict=True):
        for key in x.keys(True, True):
            assert_same(x[key], y[key], key)


def by_rule(lr, kl, target=2e-3, low=1e-6, high=1e-2):
    """The rule of skrl's ``KLAdaptiveLR``, in Python numbers."""
    if kl > 2 * target:
        return max(lr / 1.5, low)
    return min(lr * 1.5, high) if kl < target / 2 else lr


# ------------------------------------------------------------------------------------- the rule


def test_rates_match_values_computed_by_hand():
    rate = KLRate(1, 0.004, 0.01, (0.002, 0.01), CPU)
    found = []
    for kl in (0.0, 0.0049, 0.004, 0.005, 0.02, 0.021, 0.03, 0.5, 9.0, 1.0, float("nan")):
        rate.adapt(torch.tensor([kl]), torch.tensor([True]))
        found.append(rate.values.item())
    up, falls = [0.006, 0.009, 0.01], [0.01 / 1.5, 0.01 / 2.25, 0.01 / 3.375]
    expected = [*up, 0.01, 0.01, *falls, 0.002, 0.002, 0.002]
    assert found == pytest.approx(expected, rel=1e-12)


def test_only_groups_that_learned_change_their_rates():
    rate = KLRate(3, 0.004, 0.01, (1e-6, 0.01), CPU)
    rate.adapt(torch.tensor([0.5, 0.5, 0.0]), torch.tensor([True, False, False]))
    assert rate.values.tolist() == pytest.approx([0.004 / 1.5, 0.004, 0.004])


def test_group_without_living_agents_keeps_its_rate():
    """Its divergence is 0, as for a policy that has not changed."""
    clips = {"a": GradientClip([torch.nn.Parameter(torch.ones(1))])}
    rate = KLRate(1, 0.004, 0.01, (1e-6, 0.01), CPU)
    stop = KLStop(clips, None, CPU, rate=rate)
    rows = []
    # Only the second and third minibatch have living agents: their mean is 0.005.
    for kl, ratio in ((0.0, 0.0), (0.004, 1.0), (0.006, 1.1)):
        metrics = {("a", "kl_approx"): torch.tensor(kl), ("a", "mean_ratio"): torch.tensor(ratio)}
        rows.append(stop.kl_of_update(metrics))
    stop.check(torch.stack(rows[:1]))
    assert rate.values.item() == 0.004
    stop.check(torch.stack(rows))
    assert rate.values.item() == 0.004
    stop.check(torch.stack([0.9 * row for row in rows]))
    assert rate.values.item() == pytest.approx(0.006)


# ---------------------------------------------------------------------------------- the learner


def test_rate_of_a_batch_follows_from_earlier_batches():
    """Bitwise equal to a constant rate that is set by hand."""
    env = arena()
    learner, constant = make(env, num_epochs=1), make(env, num_epochs=1, lr_schedule="constant")
    lr, rates = 4e-3, []
    for i, batch in enumerate(batches_of(env, learner, 6)):
        constant.optimizer.param_groups[0]["lr"] = lr
        for own in (constant, learner):
            torch.manual_seed(i)
            metrics = own.learn(batch.clone())["agents"]
        lr = by_rule(lr, metrics["kl_approx"].item())
        rates.append(lr)
        assert metrics["lr"].item() == pytest.approx(lr, rel=1e-6)
        for p, q in zip(learner.parameters(), constant.parameters(), strict=True):
            assert torch.equal(p, q)
    assert len(set(rates)) > 2 and max(rates) > min(rates)


def test_groups_have_separate_rates():
    """Each of two joined groups learns as with a constant rate."""
    env = meadow()
    learner = make(env, num_epochs=1, lr_kl=4e-4)
    rates, apart = dict.fromkeys(("cats", "mice"), 4e-3), []
    for i, batch in enumerate(batches_of(env, learner, 6)):
        at_start, state = dict(rates), copy.deepcopy(learner.state_dict())
        torch.manual_seed(i)
        metrics = learner.learn(batch.clone())
        for name, lr in at_start.items():
            rates[name] = by_rule(lr, metrics[name, "kl_approx"].item(), 4e-4)
            assert metrics[name, "lr"].item() == pytest.approx(rates[name], rel=1e-6)
            constant = make(env, num_epochs=1, lr_schedule="constant")
            constant.load_state_dict(copy.deepcopy(state))
            constant.optimizer.param_groups[0]["lr"] = lr
            torch.manual_seed(i)
            constant.learn(batch.clone())
            torch.testing.assert_close(rows(learner, name), rows(constant, name))
        apart.append(at_start["cats"] != at_start["mice"])
    assert any(apart)


def rows(learner, name):
    """The parameters of one group only."""
    [clip] = learner.updates.clips.values()
    [joined] = learner.block.joined.values()
    part = [group.name for group in joined.groups].index(name)
    owners = clip.row_groups.split(clip.sizes)
    pairs = zip(clip.parameters, owners, strict=True)
    own = [p.detach().reshape(len(o), -1)[o == part].flatten() for p, o in pairs if p.ndim]
    return torch.cat(own)


def test_rows_shared_by_groups_take_the_lower_rate():
    learner = make(meadow(), sharing="full")
    stop = learner.updates.stop
    stop.rate.values.copy_(torch.tensor([0.002, 0.008]))
    [clip] = stop.clips.values()
    highest, shares = stop.rates_of(clip.parameters)
    assert highest.item() == pytest.approx(0.008)
    common = [
        s for s, owner in zip(shares, clip.row_groups.split(clip.sizes)) if (owner == 2).all()
    ]
    assert common
    for share in common:
        assert torch.allclose(share, torch.tensor(0.25))


CASES = {
    "mappo": (arena, {}),
    "ippo, stops": (arena, {"algorithm": "ippo", "target_kl": 4e-3, "num_epochs": 4}),
    "two groups": (meadow, {"lr_kl": 4e-4}),
    "two groups, stop": (meadow, {"lr_kl": 4e-4, "target_kl": 4e-3, "num_epochs": 4}),
    "happo, stops": (arena, {"schema": HAPPOConfig, "sharing": "none", "target_kl": 4e-3}),
}


@pytest.mark.parametrize("case", ["ippo, stops", "two groups, stop", "happo, stops"])
def test_traced_updates_match_eager_updates(case):
    make_env, settings = CASES[case]
    one = train(make_env, **settings)
    found = [m["lr"].item() for metrics in one[1] for m in metrics.values()]
    assert len(set(found)) > 1
    assert_equal_training(one, train(make_env, execution="trace", **settings))


@pytest.mark.compiled
@pytest.mark.parametrize("case", ["mappo", "two groups"])
def test_compiled_updates_match_eager_updates(case):
    make_env, settings = CASES[case]
    (a, metrics), (b, found) = (
        train(make_env, execution=execution, **settings) for execution in ("eager", "compile")
    )
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)
    for x, y in zip(metrics, found, strict=True):
        for name in x.keys():
            torch.testing.assert_close(x[name, "lr"], y[name, "lr"])


def test_update_synchronizes_with_device_once(monkeypatch):
    env = meadow()
    learner = make(env, "trace")
    first, second = batches_of(env, learner, 2)
    learner.learn(first)
    monkeypatch.setattr(
        advantage, "_where_numbers", lambda mask, a, b, like: torch.where(mask, a, b)
    )
    with count_syncs() as syncs:
        learner.learn(second)
    assert [sync.operation for sync in syncs if sync.kind == "wait"] == ["Tensor.tolist"]


@pytest.mark.parametrize("case", ["two groups", "happo, stops"])
def test_learner_resumes_exactly(case):
    make_env, settings = CASES[case]
    env = make_env()
    learner = make(env, **settings)
    *first, last = batches_of(env, learner, 3)
    for batch in first:
        learner.learn(batch)
    other = make(make_env(), **{**settings, "lr": 9e-3})
    other.load_state_dict(copy.deepcopy(learner.state_dict()))
    results = []
    for own in (learner, other):
        torch.manual_seed(3)
        results.append((own, [own.learn(last.clone())]))
    rate = learner.kl_rate.values
    assert not torch.equal(rate, torch.full_like(rate, 4e-3))
    (a, metrics), (b, found) = results
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q)
    assert torch.equal(rate, other.kl_rate.values)
    for key in metrics[0].keys(True, True):
        assert_same(metrics[0][key], found[0][key], key)


def test_unsharing_keeps_the_rates():
    learner, _ = train(meadow, algorithm="ippo")
    before = learner.kl_rate.values.clone()
    learner.unshare()
    assert torch.equal(learner.updates.stop.rate.values, before)
    assert not torch.equal(before, torch.full_like(before, 4e-3))


def test_dead_agents_do_not_affect_the_divergence():
    def run(value):
        env = arena()
        learner, metrics = make(env), []
        for batch in batches_of(env, learner, 3):
            mask = batch["agents", "mask"]
            assert bool((~mask).any())
            if value is not None:
                for leaf in ("observation", "action", "action_log_prob"):
                    batch = poisoned(batch, ("agents", leaf), mask, value)
            metrics.append(learner.learn(batch))
        return learner, metrics

    assert_equal_training(run(None), run(float("nan")))


# ---------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["learner.lr=0.02"], "expected a value from learner.lr_min, 1e-06, to learner.lr_max, 0"),
        (["learner.lr=1e-7"], "use learner.lr_min=1e-07"),
        (
            ["population.size=2"],
            "learner.lr_schedule is 'kl', but a population does not support it; use "
            "learner.lr_schedule=constant or linear, or population.size=1.",
        ),
        (["learner.lr_schedule=constant", "learner.lr_kl=0.1"], "learner.lr_kl"),
        (["learner.entropy_coeff=0.1", "learner.entropy_schedule=kl"], "entropy_schedule is 'kl'"),
    ],
)
def test_invalid_settings_raise(settings, words):
    with pytest.raises(ConfigError, match=words):
        load_config("vmas_balance_mappo", ["learner.lr_schedule=kl", *settings]).check()
