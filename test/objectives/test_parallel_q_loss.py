"""The loss of PQN: lambda-returns by hand, special cases, done flags, deaths, masked values."""

from dataclasses import replace

import pytest
import torch
from support.samples import POISON, make_group, make_trajectory, poisoned
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.data import Categorical, Unbounded

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.errors import SpecError
from torchrl_marl.modules import NetworkConfig, RandomActor, make_mixer, make_q_actor
from torchrl_marl.modules.q_actor import Greedy
from torchrl_marl.objectives import ParallelQLoss, ValueDecompositionLoss


class Table(nn.Module):
    """Values of two actions: the observation, and half of it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 0.5]))

    def forward(self, observation):
        return observation * self.weight


def car():
    spec = AgentSpec("car", 2, Unbounded((1,)), Categorical(2))
    return TeamSpec([spec]).groups["car"]


def loss_of(group, kind="none", **kwargs):
    key, chosen = group.key("action_value"), group.key("chosen_action_value")
    greedy = TensorDictSequential(
        TensorDictModule(Table(), [("car", "observation")], [key]),
        TensorDictModule(Greedy(group), [key], [group.action_key, chosen]),
    )
    kwargs = {"gamma": 0.5, "lmbda": 0.5, "functional": False} | kwargs
    return ParallelQLoss(greedy, make_mixer(group, kind), group=group, **kwargs)


def batch(ends="none", dies=None):
    """Three steps of one env: two agents see 2 and 4, 6 and 8, 10 and 12, and at last 14 and 16.

    They earn 1 and 3 in each step. The second step may end the episode; the second agent may die
    in step ``dies``.
    """
    seen = torch.tensor([[2.0, 4.0], [6.0, 8.0], [10.0, 12.0], [14.0, 16.0]]).view(1, 4, 2, 1)
    alive = torch.ones(1, 4, 2, dtype=torch.bool)
    if dies is not None:
        alive[:, dies + 1 :, 1] = False
    over = torch.tensor([False, ends != "none", False]).view(1, 3, 1)
    flags = {"terminated": over & (ends == "terminated"), "truncated": over & (ends == "truncated")}
    flags["done"] = over
    own = {key: x.unsqueeze(-2).expand(1, 3, 2, 1).clone() for key, x in flags.items()}
    own["terminated"] |= ~alive[:, 1:].unsqueeze(-1)
    own["done"] |= own["terminated"]
    reward = torch.tensor([1.0, 3.0]).view(2, 1).expand(1, 3, 2, 1).clone()
    then = {"observation": seen[:, 1:], "mask": alive[:, 1:], "reward": reward}
    now = {
        "observation": seen[:, :-1],
        "mask": alive[:, :-1],
        "done": ~alive[:, :-1].unsqueeze(-1),
        "action": torch.zeros(1, 3, 2, dtype=torch.long),
    }
    return TensorDict({"car": now, "next": {"car": then | own, **flags}}, [1, 3])


def targets(loss, td):
    loss.add_targets(td)
    return td["car", "value_target"][0, :, :, 0].T


class TestByHand:
    def test_team_returns_bridge_steps_without_living_agents(self):
        """Both die in the first step, miss the second, and act in the third: V_0 = V_1 / 2."""
        td = batch()
        for key in (("car", "mask"), ("next", "car", "mask")):
            td[key][:, 1 if key[0] == "car" else 0] = False
        td["car", "done"][:, 1] = True
        for flag in ("done", "terminated"):
            td["next", "car", flag][:, 0] = True
        found = targets(loss_of(replace(car(), respawns=True)), td)
        torch.testing.assert_close(found, torch.tensor([[3.375, 0, 8], [5.9375, 0, 11]]))
        # The team itself earns 2, also in the second step: 17, 2 + (17 + 22)/4 = 11.75, and
        # 2 + (11.75 + 22/2)/4.
        td["next", "reward"] = torch.full((1, 3, 1), 2.0)
        group = replace(car(), respawns=True, reward_key="reward")
        found = targets(loss_of(group, "sum"), td)
        torch.testing.assert_close(found, torch.tensor([[7.6875, 0, 17]] * 2))

    def test_independent_returns(self):
        # G_2 = 1 + 14/2 = 8, G_1 = 1 + (8 + 10)/4 = 5.5, G_0 = 1 + (5.5 + 6)/4 = 3.875
        found = targets(loss_of(car()), batch())
        torch.testing.assert_close(found, torch.tensor([[3.875, 5.5, 8], [7.1875, 8.75, 11]]))

    def test_returns_of_a_sum_mixer(self):
        # Reward 2, values 14, 22 and 30: 17, 2 + (17 + 22)/4 = 11.75, 2 + (11.75 + 14)/4
        found = targets(loss_of(car(), "sum"), td := batch())
        torch.testing.assert_close(found, torch.tensor([[8.4375, 11.75, 17]] * 2))
        # Values of the taken actions: 6, 14 and 22.
        terms = loss_of(car(), "sum")(td)
        errors = torch.tensor([6 - 8.4375, 14 - 11.75, 22 - 17])
        torch.testing.assert_close(terms["loss_value"], errors.square().mean())
        torch.testing.assert_close(terms["pred_value"], torch.tensor(14.0))

    def test_terminated_and_truncated_steps(self):
        """A terminated step is worth its reward; a truncated one bootstraps."""
        found = targets(loss_of(car()), batch("terminated"))[0]
        torch.testing.assert_close(found, torch.tensor([1 + (1 + 6) / 4, 1, 8]))
        found = targets(loss_of(car()), batch("truncated"))[0]
        torch.testing.assert_close(found, torch.tensor([1 + (6 + 6) / 4, 6, 8]))

    def test_dead_agents_share_rewards_and_values_of_living_ones(self):
        # The second dies in the second step: then as the first, 8; 3 + (8 + 10)/4; ...
        found = targets(loss_of(car()), td := batch(dies=1))[1]
        torch.testing.assert_close(found, torch.tensor([3 + (7.5 + 8) / 4, 7.5, 0]))
        assert td["car", "loss_mask"][0].tolist() == [[True, True], [True, True], [True, False]]

    def test_agent_bootstrap_ends_returns_at_death(self):
        found = targets(loss_of(car(), bootstrap="agent"), batch(dies=1))
        torch.testing.assert_close(found, torch.tensor([[3.875, 5.5, 8], [3 + (3 + 8) / 4, 3, 0]]))

    def test_dead_agents_have_zero_value_in_a_mixer(self):
        # 1 + 14/2 = 8; 2 + (8 + 10)/4 = 6.5; 2 + (6.5 + 14)/4
        found = targets(loss_of(car(), "sum"), batch(dies=1))
        torch.testing.assert_close(found, torch.tensor([[7.125, 6.5, 8]] * 2))


def steps(group, *shape):
    torch.manual_seed(0)
    return RandomActor(group)(make_trajectory(group, *shape))


@pytest.mark.parametrize("kind", ["none", "sum", "monotonic"])
def test_lambda_0_is_one_step_q_learning(kind):
    """Equal to ValueDecompositionLoss while its targets equal the networks."""
    group = make_group("categorical")
    nets = make_q_actor(group, NetworkConfig([8])), make_mixer(group, kind)
    td = steps(group, 4, 6)
    expected = ValueDecompositionLoss(*nets, group=group)(td.clone())
    loss = ParallelQLoss(*nets, group=group, lmbda=0.0)
    loss.add_targets(td)
    for key, value in loss(td).items():
        torch.testing.assert_close(value, expected[key])


def test_lambda_1_gives_monte_carlo_returns():
    found = targets(loss_of(car(), lmbda=1.0), batch("terminated"))
    torch.testing.assert_close(found[0], torch.tensor([1 + 0.5, 1, 8]))


@pytest.mark.parametrize("value", POISON)
@pytest.mark.parametrize("bootstrap", ["team", "agent"])
@pytest.mark.parametrize("kind", ["none", "monotonic"])
def test_values_of_masked_agents_have_no_effect_bitwise(kind, bootstrap, value):
    if kind != "none" and bootstrap == "agent":
        return
    nets = make_q_actor(car(), NetworkConfig([8])), make_mixer(car(), kind)
    loss = ParallelQLoss(*nets, group=car(), bootstrap=bootstrap, functional=False)
    bad = td = batch(dies=0)
    bad = poisoned(bad, ("car", "observation"), td["car", "mask"], value)
    bad = poisoned(bad, ("next", "car", "observation"), td["next", "car", "mask"], value)
    bad = poisoned(bad, ("next", "car", "reward"), td["car", "mask"], value)
    one, other = td.clone(), bad
    for own in (one, other):
        loss.add_targets(own)
    assert torch.equal(one["car", "value_target"], other["car", "value_target"])
    for key, found in loss(one).items():
        assert torch.equal(found, loss(other)[key]), key


@pytest.mark.parametrize("value", POISON)
def test_targets_of_masked_agents_have_no_effect_on_gradients(value):
    loss, td = loss_of(car()), batch(dies=0)
    loss.add_targets(td)
    gradients = []
    for own in (td, poisoned(td, ("car", "value_target"), td["car", "mask"], value)):
        loss.zero_grad()
        loss(own)["loss_value"].backward()
        gradients.append(torch.cat([p.grad.flatten() for p in loss.parameters()]))
    assert torch.equal(*gradients)


def test_batch_without_targets_raises():
    group = car()
    with pytest.raises(SpecError, match=r"no \('car', 'value_target'\); call add_targets on the"):
        loss_of(group)(batch())
