"""The on-policy learner learns games whose best returns are known."""

import pytest
import torch
from on_policy_learners import make_learner
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.envs.toy import Arena, MatrixGame, TwoStepGame
from torchrl_marl.modules import NetworkConfig

pytestmark = pytest.mark.learning


def trained(env, frames_per_batch, iterations, **kwargs):
    settings = {
        "actor": NetworkConfig([32]),
        "critic": NetworkConfig([32]),
        "lr": 1e-2,
        "minibatch_size": 10_000,
        "num_epochs": 5,
        "entropy_coeff": 0.01,
    } | kwargs
    learner = make_learner(env, **settings)
    policy = TeamPolicy(learner.actors.values())
    collector = RolloutCollector(env, policy, frames_per_batch=frames_per_batch)
    torch.manual_seed(0)
    for _ in range(iterations):
        learner.learn(collector.next())
    return policy


def return_of(env, policy, steps):
    """Mean return of the first episodes; the game ends within ``steps`` steps."""
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        rollout = env.rollout(steps, policy, break_when_any_done=False, auto_reset=True)
    done = rollout["next", "done"].squeeze(-1)
    first = torch.cat([torch.ones_like(done[:, :1]), ~done[:, :-1].cummax(1).values], 1)
    assert bool(done.any(1).all())
    # Living agents share one reward; dead agents get none.
    living = torch.stack([~rollout[g, "done"] for g in env.group_map])
    rewards = torch.stack([rollout["next", g, "reward"] for g in env.group_map])
    rewards = (rewards * living).sum((0, -1, -2)) / living.sum((0, -1, -2)).clamp_min(1)
    return (rewards * first).sum(1).mean().item()


@pytest.mark.parametrize("algorithm", ["mappo", "ippo"])
def test_learner_solves_matrix_game(algorithm):
    env = MatrixGame(64, payoff="coordination", seed=0)
    policy = trained(env, 64, 40, algorithm=algorithm)
    assert return_of(env, policy, 1) == env.optimal_return == 10.0


@pytest.mark.parametrize("central_input", ["observations", "state"])
def test_learner_solves_two_step_game(central_input):
    env = TwoStepGame(128, seed=0)
    policy = trained(
        env, 256, 80, central_input=central_input, entropy_coeff=0.1, entropy_schedule="constant"
    )
    assert return_of(env, policy, 2) >= 7.0  # the safe choice; 8 needs luck in exploration


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        ({}, {}),
        ({"action_mask": True}, {"algorithm": "ippo", "bootstrap": "agent"}),
        ({"n_groups": 2}, {"normalize_advantage": "agent", "normalize_observations": True}),
    ],
    ids=["mappo", "ippo with action masks", "two groups"],
)
def test_learner_solves_arena_with_deaths(world, settings):
    settings = {"n_actions": 3, "years": 2, "lives": 2, "n_agents": 2, "seed": 0} | world, settings
    env = Arena(64, **settings[0])
    policy = trained(env, 64 * 8, 30, **settings[1])
    assert env.optimal_return == 3.0
    assert env.random_return < 1.6
    assert return_of(env, policy, 5) == pytest.approx(3.0, abs=0.05)
