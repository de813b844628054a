"""check_marl_env: finds what is wrong, says what mends it, and finds nothing where all is well."""

import pytest
import torch
from scripted import Script
from tensordict import TensorDict
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase, RewardSum, StepCounter, TransformedEnv

from torchrl_marl import AgentSpec
from torchrl_marl.envs import MarlEnv, PadAgents, PettingZooEnv, VmasEnv, check_marl_env
from torchrl_marl.envs.toy import TOY_ENVS, Arena, SpeakerListener
from torchrl_marl.errors import ConfigError, SpecError

E, N = 3, 2
SHARED = torch.Generator()


def flag(*shape):
    return Categorical(2, shape=shape, dtype=torch.bool)


class Camp(EnvBase):
    """A right one: the first agent dies in the second step, the time limit is four steps."""

    max_steps = 4

    def __init__(self, batch_size=(E,)):
        super().__init__(batch_size=torch.Size(batch_size))
        self.group_map = {"scouts": ["ann", "bob"]}
        self.agent_names = ["ann", "bob"]
        n = (*batch_size, N)
        flags = {key: flag(*n, 1) for key in ("done", "terminated", "truncated")}
        self.observation_spec = Composite(
            scouts=Composite(
                observation=Bounded(0, 1, (*n, 2)),
                mask=flag(*n),
                action_mask=flag(*n, 3),
                shape=n,
            ),
            shape=batch_size,
        )
        self.action_spec = Composite(
            scouts=Composite(action=Categorical(3, shape=n), shape=n), shape=batch_size
        )
        self.reward_spec = Composite(
            scouts=Composite(reward=Unbounded((*n, 1)), shape=n), shape=batch_size
        )
        self.done_spec = Composite(
            {key: flag(*batch_size, 1) for key in flags} | {"scouts": Composite(flags, shape=n)},
            shape=batch_size,
        )
        self.generator = torch.Generator().manual_seed(0)
        self.t = torch.zeros(*batch_size, 1, dtype=torch.int64)
        self.seen = torch.zeros(*n, 2)
        self.sum = torch.zeros(*n)

    def _set_seed(self, seed):
        self.generator.manual_seed(seed)

    def draw(self):
        return torch.rand(*self.batch_size, N, 2, generator=self.generator)

    def _reset(self, tensordict=None, **kwargs):
        every = torch.ones_like(self.t, dtype=torch.bool)
        fresh = every if tensordict is None else tensordict.get("_reset", every)
        self.t = torch.where(fresh, 0, self.t)
        self.seen = torch.where(fresh.unsqueeze(-1), self.draw(), self.seen)
        return self.give()

    def _step(self, tensordict):
        self.t = self.t + 1
        self.seen = self.draw()
        mask = self.give()["scouts", "mask"] | (self.t == 2)
        action = torch.where(mask, tensordict["scouts", "action"], 0)
        out = self.give()
        out["scouts", "reward"] = action.float().unsqueeze(-1)
        return out

    def give(self):
        n = (*self.batch_size, N, 1)
        dead = torch.zeros(n, dtype=torch.bool)
        dead[..., 0, :] = self.t >= 2
        late = (self.t >= 4).unsqueeze(-1).expand(n) & ~dead
        root = {"terminated": torch.zeros_like(self.t, dtype=torch.bool), "truncated": self.t >= 4}
        scouts = {
            "observation": self.seen,
            "mask": ~dead.squeeze(-1),
            "action_mask": torch.ones(*n[:-1], 3, dtype=torch.bool),
            "terminated": dead,
            "truncated": late,
            "done": dead | late,
        }
        source = {**root, "done": root["truncated"], "scouts": scouts}
        td = TensorDict(source, self.batch_size)
        td["scouts"].batch_size = n[:-1]
        return td


def wrong(change):
    """A camp of which a step gives something else."""

    class Wrong(Camp):
        def _step(self, tensordict):
            out = super()._step(tensordict)
            change(self, out)
            return out

    return Wrong


