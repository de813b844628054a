"""PadAgents: dense groups outside, lazily stacked groups inside."""

import pytest
import torch
from contract import asking_reset, assert_same, base_of, draw_actions, play
from torchrl import set_auto_unwrap_transformed_env
from torchrl.data.tensor_specs import StackedComposite
from torchrl.envs import (
    Compose,
    ParallelEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    check_env_specs,
)
from torchrl.envs.utils import MarlGroupMapType, step_mdp

from torchrl_marl.envs import PadAgents
from torchrl_marl.envs.toy import Arena, SpeakerListener
from torchrl_marl.envs.transforms import with_dense_groups
from torchrl_marl.specs import TeamSpec
from torchrl_marl.specs.stacking import pad_group, unpad_group

E, T = 4, 7


def vmas(scenario, **kwargs):
    def make(seed=0):
        envs = pytest.importorskip("torchrl_marl.envs.vmas")
        group_map = MarlGroupMapType.ALL_IN_ONE_GROUP
        return envs.VmasEnv(
            scenario, num_envs=E, seed=seed, max_steps=5, group_map=group_map, **kwargs
        )

    return make


def toy(cls, **kwargs):
    return lambda seed=0: cls(E, seed=seed, max_steps=5, **kwargs)


COMM = {"num_adversaries": 2, "num_good_agents": 1, "num_food": 1, "num_forests": 1}
WORLDS = {
    "continuous": toy(SpeakerListener, continuous_speech=True, one_group=True),
    "categorical": toy(Arena, kinds=2),
    "one_hot": toy(Arena, kinds=2, categorical_actions=False),
    "masked": toy(Arena, kinds=2, n_actions=6, action_mask=True, late_spawn=1),
    "groups": toy(Arena, kinds=2, n_groups=2),
    "vmas_continuous": vmas("simple_world_comm", **COMM),
    "vmas_categorical": vmas("simple_world_comm", **COMM, continuous_actions=False),
    "vmas_one_hot": vmas("simple_adversary", continuous_actions=False, categorical_actions=False),
}


@pytest.fixture(params=WORLDS)
def make(request):
    return WORLDS[request.param]


def padded(env, *others):
    return TransformedEnv(env, Compose(PadAgents(), *others) if others else PadAgents())


def padded_speaker_and_listener():
    return padded(WORLDS["continuous"]())


def padded_actions(env, actions):
    """The lazy env's actions as the padded one takes them."""
    groups = TeamSpec.from_env(env).groups
    padded = [action.clone() for action in actions]
    for action in padded:
        for name, group in groups.items():
            action[name] = pad_group(action[name], group.paddings)
    return padded


def test_padded_values_equal_those_of_the_environment(make):
    lazy, dense = make(), padded(make())
    groups = TeamSpec.from_env(lazy).groups
    actions = draw_actions(lazy, T)
    outside = padded_actions(lazy, actions)
    steps = zip(play(lazy, lazy.reset(), actions), play(dense, dense.reset(), outside))
    for expected, found in steps:
        for name, group in groups.items():
            for part in ((), ("next",), ("following",)):
                one, other = expected[(*part, name)], found[(*part, name)]
                assert_same(pad_group(one, group.paddings), other)
                assert_same(one, unpad_group(other, group.paddings))
        assert_same(expected.exclude(*groups, "next", "following"),
                    found.exclude(*groups, "next", "following"))  # fmt: skip


def test_specs_are_dense_and_keep_the_team(make):
    env = padded(make())
    check_env_specs(env)
    team, own = TeamSpec.from_env(env), TeamSpec.from_env(make())
    for name, group in team.groups.items():
        for spec in (env.full_observation_spec, env.full_action_spec, env.full_reward_spec):
            assert not isinstance(spec[name], StackedComposite)
            assert spec[name].shape == (E, group.n_agents)
        assert group.members == own.groups[name].members
        assert group.paddings == own.groups[name].paddings
        assert group.action_dims == own.groups[name].action_dims
        assert group.paddings


