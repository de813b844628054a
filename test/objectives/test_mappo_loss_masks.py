"""The MAPPO loss with invalid values in masked entries, functional, and of several groups."""

import pytest
import torch
from cover import pairwise
from ppo_losses import assert_same_outcome, make_networks, outputs_and_gradients
from samples import (
    DISCRETE,
    POISON,
    assert_same,
    make_batch,
    make_group,
    make_trajectory,
    poisoned,
    without_mask,
)

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.modules import ValueNorm
from torchrl_marl.objectives import MAPPOLoss

# ---------------------------------------------------------------------------- masks and poison


@pytest.mark.parametrize(
    "kind", ["bounded", "wide", "unbounded", "categorical", "one_hot", "multi_discrete", "hybrid"]
)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("exclude", [(), (-2,)])
def test_all_true_mask_equals_no_mask(kind, normalize, exclude):
    group = make_group(kind)
    actor, critic = make_networks(group, value_norm=ValueNorm())
    td = make_batch(group, actor, 16, alive=2.0)
    assert td["car", "mask"].all()
    outcomes = []
    for which in (group, without_mask(group)):
        actor, critic = make_networks(which, value_norm=ValueNorm())
        loss = MAPPOLoss(
            actor,
            critic,
            group=which,
            normalize_advantage=normalize,
            normalize_advantage_exclude_dims=exclude,
            clip_value=0.2,
        )
        outcomes.append(outputs_and_gradients(loss, td))
    assert_same_outcome(*outcomes)


@pairwise(
    kind=["bounded", "wide", "unbounded", "categorical", "one_hot", "multi_discrete", "hybrid"],
    centralized=[True, False],
    value=POISON,
    share=[True, False],
)
def test_masked_entries_of_a_minibatch_have_no_effect(kind, centralized, value, share):
    group = make_group(kind, action_mask=kind in DISCRETE)
    actor, critic = make_networks(
        group, centralized=centralized, value_norm=ValueNorm(), share=share
    )
    loss = MAPPOLoss(actor, critic, group=group, clip_value=0.2)
    td = make_batch(group, actor, 32)
    mask = td["car", "mask"]
    assert 0 < (~mask).sum() < mask.numel()
    before = outputs_and_gradients(loss, td)
    leaves = [
        "observation",
        "action",
        "action_log_prob",
        "advantage",
        "value_target",
        "state_value",
    ]
    everything = td
    for leaf in leaves:
        assert_same_outcome(
            before, outputs_and_gradients(loss, poisoned(td, ("car", leaf), mask, value))
        )
        everything = poisoned(everything, ("car", leaf), mask, value)
    assert_same_outcome(before, outputs_and_gradients(loss, everything))
    # The test can fail: entries of living agents have an effect.
    for leaf in leaves:
        if leaf == "action":
            continue
        x = td.clone()
        x["car", leaf] = torch.where(
            mask.view(mask.shape + (1,) * (x["car", leaf].ndim - 2)),
            x["car", leaf] + 0.5,
            x["car", leaf],
        )
        out = outputs_and_gradients(loss, x)
        assert any(not torch.equal(before[0][k], out[0][k]) for k in before[0]), leaf


@pytest.mark.parametrize("kind", DISCRETE)
def test_action_masks_of_masked_agents_have_no_effect(kind):
    group = make_group(kind, action_mask=True)
    actor, critic = make_networks(group)
    loss = MAPPOLoss(actor, critic, group=group)
    td = make_batch(group, actor, 32)
    before = outputs_and_gradients(loss, td)
    for legal in (True, False):
        other = td.clone()
        other["car", "action_mask"] = torch.where(
            td["car", "mask"].unsqueeze(-1), td["car", "action_mask"], torch.tensor(legal)
        )
        assert_same_outcome(before, outputs_and_gradients(loss, other))
    only_last = td.clone()
    last = torch.tensor([False, False, False, True])
    only_last["car", "action_mask"] = torch.where(
        td["car", "mask"].unsqueeze(-1), td["car", "action_mask"], last
    )
    assert_same_outcome(before, outputs_and_gradients(loss, only_last))


@pytest.mark.parametrize("bootstrap", ["team", "agent"])
@pytest.mark.parametrize("centralized", [True, False])
@pytest.mark.parametrize("value", POISON)
def test_masked_entries_of_a_trajectory_have_no_effect(bootstrap, centralized, value):
    group = make_group()
    actor, critic = make_networks(group, centralized=centralized)
    td = make_trajectory(group, 4, 6)
    td["car", "mask"][..., 0] |= ~td["car", "mask"].any(-1)  # else the reward is kept as it is
    with torch.no_grad():
        actor(td)
    mask = td["car", "mask"]
    truncated = td["next", "car", "truncated"] & ~td["next", "car", "terminated"]
    seen = td["next", "car", "mask"] | (mask & truncated.squeeze(-1))
    rewarded = mask.clone()
    if bootstrap == "agent":  # waiting agents still earn rewards; dead ones do not
        dead = torch.zeros_like(mask)
        dead[:, 1:] = td["next", "car", "done"][:, :-1].squeeze(-1)
        rewarded |= ~dead
    poison = [(("car", leaf), mask) for leaf in ("observation", "action", "action_log_prob")]
    poison += [(("next", "car", "reward"), rewarded), (("next", "car", "observation"), seen)]
    assert all(0 < (~alive).sum() < alive.numel() for _, alive in poison)

    def run(td):
        norm = ValueNorm()
        actor, critic = make_networks(group, centralized=centralized, value_norm=norm)
        loss = MAPPOLoss(actor, critic, group=group, bootstrap=bootstrap)
        estimated = td.clone()
        loss.value_estimator(estimated)
        written = [
            torch.where(mask.unsqueeze(-1), estimated["car", leaf], 0.0)
            for leaf in ("advantage", "value_target", "state_value")
        ]
        written += [norm.running_mean.clone(), norm.running_mean_sq.clone()]
        return outputs_and_gradients(loss, estimated), outputs_and_gradients(loss, td), written

    before = run(td)
    assert all(bool(x.isfinite().all()) for x in before[2])
    everything = td
    for key, alive in poison:
        everything = poisoned(everything, key, alive, value)
        for other in (poisoned(td, key, alive, value), everything):
            after = run(other)
            assert_same_outcome(before[0], after[0])
            assert_same_outcome(before[1], after[1])
            for a, b in zip(before[2], after[2]):
                assert_same(a, b, key)


