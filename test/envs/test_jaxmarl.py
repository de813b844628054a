"""JaxMARL's environments: equal to JAX's own steps, with correct done flags."""

import numpy as np
import pytest
import torch
from contract import E, draw_actions, play
from jax_environments import ROUNDS, SMAX, SPREAD, spread

from torchrl_marl.envs import JaxMarlEnv, make_env
from torchrl_marl.envs.check import check_marl_env

jax = pytest.importorskip("jax")
jaxmarl = pytest.importorskip("jaxmarl")

pytestmark = pytest.mark.environments


def smax(**kwargs):
    kwargs = {"num_envs": E, "seed": 0, "scenario": "3m", "max_steps": 16, **kwargs}
    return JaxMarlEnv(SMAX, state="world", info=True, **kwargs)


def kitchen():
    schedule = {"shaped_reward": 2.0, "shaped_reward_steps": E * 40}
    settings = {"num_envs": E, "seed": 0, "max_steps": 43, "info": True, "random_reset": True}
    return JaxMarlEnv("overcooked", **settings, **schedule)


# ------------------------------------------------------------------- equal to JAX's own steps


def assert_near(found, expected):
    # The compiler fuses the two in different ways.
    np.testing.assert_allclose(found, np.array(expected), atol=1e-4)


def test_steps_equal_jaxmarl_and_keep_the_last_observation():
    env = spread(max_steps=4, state="world")
    world = jaxmarl.make(SPREAD)
    key, drawing = jax.random.split(jax.random.PRNGKey(0))
    reset, step = jax.jit(jax.vmap(world.reset)), jax.jit(jax.vmap(world.step_env))
    _, state = reset(jax.random.split(drawing, E))
    for i, td in enumerate(play(env, env.reset(), draw_actions(env, 9))):
        key, stepping, drawing = jax.random.split(key, 3)
        actions = {a: td["agent", "action"][:, j].int().numpy() for j, a in enumerate(world.agents)}
        seen, state, rewards, _, _ = step(jax.random.split(stepping, E), state, actions)
        rows = np.stack([seen[a] for a in world.agents], 1)
        assert_near(td["next", "agent", "observation"], rows)
        rows = np.stack([rewards[a] for a in world.agents], 1)
        assert_near(td["next", "agent", "reward"].squeeze(-1), rows)
        assert_near(td["next", "state"][:, :12], state.p_pos.reshape(E, -1))
        assert bool(td["next", "truncated"].all()) == (i % 4 == 3)
        if i % 4 == 3:
            seen, state = reset(jax.random.split(drawing, E))
        rows = np.stack([seen[a] for a in world.agents], 1)
        assert_near(td["following", "agent", "observation"], rows)


def test_simple_spread_equals_mpe2():
    simple_spread = pytest.importorskip("mpe2.simple_spread_v3")
    env, other = spread(num_envs=1), simple_spread.parallel_env()
    other.reset(seed=0)
    raw = other.unwrapped
    begin = env.reset()
    places = np.array(env._carry["world"].p_pos[0])
    for entity, place in zip([*raw.world.agents, *raw.world.landmarks], places):
        entity.state.p_pos = place.astype(float)
    for n, td in enumerate(play(env, begin, draw_actions(env, 25)), 1):
        actions = td["agent", "action"][0].tolist()
        seen, rewards, ends, limits, _ = other.step(dict(zip(env.group_map["agent"], actions)))
        own = td["next", "agent"][0]
        for j, agent in enumerate(env.group_map["agent"]):
            np.testing.assert_allclose(own["observation"][j], seen[agent], atol=2e-4)
            np.testing.assert_allclose(own["reward"][j], rewards[agent], atol=2e-4)
            assert (ends[agent], limits[agent]) == (False, n == 25)
            assert limits[agent] == bool(own["truncated"][j])


def test_writing_to_returned_tensors_has_no_effect():
    env, twin = smax(), smax()
    carry, clean = env.reset(), twin.reset()
    for action in draw_actions(env, 12):
        before = carry.clone()
        step, carry = env.step_and_maybe_reset(carry.update(action))
        expected, clean = twin.step_and_maybe_reset(clean.update(action))
        assert torch.equal(
            step["next", "ally", "observation"], expected["next"]["ally"]["observation"]
        )
        assert torch.equal(carry["state"], clean["state"])
        keep = carry.clone()
        for td in (step, carry):
            td.apply_(lambda x: x.fill_(1))
        carry = keep
        assert not torch.equal(before["state"], keep["state"])


