"""Reduced graphs of simulator steps: bitwise equal, of a size independent of the agents."""

import pytest
import torch
from contract import assert_same, draw_actions

from torchrl_marl.capture import reduction
from torchrl_marl.capture.program import Program
from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.envs import VmasEnv
from torchrl_marl.learners import OnPolicyConfig, OnPolicyLearner
from torchrl_marl.simulator import captured
from torchrl_marl.specs import TeamSpec

pytest.importorskip("vmas")


@pytest.fixture
def programs(monkeypatch):
    """Programs of compiled environments; the graphs run operation by operation here."""
    made = []

    def uncompiled(traced, *inputs, name, execution):
        program = Program(traced, traced.module, traced.seconds, 0)
        if execution != "trace":
            made.append(program)
        return program

    monkeypatch.setattr(captured, "compile_trace", uncompiled)
    return made


def make(scenario, execution, **settings):
    return VmasEnv(scenario, num_envs=6, seed=0, execution=execution, **settings)


CASES = {
    "navigation": {"n_agents": 6},
    "flocking": {"n_agents": 4},
    "simple_spread": {"n_agents": 5},
    "balance": {"n_agents": 3},
    "dropout": {},
    "simple_tag": {},
}


@pytest.mark.parametrize("scenario", CASES)
def test_reduced_steps_equal_recorded_ones_bitwise(scenario, programs):
    recorded = make(scenario, "trace", **CASES[scenario])
    smaller = make(scenario, "compile", **CASES[scenario])
    td, other = recorded.reset(), smaller.reset()
    for action in draw_actions(recorded, 8):
        expected, td = recorded.step_and_maybe_reset(td.update(action))
        found, other = smaller.step_and_maybe_reset(other.update(action))
        assert_same(found, expected)
    program = programs[0]
    assert program.n_operations <= 0.75 * program.n_recorded


def batches(execution):
    """Two batches of a stochastic policy, the first of which records the graph."""
    torch.manual_seed(0)
    env = make("navigation", "eager", n_agents=4)
    groups = TeamSpec.from_env(env).groups
    learner = OnPolicyLearner(groups, OnPolicyConfig(minibatch_size=12), execution="eager")
    policy = TeamPolicy(learner.actors.values())
    collector = RolloutCollector(env, policy, frames_per_batch=24, execution=execution)
    torch.manual_seed(1)
    return [collector.rollout(), collector.rollout()], torch.get_rng_state()


def test_steps_with_a_stochastic_policy_are_reduced(programs):
    (expected, random_state), (found, other) = batches("trace"), batches("compile")
    for batch, twin in zip(expected, found):
        assert_same(twin, batch)
    assert torch.equal(random_state, other)
    assert programs[0].n_operations <= 0.75 * programs[0].n_recorded


def n_operations(programs, scenario, n_agents):
    programs.clear()
    env = make(scenario, "compile", n_agents=n_agents)
    td = env.reset()
    env.step(td.update(draw_actions(env, 1)[0]))
    return programs[0].n_operations


@pytest.mark.parametrize("scenario", ["navigation", "flocking", "simple_spread"])
def test_size_of_batched_steps_is_independent_of_agents(scenario, programs, monkeypatch):
    monkeypatch.setattr(reduction, "batching_pays", lambda simplified, batched: True)
    monkeypatch.setattr(reduction, "batching_may_pay", lambda *_: True)
    few, many = (n_operations(programs, scenario, n) for n in (6, 10))
    assert many <= few + 5, (few, many)


def test_unequal_reduced_graph_falls_back_to_the_recorded_one(programs, monkeypatch):
    monkeypatch.setattr(captured, "_same_bits", lambda x, y: torch.tensor(False))
    env = make("dropout", "compile")
    env.step(env.reset().update(draw_actions(env, 1)[0]))
    assert programs[0].n_operations > 0.9 * programs[0].n_recorded
