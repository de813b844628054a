"""Predator-prey: moves, rewards, observations and lengths of episodes."""

import pytest
import torch

from torchrl_marl import TeamSpec
from torchrl_marl.envs import check_marl_env
from torchrl_marl.envs.toy import PredatorPrey
from torchrl_marl.envs.toy.scenes import windows
from torchrl_marl.errors import ConfigError
from torchrl_marl.training.evaluation import evaluate

UP, RIGHT, DOWN, LEFT, STAY = range(5)


def placed(predators, prey, **kwargs):
    """An environment of one env with predators and prey in these places."""
    env = PredatorPrey(1, n_agents=len(predators), seed=0, **kwargs)
    td = env.reset()
    env.predators, env.prey = torch.tensor([predators]), torch.tensor([[prey]])
    return env, td


def go(env, td, *actions):
    return env.step(td.set(("agents", "action"), torch.tensor([actions])))["next"]


def test_moves_by_hand():
    env, td = placed([[0, 0], [2, 2], [1, 1]], [2, 1], size=3)
    for actions, places in (
        ((UP, RIGHT, RIGHT), [[0, 0], [2, 2], [1, 2]]),  # walls stop
        ((DOWN, DOWN, LEFT), [[1, 0], [2, 2], [1, 1]]),
        ((RIGHT, STAY, STAY), [[1, 1], [2, 2], [1, 1]]),  # two in a cell
        ((LEFT, LEFT, DOWN), [[1, 0], [2, 1], [2, 1]]),
        ((DOWN, UP, LEFT), [[2, 0], [2, 1], [2, 1]]),  # a predator on the prey stays
    ):
        td = go(env, td, *actions)
        assert env.predators[0].tolist() == places
        assert not td["done"].any()
    td = go(env, td, RIGHT, UP, UP)
    assert td["terminated"].all() and not td["truncated"].any()


@pytest.mark.parametrize(
    ("mode", "there"), [("mixed", 0.0), ("cooperative", 0.1), ("competitive", 0.025)]
)
def test_rewards_by_hand(mode, there):
    env, td = placed([[0, 0], [0, 1], [2, 2]], [0, 1], size=3, mode=mode)
    td = go(env, td, RIGHT, STAY, LEFT)
    expected = torch.tensor([there, there, -0.05]).view(1, 3, 1)
    torch.testing.assert_close(td["agents", "reward"], expected)
    td = go(env, td, STAY, STAY, UP)
    td = go(env, td, STAY, STAY, UP)
    assert td["terminated"].all() == (mode == "mixed")


def test_observations_by_hand():
    env, _ = placed([[0, 0], [0, 1], [0, 1]], [1, 1], size=3, vision=1)
    seen = env._observe()["agents"]["observation"].view(3, 3, 3, 12)  # of agent, row, column
    which, prey, predators = seen[..., :10].argmax(-1), seen[..., 10], seen[..., 11]
    assert (seen[..., :10].sum(-1) == 1).all()
    assert which[0].tolist() == [[9, 9, 9], [9, 0, 1], [9, 3, 4]]
    assert which[1].tolist() == [[9, 9, 9], [0, 1, 2], [3, 4, 5]]
    assert prey[0].tolist() == [[0, 0, 0], [0, 0, 0], [0, 0, 1]]
    assert prey[1].tolist() == [[0, 0, 0], [0, 0, 0], [0, 1, 0]]
    assert predators[0].tolist() == [[0, 0, 0], [0, 1, 2], [0, 0, 0]]
    assert predators[2].tolist() == [[0, 0, 0], [1, 2, 0], [0, 0, 0]]


def test_windows_are_centered_on_their_cells():
    assert windows(3, 4, 0).flatten().tolist() == list(range(12))
    assert windows(3, 4, 2)[5].view(5, 5)[:, 2].tolist() == [12, 1, 5, 9, 12]


def test_start_cells_are_distinct_and_drawn_uniformly():
    env = PredatorPrey(2000, n_agents=2, size=2, seed=0)
    env.reset()
    places = torch.cat([env.predators, env.prey], 1)
    cells = places[..., 0] * 2 + places[..., 1]
    counts = torch.nn.functional.one_hot(cells, 4)
    assert (counts.sum(1) <= 1).all()
    assert (counts.float().mean(0) - 0.25).abs().max() < 0.04


