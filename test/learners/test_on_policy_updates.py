"""Updates of the on-policy learner: their number, schedules, limits and metrics."""

import copy

import pytest
import torch
from on_policy_learners import learn, make_arena, make_batch, make_learner, weights

from torchrl_marl.learners.updates import Updates


def test_number_of_updates(monkeypatch):
    env = make_arena()
    learner = make_learner(env, num_epochs=3, minibatch_size=32)
    sizes = []
    plain = Updates.step

    def step(self, minibatch):
        sizes.append(minibatch.shape[0])
        return plain(self, minibatch)

    monkeypatch.setattr(Updates, "step", step)
    metrics = learn(learner, make_batch(env, learner))
    assert sizes == [32, 32, 16] * 3
    assert metrics["agents", "epochs"].item() == 3
    assert learner.state_dict()["_extra_state"]["optimizer"]["state"][0]["step"].item() == 9


@pytest.mark.parametrize(("limit", "epochs"), [(0.0, 1), (1e9, 3), (None, 3)])
def test_epochs_stop_at_the_target_kl(limit, epochs):
    env = make_arena()
    learner = make_learner(env, num_epochs=3, lr=0.05, target_kl=limit)
    metrics = learn(learner, make_batch(env, learner))
    assert metrics["agents", "kl_approx"] > 0
    assert metrics["agents", "epochs"].item() == epochs


def test_linear_and_constant_schedules():
    env = make_arena()
    linear = {"lr_schedule": "linear", "entropy_schedule": "linear", "lr": 0.1}
    learner = make_learner(env, **linear, entropy_coeff=0.2)
    batch = make_batch(env, learner)
    for fraction, lr in ((0.0, 0.1), (0.25, 0.075), (1.0, 0.0)):
        learner.set_progress(fraction)
        metrics = learn(copy.deepcopy(learner), batch.clone())
        assert metrics["agents", "lr"].item() == pytest.approx(lr)
        entropy = metrics["agents", "entropy"] * -0.2 * (1 - fraction)
        assert metrics["agents", "loss_entropy"].item() == pytest.approx(entropy.item(), abs=1e-6)
    before = weights(learner)
    learn(learner, batch)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(learner)))  # lr 0
    constant = make_learner(env, lr=0.1, entropy_coeff=0.2)
    constant.set_progress(0.5)
    metrics = learn(constant, batch)
    assert metrics["agents", "lr"].item() == pytest.approx(0.1)
    assert metrics["agents", "loss_entropy"].item() == pytest.approx(
        -0.2 * metrics["agents", "entropy"].item()
    )


def test_gradients_are_clipped_only_with_max_grad_norm():
    env = make_arena()
    for limit in (None, 1e-3):
        learner = make_learner(env, num_epochs=1, minibatch_size=80, max_grad_norm=limit)
        metrics = learn(learner, make_batch(env, learner))
        own = [*learner.actors["agents"].parameters(), *learner.critics["agents"].parameters()]
        norm = torch.cat([p.grad.flatten() for p in own]).norm().item()
        measured = metrics["agents", "grad_norm"].item()  # before it is clipped
        assert measured > 0.01
        assert norm == pytest.approx(measured if limit is None else 1e-3, rel=1e-3)


def test_observation_norm_is_updated_after_the_batch():
    env = make_arena()
    learner = make_learner(env, normalize_observations=True)
    norm = learner.observation_norms["agents"]
    batch = make_batch(env, learner)
    seen = []
    plain = learner.updates.step
    learner.updates.step = lambda minibatch: (seen.append(norm.count.item()), plain(minibatch))[1]
    learn(learner, batch)
    assert len(seen) == 8
    assert set(seen) == {0.0}
    living = batch["agents", "observation"][batch["agents", "mask"]].double()
    assert norm.count.item() == len(living) < 240
    torch.testing.assert_close(norm.mean, living.mean(0))
    torch.testing.assert_close(norm.variance, living.var(0, correction=0))
    # Actor and critic share the norm, which is saved once.
    assert learner.actors["agents"].module[0].module.features.norm is norm
    assert learner.critics["agents"].module.features.agents.norm is norm


def test_first_importance_ratio_is_one():
    """The policy that collects equals the policy that learns, including its statistics."""
    env = make_arena()
    learner = make_learner(env, normalize_observations=True, num_epochs=1, minibatch_size=80)
    for i in range(2):
        metrics = learn(learner, make_batch(env, learner, seed=i))
        assert metrics["agents", "max_ratio"].item() == pytest.approx(1.0, abs=1e-5)
        assert metrics["agents", "kl_approx"].item() == pytest.approx(0.0, abs=1e-6)


def test_metrics_of_a_batch():
    env = make_arena()
    learner = make_learner(env)
    batch = make_batch(env, learner)
    keys = set(batch.keys(True, True))
    metrics = learn(learner, batch)
    assert {
        "loss_objective",
        "loss_critic",
        "loss_entropy",
        "entropy",
        "kl_approx",
        "clip_fraction",
        "explained_variance",
        "grad_norm",
        "lr",
        "epochs",
    } <= set(metrics["agents"].keys())
    assert all(x.shape == () and not x.requires_grad for x in metrics.values(True, True))
    new = set(batch.keys(True, True)) - keys
    assert new == {("agents", leaf) for leaf in ("advantage", "value_target", "state_value")}
    living = batch["agents", "advantage"][batch["agents", "mask"]]
    assert living.mean().item() == pytest.approx(0.0, abs=1e-5)
    assert living.std(correction=0).item() == pytest.approx(1.0, abs=1e-3)
