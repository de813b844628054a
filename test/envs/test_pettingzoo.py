"""PettingZooEnv on parallel environments: groups, specs, infos, masks, scripted and real ones."""

import subprocess
import sys
import warnings

import gymnasium.spaces as spaces
import numpy as np
import pytest
import torch
from played import rollout_of_ones
from scripted import BOX, Script
from tensordict import TensorDict
from torchrl.envs import check_env_specs
from torchrl.envs.utils import MarlGroupMapType

from torchrl_marl.envs import PettingZooEnv, make_env
from torchrl_marl.errors import ConfigError
from torchrl_marl.specs import TeamSpec

# ------------------------------------------------------------------------------ groups, specs


def test_groups_are_prefixes_of_the_ids():
    td = rollout_of_ones(Script("bob_0 bob_1 alice", [{}]), 1, max_steps=1)
    assert td["bob", "mask"].shape == (1, 1, 2) and td["alice", "mask"].shape == (1, 1, 1)


@pytest.mark.parametrize(
    "group_map, words",
    [
        ({"all": ["bob_0", "bob_1"]}, "'alice' has no group"),
        ({"all": ["bob_0", "bob_1", "alicia"]}, "'alicia'.*did you mean 'alice'"),
        ({"x": ["bob_0", "bob_1"], "y": ["alice", "bob_0"]}, "'bob_0' is in 'x' and 'y'"),
    ],
)
def test_invalid_group_map_is_refused(group_map, words):
    with pytest.raises(ConfigError, match=words):
        PettingZooEnv(Script("bob_0 bob_1 alice", [{}]), group_map=group_map)


def test_heterogeneous_group():
    world = Script(
        "bob_0 bob_1 eve bob_2",
        [{"earns": {"eve": 2.0}}],
        observation={"eve": spaces.Box(-9, 9, (3,))},
        action={"eve": spaces.Discrete(4, start=5), "bob_2": spaces.Box(-1, 1, (2, 2))},
    )
    with pytest.raises(ConfigError, match="bob_2.*its own group"):
        PettingZooEnv(world, group_map=MarlGroupMapType.ALL_IN_ONE_GROUP)
    del world.done_by["bob_2"]
    env = PettingZooEnv(world, max_steps=4, group_map=MarlGroupMapType.ALL_IN_ONE_GROUP)
    check_env_specs(env)
    group = TeamSpec.from_env(env).groups["agents"]
    assert group.agent_names == ("bob_0", "bob_1", "eve", "bob_2")
    assert group.action_dims == (2, 2, 4, 2) and group.observation_dims == (2, 2, 3, 2)
    td = env.rollout(3)
    assert {got["eve"] for got in world.got} <= {5, 6, 7, 8}
    assert td["next", "agents", "reward"][0, 0, :, 0].tolist() == [0, 0, 2, 0]


def test_actions_of_all_spaces_reach_the_environment():
    forms = {
        "a": spaces.Box(-1, 1, (2, 2), np.float64),
        "b": spaces.MultiDiscrete([3, 4]),
        "c": spaces.MultiBinary(3),
        "d": spaces.MultiBinary((2, 3)),
    }
    world = Script("a b c d", [{}], action=forms)
    env = PettingZooEnv(world, max_steps=5, seed=1)
    check_env_specs(env)
    env.rollout(5)
    assert all(form.contains(got[agent]) for got in world.got for agent, form in forms.items())


def test_dict_and_image_observations():
    kinds = {
        "a": spaces.Dict({"x": spaces.Box(0, 255, (4, 4, 3), np.uint8), "y": spaces.Discrete(3)}),
        "b": spaces.Box(0, 1, (), np.float32),
    }

    class Seen(Script):
        def _observe_agents(self, agents):
            image = np.full((4, 4, 3), self.t, np.uint8)
            return {"a": {"x": image, "y": 2}, "b": np.float32(0.5)}

    env = PettingZooEnv(Seen("a b", [{}], observation=kinds), max_steps=3, state="observations")
    check_env_specs(env)
    td = env.rollout(2)
    assert td["next", "a", "observation", "x"].shape == (1, 2, 1, 4, 4, 3)
    assert td["next", "a", "observation", "x"][0, :, 0, 0, 0, 0].tolist() == [1, 2]
    assert td["a", "observation", "y"].flatten().tolist() == [2, 2]
    assert td["next", "state"].shape == (1, 2, 4 * 4 * 3 + 1 + 1)