def put(*key, value):
    def change(env, out):
        key_ = key if len(key) > 1 else key[0]
        out[key_] = torch.full_like(out[key_], value)

    return wrong(change)


def end_by(terminated):
    def change(env, out):
        over = out["scouts", "terminated"].any(-2)
        out["terminated"], out["truncated"], out["done"] = over, over & False, over

    def limit(env, out):
        out["terminated"], out["truncated"] = out["truncated"], out["terminated"]
        over = out["terminated"].unsqueeze(-2) | out["scouts", "terminated"]
        out["scouts", "terminated"], out["scouts", "truncated"] = over, over & False
        out["scouts", "mask"] = ~over.squeeze(-1)

    return wrong(limit if terminated else change)


def flicker(env, out):
    out["scouts", "done"] = out["scouts", "done"] & (env.t != 3).unsqueeze(-1)
    out["scouts", "terminated"] = out["scouts", "terminated"] & (env.t != 3).unsqueeze(-1)


def both(env, out):
    out["scouts", "truncated"] = out["scouts", "done"].clone()


def never(env, out):
    for key in ("done", "truncated"):
        out[key] = out[key] & False
        dead = out["scouts", "terminated"]
        out["scouts", key] = dead.clone() if key == "done" else dead & False


def nobody_left(env, out):
    late = (env.t >= 3).unsqueeze(-1)
    for key in ("done", "terminated"):
        out["scouts", key] = out["scouts", key] | late
    out["scouts", "truncated"] = out["scouts", "truncated"] & False
    out["scouts", "mask"] = out["scouts", "mask"] & ~late.squeeze(-1)


def asleep_at_the_limit(env, out):
    out["scouts", "mask"] = out["scouts", "mask"] & ~out["truncated"]


class Buffer(Camp):
    """Writes into the observation it gave."""

    def draw(self):
        return self.seen.copy_(super().draw())


class ResetsAll(Camp):
    def _reset(self, tensordict=None, **kwargs):
        return super()._reset(None)


class Unseeded(Camp):
    def draw(self):
        return torch.rand(*self.batch_size, N, 2)


class Deaf(Camp):
    def _set_seed(self, seed):
        pass


class Shared(Camp):
    """All camps draw from one generator."""

    def __init__(self):
        super().__init__()
        self.generator = SHARED


class HearsTheDead(Camp):
    def _step(self, tensordict):
        out = super()._step(tensordict)
        out["scouts", "reward"] = tensordict["scouts", "action"].float().unsqueeze(-1)
        return out


class RefusesTheDead(Camp):
    def _step(self, tensordict):
        dead = ~self.give()["scouts", "mask"]
        if self.played and not (tensordict["scouts", "action"][dead] == 0).all():
            raise RuntimeError("an action of the dead")
        return super()._step(tensordict)

    @property
    def played(self):
        return True


class Overwrites(Camp):
    """The world starts anew inside the step; the reset has nothing left to do."""

    def _step(self, tensordict):
        out = super()._step(tensordict)
        self.over = out["done"]
        self.seen = torch.where(self.over.unsqueeze(-1), self.draw(), self.seen)
        out["scouts", "observation"] = self.seen
        return out

    def _reset(self, tensordict=None, **kwargs):
        seen = self.seen
        out = super()._reset(tensordict)
        if tensordict is not None and "_reset" in tensordict.keys():
            self.seen = out["scouts", "observation"] = seen
        return out


class WritesActions(Camp):
    def _step(self, tensordict):
        out = super()._step(tensordict)
        tensordict["scouts", "action"].zero_()
        return out


class StaysDone(Camp):
    def _reset(self, tensordict=None, **kwargs):
        out = super()._reset(tensordict)
        out["scouts", "done"][:, 0] = out["scouts", "terminated"][:, 0] = True
        out["scouts", "mask"][:, 0] = False
        return out


