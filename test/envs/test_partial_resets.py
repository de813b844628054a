"""Partial resets, snapshots, and state that all envs share."""

from weakref import WeakKeyDictionary

import pytest
import torch
from contract import assert_same, assert_same_rng, rng_states
from counting import Counting, play
from tensordict import TensorDict
from torchrl.data import Categorical, Unbounded
from torchrl.envs import TransformedEnv, check_env_specs
from torchrl.envs.transforms import RewardSum
from torchrl.envs.utils import step_mdp

from torchrl_marl.envs import MarlEnv
from torchrl_marl.envs.marl_env import graphs
from torchrl_marl.errors import SimulatorStateError
from torchrl_marl.specs import AgentSpec


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch):
    monkeypatch.setattr(graphs, "_known_slots", WeakKeyDictionary())


class Worlds(MarlEnv):
    """Keeps its state in every way that a partial reset must handle."""

    def __init__(self, num_envs=3, on_reset=None, **kwargs):
        super().__init__(num_envs, **kwargs)
        self.on_reset = on_reset
        self.register_agent(AgentSpec("car", 1, Unbounded((1,)), Categorical(2)))
        self.memory = torch.zeros(num_envs, 4)
        self.left, self.right = self.memory[:, :2], self.memory[:, 2:]
        self.start = torch.arange(float(num_envs)).unsqueeze(-1)
        self.register_buffer("buffer", torch.zeros(num_envs))
        self.things = {"a": torch.zeros(num_envs), ("b", 1): [torch.zeros(num_envs)]}
        self.square = torch.zeros(3, 3)
        self.scalar = 0
        self.rows = []

    def _reset(self, tensordict):
        self.memory.uniform_(1, 2)
        self.position = self.start
        self.buffer = torch.rand(self.num_envs)
        self.things["a"] = torch.rand(self.num_envs)
        self.things["b", 1][0] = self.things["a"]
        if self.on_reset is not None:
            self.on_reset(self)
        return TensorDict({"car": {"observation": torch.rand(self.num_envs, 1, 1)}})

    def _step(self, tensordict):
        self.left.add_(10)
        self.position = self.position + 1
        observation = torch.rand(self.num_envs, 1, 1)
        return TensorDict({"car": {"observation": observation, "reward": observation}})


def reset_first(env):
    *_, td = play(env, 1)
    td = step_mdp(td)
    td["_reset"] = torch.tensor([[True], [False], [False]])
    return env.reset(td.clone()), td


def test_partial_reset_keeps_views_and_constants():
    env = Worlds(seed=0)
    *_, td = play(env, 1)
    memory, things, buffer = env.memory.clone(), env.things["a"].clone(), env.buffer.clone()
    td = step_mdp(td)
    td["_reset"] = torch.tensor([[True], [False], [False]])
    after = env.reset(td.clone())
    assert torch.equal(env.memory[1:], memory[1:])
    assert not torch.equal(env.memory[0], memory[0])
    assert env.left.data_ptr() == env.memory.data_ptr()
    assert torch.equal(env.start, torch.arange(3.0).unsqueeze(-1))
    assert env.position.flatten().tolist() == [0, 2, 3]
    assert torch.equal(env.buffer[1:], buffer[1:])
    assert torch.equal(env.things["a"][1:], things[1:])
    assert env.things["b", 1][0] is env.things["a"]
    assert torch.equal(after["car", "observation"][1:], td["car", "observation"][1:])
    assert env.steps.tolist() == [0, 1, 1]


def test_snapshot_keeps_views():
    env = Worlds(seed=0)
    env.reset()
    snapshot = env.snapshot()
    memory = env.memory.clone()
    td = env.step(env.rand_action(env.reset()))
    env.restore(snapshot)
    assert torch.equal(env.memory, memory)
    env.step(env.rand_action(step_mdp(td)))
    assert torch.equal(env.memory[:, :2], memory[:, :2] + 10)
    assert env.left.data_ptr() == env.memory.data_ptr()


def set_to(name, value):
    return lambda env: setattr(env, name, value(env))


@pytest.mark.parametrize(
    ("on_reset", "message"),
    [
        (set_to("scalar", lambda env: env.scalar + 1), "changes scalar from 1 to 2"),
        (set_to("shared", lambda env: torch.rand(5)), r"writes shared, \[5\] before"),
        (set_to("single", lambda env: torch.rand(())), r"writes single, \[\] before"),
        # A table with as many rows as envs, which all of them share.
        (set_to("square", lambda env: torch.rand(3, 3)), r"writes square, \[3, 3\] before"),
        (lambda env: env.square.uniform_(), r"writes square, \[3, 3\] before"),
        (set_to("goal", lambda env: env.things if env.scalar else env.rows), None),
        (lambda env: env.rows.append(torch.zeros(3)), None),
        (
            lambda env: setattr(env, "rows", [torch.zeros(3)] if env.rows == [] else []),
            "removes rows.0",
        ),
    ],
)
def test_partial_reset_that_writes_shared_state_is_refused(on_reset, message):
    env = Worlds(on_reset=on_reset, seed=0)
    if message is None:
        reset_first(env)
        return
    with pytest.raises(SimulatorStateError, match=message):
        reset_first(env)


