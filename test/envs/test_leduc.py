"""Leduc poker: rewards move by move, and exact solutions."""

import itertools

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from torchrl_marl.collectors import TeamPolicy
from torchrl_marl.envs.toy import Leduc
from torchrl_marl.envs.toy.leduc import information_sets, seen, strength
from torchrl_marl.envs.toy.probabilities import legal_probabilities
from torchrl_marl.modules import RandomActor, make_actor

F, C, R = range(3)


def play(env, moves):
    """Rewards of the first player and done flags of each step; moves must be legal."""
    rewards, ends, td = [], [], env.reset()
    for move in moves:
        for name in env.group_map:
            mask = td[name, "action_mask"]
            assert torch.equal(mask.any(-1), td[name, "mask"])
            assert (mask[td[name, "mask"]][:, move]).all()
            td[name, "action"] = torch.where(td[name, "mask"], move, 0)
        assert (td["first", "mask"] ^ td["second", "mask"]).all()
        td = env.step(td)["next"]
        assert torch.equal(td["first", "reward"], -td["second", "reward"])
        rewards.append(td["first", "reward"].flatten())
        ends.append(td["done"].all().item())
    return torch.stack(rewards), ends


@pytest.mark.parametrize(
    ("moves", "won"),
    [
        ((R, F), 1.0),  # the second folds, with its 1
        ((C, R, F), -1.0),
        ((R, R, F), -3.0),  # the first has put in 1 and 2
        ((C, R, R, F), 3.0),
        ((C, C, R, F), 1.0),
        ((R, C, C, R, F), -3.0),
        ((R, R, C, R, R, F), -9.0),  # 1, twice 2, and 4
        ((R, R, C, C, R, R, F), 9.0),
        ((C, C, C, C), None),
        ((C, C, C, R, C), None),
        ((R, C, R, C), None),
        ((C, R, C, R, R, C), None),
        ((C, R, R, C, C, R, R, C), None),
    ],
)
def test_rewards_follow_the_betting(moves, won):
    env = Leduc(300, seed=0)
    rewards, ends = play(env, moves)
    assert ends == [False] * (len(moves) - 1) + [True]
    assert (rewards[:-1] == 0).all()
    assert len({tuple(deal) for deal in env.cards.tolist()}) > 100
    if won is not None:
        assert (rewards[-1] == won).all()
        return
    # All cards on the table: each has put in 1, and what was raised before the round's last call.
    closes = next(i for i, (a, b) in enumerate(itertools.pairwise(moves), 1) if b == C) + 1
    stake = 1 + 2 * moves[:closes].count(R) + 4 * moves[closes:].count(R)
    rank, public = env.cards[:, :2] // 2, env.cards[:, 2:] // 2
    hand = torch.where(rank == public, 10, rank)
    assert torch.equal(rewards[-1], stake * (hand[:, 0] - hand[:, 1]).sign().float())


def test_strength_of_hands_by_hand():
    cards = torch.tensor([[0, 2, 4], [4, 3, 1], [1, 4, 0], [5, 0, 1], [2, 3, 4], [4, 1, 5]])
    assert strength(cards).tolist() == [-1, 1, 1, -1, 0, 1]


def test_observation_has_the_own_card_and_later_the_public_card():
    env = Leduc(50, seed=1)
    td = env.reset()
    for step, move in enumerate((C, R, C, R)):
        for seat, name in enumerate(env.group_map):
            who, own, public, said = td[name, "observation"][:, 0].split([2, 6, 6, 16], -1)
            assert (who.argmax(-1) == seat).all() and (who.sum(-1) == 1).all()
            assert torch.equal(own.argmax(-1), env.cards[:, seat])
            if step < 3:
                assert (public == 0).all()
            else:
                assert torch.equal(public.argmax(-1), env.cards[:, 2])
            expected = torch.zeros(2, 4, 2)
            for moved, what in enumerate((0, 1, 0)[:step]):  # call, raise, call
                expected[0, moved, what] = 1
            assert (said == expected.flatten()).all()
            td[name, "action"] = torch.full((50, 1), move)
        td = env.step(td)["next"]


def test_information_sets_equal_the_observations_of_games():
    """936 information sets, each seen in some game, and no other."""
    env = Leduc(4000, seed=0)
    policy = TeamPolicy(RandomActor(group) for group in env.team.groups.values())
    td = env.rollout(40, policy, break_when_any_done=False)
    known = information_sets()[0]
    assert known.shape == (2, 468, 3)
    for seat, name in enumerate(env.group_map):
        seen_there = td[name, "observation"][td[name, "mask"]].flatten(0, -2).unique(dim=0)
        place, own, public = known[seat].unbind(-1)
        expected = seen(env.places, place, own, public, seat)
        assert torch.equal(expected.unique(dim=0), seen_there)
        legal = td[name, "action_mask"][td[name, "mask"]].flatten(0, -2)
        assert legal.any(-1).all() and not legal.all()


def test_reference_values_match_exact_solutions_and_games():
    env = Leduc(2)
    legal = env.game.legal
    uniform = legal.double() / legal.sum(-1, keepdim=True)
    assert env.nash_conv(uniform) == pytest.approx(4.747222222, abs=1e-8)
    assert env.game.value(uniform) == pytest.approx(env.random_return, abs=1e-12)
    calls = torch.zeros(2, 468, 3).double()
    calls[..., C] = 1
    assert env.game.value(calls) == pytest.approx(0, abs=1e-12)  # both hands are equally good
    # A player that folds whenever it may loses 1 to one that always raises.
    folds = torch.where(legal[..., :1], torch.tensor([1.0, 0, 0]), torch.tensor([0, 1.0, 0]))
    assert env.game.best_responses(folds.double()).tolist() == pytest.approx([1.0, 1.0])
    env = Leduc(6000, seed=0)
    policy = TeamPolicy(RandomActor(group) for group in env.team.groups.values())
    td = env.rollout(8, policy, break_when_any_done=False)
    won = td["next", "first", "reward"].flatten()[td["next", "done"].flatten()]
    assert won.mean().item() == pytest.approx(env.random_return, abs=0.1)


