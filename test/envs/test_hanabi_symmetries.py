"""Symmetries of Hanabi's colors and OvercookedV2's ingredients, by permuted games."""

import itertools

import numpy as np
import pytest
import torch
from torchrl.envs.utils import step_mdp

from torchrl_marl.envs import Labels, make_env
from torchrl_marl.errors import ConfigError

jax = pytest.importorskip("jax")
jaxmarl = pytest.importorskip("jaxmarl")

pytestmark = pytest.mark.environments

MINI = {
    "num_agents": 2,
    "num_colors": 3,
    "num_ranks": 3,
    "hand_size": 3,
    "max_info_tokens": 5,
    "max_life_tokens": 3,
    "num_cards_of_rank": [2, 2, 1],
}
THREE = {**MINI, "num_agents": 3, "hand_size": 2}


def deck_of(game, random):
    ranks = np.repeat(np.arange(game.num_ranks), game.num_cards_of_rank)
    pairs = [(color, rank) for color in range(game.num_colors) for rank in ranks]
    return random.permutation(np.array(pairs))


@pytest.mark.parametrize(
    ("kwargs", "n_orders", "n_features"), [(MINI, 6, 191), (THREE, 6, 201), ({}, 4, 658)]
)
def test_permuted_colors_permute_observations_and_actions(kwargs, n_orders, n_features):
    """A permuted deck permutes observations and legal actions; rewards and ends are equal."""
    env = make_env("jaxmarl/hanabi", num_envs=1, continuous_actions=False, **kwargs)
    [labels] = env.symmetries().values()
    game, random = env._jitted.wrapped.env, np.random.default_rng(0)
    assert (labels.n, labels.n_features) == (game.num_colors, n_features)
    orders = list(itertools.permutations(range(game.num_colors)))
    moves, key = set(), jax.random.PRNGKey(0)
    for order in map(np.array, random.permutation(orders)[:n_orders]):
        features, actions = (
            of(torch.tensor(order)).numpy() for of in (labels.features_of, labels.actions_of)
        )
        deck = deck_of(game, random)
        renamed = np.stack([np.argsort(order)[deck[:, 0]], deck[:, 1]], 1)
        seen, state = game.reset_from_deck_of_pairs(deck)
        seen_too, state_too = game.reset_from_deck_of_pairs(renamed)
        done, rewarded = False, 0
        while not done:
            legal, legal_too = (game.get_legal_moves(x) for x in (state, state_too))
            chosen = {}
            for agent in game.agents:
                # Beliefs are fractions, whose sums are rounded in another order.
                np.testing.assert_allclose(seen_too[agent], seen[agent][features], atol=1e-6)
                np.testing.assert_array_equal(legal_too[agent], legal[agent][actions])
                chosen[agent] = int(random.choice(np.flatnonzero(legal_too[agent])))
                moves.add(chosen[agent])
            own = {agent: int(actions[action]) for agent, action in chosen.items()}
            seen, state, reward, dones, _ = game.step_env(key, state, own)
            seen_too, state_too, reward_too, dones_too, _ = game.step_env(key, state_too, chosen)
            assert reward["__all__"] == reward_too["__all__"]
            assert dones["__all__"] == dones_too["__all__"]
            done, rewarded = bool(dones["__all__"]), rewarded + 1
        assert rewarded > 5
    assert len(moves) > 0.9 * game.num_moves  # all kinds of moves were played


