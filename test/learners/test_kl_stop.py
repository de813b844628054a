"""Early stopping by the KL divergence of each group."""

import pytest
import torch
from meadow import make_meadow
from torch import tensor

from torchrl_marl import TeamSpec
from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.learners import OnPolicyConfig, OnPolicyLearner
from torchrl_marl.modules import CriticConfig, NetworkConfig


def learn(limit, num_epochs=3, layout="two", execution="eager", n=1, sharing="group", **settings):
    """The learner after some batches, all its parameters, and the last metrics."""
    torch.manual_seed(0)
    env = make_meadow(8, layout)
    team = TeamSpec.from_env(env)
    config = OnPolicyConfig(
        actor=NetworkConfig([8], sharing=sharing),
        critic=CriticConfig([8]),
        minibatch_size=80,
        num_epochs=num_epochs,
        target_kl=limit,
        lr=0.02,
        **settings,
    )
    learner = OnPolicyLearner(team.groups, config, execution=execution)
    collector = RolloutCollector(env, TeamPolicy(learner.actors.values()), frames_per_batch=80)
    for i in range(n):
        torch.manual_seed(i)
        metrics = learner.learn(collector.next())
    return learner, metrics


def rows(learner, name):
    """The parameters of one group only."""
    (clip,) = learner.updates.clips.values()
    (joined,) = learner.block.joined.values()
    part = [group.name for group in joined.groups].index(name)
    owners = clip.row_groups.split(clip.sizes)
    own = [
        p.detach().reshape(len(o), -1)[o == part].flatten()
        for p, o in zip(clip.parameters, owners)
        if p.ndim
    ]
    return torch.cat(own)


def between(metrics):
    """A limit between the two groups' divergences, the nearer and the farther group."""
    kl = {name: metrics[name, "kl_approx"].item() for name in metrics.keys()}
    near, *_, far = sorted(kl, key=kl.get)
    assert 0 <= kl[near] < 0.9 * kl[far]
    return (kl[near] * kl[far]) ** 0.5, near, far


@pytest.mark.parametrize("execution", ["eager", "trace"])
def test_one_group_stops_while_the_other_continues(execution):
    # An epoch is one update here; the first has no divergence, as that policy collected.
    _, metrics = learn(None, num_epochs=2)
    limit, near, far = between(metrics)
    limit *= 2  # metrics are means of two epochs, the first of which has no divergence
    learner, metrics = learn(limit, num_epochs=3, execution=execution)
    assert metrics[far, "epochs"].item() == 2
    assert metrics[near, "epochs"].item() == 3
    two, _ = learn(None, num_epochs=2, execution=execution)
    three, _ = learn(None, num_epochs=3, execution=execution)
    torch.testing.assert_close(rows(learner, far), rows(two, far), rtol=0, atol=0)
    torch.testing.assert_close(rows(learner, near), rows(three, near))
    assert not torch.equal(rows(two, near), rows(three, near))
    assert not torch.equal(rows(two, far), rows(three, far))


def test_metrics_leave_out_epochs_after_the_stop():
    _, unlimited = learn(None, num_epochs=2)
    limit, near, far = between(unlimited)
    _, metrics = learn(2 * limit, num_epochs=3)
    for key in ("loss_objective", "loss_critic", "kl_approx", "max_ratio"):
        torch.testing.assert_close(metrics[far, key], unlimited[far, key])


def test_rows_shared_by_groups_stop_with_the_first_group():
    _, metrics = learn(None, num_epochs=2, sharing="full")
    limit, near, far = between(metrics)
    learner, metrics = learn(2 * limit, num_epochs=3, sharing="full")
    two, _ = learn(None, num_epochs=2, sharing="full")
    assert (metrics[far, "epochs"].item(), metrics[near, "epochs"].item()) == (2, 3)
    for one, other in zip(learner.actors.parameters(), two.actors.parameters()):
        assert torch.equal(one, other)


@pytest.mark.parametrize("layout", ["two", "three"])
def test_traced_updates_stop_with_eager_updates(layout):
    limit, *_ = between(learn(None, num_epochs=2, layout=layout)[1])
    runs = [
        learn(2 * limit, num_epochs=4, n=3, layout=layout, execution=execution)
        for execution in ("eager", "trace")
    ]
    (one, ours), (other, theirs) = runs
    assert min(ours[name, "epochs"].item() for name in ours.keys()) < 4
    for key in ours.keys(True, True):
        assert torch.equal(ours[key], theirs[key]), key
    for a, b in zip(one.parameters(), other.parameters()):
        assert torch.equal(a, b)


def test_divergence_is_never_negative():
    """The mean of -log ratio can be negative: sampled actions may become more likely."""
    _, metrics = learn(None, num_epochs=4, n=4)
    for name in metrics.keys():
        assert metrics[name, "kl_approx"] >= 0


def test_stop_flags_match_values_computed_by_hand():
    learner, _ = learn(0.5)
    stop = learner.updates.stop
    stop.begin()
    stop.count()
    stop.check(tensor([[0.4, 0.2], [0.6, 0.9]]))  # means 0.5, not above it, and 0.55
    assert stop.stopped.tolist() == [0.0, 1.0]
    assert stop.all.item() == 0.0
    stop.count()
    assert stop.epochs.tolist() == [2.0, 1.0]
    stop.check(tensor([[0.7, 0.0]]))
    assert stop.all.item() == 1.0  # a stopped group does not start again
