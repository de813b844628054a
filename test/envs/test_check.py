"""check_marl_env passes correct environments and names state that a reset does not clear."""

import pytest
import torch
from camps import (
    Camp,
    E,
    SharesGenerator,
    Unseeded,
    WritesIntoObservation,
    clear_done_in_third_step,
)
from scripted import Script
from tensordict import TensorDict
from torchrl.data import Categorical, Unbounded
from torchrl.envs import ObservationNorm, RewardSum, StepCounter, TransformedEnv

from torchrl_marl import AgentSpec
from torchrl_marl.envs import MarlEnv, PadAgents, PettingZooEnv, VmasEnv, check_marl_env
from torchrl_marl.envs.toy import TOY_ENVS, Arena, SpeakerListener
from torchrl_marl.errors import ConfigError, SpecError


@pytest.mark.parametrize("batch_size", [(E,), (), (2, 2)])
def test_correct_environment_passes(batch_size):
    env = Camp(batch_size)
    report = check_marl_env(env, n_steps=9, make=lambda: Camp(batch_size))
    envs = {(): 1, (E,): 3, (2, 2): 4}[batch_size]
    assert report == (
        f"Camp keeps the rules: 2 agents in 1 group, 9 steps of {envs} envs, {2 * envs} episodes."
    )


def test_all_errors_are_listed():
    class Worse(WritesIntoObservation):
        def _step(self, tensordict):
            out = super()._step(tensordict)
            clear_done_in_third_step(self, out)
            out["scouts", "reward"] = out["scouts", "reward"] * torch.inf
            return out

    with pytest.raises(SpecError, match="Worse breaks") as caught:
        check_marl_env(Worse(), n_steps=9)
    lines = str(caught.value).splitlines()
    assert [line[:2] for line in lines[1:]] == [f"{i}." for i in range(1, len(lines))]
    for part in (
        "keep the flag of ended agents",
        "division by zero",
        "clone the simulator's buffers",
    ):
        assert part in str(caught.value)


def test_termination_at_the_time_limit_passes_with_a_hint():
    """Some games of Nim are over before the fifth move, some with it."""
    report = check_marl_env(TOY_ENVS["nim"](13, seed=0, max_steps=5), n_steps=6)
    assert "a time limit must be truncated" in report.partition("Hint: ")[2]


def test_environments_that_share_a_generator_are_reported():
    check_marl_env(SharesGenerator(), n_steps=5)
    with pytest.raises(SpecError, match="in one process .* keep all state"):
        check_marl_env(SharesGenerator(), n_steps=5, make=SharesGenerator)


def test_endless_episode_without_time_limit_raises():
    class Endless(Camp):
        max_steps = None

        def give(self):
            self.t = self.t % 2  # no agent gets old enough to die
            return super().give()

    with pytest.raises(
        SpecError, match="no episode ended in 6 steps.* give the environment a time lim"
    ):
        check_marl_env(Endless(), n_steps=6)


class Leftovers(MarlEnv):
    """Counts in attributes that no reset clears, and observes one of them."""

    def __init__(self, num_envs, resets=False, counts=True, **kwargs):
        super().__init__(num_envs, max_steps=4, **kwargs)
        self.register_agent(AgentSpec("bob", 2, Unbounded((1,)), Categorical(3)))
        self.level, self.counts = torch.zeros(num_envs), [0.0]
        self.resets, self.does_count = resets, counts

    def _reset(self, tensordict):
        self.place = torch.zeros(self.num_envs)
        if self.resets:
            self.level = torch.zeros(self.num_envs)
        return self.look()

    def _step(self, tensordict):
        self.place = self.place + 1
        self.level = self.level + tensordict["bob", "action"].sum(-1)
        self.counts = [self.counts[0] + self.does_count]
        out = self.look()
        out["bob", "reward"] = torch.zeros(self.num_envs, 2, 1)
        return out

    def look(self):
        seen = (self.place + self.level + self.counts[0]).view(-1, 1, 1).repeat(1, 2, 1)
        return TensorDict({"bob": {"observation": seen}})


