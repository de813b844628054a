"""PettingZooEnv on parallel worlds: toys that do one thing each, and real worlds."""

import random
import subprocess
import sys
import warnings

import gymnasium.spaces as spaces
import numpy as np
import pytest
import torch
from scripted import BOX, Drawn, Faulty, Gambler, Script
from tensordict import TensorDict
from torchrl.envs import check_env_specs
from torchrl.envs.utils import MarlGroupMapType

from torchrl_marl.envs import PettingZooEnv, make_env
from torchrl_marl.envs.check import check_marl_env
from torchrl_marl.errors import (
    ConfigError,
    MissingExtraError,
    NonFiniteError,
    SpecError,
    WorkerError,
)
from torchrl_marl.specs import TeamSpec


def rows(td, group, leaf):
    """A leaf of the only copy, step by step."""
    return td[group, leaf].squeeze(-1)[0].tolist()


def roll(world, n_steps, **kwargs):
    """A rollout with all actions 1, of one copy."""
    env = PettingZooEnv(world, seed=0, **kwargs)

    def policy(td):
        for group in env.group_map:
            td[group, "action"] = torch.ones_like(env.full_action_spec[group, "action"].rand())
        return td

    return env.rollout(n_steps, policy, break_when_any_done=False)


# ------------------------------------------------------------------------------ life and death


def test_a_death_ends_no_episode_and_the_dead_do_not_act():
    world = Script(
        "bob_0 bob_1",
        [
            {"earns": {"bob_0": 1.0, "bob_1": 2.0}},
            {"agents": "bob_0", "dies": "bob_1", "earns": {"bob_1": -3.0}},
            {},
            {"agents": "", "dies": "bob_0"},
        ],
    )
    td = roll(world, 5)
    assert world.got == [{"bob_0": 1, "bob_1": 1}] * 2 + [{"bob_0": 1}] * 2 + [
        {"bob_0": 1, "bob_1": 1}
    ]
    assert rows(td, "bob", "mask") == [[True, True]] * 2 + [[True, False]] * 2 + [[True, True]]
    next_ = td["next"]
    assert rows(next_, "bob", "reward")[:3] == [[1, 2], [0, -3], [0, 0]]
    assert rows(next_, "bob", "terminated")[:4] == [[False, False]] + [[False, True]] * 2 + [
        [True, True]
    ]
    assert next_["terminated"][0, :, 0].tolist() == [False, False, False, True, False]
    assert not next_["truncated"].any()
    # The last observation of an agent that dies is real, later ones are zeros.
    assert next_["bob", "observation"][0, :4, 1].tolist() == [[1, 1], [1, 2], [0, 0], [0, 0]]
    assert td["bob", "observation"][0, 4].tolist() == [[0, 0], [1, 0]]
    assert next_["bob", "observation"][0, 3, 0].tolist() == [0, 4]


def test_agents_that_spawn_late_wait_before():
    world = Script("bob_0 bob_1", [{}, {"agents": "bob_0 bob_1"}, {}], first="bob_0")
    td = roll(world, 3, max_steps=3)
    assert world.got == [{"bob_0": 1}, {"bob_0": 1}, {"bob_0": 1, "bob_1": 1}]
    assert rows(td, "bob", "mask") == [[True, False]] * 2 + [[True, True]]
    assert not td["bob", "done"].any()
    assert td["next", "bob", "truncated"][0, -1].all() and td["next", "truncated"][0, -1].all()
    assert td["next", "bob", "mask"][0, -1].all()


def test_nothing_is_earned_before_birth_and_after_the_end():
    world = Script(
        "bob_0 bob_1 bob_2",
        [
            {"earns": {"bob_0": 1, "bob_1": 2, "bob_2": 3}},
            {
                "agents": "bob_0 bob_2",
                "dies": "bob_1",
                "earns": {"bob_0": 4, "bob_1": 5, "bob_2": 6},
            },
            {"earns": {"bob_0": 7, "bob_1": 8, "bob_2": np.array([9.0])}},
        ],
        first="bob_0 bob_1",
    )
    td = roll(world, 6, max_steps=3)
    assert rows(td["next"], "bob", "reward") == [[1, 2, 0], [4, 5, 0], [7, 0, 9]] * 2


def test_who_never_came_is_not_bootstrapped_at_a_time_limit():
    td = roll(Script("bob_0 bob_1", [{}], first="bob_0"), 2, max_steps=2)["next"]
    assert rows(td, "bob", "mask") == [[True, False], [True, False]]
    assert rows(td, "bob", "truncated") == [[False, False], [True, True]]


def test_agents_act_at_their_own_pace():
    world = Script(
        "bob_0 bob_1",
        [
            {"sees": "bob_0", "earns": {"bob_0": 1.0, "bob_1": 5.0}},
            {"sees": "bob_1", "earns": {"bob_1": 7.0}},
            {"sees": "bob_0"},
        ],
    )
    td = roll(world, 3, max_steps=3)
    assert world.got == [{"bob_0": 1, "bob_1": 1}, {"bob_0": 1}, {"bob_1": 1}]
    assert rows(td, "bob", "mask") == [[True, True], [True, False], [False, True]]
    next_ = td["next"]
    assert rows(next_, "bob", "reward") == [[1, 5], [0, 7], [0, 0]]
    # Who waits keeps the last observation; at the time limit it is bootstrapped from.
    times = next_["bob", "observation"][0, ..., 1].tolist()
    assert times == [[1, 0], [1, 2], [3, 2]]
    assert rows(next_, "bob", "mask")[-1] == [True, True]


