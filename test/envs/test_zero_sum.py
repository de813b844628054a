"""Zero-sum matrix games and Kuhn poker: rewards move by move, and exact solutions."""

import itertools

import pytest
import torch
from tensordict import TensorDict

from torchrl_marl import TeamSpec
from torchrl_marl.collectors import TeamPolicy
from torchrl_marl.envs.toy import Kuhn, ZeroSum
from torchrl_marl.envs.toy.probabilities import action_probabilities
from torchrl_marl.errors import ConfigError
from torchrl_marl.modules import RandomActor, make_actor

EQUILIBRIUM = torch.tensor(
    [[[1 / 9, 0.0], [0.0, 4 / 9], [1 / 3, 1.0]], [[1 / 3, 0.0], [0.0, 1 / 3], [1.0, 1.0]]],
    dtype=torch.float64,
)
"""Kuhn's: the first bets the lowest card 1/9, a third of the highest's 1/3, and so on."""


def play(env, *moves):
    """Rewards of the first player and done flags of each step."""
    rewards, ends = [], []
    td = env.reset()
    for move in moves:
        for name in env.group_map:
            td[name, "action"] = torch.full((env.num_envs, 1), move)
        td = env.step(td)["next"]
        assert torch.equal(td["first", "reward"], -td["second", "reward"])
        rewards.append(td["first", "reward"].flatten())
        ends.append(td["done"].all().item())
    return torch.stack(rewards), ends


# --------------------------------------------------------------------------------- zero-sum


