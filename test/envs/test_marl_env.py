"""MarlEnv on small worlds whose flags are written by hand."""

import pytest
import torch
from contract import assert_same, assert_same_rng, rng_states
from tensordict import TensorDict
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.envs import ParallelEnv, SerialEnv, TransformedEnv, check_env_specs
from torchrl.envs.transforms import RewardSum
from torchrl.envs.utils import step_mdp

from torchrl_marl.envs import MarlEnv
from torchrl_marl.envs.toy import TOY_ENVS, Arena, MatrixGame, TwoStepGame
from torchrl_marl.errors import ConfigError, SimulatorStateError, SpecError
from torchrl_marl.specs import AgentSpec, TeamSpec


class Counting(MarlEnv):
    """Two groups; what a step gives beside observation and reward is scripted."""

    def __init__(self, num_envs=2, script=(), **kwargs):
        super().__init__(num_envs, **kwargs)
        self.script = list(script)
        self.register_agent(AgentSpec("cat", 2, Unbounded((3,)), Bounded(-1, 1, (2,))), "cats")
        self.register_agent(AgentSpec("dog", 1, Unbounded((1,)), Categorical(3)))
        self.seen = None

    def _observe(self):
        count = self.count.view(-1, 1, 1).float()
        return TensorDict(
            {
                "cats": {"observation": count.repeat(1, 2, 3)},
                "dog": {"observation": count.clone()},
            }
        )

    def _reset(self, tensordict):
        self.count = torch.zeros(self.num_envs, dtype=torch.int64)
        return self._observe()

    def _step(self, tensordict):
        self.seen = [tensordict]
        self.count = self.count + 1
        out = self._observe()
        out["cats", "reward"] = tensordict["cats", "action"].sum(-1, keepdim=True)
        out["dog", "reward"] = torch.ones(self.num_envs, 1, 1)
        t = int(self.count.max()) - 1
        for key, value in (self.script[t] if t < len(self.script) else {}).items():
            value = torch.as_tensor(value)
            out[key] = value.expand(self.num_envs, *value.shape).clone()
        return out


def play(env, n, action=None):
    td = env.reset()
    for _ in range(n):
        td = env.rand_action(td) if action is None else td.update(action)
        td = env.step(td)
        yield td
        td = step_mdp(td)


def flags(td, group, key="done"):
    return td["next", group, key][0].flatten().tolist()


FIRST, SECOND = [[True], [False]], [[False], [True]]
BOTH = [[True], [True]]


def test_death_stays_until_the_reset():
    env = Counting(script=[{("cats", "terminated"): FIRST}, {}, {("cats", "truncated"): FIRST}])
    for i, td in enumerate(play(env, 4)):
        assert flags(td, "cats") == flags(td, "cats", "terminated") == [True, False]
        assert flags(td, "cats", "truncated") == [False, False]
        assert td["next", "cats", "mask"][0].tolist() == [False, True]
        assert td["cats", "mask"][0].tolist() == [i == 0, True]
        assert not td["next", "done"].any()
    after = env.reset()
    assert not after["cats", "done"].any()
    assert after["cats", "mask"].all()


def test_an_agent_that_is_truncated_acts_no_more():
    env = Counting(script=[{("cats", "truncated"): SECOND}])
    *_, td = play(env, 2)
    assert flags(td, "cats", "truncated") == [False, True]
    assert flags(td, "cats", "terminated") == [False, False]
    assert td["next", "cats", "mask"][0].tolist() == [True, False]


def test_an_end_by_both_is_terminated():
    env = Counting(script=[{("cats", "truncated"): BOTH, ("cats", "terminated"): FIRST}])
    (td,) = play(env, 1)
    assert flags(td, "cats", "terminated") == [True, False]
    assert flags(td, "cats", "truncated") == [False, True]


