"""Behavior cloning and TD3+BC: by hand, reductions, and masked agents."""

import math

import pytest
import torch
from samples import DISCRETE, LOGITS, POISON, make_group, make_observed, make_trajectory
from torch import nn

from torchrl_marl.modules import (
    NetworkConfig,
    RandomActor,
    make_action_critic,
    make_actor,
    make_critic,
    make_deterministic_actor,
)
from torchrl_marl.objectives import MADDPGLoss
from torchrl_marl.objectives.imitation import ImitationLoss
from torchrl_marl.objectives.implicit_q import ImplicitQLoss
from torchrl_marl.objectives.td3_bc import TD3BCLoss
from torchrl_marl.specs.joining import join

SMALL = NetworkConfig([8])


def recorded(group, *batch, seed=0, alive=0.7):
    """Observed steps with drawn actions and rewards."""
    torch.manual_seed(seed)
    return RandomActor(group)(make_trajectory(group, *batch, seed=seed, alive=alive))


@pytest.mark.parametrize("kind", [*LOGITS, "bounded", "wide", "unbounded", "hybrid"])
class TestCloning:
    def test_loss_is_mean_negative_log_prob_of_acting_agents(self, kind):
        group = make_group(kind)
        actor, td = make_actor(group, SMALL), recorded(group, 7)
        loss = ImitationLoss(actor, group=group)
        dist = loss.actor_network.get_dist(td)
        action, mask = td["car", "action"], td["car", "mask"]
        action = action.long() if action.dtype == torch.bool else action
        if kind in ("bounded", "wide"):
            low, high = group.action_bounds
            middle, half = (low + high) / 2, (high - low) / 2
            action = middle + half * ((action - middle) / half).clamp(-0.99, 0.99)
        if kind == "hybrid":
            action = torch.cat([action[..., :1], action[..., 1:].clamp(-0.99, 0.99)], -1)
        expected = -dist.log_prob(action)[mask].mean()
        found = loss(td)
        torch.testing.assert_close(found["loss_actor"], expected)
        torch.testing.assert_close(found["log_prob"], -expected.detach())

    def test_values_of_masked_agents_have_no_effect_on_cloning(self, kind):
        group = make_group(kind)
        actor, td = make_actor(group, SMALL), recorded(group, 7)
        loss = ImitationLoss(actor, group=group, functional=False)
        results = []
        for value in (0.0, *POISON):
            own, masked = td.clone(), ~td["car", "mask"]
            own["car", "observation"][masked] = value
            if own["car", "action"].is_floating_point():
                own["car", "action"][masked] = value
            terms = loss(own)
            results.append(torch.autograd.grad(terms["loss_actor"], list(actor.parameters())))
        for other in results[1:]:
            assert all(torch.equal(x, y) for x, y in zip(results[0], other))

    def test_training_raises_probability_of_recorded_actions(self, kind):
        """Gradient steps on one batch raise the probability of its actions."""
        group = make_group(kind)
        actor, td = make_actor(group, SMALL), recorded(group, 7)
        loss = ImitationLoss(actor, group=group, functional=False)
        optimizer = torch.optim.Adam(actor.parameters(), 0.02)
        first = loss(td)["loss_actor"].item()
        for _ in range(100):
            optimizer.zero_grad()
            loss(td)["loss_actor"].backward()
            optimizer.step()
        assert loss(td)["loss_actor"].item() < first - 0.3


def test_categorical_by_hand():
    """Logits 0, log 3: the second action has probability 3/4, the first 1/4."""
    group = make_group("one_hot", n=2, mask=False)
    actor = make_actor(group, SMALL)
    for parameter in actor.parameters():
        nn.init.zeros_(parameter)
    last = [p for name, p in actor.named_parameters() if "bias" in name][-1]
    last.data.copy_(torch.tensor([0.0, math.log(3), -50.0, -50.0]).expand(last.shape))
    td = make_observed(group, 1)
    td["car", "action"] = torch.tensor([[[1, 0, 0, 0], [0, 1, 0, 0]]])
    found = ImitationLoss(actor, group=group)(td)["loss_actor"].item()
    assert found == pytest.approx(-(math.log(1 / 4) + math.log(3 / 4)) / 2, rel=1e-5)


@pytest.mark.parametrize("at", [-1.0, 1.0])
def test_actions_at_their_bounds_have_a_finite_loss_and_gradient(at):
    group = make_group("bounded")
    actor, td = make_actor(group, SMALL), make_observed(group, 7)
    td["car", "action"] = torch.full((7, 3, 2), at)
    loss = ImitationLoss(actor, group=group, functional=False)(td)["loss_actor"]
    gradients = torch.autograd.grad(loss, list(actor.parameters()))
    assert loss.isfinite() and all(x.isfinite().all() for x in gradients)
    assert loss.item() < 20