@pytest.mark.parametrize(
    "words, expected",
    [
        ({"dies": "bob_0 bob_1"}, ([True, True], [False, False], "terminated")),
        ({"cut": "bob_0 bob_1"}, ([False, False], [True, True], "truncated")),
        ({"dies": "bob_0", "cut": "bob_1"}, ([True, False], [False, True], "truncated")),
        ({"dies": "bob_0 bob_1", "cut": "bob_0 bob_1"}, ([True] * 2, [False] * 2, "terminated")),
    ],
)
def test_an_agent_ends_in_one_way(words, expected):
    td = roll(Script("bob_0 bob_1", [{"agents": "", **words}]), 1)["next"]
    found = (
        td["bob", "terminated"][0, 0, :, 0].tolist(),
        td["bob", "truncated"][0, 0, :, 0].tolist(),
    )
    assert found == expected[:2]
    assert td[expected[2]].all() and td["done"].sum() == 1
    assert td["terminated"].sum() + td["truncated"].sum() == 1
    assert td["bob", "mask"][0, 0].tolist() == expected[1]


def test_both_flags_at_the_worlds_own_time_limit_are_a_truncation():
    world = Script("bob_0", [{}, {"agents": "", "dies": "bob_0", "cut": "bob_0"}])
    world.max_cycles = 2
    td = roll(world, 2)["next"]
    assert rows(td, "bob", "truncated") == [[False], [True]] and td["truncated"][0, 1].all()


def test_who_was_cut_off_earlier_is_masked_while_others_go_on():
    world = Script(
        "bob_0 bob_1", [{"agents": "bob_0", "cut": "bob_1"}, {"agents": "", "dies": "bob_0"}]
    )
    td = roll(world, 2)["next"]
    assert rows(td, "bob", "mask") == [[True, False], [False, False]]
    assert rows(td, "bob", "truncated") == [[False, True], [False, True]]
    assert td["truncated"][0, :, 0].tolist() == [False, True]


def test_a_world_that_keeps_its_agents_after_the_end_ends():
    world = Script("bob_0", [{}, {"dies": "bob_0"}])
    td = roll(world, 5)["next"]
    assert td["terminated"][0, :, 0].tolist() == [False, True, False, True, False]
    assert world.episodes == 4  # one to look at it


def test_nobody_comes_back():
    steps = [{"agents": "bob_0", "dies": "bob_1"}, {}, {"agents": "bob_0 bob_1"}]
    with pytest.raises(SpecError, match="agent 'bob_1' ended and is there again.*new id"):
        roll(Script("bob_0 bob_1", steps), 3)
    # A world may keep one for a while.
    steps = [{"dies": "bob_1"}, {}, {"agents": "bob_0"}]
    assert not roll(Script("bob_0 bob_1", steps), 3, max_steps=3)["next", "bob", "mask"][
        ..., 1
    ].any()


# ------------------------------------------------------------------- agents that are others


class Says(Script):
    """Says of one agent's end what it was told to say."""

    def __init__(self, agents, flag, which="terminated"):
        super().__init__(agents, [{}])
        self.flag, self.which = flag, which

    def step(self, actions):
        seen, earned, terminated, truncated, infos = super().step(actions)
        {"terminated": terminated, "truncated": truncated}[self.which]["bob_1"] = self.flag
        return seen, earned, terminated, truncated, infos


def changing(step, first=None):
    return Script("bob_0 bob_1", [{}, step], first=first)


CHANGES = {
    "a stranger comes": (
        changing({"agents": "bob_0 bob_1 eve", "sees": "bob_0 bob_1"}),
        "agent 'eve' is among its agents, but it is none of the world's agents",
    ),
    "one has another name": (
        changing({"agents": "bob_0 rob_1", "sees": "bob_0", "dies": "bob_1"}),
        "agent 'rob_1' is among its agents",
    ),
    "all have other names": (
        changing({"agents": "x y", "sees": "bob_0 bob_1"}),
        "agent 'x' is among its agents",
    ),
    "a stranger earns": (changing({"earns": {"eve": 1.0}}), "agent 'eve' is among its rewards"),
    "a stranger sees": (
        changing({"shows": {"eve": 1.0}}),
        "agent 'eve' is among its observations",
    ),
    "gone without a flag": (
        changing({"agents": "bob_0"}),
        "agent 'bob_1' is gone from the world's agents, but was neither terminated nor truncated",
    ),
    "all gone without a flag": (changing({"agents": ""}), "agent 'bob_0' is gone from"),
    "a stranger at the begin": (
        Script("bob_0 bob_1", [{}], first="bob_0 bob_1 eve"),
        "agent 'eve' is among its agents",
    ),
    "a flag that is a text": (
        Says("bob_0 bob_1", "False"),
        "agent 'bob_1' is said to be terminated: 'False' .str., expected True or False",
    ),
    "a number that is no flag": (
        Says("bob_0 bob_1", 0.5, "truncated"),
        "agent 'bob_1' is said to be truncated: 0.5 .float.",
    ),
}
CHANGES["a stranger at the begin"][0]._see = lambda agents: dict.fromkeys(
    set(agents) - {"eve"}, np.zeros(2)
)