def test_the_root_is_terminated_when_all_groups_are():
    script = [{("cats", "terminated"): BOTH}, {("dog", "terminated"): [[True]]}]
    first, second = play(Counting(script=script, max_steps=2), 2)
    assert not first["next", "done"].any()
    assert second["next", "terminated"].all()
    assert not second["next", "truncated"].any()
    assert not second["next", "dog", "mask"].any()


def test_the_root_is_truncated_when_done_otherwise():
    script = [{("cats", "terminated"): BOTH}, {("dog", "truncated"): [[True]]}]
    *_, td = play(Counting(script=script), 2)
    assert td["next", "truncated"].all()
    assert not td["next", "terminated"].any()


def test_a_time_limit_is_truncated_and_keeps_the_masks_of_who_lives():
    env = Counting(script=[{("cats", "terminated"): FIRST}], max_steps=3)
    *_, before, td = play(env, 3)
    assert not before["next", "done"].any()
    assert td["next", "truncated"].all()
    assert not td["next", "terminated"].any()
    assert flags(td, "cats", "terminated") == [True, False]
    assert flags(td, "cats", "truncated") == [False, True]
    assert td["next", "cats", "mask"][0].tolist() == [False, True]
    assert td["next", "dog", "mask"].all()


def test_who_waits_at_a_time_limit_has_a_last_observation():
    env = Counting(script=[{("cats", "mask"): [True, False]}] * 3, max_steps=3)
    masks = [td["next", "cats", "mask"][0].tolist() for td in play(env, 3)]
    assert masks == [[True, False], [True, False], [True, True]]


@pytest.mark.parametrize("key", ["terminated", "truncated"])
def test_the_env_may_end_the_episode_itself(key):
    env = Counting(script=[{}, {key: [True]}])
    first, td, later = play(env, 3)
    other = "truncated" if key == "terminated" else "terminated"
    assert not first["next", "done"].any()
    for x in (td, later):
        assert x["next", key].all()
        assert x["next", "dog", key].all()
        assert not x["next", other].any()
        assert not x["next", "cats", other].any()
    assert td["next", "cats", "mask"].all() == (key == "truncated")
    assert not later["next", "cats", "mask"].any()


def test_who_waits_and_who_is_dead_acts_not():
    script = [
        {("cats", "terminated"): FIRST, ("cats", "mask"): [True, False]},
        {("cats", "mask"): [True, True]},
    ]
    env = Counting(script=script)
    poison = TensorDict({"cats": {"action": torch.full((2, 2, 2), float("nan"))}}, [2])
    td = step_mdp(env.step(env.rand_action(env.reset())))
    assert not td["cats", "mask"].any()
    td = env.step(td.update(poison).set(("dog", "action"), torch.ones(2, 1, dtype=torch.int64)))
    assert (td["next", "cats", "reward"] == 0).all()
    assert td["next", "cats", "mask"][0].tolist() == [False, True]
    (seen,) = env.seen
    assert not seen["cats", "mask"].any()
    assert seen["cats", "done"][0].flatten().tolist() == [True, False]
    assert td["cats", "action"].isnan().all()  # the caller's stay as they are


def test_it_works_in_torchrl():
    make = lambda: Counting(num_envs=3, max_steps=3)  # noqa: E731
    for env in (make(), SerialEnv(2, make), TransformedEnv(make(), RewardSum())):
        check_env_specs(env)
        td = env.rollout(8, break_when_any_done=False)
        count = td["cats", "observation"][..., 0, 0]
        assert (count.reshape(-1, 8) == torch.tensor([0, 1, 2] * 3)[:8]).all()
    team = TeamSpec.from_env(make())
    assert team.groups["cats"].agent_done
    assert team.groups["cats"].mask_key == ("cats", "mask")
    assert team.groups["dog"].agent_names == ("dog_0",)
    assert team.groups == make().team.groups


@pytest.mark.filterwarnings("ignore")
def test_it_works_in_other_processes():
    env = ParallelEnv(2, Counting, mp_start_method="fork")
    assert env.rollout(3).shape == (2, 2, 3)
    env.close()


