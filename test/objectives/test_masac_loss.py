"""MASAC's loss: reduction to TorchRL's, masked values, permuted and joined groups."""

import copy
import itertools
import math

import pytest
import torch
from masac_networks import SMALL, gradients, networks
from off_policy_losses import (
    assert_order_changes_nothing,
    assert_poison_changes_no_bit,
    join_groups_and_batch,
    load_rows,
    random_steps,
    two_groups_and_batch,
)
from samples import DISCRETE, make_group
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Bounded, Unbounded
from torchrl.objectives import DiscreteSACLoss, SACLoss, SoftUpdate, ValueEstimators

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.functional import soft_update_
from torchrl_marl.modules import make_action_critic, make_actor
from torchrl_marl.objectives import MASACLoss, own_actions
from torchrl_marl.specs.joining import join


def parameters_of(params):
    return [p for p in params.values(True, True) if p.requires_grad]


def assert_equal_gradients(found, expected, pairs):
    for (ours, theirs), of_ours, of_theirs in pairs:
        torch.testing.assert_close(found[ours], expected[theirs], rtol=0, atol=1e-6)
        one = torch.autograd.grad(found[ours], of_ours, retain_graph=True)
        other = torch.autograd.grad(expected[theirs], of_theirs, retain_graph=True)
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b.reshape(a.shape), rtol=0, atol=1e-6)


class EveryAction(nn.Module):
    """A critic of all discrete actions of each agent, as TorchRL's loss reads it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 4)

    def forward(self, observation):
        return self.linear(observation)


class OfAction(nn.Module):
    """Two such critics, each as a critic of the action that is given."""

    def __init__(self):
        super().__init__()
        self.networks = nn.ModuleList([EveryAction(), EveryAction()])

    def forward(self, observation, action):
        every = torch.stack([network(observation) for network in self.networks], -1)
        return (every * action.to(every.dtype).unsqueeze(-1)).sum(-2)


class TestReduction:
    """For one agent without masks the losses equal TorchRL's."""

    def keys(self, group, *names):
        return {key: group.key(key) for key in (*names, "reward", "done", "terminated")}

    @pytest.mark.parametrize("kind", ["bounded", "unbounded"])
    def test_sac(self, kind):
        torch.manual_seed(0)
        group = make_group(kind, n=1, mask=False)
        td = random_steps(group, 16)
        actor, _ = networks(group)
        critic = make_action_critic(group, SMALL)
        theirs = SACLoss(actor, critic, loss_function="l2", alpha_init=0.3, target_entropy=-2.0)
        theirs.set_keys(
            **self.keys(group, "state_action_value"),
            action=group.action_key,
            log_prob=group.key("action_log_prob"),
            priority=group.key("td_error"),
        )
        theirs.make_value_estimator(ValueEstimators.TD0, gamma=0.9)
        both = make_action_critic(group, SMALL, n_critics=2)
        for i in range(2):
            own = both.module[1].module.networks[i].parameters()
            values = parameters_of(theirs.qvalue_network_params[i])
            for mine, his in zip(own, values, strict=True):
                mine.data.copy_(his)
        ours = MASACLoss(actor, both, group=group, bootstrap="agent", gamma=0.9, alpha_init=0.3)
        SoftUpdate(theirs, tau=0.5), SoftUpdate(ours, tau=0.5)
        torch.manual_seed(3)
        expected = theirs(td.clone())
        torch.manual_seed(3)
        found = ours(td.clone())
        torch.testing.assert_close(found["loss_value"], expected["loss_qvalue"], rtol=0, atol=1e-6)
        pairs = (
            (
                ("loss_actor",) * 2,
                parameters_of(ours.actor_network_params),
                parameters_of(theirs.actor_network_params),
            ),
            (("loss_alpha",) * 2, [ours.log_alpha], [theirs.log_alpha]),
        )
        assert_equal_gradients(found, expected, pairs)
        for name in ("alpha", "entropy"):
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-6)

    def test_discrete_sac(self):
        torch.manual_seed(0)
        group = make_group("one_hot", n=1, mask=False)
        td = random_steps(group, 16)
        actor, _ = networks(group)
        seen = [group.observation_key]
        theirs = DiscreteSACLoss(
            actor,
            TensorDictModule(EveryAction(), seen, [group.key("action_value")]),
            action_space="one-hot",
            num_actions=4,
            loss_function="l2",
            alpha_init=0.3,
            target_entropy_weight=0.5,
        )
        theirs.set_keys(
            **self.keys(group, "action_value"),
            action=group.action_key,
            value=group.key("state_value"),
            priority=group.key("td_error"),
        )
        theirs.make_value_estimator(ValueEstimators.TD0, gamma=0.9)
        both = OfAction()
        values = theirs.qvalue_network_params
        for i, network in enumerate(both.networks):
            for mine, his in zip(network.parameters(), parameters_of(values), strict=True):
                mine.data.copy_(his[i])
        critic = TensorDictModule(
            both, [*seen, group.action_key], [group.key("state_action_value")]
        )
        ours = MASACLoss(actor, critic, group=group, bootstrap="agent", gamma=0.9, alpha_init=0.3)
        SoftUpdate(theirs, tau=0.5), SoftUpdate(ours, tau=0.5)
        expected, found = theirs(td.clone()), ours(td.clone())
        names = [(f"networks.{i}.linear.{x}") for x in ("weight", "bias") for i in range(2)]
        held = dict(ours.qvalue_network_params.flatten_keys(".").items())
        mine = [held[f"module.{name}"] for name in names]
        torch.testing.assert_close(found["loss_value"], expected["loss_qvalue"], rtol=0, atol=1e-6)
        got = torch.autograd.grad(found["loss_value"], mine, retain_graph=True)
        flat = dict(theirs.qvalue_network_params.flatten_keys(".").items())
        want = torch.autograd.grad(
            expected["loss_qvalue"],
            [flat[f"module.linear.{x}"] for x in ("weight", "bias")],
            retain_graph=True,
        )
        for i, (a, b) in enumerate(zip(got, [x for y in want for x in y], strict=True)):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6, msg=str(i))
        pairs = (
            (
                ("loss_actor",) * 2,
                parameters_of(ours.actor_network_params),
                parameters_of(theirs.actor_network_params),
            ),
            (("loss_alpha",) * 2, [ours.log_alpha], [theirs.log_alpha]),
        )
        assert_equal_gradients(found, expected, pairs)
        for name in ("alpha", "entropy"):
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-6)

    @pytest.mark.parametrize("kind", ["bounded", "categorical"])
    def test_functional_and_plain_networks_are_equal(self, kind):
        torch.manual_seed(0)
        group = make_group(kind)
        td = random_steps(group, 16)
        actor, critic = networks(group)
        plain = MASACLoss(
            copy.deepcopy(actor), copy.deepcopy(critic), group=group, functional=False
        )
        assert not hasattr(plain, "target_actor_network")
        ours = MASACLoss(actor, critic, group=group)
        updater = SoftUpdate(ours, tau=0.25)
        for _ in range(3):
            for one in (
                *parameters_of(ours.qvalue_network_params),
                *plain.qvalue_network.parameters(),
            ):
                one.data.mul_(1.1)
            updater.step()
            target, source = plain.target_qvalue_network, plain.qvalue_network
            soft_update_(list(target.parameters()), list(source.parameters()), 0.25)
        found = []
        for loss in (plain, ours):
            torch.manual_seed(1)
            found.append(loss(td.clone()))
        for key, value in found[0].items():
            torch.testing.assert_close(value, found[1][key])