def test_probing_for_batched_state_has_no_side_effects():
    drawn = []
    for probed in (False, True):
        env, before = Worlds(seed=0), rng_states()
        env.reset()
        if probed:
            slots = {".".join(path): batched for path, batched in env._find_env_slots().items()}
            assert not slots["square"] and slots["memory"] and slots["left"] and slots["things.a"]
            assert slots["start"] and slots["_buffers.buffer"]
            assert_same_rng(before, rng_states())
        with torch.random.fork_rng():
            torch.manual_seed(0)
            drawn.append(env.rand_step(env.reset())["next"])
    assert_same(*drawn)


def test_equal_environments_are_probed_once(monkeypatch):
    probed, plain = [], graphs.slots_of_envs
    monkeypatch.setattr(graphs, "slots_of_envs", lambda *args: probed.append(1) or plain(*args))

    def slots(*args, square=3, **kwargs):
        env = Worlds(*args, **kwargs)
        env.square = torch.zeros(square, 3)
        env.reset()
        return env._find_env_slots()

    first = slots(seed=0)
    assert slots(seed=5) == slots(seed=0) == first and len(probed) == 1
    for n, world in enumerate([{"num_envs": 4}, {"square": 4}, {"on_reset": print}], 2):
        assert slots(**world)["memory",] and len(probed) == n
    assert slots(on_reset=print) and len(probed) == 5  # functions cannot be compared


def test_write_to_unprobed_attribute_is_refused():
    env = Worlds(seed=0)
    env.later = torch.zeros(3)
    env.on_reset = set_to("later", lambda env: torch.ones(3))
    with pytest.raises(
        SimulatorStateError, match="writes later, which environments of .* do not have"
    ):
        reset_first(env)


class OneSize(Worlds):
    """Cannot be built with another number of envs."""

    def __init__(self):
        super().__init__(3, seed=0)


def test_fixed_size_environment_resets_without_warning():
    env, before = OneSize(), rng_states()
    drawn = env.random_state.state_dict()
    with torch.random.fork_rng():
        assert env._find_env_slots() is None
    assert_same_rng(before, rng_states())
    torch.testing.assert_close(env.random_state.state_dict(), drawn, equal_nan=True)
    after, _ = reset_first(env)
    assert after["car", "observation"].shape == (3, 1, 1)


def test_ambiguous_table_in_a_fixed_size_environment_warns():
    class Landmarks(OneSize):
        def _reset(self, tensordict):
            self.places = torch.rand(3)  # of three landmarks, not of three envs
            return super()._reset(tensordict)

        def _step(self, tensordict):
            given = super()._step(tensordict)
            given["car", "reward"] = (self.position - self.places).amax(1).view(-1, 1, 1)
            return given

    with pytest.warns(
        UserWarning, match=r"Landmarks: .* each row of places as .*num_envs"
    ) as caught:
        env = Landmarks()
        reset_first(env)
        reset_first(env)
    assert len(caught) == 1


@pytest.mark.parametrize("make", [lambda cls: cls(3, seed=0), lambda cls: cls(num_envs=3, seed=0)])
def test_env_that_forwards_its_arguments_is_built_in_other_sizes(make):
    class HandsOn(Worlds):
        def __init__(self, *args, extra=1, **kwargs):
            super().__init__(*args, **kwargs)

    env = make(HandsOn)
    assert env.twin(7).num_envs == 7
    assert {(".".join(path)): x for path, x in env._find_env_slots().items()}["square"] is False


def test_snapshot_with_a_generator_is_refused():
    env = Counting()
    env.generator = torch.Generator()
    with pytest.raises(SimulatorStateError, match="generator is a Generator"):
        env.snapshot()


def test_torchrl_attributes_are_not_simulator_state():
    env = Counting(3, max_steps=2)
    TransformedEnv(env, RewardSum()).rollout(5, break_when_any_done=False)
    check_env_specs(env)
    _ = env.fake_tensordict(), env.action_keys, env.state_spec, env.done_keys_groups
    world = {name for name in vars(env) if (name,) not in env._not_simulator}
    assert world == {"_episode", "_buffers", "_modules", "count", "seen", "script"}