@pytest.mark.parametrize("name", CHANGES)
def test_a_world_that_changes_its_agents_is_refused(name):
    world, words = CHANGES[name]
    with pytest.raises(SpecError, match=f"^Copy 0 of {type(world).__name__}: {words}"):
        roll(world, 3, max_steps=9)
    with pytest.raises(SpecError, match=words):
        check_marl_env(PettingZooEnv(world, seed=0, max_steps=9), n_steps=5)


@pytest.mark.parametrize("flag", [np.bool_(False), 0, np.zeros(1), np.float32(0), None])
def test_flags_of_any_kind_that_say_no(flag):
    td = roll(Says("bob_0 bob_1", flag), 3, max_steps=9)["next"]
    assert td["bob", "mask"].all() and not td["bob", "done"].any()


@pytest.mark.parametrize("flag", [np.bool_(True), 1, np.ones(1), np.float32(1)])
def test_flags_of_any_kind_that_say_yes(flag):
    td = roll(Says("bob_0 bob_1", flag), 2, max_steps=9)["next"]
    assert rows(td, "bob", "terminated") == [[False, True]] * 2


def test_a_flag_of_all_is_no_stranger():
    world = changing({"agents": "", "dies": "bob_0 bob_1"})
    step = world.step

    def with_all(actions):
        seen, earned, terminated, truncated, infos = step(actions)
        return seen, earned, {**terminated, "__all__": all(terminated.values())}, truncated, infos

    world.step = with_all
    assert rows(roll(world, 2)["next"], "bob", "terminated") == [[False] * 2, [True] * 2]


# ------------------------------------------------------------------------------ groups, specs


def test_groups_are_prefixes_of_the_ids():
    td = roll(Script("bob_0 bob_1 alice", [{}]), 1, max_steps=1)
    assert td["bob", "mask"].shape == (1, 1, 2) and td["alice", "mask"].shape == (1, 1, 1)


@pytest.mark.parametrize(
    "group_map, words",
    [
        ({"all": ["bob_0", "bob_1"]}, "'alice' has no group"),
        ({"all": ["bob_0", "bob_1", "alicia"]}, "'alicia'.*did you mean 'alice'"),
        ({"x": ["bob_0", "bob_1"], "y": ["alice", "bob_0"]}, "'bob_0' is in 'x' and 'y'"),
    ],
)
def test_a_wrong_group_map_is_refused(group_map, words):
    with pytest.raises(ConfigError, match=words):
        PettingZooEnv(Script("bob_0 bob_1 alice", [{}]), group_map=group_map)


def test_a_group_of_agents_that_differ():
    world = Script(
        "bob_0 bob_1 eve bob_2",
        [{"earns": {"eve": 2.0}}],
        observation={"eve": spaces.Box(-9, 9, (3,))},
        action={"eve": spaces.Discrete(4, start=5), "bob_2": spaces.Box(-1, 1, (2, 2))},
    )
    with pytest.raises(ConfigError, match="bob_2.*group of its own"):
        PettingZooEnv(world, group_map=MarlGroupMapType.ALL_IN_ONE_GROUP)
    del world.done_by["bob_2"]
    env = PettingZooEnv(world, max_steps=4, group_map=MarlGroupMapType.ALL_IN_ONE_GROUP)
    check_env_specs(env)
    group = TeamSpec.from_env(env).groups["agents"]
    assert group.agent_names == ("bob_0", "bob_1", "eve", "bob_2")
    assert group.action_dims == (2, 2, 4, 2) and group.observation_dims == (2, 2, 3, 2)
    td = env.rollout(3)
    assert {got["eve"] for got in world.got} <= {5, 6, 7, 8}
    assert td["next", "agents", "reward"][0, 0, :, 0].tolist() == [0, 0, 2, 0]


def test_actions_of_any_form_reach_the_world():
    forms = {
        "a": spaces.Box(-1, 1, (2, 2), np.float64),
        "b": spaces.MultiDiscrete([3, 4]),
        "c": spaces.MultiBinary(3),
        "d": spaces.MultiBinary((2, 3)),
    }
    world = Script("a b c d", [{}], action=forms)
    env = PettingZooEnv(world, max_steps=5, seed=1)
    check_env_specs(env)
    env.rollout(5)
    assert all(form.contains(got[agent]) for got in world.got for agent, form in forms.items())


def test_dicts_and_images_are_observed():
    kinds = {
        "a": spaces.Dict({"x": spaces.Box(0, 255, (4, 4, 3), np.uint8), "y": spaces.Discrete(3)}),
        "b": spaces.Box(0, 1, (), np.float32),
    }

    class Seen(Script):
        def _see(self, agents):
            image = np.full((4, 4, 3), self.t, np.uint8)
            return {"a": {"x": image, "y": 2}, "b": np.float32(0.5)}

    env = PettingZooEnv(Seen("a b", [{}], observation=kinds), max_steps=3, state="observations")
    check_env_specs(env)
    td = env.rollout(2)
    assert td["next", "a", "observation", "x"].shape == (1, 2, 1, 4, 4, 3)
    assert td["next", "a", "observation", "x"][0, :, 0, 0, 0, 0].tolist() == [1, 2]
    assert td["a", "observation", "y"].flatten().tolist() == [2, 2]
    assert td["next", "state"].shape == (1, 2, 4 * 4 * 3 + 1 + 1)