def likeliest(logits):
    return nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)


def test_target_entropy_counts_own_actions_only():
    """Of agents with 1 and 3 action features; and of 2 and 4 legal actions of 4."""
    agents = [
        AgentSpec(name, 1, Unbounded((2,)), Bounded(-2, 2, (n,)))
        for name, n in (("a", 1), ("b", 3))
    ]
    group = join(tuple(TeamSpec(agents).groups.values()))
    loss = MASACLoss(*networks(group), group=group)
    assert loss.own_target.squeeze(-1).tolist() == [-1.0, -3.0]
    torch.testing.assert_close(loss.log_range.squeeze(-1), torch.tensor([1.0, 3.0]) * math.log(2))

    group = make_group("categorical", n=3, action_mask=True)
    td = random_steps(group, 1, alive=1.1)
    td["car", "action_mask"] = torch.tensor([[[1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]]]).bool()
    loss = MASACLoss(*networks(group), group=group)
    found = loss._policy_actions(td).target_entropy
    torch.testing.assert_close(found.flatten(), 0.5 * torch.tensor([2.0, 4.0, 4.0]).log())


def test_bounds_do_not_change_the_entropy():
    """The same network's actions, ten times as wide."""
    found = []
    for high in (1.0, 10.0):
        spec = AgentSpec("car", 3, Unbounded((5,)), Bounded(-high, high, (2,)))
        group = TeamSpec([spec]).groups["car"]
        torch.manual_seed(0)
        loss = MASACLoss(*networks(group), group=group, functional=False)
        td = random_steps(group, 16)
        td["car", "action"] = high * torch.linspace(-0.9, 0.9, 96).reshape(16, 3, 2)
        torch.manual_seed(1)
        found.append(loss(td))
    for key, value in found[0].items():
        torch.testing.assert_close(found[1][key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["wide", "unbounded", "categorical", "one_hot"])
@pytest.mark.parametrize("bootstrap", ["team", "agent"])
@pytest.mark.parametrize("centralized", [True, False, "state"])
def test_values_of_masked_agents_have_no_effect_bitwise(kind, bootstrap, centralized):
    """Masked entries change no bit of losses, errors and gradients."""
    torch.manual_seed(0)
    group = make_group(kind, state=4, action_mask=kind in DISCRETE)
    actor, critic = networks(group, centralized=centralized)
    loss = MASACLoss(actor, critic, group=group, bootstrap=bootstrap, functional=False)
    found = assert_poison_changes_no_bit(gradients, loss, random_steps(group, 32))
    assert sum(bool((g != 0).any()) for g in found) > 8


@pytest.fixture
def without_chance(monkeypatch):
    """Equal noise for all agents; the most likely discrete action is drawn."""
    from torch.distributions import normal

    from torchrl_marl.objectives import masac

    monkeypatch.setattr(masac, "draw_one_hot", likeliest)
    half = lambda shape, dtype, device: torch.full(shape, 0.5, dtype=dtype, device=device)  # noqa: E731
    monkeypatch.setattr(normal, "_standard_normal", half)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3)))[1:3])
