"""The loss of IQL, VDN and QMIX: reduction to TorchRL's, by hand, masked and permuted agents."""

import itertools

import pytest
import torch
from off_policy_losses import (
    assert_order_changes_nothing,
    assert_poison_changes_no_bit,
    gradients_of,
    join_groups_and_batch,
    random_steps,
    two_groups_and_batch,
)
from samples import DISCRETE, make_group
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.data import Categorical, Unbounded
from torchrl.modules import QMixer
from torchrl.objectives import DQNLoss, QMixerLoss, SoftUpdate, ValueEstimators

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.functional import soft_update_
from torchrl_marl.modules import NetworkConfig, make_mixer, make_q_actor
from torchrl_marl.modules.q_actor import Greedy
from torchrl_marl.objectives import ValueDecompositionLoss

SMALL = NetworkConfig([8])
KINDS = ["none", "sum", "monotonic"]


def networks(group, kind, *, std=0.3, **kwargs):
    actor, mixer = make_q_actor(group, SMALL, **kwargs), make_mixer(group, kind, hidden=6)
    for parameter in parameters_of(actor, mixer):
        nn.init.normal_(parameter, std=std)
    return actor, mixer


def parameters_of(*found):
    return [p for network in found if network is not None for p in network.parameters()]


def plain(actor, mixer, group, **kwargs):
    """A loss of plain networks whose targets differ."""
    loss = ValueDecompositionLoss(actor, mixer, group=group, functional=False, **kwargs)
    for name in ("qvalue_network", "mixer_network"):
        for parameter in parameters_of(getattr(loss, f"target_{name}", None)):
            parameter.data.mul_(1.3).add_(0.05)
    return loss


def gradients(loss, td):
    mixer = loss.mixer_network if loss.mixed else None
    return gradients_of(loss(td), {"loss_value": parameters_of(loss.qvalue_network, mixer)})


