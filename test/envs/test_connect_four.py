"""PettingZoo's Connect Four, a turn-based game: each side gets exactly its result as return."""

import pytest
import torch
from tensordict.nn import TensorDictModule

from torchrl_marl import TeamSpec
from torchrl_marl.envs import make_env
from torchrl_marl.objectives import TeamGAE
from torchrl_marl.training.metrics import EpisodeTracker

pytest.importorskip("pettingzoo.classic")
SIDES = ("player_0", "player_1")


@pytest.fixture(scope="module")
def games():
    """Random games; the first of each copy is complete, since 42 moves fill the board."""
    env = make_env(
        "pettingzoo/classic/connect_four_v3",
        num_envs=40,
        group_map={side: [side] for side in SIDES},
        seed=0,
    )
    torch.manual_seed(0)
    return TeamSpec.from_env(env), env.rollout(42, break_when_any_done=False)


def four_in_a_row(board):
    """Whether a board ``[6, 7]`` has four in a row, by brute force."""
    rows = [list(row) for row in board.tolist()]
    return any(
        all(
            0 <= r + i * down < 6 and 0 <= c + i * right < 7 and rows[r + i * down][c + i * right]
            for i in range(4)
        )
        for r in range(6)
        for c in range(7)
        for down, right in ((0, 1), (1, 0), (1, 1), (1, -1))
    )


def test_advantage_of_the_first_move_equals_the_result(games):
    """With gamma 1 and zero values, the advantage of a first move is the result of the game."""
    team, td = games
    end = td["next", "done"].flatten(1).int().argmax(1)
    last = td["next", "player_0", "observation"][range(len(end)), end].squeeze(1)
    results = [four_in_a_row(x[..., 0]) - four_in_a_row(x[..., 1]) for x in last]
    assert {1, -1} <= set(results)
    for side, sign in zip(SIDES, (1, -1)):
        critic = TensorDictModule(
            lambda mask: 0.0 * mask.unsqueeze(-1), [(side, "mask")], [(side, "state_value")]
        )
        group = team.groups[side]
        TeamGAE(gamma=1.0, lmbda=1.0, value_network=critic, group=group, bootstrap="agent")(td)
        first = td[side, "mask"].flatten(1).int().argmax(1, keepdim=True)
        assert (first == (0 if sign == 1 else 1)).all()
        advantage = td[side, "advantage"].flatten(1).gather(1, first).squeeze(1)
        assert advantage.tolist() == [sign * result for result in results]


def test_losses_are_rewarded_in_the_opponents_turns(games):
    team, td = games
    earned = {side: td["next", side, "reward"].flatten() for side in SIDES}
    assert torch.equal(earned["player_0"], -earned["player_1"])
    for side in SIDES:
        own = td[side, "mask"].flatten()
        assert (earned[side][own] >= 0).all()
        assert (earned[side][~own] <= 0).all()
        assert (earned[side][~own] < 0).any()
    means = EpisodeTracker(team).update(td)
    sides = [means[f"{side}/episode_reward"].item() for side in SIDES]
    assert sides[0] == -sides[1] != 0