@pytest.mark.parametrize("architecture", ["local", "set"])
@pytest.mark.parametrize("kind", ["bounded", "categorical"])
def test_permuted_agents(order, architecture, kind, without_chance):
    from torchrl_marl.modules import CriticConfig

    torch.manual_seed(0)
    group = make_group(kind)
    config = CriticConfig([8], architecture="set") if architecture == "set" else SMALL
    actor = make_actor(group, SMALL)
    critic = make_action_critic(group, config, centralized=architecture == "set", n_critics=2)
    loss = MASACLoss(actor, critic, group=group, functional=False)
    assert_order_changes_nothing(loss, random_steps(group, 16), order)


@pytest.mark.parametrize("bootstrap", ["team", "agent"])
@pytest.mark.parametrize("kind", ["bounded", "categorical"])
def test_joined_groups_equal_separate_losses_and_gradients(bootstrap, kind, without_chance):
    """Two groups of different sizes side by side; critics read their own group's agents."""
    torch.manual_seed(0)
    groups, td = two_groups_and_batch(kind, (2, 3), 16, seed=1)
    joined, together = join_groups_and_batch(groups, td)
    settings = {"bootstrap": bootstrap, "functional": False}
    actor, critic = networks(joined)
    both = MASACLoss(actor, critic, group=joined, **settings)
    both.log_alpha.data.copy_(torch.tensor([-1.0, 0.5]))
    terms = both(together)
    assert terms["loss_value"].shape == (2,)
    for i, group in enumerate(groups):
        alone = MASACLoss(*networks(group), group=group, **settings)
        alone.log_alpha.data.copy_(both.log_alpha.data[i])
        load_rows(alone.actor_network, actor, i)
        load_rows(alone.qvalue_network, critic, i)
        load_rows(alone.target_qvalue_network, critic, i)
        load_rows(both.target_qvalue_network, critic, slice(None))
        found = alone(td.clone())
        for key, value in found.items():
            torch.testing.assert_close(terms[key][i], value, rtol=1e-5, atol=1e-6)
        mine = torch.autograd.grad(found["loss_actor"], list(alone.actor_network.parameters()))
        own = list(actor.parameters())
        theirs = torch.autograd.grad(terms["loss_actor"].sum(), own, retain_graph=True)
        for a, b in zip(mine, theirs, strict=True):
            row = b[i][tuple(slice(0, n) for n in a.shape)]
            torch.testing.assert_close(a, row, rtol=1e-4, atol=1e-6)


def test_gradients_stay_finite_with_large_temperature_and_masks():
    torch.manual_seed(0)
    group = make_group("categorical", action_mask=True)
    loss = MASACLoss(*networks(group), group=group, alpha_init=1e6, functional=False)
    terms, found = gradients(loss, random_steps(group, 16))
    assert all(bool(x.isfinite().all()) for x in (*found, *terms.values()))


def test_invalid_settings_raise():
    group = make_group()
    for wrong in ({"bootstrap": "all"}, {"actor_gradient": "own"}, {"alpha_init": 0.0}):
        with pytest.raises(ValueError, match="expected"):
            MASACLoss(*networks(group), group=group, **wrong)
    with pytest.raises(ValueError, match="expected"):
        own_actions.ValuesOfMovedActions(group, "own")