class TestReduction:
    """Without masks the losses equal TorchRL's."""

    @pytest.mark.parametrize("double", [True, False])
    @pytest.mark.parametrize("kind", DISCRETE)
    def test_dqn_of_one_agent(self, kind, double):
        torch.manual_seed(0)
        group = make_group(kind, n=1, mask=False)
        td = random_steps(group, 16)
        actor, _ = networks(group, "none")
        space = "one-hot" if kind == "one_hot" else "categorical"
        theirs = DQNLoss(actor, delay_value=True, double_dqn=double, action_space=space)
        theirs.set_keys(
            action=group.action_key,
            action_value=("car", "action_value"),
            value=("car", "chosen_action_value"),
            priority=("car", "error"),
            reward=group.key("reward"),
            done=group.key("done"),
            terminated=group.key("terminated"),
        )
        theirs.make_value_estimator(ValueEstimators.TD0, gamma=0.9)
        ours = ValueDecompositionLoss(
            actor, group=group, bootstrap="agent", gamma=0.9, double_q=double
        )
        SoftUpdate(theirs, tau=0.5), SoftUpdate(ours, tau=0.5)
        move_both(ours.target_qvalue_network_params, theirs.target_value_network_params)
        expected, found = theirs(td.clone())["loss"], ours(td.clone())["loss_value"]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
        one = torch.autograd.grad(found, leaves(ours.qvalue_network_params, True))
        other = torch.autograd.grad(expected, leaves(theirs.value_network_params, True))
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)

    @pytest.mark.parametrize("ours_mixes", [True, False])
    def test_qmixer(self, ours_mixes):
        torch.manual_seed(0)
        group = make_group("categorical", mask=False, state=4)
        td = random_steps(group, 16)
        td["next", "reward"] = td["next", "car", "reward"].mean(-2)
        actor, _ = networks(group, "none")
        keys = [("car", "chosen_action_value")]
        if ours_mixes:
            mixer = make_mixer(group, centralized="state", hidden=6)
            nn.init.normal_(mixer.module.weights.weight, std=0.3)
        else:
            mixer = TensorDictModule(
                QMixer((4,), 6, 3, "cpu"), [*keys, "state"], ["chosen_action_value"]
            )
        theirs = QMixerLoss(actor, mixer, action_space="categorical")
        theirs.set_keys(
            action=group.action_key,
            action_value=("car", "action_value"),
            local_value=keys[0],
            priority="error",
        )
        theirs.make_value_estimator(ValueEstimators.TD0, gamma=0.9)
        ours = ValueDecompositionLoss(actor, mixer, group=group, gamma=0.9, double_q=False)
        SoftUpdate(theirs, tau=0.5), SoftUpdate(ours, tau=0.5)
        move_both(ours.target_qvalue_network_params, theirs.target_local_value_network_params)
        move_both(ours.target_mixer_network_params, theirs.target_mixer_network_params)
        expected, found = theirs(td.clone())["loss"], ours(td.clone())["loss_value"]
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        mine = [ours.qvalue_network_params, ours.mixer_network_params]
        his = [theirs.local_value_network_params, theirs.mixer_network_params]
        for a, b in zip(mine, his):
            one = torch.autograd.grad(found, leaves(a, True), retain_graph=True)
            other = torch.autograd.grad(expected, leaves(b, True), retain_graph=True)
            for x, y in zip(one, other, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)

    def test_mixers_of_one_agent_equal_double_dqn(self):
        """A sum of one value is the value; a monotonic mixer can represent it."""
        torch.manual_seed(0)
        group = make_group("categorical", n=1)
        td = random_steps(group, 32)
        actor, _ = networks(group, "none")
        expected, slopes = gradients(plain(actor, None, group), td.clone())
        mixers = make_mixer(group, "sum"), make_mixer(group, "monotonic", hidden=1)
        with torch.no_grad():
            own = mixers[1].module
            own.weights.weight.zero_()
            # elu(q + 50) - 50, the identity on values above -50
            own.weights.bias.copy_(torch.tensor([1.0, 50.0, 1.0]))
            nn.init.zeros_(own.bias[2].weight)
            own.bias[2].bias.fill_(-50.0)
        for mixer in mixers:
            loss = ValueDecompositionLoss(actor, mixer, group=group, functional=False)
            for parameter in loss.target_qvalue_network.parameters():
                parameter.data.mul_(1.3).add_(0.05)
            found, others = gradients(loss, td.clone())
            for key in found.keys():
                torch.testing.assert_close(found[key], expected[key], rtol=1e-4, atol=1e-4)
            for one, other in zip(slopes, others):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("kind", KINDS)
    def test_functional_and_plain_networks_are_equal(self, kind):
        torch.manual_seed(0)
        group = make_group("categorical")
        td = random_steps(group, 16)
        nets = networks(group, kind)
        ours = ValueDecompositionLoss(*nets, group=group)
        other = ValueDecompositionLoss(*nets, group=group, functional=False)
        updater = SoftUpdate(ours, tau=0.25)
        names = ["qvalue_network", *(["mixer_network"] if kind == "monotonic" else [])]
        for _ in range(3):
            for name in names:
                for p in [
                    *leaves(getattr(ours, f"{name}_params"), True),
                    *getattr(other, name).parameters(),
                ]:
                    p.data.mul_(1.1)
            updater.step()
            for name in names:
                target, source = (getattr(other, f"{x}{name}") for x in ("target_", ""))
                soft_update_(list(target.parameters()), list(source.parameters()), 0.25)
        one, two = ours(td.clone()), other(td.clone())
        for key, value in one.items():
            torch.testing.assert_close(value, two[key])


def leaves(params, trained=False):
    found = params.values(True, True)
    return [p for p in found if p.is_floating_point() and (not trained or p.requires_grad)]