def test_a_subclass_may_extend_a_step():
    class Twice(Counting):
        def _step(self, tensordict):
            out = super()._step(tensordict)
            out["dog", "reward"] = 2 * out["dog", "reward"]
            return out

    *_, td = play(Twice(max_steps=2), 2)
    assert (td["next", "dog", "reward"] == 2).all()
    assert td["next", "truncated"].all()


def test_dict_observations():
    class Seeing(MarlEnv):
        def __init__(self, **kwargs):
            super().__init__(4, **kwargs)
            spec = Composite(image=Unbounded((1, 5, 5)), speed=Unbounded((2,)))
            self.register_agent(AgentSpec("car", 3, spec, Categorical(2)))

        def _observe(self):
            car = {"image": torch.rand(4, 3, 1, 5, 5), "speed": torch.rand(4, 3, 2)}
            return TensorDict({"car": {"observation": car}})

        def _reset(self, tensordict):
            return self._observe()

        def _step(self, tensordict):
            return self._observe().set(("car", "reward"), torch.zeros(4, 3, 1))

    env = Seeing(max_steps=3)
    check_env_specs(env)
    assert TeamSpec.from_env(env).groups["car"].observation_dim == 27
    wrong = Seeing()
    wrong._observe = lambda: TensorDict({"car": {"observation": {"image": torch.zeros(4, 3, 1)}}})
    with pytest.raises(SpecError, match=r"no \('car', 'observation', 'speed'\)"):
        wrong.reset()


# ------------------------------------------------------------------------------- what is refused


def given(changes, remove=()):
    class Wrong(Counting):
        def _step(self, tensordict):
            out = super()._step(tensordict)
            for key in remove:
                del out[key]
            for key, value in changes.items():
                out[key] = value
            return out

    return Wrong()


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
        ({"birds": TensorDict({}, [2])}, (), "gave 'birds', which was not declared"),
        ({"state": torch.zeros(2, 1)}, (), "gave 'state', which was not declared"),
        ({}, ["dog"], "gave no 'dog'"),
        ({}, [("dog", "reward")], r"gave no \('dog', 'reward'\)"),
        ({("dog", "terminated"): torch.zeros(2, 1, 1)}, (), "expected torch.bool"),
        ({("dog", "mask"): torch.ones(2, dtype=torch.bool)}, (), r"shape \[2\], expected \[2, 1\]"),
        ({"terminated": torch.ones(2, dtype=torch.bool)}, (), r"expected \[2, 1\]"),
        ({"dog": torch.zeros(2)}, (), "'dog' as a Tensor, expected a TensorDict"),
    ],
)
def test_a_step_that_keeps_not_to_what_was_declared(changes, remove, message):
    with pytest.raises(SpecError, match=message):
        list(play(given(changes, remove), 1))


def test_actions_are_checked():
    env = Counting()
    td = env.rand_action(env.reset())
    with pytest.raises(SpecError, match=r"\('cats', 'action'\) has shape \[2, 2\]"):
        env.step(td.clone().set(("cats", "action"), torch.zeros(2, 2)))
    with pytest.raises(SpecError, match=r"\('dog', 'action'\) is nothing"):
        env.step(td.exclude(("dog", "action")))


def test_what_was_given_is_not_written_to():
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

    with pytest.raises(SpecError, match=r"writes in place to what it gave as \('car', 'obs"):
        list(play(Sloppy(), 2))


def test_registration_is_checked():
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
    with pytest.raises(ConfigError, match="names of their own"):
        Declares((car, "a"), (car, "b"))
    with pytest.raises(ValueError, match="reserved"):
        Declares((car, "next"))
    with pytest.raises(ConfigError, match="has no agents"):
        Declares().reset()
    with pytest.raises(SpecError, match="gave a NoneType, expected a TensorDict"):
        Declares((car, None)).reset()
    with pytest.raises(ConfigError, match="num_envs is 0"):
        Counting(0)
    with pytest.raises(ConfigError, match="max_steps is 0"):
        Counting(2, max_steps=0)
    with pytest.raises(ConfigError, match="step before the first reset"):
        Counting().step(Counting().rand_action())


