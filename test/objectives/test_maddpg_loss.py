"""MADDPG's loss: reduction to TorchRL's, by hand, masked values, permuted and joined groups."""

import copy
import itertools

import pytest
import torch
from off_policy_losses import (
    assert_order_changes_nothing,
    assert_poison_changes_no_bit,
    gradients_of,
    join_groups_and_batch,
    load_rows,
    one_step_of_two_agents,
    random_steps,
    rows_moved,
    two_groups_and_batch,
)
from samples import DISCRETE, make_group
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.data.postprocs import MultiStep
from torchrl.objectives import DDPGLoss, SoftUpdate, TD3Loss, ValueEstimators

from torchrl_marl.functional import soft_update_
from torchrl_marl.modules import NetworkConfig, make_action_critic, make_deterministic_actor
from torchrl_marl.objectives import MADDPGLoss
from torchrl_marl.specs.joining import join

SMALL = NetworkConfig([8])


def networks(group, *, centralized=True, n_critics=1, config=SMALL, **kwargs):
    actor = make_deterministic_actor(group, config)
    critic = make_action_critic(
        group, config, centralized=centralized, n_critics=n_critics, **kwargs
    )
    for parameter in [*actor.parameters(), *critic.parameters()]:
        nn.init.normal_(parameter, std=0.3)
    return actor, critic


def gradients(loss, td):
    """Gradients of the actor's loss by the actor, and of the critics' loss by the critics."""
    own = {"loss_actor": loss.actor_network, "loss_value": loss.qvalue_network}
    return gradients_of(loss(td), {key: network.parameters() for key, network in own.items()})


def parameters_of(params):
    return [p for p in params.values(True, True) if p.requires_grad]


def apart(params):
    return torch.nn.utils.parameters_to_vector(parameters_of(params))


class TestReduction:
    """For one agent without masks the losses equal TorchRL's."""

    def setup_method(self):
        torch.manual_seed(0)
        self.group = make_group(n=1, mask=False)
        self.td = random_steps(self.group, 16)
        self.keys = {
            key: self.group.key(key)
            for key in ("state_action_value", "reward", "done", "terminated")
        }

    def test_ddpg(self):
        actor, critic = networks(self.group)
        theirs = DDPGLoss(actor, critic, delay_actor=True, delay_value=True)
        theirs.set_keys(**self.keys, priority=self.group.key("td_error"))
        theirs.make_value_estimator(ValueEstimators.TD0, gamma=0.9)
        ours = MADDPGLoss(actor, critic, group=self.group, bootstrap="agent", gamma=0.9)
        # SoftUpdate copies the networks into their targets, which are changed after that.
        SoftUpdate(theirs, tau=0.5), SoftUpdate(ours, tau=0.5)
        for ours_target, target in (
            (ours.target_actor_network_params, theirs.target_actor_network_params),
            (ours.target_qvalue_network_params, theirs.target_value_network_params),
        ):
            for one, other in zip(ours_target.values(True, True), target.values(True, True)):
                one.data.add_(0.1)
                other.data.add_(0.1)
        expected, found = theirs(self.td.clone()), ours(self.td.clone())
        pairs = (
            ("loss_actor", theirs.actor_network_params, ours.actor_network_params),
            ("loss_value", theirs.value_network_params, ours.qvalue_network_params),
        )
        for name, of_theirs, of_ours in pairs:
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-6)
            one = torch.autograd.grad(found[name], parameters_of(of_ours))
            other = torch.autograd.grad(expected[name], parameters_of(of_theirs))
            for a, b in zip(one, other, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-6)

    @pytest.mark.parametrize("noise", [0.0, 0.7])
    def test_td3(self, noise):
        actor, critic = networks(self.group)
        theirs = TD3Loss(
            actor,
            critic,
            bounds=(-1.0, 1.0),
            policy_noise=noise,
            noise_clip=0.5,
            loss_function="l2",
        )
        theirs.set_keys(**self.keys, action=self.group.action_key, priority=("car", "td_error"))
        theirs.make_value_estimator(ValueEstimators.TD0, gamma=0.9)
        both = make_action_critic(self.group, SMALL, n_critics=2)
        for i in range(2):
            values = theirs.qvalue_network_params[i].values(True, True)
            own = both.module[1].module.networks[i].parameters()
            for mine, his in zip(own, [x for x in values if x.requires_grad], strict=True):
                mine.data.copy_(his)
        ours = MADDPGLoss(
            actor, both, group=self.group, bootstrap="agent", gamma=0.9, policy_noise=noise
        )
        SoftUpdate(theirs, tau=0.5), SoftUpdate(ours, tau=0.5)
        torch.manual_seed(3)
        expected = theirs(self.td.clone())
        torch.manual_seed(3)
        found = ours(self.td.clone())
        torch.testing.assert_close(found["loss_actor"], expected["loss_actor"], rtol=0, atol=1e-6)
        torch.testing.assert_close(found["loss_value"], expected["loss_qvalue"], rtol=0, atol=1e-5)

    def test_functional_and_plain_networks_are_equal(self):
        actor, critic = networks(self.group, n_critics=2)
        plain = MADDPGLoss(
            copy.deepcopy(actor), copy.deepcopy(critic), group=self.group, functional=False
        )
        ours = MADDPGLoss(actor, critic, group=self.group)
        updater = SoftUpdate(ours, tau=0.25)
        for _ in range(3):
            for one in (
                *parameters_of(ours.actor_network_params),
                *plain.actor_network.parameters(),
            ):
                one.data.mul_(1.1)
            updater.step()
            for name in ("actor_network", "qvalue_network"):
                target, source = (getattr(plain, f"{x}{name}") for x in ("target_", ""))
                soft_update_(list(target.parameters()), list(source.parameters()), 0.25)
        one, other = plain(self.td.clone()), ours(self.td.clone())
        for key, value in one.items():
            torch.testing.assert_close(value, other[key])