@pytest.mark.parametrize("categorical", [True, False])
def test_other_play_equals_the_plain_game_with_permuted_colors(categorical):
    """The environment with symmetries against a plain one that gets the permuted actions."""
    settings = {"continuous_actions": False, "categorical_actions": categorical, **MINI}
    env, plain = (
        make_env("jaxmarl/hanabi", num_envs=8, max_steps=12, seed=0, other_play=on, **settings)
        for on in (True, False)
    )
    [labels] = plain.symmetries().values()
    td, expected = env.reset(), plain.reset()
    renamed = 0
    torch.manual_seed(0)
    for _ in range(30):  # several episodes
        order = td["agent", "symmetry"]
        actions, features = labels.actions_of(order), labels.features_of(order)
        own = expected["agent"]
        assert torch.equal(td["agent", "observation"], own["observation"].gather(-1, features))
        legal = td["agent", "action_mask"]
        assert torch.equal(legal, own["action_mask"].gather(-1, actions))
        index = legal.float().flatten(0, 1).multinomial(1).view(8, 2)
        named = actions.gather(-1, index.unsqueeze(-1)).squeeze(-1)
        renamed += (index != named).sum().item()
        one_hot = [torch.nn.functional.one_hot(x, legal.shape[-1]) for x in (index, named)]
        td["agent", "action"], own["action"] = (index, named) if categorical else one_hot
        (result, td), (result_too, expected) = (
            one.step_and_maybe_reset(x) for one, x in ((env, td), (plain, expected))
        )
        for key in (("agent", "reward"), "done"):
            assert torch.equal(result["next"][key], result_too["next"][key])
    assert renamed > 20


def test_random_actions_of_hanabi_are_legal():
    env = make_env(
        "jaxmarl/hanabi", num_envs=4, max_steps=9, other_play=True, continuous_actions=False, **MINI
    )
    td = env.rollout(25, break_when_any_done=False)
    chosen = td["agent", "action_mask"].gather(-1, td["agent", "action"].unsqueeze(-1))
    assert chosen.squeeze(-1)[td["agent", "mask"]].all()
    assert not torch.equal(step_mdp(td[:, -1])["agent", "symmetry"], td[:, 0]["agent", "symmetry"])


def kitchen(**kwargs):
    settings = {"num_envs": 1, "continuous_actions": False, "layout": "grounded_coord_simple"}
    return make_env("jaxmarl/overcooked_v2", **settings, **kwargs)


@pytest.mark.parametrize("view", [None, 2])
def test_ingredient_permutations_equal_jaxmarl(view):
    """JaxMARL's permutation of the ingredients 0 and 1, of three, is one of our orders."""
    env = kitchen(agent_view_size=view)
    [labels] = env.symmetries().values()
    assert labels.n == 2  # no recipe has the third
    plain = env._jitted.wrapped.env
    theirs = jaxmarl.make(
        "overcooked_v2",
        layout="grounded_coord_simple",
        agent_view_size=view,
        op_ingredient_permutations=[0, 1],
    )
    step = jax.jit(theirs.step_env)
    found, key = set(), jax.random.PRNGKey(0)
    for i in range(6):
        seen, state = theirs.reset(jax.random.PRNGKey(i))
        for t in range(20):
            own = plain.get_obs(state)
            for agent, mapping in enumerate(np.array(state.ingredient_permutations)):
                order = torch.tensor(mapping[:2].astype(np.int64))
                found.add(tuple(order.tolist()))
                features = labels.features_of(order).numpy()
                name = f"agent_{agent}"
                np.testing.assert_array_equal(seen[name], own[name][..., features])
            drawn = np.random.default_rng((i, t)).integers(6, size=2)
            seen, state, *_ = step(key, state, {f"agent_{j}": drawn[j] for j in range(2)})
    assert found == {(0, 1), (1, 0)}


def test_other_play_without_symmetries_is_refused():
    assert isinstance(kitchen().symmetries()["agent"], Labels)
    with pytest.raises(ConfigError, match="JaxMarlEnv has no symmetries for Other-Play"):
        make_env("jaxmarl/overcooked_v2", num_envs=1, layout="cramped_room", other_play=True)
    with pytest.raises(ConfigError, match="JaxMarlEnv has no symmetries for Other-Play"):
        make_env("jaxmarl/MPE_simple_spread_v3", num_envs=1, other_play=True)


if __name__ == "__main__":
    pytest.main([__file__])
