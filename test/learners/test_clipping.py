"""Gradient clipping: torch's for one group, separate for each of several groups."""

import pytest
import torch
from meadow import KINDS, make_team
from torch import nn
from torchrl.data import Categorical, Unbounded

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.learners.clipping import GradientClip
from torchrl_marl.learners.off_policy import actor_clip
from torchrl_marl.modules import NetworkConfig, make_actor, make_critic
from torchrl_marl.modules.config import CriticConfig
from torchrl_marl.objectives.imitation import ImitationLoss
from torchrl_marl.specs.joining import join

H = 8
NAN = float("nan")


def networks_of(layout="two", actor="group", critic="group", sees="own", architecture="mlp"):
    team = make_team(layout)
    groups = tuple(team.groups.values())
    group = join(groups)
    seen = join(groups, same_actions=False) if sees == "team" else None
    config = CriticConfig([H], sharing=critic, architecture=architecture)
    torch.manual_seed(0)
    return (
        group,
        seen,
        make_actor(group, NetworkConfig([H], sharing=actor)),
        make_critic(group, config, centralized=sees != "own", team=seen),
    )


def test_groups_with_action_masks_and_team_critic():
    """The joined group and the input of the critic have the same agents and the same name."""
    agents = [
        AgentSpec(name, n, Unbounded((3,)), Categorical(2), action_mask=True)
        for name, n in (("cat", 1), ("mouse", 2))
    ]
    groups = tuple(TeamSpec(agents).groups.values())
    group, seen = join(groups), join(groups, same_actions=False)
    assert group.name == seen.name and seen.action_mask_key is None
    actor = make_actor(group, NetworkConfig([H]))
    critic = make_critic(group, CriticConfig([H]), centralized=True, team=seen)
    clip = GradientClip.of_networks(group, seen, actor, critic, 0.5)
    for owner in clip.row_groups.split(clip.sizes):
        assert owner.tolist() == [0, 1]


def clip_of(limit, **kwargs):
    group, seen, actor, critic = networks_of(**kwargs)
    clip = GradientClip.of_networks(group, seen, actor, critic, limit)
    generator = torch.Generator().manual_seed(1)
    for parameter in clip.parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return clip, group


def rows_of(clip, part):
    """Gradients of the rows of a part; without sharing there is a row for each kind."""
    return [p.grad[part] for p in clip.parameters]


@pytest.mark.parametrize("limit", [None, 1e9, 0.5])
def test_single_group_matches_clip_grad_norm_of_torch(limit):
    clip, _ = clip_of(limit, layout="one")
    before = [p.grad.clone() for p in clip.parameters]
    norm = clip()
    twins = [nn.Parameter(torch.zeros_like(g)) for g in before]
    for twin, gradient in zip(twins, before):
        twin.grad = gradient
    wanted = nn.utils.clip_grad_norm_(twins, float("inf") if limit is None else limit)
    torch.testing.assert_close(norm, wanted)
    assert norm.shape == ()
    for parameter, twin in zip(clip.parameters, twins):
        torch.testing.assert_close(parameter.grad, twin.grad)


@pytest.mark.parametrize("limit", [None, 1e9, 0.5, 5.0])
@pytest.mark.parametrize("sees", ["own", "observations", "team"])
def test_each_of_several_groups_matches_clip_grad_norm_of_torch(limit, sees):
    """Nothing is shared: every row belongs to one group."""
    clip, group = clip_of(limit, sees=sees)
    assert {len(p) for p in clip.parameters} == {2}
    for parameter, owner in zip(clip.parameters, clip.row_groups.split(clip.sizes)):
        assert owner.tolist() == [0, 1]
        parameter.grad[0] *= 3
    before = [[g.clone() for g in rows_of(clip, part)] for part in range(2)]
    norms = clip()
    assert norms.shape == (2,)
    for part in range(2):
        twins = [nn.Parameter(torch.zeros_like(g)) for g in before[part]]
        for twin, gradient in zip(twins, before[part]):
            twin.grad = gradient
        wanted = nn.utils.clip_grad_norm_(twins, float("inf") if limit is None else limit)
        torch.testing.assert_close(norms[part], wanted)
        for gradient, twin in zip(rows_of(clip, part), twins):
            torch.testing.assert_close(gradient, twin.grad)
    assert norms[0] > norms[1]


@pytest.mark.parametrize("layout", ["two", "three"])
@pytest.mark.parametrize("sharing", ["none", "group", "full", "trunk", "agent_id", "masks"])
def test_rows_are_assigned_to_the_groups_they_serve(layout, sharing):
    clip, group = clip_of(1.0, layout=layout, actor=sharing)
    owners = clip.row_groups.split(clip.sizes)[:-4]  # of the actor
    common = len(group.groups)
    kinds, n_kinds = torch.tensor(group.kinds), len(set(group.kinds))
    by_kind = [group.group_index[group.kinds.index(kind)] for kind in range(n_kinds)]
    for parameter, owner in zip(clip.parameters, owners):
        wanted = {len(kinds): list(group.group_index), n_kinds: by_kind}.get(len(parameter))
        if len(parameter) == 1 or sharing in ("full", "agent_id", "masks"):
            wanted = [common] * len(parameter)
        assert owner.tolist() == wanted


