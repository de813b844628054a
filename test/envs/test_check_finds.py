"""check_marl_env finds errors, suggests a fix, and reports each error once."""

import pytest
import torch
from camps import (
    Crashes,
    E,
    IgnoresSeed,
    Overwrites,
    ResetsAll,
    RewardsDeadActions,
    StaysDone,
    Unseeded,
    WritesActions,
    WritesIntoObservation,
    camp_with_change,
    camp_with_specs,
    camp_with_value,
    clear_done_in_third_step,
    end_all_agents,
    end_by,
    end_with_both_flags,
    flat_reward,
    forget_mask,
    mask_agents_at_the_limit,
    never_end,
    other_dtype,
    spec_without,
)

from torchrl_marl.envs import check_marl_env
from torchrl_marl.errors import SpecError

# Environment, key that is named, what was found, and the fix.
ZOO = {
    "a group map without an agent": (
        camp_with_specs(group_map=lambda env: {"scouts": ["ann"]}),
        "group_map",
        "'bob'] are in no group",
        "put each agent into one group",
    ),
    "a group map without a group": (
        camp_with_specs(group_map=lambda env: {"others": ["ann", "bob"]}),
        "group_map",
        "group 'scouts' has actions but is not in it",
        "add 'scouts'",
    ),
    "an agent in two groups": (
        camp_with_specs(group_map=lambda env: {"scouts": ["ann", "ann", "bob"]}),
        "group_map",
        "an agent is in two",
        "put each agent into one group",
    ),
    "no observation": (
        camp_with_specs(
            observation_spec=spec_without("observation_spec", ("scouts", "observation"))
        ),
        "group_map",
        "has no 'observation'",
        "declare these keys",
    ),
    "no truncated key": (
        camp_with_specs(done_spec=spec_without("done_spec", "truncated")),
        "'truncated'",
        "it is not declared",
        "at the root of the done spec",
    ),
    "half of the agents' flags": (
        camp_with_specs(done_spec=spec_without("done_spec", ("scouts", "truncated"))),
        "('scouts', 'done')",
        "declares ['done', 'terminated'] only",
        "add the missing flags",
    ),
    "no mask": (
        camp_with_specs(observation_spec=spec_without("observation_spec", ("scouts", "mask"))),
        "('scouts', 'mask')",
        "done flags but no mask",
        "add it to the observation spec",
    ),
    "a reward without its last dim": (
        camp_with_specs(reward_spec=flat_reward),
        "('scouts', 'reward')",
        "its spec is [3, 2] of float32, expected [3, 2, 1]",
        "return one number per agent",
    ),
    "a mask that is not given": (
        camp_with_change(forget_mask),
        "('scouts', 'mask')",
        "it is declared but not returned, expected [3, 2] of bool",
        "return it in every step",
    ),
    "another dtype": (
        camp_with_change(other_dtype),
        "('scouts', 'observation')",
        "in step 1 it is [3, 2, 2] of float64",
        "return it as declared",
    ),
    "what nobody declared": (
        camp_with_change(lambda env, out: out.set("extra", torch.zeros(E, 1))),
        "'specs'",
        "keys of the specs and data do not match",
        "declare exactly what is returned",
    ),
    "a time limit that is terminated": (
        end_by(terminated=True),
        "'truncated'",
        "reached the time limit of 4 steps are terminated",
        "set truncated there",
    ),
    "an end at the first death": (
        end_by(terminated=False),
        "'done'",
        "in step 2 at [0, 0] the episode ends while an agent lives",
        "do not end the episode at a death",
    ),
    "done without a cause": (
        camp_with_value("truncated", value=False),
        "'done'",
        "in step 4 at [0, 0] done is True, but neither terminated nor truncated is",
        "terminated if the environment ended the episode",
    ),
    "a cause without done": (
        camp_with_value("done", value=False),
        "'done'",
        "done is False, but terminated or truncated is True",
        "set done if either is set",
    ),
    "both causes": (
        camp_with_change(end_with_both_flags),
        "('scouts', 'done')",
        "both terminated and truncated",
        "terminated if the environment ended the episode",
    ),
    "a done that flickers": (
        camp_with_change(clear_done_in_third_step),
        "('scouts', 'done')",
        "in step 3 at [0, 0, 0] it is False again",
        "keep the flag of ended agents",
    ),
    "nobody is left": (
        camp_with_change(end_all_agents),
        "'done'",
        "all agents ended, but the episode continues",
        "set done",
    ),
    "the dead act": (
        camp_with_value("scouts", "mask", value=True),
        "('scouts', 'mask')",
        "it is True after the agent terminated",
        "set the mask of terminated agents to False",
    ),
    "asleep at the time limit": (
        camp_with_change(mask_agents_at_the_limit),
        "('scouts', 'mask')",
        "in step 4 at [0, 1] it is False for a living agent in a truncated episode",
        "keep the mask of living agents",
    ),
    "done after a reset": (
        StaysDone,
        "('scouts', 'done')",
        "it is True at the start of an episode",
        "clear the flags",
    ),
    "NaN is seen": (
        camp_with_value("scouts", "observation", value=torch.nan),
        "('scouts', 'observation')",
        "it is [nan]",
        "valid observations of living agents",
    ),
    "beyond the bounds": (
        camp_with_value("scouts", "observation", value=1.5),
        "('scouts', 'observation')",
        "it is [1.5]",
        "declare correct bounds",
    ),
    "NaN is earned": (
        camp_with_value("scouts", "reward", value=torch.nan),
        "('scouts', 'reward')",
        "it is [nan]",
        "division by zero",
    ),
    "nothing is legal": (
        camp_with_value("scouts", "action_mask", value=False),
        "('scouts', 'action_mask')",
        "an agent that acts has no legal action",
        "make an action legal",
    ),
    "a buffer": (
        WritesIntoObservation,
        "('next', 'scouts', 'observation')",
        "the output of the previous step is overwritten",
        "clone the simulator's buffers",
    ),
    "writes to the actions": (
        WritesActions,
        "('scouts', 'action')",
        "the step overwrites the actions of its input",
        "clone the actions",
    ),
    "a reset of all": (
        ResetsAll,
        "_reset",
        "a reset of the first env changes ('scouts', 'observation') of other envs",
        "reset only the envs of td['_reset']",
    ),
    "the terminal observation is lost": (
        Overwrites,
        "('next', 'observation')",
        "it is the first observation of the next one",
        "before the environment is reset",
    ),
    "never ends": (
        camp_with_change(never_end),
        "'truncated'",
        "continues beyond the time limit of 4 steps",
        "count the steps of each env",
    ),
    "a seed is not heard": (
        IgnoresSeed,
        "set_seed",
        "the same seed gives a different ('scouts', 'observation')",
        "the environment's own generator",
    ),
    "draws from everybody's": (
        Unseeded,
        "set_seed",
        "the same seed gives a different",
        "Hint: the environment draws from the global random state",
    ),
    "hears the dead": (
        RewardsDeadActions,
        "'mask'",
        "('next', 'scouts', 'reward') changes with the actions of masked agents",
        "replace them by zeros, where the mask is False",
    ),
    "crashes": (
        Crashes,
        "'step'",
        "playing fails with ZeroDivisionError: no food left",
        "fix this error",
    ),
}


@pytest.mark.parametrize("name", ZOO)
def test_each_error_is_found_with_its_fix(name):
    make, key, found, fix = ZOO[name]
    with pytest.raises(SpecError) as caught:
        check_marl_env(make(), n_steps=9)
    message = str(caught.value)
    line = next(line for line in message.splitlines() if found in line)
    assert line[0].isdigit() and key in line
    assert ", expected " in line and ". Fix: " in line
    assert fix in (message if fix.startswith("Hint") else line)


@pytest.mark.parametrize("name", ["done without a cause", "NaN is earned", "the dead act"])
def test_one_error_is_reported_once(name):
    with pytest.raises(SpecError) as caught:
        check_marl_env(ZOO[name][0](), n_steps=9)
    assert str(caught.value).count("Fix:") == 1, caught.value
