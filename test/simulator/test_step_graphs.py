"""Captured environment steps equal eager steps, or fall back to them."""

import random
import warnings

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
from torchrl.collectors import Collector
from torchrl.envs import Compose, RewardSum, StepCounter, TransformedEnv, check_env_specs
from torchrl.envs.utils import MarlGroupMapType

from torchrl_marl.errors import CaptureError, ConfigError, GraphCheckError, SpecError
from torchrl_marl.simulator.step_graphs import refuse_many_structures

vmas = pytest.importorskip("vmas")


ACTION, AGENTS = ("agents", "action"), ("agents", "observation")
GOALS = ["simple_push", "simple_adversary", "simple_reference", "simple_speaker_listener"]


class Noisy(WindyScenario):
    def reward(self, agent):
        return super().reward(agent) + torch.randn(self.world.batch_dim)


class Restless(WindyScenario):
    def reset_world_at(self, env_index=None):
        super().reset_world_at(env_index)
        if env_index is None:
            self.force = random.random()


# ------------------------------------------------------------------------ equal to eager steps

CASES = {
    "dropout": {},
    "simple": {},
    "simple_adversary": {},
    "navigation": {"state": "observations"},
    "discrete": {"continuous_actions": False, "info": False},
    "one-hot": {"continuous_actions": False, "categorical_actions": False},
}


@pytest.mark.parametrize("case", CASES)
def test_steps_between_partial_resets_equal_eager_ones(case):
    scenario = case if case in ("simple", "simple_adversary", "navigation") else "dropout"
    env, eager = make_graph_and_eager(scenario, **CASES[case])
    td = env.reset()
    assert_same(td, eager.reset())
    for i, action in enumerate(draw_actions(env, 12)):
        expected = eager.step(td.clone().update(action))
        found, td = env.step_and_maybe_reset(td.update(action))
        assert_same(found, expected)
        if i % 4 == 1:
            td = reset_some(env, td, [i % 6, 3])
            assert_shows_simulator(env, td)
        eager.restore(env.snapshot())  # starts are drawn in another order
    assert env._execution == "trace" and len(graphs_of(env)) == 1


def test_rollout_across_ends_of_episodes_equals_eager():
    env, eager = make_graph_and_eager()
    td = env.rollout(20, break_when_any_done=False)
    ends = td["next", "done"].squeeze(-1)
    assert ends.any(0).sum() > 1 and td["next", "truncated"].any()
    now, following = td[AGENTS], td["next", "agents", "observation"]
    assert torch.equal(now[:, 1:][~ends[:, :-1]], following[:, :-1][~ends[:, :-1]])
    for row in td:
        lengths = row["next", "done"].squeeze(-1).nonzero().squeeze(-1).diff()
        assert (lengths <= 7).all()
    eager.reset()
    first = ends.any(0).nonzero()[0]
    for step in td[:, : int(first) + 1].unbind(1):
        found = eager.step(step.select(ACTION))
        assert_same(found["next"], step["next"])


def test_torchrl_env_checks_and_transforms():
    check_env_specs(make())
    sums = RewardSum(in_keys=[("agents", "reward")], out_keys=[("agents", "sum")])
    env = TransformedEnv(make(), Compose(sums, StepCounter()))
    check_env_specs(env)
    td = env.rollout(10, break_when_any_done=False)
    assert td["step_count"].max() == 6  # the limit is 7
    begins = td["step_count"] == 0
    assert (td["agents", "sum"][begins.squeeze(-1)] == 0).all() and begins.sum() > 6
    assert env.base_env._execution == "trace"


def test_torchrl_collector():
    env = make()
    collector = Collector(env, frames_per_batch=24, total_frames=72)
    batches = list(collector)
    assert [batch.shape for batch in batches] == [(6, 4)] * 3
    assert len(torch.cat([b["collector", "traj_ids"] for b in batches], 1).unique()) > 6
    collector.shutdown(close_env=False)
    assert len(graphs_of(env)) == 1


def test_compiled_steps_are_close_to_eager_ones():
    settings = {"num_envs": 64, "max_steps": None}  # of docs/one_program.md, whose graph it is
    env, eager = make(execution="compile", **settings), make(execution="eager", **settings)
    td, other = env.reset(), eager.reset()
    for action in draw_actions(env, 3):
        # Actions may lie in memory in any way.
        strided = torch.stack([action[ACTION], action[ACTION]], -1)[..., 0]
        td = env.step(td.set(ACTION, strided))["next"]
        other = eager.step(other.set(ACTION, action[ACTION]))["next"]
        for key in other.keys(True, True):
            torch.testing.assert_close(td[key], other[key], rtol=1e-4, atol=1e-4)
        td = reset_some(env, td, [2])
        assert_shows_simulator(env, td)
        eager.restore(env.snapshot())
        other = eager._read()
    assert env._execution == "compile"


def test_random_draws_in_steps_equal_those_of_eager_execution():
    env, eager = make(Noisy()), make(Noisy(), "eager")
    before = rng_states()
    actions = draw_actions(env, 4)
    for a, b in zip(play(env, env.reset(), actions), play(eager, eager.reset(), actions)):
        assert_same(a, b)
    assert_same_rng(before, rng_states())
    assert env._execution == "trace"


def test_outputs_of_steps_may_be_modified():
    env, other = make_graph_and_eager()
    actions = draw_actions(env, 4)
    found = []
    for td in play(env, env.reset(), actions):
        found.append(td.clone())
        for x in td["next"].values(True, True):
            x.fill_(1)
    for a, b in zip(found, play(other, other.reset(), actions)):
        assert_same(a, b)