@pytest.mark.parametrize("actions", ["bounded", "wide", "unbounded"])
@pytest.mark.parametrize("sharing", ["none", "group", "agent_id"])
def test_rows_of_stochastic_actors_are_found_for_any_bounds(actions, sharing):
    group = join(tuple(make_team("two", actions).groups.values()))
    actor = make_actor(group, NetworkConfig([H], sharing=sharing))
    clip = actor_clip(ImitationLoss(actor, group=group, functional=False), 1.0)
    expected = {"none": list(group.group_index), "group": [0, 1], "agent_id": [2]}[sharing]
    for rows in clip.row_groups.split(clip.sizes)[:2]:
        assert rows.tolist() == (expected if len(expected) > 1 else expected * len(rows))


def test_last_layer_rows_of_shared_critic_belong_to_groups():
    """One network has an output for each agent; the last rows belong to the agent's group."""
    clip, group = clip_of(1.0, critic="full", sees="team")
    *_, first, first_bias, last, last_bias = clip.row_groups.split(clip.sizes)
    n = [n for n, _, _ in KINDS.values()]
    assert set(first.tolist()) == set(first_bias.tolist()) == {2}
    assert last.tolist() == last_bias.tolist() == [0] * n[0] + [1] * n[1]


@pytest.mark.parametrize("architecture", ["set", "attention"])
def test_set_network_serves_all_groups(architecture):
    clip, _ = clip_of(1.0, sees="team", architecture=architecture)
    rows = zip(clip.parameters, clip.row_groups.split(clip.sizes))
    of_critic = [(parameter, owner) for parameter, owner in rows][4:]
    for parameter, owner in of_critic:
        # The bias of attention keys changes nothing: its gradient is 0 up to rounding.
        if parameter.shape != (3 * H,):
            assert (owner == 2).all()
    assert len(of_critic) == {"set": 6, "attention": 10}[architecture]


def test_shared_rows_are_clipped_together():
    limit = 0.5
    clip, _ = clip_of(limit, actor="trunk")
    before = [p.grad.clone() for p in clip.parameters]
    norms = clip()
    owners = clip.row_groups.split(clip.sizes)
    totals = torch.zeros(3)
    for gradient, owner in zip(before, owners):
        totals.index_add_(0, owner, gradient.reshape(len(owner), -1).square().sum(1))
    totals = totals.sqrt()
    torch.testing.assert_close(norms, (totals[:2].square() + totals[2].square()).sqrt())
    for gradient, owner, parameter in zip(before, owners, clip.parameters):
        factor = (limit / totals).clamp(max=1.0)[owner]
        wanted = gradient * factor.view(-1, *[1] * (gradient.ndim - 1))
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-4, atol=1e-6)
    after = torch.zeros(3)
    for parameter, owner in zip(clip.parameters, owners):
        after.index_add_(0, owner, parameter.grad.reshape(len(owner), -1).square().sum(1))
    torch.testing.assert_close(after.sqrt(), torch.full((3,), limit), rtol=1e-4, atol=0)


def test_nan_gradient_of_one_group_leaves_other_groups_clean():
    clip, _ = clip_of(0.5)
    clean, _ = clip_of(0.5)
    clip.parameters[0].grad[1, 0, 0] = NAN
    norms, wanted = clip(), clean()
    assert norms[1].isnan()
    assert norms[0] == wanted[0]
    for mine, ours in zip(clip.parameters, clean.parameters):
        assert torch.equal(mine.grad[0], ours.grad[0])
    assert clip.parameters[3].grad[1].isnan().all()


def test_parameters_without_gradient_are_skipped():
    clip, _ = clip_of(0.5)
    clip.parameters[0].grad = None
    norms = clip()
    assert clip.parameters[0].grad is None
    assert norms.isfinite().all()


def test_finding_owners_draws_no_random_numbers():
    """The state of the global generator stays as it was."""
    group, seen, actor, critic = networks_of()
    torch.manual_seed(7)
    wanted = torch.rand(3)
    torch.manual_seed(7)
    GradientClip.of_networks(group, seen, actor, critic, 1.0)
    assert torch.equal(torch.rand(3), wanted)
    assert all(p.grad is None for p in (*actor.parameters(), *critic.parameters()))


def test_rows_with_zero_parameters_are_assigned_to_groups():
    """A unit whose output is 0 for all inputs still belongs to its group."""
    group, seen, actor, critic = networks_of()
    with torch.no_grad():
        for parameter in (*actor.parameters(), *critic.parameters()):
            parameter.zero_()
    clip = GradientClip.of_networks(group, seen, actor, critic, 1.0)
    for parameter, owner in zip(clip.parameters, clip.row_groups.split(clip.sizes)):
        assert owner.tolist() == [0, 1]
        assert not parameter.any()


def test_transposed_gradient_is_clipped_in_place():
    """Autograd returns such gradients for a batched product."""
    clip, _ = clip_of(0.5)
    contiguous = [p.grad.clone() for p in clip.parameters]
    transposed = [
        g.mT.clone(memory_format=torch.contiguous_format).mT if g.ndim == 3 else g.clone()
        for g in contiguous
    ]
    assert not all(g.is_contiguous() for g in transposed)
    assert torch.equal(clip.scale(contiguous), clip.scale(transposed))
    for one, other in zip(contiguous, transposed):
        assert torch.equal(one, other)
