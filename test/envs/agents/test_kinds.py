"""MarlEnv with groups of several kinds of agents, and what it refuses."""

import inspect

import pytest
import torch
from contract import asking_reset, assert_same, draw_actions, play
from tensordict import LazyStackedTensorDict, TensorDict
from torchrl.collectors import Collector
from torchrl.data import Bounded, Categorical, Composite, OneHot, Unbounded
from torchrl.data.tensor_specs import Stacked, StackedComposite
from torchrl.envs import SerialEnv, TransformedEnv, check_env_specs
from torchrl.envs.utils import step_mdp

from torchrl_marl.envs import MarlEnv, PadAgents
from torchrl_marl.envs.toy import Arena, SpeakerListener
from torchrl_marl.errors import ConfigError, SpecError
from torchrl_marl.specs import AgentSpec, TeamSpec
from torchrl_marl.stacking import is_lazy, pad_group

CAT = AgentSpec("cat", 2, Unbounded((3,)), Bounded(-1, 1, (2,)))
DOG = AgentSpec("dog", 1, Unbounded((1,)), Bounded(-2, 2, (1,)))


class Pets(MarlEnv):
    """Cats and dogs in one group; what a step gives beside observation and reward is scripted."""

    def __init__(self, num_envs=2, script=(), form="by_kind", specs=(CAT, DOG), **kwargs):
        super().__init__(num_envs, **kwargs)
        self.script, self.form, self.pets = list(script), form, specs
        for spec in specs:
            self.register_agent(spec, group="pets")
        self.seen = None

    def _give(self, **extra):
        team = {}
        for spec in self.pets:
            seen = spec.observation_spec
            leaves = seen if isinstance(seen, Composite) else {"": seen}
            own = {key: self._count(leaf, spec.n_agents) for key, leaf in leaves.items()}
            team[spec.name] = {"observation": own.get("", own)}
        team |= extra
        if self.form == "lazy":
            return {"pets": self._lazy(team)}
        if self.form == "dense":
            kinds = [team.pop(spec.name) for spec in self.pets]
            return {"pets": {k: torch.cat([x[k] for x in kinds], 1) for k in kinds[0]} | team}
        return {"pets": team}

    def _count(self, spec, n_agents):
        count = self.count.view(-1, *[1] * (spec.ndim + 1)).to(spec.dtype)
        return count.expand(self.num_envs, n_agents, *spec.shape).clone()

    def _lazy(self, team):
        rows, start = [], 0
        shared = {key: x for key, x in team.items() if not isinstance(x, dict)}
        for spec in self.pets:
            for i in range(spec.n_agents):
                own = {key: x[:, i] for key, x in team[spec.name].items()}
                own |= {key: x[:, start + i] for key, x in shared.items()}
                rows.append(TensorDict(own, [self.num_envs]))
            start += spec.n_agents
        return LazyStackedTensorDict(*rows, stack_dim=1)

    def _reset(self, tensordict):
        self.count = torch.zeros(self.num_envs, dtype=torch.int64)
        return self._give()

    def _step(self, tensordict):
        self.seen = [tensordict]
        self.count = self.count + 1
        by_kind = self.by_kind(tensordict, "pets")
        earned = [by_kind[spec.name]["action"].float() for spec in self.pets]
        earned = [x.reshape(*x.shape[:2], -1).sum(-1, keepdim=True) for x in earned]
        out = self._give(reward=torch.cat(earned, 1))
        t = int(self.count.max()) - 1
        for key, value in (self.script[t] if t < len(self.script) else {}).items():
            *path, leaf = ("pets", key) if isinstance(key, str) else ("pets", *key)
            holder = out
            for part in path:
                holder = holder[part]
            value = torch.as_tensor(value)
            holder[leaf] = value.expand(self.num_envs, *value.shape).clone()
        return out


def step(env, td=None, action=None):
    td = env.rand_action(env.reset() if td is None else td)
    if action is not None:
        for i, member in enumerate(td["pets"].unbind(1)):
            member["action"] = action[i] if isinstance(action, list) else action
    return env.step(td)