def test_discrete_observations_start_at_zero():
    kinds = {
        "a": spaces.Discrete(3, start=5),
        "b": spaces.MultiDiscrete([3, 4], start=[1, -1]),
        "c": spaces.MultiBinary((2, 3)),
    }
    world = Script("a b c", [{}], observation=kinds)
    world._observe_agents = lambda agents: {
        "a": 7,
        "b": np.array([3, -1]),
        "c": np.eye(2, 3, dtype=np.int8),
    }
    td = rollout_of_ones(world, 1, max_steps=1)
    seen = [td["next", agent, "observation"].flatten().tolist() for agent in "abc"]
    assert seen == [[2], [2, 0], [1, 0, 0, 0, 1, 0]]


def test_state_is_from_the_environment_or_the_observations():
    class Stateful(Script):
        def state(self):
            return np.array([[self.t, 7]])

    steps = [{}, {"agents": "bob_0", "dies": "bob_1"}, {}]
    td = rollout_of_ones(Stateful("bob_0 bob_1", steps), 3, max_steps=3, state="world")
    assert td["next", "state"][0].tolist() == [[1, 7], [2, 7], [3, 7]]
    td = rollout_of_ones(Script("bob_0 bob_1", steps), 3, max_steps=3, state="observations")
    assert td["next", "state"][0].tolist() == [[0, 1, 1, 1], [0, 2, 1, 2], [0, 3, 0, 0]]
    with pytest.raises(ConfigError, match="no state"):
        PettingZooEnv(Script("bob_0", [{}]), state="world")


# --------------------------------------------------------------------------------- infos, masks


def test_infos_that_are_missing_in_some_steps():
    infos = [{"ping": 1}, {"pong": np.float64(2.5), "name": "x"}, {"ping": True, "pong": "lost"}]
    world = Script("bob_0", [{}], infos=infos)
    td = rollout_of_ones(world, 3, max_steps=3, info=True)
    assert set(td["bob", "info"].keys()) == {"ping", "pong"}
    assert td["bob", "info", "ping"].flatten().tolist() == [1, 0, 1]
    assert td["next", "bob", "info", "ping"].flatten().tolist() == [0, 1, 1]
    assert td["next", "bob", "info", "pong"].flatten().tolist() == [2.5, 0, 0]
    td = rollout_of_ones(world, 1, max_steps=3, info=["pong"])
    assert list(td["bob", "info"].keys()) == ["pong"]
    td = rollout_of_ones(world, 1, max_steps=3)
    assert "info" not in td["bob"].keys()


def test_requested_info_that_never_appears_warns():
    world = Script("bob_0", [{}], infos=[{"ping": 1}])
    with pytest.warns(UserWarning, match="the info 'pang' .* there were 'ping'"):
        td = rollout_of_ones(world, 1, max_steps=3, info=["pang", "ping"])
    assert td["next", "bob", "info", "pang"].eq(0).all()
    assert td["next", "bob", "info", "ping"].eq(1).all()


def test_late_agents_have_an_action_mask():
    masks = [{"action_mask": np.array([0, 1], np.int8)}]
    world = Script("bob_0 bob_1", [{"agents": "bob_0 bob_1"}], first="bob_0", infos=masks)
    td = PettingZooEnv(world, seed=0, max_steps=9).rollout(9)
    legal = td["bob", "action_mask"][0].long().tolist()
    assert legal == [[[0, 1], [1, 1]]] + [[[0, 1], [0, 1]]] * 8
    assert all(set(got.values()) == {1} for got in world.got)


@pytest.mark.parametrize("where", ["observation", "info"])
def test_action_masks(where):
    class Masked(Script):
        def _observe_agents(self, agents):
            mask = np.array([0, 1, self.t % 2], np.int8)
            own = super()._observe_agents(agents)
            if where == "info":
                return own
            return {a: {"observation": x, "action_mask": mask} for a, x in own.items()}

    seen = {"observation": BOX, "action_mask": spaces.Box(0, 1, (3,), np.int8)}
    masks = [{"action_mask": np.array([0, 1, t % 2], np.int8)} for t in range(5)]
    world = Masked(
        "bob_0 bob_1",
        [{}, {"sees": "bob_0"}, {}],
        action={"bob_0": spaces.Discrete(3), "bob_1": spaces.Discrete(3)},
        observation={} if where == "info" else dict.fromkeys(["bob_0", "bob_1"], spaces.Dict(seen)),
        infos=masks if where == "info" else None,
    )
    if where == "observation":
        world._observe_agents = lambda agents: {
            a: {"observation": np.zeros(2), "action_mask": np.array([0, 1, world.t % 2], np.int8)}
            for a in agents
        }
    env = PettingZooEnv(world, max_steps=3)
    check_env_specs(env)
    td = env.rollout(3, break_when_any_done=False)
    legal = td["bob", "action_mask"][0].long().tolist()
    assert legal[0] == [[0, 1, 0]] * 2 and legal[1] == [[0, 1, 1]] * 2
    assert legal[2] == [[0, 1, 0], [1, 1, 1]]  # the second one waits
    assert all(got["bob_0"] in (1, 2) for got in world.got)