@pytest.mark.parametrize(
    "resets, counts, words",
    [
        (False, True, "'counts[0]', 'level'"),
        (True, True, "'counts[0]'"),
        (False, False, "'level'"),
    ],
)
def test_state_that_reset_does_not_clear_is_named(resets, counts, words):
    with pytest.raises(SpecError) as caught:
        check_marl_env(Leftovers(E, resets, counts, seed=0), n_steps=9)
    message = str(caught.value)
    assert f"'_reset': it keeps {words} from the last episode" in message
    assert "generator" not in message and "set it in _reset" in message


def test_counter_without_effect_is_not_reported():
    class Counts(Unseeded):
        total = 0

        def _step(self, tensordict):
            self.total += 1
            return super()._step(tensordict)

    with pytest.raises(SpecError, match="the environment's own generator") as caught:
        check_marl_env(Counts(), n_steps=9)
    assert "total" not in str(caught.value)


def test_reset_that_clears_all_state_passes():
    check_marl_env(Leftovers(E, resets=True, counts=False, seed=0), n_steps=9)


@pytest.mark.environments
@pytest.mark.parametrize("scenario", ["give_way", "joint_passage"])
def test_noisy_observations_pass(scenario):
    env = VmasEnv(scenario, num_envs=E, seed=0, max_steps=4, obs_noise=0.1)
    assert "keeps the rules" in check_marl_env(env, n_steps=6)


def test_time_limits_of_adapters_and_transforms_are_found():
    world = Script("bob_0", [{}])
    check_marl_env(PettingZooEnv(world, max_steps=50, seed=0), n_steps=5)
    world.max_cycles = 60
    check_marl_env(PettingZooEnv(world, seed=0), n_steps=5)
    limited = TransformedEnv(VmasEnv("balance", num_envs=E, seed=0), StepCounter(max_steps=40))
    check_marl_env(limited, n_steps=5)
    check_marl_env(VmasEnv("balance", num_envs=E, seed=0, max_steps=40), n_steps=5)


def test_check_keeps_the_global_random_state():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    check_marl_env(Camp(), n_steps=3)
    assert torch.equal(torch.rand(2), expected)


def test_non_environment_raises():
    with pytest.raises(ConfigError, match="found a dict"):
        check_marl_env({})


@pytest.mark.environments
@pytest.mark.parametrize("name", TOY_ENVS)
def test_toys_pass(name):
    def make():
        return TOY_ENVS[name](E, seed=0, max_steps=5)

    assert "keeps the rules" in check_marl_env(make(), n_steps=12, make=make)


@pytest.mark.parametrize(
    ("cls", "kwargs"),
    [
        (Arena, {"kinds": 2, "n_actions": 6, "action_mask": True, "lives": 1, "late_spawn": 2}),
        (SpeakerListener, {"continuous_speech": True, "one_group": True}),
    ],
)
def test_groups_of_several_kinds_pass(cls, kwargs):
    check_marl_env(cls(E, seed=0, max_steps=5, **kwargs), n_steps=12)
    check_marl_env(TransformedEnv(cls(E, seed=0, max_steps=5, **kwargs), PadAgents()), n_steps=6)


def test_transform_of_observations_passes():
    """A partial reset returns the last output of the other envs before the transform."""
    halved = ObservationNorm(loc=0.0, scale=0.5, in_keys=[("agents", "observation")])
    check_marl_env(TransformedEnv(Arena(E, seed=0, max_steps=5), halved), n_steps=6)


def test_vmas_passes():
    env = VmasEnv("balance", num_envs=E, seed=0, max_steps=4, state="observations")
    assert "Hint" not in check_marl_env(TransformedEnv(env, RewardSum()), n_steps=6)