class Crashes(Camp):
    def _step(self, tensordict):
        raise ZeroDivisionError("no food left")


def declared(**changes):
    """A camp with other specs."""

    def make():
        env = Camp()
        for name, spec in changes.items():
            setattr(env, name, spec(env))
        return env

    return make


def without(spec, key):
    def less(env):
        own = getattr(env, spec).clone()
        del own[key]
        return own

    return less


def flat_reward(env):
    return Composite(scouts=Composite(reward=Unbounded((E, N)), shape=(E, N)), shape=(E,))


def forget_mask(env, out):
    del out["scouts", "mask"]


def other_dtype(env, out):
    out["scouts", "observation"] = out["scouts", "observation"].double()


# Environment, key that is named, what was found, and the fix.
ZOO = {
    "a group map without an agent": (
        declared(group_map=lambda env: {"scouts": ["ann"]}),
        "group_map",
        "'bob'] are in no group",
        "put each agent in one",
    ),
    "a group map without a group": (
        declared(group_map=lambda env: {"others": ["ann", "bob"]}),
        "group_map",
        "group 'scouts' has actions but is not in it",
        "add 'scouts'",
    ),
    "an agent in two groups": (
        declared(group_map=lambda env: {"scouts": ["ann", "ann", "bob"]}),
        "group_map",
        "an agent is in two",
        "put each agent in one",
    ),
    "no observation": (
        declared(observation_spec=without("observation_spec", ("scouts", "observation"))),
        "group_map",
        "has no 'observation'",
        "declare these keys",
    ),
    "no truncated key": (
        declared(done_spec=without("done_spec", "truncated")),
        "'truncated'",
        "it is not declared",
        "at the root of the done spec",
    ),
    "half of the agents' flags": (
        declared(done_spec=without("done_spec", ("scouts", "truncated"))),
        "('scouts', 'done')",
        "declares ['done', 'terminated'] only",
        "add the flags",
    ),
    "no mask": (
        declared(observation_spec=without("observation_spec", ("scouts", "mask"))),
        "('scouts', 'mask')",
        "ends of their own but no mask",
        "give it in the observation spec",
    ),
    "a reward without its last dim": (
        declared(reward_spec=flat_reward),
        "('scouts', 'reward')",
        "its spec is [3, 2] of float32, expected [3, 2, 1]",
        "give one number an agent",
    ),
    "a mask that is not given": (
        wrong(forget_mask),
        "('scouts', 'mask')",
        "it is declared but not given, expected [3, 2] of bool",
        "give it in every step",
    ),
    "another dtype": (
        wrong(other_dtype),
        "('scouts', 'observation')",
        "in step 1 it is [3, 2, 2] of float64",
        "give what is declared",
    ),
    "what nobody declared": (
        wrong(lambda env, out: out.set("extra", torch.zeros(E, 1))),
        "'specs'",
        "keys of the specs and data do not match",
        "declare what is given",
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
        put("truncated", value=False),
        "'done'",
        "in step 4 at [0, 0] done is True without a cause",
        "terminated if the world ended the episode",
    ),
    "a cause without done": (
        put("done", value=False),
        "'done'",
        "done is False, but a cause of it is True",
        "done where either is",
    ),
    "both causes": (
        wrong(both),
        "('scouts', 'done')",
        "both terminated and truncated",
        "terminated if the world ended the episode",
    ),
    "a done that flickers": (
        wrong(flicker),
        "('scouts', 'done')",
        "in step 3 at [0, 0, 0] it is False again",
        "remember who has ended",
    ),
    "nobody is left": (
        wrong(nobody_left),
        "'done'",
        "all agents ended, but the episode goes on",
        "set done",
    ),
    "the dead act": (
        put("scouts", "mask", value=True),
        "('scouts', 'mask')",
        "it is True after the agent terminated",
        "take the terminated out of the mask",
    ),
    "asleep at the time limit": (
        wrong(asleep_at_the_limit),
        "('scouts', 'mask')",
        "in step 4 at [0, 1] it is False for a living agent whose episode is truncated",
        "keep the mask of the living",
    ),
    "done after a reset": (
        StaysDone,
        "('scouts', 'done')",
        "it is True at an episode's begin",
        "clear the flags",
    ),
    "NaN is seen": (
        put("scouts", "observation", value=torch.nan),
        "('scouts', 'observation')",
        "it is [nan]",
        "what a living agent really sees",
    ),
    "beyond the bounds": (
        put("scouts", "observation", value=1.5),
        "('scouts', 'observation')",
        "it is [1.5]",
        "declare bounds that hold",
    ),
    "NaN is earned": (
        put("scouts", "reward", value=torch.nan),
        "('scouts', 'reward')",
        "it is [nan]",
        "divides by zero",
    ),
    "nothing is legal": (
        put("scouts", "action_mask", value=False),
        "('scouts', 'action_mask')",
        "an agent that acts has no legal action",
        "make an action legal",
    ),
    "a buffer": (
        Buffer,
        "('next', 'scouts', 'observation')",
        "the values given a step earlier are overwritten",
        "clone the simulator's buffers",
    ),
    "writes to the actions": (
        WritesActions,
        "('scouts', 'action')",
        "the step writes to the actions that it is asked for",
        "clone the actions",
    ),
    "a reset of all": (
        ResetsAll,
        "_reset",
        "a reset of the first env changes ('scouts', 'observation') of others",
        "reset the envs of td['_reset'] only",
    ),
    "the terminal observation is lost": (
        Overwrites,
        "('next', 'observation')",
        "it is the first one of the next episode",
        "before the world is reset",
    ),
    "never ends": (
        wrong(never),
        "'truncated'",
        "goes on beyond the time limit of 4 steps",
        "count each env's own steps",
    ),
    "a seed is not heard": (
        Deaf,
        "set_seed",
        "the same seed gives another ('scouts', 'observation')",
        "a generator of the environment's own",
    ),
    "draws from everybody's": (
        Unseeded,
        "set_seed",
        "the same seed gives another",
        "Hint: the environment draws from the process's random state",
    ),
    "hears the dead": (
        HearsTheDead,
        "'mask'",
        "('next', 'scouts', 'reward') changes with what they do who do not act",
        "put zeros, wherever the mask is False",
    ),
    "crashes": (
        Crashes,
        "'step'",
        "playing fails with ZeroDivisionError: no food left",
        "mend what the message says",
    ),
}