# ------------------------------------------------------------------------------- partial resets


class Worlds(MarlEnv):
    """Keeps its state in every way that a partial reset must cope with."""

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


def test_a_partial_reset_keeps_views_and_constants():
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


def test_a_snapshot_keeps_views():
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
        # As many rows as envs, and yet a table that they share.
        (set_to("square", lambda env: torch.rand(3, 3)), r"writes square, \[3, 3\] before"),
        (lambda env: env.square.uniform_(), r"writes square, \[3, 3\] before"),
        (set_to("goal", lambda env: env.things if env.scalar else env.rows), None),
        (lambda env: env.rows.append(torch.zeros(3)), None),
        (
            lambda env: setattr(env, "rows", [torch.zeros(3)] if env.rows == [] else []),
            "takes rows.0 away",
        ),
    ],
)
def test_a_reset_of_what_all_envs_share_is_refused(on_reset, message):
    env = Worlds(on_reset=on_reset, seed=0)
    if message is None:
        reset_first(env)
        return
    with pytest.raises(SimulatorStateError, match=message):
        reset_first(env)


def test_what_holds_the_envs_is_found_without_a_trace():
    drawn = []
    for probed in (False, True):
        env, before = Worlds(seed=0), rng_states()
        env.reset()
        if probed:
            slots = {".".join(path): batched for path, batched in env._slots_of_envs().items()}
            assert not slots["square"] and slots["memory"] and slots["left"] and slots["things.a"]
            assert slots["start"] and slots["_buffers.buffer"]
            assert_same_rng(before, rng_states())
        with torch.random.fork_rng():
            torch.manual_seed(0)
            drawn.append(env.rand_step(env.reset())["next"])
    assert_same(*drawn)


def test_a_slot_that_no_probe_has_is_refused():
    env = Worlds(seed=0)
    env.later = torch.zeros(3)
    env.on_reset = set_to("later", lambda env: torch.ones(3))
    with pytest.raises(SimulatorStateError, match="writes later, which worlds of .* have not"):
        reset_first(env)


class OneSize(Worlds):
    """Cannot be built with another number of envs."""

    def __init__(self):
        super().__init__(3, seed=0)


def test_a_world_of_one_size_plays_without_a_word():
    env, before = OneSize(), rng_states()
    drawn = env.random_state.state_dict()
    with torch.random.fork_rng():
        assert env._slots_of_envs() is None
    assert_same_rng(before, rng_states())
    torch.testing.assert_close(env.random_state.state_dict(), drawn, equal_nan=True)
    after, _ = reset_first(env)
    assert after["car", "observation"].shape == (3, 1, 1)


def test_a_table_in_a_world_of_one_size_is_told():
    class Landmarks(OneSize):
        def _reset(self, tensordict):
            self.places = torch.rand(3)  # of three landmarks, not of three envs
            return super()._reset(tensordict)

        def _step(self, tensordict):
            given = super()._step(tensordict)
            given["car", "reward"] = (self.position - self.places).amax(1).view(-1, 1, 1)
            return given

    with pytest.warns(UserWarning, match=r"Landmarks: .* rows of places for .*num_envs") as caught:
        env = Landmarks()
        reset_first(env)
        reset_first(env)
    assert len(caught) == 1


@pytest.mark.parametrize("make", [lambda cls: cls(3, seed=0), lambda cls: cls(num_envs=3, seed=0)])
def test_a_world_that_hands_its_arguments_on_is_built_in_other_sizes(make):
    class HandsOn(Worlds):
        def __init__(self, *args, extra=1, **kwargs):
            super().__init__(*args, **kwargs)

    env = make(HandsOn)
    assert env.twin(7).num_envs == 7
    assert {(".".join(path)): x for path, x in env._slots_of_envs().items()}["square"] is False


