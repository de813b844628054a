"""The traffic junction: routes, arrivals, collisions, observations and scripted policies."""

import pytest
import torch

from torchrl_marl import TeamSpec
from torchrl_marl.envs import check_marl_env
from torchrl_marl.envs.toy import TrafficJunction
from torchrl_marl.envs.toy.traffic_junction import DIFFICULTIES, make_routes
from torchrl_marl.errors import ConfigError
from torchrl_marl.training.evaluation import evaluate

GAS, BRAKE = 0, 1


def go(env, td, *actions):
    actions = [*actions, *[GAS] * (env.n_agents - len(actions))]
    return env.step(td.set(("agents", "action"), torch.tensor([actions])))["next"]


def with_cars(*cars, **kwargs):
    """An environment of one env where cars are at (route, place), and where none arrives."""
    env = TrafficJunction(
        1, **{"n_agents": len(cars) + 1, "arrival_rate": 0.0, "seed": 0, **kwargs}
    )
    td = env.reset()
    for i, (route, place) in enumerate(cars):
        env.route[0, i], env.place[0, i], env.came[0, i] = route, place, True
    mask = torch.tensor([[True] * len(cars) + [False]])
    env._episode["groups"]["agents"]["mask"] = mask
    env._episode["born"]["agents"] = mask
    return env, td


# -------------------------------------------------------------------------------------- routes


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_routes_go_from_edge_to_edge_cell_by_cell(difficulty):
    size = DIFFICULTIES[difficulty].size
    cells, lengths, of_arrival = make_routes(difficulty, size)
    n_roads = {"easy": 2, "medium": 4, "hard": 8}[difficulty]
    assert len(cells) == n_roads * (n_roads - 1)  # from each arrival to each other exit, and more
    assert of_arrival.shape[0] == n_roads and of_arrival.flatten().tolist() == list(
        range(len(cells))
    )
    ends = set()
    for row, length in zip(cells.tolist(), lengths.tolist()):
        route = [divmod(cell, size) for cell in row[:length]]
        assert set(row[length:]) <= {-1}
        assert len(set(route)) == length
        for (r, c), (r2, c2) in zip(route, route[1:]):
            assert abs(r - r2) + abs(c - c2) == 1
        for r, c in (route[0], route[-1]):
            assert {r, c} & {0, size - 1}
        ends.add((route[0], route[-1]))
    if difficulty != "hard":
        assert len(ends) == len(cells)
    starts = {cells[own[0], 0].item() for own in of_arrival}
    assert starts == {cells[route, 0].item() for own in of_arrival for route in own}


def test_routes_of_a_small_medium_grid_by_hand():
    cells, _, of_arrival = make_routes("medium", 4)
    routes = [[divmod(c, 4) for c in row if c >= 0] for row in cells[of_arrival[0]].tolist()]
    down = [(0, 1), (1, 1)]  # from the top, on the right of the road
    assert routes == [
        [*down, (2, 1), (3, 1)],
        [*down, (1, 0)],
        [*down, (2, 1), (2, 2), (2, 3)],
    ]


def test_lanes_have_one_direction():
    cells, _, _ = make_routes("hard", 18)
    ways = {}
    for row in cells.tolist():
        route = [divmod(cell, 18) for cell in row if cell >= 0]
        for before, after in zip(route, route[1:]):
            ways.setdefault(before, set()).add(after)
    both = [(a, b) for a, following in ways.items() for b in following if a in ways.get(b, ())]
    assert not both


# -------------------------------------------------------------------------- steps by hand


def test_gas_brake_and_leaving_by_hand():
    env, td = with_cars((0, 5), (1, 0))
    td = go(env, td, GAS, BRAKE)
    assert env.at[0].tolist() == [6 * 7 + 3, 3 * 7, 49]
    torch.testing.assert_close(td["agents", "reward"].flatten(), torch.tensor([-0.01, -0.01, 0]))
    assert td["agents", "observation"][0, :, 0].tolist() == [0, 1, 0]
    td = go(env, td, GAS, GAS)
    assert td["agents", "terminated"].flatten().tolist() == [True, False, False]
    assert td["agents", "mask"].flatten().tolist() == [False, True, False]
    torch.testing.assert_close(td["agents", "reward"].flatten(), torch.tensor([0, -0.02, 0]))
    assert (td["agents", "observation"][0, 0] == 0).all()
    td = go(env, td, GAS, GAS)  # a car that left stays gone
    assert env.place[0].tolist() == [7, 2, 0]


def test_collisions_by_hand():
    env, td = with_cars((0, 2), (1, 2), (1, 1))
    assert not env.crashed.any()
    td = go(env, td, GAS, GAS, GAS)  # two meet in the junction, one drives behind
    assert env.crashed[0].tolist() == [True, True, False, False]
    reward = td["agents", "reward"].flatten()
    torch.testing.assert_close(reward, torch.tensor([-10.01, -10.01, -0.01, 0]))
    td = go(env, td, GAS, BRAKE, GAS)  # then one hits the standing car
    assert env.crashed[0].tolist() == [False, True, True, False]
    td = go(env, td, GAS, GAS, BRAKE)
    assert not env.crashed.any()
    torch.testing.assert_close(td["agents", "reward"].flatten()[:3], torch.full((3,), -0.03))