@pytest.mark.parametrize("batch_size", [(E,), (), (2, 2)])
def test_a_right_one_passes(batch_size):
    env = Camp(batch_size)
    report = check_marl_env(env, n_steps=9, make=lambda: Camp(batch_size))
    envs = {(): 1, (E,): 3, (2, 2): 4}[batch_size]
    assert report == (
        f"Camp keeps the rules: 2 agents in 1 group, 9 steps of {envs} envs, {2 * envs} episodes."
    )


@pytest.mark.parametrize("name", ZOO)
def test_what_is_wrong_is_found_and_named(name):
    make, key, found, fix = ZOO[name]
    with pytest.raises(SpecError) as caught:
        check_marl_env(make(), n_steps=9)
    message = str(caught.value)
    line = next(line for line in message.splitlines() if found in line)
    assert line[0].isdigit() and key in line
    assert ", expected " in line and ". Fix: " in line
    assert fix in (message if fix.startswith("Hint") else line)


@pytest.mark.parametrize("name", ["done without a cause", "NaN is earned", "the dead act"])
def test_one_thing_wrong_is_said_once(name):
    with pytest.raises(SpecError) as caught:
        check_marl_env(ZOO[name][0](), n_steps=9)
    assert str(caught.value).count("Fix:") == 1, caught.value


