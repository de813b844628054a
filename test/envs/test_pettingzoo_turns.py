"""PettingZooEnv on turn-based environments: movers, rewards of each agent, deaths, real games."""

import numpy as np
import pytest
import torch
from pettingzoo.utils import parallel_to_aec
from scripted import MaskedTurns, Script, Turns
from torchrl.envs import check_env_specs

from torchrl_marl.envs import PettingZooEnv
from torchrl_marl.errors import SpecError, WorkerError


def roll(world, n_steps, **kwargs):
    """A rollout of one copy of random, legal moves."""
    env = PettingZooEnv(world, seed=0, **kwargs)
    return env.rollout(n_steps, break_when_any_done=False)


def values(td, leaf):
    return td["p", leaf].reshape(td.shape[1], -1).tolist()


def test_one_agent_acts_and_all_get_observations_and_rewards():
    world = Turns(n_moves=4)
    td = roll(world, 4)
    assert values(td, "mask") == [[True, False], [False, True]] * 2
    # By hand: each move gives the mover 1 and the other -10.
    assert values(td["next"], "reward") == [[1, -10], [-10, 1]] * 2
    assert td["next", "p", "observation"][0, ..., 1].tolist() == [[i, i] for i in range(1, 5)]
    assert values(td["next"], "terminated") == [[False, False]] * 3 + [[True, True]]
    assert td["next", "terminated"][0, :, 0].tolist() == [False] * 3 + [True]
    assert not td["next", "truncated"].any() and not td["next", "p", "mask"][0, -1].any()
    assert [mover for mover, action in world.calls if action is not None] == [
        "p_0",
        "p_1",
        "p_0",
        "p_1",
    ]


def test_rewards_sum_to_the_cumulative_reward_of_last():
    plan = {i: {"earns": {"p_0": i, "p_1": 10 * i, "p_2": 100 * i}} for i in range(1, 12)}
    world = Turns(3, plan, n_moves=11)
    td = roll(world, 11)
    found = td["next", "p", "reward"][0, ..., 0]
    world.reset()
    turns = dict.fromkeys(world.agents, 0)
    for move in range(11):
        agent = world.agent_selection
        i = world.possible_agents.index(agent)
        _, told, *_ = world.last()
        assert told == found[turns[agent] : move, i].sum()
        turns[agent] = move
        world.step(0)


def test_action_mask_shows_missing_legal_actions():
    """Agents that do not act have all actions legal, since policies draw for all agents."""
    td = roll(MaskedTurns(since=0, legal=(0, 0), n_moves=3), 3)
    legal = td["p", "action_mask"].any(-1)
    assert torch.equal(legal, ~td["p", "mask"])


def test_death_does_not_end_the_episode():
    world = Turns(3, {2: {"dies": "p_2", "earns": {"p_2": -5}}, 3: {"cut": "p_0"}}, n_moves=5)
    td = roll(world, 5)
    assert values(td, "mask") == [
        [True, False, False],
        [False, True, False],
        [True, False, False],
        [False, True, False],
        [False, True, False],
    ]
    next_ = td["next"]
    assert values(next_, "terminated") == [
        [False] * 3, [False, False, True], [False, False, True], [False, False, True],
        [False, True, True],
    ]  # fmt: skip
    assert values(next_, "truncated")[2:] == [[True, False, False]] * 3
    assert values(next_, "reward")[1] == [0, 0, -5]
    # The dead agent had its step(None) within the same step.
    assert world.calls[1][0] == "p_1" and world.calls[2] == ("p_2", None)
    assert next_["p", "observation"][0, 1:3, 2].tolist() == [[2, 2], [0, 0]]
    assert next_["done"].sum() == 1


def test_waiting_agents_are_bootstrapped_at_the_time_limit():
    td = roll(Turns(), 3, max_steps=3)["next"]
    assert values(td, "mask") == [[False, True], [True, False], [True, True]]
    assert values(td, "truncated")[-1] == [True, True] and td["truncated"][0, -1].all()


def test_waiting_agents_keep_their_last_observation():
    td = roll(Turns(blind=True), 3)
    assert td["p", "observation"][0, ..., 1].tolist() == [[0, 0], [0, 1], [2, 1]]


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda world: world.agents.append("eve"), "'eve' is among the agents"),
        (
            lambda world: world.agents.remove("p_2"),
            "'p_2' is gone from the environment's agents, but",
        ),
        (lambda world: world.terminations.update(p_2="no"), "'p_2' is 'no'"),
        (lambda world: setattr(world, "agent_selection", "eve"), "'eve' is among the movers"),
    ],
)
def test_environment_that_changes_its_agents_is_refused(change, words):
    class Changing(Turns):
        def observe(self, agent):
            return np.zeros(2, np.float32)

        def step(self, action):
            super().step(action)
            if self.move == 2:
                change(self)

    with pytest.raises(SpecError, match=f"^Copy 0 of Changing: .*agent {words}"):
        roll(Changing(3), 4)


def test_agent_removed_in_the_step_of_its_death_is_terminated():
    class Quick(Turns):
        def step(self, action):
            super().step(action)
            if self.move == 2 and "p_2" in self.agents:
                self.terminations["p_2"] = True
                self.agents.remove("p_2")
                self.agent_selection = "p_0"

    td = roll(Quick(3, n_moves=4), 3)
    assert values(td["next"], "terminated")[:2] == [[False] * 3, [False, False, True]]


def test_selecting_an_ended_agent_again_is_refused():
    world = Turns(plan={1: {"dies": "p_1"}})
    world._was_dead_step = lambda action: None
    with pytest.raises(Exception, match="'p_1' ended and is selected again") as error:
        roll(world, 2)
    assert not isinstance(error.value, WorkerError)


