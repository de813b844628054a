"""Invalid outputs of heterogeneous environments, and actions outside their specs."""

import pytest
import torch
from pets import CAT, Pets, step
from tensordict import TensorDict
from torchrl.data import Bounded, Categorical, Composite, OneHot, Unbounded
from torchrl.envs.utils import step_mdp

from torchrl_marl.errors import ConfigError, SpecError
from torchrl_marl.specs import AgentSpec


class Wrong(Pets):
    def __init__(self, method="_step", **changes):
        super().__init__()
        self.method, self.changes = method, changes

    def _give(self, **extra):
        out = super()._give(**extra)
        if self.method == ("_step" if extra else "_reset"):
            for name, value in self.changes.items():
                *path, leaf = ("pets", *name.split("__"))
                holder = out
                for part in path:
                    holder = holder[part]
                if value is None:
                    del holder[leaf]
                else:
                    holder[leaf] = value
        return out


OBSERVATION = {"cat__observation": torch.zeros(2, 2, 2)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            OBSERVATION,
            r"Wrong._reset: \('pets', 'cat', 'observation'\) has shape \[2, 2, 2\], "
            r"expected \[2, 2, 3\]",
        ),
        ({"observation": torch.zeros(2, 3, 3)}, r"\('pets', 'observation'\) has shape \[2, 3, 3\] "
         r"for all agents, expected it by kind: \('pets', 'cat', 'observation'\) of \[2, 2, 3\], "
         r"\('pets', 'dog', 'observation'\) of \[2, 1, 1\]"),
        ({"dog": None}, r"no \('pets', 'dog', 'observation'\), expected shape \[2, 1, 1\]"),
        ({"dog__observation": None}, r"returned no \('pets', 'dog', 'observation'\)"),
        ({"cta": {}}, r"returned \('pets', 'cta'\), which was not declared; did you mean 'cat'"),
        ({"cat__maks": torch.ones(2, 2)}, "did you mean 'mask'"),
        ({"cat__mask": torch.ones(2, 2)}, r"\('pets', 'cat', 'mask'\) is torch.float32, expected "
         "torch.bool"),
        ({"mask": torch.ones(2, 3)}, r"\('pets', 'mask'\) is torch.float32, expected torch.bool"),
        ({"mask": torch.ones(2, 2, dtype=torch.bool)}, r"shape \[2, 2\], expected \[2, 3\]"),
        ({"cat__observation": torch.zeros(2, 2, 3).double()}, "torch.float64, expected"),
        ({"cat": torch.zeros(2)}, r"\('pets', 'cat'\) as a Tensor, expected a TensorDict"),
    ],
)  # fmt: skip
def test_invalid_output_of_reset_raises(changes, message):
    with pytest.raises(SpecError, match=message):
        Wrong("_reset", **changes).reset()


def test_duplicate_or_wrongly_stacked_leaves_are_refused():
    both = {"cat__mask": torch.ones(2, 2, dtype=torch.bool)}
    both["mask"] = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(SpecError, match=r"\('pets', 'mask'\) has shape"):
        Wrong("_reset", **both).reset()

    class Across(Pets):
        def _lazy(self, team):
            return super()._lazy(team)[:, :2]

    with pytest.raises(SpecError, match=r"stacked in dim 1 to \[2, 2\], expected dim 1 and \[2, 3"):
        Across(form="lazy").reset()


def test_actions_of_wrong_shape_or_dtype_raise():
    env = Pets()
    td = env.rand_action(env.reset())
    wrong = td.clone()
    wrong["pets"].unbind(1)[2]["action"] = torch.zeros(2, 2)
    message = r"Pets.step: \('pets', 'dog_0', 'action'\) has shape \[2, 2\], expected \[2, 1\]"
    with pytest.raises(SpecError, match=message):
        env.step(wrong)
    dense = TensorDict({"pets": {"action": torch.zeros(2, 3, 2)}}, [2])
    with pytest.raises(SpecError, match=r"one tensor of shape \[2, 3, 2\].*\(cat\).*PadAgents"):
        env.step(dense)
    with pytest.raises(SpecError, match=r"\('pets', 'action'\) is nothing"):
        env.step(TensorDict({}, [2]))
    wrong["pets"].unbind(1)[2]["action"] = torch.zeros(2, 1, dtype=torch.int64)
    with pytest.raises(SpecError, match="is torch.int64, expected torch.float32"):
        env.step(wrong)
    index = Pets(specs=(AgentSpec("a", 1, Unbounded((1,)), Categorical(3)),))
    with pytest.raises(SpecError, match="is torch.float32, expected torch.int64"):
        index.step(index.reset().set(("pets", "action"), torch.zeros(2, 1)))


BAD_ACTIONS = [
    (Bounded(-1, 1, (2,)), torch.tensor([0.0, 1.5]), "is 1.5, expected a number from -1 to 1"),
    (Bounded(-1, 1, (2,)), torch.tensor([torch.nan, 0.0]), "is nan, expected a number from"),
    (Unbounded((2,)), torch.tensor([torch.nan, 0.0]), "is nan, expected a number"),
    (Categorical(3), torch.tensor(3), "is 3, expected an index of 3 choices"),
    (Categorical(3), torch.tensor(-1), "is -1, expected an index"),
    (Categorical(3, mask=torch.tensor([True, False, True])), torch.tensor(1), "mask allows"),
    (
        OneHot(3),
        torch.tensor([1, 1, 0]),
        r"is \[True, True, False\], expected a one-hot vector of 3",
    ),
    (OneHot(3), torch.tensor([0, 0, 0]), "expected a one-hot vector"),
    (OneHot(3, mask=torch.tensor([True, False, True])), torch.tensor([0, 1, 0]), "mask allows"),
]