def test_choices_are_observed_from_zero_on():
    kinds = {
        "a": spaces.Discrete(3, start=5),
        "b": spaces.MultiDiscrete([3, 4], start=[1, -1]),
        "c": spaces.MultiBinary((2, 3)),
    }
    world = Script("a b c", [{}], observation=kinds)
    world._see = lambda agents: {"a": 7, "b": np.array([3, -1]), "c": np.eye(2, 3, dtype=np.int8)}
    td = roll(world, 1, max_steps=1)
    seen = [td["next", agent, "observation"].flatten().tolist() for agent in "abc"]
    assert seen == [[2], [2, 0], [1, 0, 0, 0, 1, 0]]


def test_the_state_is_the_worlds_or_all_observations():
    class Stateful(Script):
        def state(self):
            return np.array([[self.t, 7]])

    steps = [{}, {"agents": "bob_0", "dies": "bob_1"}, {}]
    td = roll(Stateful("bob_0 bob_1", steps), 3, max_steps=3, state="world")
    assert td["next", "state"][0].tolist() == [[1, 7], [2, 7], [3, 7]]
    td = roll(Script("bob_0 bob_1", steps), 3, max_steps=3, state="observations")
    assert td["next", "state"][0].tolist() == [[0, 1, 1, 1], [0, 2, 1, 2], [0, 3, 0, 0]]
    with pytest.raises(ConfigError, match="no state"):
        PettingZooEnv(Script("bob_0", [{}]), state="world")


# --------------------------------------------------------------------------------- infos, masks


def test_infos_that_come_and_go():
    infos = [{"ping": 1}, {"pong": np.float64(2.5), "name": "x"}, {"ping": True, "pong": "lost"}]
    world = Script("bob_0", [{}], infos=infos)
    td = roll(world, 3, max_steps=3, info=True)
    assert set(td["bob", "info"].keys()) == {"ping", "pong"}
    assert td["bob", "info", "ping"].flatten().tolist() == [1, 0, 1]
    assert td["next", "bob", "info", "ping"].flatten().tolist() == [0, 1, 1]
    assert td["next", "bob", "info", "pong"].flatten().tolist() == [2.5, 0, 0]
    td = roll(world, 1, max_steps=3, info=["pong"])
    assert list(td["bob", "info"].keys()) == ["pong"]
    td = roll(world, 1, max_steps=3)
    assert "info" not in td["bob"].keys()


def test_an_info_that_nobody_was_told_is_warned_of():
    world = Script("bob_0", [{}], infos=[{"ping": 1}])
    with pytest.warns(UserWarning, match="the info 'pang' .* there were 'ping'"):
        td = roll(world, 1, max_steps=3, info=["pang", "ping"])
    assert td["next", "bob", "info", "pang"].eq(0).all()
    assert td["next", "bob", "info", "ping"].eq(1).all()


def test_who_comes_late_has_an_action_mask_too():
    masks = [{"action_mask": np.array([0, 1], np.int8)}]
    world = Script("bob_0 bob_1", [{"agents": "bob_0 bob_1"}], first="bob_0", infos=masks)
    td = PettingZooEnv(world, seed=0, max_steps=9).rollout(9)
    legal = td["bob", "action_mask"][0].long().tolist()
    assert legal == [[[0, 1], [1, 1]]] + [[[0, 1], [0, 1]]] * 8
    assert all(set(got.values()) == {1} for got in world.got)


@pytest.mark.parametrize("where", ["observation", "info"])
def test_action_masks(where):
    class Masked(Script):
        def _see(self, agents):
            mask = np.array([0, 1, self.t % 2], np.int8)
            own = super()._see(agents)
            if where == "info":
                return own
            return {a: {"observation": x, "action_mask": mask} for a, x in own.items()}

    seen = {"observation": BOX, "action_mask": spaces.Box(0, 1, (3,), np.int8)}
    masks = [{"action_mask": np.array([0, 1, t % 2], np.int8)} for t in range(5)]
    world = Masked(
        "bob_0 bob_1",
        [{}, {"sees": "bob_0"}, {}],
        action={"bob_0": spaces.Discrete(3), "bob_1": spaces.Discrete(3)},
        observation={} if where == "info" else dict.fromkeys(["bob_0", "bob_1"], spaces.Dict(seen)),
        infos=masks if where == "info" else None,
    )
    if where == "observation":
        world._see = lambda agents: {
            a: {"observation": np.zeros(2), "action_mask": np.array([0, 1, world.t % 2], np.int8)}
            for a in agents
        }
    env = PettingZooEnv(world, max_steps=3)
    check_env_specs(env)
    td = env.rollout(3, break_when_any_done=False)
    legal = td["bob", "action_mask"][0].long().tolist()
    assert legal[0] == [[0, 1, 0]] * 2 and legal[1] == [[0, 1, 1]] * 2
    assert legal[2] == [[0, 1, 0], [1, 1, 1]]  # the second one waits
    assert all(got["bob_0"] in (1, 2) for got in world.got)


