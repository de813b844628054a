"""MarlEnv on small environments whose flags are written by hand."""

import pytest
import torch
from counting import Counting, play
from tensordict import TensorDict
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs import ParallelEnv, SerialEnv, TransformedEnv, check_env_specs
from torchrl.envs.transforms import RewardSum
from torchrl.envs.utils import step_mdp

from torchrl_marl.envs import MarlEnv
from torchrl_marl.errors import SpecError
from torchrl_marl.specs import AgentSpec, TeamSpec


def flags(td, group, key="done"):
    return td["next", group, key][0].flatten().tolist()


FIRST, SECOND = [[True], [False]], [[False], [True]]
BOTH = [[True], [True]]


def test_terminated_agents_stay_done_until_the_reset():
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


def test_truncated_agent_is_masked():
    env = Counting(script=[{("cats", "truncated"): SECOND}])
    *_, td = play(env, 2)
    assert flags(td, "cats", "truncated") == [False, True]
    assert flags(td, "cats", "terminated") == [False, False]
    assert td["next", "cats", "mask"][0].tolist() == [True, False]


def test_terminated_wins_if_both_flags_are_set():
    env = Counting(script=[{("cats", "truncated"): BOTH, ("cats", "terminated"): FIRST}])
    (td,) = play(env, 1)
    assert flags(td, "cats", "terminated") == [True, False]
    assert flags(td, "cats", "truncated") == [False, True]


def test_root_is_terminated_if_all_groups_are():
    script = [{("cats", "terminated"): BOTH}, {("dog", "terminated"): [[True]]}]
    first, second = play(Counting(script=script, max_steps=2), 2)
    assert not first["next", "done"].any()
    assert second["next", "terminated"].all()
    assert not second["next", "truncated"].any()
    assert not second["next", "dog", "mask"].any()


def test_root_is_truncated_if_some_agents_are_truncated():
    script = [{("cats", "terminated"): BOTH}, {("dog", "truncated"): [[True]]}]
    *_, td = play(Counting(script=script), 2)
    assert td["next", "truncated"].all()
    assert not td["next", "terminated"].any()


def test_time_limit_truncates_and_keeps_masks_of_living_agents():
    env = Counting(script=[{("cats", "terminated"): FIRST}], max_steps=3)
    *_, before, td = play(env, 3)
    assert not before["next", "done"].any()
    assert td["next", "truncated"].all()
    assert not td["next", "terminated"].any()
    assert flags(td, "cats", "terminated") == [True, False]
    assert flags(td, "cats", "truncated") == [False, True]
    assert td["next", "cats", "mask"][0].tolist() == [False, True]
    assert td["next", "dog", "mask"].all()


def test_waiting_agents_are_unmasked_at_the_time_limit():
    env = Counting(script=[{("cats", "mask"): [True, False]}] * 3, max_steps=3)
    masks = [td["next", "cats", "mask"][0].tolist() for td in play(env, 3)]
    assert masks == [[True, False], [True, False], [True, True]]


@pytest.mark.parametrize("key", ["terminated", "truncated"])
def test_env_may_set_the_done_flags_of_the_root(key):
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


def test_actions_of_waiting_and_dead_agents_have_no_effect():
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
    assert td["cats", "action"].isnan().all()  # the caller's actions are unchanged


def test_env_works_with_torchrl_wrappers():
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


@pytest.mark.environments
@pytest.mark.filterwarnings("ignore")
def test_env_works_in_parallel_env():
    env = ParallelEnv(2, Counting, mp_start_method="fork")
    assert env.rollout(3).shape == (2, 2, 3)
    env.close()


def test_subclass_may_extend_step():
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