class Sum(nn.Module):
    """A critic: each agent's value is a sum of all observations and weighted actions."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 10.0]))

    def forward(self, observation, action):
        total = (observation + self.weight.unsqueeze(-1) * action).sum(-2, keepdim=True)
        own = torch.tensor([1.0, 3.0]).unsqueeze(-1)  # agent 1 has three times the value
        return own * total.expand_as(observation)


class TestByHand:
    """Two agents with one number each. Actions are half of the observation."""

    def setup_method(self):
        self.group = make_group("unbounded", n=2, o=1)
        self.actor = TensorDictModule(
            nn.Linear(1, 1, bias=False), [("car", "observation")], [("car", "action")]
        )
        self.actor.module.weight.data.fill_(0.5)
        self.critic = TensorDictModule(
            Sum(), [("car", "observation"), ("car", "action")], [("car", "state_action_value")]
        )

    def loss(self, **kwargs):
        return MADDPGLoss(
            self.actor, self.critic, group=self.group, gamma=0.5, functional=False, **kwargs
        )

    def batch(self, **settings):
        return one_step_of_two_agents([[3.0], [1.0]], **settings)

    def test_values_and_targets(self):
        # Q = 1 + 2 + 3 + 10 = 16 and 48; next actions 1 and 2: 2 + 4 + 1 + 20 = 27 and 81.
        terms = self.loss()(td := self.batch())
        targets = torch.tensor([1 + 0.5 * 27, 5 + 0.5 * 81])
        errors = torch.tensor([16.0, 48.0]) - targets
        torch.testing.assert_close(terms["loss_value"], errors.square().mean())
        torch.testing.assert_close(terms["target_value"], targets.mean())
        torch.testing.assert_close(terms["pred_value"], torch.tensor(32.0))
        torch.testing.assert_close(td["car", "td_error"].squeeze(), errors.abs())
        # Actions 0.5 and 1: 3 + 0.5 + 10 = 13.5 and 40.5.
        torch.testing.assert_close(terms["loss_actor"], torch.tensor(-27.0))

    def test_target_values_of_dead_agents(self):
        """Then only the second agent acts: observation 4, action 2, 4 + 20 = 24, value 72."""
        ends = {"terminated": [[True], [False]]}
        td = self.batch(next_mask=(False, True), **ends)
        team = self.loss()(td.clone())
        torch.testing.assert_close(team["target_value"], torch.tensor((1 + 36 + 5 + 36) / 2))
        agent = self.loss(bootstrap="agent")(td.clone())
        torch.testing.assert_close(agent["target_value"], torch.tensor((1 + 5 + 36) / 2))

    def test_td_error_of_dead_agents_is_zero(self):
        """The living agent has Q = 1 + 3 = 4 and the target 1 + 13.5."""
        self.loss()(td := self.batch(mask=(True, False)))
        assert td["car", "td_error"].tolist() == [[[10.5], [0.0]]]

    def test_truncated_agents_bootstrap(self):
        td = self.batch(next_mask=(False, False), truncated=[[True], [True]])
        for bootstrap in ("team", "agent"):
            found = self.loss(bootstrap=bootstrap)(td.clone())["target_value"]
            torch.testing.assert_close(found, torch.tensor((1 + 13.5 + 5 + 40.5) / 2))

    def test_agent_bootstrap_skips_agents_that_wait_next(self):
        td = self.batch(next_mask=(False, True))
        found = self.loss(bootstrap="agent")(td)["target_value"]
        torch.testing.assert_close(found, torch.tensor(5.0 + 36))

    def test_discount_and_weight_of_rows(self):
        td = self.batch()
        td["discount"] = torch.full((1, 1), 0.25)
        td["priority_weight"] = torch.full((1,), 0.5)
        terms = self.loss()(td)
        errors = torch.tensor([16.0 - 1 - 0.25 * 27, 48 - 5 - 0.25 * 81])
        torch.testing.assert_close(terms["loss_value"], 0.5 * errors.square().mean())

    def test_discount_is_raised_to_the_number_of_steps(self):
        td = self.batch()
        td["steps_to_next_obs"] = torch.full((1, 1), 3)
        targets = torch.tensor([1 + 0.5**3 * 27, 5 + 0.5**3 * 81])
        torch.testing.assert_close(self.loss()(td)["target_value"], targets.mean())
        # Two rows of TorchRL's ``MultiStep``, whose numbers of steps have no last dim.
        td["next", "reward"] = td["next", "car", "reward"].mean(-2)
        stacked_steps = torch.stack([td.exclude("steps_to_next_obs")] * 2, 1)
        rows = MultiStep(gamma=0.5, n_steps=2)(stacked_steps).reshape(-1)
        assert rows["steps_to_next_obs"].tolist() == [2, 1]
        targets = torch.tensor([1 + 0.25 * 27, 5 + 0.25 * 81, 1 + 0.5 * 27, 5 + 0.5 * 81])
        torch.testing.assert_close(self.loss()(rows)["target_value"], targets.mean())

    @pytest.mark.parametrize(
        ("whose", "slope"),
        [
            # Values 1 and 3 times (w1 o1 + w2 o2) a = 21 a; for own actions 1 * 1 and 3 * 20.
            ("group", (21 + 63) / 2),
            ("agent", (1 + 60) / 2),
            ("all", (21 + 63) / 2),
        ],
    )
    def test_actor_gradient_setting_selects_the_raised_values(self, whose, slope):
        loss = self.loss(actor_gradient=whose)(self.batch())["loss_actor"]
        torch.testing.assert_close(loss, torch.tensor(-27.0))
        (found,) = torch.autograd.grad(loss, list(self.actor.parameters()))
        torch.testing.assert_close(found, torch.tensor([[-slope]]))


@pytest.mark.parametrize("kind", ["wide", "unbounded", "categorical", "one_hot"])
@pytest.mark.parametrize("bootstrap", ["team", "agent"])
@pytest.mark.parametrize("centralized", [True, False, "state"])
def test_values_of_masked_agents_have_no_effect_bitwise(kind, bootstrap, centralized):
    """Masked entries change no bit of losses, errors and gradients."""
    torch.manual_seed(0)
    group = make_group(kind, state=4, action_mask=kind in DISCRETE)
    actor, critic = networks(group, centralized=centralized, n_critics=2)
    loss = MADDPGLoss(
        actor, critic, group=group, bootstrap=bootstrap, policy_noise=0.2, saturation_coeff=0.1,
        functional=False,
    )  # fmt: skip
    found = assert_poison_changes_no_bit(gradients, loss, random_steps(group, 32))
    assert sum(bool((g != 0).any()) for g in found) > 8


@pytest.mark.parametrize("order", list(itertools.permutations(range(3)))[1:3])
@pytest.mark.parametrize("architecture", ["local", "set"])
def test_permuted_agents(order, architecture):
    from torchrl_marl.modules import CriticConfig

    torch.manual_seed(0)
    group = make_group()
    config = CriticConfig([8], architecture="set") if architecture == "set" else SMALL
    actor = make_deterministic_actor(group, SMALL)
    critic = make_action_critic(group, config, centralized=architecture == "set")
    loss = MADDPGLoss(actor, critic, group=group, functional=False)
    assert_order_changes_nothing(loss, random_steps(group, 16), order)


@pytest.mark.parametrize("bootstrap", ["team", "agent"])
@pytest.mark.parametrize("kind", ["bounded", "categorical"])
def test_joined_groups_equal_separate_losses_and_gradients(bootstrap, kind):
    """Two groups of different sizes side by side; critics read their own group's agents."""
    torch.manual_seed(0)
    groups, td = two_groups_and_batch(kind, (2, 3), 16, seed=1)
    joined, together = join_groups_and_batch(groups, td)
    settings = {"bootstrap": bootstrap, "functional": False, "saturation_coeff": 0.1}
    actor, critic = networks(joined, n_critics=2)
    both = MADDPGLoss(actor, critic, group=joined, actor_gradient=whose(bootstrap), **settings)
    terms = both(together)
    assert terms["loss_value"].shape == (2,)
    own = [*actor.parameters()]
    for i, group in enumerate(groups):
        alone = MADDPGLoss(*networks(group, n_critics=2), group=group, **settings)
        load_rows(alone.actor_network, actor, i)
        load_rows(alone.qvalue_network, critic, i)
        load_rows(alone.target_actor_network, actor, i)
        load_rows(alone.target_qvalue_network, critic, i)
        if kind == "categorical":  # draws differ
            continue
        found = alone(td.clone())
        for key, value in found.items():
            torch.testing.assert_close(terms[key][i], value, rtol=1e-5, atol=1e-6)
        mine = torch.autograd.grad(found["loss_actor"], list(alone.actor_network.parameters()))
        theirs = torch.autograd.grad(terms["loss_actor"].sum(), own, retain_graph=True)
        for a, b in zip(mine, theirs, strict=True):
            row = b[i][tuple(slice(0, n) for n in a.shape)]
            torch.testing.assert_close(a, row, rtol=1e-4, atol=1e-6)