def test_parallel_environment_converted_to_turns():
    nothing = dict.fromkeys(["p_0", "p_1", "p_2"], 0.0)
    script = [
        {"earns": {"p_0": 1.0, "p_1": 2.0, "p_2": 4.0}},
        {"earns": {**nothing, "p_0": 8.0}},
        {"earns": nothing},
        {"earns": nothing, "agents": "", "cut": "p_0 p_1 p_2"},
    ]
    world = parallel_to_aec(Script("p_0 p_1 p_2", script))
    td = roll(world, 12)["next"]
    expected = torch.zeros(12, 3)
    expected[2], expected[5, 0] = torch.tensor([1.0, 2.0, 4.0]), 8.0
    assert torch.equal(td["p", "reward"][0, ..., 0], expected)
    assert td["truncated"][0, :, 0].tolist() == [False] * 11 + [True]


def test_both_flags_truncate_only_at_the_time_limit():
    def ends(moves, limit):
        world = Turns(plan={moves: {"dies": "p_0 p_1", "cut": "p_0 p_1"}}, n_moves=9)
        world.max_cycles = limit
        td = roll(world, moves)["next"]
        assert td["done"][0, -1].all() and not td["done"][0, :-1].any()
        return "truncated" if td["truncated"].any() else "terminated"

    assert (ends(4, limit=2), ends(4, limit=3)) == ("truncated", "terminated")


@pytest.mark.parametrize("group_map", [None, {"black": ["p_0"], "white": ["p_1"]}])
def test_action_mask_in_infos_applies_to_the_acting_agent(group_map):
    world = MaskedTurns()
    env = PettingZooEnv(world, seed=0, group_map=group_map)
    td = env.rollout(12, break_when_any_done=False)
    assert {action for _, action in world.calls} == {1, None}
    groups = env.group_map if group_map else {"p": None}
    masks = torch.cat([td[group, "action_mask"] for group in groups], 2)
    moves = torch.cat([td[group, "mask"] for group in groups], 2)
    assert torch.equal(masks[..., 0], ~moves) and masks[..., 1].all()


def test_action_mask_that_is_missing_at_reset_is_refused():
    with pytest.raises(SpecError, match="agent 'p_1' has an action mask.*return it in reset"):
        roll(MaskedTurns(since=1), 3)


def play(env, n_games):
    """Returns, last rewards and last movers of complete games."""
    totals = torch.zeros(env.num_envs, 2)
    td, games = env.reset(), []
    while len(games) < n_games:
        td = env.rand_action(td)
        mover = td["player", "mask"]
        assert (mover.sum(-1) == 1).all()
        step, td = env.step_and_maybe_reset(td)
        totals += step["next", "player", "reward"].squeeze(-1)
        last = step["next", "player", "reward"].squeeze(-1)
        for i in step["next", "done"].flatten().nonzero().flatten().tolist():
            assert step["next", "player", "terminated"][i].all()
            games.append((totals[i].tolist(), last[i].tolist(), mover[i].long().argmax().item()))
            totals[i] = 0
    return games


@pytest.mark.parametrize("world", ["connect_four_v3", "tictactoe_v3"])
def test_result_of_a_game_is_rewarded_in_the_last_step(world):
    env = PettingZooEnv(f"classic/{world}", num_envs=8, seed=0)
    torch.manual_seed(0)
    games = play(env, 60)
    assert all(total == last for total, last, _ in games)
    for total, _, mover in games:
        assert total == [0, 0] or (total[mover], total[1 - mover]) == (1, -1)
    assert {total[0] for total, *_ in games} >= {1, -1}


@pytest.mark.parametrize("world", ["leduc_holdem_v4", "texas_holdem_v4"])
def test_poker_returns_are_zero_sum(world):
    env = PettingZooEnv(f"classic/{world}", num_envs=4, seed=0)
    games = play(env, 40)
    assert all(sum(total) == 0 and total == last for total, last, _ in games)
    assert any(total[0] for total, *_ in games)


def test_illegal_move_is_handled_by_the_environment():
    env = PettingZooEnv("classic/tictactoe_v3", seed=0)
    td = env.reset()
    for _ in range(2):
        td["player", "action"] = torch.zeros(1, 2, dtype=torch.int64)
        step, td = env.step_and_maybe_reset(td)
    assert step["next", "terminated"].all() and not step["next", "truncated"].any()
    assert step["next", "player", "reward"].flatten().tolist() == [0, -1]


def test_action_mask_is_that_of_the_acting_agent():
    env = PettingZooEnv("classic/connect_four_v3", seed=0)
    check_env_specs(env)
    td = env.reset()
    for _ in range(6):
        td["player", "action"] = torch.full((1, 2), 3)
        td = env.step_and_maybe_reset(td)[1]
    legal = td["player", "action_mask"][0].long().tolist()
    assert legal == [[1, 1, 1, 0, 1, 1, 1], [1] * 7]
    assert td["player", "observation"].shape == (1, 2, 6, 7, 2)
    # Both see the board from their own side.
    mine, theirs = td["player", "observation"][0].numpy()
    assert np.array_equal(mine, theirs[..., ::-1]) and mine.sum() == 6


def test_knights_die_in_turns():
    env = PettingZooEnv(
        "butterfly/knights_archers_zombies_v11",
        backend="aec", seed=0, spawn_delay=3, line_death=True,
    )  # fmt: skip
    td = env.rollout(700, break_when_any_done=False)
    done = torch.cat([td["next", g, "done"] for g in ("archer", "knight")], 2).squeeze()
    mask = torch.cat([td[g, "mask"] for g in ("archer", "knight")], 2).squeeze()
    assert (mask.sum(-1) == 1).all()
    assert (done.any(-1) & ~td["next", "done"].flatten()).any()
