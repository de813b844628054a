"""Declarations and outputs of MarlEnv subclasses that are refused."""

import pytest
import torch
from counting import Counting, counting_with, play
from tensordict import TensorDict
from torchrl.data import Categorical, Composite, Unbounded

from torchrl_marl.envs import MarlEnv
from torchrl_marl.errors import ConfigError, SpecError
from torchrl_marl.specs import AgentSpec


@pytest.mark.parametrize(
    ("changes", "remove", "message"),
    [
        (
            {("cats", "reward"): torch.zeros(2, 2)},
            (),
            r"Wrong._step: \('cats', 'reward'\) has shape \[2, 2\], expected \[2, 2, 1\]",
        ),
        (
            {("cats", "observation"): torch.zeros(2, 3, 3)},
            (),
            r"\('cats', 'observation'\) has shape \[2, 3, 3\], expected \[2, 2, 3\]",
        ),
        (
            {("dog", "observation"): torch.zeros(2, 1, 1).double()},
            (),
            r"\('dog', 'observation'\) is torch.float64, expected torch.float32",
        ),
        ({("cats", "rewards"): torch.zeros(2, 2, 1)}, (), "did you mean 'reward'"),
        ({"birds": TensorDict({}, [2])}, (), "returned 'birds', which was not declared"),
        ({"state": torch.zeros(2, 1)}, (), "returned 'state', which was not declared"),
        ({}, ["dog"], "returned no 'dog'"),
        ({}, [("dog", "reward")], r"returned no \('dog', 'reward'\)"),
        ({("dog", "terminated"): torch.zeros(2, 1, 1)}, (), "expected torch.bool"),
        ({("dog", "mask"): torch.ones(2, dtype=torch.bool)}, (), r"shape \[2\], expected \[2, 1\]"),
        ({"terminated": torch.ones(2, dtype=torch.bool)}, (), r"expected \[2, 1\]"),
        ({"dog": torch.zeros(2)}, (), "'dog' as a Tensor, expected a TensorDict"),
    ],
)
def test_step_output_that_contradicts_the_specs_raises(changes, remove, message):
    with pytest.raises(SpecError, match=message):
        list(play(counting_with(changes, remove), 1))


def test_invalid_actions_raise():
    env = Counting()
    td = env.rand_action(env.reset())
    with pytest.raises(SpecError, match=r"\('cats', 'action'\) has shape \[2, 2\]"):
        env.step(td.clone().set(("cats", "action"), torch.zeros(2, 2)))
    with pytest.raises(SpecError, match=r"\('dog', 'action'\) is nothing"):
        env.step(td.exclude(("dog", "action")))


def test_in_place_write_to_earlier_output_raises():
    class Sloppy(MarlEnv):
        def __init__(self):
            super().__init__(2)
            self.register_agent(AgentSpec("car", 1, Unbounded((1,)), Categorical(2)))

        def _reset(self, tensordict):
            self.position = torch.zeros(2, 1, 1)
            return TensorDict({"car": {"observation": self.position}})

        def _step(self, tensordict):
            self.position += 1
            reward = torch.zeros(2, 1, 1)
            return TensorDict({"car": {"observation": self.position, "reward": reward}})

    with pytest.raises(SpecError, match=r"writes in place to its earlier output \('car', 'obs"):
        list(play(Sloppy(), 2))


def test_invalid_registrations_raise():
    car = AgentSpec("car", 2, Unbounded((1,)), Categorical(2))
    bus = AgentSpec("bus", 2, Unbounded((4,)), Categorical(2))
    env = Counting()
    with pytest.raises(ConfigError, match="registered too late"):
        env.register_agent(car)

    class Declares(MarlEnv):
        def __init__(self, *calls):
            super().__init__(2)
            for spec, group in calls:
                self.register_agent(spec, group)

        def _reset(self, tensordict): ...

        _step = _reset

    assert len(Declares((car, "cars"), (bus, "cars")).group_map["cars"]) == 4
    with pytest.raises(ConfigError, match="use another name"):
        Declares((car, "a"), (car, "b"))
    with pytest.raises(ValueError, match="reserved"):
        Declares((car, "next"))
    with pytest.raises(ConfigError, match="has no agents"):
        Declares().reset()
    with pytest.raises(SpecError, match="returned a NoneType, expected a TensorDict"):
        Declares((car, None)).reset()
    with pytest.raises(ConfigError, match="num_envs is 0"):
        Counting(0)
    with pytest.raises(ConfigError, match="max_steps is 0"):
        Counting(2, max_steps=0)
    with pytest.raises(ConfigError, match="max_steps is 2.5, expected a whole number"):
        Counting(2, max_steps=2.5)
    with pytest.raises(ConfigError, match="step before the first reset"):
        Counting().step(Counting().rand_action())


def test_mask_returned_only_by_reset_is_refused():
    """Otherwise waiting agents would silently act from the first step on."""

    class Forgets(MarlEnv):
        def __init__(self):
            super().__init__(3, seed=0)
            self.register_agent(AgentSpec("a", 2, Unbounded((1,)), Unbounded((1,))))

        def _reset(self, tensordict):
            waits = torch.tensor([True, False]).repeat(3, 1)
            return {"a": {"observation": torch.zeros(3, 2, 1), "mask": waits}}

        def _step(self, tensordict):
            return {"a": {"observation": torch.zeros(3, 2, 1), "reward": torch.zeros(3, 2, 1)}}

    with pytest.raises(SpecError, match="_step returned no .*mask.*, but _reset did"):
        Forgets().rollout(2)


@pytest.mark.parametrize(
    "spec", [Composite(x=Unbounded((2,))), Categorical(4), Unbounded(()), torch.zeros(3)]
)
def test_state_spec_must_be_a_float_tensor(spec):
    class World(MarlEnv):
        def __init__(self, spec):
            super().__init__(3, seed=0)
            self.register_state(spec)

        def _reset(self, tensordict):
            return {}

        _step = _reset

    with pytest.raises(ConfigError, match="the state's spec is .*, expected one of floats"):
        World(spec)


def test_second_state_is_refused():
    class World(MarlEnv):
        def __init__(self):
            super().__init__(3, seed=0)
            self.register_state(Unbounded((2,)))
            self.register_state(Unbounded((1,)))

        def _reset(self, tensordict):
            return {}

        _step = _reset

    with pytest.raises(ConfigError, match="a state is already registered"):
        World()