def whose(bootstrap):
    return "all" if bootstrap == "team" else "agent"


def test_gradients_do_not_cross_groups():
    """With a critic of both groups, each group's actions raise its own values only."""
    torch.manual_seed(0)
    groups, td = two_groups_and_batch("bounded", (2, 1), 8, alive=1.1)
    joined, together = join_groups_and_batch(groups, td)
    actor, critic = networks(joined, team=join(groups, same_actions=False))
    loss = MADDPGLoss(actor, critic, group=joined, functional=False)
    terms = loss(together)
    first, *_ = actor.parameters()  # [G, ...]: rows of each group
    moved = [rows_moved(term, first) for term in terms["loss_actor"]]
    assert sorted(moved) == [[0], [1]]
    crossing = MADDPGLoss(actor, critic, group=joined, actor_gradient="all", functional=False)
    torch.testing.assert_close(crossing(together)["loss_actor"], terms["loss_actor"])
    assert rows_moved(crossing(together)["loss_actor"][0], first) == [0, 1]


def test_illegal_actions_are_never_drawn_and_get_no_gradient():
    torch.manual_seed(0)
    group = make_group("categorical", action_mask=True)
    actor, critic = networks(group)
    loss = MADDPGLoss(actor, critic, group=group, functional=False)
    td = random_steps(group, 64, alive=1.1)
    drawn, _ = loss._policy_actions(td)
    legal = td["car", "action_mask"] | ~td["car", "action_mask"].any(-1, keepdim=True)
    assert torch.equal(drawn.detach().sum(-1).round(), torch.ones(64, 3))
    assert not bool((drawn.detach()[~legal] > 1e-6).any())