def move_both(params, others):
    """Changes two targets to the same other network."""
    for one, other in zip(leaves(params), leaves(others), strict=True):
        one.data.mul_(1.3).add_(0.02)
        other.data.copy_(one.data)


def greedy_in(group, values):
    """A greedy actor over the values that a module writes."""
    key, chosen = group.key("action_value"), group.key("chosen_action_value")
    return TensorDictSequential(
        TensorDictModule(values, [("car", "observation")], [key]),
        TensorDictModule(Greedy(group), [key], [group.action_key, chosen]),
    )


class Table(nn.Module):
    """Values of three actions: observation plus the action's index, times a weight."""

    def __init__(self, weight=1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight))

    def forward(self, observation):
        return self.weight * (observation + torch.tensor([0.0, 1.0, 2.0]))


class TestByHand:
    """Two agents that observe 1 and 2, then 3 and 4, and took actions 0 and 2."""

    def setup_method(self):
        spec = AgentSpec("car", 2, Unbounded((1,)), Categorical(3))
        self.group = TeamSpec([spec]).groups["car"]

    def loss(self, kind="none", target=0.5, **kwargs):
        loss = ValueDecompositionLoss(
            greedy_in(self.group, Table()),
            make_mixer(self.group, kind),
            group=self.group,
            gamma=0.5,
            functional=False,
            **kwargs,
        )
        for parameter in loss.target_qvalue_network.parameters():
            parameter.data.fill_(target)
        return loss

    def batch(self, mask=(True, True), next_mask=(True, True), terminated=False, cut=False):
        flag = {"terminated": torch.tensor([[terminated]]), "truncated": torch.tensor([[cut]])}
        flag["done"] = flag["terminated"] | flag["truncated"]
        own = {key: x.unsqueeze(-2).expand(1, 2, 1) for key, x in flag.items()}
        then = {
            "observation": torch.tensor([[[3.0], [4.0]]]),
            "mask": torch.tensor([next_mask]),
            "reward": torch.tensor([[[1.0], [5.0]]]),
        }
        now = {
            "observation": torch.tensor([[[1.0], [2.0]]]),
            "action": torch.tensor([[0, 2]]),
            "mask": torch.tensor([mask]),
        }
        return TensorDict({"car": now, "next": {"car": then | own, **flag}}, [1])

    def test_iql(self):
        # Values 1 and 4; next the best actions are the last: target values 2.5 and 3.
        terms = self.loss()(td := self.batch())
        targets = torch.tensor([1 + 0.5 * 2.5, 5 + 0.5 * 3])
        errors = torch.tensor([1.0, 4.0]) - targets
        torch.testing.assert_close(terms["loss_value"], errors.square().mean())
        torch.testing.assert_close(td["car", "td_error"].flatten(), errors.abs())

    def test_vdn(self):
        # 1 + 4 = 5; the mean reward 3, and 0.5 * (2.5 + 3).
        terms = self.loss("sum")(td := self.batch())
        torch.testing.assert_close(terms["pred_value"], torch.tensor(5.0))
        torch.testing.assert_close(terms["target_value"], torch.tensor(5.75))
        torch.testing.assert_close(terms["loss_value"], torch.tensor(0.75**2))
        torch.testing.assert_close(td["car", "td_error"].flatten(), torch.tensor([0.75, 0.75]))

    def test_double_q_by_hand(self):
        """The target prefers the first action; double Q evaluates the last one by it."""
        double = self.loss("sum", target=-1.0)(self.batch())["target_value"]
        own = self.loss("sum", target=-1.0, double_q=False)(self.batch())["target_value"]
        torch.testing.assert_close(double, torch.tensor(3 - 0.5 * (5 + 6)))
        torch.testing.assert_close(own, torch.tensor(3 - 0.5 * (3 + 4)))

    def test_dead_agents_have_zero_value_in_the_mixer(self):
        terms = self.loss("sum")(self.batch(mask=(True, False), next_mask=(True, False)))
        torch.testing.assert_close(terms["pred_value"], torch.tensor(1.0))
        torch.testing.assert_close(terms["target_value"], torch.tensor(1 + 0.5 * 2.5))
        dies = self.loss("sum")(self.batch(next_mask=(False, True)))
        torch.testing.assert_close(dies["target_value"], torch.tensor(3 + 0.5 * 3))
        nobody = self.loss("sum")(self.batch(next_mask=(False, False)))
        torch.testing.assert_close(nobody["target_value"], torch.tensor(3.0))

    @pytest.mark.parametrize("kind", ["none", "sum"])
    def test_terminated_and_truncated_steps(self, kind):
        """Terminated steps do not bootstrap; truncated ones do."""
        over = self.loss(kind)(self.batch(terminated=True))["target_value"]
        torch.testing.assert_close(over, torch.tensor(3.0))
        cut = self.loss(kind)(self.batch(next_mask=(False, False), cut=True))["target_value"]
        whole = self.loss(kind)(self.batch())["target_value"]
        torch.testing.assert_close(cut, whole)

    def test_rows_without_acting_agents_are_ignored(self):
        td = torch.cat([self.batch(), self.batch(mask=(False, False))])
        one, both = self.loss("sum")(self.batch()), self.loss("sum")(td)
        for key, value in one.items():
            torch.testing.assert_close(both[key], value)
        assert bool((td["car", "td_error"][1] == 0).all())

    def test_discount_and_weight_of_rows(self):
        td = self.batch()
        td["discount"], td["priority_weight"] = torch.full((1, 1), 0.25), torch.full((1,), 0.5)
        terms = self.loss("sum")(td)
        error = 5 - 3 - 0.25 * 5.5
        torch.testing.assert_close(terms["loss_value"], torch.tensor(0.5 * error**2))

    def test_negative_weight_scales_negative_td_errors(self):
        # Errors 1 - 2.25 < 0 stay; of the target -1: 4 - (5 + 0.5 * -6) = 2 weighs less.
        kept = self.loss(negative_weight=0.1)(self.batch())["loss_value"]
        torch.testing.assert_close(kept, self.loss()(self.batch())["loss_value"])
        loss = self.loss(target=-1.0, negative_weight=0.1)(self.batch())["loss_value"]
        errors = torch.tensor([1 - (1 - 2.5), 4 - (5 - 3.0)])
        torch.testing.assert_close(loss, 0.1 * errors.square().mean())