def test_observations_by_hand():
    env, _ = with_cars((0, 2), (1, 3), (1, 3), vision=1)
    seen = env._observe()["agents"]["observation"]
    assert seen.shape == (1, 4, 1 + 2 + 9 * 15)
    assert seen[0, :, 1:3].tolist() == [[1, 0], [0, 1], [0, 1], [0, 0]]
    window = seen[0, 0, 3:].view(3, 3, 15)
    assert (window[..., :14].sum(-1) == 1).all()
    # Thirteen road cells, row by row: 0 to 2 above the junction, 3 to 9 the row, 10 to 12 below.
    assert window[..., :14].argmax(-1).tolist() == [[13, 1, 13], [13, 2, 13], [5, 6, 7]]
    assert window[..., 14].tolist() == [[0, 0, 0], [0, 1, 0], [0, 2, 0]]
    assert (seen[0, 3] == 0).all()


def test_central_state_counts_cars_and_steps():
    env, _ = with_cars((0, 2), (1, 3), (1, 3))
    env.wait = torch.tensor([[5, 10, 20, 0]])
    cars, steps = env._observe()["state"].view(2, 2, 7)
    assert cars.nonzero().tolist() == [[0, 2], [1, 3]] and cars[1, 3] == 2
    assert steps[0, 2] == 0.5 and steps[1, 3] == 1.5


# ------------------------------------------------------------------------------------ arrivals


def test_cars_arrive_in_order_up_to_the_capacity():
    env = TrafficJunction(2, arrival_rate=1.0, capacity=3, n_agents=5, max_steps=None, seed=0)
    td = env.reset()
    assert not td["agents", "mask"].any()
    counts = []
    for _ in range(13):
        td = env.step(env.rand_action(td).set(("agents", "action"), torch.zeros(2, 5).long()))
        td = td["next"]
        counts.append(td["agents", "mask"].sum(-1).tolist())
        assert env.came.int().diff(dim=1).amax() <= 0  # by number
    # Two, then the third; at the eighth step the first two leave and the last two come.
    expected = [2, 3, 3, 3, 3, 3, 3, 3, 2, 2, 2, 2, 2]
    assert counts == [[n, n] for n in expected]
    assert env.route[0].tolist() == [0, 1, 0, 0, 1]


def test_arrivals_follow_the_arrival_rate():
    env = TrafficJunction(4000, arrival_rate=0.3, n_agents=2, capacity=2, seed=0)
    td = env.reset()
    env.step(env.rand_action(td))
    counts = env.came.sum(1).bincount(minlength=3) / 4000
    assert (counts - torch.tensor([0.49, 0.42, 0.09])).abs().max() < 0.035
    alone = env.came.sum(1) == 1
    assert abs(env.route[alone][:, 0].float().mean() - 0.5) < 0.05


@pytest.mark.parametrize("difficulty", ["easy", "medium"])
def test_default_n_agents_suffices_for_all_arrivals(difficulty):
    env = TrafficJunction(50, difficulty=difficulty, arrival_rate=1.0, seed=0)
    more = TrafficJunction(50, difficulty=difficulty, arrival_rate=1.0, n_agents=200, seed=0)
    for one in (env, more):
        td = one.reset()
        for _ in range(one.max_steps):
            td = one.step(td.set(("agents", "action"), torch.zeros(50, one.n_agents).long()))[
                "next"
            ]
    assert (more.came.sum(1) <= env.n_agents).all()


# -------------------------------------------------------------------------------- by hand


def careful(env):
    """Cars from the left give way at the junction; cars stop behind standing ones."""
    down, right = (env.route == 0) & env.alive, (env.route == 1) & env.alive

    def stands(cars, place):
        return cars & (env.place == place)

    brake = stands(down, 2).any(1, keepdim=True) & stands(right, 2)
    for place in (1, 0):
        brake = brake | (brake.any(1, keepdim=True) & stands(right, place))
    return brake.long()


def blind(env):
    """Always gas."""
    return torch.zeros(env.num_envs, env.n_agents, dtype=torch.int64)


def share_of_successes(env, act):
    td, failed = env.reset(), torch.zeros(env.num_envs, dtype=torch.bool)
    for _ in range(env.max_steps):
        td = env.step(td.set(("agents", "action"), act(env)))["next"]
        failed |= (td["agents", "reward"] <= -10).any(1).squeeze(-1)
    return 1 - failed.float().mean().item()


@pytest.mark.parametrize(("act", "expected"), [(careful, 0.96), (blind, 0.29)])
def test_success_rates_of_scripted_policies_match_the_docs(act, expected):
    env = TrafficJunction(2000, seed=0)
    assert abs(share_of_successes(env, act) - expected) < 0.04


def test_episode_is_drawn(tmp_path):
    env = TrafficJunction(2, max_steps=6, seed=0)
    evaluate(env, None, TeamSpec.from_env(env), episodes=2, gif=tmp_path / "episode.gif")
    shapes = env.scene()
    assert len(shapes) == 15 + 13
    assert [shape.visible for shape in shapes[:15]] == env.alive[0].tolist()


@pytest.mark.parametrize("difficulty", ["easy", "medium"])
def test_environment_passes_check_marl_env(difficulty):
    env = TrafficJunction(3, difficulty=difficulty, arrival_rate=0.5, max_steps=12, seed=0)
    check_marl_env(env, n_steps=14)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"difficulty": "eazy"}, "did you mean 'easy'"),
        ({"difficulty": "hard", "size": 10}, "expected a multiple of 3"),
        ({"arrival_rate": 1.5}, "arrival_rate is 1.5, expected 0 to 1"),
        ({"capacity": 0}, "capacity is 0, expected 1 or more"),
    ],
)
def test_invalid_arguments_are_refused(kwargs, message):
    with pytest.raises(ConfigError, match=message):
        TrafficJunction(2, **kwargs)


if __name__ == "__main__":
    pytest.main([__file__])
