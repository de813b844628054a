"""PettingZoo's agents: masks, done flags, late agents; unknown and returning agents raise."""

import numpy as np
import pytest
from played import rollout_of_ones, step_values
from scripted import Script

from torchrl_marl.envs import PettingZooEnv
from torchrl_marl.envs.check import check_marl_env
from torchrl_marl.errors import SpecError

# ------------------------------------------------------------------------------ life and death


def test_death_masks_the_agent_and_does_not_end_the_episode():
    world = Script(
        "bob_0 bob_1",
        [
            {"earns": {"bob_0": 1.0, "bob_1": 2.0}},
            {"agents": "bob_0", "dies": "bob_1", "earns": {"bob_1": -3.0}},
            {},
            {"agents": "", "dies": "bob_0"},
        ],
    )
    td = rollout_of_ones(world, 5)
    assert world.got == [{"bob_0": 1, "bob_1": 1}] * 2 + [{"bob_0": 1}] * 2 + [
        {"bob_0": 1, "bob_1": 1}
    ]
    assert step_values(td, "bob", "mask") == [[True, True]] * 2 + [[True, False]] * 2 + [
        [True, True]
    ]
    next_ = td["next"]
    assert step_values(next_, "bob", "reward")[:3] == [[1, 2], [0, -3], [0, 0]]
    assert step_values(next_, "bob", "terminated")[:4] == [[False, False]] + [[False, True]] * 2 + [
        [True, True]
    ]
    assert next_["terminated"][0, :, 0].tolist() == [False, False, False, True, False]
    assert not next_["truncated"].any()
    # The last observation of an agent that dies is real, later ones are zeros.
    assert next_["bob", "observation"][0, :4, 1].tolist() == [[1, 1], [1, 2], [0, 0], [0, 0]]
    assert td["bob", "observation"][0, 4].tolist() == [[0, 0], [1, 0]]
    assert next_["bob", "observation"][0, 3, 0].tolist() == [0, 4]


def test_late_agents_are_masked_until_they_spawn():
    world = Script("bob_0 bob_1", [{}, {"agents": "bob_0 bob_1"}, {}], first="bob_0")
    td = rollout_of_ones(world, 3, max_steps=3)
    assert world.got == [{"bob_0": 1}, {"bob_0": 1}, {"bob_0": 1, "bob_1": 1}]
    assert step_values(td, "bob", "mask") == [[True, False]] * 2 + [[True, True]]
    assert not td["bob", "done"].any()
    assert td["next", "bob", "truncated"][0, -1].all() and td["next", "truncated"][0, -1].all()
    assert td["next", "bob", "mask"][0, -1].all()


def test_no_rewards_before_spawn_and_after_death():
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
    td = rollout_of_ones(world, 6, max_steps=3)
    assert step_values(td["next"], "bob", "reward") == [[1, 2, 0], [4, 5, 0], [7, 0, 9]] * 2


def test_agents_that_never_spawned_are_not_bootstrapped():
    td = rollout_of_ones(Script("bob_0 bob_1", [{}], first="bob_0"), 2, max_steps=2)["next"]
    assert step_values(td, "bob", "mask") == [[True, False], [True, False]]
    assert step_values(td, "bob", "truncated") == [[False, False], [True, True]]


def test_agents_may_act_in_different_steps():
    world = Script(
        "bob_0 bob_1",
        [
            {"sees": "bob_0", "earns": {"bob_0": 1.0, "bob_1": 5.0}},
            {"sees": "bob_1", "earns": {"bob_1": 7.0}},
            {"sees": "bob_0"},
        ],
    )
    td = rollout_of_ones(world, 3, max_steps=3)
    assert world.got == [{"bob_0": 1, "bob_1": 1}, {"bob_0": 1}, {"bob_1": 1}]
    assert step_values(td, "bob", "mask") == [[True, True], [True, False], [False, True]]
    next_ = td["next"]
    assert step_values(next_, "bob", "reward") == [[1, 5], [0, 7], [0, 0]]
    # Waiting agents keep the last observation and are bootstrapped at the time limit.
    times = next_["bob", "observation"][0, ..., 1].tolist()
    assert times == [[1, 0], [1, 2], [3, 2]]
    assert step_values(next_, "bob", "mask")[-1] == [True, True]


@pytest.mark.parametrize(
    "words, expected",
    [
        ({"dies": "bob_0 bob_1"}, ([True, True], [False, False], "terminated")),
        ({"cut": "bob_0 bob_1"}, ([False, False], [True, True], "truncated")),
        ({"dies": "bob_0", "cut": "bob_1"}, ([True, False], [False, True], "truncated")),
        ({"dies": "bob_0 bob_1", "cut": "bob_0 bob_1"}, ([True] * 2, [False] * 2, "terminated")),
    ],
)
def test_agent_is_either_terminated_or_truncated(words, expected):
    td = rollout_of_ones(Script("bob_0 bob_1", [{"agents": "", **words}]), 1)["next"]
    found = (
        td["bob", "terminated"][0, 0, :, 0].tolist(),
        td["bob", "truncated"][0, 0, :, 0].tolist(),
    )
    assert found == expected[:2]
    assert td[expected[2]].all() and td["done"].sum() == 1
    assert td["terminated"].sum() + td["truncated"].sum() == 1
    assert td["bob", "mask"][0, 0].tolist() == expected[1]