# ------------------------------------------------------------------------- parameters, groups


@pytest.mark.parametrize("kind", ["bounded", "categorical"])
def test_functional_and_plain_losses_are_equal(kind):
    group = make_group(kind)
    td = make_trajectory(group, 4, 5)
    outcomes, norms = [], []
    for functional in (False, True):
        norm = ValueNorm()
        actor, critic = make_networks(group, value_norm=norm)
        batch = td.clone()
        torch.manual_seed(3)
        with torch.no_grad():
            actor(batch)
        loss = MAPPOLoss(actor, critic, group=group, functional=functional, clip_value=0.2)
        loss.make_value_estimator(gamma=0.9)
        if functional:
            loss.value_estimator(
                batch,
                params=loss.critic_network_params.detach(),
                target_params=loss.target_critic_network_params,
            )
        else:
            loss.value_estimator(batch)
        first = outputs_and_gradients(loss, batch)
        with torch.no_grad():
            for parameter in loss.parameters():
                parameter.sub_(0.1 * parameter.grad)
        # Estimated inside the loss, with the current weights and statistics.
        second = outputs_and_gradients(
            loss, batch.exclude(("car", "advantage"), ("car", "value_target"))
        )
        third = outputs_and_gradients(loss, batch)
        order = sorted(range(len(first[1])), key=lambda i: (first[1][i].shape, first[1][i].norm()))
        outcomes.append([(out, [g[i] for i in order]) for out, g in (first, second, third)])
        norms.append(torch.stack([norm.running_mean, norm.running_mean_sq]))
    assert torch.equal(*norms)
    assert norms[0].abs().sum() > 0
    for one, other in zip(*outcomes):
        assert_same_outcome(one, other)


def test_ippo_is_the_same_class_with_a_local_critic():
    """Each agent's value depends on its own observation only, and so do the losses."""
    group = make_group(n=2)
    for centralized in (True, False):
        actor, critic = make_networks(group, centralized=centralized)
        loss = MAPPOLoss(actor, critic, group=group, reduction="none", loss_critic_type="l2")
        td = make_batch(group, actor, 8, alive=2.0)
        other = td.clone()
        other["car", "observation"][:, 1] += 1.0
        same = torch.isclose(
            loss(td)["loss_critic"][:, 0], loss(other)["loss_critic"][:, 0], atol=1e-6
        )
        assert bool(same.all()) is not centralized


def test_losses_of_two_groups_are_independent():
    team = TeamSpec(
        [
            AgentSpec(name, 2, make_group().observation_spec[0], make_group().action_spec[0])
            for name in ("cat", "dog")
        ]
    )
    cats, dogs = team.groups.values()
    (cat_actor, cat_critic), (dog_actor, dog_critic) = (
        make_networks(group, seed=i) for i, group in enumerate((cats, dogs))
    )
    both = make_trajectory(cats, 4, 5)
    both.update(make_trajectory(dogs, 4, 5, seed=9))
    with torch.no_grad():
        dog_actor(cat_actor(both))
    losses = [
        MAPPOLoss(cat_actor, cat_critic, group=cats),
        MAPPOLoss(dog_actor, dog_critic, group=dogs),
    ]
    alone = []
    for group, loss in zip((cats, dogs), losses):
        own = both.select(
            group.name, ("next", group.name), *[("next", f) for f in ("done", "terminated")]
        ).clone()
        loss.value_estimator(own)
        alone.append((own, outputs_and_gradients(loss, own)))
    for loss in losses:
        loss.value_estimator(both)
    for group, loss, (own, expected) in zip((cats, dogs), losses, alone):
        for leaf in ("advantage", "value_target", "state_value"):
            assert_same(both[group.name, leaf], own[group.name, leaf])
        assert_same_outcome(expected, outputs_and_gradients(loss, both))
    other = poisoned(both, ("dog", "observation"), torch.zeros(4, 5, 2, dtype=torch.bool), 7.0)
    assert_same_outcome(alone[0][1], outputs_and_gradients(losses[0], other))
    changed = outputs_and_gradients(losses[1], other)
    assert not torch.equal(changed[0]["loss_critic"], alone[1][1][0]["loss_critic"])