# ----------------------------------------------------------------- changing structures


@pytest.mark.environments
@pytest.mark.parametrize("scenario", GOALS)
def test_graph_follows_goals_chosen_by_full_resets(scenario):
    env, eager = make_graph_and_eager(scenario, num_envs=4)
    for i in range(6):
        td = env.reset()
        eager.restore(env.snapshot())
        for action in draw_actions(env, 1, seed=i):
            expected = eager.step(td.clone().update(action))
            found = env.step(td.update(action))
            assert_same(found, expected)
            td = reset_some(env, found["next"], [1, 2])
            assert_shows_simulator(env, td)
            eager.restore(env.snapshot())
    assert env._execution == "trace" and 1 < len(graphs_of(env)) <= 6


def test_one_structure_is_recorded_once():
    env = make()
    for _ in range(3):
        env.rollout(9, break_when_any_done=False)
        env._env  # noqa: B018
        env.set_seed(3)
    assert len(graphs_of(env)) == 1


def test_values_shared_by_envs_may_be_redrawn():
    env, eager = make(WindyScenario()), make(WindyScenario(), "eager")
    for _ in range(3):
        td, other = env.reset(), eager.reset()
        assert_same(td, other)
        for action in draw_actions(env, 2):
            found, expected = env.step(td.update(action)), eager.step(other.update(action))
            assert_same(found, expected)
    td = reset_some(env, found["next"], [0, 4])
    assert_shows_simulator(env, td)
    assert len(graphs_of(env)) == 1


def test_ever_changing_structure_falls_back_to_eager(monkeypatch):
    monkeypatch.setattr("torchrl_marl.simulator.step_graphs._MOST_STRUCTURES", 2)
    env, eager = make(Restless()), make(Restless(), "eager")
    action = draw_actions(env, 1)[0]
    with pytest.warns(UserWarning, match=r"3 were found: .* changing scenario\.force;") as caught:
        for _ in range(4):
            found, expected = (x.step(x.reset().update(action)) for x in (env, eager))
            assert_same(found, expected)
    assert len(caught) == 1 and env._execution == "eager"


def test_too_many_structures_raise():
    signatures = [repr({("scenario", "mass"): [float(i)], ("", "t"): [None]}) for i in range(12)]
    refuse_many_structures(signatures)
    new = repr({("scenario", "mass"): [float("inf")], ("", "t"): [None]})
    with pytest.raises(CaptureError, match=r"13 were found: resets keep changing scenario\.mass;"):
        refuse_many_structures([*signatures, new])


# ------------------------------------------------------------------------ errors and fallbacks


@pytest.mark.parametrize("value", [torch.nan, 5.0])
def test_failed_step_raises_and_keeps_the_state(value):
    env = make()
    td = start(env, 2)
    before = simulator_rows(env)
    env.step(draw_actions(env, 1)[0])
    env.restore(snapshot := env.snapshot())
    bad = env.rand_action(td.clone())
    bad[ACTION][2, 1] = value
    with pytest.raises(GraphCheckError, match=r"\(.*environment\.py:\d+\)"):
        env.step(bad)
    assert set(before) == set(simulator_rows(env))
    kept = snapshot["simulator", "batched"]
    assert all(torch.equal(kept[key], x) for key, x in simulator_rows(env).items())
    env.step(env.rand_action(td.clone()))  # and continues
    assert env._execution == "trace"


@pytest.mark.parametrize("shape", [(6, 2, 1), (6, 3, 2)])
def test_action_of_wrong_shape_raises(shape):
    env = make()
    td = env.reset()
    step = env._step_graphs().step
    wrong = td.clone().empty().set("agents", {"action": torch.zeros(shape)}, inplace=False)
    with pytest.raises(SpecError, match=r"'action'\) is \[.*expected \[6, 2, 2\]"):
        step(wrong)
    with pytest.raises(SpecError, match="is nothing"):
        step(td.clone())


def fallback(env, eager, match, n_steps=3):
    actions = draw_actions(env, n_steps)
    with pytest.warns(UserWarning, match=match) as caught:
        for a, b in zip(play(env, env.reset(), actions), play(eager, eager.reset(), actions)):
            assert_same(a, b)
    assert len([x for x in caught if "captured" in str(x.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env.step(actions[0].clone())
    assert env._execution == "eager"


def test_lazily_stacked_groups_fall_back():
    group_map = MarlGroupMapType.ALL_IN_ONE_GROUP
    fallback(*make_graph_and_eager("simple_adversary", group_map=group_map), match="stacked lazily")


def test_scenario_that_cannot_be_captured_falls_back():
    match = r"discovery: steps run eagerly, .*\.py:\d+"
    fallback(*make_graph_and_eager("discovery", num_envs=3), match=match, n_steps=10)


def test_scenario_with_unreadable_state_falls_back():
    env = make("road_traffic", num_envs=2, n_agents=4)
    with pytest.warns(UserWarning, match="road_traffic: steps run eagerly"):
        env.step(env.rand_action(env.reset()))


def test_invalid_executions_raise():
    with pytest.raises(ConfigError, match="did you mean 'compile'"):
        make(execution="compiled")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="'cudagraph' needs a GPU"):
            make(execution="cudagraph")
    with pytest.raises(ConfigError, match="grad_enabled"):
        make(grad_enabled=True)
