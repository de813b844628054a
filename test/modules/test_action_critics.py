"""Critics of actions: which actions they read, in which units, of agents that differ."""

import pytest
import torch
from support.samples import ACTIONS, make_group, make_observed
from tensordict import TensorDict
from torch import nn
from torchrl.data import Bounded, Unbounded

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.modules import CriticConfig, NetworkConfig, RandomActor, make_action_critic
from torchrl_marl.modules.action_critics import ActionFeatures
from torchrl_marl.modules.registry import BODIES, register_body
from torchrl_marl.specs.joining import join


def observed(group, *batch, alive=1.1):
    return RandomActor(group)(make_observed(group, *batch, alive=alive))


def influence(critic, td, group, key):
    """Which agents' values depend on which agents' entries, ``[N values, N agents]``."""
    td = td.clone()
    td[key] = td[key].float().requires_grad_()
    values = critic(td)[group.key("state_action_value")].sum((0, 2))
    rows = [
        torch.autograd.grad(v, td[key], retain_graph=True, allow_unused=True)[0] for v in values
    ]
    return torch.stack([(row.abs().flatten(2).sum((0, 2)) > 0) for row in rows]).int().tolist()


def awake(critic):
    for parameter in critic.parameters():
        nn.init.normal_(parameter)
    return critic


def test_actions_read_by_local_and_centralized_critics():
    group = make_group(n=2, state=3)
    td = observed(group, 4)
    local = awake(make_action_critic(group, centralized=False))
    assert influence(local, td, group, group.action_key) == [[1, 0], [0, 1]]
    assert influence(local, td, group, group.observation_key) == [[1, 0], [0, 1]]
    for centralized in (True, "state"):
        central = awake(make_action_critic(group, centralized=centralized))
        assert influence(central, td, group, group.action_key) == [[1, 1], [1, 1]]


def test_joined_critic_reads_own_group_or_all_groups():
    groups = make_group(n=2, name="cat", o=4), make_group(n=1, name="mouse", o=3)
    joined = join(groups)
    td = observed(groups[0], 4)
    td["mouse"] = observed(groups[1], 4)["mouse"]
    together = joined.gather(td, leaves=("action",))
    key = joined.action_key
    own = awake(make_action_critic(joined))
    assert influence(own, together, joined, key) == [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    across = awake(make_action_critic(joined, team=join(groups, same_actions=False)))
    assert influence(across, together, joined, key) == [[1, 1, 1]] * 3


def test_critic_reads_no_actions_of_another_learners_groups():
    cat, mouse = make_group(n=2, name="cat", o=4), make_group(n=1, name="mouse", o=3)
    seen = join((mouse, cat), same_actions=False)
    td = observed(cat, 4)
    td["mouse"] = observed(mouse, 4)["mouse"]
    td.update(seen.gather(td))
    critic = awake(make_action_critic(cat, team=seen))
    assert influence(critic, td, cat, cat.action_key) == [[1, 1], [1, 1]]
    assert influence(critic, td, cat, (seen.name, "observation")) == [[1, 1, 1], [1, 1, 1]]
    assert mouse.action_key not in critic.in_keys


@pytest.mark.parametrize("kind", sorted(set(ACTIONS) - {"multi_discrete", "hybrid"}))
def test_actions_are_scaled_to_one_unit(kind):
    group = make_group(kind, n=2)
    features = ActionFeatures(group)
    td = observed(group, 50)
    found = features(td[group.action_key])
    assert found.shape[:-1] == (50, 2) and found.dtype == torch.float32
    if kind in ("bounded", "wide"):
        assert bool((found.abs() <= 1).all()) and float(found.min()) < -0.8 < 0.8 < float(
            found.max()
        )
    if kind in ("categorical", "one_hot"):
        assert torch.equal(found.sum(-1), torch.ones(50, 2))
        straight = nn.functional.one_hot(torch.tensor([[1, 2]]), 4).float()
        assert torch.equal(features(straight), straight)


def test_padding_of_heterogeneous_agents_is_ignored():
    """Kinds of 4 and 2 observation features, and of 2 and 1 actions; padding has no effect."""
    wide = AgentSpec("wide", 1, Unbounded((4,)), Bounded(-2, 2, (2,)))
    small = AgentSpec("small", 1, Unbounded((2,)), Bounded(-1, 1, (1,)))
    group = join(tuple(TeamSpec([wide, small]).groups.values()))
    leaves = {
        "observation": torch.randn(5, 2, 4),
        "action": torch.rand(5, 2, 2),
        "mask": torch.ones(5, 2, dtype=torch.bool),
    }
    td = TensorDict({group.name: TensorDict(leaves, [5, 2])}, [5])
    for sharing in ("full", "none"):
        critic = awake(make_action_critic(group, NetworkConfig([8], sharing=sharing)))
        value = critic(td.clone())[group.name, "state_action_value"]
        other = td.clone()
        other[group.name, "action"][:, 1, 1] = 99.0
        other[group.name, "observation"][:, 1, 2:] = -99.0
        assert torch.equal(critic(other)[group.name, "state_action_value"], value)


@pytest.mark.parametrize("architecture", ["set", "attention"])
def test_set_critics_are_equivariant_and_read_all_actions(architecture):
    group = make_group()
    critic = awake(make_action_critic(group, CriticConfig([8], architecture=architecture)))
    td = observed(group, 4)
    value = critic(td.clone())["car", "state_action_value"]
    turned = td.clone()
    turned["car"] = td["car"][:, [2, 0, 1]]
    found = critic(turned)["car", "state_action_value"]
    torch.testing.assert_close(found, value[:, [2, 0, 1]])
    assert influence(critic, td, group, group.action_key) == [[1, 1, 1]] * 3


class MeanBody(nn.Module):
    """Reads an agent's own features and the mean of all."""

    def __init__(self, group, out_features, config, *, gain, device=None):
        super().__init__()
        self.layer = nn.Linear(2 * group.observation_dim, out_features)

    def forward(self, features, mask, context):
        mean = features.mean(-2, keepdim=True).expand_as(features)
        return self.layer(torch.cat([features, mean], -1)), None


def test_custom_body_over_all_agents():
    register_body("means", "the mean of all", body=MeanBody)
    try:
        group = make_group(n=2)
        critic = make_action_critic(group, NetworkConfig(body="means"), n_critics=2)
        td = observed(group, 4)
        assert critic(td.clone())["car", "state_action_value"].shape == (4, 2, 2)
        assert influence(critic, td, group, group.action_key) == [[1, 1], [1, 1]]
    finally:
        BODIES.remove("means")