def test_vdn_of_independent_rewards():
    """With independent rewards, values in a sum learn each agent's own rewards."""
    torch.manual_seed(0)
    rewards = torch.tensor([[1.0, 3.0], [5.0, 2.0]])  # of each agent's two actions
    values = nn.Parameter(torch.zeros(2, 2))
    group = TeamSpec([AgentSpec("car", 2, Unbounded((1,)), Categorical(2))]).groups["car"]
    actor = greedy_in(group, lambda seen: values.expand(*seen.shape[:-2], 2, 2))
    actor.register_parameter("own", values)
    loss = ValueDecompositionLoss(actor, make_mixer(group, "sum"), group=group, functional=False)
    td = random_steps(group, 4, alive=1.1)
    td["car", "action"] = torch.tensor(list(itertools.product(range(2), range(2))))
    earned = rewards.gather(-1, td["car", "action"].T).T
    td["next", "car", "reward"] = earned.unsqueeze(-1)
    td["next", "terminated"] = torch.ones(4, 1, dtype=torch.bool)
    optimizer = torch.optim.SGD([values], lr=0.5)
    for _ in range(200):
        optimizer.zero_grad()
        loss(td)["loss_value"].backward()
        optimizer.step()
    gaps = values[:, 1] - values[:, 0]  # a sum determines values up to constants
    torch.testing.assert_close(gaps.detach(), torch.tensor([1.0, -1.5]))  # of the mean reward
    total = values.detach().gather(-1, td["car", "action"].T).sum(0)
    torch.testing.assert_close(total, earned.mean(-1))