def test_both_flags_at_the_time_limit_of_the_env_truncate():
    world = Script("bob_0", [{}, {"agents": "", "dies": "bob_0", "cut": "bob_0"}])
    world.max_cycles = 2
    td = rollout_of_ones(world, 2)["next"]
    assert step_values(td, "bob", "truncated") == [[False], [True]] and td["truncated"][0, 1].all()


def test_early_truncated_agent_is_masked_while_others_continue():
    world = Script(
        "bob_0 bob_1", [{"agents": "bob_0", "cut": "bob_1"}, {"agents": "", "dies": "bob_0"}]
    )
    td = rollout_of_ones(world, 2)["next"]
    assert step_values(td, "bob", "mask") == [[True, False], [False, False]]
    assert step_values(td, "bob", "truncated") == [[False, True], [False, True]]
    assert td["truncated"][0, :, 0].tolist() == [False, True]


def test_episode_ends_even_if_the_env_keeps_its_agents():
    world = Script("bob_0", [{}, {"dies": "bob_0"}])
    td = rollout_of_ones(world, 5)["next"]
    assert td["terminated"][0, :, 0].tolist() == [False, True, False, True, False]
    assert world.episodes == 4  # one of them to inspect the env


def test_returning_agent_is_refused():
    steps = [{"agents": "bob_0", "dies": "bob_1"}, {}, {"agents": "bob_0 bob_1"}]
    with pytest.raises(SpecError, match="agent 'bob_1' ended and is present again.*new id"):
        rollout_of_ones(Script("bob_0 bob_1", steps), 3)
    # An ended agent may stay in the list for some steps.
    steps = [{"dies": "bob_1"}, {}, {"agents": "bob_0"}]
    assert not rollout_of_ones(Script("bob_0 bob_1", steps), 3, max_steps=3)["next", "bob", "mask"][
        ..., 1
    ].any()


# ------------------------------------------------------------------- agents that change


class Says(Script):
    """Returns a given value as a done flag of one agent."""

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
        "agent 'eve' is among the agents, but not among the environment's agents",
    ),
    "one has another name": (
        changing({"agents": "bob_0 rob_1", "sees": "bob_0", "dies": "bob_1"}),
        "agent 'rob_1' is among the agents",
    ),
    "all have other names": (
        changing({"agents": "x y", "sees": "bob_0 bob_1"}),
        "agent 'x' is among the agents",
    ),
    "a stranger earns": (changing({"earns": {"eve": 1.0}}), "agent 'eve' is among the rewards"),
    "a stranger sees": (
        changing({"shows": {"eve": 1.0}}),
        "agent 'eve' is among the observations",
    ),
    "gone without a flag": (
        changing({"agents": "bob_0"}),
        "agent 'bob_1' is gone from the environment's agents, but was neither terminated nor "
        "truncated",
    ),
    "all gone without a flag": (changing({"agents": ""}), "agent 'bob_0' is gone from"),
    "a stranger at the begin": (
        Script("bob_0 bob_1", [{}], first="bob_0 bob_1 eve"),
        "agent 'eve' is among the agents",
    ),
    "a flag that is a text": (
        Says("bob_0 bob_1", "False"),
        "the terminated flag of agent 'bob_1' is 'False' .str., expected True or False",
    ),
    "a number that is no flag": (
        Says("bob_0 bob_1", 0.5, "truncated"),
        "the truncated flag of agent 'bob_1' is 0.5 .float.",
    ),
}
CHANGES["a stranger at the begin"][0]._observe_agents = lambda agents: dict.fromkeys(
    set(agents) - {"eve"}, np.zeros(2)
)


@pytest.mark.parametrize("name", CHANGES)
def test_environment_that_changes_its_agents_is_refused(name):
    world, words = CHANGES[name]
    with pytest.raises(SpecError, match=f"^Copy 0 of {type(world).__name__}: {words}"):
        rollout_of_ones(world, 3, max_steps=9)
    with pytest.raises(SpecError, match=words):
        check_marl_env(PettingZooEnv(world, seed=0, max_steps=9), n_steps=5)


@pytest.mark.parametrize("flag", [np.bool_(False), 0, np.zeros(1), np.float32(0), None])
def test_falsy_flags_of_any_type(flag):
    td = rollout_of_ones(Says("bob_0 bob_1", flag), 3, max_steps=9)["next"]
    assert td["bob", "mask"].all() and not td["bob", "done"].any()


@pytest.mark.parametrize("flag", [np.bool_(True), 1, np.ones(1), np.float32(1)])
def test_truthy_flags_of_any_type(flag):
    td = rollout_of_ones(Says("bob_0 bob_1", flag), 2, max_steps=9)["next"]
    assert step_values(td, "bob", "terminated") == [[False, True]] * 2


def test_all_flag_is_not_an_unknown_agent():
    world = changing({"agents": "", "dies": "bob_0 bob_1"})
    step = world.step

    def with_all(actions):
        seen, earned, terminated, truncated, infos = step(actions)
        return seen, earned, {**terminated, "__all__": all(terminated.values())}, truncated, infos

    world.step = with_all
    assert step_values(rollout_of_ones(world, 2)["next"], "bob", "terminated") == [
        [False] * 2,
        [True] * 2,
    ]
