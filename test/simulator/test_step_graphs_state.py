"""State of captured environments: inspection, snapshots, seeds, copies and closing."""

import copy
import random

import numpy as np
import pytest
import torch
from contract import assert_same, assert_same_rng, draw_actions, play, reset_some, rng_states, start
from graph_steps import (
    WindyScenario,
    assert_shows_simulator,
    graphs_of,
    make,
    make_graph_and_eager,
    simulator_rows,
)

from torchrl_marl.capture import count_syncs
from torchrl_marl.simulator.settings import copy_settings

vmas = pytest.importorskip("vmas")


# --------------------------------------------------------------------- access to the simulator


def test_simulator_attributes_show_the_current_state():
    env, eager = make_graph_and_eager()
    for action in draw_actions(env, 3):
        env.step(action.clone()), eager.step(action.clone())
        for agent, other in zip(env.agents, eager.agents):
            assert torch.equal(agent.state.pos, other.state.pos)
        assert torch.equal(env._env.steps, eager._env.steps)


def test_inspection_does_not_change_results():
    env, other = make(), make()
    actions = draw_actions(env, 12)
    for a, b in zip(play(env, env.reset(), actions), play(other, other.reset(), actions)):
        assert_same(a, b)
        env.snapshot(), env.scenario.observation(env.agents[0])


def test_changes_of_the_simulator_take_effect():
    env, eager = make_graph_and_eager()
    actions = draw_actions(env, 4)
    for one in (env, eager):
        one.step(actions[0].clone())
        one._env.agents[0].set_pos(torch.full((6, 2), 0.3), None)
    assert_same(env.step(actions[1].clone()), eager.step(actions[1].clone()))
    for one in (env, eager):
        one._env.scenario.energy_coeff = 7.0  # a number, which a graph holds as a constant
    assert_same(env.step(actions[2].clone()), eager.step(actions[2].clone()))
    assert len(graphs_of(env)) == 2


def test_settings_changed_before_the_first_step_apply_to_resets():
    env = make(WindyScenario())
    env.reset()
    env._env.scenario.force = 100.0
    td = env.step(env.rand_action(env._read()))["next"]
    assert_shows_simulator(env, reset_some(env, td, [1, 2]))


def test_rendering_shows_the_state(monkeypatch):
    env, eager = make_graph_and_eager()
    shown = []

    def render(self, **kwargs):
        shown.append(self.agents[0].state.pos.clone())

    monkeypatch.setattr(type(vmas.make_env("dropout", 1)), "render", render)
    for action in draw_actions(env, 2):
        for one in (env, eager):
            one.step(action.clone())
            one.render(mode="rgb_array")
    assert torch.equal(shown[0], shown[1]) and torch.equal(shown[2], shown[3])


def test_copy_settings_copies_numbers_references_and_shared_tensors():
    class Race:
        def __init__(self, num_envs, goal):
            self.num_envs, self.places = num_envs, [Place(), Place()]
            self.goal, self.colour = self.places[goal], torch.full((3,), float(goal))
            self.rows = torch.full((num_envs,), float(goal))

    class Place:
        pass

    twin, leader = Race(8, 0), Race(2, 1)
    copy_settings(twin, leader, (8, 2))
    assert twin.goal is twin.places[1] and twin.num_envs == 8
    assert torch.equal(twin.colour, leader.colour) and twin.colour is not leader.colour
    assert torch.equal(twin.rows, torch.zeros(8))


# ----------------------------------------------------------------------- snapshots and seeds


@pytest.mark.parametrize("n_steps", [0, 1, 5])
def test_snapshot_resumes_bitwise_with_drawn_starts(n_steps):
    env = make()
    td = start(env, n_steps)
    td = reset_some(env, td, [1, 2])
    snapshot = env.snapshot()
    actions = draw_actions(env, 18)
    expected = list(play(env, td.clone(), actions))
    for other in (env, make(seed=3)):
        other.restore(snapshot)
        for a, b in zip(expected, play(other, td.clone(), actions)):
            assert_same(a, b)


def test_snapshot_between_an_end_and_its_reset():
    env, other = make(), make(seed=5)
    td = start(env, 4)
    other.restore(env.snapshot())
    assert_same(reset_some(env, td, [0, 5]), reset_some(other, td, [0, 5]))
    assert all(map(torch.equal, *(simulator_rows(x).values() for x in (env, other))))


def test_snapshots_transfer_between_graphs_and_eager_execution():
    env, eager = make_graph_and_eager()
    td = start(env, 3)
    eager.restore(env.snapshot())
    actions = draw_actions(env, 3)
    for a, b in zip(play(env, td.clone(), actions), play(eager, td.clone(), actions)):
        assert_same(a["next"], b["next"])
    env.restore(eager.snapshot())
    action = draw_actions(env, 1, seed=4)[0]
    assert_same(env.step(action.clone()), eager.step(action.clone()))


def test_seed_reproduces_and_recording_uses_no_random_numbers():
    env, fresh = make(), make()
    actions = draw_actions(env, 16)
    before = rng_states()
    env.reset()
    drawn = env.random_state.state_dict()["torch"]
    env.step(actions[0].clone())
    assert torch.equal(drawn, env.random_state.state_dict()["torch"])
    assert_same_rng(before, rng_states())
    first = []
    for _ in range(2):
        env.set_seed(0)
        first.append(list(play(env, env.reset(), actions)))
    fresh.set_seed(0)
    for a, b, c in zip(*first, play(fresh, fresh.reset(), actions)):
        assert_same(a, b)
        assert_same(a, c)


def test_two_environments_are_independent():
    alone, first, second = make(), make(), make(seed=9)
    actions = draw_actions(alone, 16)
    expected = list(play(alone, alone.reset(), actions))
    pair = zip(play(first, first.reset(), actions), play(second, second.reset(), actions))
    for a, (b, _) in zip(expected, pair):
        torch.rand(2), np.random.rand(), random.random()
        assert_same(a, b)


# ------------------------------------------------------------------------- copies, devices, closing


def test_copy_continues_like_the_original():
    env = make()
    td = reset_some(env, start(env, 3), [1])
    other = copy.deepcopy(env)
    actions = draw_actions(env, 16)
    expected = list(play(env, td.clone(), actions))
    for a, b in zip(expected, play(other, td.clone(), actions)):
        assert_same(a, b)
    assert other._captured.simulator is not env._captured.simulator


def test_moving_to_the_same_device_and_closing():
    env, other = make(), make()
    actions = draw_actions(env, 4)
    td, again = env.reset(), other.reset()
    for i, action in enumerate(actions):
        env = env.to("cpu") if i == 2 else env
        td, again = env.step(td.update(action)), other.step(again.update(action))
        assert_same(td, again)
        td, again = td["next"], again["next"]
    env.close()
    assert env.is_closed


def test_steps_do_not_synchronize_the_device():
    env = make()
    td = env.rand_action(start(env, 2))
    td = env.rand_action(env.step(td)["next"])
    step = env._graphs.step
    with count_syncs() as syncs:
        step(td)
    assert not [sync for sync in syncs if "raise_failed" not in sync.site], syncs


def test_reset_of_no_env_changes_nothing():
    env = make()
    td = start(env, 2)
    before = simulator_rows(env)
    none = torch.zeros(6, 1, dtype=torch.bool)
    assert_same(td, env.reset(td.clone().set("_reset", none)).exclude("_reset"))
    assert all(map(torch.equal, before.values(), simulator_rows(env).values()))
