"""Rollouts that cannot be captured fall back to eager steps, with a warning."""

import itertools
import warnings

import pytest
import torch
from graph_batches import assert_equal, batch_of, collector_of, dropout
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Bounded, Unbounded
from torchrl.envs import TensorDictPrimer, Transform, TransformedEnv, VecNorm

from torchrl_marl.envs import MarlEnv, VmasEnv
from torchrl_marl.specs import AgentSpec


class Stubborn(nn.Module):
    def forward(self, observation):
        if observation.sum() > 0:
            return observation[..., :2] * 0
        return observation[..., :2].clamp(-1, 1)


def fallback(env, policy="actors"):
    collector = collector_of(env, "compile", policy)
    with pytest.warns(UserWarning, match="eagerly, since .* cannot be captured") as caught:
        collector.rollout()
    assert collector.execution == "eager"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collector.rollout()
    return str(caught[0].message)


def test_policy_with_data_dependent_branch_falls_back():
    keys = [("agents", "observation")], [("agents", "action")]
    policy = TensorDictModule(Stubborn(), in_keys=keys[0], out_keys=keys[1])
    assert "test_captured_fallback.py:" in fallback(dropout(), policy)


def test_transform_with_internal_tensors_falls_back():
    env = TransformedEnv(dropout(), VecNorm(in_keys=[("agents", "observation")]))
    assert "VecNorm" in fallback(env)


def test_lazily_stacked_groups_fall_back():
    group_map = {"all": [*(f"adversary_{i}" for i in range(3)), "agent_0"]}
    env = VmasEnv("simple_tag", num_envs=3, seed=0, group_map=group_map)
    assert "PadAgents" in fallback(env)


def test_scenario_that_cannot_be_captured_matches_eager():
    def road():
        return VmasEnv("discovery", num_envs=3, seed=0, max_steps=7, info=False)

    collector = collector_of(road(), "trace")
    with pytest.warns(UserWarning, match=r"cannot be captured: .* at \S+\.py:\d+"):
        found = batch_of(collector)
    assert_equal(found, batch_of(collector_of(road(), "eager")))


class Remembering(nn.Module):
    """Counts its calls."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, observation):
        self.calls += 1
        return observation[..., :2] * 0 + 0.01 * self.calls


def test_policy_with_internal_state_falls_back():
    keys = [("agents", "observation")], [("agents", "action")]
    policy = TensorDictModule(Remembering(), in_keys=keys[0], out_keys=keys[1])
    assert "keeps a state between calls" in fallback(dropout(), policy)


def test_policy_that_reads_its_own_output_falls_back():
    def policy(td):
        hidden = td.get("hidden", None)
        hidden = torch.zeros(td.shape[0], 1) if hidden is None else hidden
        td["hidden"] = hidden + 1
        td["agents", "action"] = torch.tanh(0.1 * hidden).view(-1, 1, 1).expand(-1, 2, 2)
        return td

    said = fallback(dropout(), policy)
    assert "keeps a state between calls" in said and "TensorDictPrimer" not in said


class Counting(nn.Module):
    """Acts by the number of calls in the episode, which is part of its input."""

    def forward(self, observation, calls):
        action = torch.tanh(0.1 * calls).unsqueeze(1).expand(*observation.shape[:-1], 2)
        return action, calls + 1


def primed():
    primer = TensorDictPrimer({"calls": Unbounded((1,))}, expand_specs=True)
    return TransformedEnv(dropout(), primer)


def counting():
    seen, act = ("agents", "observation"), ("agents", "action")
    return TensorDictModule(Counting(), [seen, "calls"], [act, ("next", "calls")])


@pytest.mark.parametrize("execution", ["trace", "compile"])
def test_policy_with_primer_falls_back(execution):
    expected = collector_of(primed(), "eager", counting())
    found = collector_of(primed(), execution, counting())
    with pytest.warns(UserWarning, match="TensorDictPrimer adds a memory") as caught:
        assert_equal(batch_of(found), batch_of(expected))
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch = batch_of(found)
        assert_equal(batch, batch_of(expected))
    # Episodes have 7 steps: the last two of one, then the first three of the next.
    assert batch["calls"][0].flatten().tolist() == [5.0, 6.0, 0.0, 1.0, 2.0]


class OfSix(Transform):
    """Accepts one number of envs only, as a transform for one collector may."""

    def _reset(self, tensordict, tensordict_reset):
        if tensordict_reset.batch_size != (6,):
            raise RuntimeError("six envs or none")
        return tensordict_reset


def test_transform_that_fails_with_another_batch_size_falls_back():
    said = fallback(TransformedEnv(dropout(), OfSix()))
    assert "draws starts ahead, raised RuntimeError: six envs or none" in said


_CALLS = itertools.count(1)  # an iterator of a module is not seen


class Drifting(MarlEnv):
    """Every second step of the process moves a little further."""

    def __init__(self, num_envs, drift, **kwargs):
        super().__init__(num_envs, **kwargs)
        self.drift = drift
        self.register_agent(AgentSpec("rover", 2, Unbounded((1,)), Bounded(-1, 1, (1,))))

    def _reset(self, tensordict):
        self.position = torch.ones(self.num_envs, 2, 1)
        return {"rover": {"observation": self.position}}

    def _step(self, tensordict):
        drift = self.drift * (next(_CALLS) % 2)
        self.position = self.position + 0.5 * tensordict["rover", "action"] + drift
        return {"rover": {"observation": self.position, "reward": self.position}}


@pytest.mark.parametrize(
    "drift, execution, words",
    [
        (1e-6, "compile", None),
        (1e-6, "trace", "is rounded differently than the simulator's"),
        (1e-3, "compile", "differs from the simulator's"),
    ],
)
def test_rounding_differences_are_accepted_except_for_traces(drift, execution, words):
    collector = collector_of(Drifting(3, drift, seed=0), execution, policy=None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        collector.rollout()
    assert (collector.execution == execution) == (words is None)
    said = [str(one.message) for one in caught if "cannot be captured" in str(one.message)]
    assert [words in one for one in said] == [True] * (words is not None)
