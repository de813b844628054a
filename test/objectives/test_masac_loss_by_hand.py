"""MASAC's loss of two agents by hand."""

import math

import pytest
import torch
from off_policy_losses import one_step_of_two_agents
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import OneHot, Unbounded
from torchrl.modules import OneHotCategorical, ProbabilisticActor

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.objectives import MASACLoss


class Sum(nn.Module):
    """Two critics: all observations and weighted actions added up, and one less than that."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight))

    def forward(self, observation, action):
        done = (self.weight * action).sum((-2, -1)).unsqueeze(-1).unsqueeze(-1)
        total = observation.sum(-2, keepdim=True) + done
        own = torch.tensor([1.0, 3.0]).unsqueeze(-1)  # agent 1 has three times the value
        value = own * total.expand_as(observation)
        return torch.cat([value + 1.0, value], -1)


class TestByHand:
    """Two agents with two actions each, which both choose with probabilities 1/4 and 3/4."""

    chances = (0.25, 0.75)

    def setup_method(self):
        self.group = TeamSpec([AgentSpec("car", 2, Unbounded((1,)), OneHot(2))]).groups["car"]
        logits = torch.tensor(self.chances).log()
        self.actor = constant_actor(self.group, logits)
        self.critic = TensorDictModule(
            Sum([[1.0, 5.0], [0.0, 10.0]]),
            [("car", "observation"), ("car", "action")],
            [("car", "state_action_value")],
        )

    def loss(self, **kwargs):
        return MASACLoss(
            self.actor, self.critic, group=self.group, gamma=0.5, functional=False, **kwargs
        )

    def batch(self, **settings):
        return one_step_of_two_agents([[1, 0], [0, 1]], **settings)

    @property
    def entropy(self):
        return -sum(p * math.log(p) for p in self.chances)

    @pytest.fixture(autouse=True)
    def draws(self, monkeypatch):
        """Both agents draw the likelier action, the second."""
        from torchrl_marl.objectives import masac

        monkeypatch.setattr(masac, "draw_one_hot", likeliest)

    def test_values_and_targets(self):
        # Stored: 1 + 2 + 1 + 10 = 14 and 42, and one more each in the first critic.
        # Next, of 2 + 4 and what the other draws: the first, 6 + 10 + (1/4 1 + 3/4 5) = 20;
        # the second, 3 (6 + 5 + 3/4 10) = 55.5; and half their entropy.
        td = self.batch()
        terms = self.loss(alpha_init=0.5)(td)
        soft = 0.5 * self.entropy
        targets = torch.tensor([1 + 0.5 * (20 + soft), 5 + 0.5 * (55.5 + soft)])
        values = torch.tensor([[15.0, 14.0], [43.0, 42.0]])
        errors = values - targets.unsqueeze(-1)
        torch.testing.assert_close(terms["loss_value"], errors.square().sum(-1).mean())
        torch.testing.assert_close(terms["target_value"], targets.mean())
        torch.testing.assert_close(td["car", "td_error"].squeeze(), errors.abs().amax(-1))
        torch.testing.assert_close(terms["entropy"], torch.tensor(self.entropy))
        torch.testing.assert_close(terms["alpha"], torch.tensor(0.5))

    @pytest.mark.parametrize(
        ("whose", "gain"),
        [
            # Now 1 + 2. Own values: the first 3 + 10 + 4 = 17, the second 3 (3 + 5 + 7.5) = 46.5.
            ("agent", (17 + 46.5) / 2),
            # Group values: half of both agents' values; the first's choice gives 17 to
            # itself and 51 to the other, the second's 15.5 and 46.5.
            ("group", (34 + 31) / 2),
        ],
    )
    def test_actor_loss_with_own_and_group_values(self, whose, gain):
        terms = self.loss(actor_gradient=whose, alpha_init=0.5)(self.batch())
        torch.testing.assert_close(terms["loss_actor"], torch.tensor(-gain - 0.5 * self.entropy))

    def test_target_values_of_dead_agents(self):
        """Then only the second agent acts: observation 4, 3 (4 + 7.5) = 34.5, plus its entropy."""
        td = self.batch(next_mask=(False, True), terminated=[[True], [False]])
        value = 0.5 * (34.5 + self.entropy)
        for bootstrap, found in (("team", (6 + 2 * value) / 2), ("agent", (6 + value) / 2)):
            terms = self.loss(bootstrap=bootstrap)(td.clone())
            torch.testing.assert_close(terms["target_value"], torch.tensor(found))

    def test_joint_entropy_adds_entropy_of_all_acting_agents(self):
        """Next values as above with the entropy of both agents; or the second acts alone."""
        terms = self.loss(alpha_init=0.5, joint_entropy=True)(self.batch())
        both = 2 * 0.5 * self.entropy
        targets = torch.tensor([1 + 0.5 * (20 + both), 5 + 0.5 * (55.5 + both)])
        torch.testing.assert_close(terms["target_value"], targets.mean())
        td = self.batch(next_mask=(False, True), terminated=[[True], [False]])
        terms = self.loss(bootstrap="agent", joint_entropy=True)(td)
        alone = torch.tensor((6 + 0.5 * (34.5 + self.entropy)) / 2)
        torch.testing.assert_close(terms["target_value"], alone)

    def test_temperature_moves_towards_the_target_entropy(self):
        """The entropy is 0.56: log alpha rises for a higher target and falls for a lower one."""
        for share, sign in ((0.99, 1), (0.5, -1)):
            loss = self.loss(target_entropy=share)
            terms = loss(self.batch())
            torch.testing.assert_close(terms["loss_alpha"], torch.tensor(0.0))  # log 1
            (slope,) = torch.autograd.grad(terms["loss_alpha"], [loss.log_alpha])
            torch.testing.assert_close(slope, torch.tensor(self.entropy - share * math.log(2)))
            assert -sign * slope > 0

    def test_losses_have_no_gradients_for_other_parameters(self):
        loss = self.loss()
        terms = loss(self.batch())
        alpha, actor = [loss.log_alpha], list(self.actor.parameters())
        for name, others in (
            ("loss_actor", alpha),
            ("loss_value", [*alpha, *actor]),
            ("loss_alpha", [*actor, *self.critic.parameters()]),
        ):
            found = torch.autograd.grad(
                terms[name].sum(), others, retain_graph=True, allow_unused=True
            )
            assert found == (None,) * len(others)


class Constant(nn.Module):
    """The same logits for every observation."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, observation):
        return self.logits.expand(*observation.shape[:-1], -1)


def constant_actor(group, logits):
    module = TensorDictModule(Constant(logits), [group.observation_key], [group.key("logits")])
    return ProbabilisticActor(
        module,
        in_keys={"logits": group.key("logits")},
        out_keys=[group.action_key],
        distribution_class=OneHotCategorical,
    )


def likeliest(logits):
    return nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
