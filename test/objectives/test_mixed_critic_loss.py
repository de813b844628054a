"""FACMAC: MADDPG's loss with critics of single agents whose values are mixed."""

import pytest
import torch
from off_policy_losses import (
    assert_order_changes_nothing,
    assert_poison_changes_no_bit,
    gradients_of,
    random_steps,
)
from samples import make_group, make_trajectory
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from torchrl_marl.errors import ConfigError
from torchrl_marl.modules import (
    NetworkConfig,
    make_action_critic,
    make_actor,
    make_deterministic_actor,
    make_mixed_critic,
)
from torchrl_marl.objectives import MADDPGLoss, MASACLoss
from torchrl_marl.specs.joining import join

SMALL = NetworkConfig([8])


def networks(group, kind="monotonic", **kwargs):
    actor = make_deterministic_actor(group, SMALL)
    critic = make_mixed_critic(group, SMALL, kind, hidden=6, **kwargs)
    for parameter in [*actor.parameters(), *critic.parameters()]:
        nn.init.normal_(parameter, std=0.3)
    return actor, critic


def losses(actor, critic, group, **kwargs):
    return MADDPGLoss(actor, critic, group=group, functional=False, **kwargs)


def gradients(loss, td):
    """Gradients of the actor's loss by the actor, and of the critics' by critics and mixers."""
    own = {"loss_actor": loss.actor_network, "loss_value": loss.qvalue_network}
    return gradients_of(loss(td), {key: network.parameters() for key, network in own.items()})


def test_sum_over_one_agent_equals_ddpg():
    """The loss is then that of DDPG."""
    torch.manual_seed(0)
    group = make_group(n=1)
    td = random_steps(group, 32)
    actor, mixed = networks(group, "sum", n_critics=2)
    plain = make_action_critic(group, SMALL, centralized=False, n_critics=2)
    plain.load_state_dict(mixed.state_dict())
    one = gradients(losses(actor, mixed, group, mixed=True, policy_noise=0.0), td.clone())
    other = gradients(losses(actor, plain, group, policy_noise=0.0), td.clone())
    for key, value in one[0].items():
        torch.testing.assert_close(value, other[0][key])
    for a, b in zip(one[1], other[1], strict=True):
        torch.testing.assert_close(a, b)


def test_actor_gradient_of_a_sum_is_that_of_local_critics():
    """The gradient is that of local critics times the number of agents."""
    torch.manual_seed(0)
    group = make_group(n=3, mask=False)
    td = random_steps(group, 32)
    actor, mixed = networks(group, "sum")
    plain = make_action_critic(group, SMALL, centralized=False)
    plain.load_state_dict(mixed.state_dict())
    one, other = losses(actor, mixed, group, mixed=True), losses(actor, plain, group)
    own = list(actor.parameters())
    mine = torch.autograd.grad(one(td)["loss_actor"], own)
    theirs = torch.autograd.grad(other(td)["loss_actor"], own)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, 3 * b)


def test_values_and_targets_of_a_sum_by_hand():
    """Two agents: Q_i = o_i + 10 a_i; actions are half of the observation, and 0."""
    group = make_group("unbounded", n=2, o=1)
    half = nn.Linear(1, 2, bias=False)
    half.weight.data.copy_(torch.tensor([[0.5], [0.0]]))
    actor = TensorDictModule(half, [("car", "observation")], [("car", "action")])
    critic = make_mixed_critic(group, NetworkConfig([]), "sum")
    layer = dict(critic.named_parameters())
    for name, parameter in layer.items():
        values = torch.tensor([1.0, 10.0, 7.0]) if name.endswith("weight") else torch.zeros(1)
        parameter.data.copy_(values.reshape(parameter.shape))
    td = make_trajectory(group, 1)
    td["car", "observation"] = torch.tensor([[[1.0], [2.0]]])
    td["car", "action"] = torch.tensor([[[3.0, 0.0], [1.0, 0.0]]])
    td["car", "mask"] = torch.tensor([[True, False]])
    td["next", "car", "observation"] = torch.tensor([[[2.0], [4.0]]])
    td["next", "car", "mask"] = torch.tensor([[True, True]])
    td["next", "car", "reward"] = torch.tensor([[[1.0], [5.0]]])
    for flags in (td["next"], td["next", "car"]):
        for key in {"done", "terminated", "truncated"} & set(flags.keys()):
            flags[key] = torch.zeros_like(flags[key])
    terms = losses(actor, critic, group, gamma=0.5, mixed=True)(td)
    # Only the first agent acts and earns: Q = 1 + 30. Next both: 2 + 10 and 4 + 20.
    error = 31 - (1 + 0.5 * 36)
    torch.testing.assert_close(terms["loss_value"], torch.tensor(error**2.0))
    torch.testing.assert_close(td["car", "td_error"].squeeze(), torch.full((2,), error * 1.0))
    torch.testing.assert_close(terms["loss_actor"], -torch.tensor(1 + 10 * 0.5))