def test_all_that_is_wrong_is_listed():
    class Worse(Buffer):
        def _step(self, tensordict):
            out = super()._step(tensordict)
            flicker(self, out)
            out["scouts", "reward"] = out["scouts", "reward"] * torch.inf
            return out

    with pytest.raises(SpecError, match="Worse breaks") as caught:
        check_marl_env(Worse(), n_steps=9)
    lines = str(caught.value).splitlines()
    assert [line[:2] for line in lines[1:]] == [f"{i}." for i in range(1, len(lines))]
    for part in ("remember who has ended", "divides by zero", "clone the simulator's buffers"):
        assert part in str(caught.value)


def test_a_world_that_ends_by_itself_may_do_so_at_the_limit():
    """Some games of Nim are over before the fifth move, some with it."""
    report = check_marl_env(TOY_ENVS["nim"](13, seed=0, max_steps=5), n_steps=6)
    assert "a time limit has to be truncated" in report.partition("Hint: ")[2]


def test_two_that_share_a_generator():
    check_marl_env(Shared(), n_steps=5)
    with pytest.raises(SpecError, match="side by side .* keep all state"):
        check_marl_env(Shared(), n_steps=5, make=Shared)


def test_no_end_and_no_limit_asks_for_one():
    class Endless(Camp):
        max_steps = None

        def give(self):
            self.t = self.t % 2  # nobody grows old enough to die
            return super().give()

    with pytest.raises(SpecError, match="no episode ended in 6 steps.* give the world a time lim"):
        check_marl_env(Endless(), n_steps=6)


class Leftovers(MarlEnv):
    """Counts in attributes that no reset begins anew, and shows one of them."""

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
def test_what_a_reset_leaves_as_it_was_is_named(resets, counts, words):
    with pytest.raises(SpecError) as caught:
        check_marl_env(Leftovers(E, resets, counts, seed=0), n_steps=9)
    message = str(caught.value)
    assert f"'_reset': it leaves {words} as the last episode had it" in message
    assert "generator" not in message and "set it in _reset" in message


def test_a_count_that_changes_nothing_is_not_blamed():
    class Counts(Unseeded):
        total = 0

        def _step(self, tensordict):
            self.total += 1
            return super()._step(tensordict)

    with pytest.raises(SpecError, match="generator of the environment's own") as caught:
        check_marl_env(Counts(), n_steps=9)
    assert "total" not in str(caught.value)


def test_a_reset_that_begins_all_anew_passes():
    check_marl_env(Leftovers(E, resets=True, counts=False, seed=0), n_steps=9)


@pytest.mark.parametrize("scenario", ["give_way", "joint_passage"])
def test_noisy_observations_pass(scenario):
    env = VmasEnv(scenario, num_envs=E, seed=0, max_steps=4, obs_noise=0.1)
    assert "keeps the rules" in check_marl_env(env, n_steps=6)


def test_limits_that_an_adapter_or_a_transform_knows_are_known():
    world = Script("bob_0", [{}])
    check_marl_env(PettingZooEnv(world, max_steps=50, seed=0), n_steps=5)
    world.max_cycles = 60
    check_marl_env(PettingZooEnv(world, seed=0), n_steps=5)
    limited = TransformedEnv(VmasEnv("balance", num_envs=E, seed=0), StepCounter(max_steps=40))
    check_marl_env(limited, n_steps=5)
    check_marl_env(VmasEnv("balance", num_envs=E, seed=0, max_steps=40), n_steps=5)


def test_the_process_draws_on_as_if_nothing_were():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    check_marl_env(Camp(), n_steps=3)
    assert torch.equal(torch.rand(2), expected)


def test_what_is_no_environment():
    with pytest.raises(ConfigError, match="found a dict"):
        check_marl_env({})


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


def test_vmas_passes():
    env = VmasEnv("balance", num_envs=E, seed=0, max_steps=4, state="observations")
    assert "Hint" not in check_marl_env(TransformedEnv(env, RewardSum()), n_steps=6)
