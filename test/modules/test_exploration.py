"""Exploration: random actions, noise, and actions that stay unchanged."""

import pytest
import torch
from support.samples import ACTIONS, make_group, make_observed
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_marl.modules import Explore, RandomActor, make_deterministic_actor
from torchrl_marl.modules.joined_actor import JoinedActor
from torchrl_marl.specs.joining import join


def acted(group, *batch):
    td = make_observed(group, *batch, alive=1.1)
    if group.branches:  # deterministic actors do not support several choices
        return RandomActor(group)(td)
    with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
        return make_deterministic_actor(group)(td)


@pytest.mark.parametrize("kind", ACTIONS)
@pytest.mark.parametrize("how", ["DETERMINISTIC", "MODE", "MEAN"])
def test_deterministic_exploration_types_leave_actions_unchanged(kind, how):
    group = make_group(kind)
    td = acted(group, 8)
    before, state = td[group.action_key].clone(), torch.get_rng_state()
    with set_exploration_type(ExplorationType[how]):
        Explore(group, epsilon=1.0, sigma=1.0)(td)
    assert torch.equal(td[group.action_key], before)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", ACTIONS)
def test_zero_epsilon_and_sigma_leave_actions_unchanged(kind):
    group = make_group(kind)
    td = acted(group, 8)
    before = td[group.action_key].clone()
    with set_exploration_type(ExplorationType.RANDOM):
        Explore(group)(td)
    torch.testing.assert_close(td[group.action_key], before)


def test_noise_scales_with_half_the_range_and_respects_bounds():
    """Bounds -1 to 1 and 0 to 4 give noise 0.1 and 0.2; initial actions are in the middle."""
    group = make_group("wide")
    td = acted(group, 4000)
    middle = torch.tensor([0.0, 2.0])
    explore = Explore(group, sigma=0.1)
    with set_exploration_type(ExplorationType.RANDOM):
        explore(td)
    noise = td[group.action_key] - middle
    torch.testing.assert_close(
        noise.flatten(0, 1).std(0), torch.tensor([0.1, 0.2]), rtol=0.05, atol=0
    )
    explore.sigma.fill_(5.0)
    with set_exploration_type(ExplorationType.RANDOM):
        explore(td)
    low, high = group.action_bounds
    action = td[group.action_key]
    assert bool(((action >= low) & (action <= high)).all()) and bool((action == high).any())


@pytest.mark.parametrize("kind", ACTIONS)
def test_epsilon_is_drawn_for_each_agent(kind):
    group = make_group(kind, action_mask=kind in ("categorical", "one_hot"))
    td = acted(group, 3000)
    before = td[group.action_key].clone().reshape(3000, 3, -1)
    with set_exploration_type(ExplorationType.RANDOM):
        Explore(group, epsilon=0.5)(td)
    action = td[group.action_key].reshape(3000, 3, -1)
    changed = ((action - before).abs() > 1e-6).any(-1).float()
    share = changed.mean(0)
    assert bool((share > 0.2).all()) and bool((share < 0.55).all())
    some = changed.sum(-1)
    assert set(some.tolist()) == {0.0, 1.0, 2.0, 3.0}  # not one draw for the team


def test_random_actions_are_legal():
    group = make_group("categorical", action_mask=True)
    td = acted(group, 500)
    with set_exploration_type(ExplorationType.RANDOM):
        Explore(group, epsilon=1.0)(td)
    legal = td["car", "action_mask"] | ~td["car", "action_mask"].any(-1, keepdim=True)
    assert bool(legal.gather(-1, td["car", "action"].unsqueeze(-1)).all())


def test_joined_deterministic_actor_writes_no_log_prob():
    from tensordict.nn import TensorDictSequential

    groups = make_group(n=2, name="cat", o=4), make_group(n=1, name="mouse", o=3)
    joined = join(groups)
    actor = TensorDictSequential(make_deterministic_actor(joined), Explore(joined, epsilon=1.0))
    whole = JoinedActor(actor, joined)
    assert whole.out_keys == [("cat", "action"), ("mouse", "action")]
    td = make_observed(groups[0], 5)
    td["mouse"] = make_observed(groups[1], 5)["mouse"]
    with set_exploration_type(ExplorationType.RANDOM):
        whole(td)
    assert td["cat", "action"].shape == (5, 2, 2) and td["mouse", "action"].shape == (5, 1, 2)
    assert "action_log_prob" not in td["cat"].keys()
    part = whole.part("mouse")
    assert part.out_keys == [("mouse", "action")]
    assert part(td.select("mouse"))["mouse", "action"].shape == (5, 1, 2)
