"""Q-value actors: the best legal action, dueling values, exploration."""

import pytest
import torch
from support.samples import make_group, make_observed
from tensordict.nn import TensorDictSequential
from torchrl.data import Categorical, Unbounded
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.errors import ConfigError
from torchrl_marl.modules import Explore, NetworkConfig, make_q_actor
from torchrl_marl.modules.q_actor import Dueling
from torchrl_marl.specs.joining import join

SMALL = NetworkConfig([8])


@pytest.mark.parametrize("kind", ["categorical", "one_hot"])
@pytest.mark.parametrize("dueling", [False, True])
def test_greedy_action_is_best_legal_action(kind, dueling):
    torch.manual_seed(0)
    group = make_group(kind, action_mask=True)
    td = make_q_actor(group, SMALL, dueling=dueling)(make_observed(group, 64))
    own = td["car"]
    legal = own["action_mask"] | ~own["action_mask"].any(-1, keepdim=True)
    best = own["action_value"].masked_fill(~legal, -torch.inf)
    action = own["action"].int().argmax(-1) if kind == "one_hot" else own["action"]
    assert torch.equal(action, best.argmax(-1))
    torch.testing.assert_close(own["chosen_action_value"], best.amax(-1, keepdim=True))
    assert own["action"].dtype == group.padded_spec["action"].dtype
    assert bool(own["action_value"].abs().max() < 100)  # illegal actions keep their values


def test_last_layer_is_initialized_with_gain_one():
    """Its rows are orthonormal. Those of a policy are scaled by 0.01."""
    network = make_q_actor(make_group("categorical"), SMALL)
    *_, weight, _ = network.parameters()
    torch.testing.assert_close(weight @ weight.T, torch.eye(len(weight)), rtol=0, atol=1e-5)


def test_dueling_by_hand():
    group = make_group("categorical", n=1)
    outputs = torch.tensor([[10.0, 1.0, 2.0, 3.0, 6.0]])
    torch.testing.assert_close(Dueling(group)(outputs), torch.tensor([[8.0, 9.0, 10.0, 13.0]]))


def uneven():
    """Two agents of two actions, and one of four."""
    group = TeamSpec([AgentSpec("car", 2, Unbounded((3,)), Categorical(2))]).groups["car"]
    return join((group, make_group("categorical", n=1, name="van", o=3)))


def test_padded_actions_are_never_chosen_nor_averaged():
    torch.manual_seed(0)
    group = uneven()
    outputs = torch.tensor([[10.0, 1.0, 3.0, 1e9, 1e9]] * 2 + [[10.0, 1.0, 2.0, 3.0, 6.0]])
    values = Dueling(group)(outputs)
    torch.testing.assert_close(values[0, :2], torch.tensor([9.0, 11.0]))
    torch.testing.assert_close(values[2], torch.tensor([8.0, 9.0, 10.0, 13.0]))
    td = make_q_actor(group, SMALL)(make_observed(group, 256, alive=1.1))
    assert int(td[group.name, "action"][:, :2].max()) == 1
    assert int(td[group.name, "action"][:, 2].max()) > 1


def test_exploration_draws_legal_actions():
    torch.manual_seed(0)
    group = make_group("categorical", action_mask=True)
    actor = make_q_actor(group, SMALL)
    policy = TensorDictSequential(actor, Explore(group, epsilon=0.5))
    td = make_observed(group, 500)
    greedy = actor(td.clone())["car", "action"]
    with set_exploration_type(ExplorationType.RANDOM):
        drawn = policy(td.clone())["car"]
    legal = drawn["action_mask"] | ~drawn["action_mask"].any(-1, keepdim=True)
    assert bool(legal.gather(-1, drawn["action"].unsqueeze(-1)).all())
    assert 0.1 < (drawn["action"] != greedy).float().mean() < 0.5
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        assert torch.equal(policy(td.clone())["car", "action"], greedy)


def test_continuous_actions_are_refused():
    with pytest.raises(ConfigError, match="expected discrete ones"):
        make_q_actor(make_group())