def test_random_actions_are_padded_and_legal(make):
    env = padded(make())
    for group in TeamSpec.from_env(env).groups.values():
        td = env.rand_action(env.reset())
        action, sizes = td[group.action_key], torch.tensor(group.action_dims)
        assert action.shape[:2] == (E, group.n_agents)
        if group.discrete and not group.one_hot:
            assert (action < sizes).all()
        else:
            outside = torch.arange(action.shape[-1]) >= sizes.unsqueeze(-1)
            assert not action.bool()[outside.expand_as(action)].any()
        if group.action_mask_key is not None:
            index = action.long().argmax(-1) if group.one_hot else action
            legal = td[group.action_mask_key].gather(-1, index.unsqueeze(-1)).squeeze(-1)
            assert legal[td[group.mask_key]].all()


@pytest.mark.parametrize("value", [float("nan"), 1e9])
def test_padding_in_actions_has_no_effect(make, value):
    clean, dirty = padded(make()), padded(make())
    groups = TeamSpec.from_env(clean).groups
    actions = padded_actions(make(), draw_actions(make(), T))
    poisoned = [action.clone() for action in actions]
    for name, group in groups.items():
        padding = group.paddings.get("action")
        for action in poisoned if padding is not None else ():
            x = action[name, "action"]
            x[..., ~padding.mask()] = value if x.is_floating_point() else value == value
    steps = play(clean, clean.reset(), actions), play(dirty, dirty.reset(), poisoned)
    for expected, found in zip(*steps):
        for each in (expected, found):
            for name in groups:
                del each[name, "action"]
                each["following"].get(name).pop("action", None)
        assert_same(expected, found)


@pytest.mark.parametrize("first", [True, False])
def test_reward_sum_and_step_counter_before_and_after_padding(make, first):
    others = (RewardSum(), StepCounter())
    env = TransformedEnv(
        make(), Compose(*((PadAgents(), *others) if first else (*others, PadAgents())))
    )
    check_env_specs(env)
    td = env.rollout(T, break_when_any_done=False)
    assert td["next", "step_count"][0].flatten().tolist() == [1, 2, 3, 4, 5, 1, 2]
    for name in TeamSpec.from_env(env).groups:
        total, running = td["next", name, "episode_reward"], 0
        for t in range(T):
            running = running + td["next", name, "reward"][:, t]
            torch.testing.assert_close(total[:, t], running)
            done = td["next", "done"][:, t].unsqueeze(-2)
            running = torch.where(done, 0.0, running)


def test_partial_reset(make):
    env = padded(make())
    td = step_mdp(env.step(env.rand_action(env.reset())))
    after = env.reset(asking_reset(env, td, [1, 2]))
    assert_same(td[[0, 3]], after[[0, 3]])
    assert set(after.keys(True, True)) == set(td.keys(True, True))
    assert base_of(env).rollout(1) is not None


def test_homogeneous_environments_are_unchanged(make):
    env = Arena(E, seed=0, max_steps=5)
    actions = draw_actions(env, T)
    other = padded(Arena(E, seed=0, max_steps=5))
    for a, b in zip(play(env, env.reset(), actions), play(other, other.reset(), actions)):
        assert_same(a, b)
    assert other.full_action_spec == env.full_action_spec


@pytest.mark.parametrize("name", ["continuous", "masked"])
def test_batched_environments(name):
    make = WORLDS[name]
    for env in (SerialEnv(2, lambda: padded(make())), padded(SerialEnv(2, make))):
        check_env_specs(env)
        td = env.rollout(T, break_when_any_done=False)
        group = next(iter(TeamSpec.from_env(env).groups))
        assert td[group, "observation"].shape[:3] == (2, E, T)


@pytest.mark.environments
def test_padding_in_parallel_env():
    env = ParallelEnv(1, padded_speaker_and_listener, mp_start_method="spawn")
    assert env.rollout(3)["team", "action"].shape == (1, E, 3, 2, 3)
    env.close()


def test_padding_joins_the_transforms_of_the_environment():
    """TorchRL warns of a transformed environment in another, and resuming needs one level."""
    summed = TransformedEnv(Arena(E, kinds=2, seed=0), RewardSum())
    with set_auto_unwrap_transformed_env(False):
        assert with_dense_groups(summed).base_env is summed.base_env