@pytest.mark.parametrize("kind", DISCRETE)
@pytest.mark.parametrize(
    ("mixes", "bootstrap"),
    [("none", "team"), ("none", "agent"), ("sum", "team"), ("monotonic", "team")],
)
def test_values_of_masked_agents_have_no_effect_bitwise(kind, mixes, bootstrap):
    """Masked entries change no bit of losses, errors and gradients."""
    torch.manual_seed(0)
    group = make_group(kind, action_mask=True)
    loss = plain(*networks(group, mixes, dueling=True), group, bootstrap=bootstrap)
    found = assert_poison_changes_no_bit(
        gradients, loss, random_steps(group, 32), ends_of_team=bootstrap == "team", masks=True
    )
    assert all(bool((g != 0).any()) for g in found)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3)))[1:3])
@pytest.mark.parametrize("kind", ["none", "sum"])
def test_permuted_agents(order, kind):
    torch.manual_seed(0)
    group = make_group("categorical")
    loss = plain(*networks(group, kind), group)
    assert_order_changes_nothing(loss, random_steps(group, 16), order)


@pytest.mark.parametrize("kind", ["none", "sum"])
def test_joined_groups_have_the_losses_of_single_groups(kind):
    torch.manual_seed(0)
    groups, td = two_groups_and_batch("categorical", (2, 3), 16, seed=1)
    joined, together = join_groups_and_batch(groups, td)
    nets = networks(joined, kind)
    terms = ValueDecompositionLoss(*nets, group=joined, functional=False)(together)
    assert terms["loss_value"].shape == (2,)
    for i, group in enumerate(groups):
        alone = networks(group, kind)
        pairs = zip(parameters_of(*alone), parameters_of(*nets), strict=True)
        for mine, theirs in pairs:
            mine.data.copy_(theirs.data[i][tuple(slice(0, n) for n in mine.shape)])
        found = ValueDecompositionLoss(*alone, group=group, functional=False)(td.clone())
        for key, value in found.items():
            torch.testing.assert_close(terms[key][i], value, rtol=1e-5, atol=1e-6)


def test_illegal_next_actions_do_not_enter_targets():
    torch.manual_seed(0)
    group = make_group("categorical", n=1, action_mask=True)
    actor, _ = networks(group, "none")
    loss = plain(actor, None, group, gamma=1.0)
    td = random_steps(group, 8, alive=1.1)
    td["next", "terminated"] = torch.zeros(8, 1, dtype=torch.bool)
    td["next", "car", "reward"] = torch.zeros(8, 1, 1)
    td["next", "car", "action_mask"] = torch.tensor([True, False, False, False]).expand(8, 1, 4)
    first = loss.target_qvalue_network(td["next"].clone())["car", "action_value"][..., 0]
    torch.testing.assert_close(loss(td)["target_value"], first.mean())


def test_settled_rewards_under_another_key():
    group = make_group("categorical")
    loss = ValueDecompositionLoss(*networks(group, "sum"), group=group)
    td = random_steps(group, 2, 4)
    td["next", "car", "scaled"] = td["next", "car", "reward"].clone()
    loss.settle_rewards(td)
    expected = td["next", "car", "team", "reward"].clone()
    loss.set_keys(reward=("car", "scaled"))
    del td["next", "car", "team"]
    loss.settle_rewards(td)
    torch.testing.assert_close(td["next", "car", "team", "reward"], expected)
    assert ("next", "car", "scaled") not in loss.stored_keys


def test_mixer_with_agent_bootstrap_raises():
    group = make_group("categorical")
    with pytest.raises(ValueError, match="a mixer has one value for all"):
        ValueDecompositionLoss(*networks(group, "sum"), group=group, bootstrap="agent")