@pytest.mark.parametrize(("spec", "bad", "message"), BAD_ACTIONS)
@pytest.mark.parametrize("several", [False, True])
def test_actions_outside_their_spec_raise(spec, bad, message, several):
    specs = [AgentSpec("a", 2, Unbounded((1,)), spec)]
    if several:
        specs.append(AgentSpec("b", 1, Unbounded((2,)), spec))
    env = Pets(specs=specs)

    def wrong_step(agent):
        td = env.rand_action(env.reset())
        members = td["pets"].unbind(1)
        for i, member in enumerate(members):
            if i == agent:
                member["action"][1] = bad
        return env.step(td)

    with pytest.raises(SpecError, match=r"step: \('pets', 'action'\) of agent 'a_1' in env 1 "):
        wrong_step(1)
    with pytest.raises(SpecError, match=message):
        wrong_step(0)
    step(env)
    wrong_step(1)  # only the first step is checked, since a check waits for the device
    env.check = True
    with pytest.raises(SpecError, match=message):
        wrong_step(1)


def test_observations_outside_their_spec_raise():
    dog = AgentSpec("dog", 1, Bounded(0, 9, (2,)), Categorical(2))
    env = Pets(specs=(AgentSpec("a", 2, Bounded(0, 2, (1,)), Categorical(2)), dog), check=True)
    td = step_mdp(step(env, step_mdp(step(env))))
    message = r"Pets._step: \('pets', 'observation'\) of agent 'a_0' in env 0 is 3.0, expected a "
    with pytest.raises(SpecError, match=message):
        step(env, td)
    env.check = False
    step(env, td)
    low = Bounded(1, 2, (1,))
    with pytest.raises(SpecError, match=r"Pets._reset: .* is 0.0, expected a number from 1 to 2"):
        Pets(specs=(AgentSpec("a", 2, low, Categorical(2)),)).reset()
    # Observations of dead agents are not checked.
    nested = AgentSpec("a", 2, Composite(x=Bounded(0, 2, (1,))), Categorical(2))
    env = Pets(script=[{"terminated": [[True], [False]]}], specs=(nested,), check=True)
    td = step_mdp(step(env))
    env.count = env.count + 2
    with pytest.raises(SpecError, match=r"\('pets', 'observation', 'x'\) of agent 'a_1'"):
        step(env, td)


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        ((CAT, AgentSpec("dog", 1, Unbounded((3,)), Categorical(2))),
         r"group 'pets': the action of 'dog' is Categorical \[\] of torch.int64, that of 'cat' "
         r"BoundedContinuous \[2\] of torch.float32, expected one type"),
        ((CAT, AgentSpec("dog", 1, Unbounded((3, 2)), CAT.action_spec)), "number of dims"),
        ((CAT, AgentSpec("dog", 1, Unbounded((3,), dtype=torch.int64), CAT.action_spec)), "dtype"),
        ((CAT, AgentSpec("dog", 1, Composite(x=Unbounded((3,))), CAT.action_spec)), "a Composite"),
        ((CAT, AgentSpec("dog", 1, CAT.observation_spec, CAT.action_spec,
                         Unbounded((1,), dtype=torch.float64))),
         "the reward of 'dog'"),
        ((CAT, AgentSpec("mask", 1, CAT.observation_spec, CAT.action_spec)), "a reserved key"),
        ((CAT, CAT), "use another name"),
        ((AgentSpec("a", 1, Unbounded((3,)), Categorical(2), action_mask=True),
          AgentSpec("b", 1, Unbounded((3,)), Categorical(2))),
         "'a' has action_mask=True, 'b' has action_mask=False"),
        ((AgentSpec("a", 1, Composite(x=Unbounded((3,))), Categorical(2)),
          AgentSpec("b", 1, Composite(x=Unbounded((3, 1))), Categorical(2))),
         r"the \('observation', 'x'\) of 'b'"),
    ],
)  # fmt: skip
def test_incompatible_kinds_in_one_group_are_refused(kinds, message):
    with pytest.raises(ConfigError, match=message):
        Pets(specs=kinds)


def test_unknown_arguments_are_refused():
    with pytest.raises(ConfigError, match="Pets has no argument 'sed'; did you mean 'seed'"):
        Pets(sed=3)


def test_env_and_policy_with_the_same_seed_draw_different_numbers():
    class Drawing(Pets):
        def _reset(self, tensordict):
            self.drawn = torch.rand(5)
            return super()._reset(tensordict)

    env = Drawing(seed=3)
    env.reset()
    torch.manual_seed(3)
    assert not torch.equal(env.drawn, torch.rand(5))
    env.set_seed(3, static_seed=True)
    before = env.drawn
    env.reset()
    assert torch.equal(before, env.drawn)
