"""Turn-based toy environments: exact returns, the agent to act, and learning."""

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_marl import TeamSpec
from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.envs.toy import Nim, Paces
from torchrl_marl.errors import ConfigError
from torchrl_marl.learners import OnPolicyConfig, build_learners
from torchrl_marl.modules import NetworkConfig
from torchrl_marl.modules.config import CriticConfig
from torchrl_marl.training.evaluation import evaluate
from torchrl_marl.training.metrics import EpisodeTracker, count_agent_frames


def best_take(heap, most):
    """The take that leaves a multiple of ``most + 1``; one stone where there is none."""
    return (heap % (most + 1) - 1).clamp_min(0)


def best_nim(env):
    def act(td):
        for name in env.group_map:
            td[name, "action"] = best_take(td[name, "observation"].argmax(-1), env.most)
        return td

    return act


def best_paces(env):
    return lambda td: td.set(("agents", "action"), td["agents", "observation"][..., :-1].argmax(-1))


def mean_returns(env, act, episodes):
    return evaluate(env, act, TeamSpec.from_env(env), episodes=episodes)


@pytest.mark.learning
@pytest.mark.parametrize("kwargs", [{}, {"stones": 7, "most": 2}, {"stones": 4, "most": 4}])
def test_nim_matches_its_reference_returns(kwargs):
    env = Nim(4000, seed=0, **kwargs)
    for act, expected in ((best_nim(env), env.optimal_return), (None, env.random_return)):
        found = mean_returns(env, act, 4000)
        # Rewards of the opponent's turns count, too.
        assert found["first/episode_reward"] == pytest.approx(expected, abs=0.06)
        assert found["first/episode_reward"] == -found["second/episode_reward"]


@pytest.mark.parametrize("kwargs", [{}, {"late_spawn": 2}, {"paces": (4, 1), "n_actions": 2}])
def test_paces_matches_its_reference_returns(kwargs):
    env = Paces(2000, seed=0, max_steps=7, **kwargs)
    best = mean_returns(env, best_paces(env), 2000)["return_mean"]
    assert best == pytest.approx(env.optimal_return, abs=1e-5)
    chance = mean_returns(env, None, 2000)["return_mean"]
    assert chance == pytest.approx(env.random_return, rel=0.05)


def test_agents_act_at_their_pace_after_they_spawn():
    env = Paces(2, paces=(1, 2, 3), late_spawn=2, max_steps=9, seed=0)
    td = env.rollout(9)
    turns = [[1, 1, 1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 0, 1, 0, 1, 0, 1], [0, 0, 0, 0, 1, 0, 0, 1, 0]]
    assert td["agents", "mask"][0].T.int().tolist() == turns
    assert td["next", "agents", "mask"][:, -1].all()  # truncated, waiting or not
    assert not (td["agents", "observation"][..., :-1].sum(-1) != td["agents", "mask"]).any()
    assert count_agent_frames(env.team, td).item() == 2 * sum(map(sum, turns))


def test_episode_tracker_counts_rewards_of_opponents_turns():
    env = Nim(64, seed=0)
    tracker = EpisodeTracker(env.team)
    means = tracker.update(env.rollout(40, break_when_any_done=False))
    assert means["first/episode_reward"] == -means["second/episode_reward"] != 0


def test_invalid_arguments_are_refused():
    with pytest.raises(ConfigError, match="most is 4, expected 1 to 3"):
        Nim(2, stones=3, most=4)
    for wrong in ({"paces": ()}, {"paces": (0, 1)}, {"late_spawn": -1}, {"n_actions": 1}):
        with pytest.raises(ConfigError, match="expected paces of 1 or more"):
            Paces(2, **wrong)


# ------------------------------------------------------------------------------------ learning


def trained(env, steps, iterations):
    """Trains both sides; the end of a batch cuts its games."""
    torch.manual_seed(0)
    config = OnPolicyConfig(
        algorithm="ippo",
        bootstrap="agent",
        actor=NetworkConfig([32]),
        critic=CriticConfig([32]),
        lr=1e-2,
        num_epochs=5,
        minibatch_size=10_000,
        entropy_coeff=0.01,
    )
    [learner] = build_learners(TeamSpec.from_env(env), config)
    policy = TeamPolicy(learner.actors.values())
    collector = RolloutCollector(env, policy, frames_per_batch=steps * env.num_envs)
    for _ in range(iterations):
        batch = collector.next()
        learner.learn(batch)
    for name in env.group_map:  # the turns of the joined groups, given back to each
        assert (batch[name, "loss_mask"] <= batch[name, "mask"]).all()
    return policy


@pytest.mark.environments
def test_both_sides_learn_to_play_nim():
    """Both players find the best take from every winnable heap that they can reach."""
    env = Nim(128, seed=0)
    policy = trained(env, 15, 25)
    heap = torch.arange(1, env.largest + 1)
    own = {
        "observation": torch.nn.functional.one_hot(heap, env.largest + 1).float().unsqueeze(1),
        "mask": torch.ones(len(heap), 1, dtype=torch.bool),
        "action_mask": (torch.arange(env.most) < heap.unsqueeze(-1)).unsqueeze(1),
    }
    td = TensorDict({name: dict(own) for name in env.group_map}, [len(heap)])
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        policy(td)
    can_win = heap % (env.most + 1) != 0
    for name, reached in (("first", heap > 0), ("second", heap < env.largest)):
        takes = td[name, "action"].squeeze(-1)
        found = can_win & reached
        assert torch.equal(takes[found], best_take(heap, env.most)[found]), name


def test_agents_with_different_paces_learn():
    env = Paces(64, paces=(1, 2, 3), late_spawn=2, max_steps=20, seed=0)
    policy = trained(env, 13, 25)
    found = mean_returns(env, policy, 64)["return_mean"]
    assert found == pytest.approx(env.optimal_return, abs=1e-4)