# ------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_names_the_copy_and_the_agent(value):
    world = Script("bob_0 bob_1", [{}, {"shows": {"bob_1": value}}])
    with pytest.raises(NonFiniteError, match="observation of agent 'bob_1' in copy 0"):
        roll(world, 3)
    world = Script("bob_0 bob_1", [{}, {"earns": {"bob_0": value}}])
    with pytest.raises(NonFiniteError, match="reward of agent 'bob_0' in copy 0"):
        roll(world, 3)


def test_a_state_that_is_not_finite_names_the_copy():
    class Stateful(Script):
        def state(self):
            return np.array([0.0, np.inf if self.t == 2 else 1.0])

    with pytest.raises(NonFiniteError, match="the state of copy 0"):
        roll(Stateful("bob_0", [{}]), 3, max_steps=5, state="world")


def test_what_the_dead_see_does_not_matter():
    world = Script(
        "bob_0 bob_1", [{"agents": "bob_0", "dies": "bob_1", "shows": {"bob_1": np.nan}}]
    )
    assert roll(world, 3, max_steps=3)["next", "bob", "mask"][0, -1].tolist() == [True, False]


def test_spaces_that_change_are_refused():
    class Growing(Script):
        def observation_space(self, agent):
            return spaces.Box(-100, 100, (2 + (self.episodes > 2),))

    with pytest.raises(SpecError, match="spaces of agent 'bob_0'.*new episode.*pad"):
        roll(Growing("bob_0", [{"agents": "", "dies": "bob_0"}]), 3)


def test_an_observation_of_another_shape_is_refused():
    class Wrong(Script):
        def _see(self, agents):
            return {a: np.zeros(3) for a in agents}

    with pytest.raises(SpecError, match=r"observation of agent 'bob_0' has shape \[3\].*\[2\]"):
        roll(Wrong("bob_0", [{}]), 1)


@pytest.mark.parametrize(
    "space, value, words",
    [
        (spaces.Box(0, 9, (2,), np.int32), np.array([1.0, 0.5]), "has a 0.5 of float64.*int32"),
        (spaces.Box(0, 255, (2,), np.uint8), np.array([44, 300]), "has a 300 of int64.*uint8"),
        (spaces.Box(0, 255, (2,), np.uint8), [-1, 0], "has a -1 of int64.*uint8"),
        (spaces.MultiDiscrete([2, 2]), np.array([np.nan, 0]), "has a nan of float64"),
        (spaces.Dict({"x": BOX, "y": BOX}), {"x": np.zeros(2)}, "has no 'y' .only 'x'.*its space"),
        (spaces.Dict({"x": BOX}), np.zeros(2), "has no 'x' .ndarray"),
    ],
)
def test_an_observation_that_its_space_does_not_hold_is_refused(space, value, words):
    world = Script("bob_0", [{}], observation={"bob_0": space})
    world._see = lambda agents: dict.fromkeys(agents, value)
    with pytest.raises(SpecError, match=f"observation.* of agent 'bob_0' {words}"):
        roll(world, 1)


def test_whole_numbers_of_another_dtype_are_observed():
    world = Script("bob_0", [{}], observation={"bob_0": spaces.Box(0, 255, (2,), np.uint8)})
    assert roll(world, 2, max_steps=2)["next", "bob", "observation"].tolist() == [
        [[[0, 1]], [[0, 2]]]
    ]


def test_rewards_are_single_numbers():
    world = Script("bob_0 bob_1", [{"earns": {"bob_0": [1.5], "bob_1": np.array(2)}}])
    assert rows(roll(world, 1, max_steps=1)["next"], "bob", "reward") == [[1.5, 2.0]]
    world = Script("bob_0 bob_1", [{"earns": {"bob_0": 1.0, "bob_1": np.ones(2)}}])
    with pytest.raises(SpecError, match=r"the reward of agent 'bob_1' has shape \[2\]"):
        roll(world, 1)


def test_a_space_of_no_fixed_shape_is_refused():
    world = Script("bob_0", [{}], observation={"bob_0": spaces.Sequence(BOX)})
    world._see = lambda agents: dict.fromkeys(agents, ())
    with pytest.raises(SpecError, match="'bob_0'.*Sequence.*Wrap"):
        PettingZooEnv(world)


def test_a_world_that_never_ends_asks_for_a_time_limit(monkeypatch):
    monkeypatch.setattr("torchrl_marl.envs.pettingzoo.one_copy.ENDLESS", 20)
    with pytest.raises(ConfigError, match="^Copy 0 of Script: an episode did not end in 20"):
        roll(Script("bob_0", [{}]), 30)
    assert roll(Script("bob_0", [{}]), 30, max_steps=25)["next", "truncated"].sum() == 1
    world = Script("bob_0", [{}])
    world.max_cycles = 25
    assert roll(world, 24).shape == (1, 24)


@pytest.mark.parametrize(
    "name, words",
    [
        ("mpe2/simple_sprad_v3", "did you mean 'mpe2/simple_spread_v3'"),
        ("sisl/pursuit_v4", "did you mean 'sisl/pursuit-v5'"),
        ("connect_four", "did you mean 'classic/connect_four-v3'"),
        ("nowhere/land", "unknown PettingZoo world 'nowhere/land'"),
        ("mpe2", "'mpe2' names no world.*'mpe2/simple_"),
        ("sisl", "'sisl' names no world.*'sisl/multiwalker-v"),
    ],
)
def test_an_unknown_name_names_the_nearest(name, words):
    with pytest.raises(ConfigError, match=words):
        PettingZooEnv(name)


