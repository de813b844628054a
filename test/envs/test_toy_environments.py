"""The toy environments have their reference returns and refuse invalid arguments."""

import pytest
import torch

from torchrl_marl.envs.toy import TOY_ENVS, Arena, MatrixGame, TwoStepGame
from torchrl_marl.errors import ConfigError


def episode_return(env, action_of, n=4096):
    td, total = env.reset(), 0
    ended = torch.zeros(env.num_envs, 1, dtype=torch.bool)
    for _ in range(100):
        td = env.step(action_of(td))["next"]
        # Equal for all living agents, and 0 for the others.
        earned = torch.cat([td[name, "reward"] for name in env.group_map], 1).squeeze(-1)
        most = earned.gather(1, earned.abs().argmax(1, keepdim=True))
        total = total + torch.where(ended, 0.0, most)
        ended = ended | td["done"]
        if ended.all():
            return total.squeeze(-1)
    raise AssertionError("an episode does not end")


def best_arena_action(env):
    def act(td):
        td = env.rand_action(td)
        for group in env.group_map:
            for agent in td[group].unbind(1):
                cue, action = agent["observation"][:, :-2], agent["action"]
                if env.hybrid_actions:
                    cue = torch.cat([cue[..., :-1].argmax(-1, keepdim=True), cue[..., -1:]], -1)
                elif not env.continuous_actions:
                    cue = cue if action.ndim > 1 else cue.argmax(-1)
                agent["action"].copy_(cue)
        return td

    return act


ARENAS = [
    {},
    {"action_mask": True},
    {"continuous_actions": True},
    {"hybrid_actions": True, "late_spawn": 2},
    {"n_groups": 2, "max_steps": 8, "lives": 1},
    {"n_agents": 3, "years": 2, "n_actions": 2},
    {"late_spawn": 3, "lives": 2},
    {"late_spawn": 1, "max_steps": 9, "categorical_actions": False},
    {"kinds": 2, "n_actions": 5},
    {"kinds": 2, "n_actions": 7, "action_mask": True, "late_spawn": 4, "n_groups": 2, "lives": 1},
]


@pytest.mark.parametrize("kwargs", ARENAS, ids=str)
def test_arena_matches_its_reference_returns(kwargs):
    env = Arena(3000, seed=0, **kwargs)
    best = episode_return(env, best_arena_action(env))
    torch.testing.assert_close(best, torch.full_like(best, env.optimal_return))
    torch.manual_seed(0)
    returns = episode_return(env, env.rand_action)
    error = 4 * returns.std() / len(returns) ** 0.5
    assert abs(returns.mean() - env.random_return) < error
    assert env.random_return < env.optimal_return / 2


def test_arena_agents_die_one_by_one():
    env = Arena(2, n_agents=3, years=2, seed=0)
    td, alive = env.reset(), []
    for _ in range(6):
        td = env.step(best_arena_action(env)(td))["next"]
        alive.append((~td["agents", "terminated"][0]).sum().item())
    assert alive == [3, 2, 2, 1, 1, 0]
    assert td["terminated"].all()


def test_arena_masks_leave_the_right_answer():
    env = Arena(50, action_mask=True, lives=1, seed=0)
    td = env.rollout(6, break_when_any_done=False)
    legal, mask = td["agents", "action_mask"], td["agents", "mask"]
    assert (legal.sum(-1) == torch.where(mask, 3, 0)).all()
    right = td["agents", "observation"][..., :-2].bool()
    assert (legal | ~right).all()
    chosen = legal.gather(-1, td["agents", "action"].unsqueeze(-1)).squeeze(-1)
    assert chosen[mask].all()


@pytest.mark.parametrize(
    ("env", "best"),
    [
        (lambda: MatrixGame(9), [0, 0]),
        (lambda: MatrixGame(9, payoff="penalty"), [0, 0]),
        (lambda: MatrixGame(9, payoff=[[[1.0, 2], [3, 4]], [[5, 6], [7, 9]]]), [1, 1, 1]),
        (lambda: TwoStepGame(9), [1, 1]),
    ],
)
def test_matrix_games_match_their_reference_returns(env, best):
    env = env()
    action = torch.tensor(best).expand(9, -1)
    returns = episode_return(env, lambda td: td.set(("agents", "action"), action))
    assert (returns == env.optimal_return).all()


def test_returns_of_the_two_step_game():
    env = TwoStepGame(8)
    joint = torch.cartesian_prod(*[torch.arange(2)] * 3)
    second = iter([torch.stack([joint[:, 0], joint[:, 1]], 1), joint[:, 1:]])
    returns = episode_return(env, lambda td: td.set(("agents", "action"), next(second)))
    assert returns.tolist() == [7, 7, 7, 7, 0, 1, 1, 8]
    assert returns.mean() == env.random_return


@pytest.mark.parametrize("name", TOY_ENVS)
def test_unknown_arguments_are_refused(name):
    with pytest.raises(ConfigError, match="has no argument 'max_step'; did you mean 'max_steps'"):
        TOY_ENVS[name](2, max_step=3)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"n_agents": 0},
        {"n_groups": 3},
        {"n_actions": 1},
        {"lives": 0},
        {"action_mask": True, "n_actions": 2},
        {"action_mask": True, "continuous_actions": True},
        {"kinds": 3},
        {"kinds": 2, "n_agents": 1},
        {"kinds": 2, "n_actions": 3},
        {"kinds": 2, "continuous_actions": True},
        {"late_spawn": -1},
    ],
    ids=str,
)
def test_arena_refuses_invalid_arguments(kwargs):
    with pytest.raises(ConfigError, match="Arena"):
        Arena(2, **kwargs)


def test_matrix_game_refuses_invalid_payoffs():
    with pytest.raises(ConfigError, match="did you mean 'climbing'"):
        MatrixGame(2, payoff="climb")
    with pytest.raises(ConfigError, match="one dim per agent"):
        MatrixGame(2, payoff=[[1.0, 2, 3], [4, 5, 6]])