@pytest.fixture
def compilations():
    """A list that grows by the name of each function that JAX compiles."""
    names = []

    def listen(event, seconds, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(kwargs.get("fun_name", event))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


def test_calls_are_compiled_once(compilations):
    def use(env):
        td = env.reset()
        for action in draw_actions(env, 3):
            td = env.step_and_maybe_reset(td.update(action))[1]
        env.restore(env.snapshot())
        env.reset(td.set("_reset", torch.arange(6).unsqueeze(-1) < 3))
        env.rand_step(td.exclude("_reset"))

    env = smax(num_envs=6)  # a size that no other test uses
    compilations.clear()
    use(env)
    assert sorted(compilations) == ["jit(merge)", "jit(start)", "jit(step)"]
    again = smax(num_envs=6)
    assert again._jitted is env._jitted
    use(again)
    assert len(compilations) == 3


# -------------------------------------------------------------------------------------- ends


@pytest.mark.parametrize(
    ("world", "steps"),
    [(SPREAD, 25), ("overcooked", 400), ("switch_riddle", 6), ("coin_game", 100), (SMAX, 100)],
)
def test_time_limit_defaults_to_that_of_the_environment(world, steps):
    assert JaxMarlEnv(world, num_envs=2).max_steps == steps
    assert JaxMarlEnv(world, num_envs=2, max_steps=7).max_steps == 7


@pytest.mark.parametrize("days", [None, 4])
def test_riddle_without_announcement_terminates_on_the_last_day(days):
    env = JaxMarlEnv("switch_riddle", num_envs=3, max_steps=days, seed=0)
    td = env.reset()
    for day in range(env.max_steps):
        assert not td["done"].any(), day
        td = env.step(td.set(("agent", "action"), torch.zeros(3, 3, dtype=torch.int64)))["next"]
    assert td["terminated"].all() and not td["truncated"].any()
    assert td["agent", "terminated"].all() and (td["agent", "reward"] == 0).all()


def test_episode_length_equals_the_time_limit():
    env = spread(num_envs=1)  # 25; JaxMARL's own makes 26
    ends = [
        td["next", "truncated"].all().item() for td in play(env, env.reset(), draw_actions(env, 51))
    ]
    assert [i for i, end in enumerate(ends, 1) if end] == [25, 50]


def test_overcooked_urgency_feature_follows_the_time_limit():
    env = kitchen()
    urgent = []
    for td in play(env, env.reset(), draw_actions(env, 43)):
        urgent.append(td["next", "agent", "observation"][..., 25].amin().item())
    assert urgent == [0.0] * 3 + [1.0] * 40
    assert td["next", "truncated"].all() and not td["next", "terminated"].any()


def test_dead_units_are_terminated_and_the_episode_continues():
    env = smax()
    deaths = wins = losses = limits = 0
    for td in play(env, env.reset(), draw_actions(env, 60)):
        after = td["next", "ally"]
        alive = after["observation"][..., -10:].abs().sum(-1) > 0  # own health, place, type
        assert torch.equal(after["terminated"].squeeze(-1) | alive, torch.ones(E, 3).bool())
        ended, died = td["next", "done"].squeeze(-1), ~alive
        running = ~ended
        assert torch.equal(after["mask"][running], alive[running])
        assert not (after["terminated"].squeeze(-1) & alive)[running].any()
        legal = after["action_mask"][died]
        assert torch.equal(legal.nonzero()[:, 1], torch.full((len(legal),), 4))
        reward, won = after["reward"].squeeze(-1), after["info", "won"].squeeze(-1)
        # One reward for all agents alive when the step began; dead agents get 0.
        lived = ~td["ally", "done"].squeeze(-1)
        teams = torch.where(lived, reward, 0.0).sum(-1, keepdim=True) / lived.sum(-1, keepdim=True)
        torch.testing.assert_close(reward, torch.where(lived, teams, 0.0))
        assert torch.equal((won > 0) & lived, (reward >= 1) & ended.unsqueeze(-1))
        deaths += int((died & running.unsqueeze(-1)).sum())
        wins += int(won[:, 0].sum())
        limits += int(td["next", "truncated"].sum())
        losses += int((td["next", "terminated"].squeeze(-1) & (won[:, 0] == 0)).sum())
    assert deaths and losses and limits
    assert wins == 0 or wins < losses


def test_passive_enemy_is_defeated():
    env = smax(enemy_shoots=False, max_steps=30)
    won = torch.zeros(E)
    td = env.reset()
    for _ in range(30):
        shoot = td["ally", "action_mask"].int() * torch.arange(1, 9)
        step, td = env.step_and_maybe_reset(td.set(("ally", "action"), shoot.argmax(-1)))
        won += step["next", "ally", "info", "won"][:, 0, 0]
        terminated = step["next", "terminated"].squeeze(-1)
        assert torch.equal(step["next", "ally", "info", "won"][:, 0, 0] > 0, terminated)
    assert won.sum() > 0


def test_actions_of_dead_units_have_no_effect():
    env = smax()
    actions = draw_actions(env, 20)
    first = list(play(env, env.reset(), actions))
    env.set_seed(0)
    td = env.reset()
    for action, expected in zip(actions, first):
        dead = ~td["ally", "mask"]
        action["ally", "action"] = torch.where(dead, 6, action["ally", "action"])
        step, td = env.step_and_maybe_reset(td.update(action))
        for key in ("state", "done", ("ally", "reward")):
            assert torch.equal(step["next", key], expected["next", key])
    assert any((~x["ally", "mask"]).any() for x in first)


def test_hanabi_players_act_in_turn():
    env = JaxMarlEnv("hanabi", num_envs=E, seed=0, num_colors=3, shuffle_player_order=True)
    td = env.reset()
    first = td["agent", "mask"]
    assert first[:, 0].any() and first[:, 1].any()  # the first player is drawn
    for _ in range(12):
        mask, legal = td["agent", "mask"], td["agent", "action_mask"]
        assert torch.equal(mask.sum(-1), torch.ones(E, dtype=torch.int64))
        assert not legal[mask][:, -1].any() and legal[mask].any(-1).all()
        assert legal[~mask][:, -1].all() and not legal[~mask][:, :-1].any()
        step, td = env.step_and_maybe_reset(env.rand_action(td))
        running = ~step["next", "done"].squeeze(-1)
        assert torch.equal(step["next", "agent", "mask"][running], ~mask[running])
        assert torch.equal(
            step["next", "agent", "reward"][:, 0], step["next", "agent", "reward"][:, 1]
        )


# ------------------------------------------------------------------------- reward, info, state


def test_shaped_reward_of_overcooked_is_annealed():
    env = kitchen()
    seen = 0.0
    for n, td in enumerate(play(env, env.reset(), draw_actions(env, 50))):
        info = td["next", "agent", "info"]
        share = 2.0 * max(0.0, 1 - n / 40)
        expected = info["unshaped_reward"] + share * info["shaped_reward"]
        torch.testing.assert_close(td["next", "agent", "reward"], expected)
        seen += info["shaped_reward"].abs().sum() * (n < 40)
    assert seen > 0


def test_central_states():
    env = spread(num_envs=2, state="observations")
    td = env.reset()
    assert torch.equal(td["state"], td["agent", "observation"].flatten(1))
    env = spread(num_envs=2, state=lambda world: world.p_pos[:3])
    td = env.reset()
    assert torch.equal(td["state"], td["agent", "observation"][..., 2:4].flatten(1))
    td = JaxMarlEnv("overcooked", num_envs=2, state="world").reset()
    assert torch.equal(td["state"], td["agent", "observation"][:, 0].flatten(1))


# ------------------------------------------------------------------------- groups and actions


def test_groups_are_id_prefixes_or_a_given_map():
    env = JaxMarlEnv("MPE_simple_tag_v3", num_envs=2)
    assert env.group_map == {
        "adversary": ["adversary_0", "adversary_1", "adversary_2"],
        "agent": ["agent_0"],
    }
    swapped = {"b": ["agent_2", "agent_0"], "a": ["agent_1"]}
    env = spread(num_envs=2, group_map=swapped, seed=3)
    assert env.group_map == swapped
    plain, td = spread(num_envs=2, seed=3).reset()["agent", "observation"], env.reset()
    assert torch.equal(td["b", "observation"], plain[:, [2, 0]])
    assert torch.equal(td["a", "observation"], plain[:, [1]])


def test_different_agents_in_one_group_act_as_in_two_groups():
    """Different agents in one group, in another order, act as they did in two groups."""
    apart = JaxMarlEnv(
        "MPE_simple_speaker_listener_v4", num_envs=4, seed=0, continuous_actions=False
    )
    ids = {"team": ["listener_0", "speaker_0"]}
    both = JaxMarlEnv(
        "MPE_simple_speaker_listener_v4",
        num_envs=4,
        seed=0,
        continuous_actions=False,
        group_map=ids,
    )
    td, other = apart.reset(), both.reset()
    for action in draw_actions(apart, 3):
        rows = torch.stack([action[name, "action"][:, 0] for name in ("listener", "speaker")], 1)
        td = apart.step_and_maybe_reset(td.update(action))[1]
        other["team", "action"] = rows
        other = both.step_and_maybe_reset(other)[1]
        members = other["team"].unbind(1)
        for name, member in zip(("listener", "speaker"), members):
            assert torch.equal(member["observation"], td[name, "observation"][:, 0])


def test_environments_with_continuous_actions():
    assert spread(num_envs=2, continuous_actions=None).rand_action()["agent", "action"].dim() == 2
    assert (
        spread(num_envs=2, continuous_actions=True).full_action_spec["agent", "action"].shape[-1]
        == 5
    )
    env = make_env("jaxmarl/HeuristicEnemySMAX", scenario="3m", num_envs=2, seed=0)
    assert env.full_action_spec["ally", "action"].space.n == 8
    env = JaxMarlEnv(SMAX, num_envs=2, scenario="3m", action_type="continuous")
    assert "action_mask" not in env.full_observation_spec["ally"].keys()


def test_given_environment_object_is_not_modified():
    world = jaxmarl.make(SPREAD, num_agents=2, num_landmarks=2)
    env = JaxMarlEnv(world, num_envs=2, seed=0, max_steps=3)
    assert env.rollout(4, break_when_any_done=False)["next", "truncated"][:, 2].all()
    assert world.max_steps == 25


# ---------------------------------------------------------------- environments of other forms


FORMS = {
    "storm": lambda seen, i: {
        "observation": seen["observations"][i],
        "inventory": seen["inventory"][:, i],
    },
    "storm_2p": lambda seen, i: seen[i],
    "storm_np": lambda seen, i: seen[i],
}


def test_storm_passes_check_marl_env():
    env = JaxMarlEnv("storm", seed=0, **ROUNDS)
    assert "keeps the rules" in check_marl_env(env, n_steps=13)  # two episodes


@pytest.mark.parametrize(
    "name",
    ["storm", "storm_2p", "storm_np"],
)
def test_storm_variants_equal_jaxmarl(name):
    """Observations, rewards and done flags against direct calls of JaxMARL."""
    env = JaxMarlEnv(name, seed=0, **ROUNDS)
    rounds = {key: ROUNDS[key] for key in ("num_inner_steps", "num_outer_steps")}
    assert env.max_steps == 6 and env.group_map == {"agents": ["0", "1"]}
    td = env.reset()
    own = jaxmarl.make(name, **rounds)
    # Copies, since a step donates the buffers of its input.
    own_of = jax.tree.map(lambda x: jax.numpy.array(np.array(x)), env._carry)
    world, key = jax.tree.map(lambda x: x[0], own_of["world"]), own_of["key"]
    step_own, n_actions = jax.jit(own.step_env), own.action_space(0).n
    form = FORMS[name]
    for step in range(6):
        actions = [(step * 5 + 1) % n_actions, (step * 3 + 2) % n_actions]
        td["agents", "action"] = torch.tensor([actions] * env.num_envs)
        td, carry = env.step_and_maybe_reset(td)
        key, stepping, _ = jax.random.split(key, 3)
        given = tuple(actions) if name == "storm_2p" else dict(enumerate(actions))
        given = jax.tree.map(jax.numpy.int32, given)
        seen, world, rewards, dones, _ = step_own(
            jax.random.split(stepping, env.num_envs)[0], world, given
        )
        for i in range(2):
            leaves = form(seen, i)
            leaves = leaves if isinstance(leaves, dict) else {(): leaves}
            for leaf, expected in leaves.items():
                found = td["next", "agents", "observation"]
                found = found[leaf] if leaf else found
                assert np.array_equal(found[0, i].numpy(), np.asarray(expected, np.float32))
            assert td["next", "agents", "reward"][0, i, 0] == float(rewards[i])
        assert bool(dones["__all__"]) == bool(td["next", "truncated"][0]) == (step == 5)
        td = carry
    assert not td["done"].any() and not td["terminated"].any()


def test_coin_game_length_equals_jaxmarl():
    rounds = {"num_inner_steps": 3, "num_outer_steps": 2}
    own = jaxmarl.make("coin_game", **rounds)
    step_own = jax.jit(own.step_env)
    _, world = own.reset(jax.random.PRNGKey(0))
    for step in range(1, 7):
        actions = dict.fromkeys(own.agents, jax.numpy.int32(0))
        _, world, _, dones, _ = step_own(jax.random.PRNGKey(step), world, actions)
        assert bool(dones["__all__"]) == (step == 6)
    assert JaxMarlEnv("coin_game", num_envs=2, **rounds).max_steps == 6