def test_a_missing_package_has_its_pip_line(monkeypatch):
    find_spec = __import__("importlib.util").util.find_spec
    gone = {"mpe2", "magent2"}
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *a: None if name in gone else find_spec(name, *a)
    )
    with pytest.raises(MissingExtraError, match=r"pip install 'torchrl_marl\[pettingzoo\]'"):
        PettingZooEnv("mpe2/simple_spread_v3")
    with pytest.raises(ConfigError, match="pip install magent2"):
        PettingZooEnv("magent2/battle_v4")
    gone.add("pettingzoo")
    with pytest.raises(MissingExtraError, match="PettingZoo is not installed"):
        PettingZooEnv("sisl/pursuit-v5")


@pytest.mark.parametrize(
    "wrong",
    [{"max_steps": 2.5}, {"max_steps": True}, {"max_steps": 0}, {"num_envs": 1.5}, {"workers": -1}],
)
def test_numbers_are_whole(wrong):
    name, value = next(iter(wrong.items()))
    with pytest.raises(ConfigError, match=f"{name} is {value}, expected a whole number"):
        PettingZooEnv("mpe2/simple_spread_v3", **wrong)


def test_wrong_arguments_are_refused():
    with pytest.raises(ConfigError, match="n_agents"):
        PettingZooEnv("mpe2/simple_spread_v3", n_agents=3)
    with pytest.raises(ConfigError, match="n_agents with a name or a factory only"):
        PettingZooEnv(Script("bob_0", [{}]), n_agents=3)
    with pytest.raises(ConfigError, match="backend='aec'"):
        PettingZooEnv("classic/connect_four-v3", backend="parallel")
    with pytest.raises(ConfigError, match="expected a name"):
        PettingZooEnv(3)
    with pytest.raises(ConfigError, match="state is 'all'"):
        PettingZooEnv("mpe2/simple_spread_v3", state="all")
    with pytest.raises(ConfigError, match="'reset' or|without reset|callable"):
        PettingZooEnv(dict)


# -------------------------------------------------------------------------- worlds of one's own


def make_script(n=2):
    return Script(" ".join(f"bob_{i}" for i in range(n)), [{}])


def test_a_factory_an_object_and_a_module():
    assert PettingZooEnv(make_script, n=3, num_envs=2).team.n_agents == 3
    world = make_script()
    env = PettingZooEnv(world, max_steps=3)
    env.rollout(2)
    assert len(world.got) == 2  # itself, no copy
    env = PettingZooEnv(world, num_envs=3, max_steps=3)
    env.rollout(2)
    assert len(world.got) == 2
    import mpe2.simple_spread_v3 as module

    assert PettingZooEnv(module, N=2).team.n_agents == 2


def test_a_world_that_cannot_be_copied_asks_for_a_callable():
    world = make_script()
    world.lock = __import__("threading").Lock()
    PettingZooEnv(world)
    with pytest.raises(ConfigError, match="give a callable"):
        PettingZooEnv(world, num_envs=2)


def test_make_env_builds_it():
    env = make_env("pettingzoo/mpe2/simple_spread_v3", num_envs=2, seed=0, N=2)
    assert isinstance(env, PettingZooEnv) and env.batch_size == (2,)
    assert env.team.n_agents == 2 and not env.team.groups["agent"].discrete
    env = make_env("pettingzoo/mpe2/simple_spread_v3", num_envs=1, continuous_actions=False)
    assert env.team.groups["agent"].discrete


# ------------------------------------------------------------------- random states, snapshots


@pytest.mark.parametrize("workers", [0, 2])
def test_global_generators_are_a_copys_own(workers):
    def observed(**kwargs):
        env = PettingZooEnv(
            lambda: Gambler("bob_0", [{}]), num_envs=3, seed=0, max_steps=3, **kwargs
        )
        td = env.rollout(7, break_when_any_done=False)["next", "bob", "observation"]
        env.close()
        return td

    before = np.random.get_state()[1].copy(), random.getstate()
    first = observed(workers=workers)
    assert (before[0] == np.random.get_state()[1]).all() and before[1] == random.getstate()
    assert torch.equal(first, observed())
    assert first.unique().numel() == first.numel()


def test_a_world_that_draws_while_it_is_built():
    def drawn(seed, workers):
        env = PettingZooEnv(lambda: Drawn("bob_0", [{}]), num_envs=2, seed=seed, workers=workers)
        seen = env.reset()["bob", "observation"]
        env.close()
        return seen

    before = np.random.get_state()[1].copy(), random.getstate()
    first = drawn(0, 0)
    assert torch.equal(first, drawn(0, 2)) and first.unique().numel() == 4
    assert not torch.equal(first, drawn(1, 0))
    assert (before[0] == np.random.get_state()[1]).all() and before[1] == random.getstate()