def test_value_of_a_policy_equals_the_mean_return_of_games():
    """A random policy, evaluated by the sequence form and by playing."""
    env = Leduc(20000, seed=0)
    table = random_tables(1)[0]
    number = information_sets()[1]

    def act(td):
        for seat, name in enumerate(env.group_map):
            public = torch.where(env.places.public[env.place], env.cards[:, 2], 6)
            where = number[env.place, env.cards[:, seat], public].clamp_min(0)
            td[name, "action"] = table[seat, where].multinomial(1)
            td[name, "action"] *= td[name, "mask"]
        return td

    torch.manual_seed(0)
    td = env.rollout(8, act, break_when_any_done=False)
    won = td["next", "first", "reward"].flatten()[td["next", "done"].flatten()]
    error = 3 * won.std().item() / len(won) ** 0.5
    assert won.mean().item() == pytest.approx(env.game.value(table), abs=error)


def test_nash_conv_equals_stored_openspiel_values():
    """The stored values, for machines without OpenSpiel."""
    for table, expected in zip(random_tables(3), OPENSPIELS):
        assert Leduc(1).nash_conv(table) == pytest.approx(expected, abs=1e-9)


def test_strategies_of_a_policy_are_exact():
    env = Leduc(2, seed=0)
    torch.manual_seed(0)
    policy = TeamPolicy(make_actor(group) for group in env.team.groups.values())
    with torch.no_grad():  # some actions become so rare that they are never drawn
        for parameter in policy.parameters():
            parameter *= 300
    found = env.strategies(policy, copies=10)
    for seat, (actor, name) in enumerate(zip(policy, env.group_map)):
        place, own, public = information_sets()[0][seat].unbind(-1)
        group = {
            "observation": seen(env.places, place, own, public, seat).unsqueeze(1),
            "mask": torch.ones(468, 1, dtype=torch.bool),
            "action_mask": env.places.legal[place].unsqueeze(1),
        }
        data = TensorDict({name: TensorDict(group, [468, 1])}, [468])
        expected = actor.get_dist(data).probs[:, 0].detach().double()
        assert (expected.amax(-1) > 0.999).any() and (expected.amax(-1) < 0.6).any()
        torch.testing.assert_close(found[seat], expected, rtol=0, atol=1e-6)
    assert env.nash_conv(policy) == pytest.approx(env.nash_conv(found), abs=1e-4)


def test_actions_never_drawn_share_the_remaining_probability():
    chance = torch.tensor([0.998, 0.0015, 0.0005])

    def act(mask):
        legal = chance * mask
        action = legal.argmax(-1)
        return action, (legal / legal.sum(-1, keepdim=True)).gather(-1, action[..., None])[..., 0]

    policy = TensorDictModule(
        lambda mask: (lambda a, p: (a, p.log()))(*act(mask)),
        in_keys=[("a", "action_mask")],
        out_keys=[("a", "action"), ("a", "action_log_prob")],
    )
    mask = torch.tensor([[[True, True, True]], [[False, True, True]]])
    found = legal_probabilities(policy, TensorDict({"a": {"action_mask": mask}}, [2]), ["a"], 4)[
        "a"
    ]
    expected = torch.tensor([[0.998, 0.0015, 0.0005], [0.0, 0.75, 0.25]]).double()
    torch.testing.assert_close(found[:, 0], expected, rtol=0, atol=1e-6)


# ------------------------------------------------------------------------------- OpenSpiel

OPENSPIELS = [5.2204334558, 5.8393812279, 6.4255650196]
"""NashConv of ``random_tables(3)``, by OpenSpiel 2.0.2 (``test_nash_conv_is_openspiels``)."""


def random_tables(n):
    """Tables of probabilities, some of them 0."""
    legal = Leduc(1).game.legal
    tables = []
    for seed in range(n):
        generator = torch.Generator().manual_seed(seed)
        weight = torch.rand(2, 468, 3, generator=generator, dtype=torch.float64)
        weight = torch.where(legal, (weight - 0.2).clamp_min(0) + 1e-3 * weight, 0.0)
        tables.append(weight / weight.sum(-1, keepdim=True))
    return tables


def test_nash_conv_is_openspiels():
    pyspiel = pytest.importorskip("pyspiel")
    from open_spiel.python import policy
    from open_spiel.python.algorithms import expected_game_score, exploitability

    game, env = pyspiel.load_game("leduc_poker"), Leduc(2)
    for table in random_tables(3):
        mixed = policy.TabularPolicy(game)
        for state in mixed.states:
            player = state.current_player()
            told = torch.tensor(state.information_state_tensor(player))
            place, own, public = information_sets()[0][player].unbind(-1)
            known = seen(env.places, place, own, public, player)
            [here] = (known == told).all(-1).nonzero().flatten().tolist()
            chances = mixed.policy_for_key(state.information_state_string())
            chances[:] = table[player, here].tolist()
            assert (
                env.game.legal[player, here].nonzero().flatten().tolist() == state.legal_actions()
            )
        expected = exploitability.nash_conv(game, mixed)
        assert env.nash_conv(table) == pytest.approx(expected, abs=1e-9)
        value = expected_game_score.policy_value(game.new_initial_state(), [mixed] * 2)[0]
        assert env.game.value(table) == pytest.approx(value, abs=1e-9)


if __name__ == "__main__":
    pytest.main([__file__])