def test_joined_groups_have_the_losses_of_single_groups():
    groups = [make_group("categorical", n, name=name) for n, name in ((2, "cat"), (3, "mouse"))]
    both = join(groups)
    actor = make_actor(both, SMALL)
    td = make_observed(both, 9)
    td[both.name, "action"] = torch.randint(4, (9, 5))
    found = ImitationLoss(actor, group=both, functional=False)(td)["loss_actor"]
    log_prob = actor.get_dist(td).log_prob(td[both.name, "action"])
    acts = td[both.name, "mask"]
    for i, rows in enumerate((slice(0, 2), slice(2, 5))):
        torch.testing.assert_close(found[i], -log_prob[:, rows][acts[:, rows]].mean())


def td3_bc(kind="bounded", cls=TD3BCLoss, **kwargs):
    torch.manual_seed(3)
    group = make_group(kind)
    actor = make_deterministic_actor(group, SMALL)
    critic = make_action_critic(group, SMALL, n_critics=2)
    return cls(actor, critic, group=group, functional=False, saturation_coeff=1e-3, **kwargs)


class TestTD3BC:
    def test_by_hand(self):
        loss = td3_bc(bc_alpha=2.5, actor_gradient="agent")
        td = recorded(loss.group, 7)
        mask = td["car", "mask"]
        action = loss.actor_network(td.clone())["car", "action"]
        acted = td.clone()
        acted["car", "action"] = action
        blank = acted.clone()
        blank["car", "action"][~mask] = 0.0
        value = loss.qvalue_network(blank)["car", "state_action_value"][..., 0][mask]
        distance = (action - td["car", "action"]).square().mean(-1)[mask]
        outputs = loss.actor_network(td.clone())["car", "loc"].square().mean(-1)[mask]
        weight = 2.5 / value.abs().mean()
        expected = distance.mean() - weight * value.mean() + 1e-3 * outputs.mean()
        found, metrics = loss.actor_loss(td)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(metrics["distance"], distance.mean().detach())

    @pytest.mark.parametrize("kind", ["bounded", "wide", "unbounded"])
    def test_gradient_at_recorded_actions_is_scaled_matd3_gradient(self, kind):
        loss, plain = td3_bc(kind), td3_bc(kind, MADDPGLoss)
        loss.saturation_coeff = plain.saturation_coeff = 0.0
        td = recorded(loss.group, 7)
        td["car", "action"] = loss.actor_network(td.clone())["car", "action"].detach()
        parameters = [list(x.actor_network.parameters()) for x in (loss, plain)]
        found = torch.autograd.grad(loss.actor_loss(td)[0], parameters[0])
        value, _ = plain.actor_loss(td)
        expected = torch.autograd.grad(value, parameters[1])
        data = plain.inputs(td)
        acted, _ = plain._policy_actions(data)
        values = plain.moved(data, acted, plain._critic_values, None)[td["car", "mask"]]
        weight = 2.5 / values.abs().mean()
        for x, y in zip(found, expected):
            torch.testing.assert_close(x, weight * y, rtol=1e-4, atol=1e-6)

    def test_critic_loss_equals_matd3(self):
        loss, plain = td3_bc(), td3_bc(cls=MADDPGLoss)
        td = recorded(loss.group, 7)
        assert torch.equal(loss.value_loss(td.clone())[0], plain.value_loss(td.clone())[0])

    @pytest.mark.parametrize("kind", ["categorical", "one_hot"])
    def test_distance_of_discrete_actions_is_negative_log_prob(self, kind):
        loss = td3_bc(kind)
        td = recorded(loss.group, 7)
        dist = loss.actor_network.get_dist(td.clone())
        action = td["car", "action"]
        action = action.long() if action.dtype == torch.bool else action
        expected = -dist.log_prob(action)[td["car", "mask"]].mean()
        _, metrics = loss.actor_loss(td)
        torch.testing.assert_close(metrics["distance"], expected.detach())

    def test_values_of_masked_agents_have_no_effect_on_td3_bc(self):
        loss = td3_bc()
        td = recorded(loss.group, 7)
        masked, results = ~td["car", "mask"], []
        for value in (0.0, *POISON):
            own = td.clone()
            own["car", "observation"][masked] = value
            own["car", "action"][masked] = value
            terms = loss.actor_loss(own)[0]
            parameters = list(loss.actor_network.parameters())
            results.append(torch.autograd.grad(terms, parameters))
        for other in results[1:]:
            assert all(torch.equal(x, y) for x, y in zip(results[0], other))


def implicit_q(kind="bounded", **kwargs):
    torch.manual_seed(3)
    group = make_group(kind)
    networks = make_actor(group, SMALL), make_action_critic(group, SMALL, n_critics=2)
    value = make_critic(group, SMALL)
    return ImplicitQLoss(*networks, value, group=group, functional=False, **kwargs)