# ---------------------------------------------------------------------------------- the group


def test_specs_are_stacked():
    env = Pets(5)
    for spec, leaf in (
        (env.full_observation_spec, "observation"),
        (env.full_action_spec, "action"),
    ):
        assert isinstance(spec["pets"], StackedComposite)
        assert spec["pets"].shape == (5, 3)
        assert isinstance(spec["pets", leaf], Stacked)
        assert spec["pets", leaf].shape == (5, 3, -1)
    sizes = [own["observation"].shape for own in env.full_observation_spec["pets"].unbind(1)]
    assert sizes == [(5, 3), (5, 3), (5, 1)]
    high = [own["action"].space.high for own in env.full_action_spec["pets"].unbind(1)]
    assert [x.unique().tolist() for x in high] == [[1], [1], [2]]
    assert env.full_reward_spec["pets", "reward"].shape == (5, 3, 1)
    assert env.group_map == {"pets": ["cat_0", "cat_1", "dog_0"]}
    group = TeamSpec.from_env(env).groups["pets"]
    assert group.kinds == env.team.groups["pets"].kinds == (0, 0, 1)
    assert group.action_dims == (2, 2, 1)


@pytest.mark.parametrize("form", ["by_kind", "lazy"])
def test_data_are_stacked_lazily(form):
    env = Pets(3, form=form, max_steps=4, seed=0)
    check_env_specs(env)
    actions = draw_actions(env, 6)
    twin = Pets(3, max_steps=4, seed=0)
    for a, b in zip(play(env, env.reset(), actions), play(twin, twin.reset(), actions)):
        assert_same(a, b)
        assert is_lazy(a["pets"]) and is_lazy(a["next", "pets"])
        members = a["pets"].unbind(1)
        assert [m["observation"].shape for m in members] == [(3, 3), (3, 3), (3, 1)]
        reward = torch.stack([m["action"].sum(-1, keepdim=True) for m in members], 1)
        assert torch.equal(a["next", "pets", "reward"], reward)
    batches = Collector(SerialEnv(2, lambda: Pets(3, form=form)), frames_per_batch=24,
                        total_frames=24)  # fmt: skip
    assert [batch.shape for batch in batches] == [(2, 3, 4)]


def test_by_kind_reads_lazy_padded_and_dense_groups():
    env = Pets(4)
    td = env.rollout(3)
    paddings = env.team.groups["pets"].paddings
    dense = TensorDict({"pets": pad_group(td["pets"], paddings)}, td.shape)
    for data in (td, dense):
        kinds = env.by_kind(data, "pets")
        assert kinds["cat"]["action"].shape == (4, 3, 2, 2)
        assert kinds["dog"]["observation"].shape == (4, 3, 1, 1)
        assert torch.equal(kinds["dog"]["action"][:, :, 0], td["pets"].unbind(-1)[2]["action"])
    alike = Pets(4, specs=(CAT, AgentSpec("fox", 1, CAT.observation_spec, CAT.action_spec)))
    kinds = alike.by_kind(alike.rollout(3), "pets")
    assert [kinds[name]["action"].shape[2] for name in ("cat", "fox")] == [2, 1]


@pytest.mark.parametrize("form", ["by_kind", "dense", "lazy"])
def test_kinds_of_equal_shapes_stay_dense(form):
    fox = AgentSpec("fox", 1, Bounded(-9, 9, (3,)), Bounded(-3, 2, (2,)))
    cat = AgentSpec("cat", 2, Bounded(0, 5, (3,)), Bounded(-1, 1, (2,)))
    env = Pets(3, form=form, specs=(cat, fox), max_steps=4)
    check_env_specs(env)
    td = env.rollout(4)
    assert not is_lazy(td["pets"])
    assert td["pets", "observation"].shape == (3, 4, 3, 3)
    space = env.full_action_spec["pets", "action"].space
    assert space.low[0, :, 0].tolist() == [-1, -1, -3]
    assert (td["pets", "action"][..., 2, :].abs() > 1).any()
    assert (td["pets", "action"][..., :2, :].abs() <= 1).all()