# ----------------------------------------------------------------------------- custom environments


def make_script(n=2):
    return Script(" ".join(f"bob_{i}" for i in range(n)), [{}])


def test_env_from_a_factory_an_object_or_a_module():
    assert PettingZooEnv(make_script, n=3, num_envs=2).team.n_agents == 3
    world = make_script()
    env = PettingZooEnv(world, max_steps=3)
    env.rollout(2)
    assert len(world.got) == 2  # itself, no copy
    env = PettingZooEnv(world, num_envs=3, max_steps=3)
    env.rollout(2)
    assert len(world.got) == 2
    import mpe2.simple_spread_v3 as module

    assert PettingZooEnv(module, N=2).team.n_agents == 2


def test_environment_that_cannot_be_copied_needs_a_factory():
    world = make_script()
    world.lock = __import__("threading").Lock()
    PettingZooEnv(world)
    with pytest.raises(ConfigError, match="pass a function that returns"):
        PettingZooEnv(world, num_envs=2)


@pytest.mark.parametrize(
    "name", ["mpe2/simple_spread", "classic/tictactoe", "rware/rware-tiny-2ag"]
)
def test_name_without_a_version_selects_the_newest(name):
    pytest.importorskip(name.partition("/")[0].replace("classic", "pettingzoo"))
    assert make_env(f"pettingzoo/{name}", num_envs=1, max_steps=2, seed=0).rollout(2).shape == (
        1,
        2,
    )


def test_make_env_builds_pettingzoo_environments():
    env = make_env("pettingzoo/mpe2/simple_spread_v3", num_envs=2, seed=0, N=2)
    assert isinstance(env, PettingZooEnv) and env.batch_size == (2,)
    assert env.team.n_agents == 2 and not env.team.groups["agent"].discrete
    env = make_env("pettingzoo/mpe2/simple_spread_v3", num_envs=1, continuous_actions=False)
    assert env.team.groups["agent"].discrete


# ------------------------------------------------------------------------------- real environments


def test_mujoco_infos_that_are_missing_at_reset():
    env = PettingZooEnv("gymnasium_robotics/Ant", agent_conf="2x4", info=True, seed=0)
    td = env.rollout(80, break_when_any_done=False)
    assert td["next", "terminated"].any() and td["next", "agent", "reward"].dtype == torch.float32
    assert td["next", "agent", "info", "x_position"].abs().sum() > 0
    assert (
        td["next", "agent", "reward"][..., 0, :] == td["next", "agent", "reward"][..., 1, :]
    ).all()


def test_knights_die_one_by_one():
    env = PettingZooEnv(
        "butterfly/knights_archers_zombies_v11", seed=0, spawn_delay=3, line_death=True
    )
    td = env.rollout(200, break_when_any_done=False)
    mask = torch.cat([td[g, "mask"] for g in ("archer", "knight")], -1)
    assert mask.all(-1).any() and (mask.any(-1) & ~mask.all(-1)).any()


def test_building_opens_no_window_and_prints_nothing():
    program = (
        "import warnings; warnings.simplefilter('error'); "
        "from torchrl_marl.envs.pettingzoo.build import maker_of; "
        "maker_of('sisl/pursuit_v5', 'auto', {}, None, 1)(); "
        "maker_of('mpe2/simple_spread_v3', 'auto', {}, True, 1)()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PettingZooEnv("sisl/pursuit_v5").rollout(2)


def test_auto_reset_in_step_is_not_repeated_by_maybe_reset(monkeypatch):
    env = PettingZooEnv("mpe2/simple_spread_v3", num_envs=2, max_steps=2, seed=0)
    td = env.rollout(1)[:, -1]
    begun = []
    start = env._start

    def recorded(fresh):
        begun.append(fresh.tolist())
        return start(fresh)

    monkeypatch.setattr(env, "_start", recorded)
    td = env.step(env.rand_action(env.step_mdp(td)))
    assert td["next", "done"].all()
    carried = env.maybe_reset(env.step_mdp(td))
    assert not begun  # the step has reset each environment once
    # A reset in the middle of an episode is carried out.
    env.step(env.rand_action(carried))
    env.reset(TensorDict({"_reset": torch.tensor([[False], [True]])}, [2]))
    assert begun == [[False, True]]
    env.close()