class TestImplicitQ:
    def test_by_hand(self):
        loss = implicit_q(expectile=0.8, beta=2.0)
        td = recorded(loss.group, 9)
        for parameter in loss.target_qvalue_network.parameters():
            parameter.data.add_(0.1)  # the target differs from the critics
        mask = td["car", "mask"]
        blank = td.clone()
        blank["car", "action"][~mask] = 0.0
        value = loss.target_qvalue_network(blank.clone())["car", "state_action_value"].amin(-1)
        state = loss.value_network(td.clone())["car", "state_value"][..., 0]
        gap = (value - state)[mask]
        weights = torch.tensor([0.8 if u > 0 else 0.2 for u in gap.tolist()])
        _, metrics = loss.value_loss(td.clone())
        torch.testing.assert_close(metrics["loss_state_value"], (weights * gap**2).mean())
        assert 0 < (gap > 0).sum() < len(gap)  # both signs occur
        dist = loss.actor_network.get_dist(td.clone())
        inside = td["car", "action"].clamp(-0.99, 0.99)
        expected = -((2 * gap).exp().clamp_max(100) * dist.log_prob(inside)[mask]).mean()
        torch.testing.assert_close(loss.actor_loss(td.clone())[0], expected)

    def test_targets_use_state_values_of_next_steps(self):
        loss = implicit_q(bootstrap="agent", gamma=0.9)
        td = recorded(loss.group, 9, alive=1.0)
        following = td["next"].clone()
        state = loss.value_network(following)["car", "state_value"]
        ended = td["next", "car", "terminated"]
        expected = td["next", "car", "reward"] + 0.9 * torch.where(ended, 0.0, state)
        _, metrics = loss.value_loss(td)
        torch.testing.assert_close(metrics["target_value"], expected.mean().detach())

    @pytest.mark.parametrize("kind", [*DISCRETE, "bounded", "unbounded"])
    def test_zero_beta_equals_behavior_cloning(self, kind):
        loss = implicit_q(kind, beta=0.0)
        td = recorded(loss.group, 9)
        clone = ImitationLoss(loss.actor_network, group=loss.group, functional=False)
        assert torch.equal(loss.actor_loss(td.clone())[0], clone.actor_loss(td.clone())[0])

    def test_each_network_gets_gradients_of_one_loss_only(self):
        loss = implicit_q()
        td = recorded(loss.group, 9)
        value, metrics = loss.value_loss(td.clone())
        actor, _ = loss.actor_loss(td.clone())
        own = {
            "value": (value, loss.qvalue_network),
            "state": (metrics["loss_state_value"], loss.value_network),
            "actor": (actor, loss.actor_network),
        }
        for word, (term, _) in own.items():
            for other, (_, network) in own.items():
                found = torch.autograd.grad(
                    term, list(network.parameters()), retain_graph=True, allow_unused=True
                )
                moved = any(x is not None and bool(x.abs().sum() > 0) for x in found)
                assert moved is (word == other), (word, other)

    def test_values_of_masked_agents_have_no_effect_on_implicit_q(self):
        loss = implicit_q()
        td = recorded(loss.group, 7)
        masked, results = ~td["car", "mask"], []
        for filler in (0.0, *POISON):
            own = td.clone()
            own["car", "observation"][masked] = filler
            own["car", "action"][masked] = filler
            value, metrics = loss.value_loss(own.clone())
            total = value + metrics["loss_state_value"] + loss.actor_loss(own.clone())[0]
            trained = [p for p in loss.parameters() if p.requires_grad]
            results.append(torch.autograd.grad(total, trained, allow_unused=True))
        for other in results[1:]:
            assert all(
                x is y is None or torch.equal(x, y) for x, y in zip(results[0], other, strict=True)
            )

    @pytest.mark.parametrize("expectile", [0.4, 1.0])
    def test_expectile_out_of_range_raises(self, expectile):
        with pytest.raises(ValueError, match="expectile is .*, expected 0.5 or more, and below 1"):
            implicit_q(expectile=expectile)


@pytest.mark.parametrize("implicit", [False, True])
def test_priority_weights_make_losses_unbiased(implicit):
    """With the weight 1/p of a row that was drawn with probability p, a loss has no bias."""
    loss = implicit_q("categorical")
    keys = ["loss_actor", "loss_value", "loss_state_value"] if implicit else ["loss_actor"]
    if not implicit:
        loss = ImitationLoss(loss.actor_network, group=loss.group, functional=False)
    td = recorded(loss.group, 4, alive=1.1)
    rows = torch.tensor([0, 0, 0, 1, 2, 3])
    drawn, weight = td[rows], torch.tensor([1.0, 1, 1, 3, 3, 3])
    drawn["priority_weight"] = weight * len(rows) / weight.sum()
    found, expected = loss(drawn), loss(td)
    torch.testing.assert_close(found.select(*keys), expected.select(*keys))


@pytest.mark.filterwarnings("error")
def test_building_implicit_q_loss_does_not_warn():
    group = make_group("bounded")
    makers = (make_actor, make_action_critic, make_critic)
    ImplicitQLoss(*(make(group, SMALL) for make in makers), group=group)