def test_flags_and_masks_by_kind():
    script = [
        {("cat", "terminated"): [[True], [False]], ("dog", "mask"): [False]},
        {("dog", "truncated"): [[True]]},
        {"terminated": [[False], [True], [False]]},
    ]
    env = Pets(script=script)
    td, found = None, []
    for _ in range(3):
        td = step(env, td)
        after = td["next"]
        found.append([after["pets", key][0].flatten().tolist() for key in ("done", "mask")])
        done = after["done"].all()
        td = step_mdp(td)
    assert found == [
        [[True, False, False], [False, True, False]],
        [[True, False, True], [False, True, False]],
        [[True, True, True], [False, False, False]],
    ]
    assert done
    assert not after["terminated"].any()


def test_who_is_dead_acts_not():
    env = Pets(script=[{"terminated": [[True], [False], [True]]}])
    td = step_mdp(step(env))
    nan = [torch.full((2, 2), torch.nan), torch.ones(2, 2), torch.full((2, 1), torch.nan)]
    td = step(env, td, nan)
    assert td["next", "pets", "reward"][0].flatten().tolist() == [0, 2, 0]
    (seen,) = env.seen
    assert [m["action"][0].tolist() for m in seen["pets"].unbind(1)] == [[0, 0], [1, 1], [0]]
    assert seen["pets", "done"][0].flatten().tolist() == [True, False, True]
    assert td["pets"].unbind(1)[0]["action"].isnan().all()  # the caller's stay as they are


def test_what_was_given_is_not_written_to():
    class Sloppy(Pets):
        def _give(self, **extra):
            self.x = self.x.add_(1) if hasattr(self, "x") else torch.zeros(2, 2, 3)
            out = super()._give(**extra)
            out["pets"]["cat"]["observation"] = self.x
            return out

    with pytest.raises(SpecError, match=r"gave as \('pets', 'cat', 'observation'\) before"):
        step(Sloppy())


def test_a_partial_reset_keeps_running_envs():
    env = Pets(3, max_steps=9)
    td = step_mdp(step(env, step_mdp(step(env))))
    after = env.reset(asking_reset(env, td, [1]))
    for i in range(3):
        assert after["pets"].unbind(1)[i]["observation"][:, 0].tolist() == [2, 0, 2]
    assert env.steps.tolist() == [2, 0, 2]


def test_dict_observations_of_different_shapes():
    near = Composite(image=Unbounded((1, 4, 4)), speed=Unbounded((2,)))
    far = Composite(image=Unbounded((1, 2, 6)), speed=Unbounded((2,)))
    blind = Composite(speed=Unbounded((2,)))
    act = Categorical(3)
    env = Pets(specs=(AgentSpec("near", 1, near, act), AgentSpec("far", 2, far, act)))
    check_env_specs(env)
    assert env.rollout(2)["pets"].unbind(-1)[2]["observation", "image"].shape == (2, 2, 1, 2, 6)
    # Keys that not all agents have: TorchRL refuses them in a lazy stack, but not padded.
    env = Pets(specs=(AgentSpec("near", 1, near, act), AgentSpec("blind", 2, blind, act)))
    env.rollout(2)
    padded = TransformedEnv(env, PadAgents())
    check_env_specs(padded)
    assert (padded.rollout(2)["pets", "observation", "image"][..., 1:, :, :, :] == 0).all()


@pytest.mark.parametrize("kind", [Categorical, OneHot])
def test_random_actions_are_legal(kind):
    first = torch.tensor([True, False, True])
    a = AgentSpec("a", 2, Unbounded((1,)), kind(3, mask=first))
    b = AgentSpec("b", 1, Unbounded((1,)), kind(5))
    alike = AgentSpec("b", 1, Unbounded((1,)), kind(3))
    for env in (Pets(50, specs=(a, b)), Pets(50, specs=(a, alike))):
        for wrapped in (env, TransformedEnv(env, PadAgents())):
            td = wrapped.rand_action(wrapped.reset())
            group = pad_group(td["pets"])
            action = group["action"] if kind is Categorical else group["action"].int().argmax(-1)
            assert (action[:, :2] != 1).all()
            assert action.max() == env.team.groups["pets"].n_actions - 1
            wrapped.step(td)
    assert env.full_action_spec["pets"].rand().batch_size == (50, 3)


