"""Sub-collectors: different policies in different envs of one batch."""

import pytest
import torch
from torchrl.envs.utils import ExplorationType

from torchrl_marl import TeamSpec
from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.contrib import parts, split
from torchrl_marl.envs.toy import Arena
from torchrl_marl.errors import SpecError
from torchrl_marl.modules import NetworkConfig, make_actor

SIZES = [5, 2, 3]


def world(n=10):
    return Arena(n, n_agents=2, seed=0)


def actors_of(env, cells=(8, 8, 8)):
    group = TeamSpec.from_env(env).groups["agents"]
    found = {}
    for i, width in enumerate(cells):
        torch.manual_seed(i)
        actor = make_actor(group, NetworkConfig(num_cells=[width]))
        for p in actor.parameters():
            torch.nn.init.normal_(p)
        found[f"p{i}"] = actor
    return found


def logged(batch, actors, who):
    """Log-probabilities of the taken actions under each row's policy."""
    found = torch.zeros_like(batch["agents", "action_log_prob"])
    for i, actor in enumerate(actors.values()):
        dist = actor.get_dist(batch.clone())
        found = torch.where(
            (who == i).unsqueeze(-1), dist.log_prob(batch["agents", "action"]), found
        )
    return found


@pytest.mark.parametrize("execution", ["eager", "trace"])
@pytest.mark.parametrize("cells", [(8, 8, 8), (8, 9, 8)], ids=["alike", "different"])
def test_each_env_acts_with_its_assigned_policy(execution, cells):
    env = world()
    actors = actors_of(env, cells)
    policy = split(actors, SIZES)
    assert policy.batched == (len(set(cells)) == 1)
    collector = RolloutCollector(env, policy, frames_per_batch=60, execution=execution)
    for _ in range(2):
        batch = collector.rollout()
    assert collector.execution == execution
    who = batch["collector", "policy"]
    assert torch.equal(who[:, 0], torch.tensor([0] * 5 + [1] * 2 + [2] * 3))
    mine = logged(batch, actors, who)
    alive = batch["agents", "mask"]
    torch.testing.assert_close(mine[alive], batch["agents", "action_log_prob"][alive])
    rows = parts(batch, policy)
    assert [len(own) for own in rows.values()] == SIZES and list(rows) == list(actors)
    assert torch.equal(rows["p1"]["agents", "action"], batch["agents", "action"][5:7])


def test_split_policy_acts_with_updated_parameters():
    env = world()
    actors = actors_of(env)
    collector = RolloutCollector(env, split(actors, SIZES), frames_per_batch=30, execution="trace")
    collector.rollout()
    with torch.no_grad():
        for p in actors["p1"].parameters():
            p.mul_(-0.5)
    batch = collector.rollout()
    alive = batch["agents", "mask"]
    mine = logged(batch, actors, batch["collector", "policy"])
    torch.testing.assert_close(mine[alive], batch["agents", "action_log_prob"][alive])


@pytest.mark.parametrize("cells", [(8, 8, 8), (8, 9, 8)], ids=["alike", "different"])
def test_tensordict_entry_selects_the_policy_of_each_env(cells):
    env = world()
    actors = actors_of(env, cells)
    policy = split(actors, key="task")
    td = env.reset()
    td["task"] = torch.tensor([[0], [2], [1], [1], [0], [2], [2], [0], [1], [0]])
    acted = policy(td.clone())
    assert torch.equal(acted["collector", "policy"], td["task"].squeeze(-1))
    mine = logged(acted.unsqueeze(1), actors, td["task"])
    torch.testing.assert_close(mine.squeeze(1), acted["agents", "action_log_prob"])
    with pytest.raises(ValueError, match="may change"):
        parts(acted, policy)
    with pytest.raises(SpecError, match="gives no 'task'"):
        policy(env.reset())


def test_split_of_joint_team_policies():
    env = Arena(6, n_agents=2, n_groups=2, seed=0)
    teams = {}
    for name in ("a", "b"):
        groups = TeamSpec.from_env(env).groups.values()
        teams[name] = TeamPolicy(make_actor(group) for group in groups)
    collector = RolloutCollector(
        env, split(teams, [4, 2]), frames_per_batch=12, exploration_type=ExplorationType.MODE
    )
    batch = collector.rollout()
    for name, rows in parts(batch, collector.policy).items():
        for key in (("agents_0", "action"), ("agents_1", "action")):
            own = teams[name](rows.clone())
            assert own[key].shape == rows[key].shape


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "either sizes or key"),
        ({"sizes": [5, 5, 0]}, "1 or more"),
        ({"sizes": [5, 5]}, "expected 3 numbers"),
        ({"sizes": [1, 2, 3], "key": "task"}, "either sizes or key"),
    ],
)
def test_invalid_splits_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        split(actors_of(world()), **arguments)
    policy = split(actors_of(world()), [1, 2, 3])
    with pytest.raises(SpecError, match="split over 6 environments"):
        policy(world().reset())