def test_rewards_are_zero_sum():
    env = ZeroSum(6, payoff=[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    td = env.reset()
    td["first", "action"] = torch.tensor([[0], [0], [0], [1], [1], [1]])
    td["second", "action"] = torch.tensor([[0], [1], [2]] * 2)
    td = env.step(td)["next"]
    assert td["first", "reward"].flatten().tolist() == [1, 2, 3, 4, 5, 6]
    assert td["second", "reward"].flatten().tolist() == [-1, -2, -3, -4, -5, -6]
    assert td["terminated"].all()
    assert env.optimal_return == pytest.approx(4) and env.random_return == 3.5


def test_strategies_of_a_policy_are_exact():
    env = ZeroSum(2, payoff="biased")
    policy = team_policy(env)
    found = env.strategies(policy)
    seen = TensorDict({"observation": torch.ones(1, 1, 1), "mask": torch.ones(1, 1).bool()}, [1, 1])
    for chance, actor, name in zip(found, policy, env.group_map):
        expected = actor.get_dist(TensorDict({name: seen}, [1])).probs.flatten().double()
        torch.testing.assert_close(chance, expected, rtol=0, atol=1e-6)
    assert env.nash_conv(policy) == pytest.approx(env.nash_conv(found), abs=1e-6)
    assert env.nash_conv((env.nash.row, env.nash.column)) == pytest.approx(0, abs=1e-6)


def test_invalid_payoffs_are_refused():
    with pytest.raises(ConfigError, match="unknown payoff 'baised'; did you mean 'biased'"):
        ZeroSum(2, payoff="baised")
    with pytest.raises(ConfigError, match=r"payoff has shape \[1, 2\], expected \[M, K\]"):
        ZeroSum(2, payoff=[[1.0, 2.0]])


def test_actions_never_drawn_share_the_remaining_probability():
    action = torch.tensor([[[0]], [[2]], [[0]]])
    log_prob = torch.tensor([[[0.5]], [[0.2]], [[0.5]]]).log()
    group = TensorDict({"action": action, "action_log_prob": log_prob}, [3, 1, 1])
    found = action_probabilities(TensorDict({"a": group}, [3, 1]), "a", 4)
    expected = torch.tensor([[[0.5, 0.15, 0.2, 0.15]]], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    frequencies = action_probabilities(
        TensorDict({"a": group.exclude("action_log_prob")}, [3, 1]), "a", 4
    )
    assert frequencies.flatten().tolist() == pytest.approx([2 / 3, 0, 1 / 3, 0])


# -------------------------------------------------------------------------------------- Kuhn


@pytest.mark.parametrize(
    ("moves", "pot"),
    [((0, 0), 1), ((1, 1), 2), ((0, 1, 1), 2), ((1, 0), "second"), ((0, 1, 0), "first")],
)
def test_kuhn_move_by_move(moves, pot):
    """A player that folds loses 1; else the higher card wins the stake."""
    env = Kuhn(200, seed=0)
    env.reset()
    rewards, ends = play(env, *moves)
    assert ends == [False] * (len(moves) - 1) + [True]
    assert (rewards[:-1] == 0).all()
    higher = torch.where(env.cards[:, 0] > env.cards[:, 1], 1.0, -1.0)
    folded = {"first": -torch.ones(200), "second": torch.ones(200)}
    expected = folded[pot] if isinstance(pot, str) else pot * higher
    assert torch.equal(rewards[-1], expected)
    assert len({tuple(deal) for deal in env.cards.tolist()}) == 6


def test_player_observes_only_its_card_and_acts_in_turn():
    env = Kuhn(50, seed=1)
    td = env.reset()
    for move, first in ((0, True), (1, False), (0, True)):
        assert (td["first", "mask"] == first).all() and (td["second", "mask"] != first).all()
        for seat, name in enumerate(env.group_map):
            assert torch.equal(td[name, "observation"][:, 0, :3].argmax(-1), env.cards[:, seat])
            assert (td[name, "observation"][..., -1] == seat).all()
            td[name, "action"] = torch.full((50, 1), move)
        td = env.step(td)["next"]


def test_kuhn_matches_its_reference_values():
    env = Kuhn(2)
    assert env.nash_conv(torch.full((2, 3, 2), 0.5)) == pytest.approx(11 / 12)
    assert env.nash_conv(EQUILIBRIUM) == pytest.approx(0, abs=1e-12)
    # Always pass, and fold: whoever bets takes the pot, from either seat.
    assert env.nash_conv(torch.zeros(2, 3, 2)) == pytest.approx(2.0)
    env, policy = Kuhn(6000, seed=0), None
    policy = TeamPolicy(RandomActor(group) for group in env.team.groups.values())
    td = env.rollout(3, policy, break_when_any_done=False)
    done = td["next", "done"].squeeze(-1)
    returns = td["next", "first", "reward"].flatten()[done.flatten()]
    assert returns.mean().item() == pytest.approx(env.random_return, abs=0.05)


def test_nash_conv_of_a_policy_equals_that_of_its_probabilities():
    env = Kuhn(2, seed=0)
    policy = team_policy(env)
    bets = env.bets(policy)
    for seat, (actor, name) in enumerate(zip(policy, env.group_map)):
        for card, place in itertools.product(range(3), range(2)):
            said = ((0, 3), (1, 2))[seat][place]
            seen = torch.zeros(1, 1, 8)
            seen[..., [card, 3 + said]], seen[..., 7] = 1.0, float(seat)
            own = TensorDict({"observation": seen, "mask": torch.ones(1, 1).bool()}, [1, 1])
            chance = actor.get_dist(TensorDict({name: own}, [1])).probs[0, 0, 1].item()
            assert bets[seat, card, place].item() == pytest.approx(chance, abs=1e-6)
    assert env.nash_conv(policy) == env.nash_conv(bets)


def test_nash_conv_equals_openspiel():
    pyspiel = pytest.importorskip("pyspiel")
    from open_spiel.python import policy
    from open_spiel.python.algorithms import exploitability

    game, env = pyspiel.load_game("kuhn_poker"), Kuhn(2)
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        bets = torch.rand(2, 3, 2, generator=generator, dtype=torch.float64)
        mixed = policy.TabularPolicy(game)
        for seat, card, place in itertools.product(range(2), range(3), range(2)):
            said = (("", "pb"), ("p", "b"))[seat][place]
            chance = bets[seat, card, place].item()
            mixed.policy_for_key(f"{card}{said}")[:] = [1 - chance, chance]
        expected = exploitability.nash_conv(game, mixed)
        assert env.nash_conv(bets) == pytest.approx(expected, abs=1e-6)


def team_policy(env):
    torch.manual_seed(0)
    return TeamPolicy(make_actor(group) for group in TeamSpec.from_env(env).groups.values())


if __name__ == "__main__":
    pytest.main([__file__])