def test_sum_of_critics_learns_individual_rewards():
    """Agents' rewards 1 a and 3 a are averaged, so each critic's slope is half of its own."""
    torch.manual_seed(0)
    group = make_group("unbounded", n=2, o=1, mask=False)
    config = NetworkConfig([], sharing="none")
    critic = make_mixed_critic(group, config, "sum")
    loss = losses(make_deterministic_actor(group, config), critic, group, gamma=0.0, mixed=True)
    td = random_steps(group, 256)
    slopes = torch.tensor([1.0, 3.0]).unsqueeze(-1)
    td["next", "car", "reward"] = slopes * td["car", "action"][..., :1]
    optimizer = torch.optim.Adam(critic.parameters(), lr=0.1)
    for _ in range(200):
        optimizer.zero_grad()
        loss.value_loss(td)[0].backward()
        optimizer.step()
    found = td.select(*loss.read_keys, loss.tensor_keys.action).copy()
    found["car", "action"] = found["car", "action"].requires_grad_()
    (slope,) = torch.autograd.grad(critic(found)["car", "state_action_value"][:, 0].sum(),
                                   found["car", "action"])  # fmt: skip
    torch.testing.assert_close(slope[0, :, :1], slopes / 2, rtol=0, atol=1e-3)


@pytest.mark.parametrize("kind", ["sum", "monotonic"])
@pytest.mark.parametrize("centralized", [True, "state"])
def test_values_of_masked_agents_have_no_effect_bitwise(kind, centralized):
    """Masked entries change no bit of losses, errors and gradients."""
    torch.manual_seed(0)
    group = make_group("wide", state=4)
    actor, critic = networks(group, kind, centralized=centralized, n_critics=2)
    loss = losses(actor, critic, group, mixed=True, policy_noise=0.2, saturation_coeff=0.1)
    found = assert_poison_changes_no_bit(gradients, loss, random_steps(group, 32))
    assert sum(bool((g != 0).any()) for g in found) > 8


@pytest.mark.parametrize("kind", ["sum", "monotonic"])
def test_permuted_agents(kind):
    """The mixer's weights are computed from the state, which has no order of agents."""
    torch.manual_seed(0)
    group = make_group(state=4)
    actor, critic = networks(group, kind, centralized="state")
    if kind == "monotonic":  # weights that are the same for all agents
        for name, parameter in critic.named_parameters():
            if "weights." in name:
                rows = parameter.data.unflatten(0, (-1, 6))
                rows[:3] = rows[:1].clone()
    loss = losses(actor, critic, group, mixed=True)
    assert_order_changes_nothing(loss, random_steps(group, 16), [2, 0, 1])


def test_joined_groups_have_separate_mixed_values():
    torch.manual_seed(0)
    groups = make_group(n=2, name="cat", o=4), make_group(n=3, name="mouse", o=3)
    joined = join(groups)
    critic = make_mixed_critic(joined, SMALL, n_critics=2)
    seen = {
        "observation": torch.randn(7, 5, 4),
        "action": torch.rand(7, 5, 2),
        "mask": torch.ones(7, 5, dtype=torch.bool),
    }
    values = critic(TensorDict({joined.name: seen}, [7]))[joined.name, "state_action_value"]
    assert values.shape == (7, 5, 2)
    assert torch.equal(values[:, 0], values[:, 1]) and torch.equal(values[:, 2], values[:, 4])
    assert not torch.equal(values[:, 1], values[:, 2])


def test_mixed_critic_with_agent_bootstrap_or_without_state_raises():
    group = make_group()
    with pytest.raises(ValueError, match="expected 'team'"):
        losses(*networks(group), group, mixed=True, bootstrap="agent")
    with pytest.raises(ConfigError, match="no 'state'"):
        make_mixed_critic(group, SMALL, centralized="state")


def test_masac_with_mixed_critics():
    group = make_group()
    critic = make_mixed_critic(group, SMALL, n_critics=2)
    loss = MASACLoss(make_actor(group, SMALL), critic, group=group, mixed=True)
    assert all(bool(x.isfinite().all()) for x in loss(random_steps(group, 8)).values())