@pytest.mark.parametrize("masked", [False, True])
def test_saturation_is_the_share_of_nearly_certain_choices(masked):
    """Illegal actions and the alternatives of a certain choice do not count."""
    group = make_group("categorical", action_mask=masked)
    actor, critic = networks(group)
    td = random_steps(group, 64, alive=1.1)
    if masked:
        td["car", "action_mask"][..., :2] = True
        td["car", "action_mask"][..., 2:] = False
    loss = MADDPGLoss(actor, critic, group=group, functional=False)
    *_, bias = actor.parameters()
    for preferred, share in ((0.0, 0.0), (100.0, 1.0)):
        for parameter in actor.parameters():
            nn.init.zeros_(parameter)
        bias.data[..., 0] = preferred
        assert loss(td.clone())["saturation"] == share


def test_invalid_settings_raise():
    group = make_group()
    for wrong in ({"bootstrap": "all"}, {"actor_gradient": "own"}):
        with pytest.raises(ValueError, match="expected"):
            MADDPGLoss(*networks(group), group=group, **wrong)
    with pytest.raises(ValueError, match=r"TDLambda, expected ValueEstimators.TD0; .* TeamReplay"):
        MADDPGLoss(*networks(group), group=group).make_value_estimator(ValueEstimators.TDLambda)


def test_stored_actions_get_no_gradient():
    """``env.rollout`` keeps their graph; the critics' loss would train the actor."""
    group = make_group()
    actor, critic = networks(group)
    loss = MADDPGLoss(actor, critic, group=group, functional=False)
    td = actor(random_steps(group, 6))
    assert td["car", "action"].requires_grad
    found = torch.autograd.grad(loss(td)["loss_value"], list(actor.parameters()), allow_unused=True)
    assert found == (None,) * len(found)


def test_action_critic_is_a_tensordict_sequential():
    assert isinstance(make_action_critic(make_group()), TensorDictSequential)
