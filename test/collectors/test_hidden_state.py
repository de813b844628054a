"""Own environments whose state is not in tensors: a captured run has the eager run's results."""

import copy
import dataclasses
import enum
import random
import warnings

import numpy as np
import pytest
import torch
from torchrl.data import Bounded, Unbounded

from torchrl_marl import AgentSpec
from torchrl_marl.collectors import RolloutCollector
from torchrl_marl.envs import MarlEnv, check_marl_env
from torchrl_marl.errors import SimulatorStateError, SpecError

N_ENVS, LATE = 4, 20  # a graph is compared in the first four steps, and LATE is later
CALLS = [0]


class Level(enum.Enum):
    EASY, HARD = 1.0, 5.0


@dataclasses.dataclass(slots=True)
class World:
    total: torch.Tensor


class Own(MarlEnv):
    """Moves by the actions; rewards are doubled by a state that only changes late."""

    hidden, level, term = None, 1.0, None
    read = float

    def __init__(self, num_envs, **kwargs):
        super().__init__(num_envs, **kwargs)
        self.register_agent(AgentSpec("rover", 1, Unbounded((1,)), Bounded(-1, 1, (1,))))
        self.level = copy.copy(type(self).level)
        if self.hidden is not None:
            self.n = self.hidden[0]()

    def _reset(self, tensordict):
        self.x = torch.zeros(self.num_envs, 1, 1) + type(self).read(self.level)
        return {"rover": {"observation": self.x}}

    def _step(self, tensordict):
        self.x = self.x + 0.1 * tensordict["rover", "action"]
        reward = self.x * type(self).read(self.level)
        late = self.hidden is not None and type(self).hidden[1](self)
        out = {"rover": {"observation": self.x, "reward": reward * (1 + late)}}
        if self.term is not None:
            out["terminated"] = (self.steps + 1 >= self.term).unsqueeze(-1)
        return out


def act(tensordict):
    tensordict["rover", "action"] = torch.full((N_ENVS, 1, 1), 0.5)
    return tensordict


def batches(env, execution, change=None, n_steps=30):
    CALLS[0] = 0
    collector = RolloutCollector(env, act, frames_per_batch=N_ENVS * n_steps, execution=execution)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first = collector.rollout()
        if change is not None:
            change(env)
        found = torch.cat([first, collector.rollout()], 1)
    return found, [str(one.message) for one in caught]


def assert_same(one, other):
    for key in (("rover", "observation"), ("next", "rover", "reward")):
        assert torch.equal(one[key], other[key]), key


def count(env, new=1):
    env.n = env.n + type(env.n)(new)
    return env.n > LATE


def add(env):
    env.n.add(len(env.n))
    return len(env.n) > LATE


def fill(env):
    env.n += 1
    return env.n[0] > LATE


def closure():
    n = 0

    def late():
        nonlocal n
        n += 1
        return n > LATE

    return late


def of_module(env):
    CALLS[0] += 1
    return CALLS[0] > 1e6