def test_a_snapshot_of_a_world_that_pickles_its_arguments_only():
    env = PettingZooEnv("mpe2/simple_spread_v3", num_envs=2, seed=0, max_cycles=7)
    td = env.rollout(4, break_when_any_done=False)[:, -1]["next"]
    saved = env.snapshot()
    actions = [env.rand_action() for _ in range(8)]

    def go(env, td):
        out = []
        for action in actions:
            step, td = env.step_and_maybe_reset(td.clone().update(action))
            out.append(step["next", "agent", "observation"])
        return torch.stack(out)

    expected = go(env, td.exclude(("agent", "reward")))
    twin = PettingZooEnv("mpe2/simple_spread_v3", num_envs=2, seed=5, max_cycles=7)
    twin.restore(saved)
    assert torch.equal(go(twin, td.exclude(("agent", "reward"))), expected)


class OwnSource(Script):
    """Draws from a source of its own, which begins anew with every reset."""

    def reset(self, seed=None, options=None):
        self.source = random.Random(seed)  # of the clock, where there is no seed
        self.seeds = [*getattr(self, "seeds", ()), seed]
        return super().reset(seed, options)

    def _see(self, agents):
        return {a: np.array([self.source.random(), self.t]) for a in agents}


def own_source():
    return OwnSource("bob_0", [{}])


@pytest.mark.parametrize("workers", [0, 2])  # two, of which one plays two copies
def test_every_episode_begins_with_a_seed_of_its_own(workers):
    env = PettingZooEnv(own_source, num_envs=3, seed=0, max_steps=2, workers=workers)
    seen = [env.rollout(8, break_when_any_done=False) for _ in range(2)]
    env.close()
    seen = torch.cat([td["bob", "observation"][..., 0].flatten(1) for td in seen], 1)
    assert seen.unique().numel() == seen.numel() == 3 * 16
    again = PettingZooEnv(own_source, num_envs=3, seed=0, max_steps=2)
    again = [again.rollout(8, break_when_any_done=False) for _ in range(2)]
    again = torch.cat([td["bob", "observation"][..., 0].flatten(1) for td in again], 1)
    assert torch.equal(seen, again)


def test_a_restored_copy_goes_on_with_the_seeds_that_would_have_come():
    env = PettingZooEnv(own_source, num_envs=2, seed=0, max_steps=2)
    env.rollout(5, break_when_any_done=False)
    saved = env.snapshot()
    expected = env.rollout(6, break_when_any_done=False, auto_reset=False, tensordict=env.reset())
    twin = PettingZooEnv(own_source, num_envs=2, seed=9, max_steps=2)
    twin.restore(saved)
    found = twin.rollout(6, break_when_any_done=False, auto_reset=False, tensordict=twin.reset())
    assert torch.equal(found["next", "bob", "observation"], expected["next", "bob", "observation"])


def test_hanabi_deals_the_same_cards_again():
    def dealt():
        env = PettingZooEnv("classic/hanabi_v5", num_envs=2, seed=3)
        legal = torch.Generator().manual_seed(0)

        def policy(td):
            chosen = td["player", "action_mask"].float().flatten(0, 1)
            drawn = torch.multinomial(chosen, 1, generator=legal)
            return td.set(("player", "action"), drawn.view(td["player", "action_mask"].shape[:-1]))

        return env.rollout(200, policy, break_when_any_done=False)

    first, second = dealt(), dealt()
    assert first["next", "done"].sum() >= 4
    assert (first["player", "observation"] == second["player", "observation"]).all()


def test_a_world_that_cannot_be_closed_is_used_with_one_warning():
    class Clinging(Script):
        def close(self):
            raise OSError("no window")

    with pytest.warns(RuntimeWarning, match=r"close\(\) raised OSError: no window") as warned:
        env = PettingZooEnv(lambda: Clinging("bob_0", [{}]), num_envs=3, seed=0, max_steps=3)
    assert len(warned) == 1
    assert env.rollout(3).shape == (3, 3)
    env.close()


# --------------------------------------------------------------------------------- many copies


def test_a_copy_that_raises_is_named_or_begun_anew():
    def env(**kwargs):
        return PettingZooEnv(
            lambda: Faulty("bob_0 bob_1", [{"earns": {"bob_0": 1.0}}]), num_envs=2, **kwargs
        )

    with pytest.raises(WorkerError, match="Copy 0.*out of petrol"):
        env(max_steps=9).rollout(5)
    with pytest.warns(RuntimeWarning, match="out of petrol"):
        again = env(max_steps=9, restart_workers=True)
        td = again.rollout(6, break_when_any_done=False)
    assert again.restarts == 2
    next_ = td["next"]
    # The step in which it failed tells nothing but an end, with what was seen last.
    assert next_["truncated"][0, :, 0].tolist() == [False] * 3 + [True] + [False] * 2
    assert next_["bob", "reward"][0, :, 0, 0].tolist() == [1, 1, 1, 0, 1, 1]
    assert next_["bob", "observation"][0, :, 0, 1].tolist() == [1, 2, 3, 3, 1, 2]
    assert next_["bob", "mask"].all()


def test_a_mistake_in_a_world_is_not_mended_by_a_restart():
    world = Script("bob_0", None)  # has no steps
    with pytest.raises(
        WorkerError, match=r"Copy 0 of Script raised TypeError: .*; correct the world"
    ):
        roll(world, 1)