def test_random_actions_under_padding_are_padded():
    env = TransformedEnv(Pets(20), PadAgents())
    td = env.rand_action(env.reset())
    assert td["pets", "action"].shape == (20, 3, 2)
    assert (td["pets", "action"][:, 2, 1] == 0).all()
    assert (td["pets", "action"][:, 2, 0] != 0).all()


# ------------------------------------------------------------------------------- what is refused


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
        ({"dog": None}, r"gave no \('pets', 'dog', 'observation'\), expected shape \[2, 1, 1\]"),
        ({"dog__observation": None}, r"gave no \('pets', 'dog', 'observation'\)"),
        ({"cta": {}}, r"gave \('pets', 'cta'\), which was not declared; did you mean 'cat'"),
        ({"cat__maks": torch.ones(2, 2)}, "did you mean 'mask'"),
        ({"cat__mask": torch.ones(2, 2)}, r"\('pets', 'cat', 'mask'\) is torch.float32, expected "
         "torch.bool"),
        ({"mask": torch.ones(2, 3)}, r"\('pets', 'mask'\) is torch.float32, expected torch.bool"),
        ({"mask": torch.ones(2, 2, dtype=torch.bool)}, r"shape \[2, 2\], expected \[2, 3\]"),
        ({"cat__observation": torch.zeros(2, 2, 3).double()}, "torch.float64, expected"),
        ({"cat": torch.zeros(2)}, r"\('pets', 'cat'\) as a Tensor, expected a TensorDict"),
    ],
)  # fmt: skip
def test_what_a_world_gives_is_checked(changes, message):
    with pytest.raises(SpecError, match=message):
        Wrong("_reset", **changes).reset()


def test_what_is_given_twice_or_stacked_otherwise_is_refused():
    both = {"cat__mask": torch.ones(2, 2, dtype=torch.bool)}
    both["mask"] = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(SpecError, match=r"\('pets', 'mask'\) has shape"):
        Wrong("_reset", **both).reset()

    class Across(Pets):
        def _lazy(self, team):
            return super()._lazy(team)[:, :2]

    with pytest.raises(SpecError, match=r"stacked in dim 1 to \[2, 2\], expected dim 1 and \[2, 3"):
        Across(form="lazy").reset()


def test_actions_are_checked():
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
def test_actions_outside_their_spec(spec, bad, message, several):
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
    wrong_step(1)  # the first step was right: a look at every action would wait for the device
    env.check = True
    with pytest.raises(SpecError, match=message):
        wrong_step(1)


def test_observations_outside_their_spec():
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
    # Who is dead may see anything.
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
        ((CAT, CAT), "names of their own"),
        ((AgentSpec("a", 1, Unbounded((3,)), Categorical(2), action_mask=True),
          AgentSpec("b", 1, Unbounded((3,)), Categorical(2))),
         "'a' has action_mask=True, 'b' has action_mask=False"),
        ((AgentSpec("a", 1, Composite(x=Unbounded((3,))), Categorical(2)),
          AgentSpec("b", 1, Composite(x=Unbounded((3, 1))), Categorical(2))),
         r"the \('observation', 'x'\) of 'b'"),
    ],
)  # fmt: skip
def test_kinds_that_no_group_can_hold(kinds, message):
    with pytest.raises(ConfigError, match=message):
        Pets(specs=kinds)


def test_unknown_arguments_are_refused():
    with pytest.raises(ConfigError, match="Pets has no argument 'sed'; did you mean 'seed'"):
        Pets(sed=3)


def test_an_env_and_a_policy_of_one_seed_draw_other_numbers():
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


# --------------------------------------------------------------------------- speaker and listener


SPEAKER_LISTENERS = [{}, {"continuous_speech": True},
                     {"continuous_speech": True, "one_group": True}]  # fmt: skip