def test_a_generator_of_its_own_cannot_be_saved():
    env = Counting()
    env.generator = torch.Generator()
    with pytest.raises(SimulatorStateError, match="generator is a Generator"):
        env.snapshot()


def test_nothing_of_torchrl_counts_as_the_world():
    env = Counting(3, max_steps=2)
    TransformedEnv(env, RewardSum()).rollout(5, break_when_any_done=False)
    check_env_specs(env)
    _ = env.fake_tensordict(), env.action_keys, env.state_spec, env.done_keys_groups
    world = {name for name in vars(env) if (name,) not in env._not_world}
    assert world == {"_episode", "_buffers", "_modules", "count", "seen", "script"}


# ------------------------------------------------------------------------------------- toy worlds


def episode_return(env, action_of, n=4096):
    td, total = env.reset(), 0
    ended = torch.zeros(env.num_envs, 1, dtype=torch.bool)
    for _ in range(100):
        td = env.step(action_of(td))["next"]
        # The same to all who live, and nothing to the others.
        earned = torch.cat([td[name, "reward"] for name in env.group_map], 1).squeeze(-1)
        most = earned.gather(1, earned.abs().argmax(1, keepdim=True))
        total = total + torch.where(ended, 0.0, most)
        ended = ended | td["done"]
        if ended.all():
            return total.squeeze(-1)
    raise AssertionError("an episode does not end")


def best_arena_action(env):
    def act(td):
        td = env.rand_action(td)
        for group in env.group_map:
            for agent in td[group].unbind(1):
                cue, action = agent["observation"][:, :-2], agent["action"]
                if not env.continuous_actions:
                    cue = cue if action.ndim > 1 else cue.argmax(-1)
                agent["action"].copy_(cue)
        return td

    return act


ARENAS = [
    {},
    {"action_mask": True},
    {"continuous_actions": True},
    {"n_groups": 2, "max_steps": 8, "lives": 1},
    {"n_agents": 3, "years": 2, "n_actions": 2},
    {"late_spawn": 3, "lives": 2},
    {"late_spawn": 1, "max_steps": 9, "categorical_actions": False},
    {"kinds": 2, "n_actions": 5},
    {"kinds": 2, "n_actions": 7, "action_mask": True, "late_spawn": 4, "n_groups": 2, "lives": 1},
]


@pytest.mark.parametrize("kwargs", ARENAS, ids=str)
def test_arena_has_the_returns_that_it_states(kwargs):
    env = Arena(3000, seed=0, **kwargs)
    best = episode_return(env, best_arena_action(env))
    torch.testing.assert_close(best, torch.full_like(best, env.optimal_return))
    torch.manual_seed(0)
    returns = episode_return(env, env.rand_action)
    error = 4 * returns.std() / len(returns) ** 0.5
    assert abs(returns.mean() - env.random_return) < error
    assert env.random_return < env.optimal_return / 2


def test_arena_agents_die_one_by_one():
    env = Arena(2, n_agents=3, years=2, seed=0)
    td, alive = env.reset(), []
    for _ in range(6):
        td = env.step(best_arena_action(env)(td))["next"]
        alive.append((~td["agents", "terminated"][0]).sum().item())
    assert alive == [3, 2, 2, 1, 1, 0]
    assert td["terminated"].all()


def test_arena_masks_leave_the_right_answer():
    env = Arena(50, action_mask=True, lives=1, seed=0)
    td = env.rollout(6, break_when_any_done=False)
    legal, mask = td["agents", "action_mask"], td["agents", "mask"]
    assert (legal.sum(-1) == torch.where(mask, 3, 0)).all()
    right = td["agents", "observation"][..., :-2].bool()
    assert (legal | ~right).all()
    chosen = legal.gather(-1, td["agents", "action"].unsqueeze(-1)).squeeze(-1)
    assert chosen[mask].all()