class Breaking(Script):
    """Raises in step 4 of every episode, or at every second begin."""

    def __init__(self, where, error=ValueError):
        super().__init__("bob_0", [{}])
        self.where, self.error = where, error

    def reset(self, seed=None, options=None):
        if self.where == "begin" and self.episodes == 1:
            raise self.error("no second life")
        return super().reset(seed, options)

    def step(self, actions):
        if self.where == "step" and self.t == 3:
            raise self.error("the wheel is off")
        return super().step(actions)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "where, words",
    [
        ("step", "the wheel is off; it failed 3 times in step 4 of its episode 1 after"),
        ("begin", "no second life; it failed 3 times in step 1 of its episode 2 after"),
    ],
)
def test_a_copy_that_always_fails_in_the_same_step_is_given_up(where, words, workers):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        env = PettingZooEnv(
            lambda: Breaking(where), num_envs=2, restart_workers=True, max_steps=6, workers=workers
        )
        with pytest.raises(WorkerError, match=f"^Copy 0 of .*{words}"):
            env.rollout(100, break_when_any_done=False)
    assert env.restarts == 4  # two of each copy
    env.close()


@pytest.mark.parametrize("error", [KeyError, AssertionError, ImportError])
def test_a_mistake_of_a_program_is_never_restarted(error):
    env = PettingZooEnv(lambda: Breaking("step", error), restart_workers=True, max_steps=6)
    with pytest.raises(WorkerError, match=f"raised {error.__name__}.*; correct the world"):
        env.rollout(9)
    assert env.restarts == 0


def test_an_action_that_is_not_finite_does_not_reach_the_world():
    world = Script("bob_0 bob_1", [{}], action=dict.fromkeys(["bob_0", "bob_1"], BOX))
    env = PettingZooEnv(world, restart_workers=True, max_steps=6)
    td = env.rand_action(env.reset())
    td["bob", "action"][0, 1, 0] = torch.nan
    with pytest.raises(NonFiniteError, match="the action of agent 'bob_1' in copy 0 is .nan"):
        env.step(td)
    assert world.got == []


@pytest.mark.parametrize("workers", [0, 2])
def test_many_copies_in_processes_give_the_same(workers):
    env = PettingZooEnv(
        "mpe2/simple_speaker_listener_v4", num_envs=3, seed=3, workers=workers, max_cycles=5
    )
    torch.manual_seed(0)
    td = env.rollout(12, break_when_any_done=False)
    env.close()
    assert td["next", "done"].sum() == 6
    with torch.random.fork_rng():
        torch.manual_seed(0)
        alone = PettingZooEnv(
            "mpe2/simple_speaker_listener_v4", num_envs=3, seed=3, max_cycles=5
        ).rollout(12, break_when_any_done=False)
    assert (td == alone).all()


def test_seeds_of_copies_differ():
    td = PettingZooEnv("mpe2/simple_spread_v3", num_envs=4, seed=0).reset()
    assert td["agent", "observation"][:, 0, 2].unique().numel() == 4


# --------------------------------------------------------------------------------- real worlds


def test_mujoco_with_infos_that_reset_does_not_have():
    env = PettingZooEnv("gymnasium_robotics/Ant", agent_conf="2x4", info=True, seed=0)
    td = env.rollout(80, break_when_any_done=False)
    assert td["next", "terminated"].any() and td["next", "agent", "reward"].dtype == torch.float32
    assert td["next", "agent", "info", "x_position"].abs().sum() > 0
    assert (
        td["next", "agent", "reward"][..., 0, :] == td["next", "agent", "reward"][..., 1, :]
    ).all()


def test_knights_die_one_by_one():
    env = PettingZooEnv(
        "butterfly/knights_archers_zombies_v11", seed=0, spawn_delay=3, line_death=True
    )
    td = env.rollout(200, break_when_any_done=False)
    mask = torch.cat([td[g, "mask"] for g in ("archer", "knight")], -1)
    assert mask.all(-1).any() and (mask.any(-1) & ~mask.all(-1)).any()


def test_no_window_no_greeting_no_warning():
    program = (
        "import warnings; warnings.simplefilter('error'); "
        "from torchrl_marl.envs.pettingzoo.build import maker_of; "
        "maker_of('sisl/pursuit_v5', 'auto', {}, None, 1)(); "
        "maker_of('mpe2/simple_spread_v3', 'auto', {}, True, 1)()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PettingZooEnv("sisl/pursuit_v5").rollout(2)


def test_an_episode_that_the_world_began_anew_is_not_begun_again(monkeypatch):
    env = PettingZooEnv("mpe2/simple_spread_v3", num_envs=2, max_steps=2, seed=0)
    td = env.rollout(1)[:, -1]
    begun = []
    start = env._start

    def recorded(fresh):
        begun.append(fresh.tolist())
        return start(fresh)

    monkeypatch.setattr(env, "_start", recorded)
    td = env.step(env.rand_action(env.step_mdp(td)))
    assert td["next", "done"].all()
    carried = env.maybe_reset(env.step_mdp(td))
    assert not begun  # the step did, once for each world
    # Who asks for a new episode in the middle of one gets it.
    env.step(env.rand_action(carried))
    env.reset(TensorDict({"_reset": torch.tensor([[False], [True]])}, [2]))
    assert begun == [[False, True]]
    env.close()
