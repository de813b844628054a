"""MarlEnv with groups of several kinds of agents."""

import pytest
import torch
from contract import asking_reset, assert_same, draw_actions, play
from pets import CAT, Pets, step
from tensordict import TensorDict
from torchrl.collectors import Collector
from torchrl.data import Bounded, Categorical, Composite, OneHot, Unbounded
from torchrl.data.tensor_specs import Stacked, StackedComposite
from torchrl.envs import SerialEnv, TransformedEnv, check_env_specs
from torchrl.envs.utils import step_mdp

from torchrl_marl.envs import PadAgents
from torchrl_marl.errors import SpecError
from torchrl_marl.specs import AgentSpec, TeamSpec
from torchrl_marl.specs.groups import is_lazy
from torchrl_marl.specs.stacking import pad_group


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


def test_actions_of_dead_agents_are_zeroed():
    env = Pets(script=[{"terminated": [[True], [False], [True]]}])
    td = step_mdp(step(env))
    nan = [torch.full((2, 2), torch.nan), torch.ones(2, 2), torch.full((2, 1), torch.nan)]
    td = step(env, td, nan)
    assert td["next", "pets", "reward"][0].flatten().tolist() == [0, 2, 0]
    (seen,) = env.seen
    assert [m["action"][0].tolist() for m in seen["pets"].unbind(1)] == [[0, 0], [1, 1], [0]]
    assert seen["pets", "done"][0].flatten().tolist() == [True, False, True]
    assert td["pets"].unbind(1)[0]["action"].isnan().all()  # the caller's actions are unchanged


def test_in_place_write_to_earlier_output_raises():
    class Sloppy(Pets):
        def _give(self, **extra):
            self.x = self.x.add_(1) if hasattr(self, "x") else torch.zeros(2, 2, 3)
            out = super()._give(**extra)
            out["pets"]["cat"]["observation"] = self.x
            return out

    with pytest.raises(SpecError, match=r"its earlier output \('pets', 'cat', 'observation'\)"):
        step(Sloppy())


def test_partial_reset_keeps_running_envs():
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


def test_random_actions_are_zero_in_padding():
    env = TransformedEnv(Pets(20), PadAgents())
    td = env.rand_action(env.reset())
    assert td["pets", "action"].shape == (20, 3, 2)
    assert (td["pets", "action"][:, 2, 1] == 0).all()
    assert (td["pets", "action"][:, 2, 0] != 0).all()