@pytest.mark.parametrize(
    ("env", "best"),
    [
        (lambda: MatrixGame(9), [0, 0]),
        (lambda: MatrixGame(9, payoff="penalty"), [0, 0]),
        (lambda: MatrixGame(9, payoff=[[[1.0, 2], [3, 4]], [[5, 6], [7, 9]]]), [1, 1, 1]),
        (lambda: TwoStepGame(9), [1, 1]),
    ],
)
def test_games_have_the_returns_that_they_state(env, best):
    env = env()
    action = torch.tensor(best).expand(9, -1)
    returns = episode_return(env, lambda td: td.set(("agents", "action"), action))
    assert (returns == env.optimal_return).all()


def test_two_step_game_has_its_table():
    env = TwoStepGame(8)
    joint = torch.cartesian_prod(*[torch.arange(2)] * 3)
    second = iter([torch.stack([joint[:, 0], joint[:, 1]], 1), joint[:, 1:]])
    returns = episode_return(env, lambda td: td.set(("agents", "action"), next(second)))
    assert returns.tolist() == [7, 7, 7, 7, 0, 1, 1, 8]
    assert returns.mean() == env.random_return


@pytest.mark.parametrize("name", TOY_ENVS)
def test_unknown_arguments_are_refused(name):
    with pytest.raises(ConfigError, match="has no argument 'max_step'; did you mean 'max_steps'"):
        TOY_ENVS[name](2, max_step=3)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"n_agents": 0},
        {"n_groups": 3},
        {"n_actions": 1},
        {"lives": 0},
        {"action_mask": True, "n_actions": 2},
        {"action_mask": True, "continuous_actions": True},
        {"kinds": 3},
        {"kinds": 2, "n_agents": 1},
        {"kinds": 2, "n_actions": 3},
        {"kinds": 2, "continuous_actions": True},
        {"late_spawn": -1},
    ],
    ids=str,
)
def test_arena_refuses_what_cannot_be(kwargs):
    with pytest.raises(ConfigError, match="Arena"):
        Arena(2, **kwargs)


def test_matrix_game_refuses_what_cannot_be():
    with pytest.raises(ConfigError, match="did you mean 'climbing'"):
        MatrixGame(2, payoff="climb")
    with pytest.raises(ConfigError, match="one dim an agent"):
        MatrixGame(2, payoff=[[1.0, 2, 3], [4, 5, 6]])


def test_a_mask_that_only_the_reset_gives_is_refused():
    """Who waits would act, without a word, from the first step."""

    class Forgets(MarlEnv):
        def __init__(self):
            super().__init__(3, seed=0)
            self.register_agent(AgentSpec("a", 2, Unbounded((1,)), Unbounded((1,))))

        def _reset(self, tensordict):
            waits = torch.tensor([True, False]).repeat(3, 1)
            return {"a": {"observation": torch.zeros(3, 2, 1), "mask": waits}}

        def _step(self, tensordict):
            return {"a": {"observation": torch.zeros(3, 2, 1), "reward": torch.zeros(3, 2, 1)}}

    with pytest.raises(SpecError, match="_step gave no .*mask.*, but _reset did"):
        Forgets().rollout(2)


@pytest.mark.parametrize(
    "spec", [Composite(x=Unbounded((2,))), Categorical(4), Unbounded(()), torch.zeros(3)]
)
def test_a_state_is_a_tensor_of_floats(spec):
    class World(MarlEnv):
        def __init__(self, spec):
            super().__init__(3, seed=0)
            self.register_state(spec)

        def _reset(self, tensordict):
            return {}

        _step = _reset

    with pytest.raises(ConfigError, match="the state's spec is .*, expected one of floats"):
        World(spec)


def test_there_is_one_state():
    class World(MarlEnv):
        def __init__(self):
            super().__init__(3, seed=0)
            self.register_state(Unbounded((2,)))
            self.register_state(Unbounded((1,)))

        def _reset(self, tensordict):
            return {}

        _step = _reset

    with pytest.raises(ConfigError, match="a state is registered already"):
        World()