def straight_on(env, td):
    """The speaker names the goal, the listener goes there straight as soon as it knows."""
    td = env.rand_action(td)
    kinds = env.by_kind(td, "team") if env.one_group else td
    goal, seen = (kinds[name]["observation"][:, 0] for name in ("speaker", "listener"))
    places, heard = seen[:, :-3].view(-1, 3, 2), seen[:, -3:]
    symbol = not (env.one_group or td["speaker", "action"].is_floating_point())
    actions = {"speaker": goal.argmax(-1)[:, None] if symbol else goal[:, None]}
    way = (heard.unsqueeze(-1) * places).sum(1) / env.speed
    actions["listener"] = way.clamp(-1, 1).unsqueeze(1)
    if env.one_group:
        for member, action in zip(td["team"].unbind(1), actions.values()):
            member["action"] = action[:, 0]
    else:
        for name, action in actions.items():
            td[name, "action"] = action
    return td


@pytest.mark.parametrize("kwargs", SPEAKER_LISTENERS, ids=str)
def test_speaker_and_listener_have_the_returns_that_they_state(kwargs):
    env = SpeakerListener(4000, max_steps=10, seed=0, **kwargs)
    group = next(iter(env.group_map))
    for policy, expected in (
        (lambda td: straight_on(env, td), env.heuristic_return),
        (env.rand_action, env.random_return),
    ):
        td, total = env.reset(), 0
        for _ in range(10):
            td = env.step(policy(td))["next"]
            total = total + td[group, "reward"][:, 0, 0]
        assert td["truncated"].all()
        assert abs(total.mean() - expected) < 4 * total.std() / 4000**0.5
    assert env.random_return < 5 * env.heuristic_return


def test_speaker_and_listener_are_of_tutorial_size():
    source = inspect.getsource(SpeakerListener)
    body = source[
        source.index("    def __init__") : source.index("    @property\n    def heuristic")
    ]
    lines = [line for line in body.splitlines() if line.strip() and line.strip()[0] != "#"]
    assert len(lines) < 50
    names = [line.strip() for line in lines]
    signature = names.index(") -> None:")
    assert len(lines) - signature <= 40  # a tutorial's own has no options


def test_speaker_and_listener_refuse_what_cannot_be():
    with pytest.raises(ConfigError, match="one_group=True needs continuous_speech=True"):
        SpeakerListener(2, one_group=True)


# ------------------------------------------------------------------------------------ late births


def test_arena_agents_are_born_late():
    env = Arena(3, n_agents=3, years=3, late_spawn=2, kinds=2, seed=0)
    td = env.reset()
    masks, done = [], []
    for _ in range(13):
        masks.append(td["agents", "mask"][0].tolist())
        done.append(td["agents", "done"][0].flatten().tolist())
        td = env.rand_action(td)
        for member in td["agents"].unbind(1):
            member["action"] = member["observation"][:, :-2].argmax(-1)
        td = env.step(td)["next"]
    lived = list(zip(*masks))
    assert [row.index(True) for row in lived] == [0, 2, 4]
    assert [sum(row) for row in lived] == [3, 6, 9]
    assert [sum(row) for row in zip(*done)] == [10, 5, 0]
    assert td["terminated"].all()


def test_who_was_never_born_ends_with_the_episode():
    env = Arena(2, n_agents=2, years=3, late_spawn=9, max_steps=5)
    td = env.rollout(5, break_when_any_done=False)["next"]
    assert not td["agents", "mask"][:, :-1, 1].any()  # who waits at a time limit lives
    assert td["truncated"][:, -1].all()
    assert td["agents", "truncated"][:, -1, 1].all()
    assert not td["agents", "done"][:, :-1, 1].any()
    # Nobody lives between the first one's death and the second one's birth: the world waits.
    env = Arena(2, n_agents=2, years=1, late_spawn=3)
    td = env.rollout(5, break_when_any_done=False)["next"]
    assert td["terminated"][0].flatten().tolist() == [False] * 4 + [True]