def towards(places, goals):
    """The move towards a goal, along the column first."""
    rows, columns = (goals - places).unbind(-1)
    sideways = torch.where(columns > 0, RIGHT, torch.where(columns < 0, LEFT, STAY))
    return torch.where(rows > 0, DOWN, torch.where(rows < 0, UP, sideways))


def informed(env):
    return towards(env.predators, env.prey)


class Searching:
    """Each goes to the nearest unseen cell; the one that finds the prey calls the others."""

    def __init__(self, env):
        rows, columns = torch.meshgrid(*[torch.arange(env.size)] * 2, indexing="ij")
        self.cells = torch.stack([rows.flatten(), columns.flatten()], -1)
        self.seen = torch.zeros(env.num_envs, env.size**2, dtype=torch.bool)

    def __call__(self, env):
        way = (env.predators.unsqueeze(2) - self.cells).abs().sum(-1)  # [E, N, G]
        self.seen |= (way == 0).any(1)
        rivals = way.sum(1, keepdim=True) - way  # of two as near, the one far from the others
        cost = way - 0.1 * rivals + 1000 * self.seen.unsqueeze(1)
        search = towards(env.predators, self.cells[cost.argmin(-1)])
        return torch.where(env.caught.any(1, keepdim=True), informed(env), search)


def mean_length(env, act):
    td, lengths = env.reset(), torch.zeros(env.num_envs)
    running = torch.ones(env.num_envs, dtype=torch.bool)
    while running.any():
        lengths += running
        td = env.step(td.set(("agents", "action"), act(env)))["next"]
        running &= ~td["done"].squeeze(-1)
    return lengths.mean().item(), 4 * (lengths.std() / env.num_envs**0.5).item()


def test_informed_policy_matches_the_reference_length():
    env = PredatorPrey(4000, seed=0)
    length, error = mean_length(env, informed)
    assert abs(length - env.informed_length) < error


def test_shared_search_matches_the_documented_length():
    env = PredatorPrey(4000, seed=0)
    length, _ = mean_length(env, Searching(env))
    assert abs(length - 8.95) < 0.15


def test_episode_is_drawn(tmp_path):
    env = PredatorPrey(2, n_agents=2, max_steps=3, seed=0)
    evaluate(env, None, TeamSpec.from_env(env), episodes=2, gif=tmp_path / "episode.gif")
    shapes = {shape.name: (shape.x, shape.y) for shape in env.scene()}
    row, column = env.prey[0, 0].tolist()
    assert shapes["prey"] == (column - 2, 2 - row)


@pytest.mark.parametrize("agent_states", [False, True])
def test_environment_passes_check_marl_env(agent_states):
    settings = {"n_agents": 2, "size": 3, "vision": 1, "seed": 0}
    check_marl_env(PredatorPrey(3, agent_states=agent_states, **settings))


def test_agent_state_is_the_own_cell_and_the_cell_of_the_prey():
    env, td = placed([[0, 0], [1, 1], [0, 1]], [1, 0], size=2, agent_states=True)
    td = go(env, td, DOWN, LEFT, STAY)  # both reach cell 2, where the prey is
    own = td["agents", "state"][0].unflatten(-1, (2, 4)).argmax(-1)
    assert own.tolist() == [[2, 2], [2, 2], [1, 2]]
    assert td["agents", "state"].sum(-1).tolist() == [[2.0] * 3]
    plain = PredatorPrey(4, seed=0).reset()
    assert ("agents", "state") not in plain.keys(True)
    assert (PredatorPrey(4, agent_states=True, seed=0).reset()["state"] == plain["state"]).all()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"size": 1}, "size is 1, expected 2 or more"),
        ({"size": 2, "n_agents": 4}, "4 predators and a prey do not fit into 4 cells"),
        ({"mode": "mix"}, "mode is 'mix', expected one of mixed"),
    ],
)
def test_invalid_arguments_are_refused(kwargs, message):
    with pytest.raises(ConfigError, match=message):
        PredatorPrey(2, **kwargs)


if __name__ == "__main__":
    pytest.main([__file__])