HIDDEN = {
    "numpy integer": (lambda: np.int64(0), count, "changes n "),
    "set": (set, add, "changes n "),
    "large array": (lambda: np.zeros(2_000), fill, "changes n "),
    "own generator": (lambda: random.Random(0), lambda e: e.n.random() > 0.9, "changes n,"),
    "closure": (closure, lambda e: e.n(), "changes n,"),
    "iterator": (lambda: iter(range(99)), lambda e: next(e.n) > LATE, "n is an iterator"),
    "list of the module": (int, of_module, "test_hidden_state.CALLS"),
    "numpy reads a tensor": (int, lambda e: e.x.numpy().max() > 2, "depends on the state"),
    "torch generator": (
        lambda: torch.Generator().manual_seed(0),
        lambda e: torch.rand(N_ENVS, 1, 1, generator=e.n)[: len(e.x)].mean(),
        "torch.Generator",
    ),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_state_outside_of_tensors_is_refused_and_undone(name):
    *hidden, words = HIDDEN[name]
    kind = type("Hider", (Own,), {"hidden": hidden})
    expected, _ = batches(kind(N_ENVS, seed=0), "eager")
    found, said = batches(kind(N_ENVS, seed=0), "trace")
    assert any(words in one for one in said), said
    assert_same(expected, found)


def test_a_caught_refusal_is_raised():
    def late(env):
        try:
            return 1.0 if env.x.max() > 2 else 0.0
        except Exception:
            return 0.0

    kind = type("Catcher", (Own,), {"hidden": (int, late)})
    expected, _ = batches(kind(N_ENVS, seed=0), "eager")
    found, said = batches(kind(N_ENVS, seed=0), "trace")
    assert "depends on the state" in said[0]
    assert expected["next", "rover", "reward"][0, -1, 0, 0] > 5  # the branch was taken
    assert_same(expected, found)


SETTINGS = {
    "numpy number": (np.float32(1), np.float32(5), float),
    "enum": (Level.EASY, Level.HARD, lambda x: x.value),
    "array": (np.ones(1), np.full(1, 5.0), lambda x: float(x[0])),
    "tuple": ((1.0,), (5.0,), lambda x: x[0]),
    "set": ({1.0}, {5.0}, max),
    "length of a list": ([0], [0] * 5, len),
    "tensor": (torch.tensor(1.0), torch.tensor(5.0), lambda x: x),
    "list of a tensor": ([torch.tensor(1.0)], [torch.tensor(5.0)], lambda x: x[0]),
    "function": (lambda: 1.0, lambda: 5.0, lambda f: f()),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_changed_setting_applies_to_steps_and_new_episodes(name):
    before, after, read = SETTINGS[name]

    kind = type("Levels", (Own,), {"level": before, "read": read, "term": 3})

    def change(env):
        env.level = after

    expected, _ = batches(kind(N_ENVS, seed=0), "eager", change, n_steps=6)
    found, said = batches(kind(N_ENVS, seed=0), "trace", change, n_steps=6)
    assert not [one for one in said if "cannot be captured" in one]
    assert expected["rover", "observation"][0, 9, 0, 0] == 5  # a new episode, with the new level
    assert_same(expected, found)


class Held(Own):
    """Keeps a sum in an object; env 0 ends after three steps, the others run on."""

    def _reset(self, tensordict):
        self.held = self.make(torch.zeros(self.num_envs, 1, 1))
        return super()._reset(tensordict)

    def _step(self, tensordict):
        out = super()._step(tensordict)
        self.held = self.add(self.held, tensordict["rover", "action"])
        out["rover"]["reward"] = self.held.total if hasattr(self.held, "total") else self.held[0]
        ends = torch.full((self.num_envs,), 99)
        ends[0] = 3
        out["terminated"] = (self.steps + 1 >= ends).unsqueeze(-1)
        return out


class Slots(Held):
    make = staticmethod(World)

    def add(self, world, action):
        world.total = world.total + action
        return world


class Pair(Held):
    make = staticmethod(lambda x: (x, None))

    def add(self, pair, action):
        return pair[0] + action, None


@pytest.mark.parametrize("execution", ["eager", "trace"])
def test_tensors_of_objects_with_slots_are_state(execution):
    found, said = batches(Slots(N_ENVS, seed=0), execution, n_steps=4)
    assert not said
    rewards = found["next", "rover", "reward"][:2, :, 0, 0]
    assert rewards.tolist() == [[0.5, 1, 1.5] * 2 + [0.5, 1], [0.5 * i for i in range(1, 9)]]


def test_a_reset_of_some_envs_refuses_tensors_in_tuples():
    with pytest.raises(SimulatorStateError, match=r"a reset changes held\.0 for all envs"):
        batches(Pair(N_ENVS, seed=0), "eager", n_steps=4)
    with pytest.raises(SpecError, match=r"held\.0"):
        check_marl_env(Pair(N_ENVS, seed=0))
