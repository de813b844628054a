"""MASAC's loss of discrete actions of several agents and groups."""

import pytest
import torch
from masac_networks import gradients, networks
from off_policy_losses import (
    join_groups_and_batch,
    load_rows,
    random_steps,
    rows_moved,
    two_groups_and_batch,
)
from samples import make_group

from torchrl_marl.objectives import MASACLoss
from torchrl_marl.specs.joining import join


@pytest.mark.parametrize("kind", ["bounded", "categorical"])
@pytest.mark.parametrize("whose", ["group", "agent"])
def test_gradients_do_not_cross_groups(kind, whose):
    """With critics of both groups, each group's actions raise its own values only."""
    torch.manual_seed(0)
    groups, td = two_groups_and_batch(kind, (2, 1), 8, alive=1.1)
    joined, together = join_groups_and_batch(groups, td)
    actor, critic = networks(joined, team=join(groups, same_actions=False))
    loss = MASACLoss(actor, critic, group=joined, actor_gradient=whose, functional=False)
    terms = loss(together)
    first, *_ = actor.parameters()  # [G, ...]: rows of each group
    assert sorted(rows_moved(term, first) for term in terms["loss_actor"]) == [[0], [1]]
    assert [rows_moved(term, loss.log_alpha) for term in terms["loss_alpha"]] == [[0], [1]]
    if kind == "bounded":
        crossing = MASACLoss(actor, critic, group=joined, actor_gradient="all", functional=False)
        assert rows_moved(crossing(together)["loss_actor"][0], first) == [0, 1]


def test_actor_gradient_settings_agree_for_local_critics():
    torch.manual_seed(0)
    group = make_group("categorical", action_mask=True)
    actor, critic = networks(group, centralized=False)
    td = random_steps(group, 16)
    found = []
    for whose in ("all", "agent"):
        loss = MASACLoss(actor, critic, group=group, actor_gradient=whose, functional=False)
        found.append(gradients(loss, td.clone()))
    for one, other in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(one, other)
    for key, value in found[0][0].items():
        torch.testing.assert_close(value, found[1][0][key])


@pytest.mark.parametrize("whose", ["group", "agent"])
@pytest.mark.parametrize("sizes", [(2, 3), (1, 1)])
def test_separate_groups_are_evaluated_side_by_side(whose, sizes):
    """Equal to evaluation in turn, with copies for the largest group only."""
    torch.manual_seed(0)
    joined, together = join_groups_and_batch(
        *two_groups_and_batch("categorical", sizes, 16, seed=1)
    )
    actor, critic = networks(joined)
    found, copies = [], []
    for apart in (False, True):
        loss = MASACLoss(
            actor, critic, group=joined, actor_gradient=whose, groups_apart=apart, functional=False
        )
        load_rows(loss.target_qvalue_network, critic, slice(None))
        seen = []
        hook = critic.register_forward_pre_hook(lambda _, x, seen=seen: seen.append(x[0].shape))
        torch.manual_seed(1)
        found.append(gradients(loss, together.clone()))
        hook.remove()
        copies.append(max(shape[1] for shape in seen if len(shape) > 1))
    assert copies == [n * joined.n_actions for n in (sum(sizes), max(sizes))]
    for key, value in found[0][0].items():
        torch.testing.assert_close(found[1][0][key], value, rtol=0, atol=1e-6)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-6)
