"""Specs of teams that are read from environments, and invalid specs."""

from functools import partial

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Binary, Bounded, Categorical, Composite, OneHot, Unbounded
from torchrl.envs import RenameTransform, RewardSum, StepCounter, TransformedEnv
from torchrl.testing.mocking_classes import ContinuousActionVecMockEnv

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.collectors import TeamPolicy
from torchrl_marl.envs import MarlEnv, PadAgents, check_marl_env, with_memory
from torchrl_marl.envs.toy import Arena, MatrixGame
from torchrl_marl.errors import SpecError
from torchrl_marl.modules import (
    MemoryConfig,
    NetworkConfig,
    RandomActor,
    RecurrentNetworkConfig,
    make_action_critic,
    make_actor,
    make_critic,
    make_deterministic_actor,
    make_q_actor,
)
from torchrl_marl.objectives import MAPPOLoss, ValueDecompositionLoss

ROVER = AgentSpec("rover", 3, Unbounded((9,)), Bounded(-2, 1, (2,)))
DRONE = AgentSpec("drone", 2, Unbounded((4,)), Categorical(5), action_mask=True)


def test_team_of_two_groups():
    team = TeamSpec([ROVER, DRONE], state_spec=Unbounded((7,)))
    rover, drone = team.groups["rover"], team.groups["drone"]
    assert team.n_agents == 5
    assert rover.agent_names == ("rover_0", "rover_1", "rover_2")
    assert (rover.n_agents, rover.observation_dim, rover.action_dim) == (3, 9, 2)
    assert (rover.discrete, drone.discrete, drone.one_hot, drone.n_actions) == (
        *(False, True, False),
        5,
    )
    assert rover.observation_key == ("rover", "observation")
    assert rover.observation_keys == (("rover", "observation"),)
    assert rover.reward_key == ("rover", "reward")
    assert rover.done_key == ("rover", "done")
    assert rover.mask_key == ("rover", "mask")
    assert rover.action_mask_key is None
    assert drone.action_mask_key == ("drone", "action_mask")
    assert rover.state_key == "state"
    assert rover.state_dim == 7
    assert rover.key("advantage") == ("rover", "advantage")
    assert not rover.heterogeneous
    low, high = rover.action_bounds
    assert low.shape == high.shape == (3, 2)
    assert (low == -2).all() and (high == 1).all()
    assert repr(team) == "TeamSpec(rover: 3, drone: 2, state)"


def test_group_of_two_kinds_is_heterogeneous():
    team = TeamSpec({"all": [ROVER, AgentSpec("car", 1, Unbounded((4,)), Bounded(-2, 1, (2,)))]})
    group = team.groups["all"]
    assert group.heterogeneous
    assert group.agent_names == ("rover_0", "rover_1", "rover_2", "car_0")
    assert group.kinds == (0, 0, 0, 1)
    # Sizes are those of the padded form.
    assert (group.observation_dim, group.action_dim) == (9, 2)
    assert group.observation_mask.sum(-1).tolist() == [9, 9, 9, 4]
    assert group.action_dims == (2, 2, 2, 2)
    assert group.action_padding is None
    assert [member["observation"].shape[-1] for member in group.members] == [9, 9, 9, 4]


def test_kinds_of_equal_shape_are_not_heterogeneous():
    twin = AgentSpec("twin", 1, Unbounded((9,)), Bounded(-2, 1, (2,)))
    group = TeamSpec({"all": [ROVER, twin]}).groups["all"]
    assert not group.heterogeneous
    assert group.kinds == (0, 0, 0, 1)
    assert group.observation_mask is None


def test_stacked_spec_of_heterogeneous_group_is_not_padded():
    car = AgentSpec("car", 1, Unbounded((4,)), Bounded(-2, 1, (1,)))
    stacked = TeamSpec({"all": [ROVER, car]}).stacked_spec()
    sizes = [(x["observation"].shape, x["action"].shape) for x in stacked.unbind(0)]
    assert sizes == [((9,), (2,))] * 3 + [((4,), (1,))]


def test_stacked_spec_has_all_agents():
    stacked = TeamSpec([ROVER, DRONE]).stacked_spec()
    assert stacked.shape == (5,)
    assert stacked[0]["observation"].shape == (9,)
    assert stacked[4]["observation"].shape == (4,)
    assert TeamSpec([ROVER]).stacked_spec()["observation"].shape == (3, 9)


def test_dict_observations_and_images():
    seen = Composite(image=Unbounded((3, 8, 8)), speed=Unbounded((2,)))
    group = TeamSpec([AgentSpec("car", 2, seen, OneHot(4))]).groups["car"]
    assert set(group.observation_keys) == {
        ("car", "observation", "image"),
        ("car", "observation", "speed"),
    }
    assert group.observation_dim == 3 * 64 + 2
    assert sorted(group.observation_ndims) == [1, 3]
    assert group.one_hot and group.n_actions == 4


def test_unbounded_actions_have_no_bounds():
    group = TeamSpec([AgentSpec("car", 2, Unbounded((1,)), Unbounded((2,)))]).groups["car"]
    assert group.action_bounds is None
    assert group.action_dim == 2


@pytest.mark.parametrize("kwargs", [{}, {"action_mask": True}, {"continuous_actions": True}])
def test_specs_read_from_env_match_declared_ones(kwargs):
    env = Arena(3, n_groups=2, **kwargs)
    read = TeamSpec.from_env(env)
    assert read.groups == env.team.groups
    assert read.state_spec == env.team.state_spec


def wrong_numbers():
    memory = RecurrentNetworkConfig([8], memory=MemoryConfig("gru", size=4))
    return {
        "drawn": (RandomActor, {}),
        "policy": (make_actor, {}),
        "none shared": (partial(make_actor, config=NetworkConfig([8], sharing="none")), {}),
        "values": (make_q_actor, {}),
        "deterministic": (make_deterministic_actor, {"continuous_actions": True}),
        "memory": (partial(make_actor, config=memory), {}),
        "kinds": (make_actor, {"kinds": 2}),
        "kinds drawn": (RandomActor, {"kinds": 2}),
    }


@pytest.mark.parametrize("n_agents", [2, 6])
@pytest.mark.parametrize("case", wrong_numbers())
def test_policy_for_another_number_of_agents_raises(case, n_agents):
    make, settings = wrong_numbers()[case]
    group = TeamSpec.from_env(Arena(2, n_agents=4, **settings)).groups["agents"]
    other = Arena(2, n_agents=n_agents, **settings)
    policy = TeamPolicy([make(group)])
    expected = (
        rf"^group 'agents'(: \('agents', 'observation'\) is .*, expected .*, 4, \d\): it)? has "
        rf"{n_agents} agents here, and its policy was built for 4; build one for this team and "
        r"load the weights that do not depend on their number \(docs/faq\.md\), or .*export\.md\)"
    )
    with pytest.raises(SpecError, match=expected):
        with_memory(other, policy).rollout(2, policy)


def test_transforms_do_not_change_the_groups():
    env = TransformedEnv(MatrixGame(3), RewardSum())
    env.append_transform(StepCounter())
    assert TeamSpec.from_env(env).groups == TeamSpec.from_env(MatrixGame(3)).groups


def test_specs_of_vmas_env():
    pytest.importorskip("vmas")
    from torchrl.envs.utils import MarlGroupMapType

    from torchrl_marl.envs import VmasEnv

    env = VmasEnv("balance", num_envs=2, n_agents=3)
    group = TeamSpec.from_env(env).groups["agents"]
    assert group.agent_names == ("agent_0", "agent_1", "agent_2")
    assert not group.agent_done
    assert (group.done_key, group.terminated_key, group.truncated_key) == (
        *("done", "terminated"),
        "truncated",
    )
    assert group.mask_key is None and group.state_key is None
    with pytest.raises(ValueError, match="gives no 'state'"):
        _ = group.state_dim
    each = MarlGroupMapType.ONE_GROUP_PER_AGENT
    team = TeamSpec.from_env(VmasEnv("balance", num_envs=2, n_agents=3, group_map=each))
    assert list(team.groups) == ["agent_0", "agent_1", "agent_2"]
    assert team.n_agents == 3
    mixed = TeamSpec.from_env(VmasEnv("simple_tag", num_envs=2, group_map={
        "all": ["adversary_0", "adversary_1", "adversary_2", "agent_0"]}))  # fmt: skip
    assert mixed.groups["all"].heterogeneous


def test_specs_of_torchrl_vmas_env():
    pytest.importorskip("vmas")
    import torchrl.envs

    group = TeamSpec.from_env(torchrl.envs.VmasEnv("balance", num_envs=2)).groups["agents"]
    assert group.truncated_key is None
    assert group.terminated_key == "terminated"


def test_env_without_groups_raises():
    with pytest.raises(ValueError, match="has no groups: its action keys are"):
        TeamSpec.from_env(ContinuousActionVecMockEnv())


@pytest.mark.parametrize("env", ["toy/arena", None, 3])
def test_spec_of_anything_but_an_env_raises(env):
    with pytest.raises(TypeError, match="takes an environment of TorchRL, found .*make_env builds"):
        TeamSpec.from_env(env)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ("rover", r"found 'rover'; use TeamSpec.from_env\(env\).groups\['rover'\]"),
        (TeamSpec([ROVER]), r"found a TeamSpec; .* such as team.groups\['rover'\]"),
        ({"rover": 3}, "found a dict"),
    ],
)
def test_networks_and_losses_of_anything_but_a_group_raise(group, message):
    rover = TeamSpec([ROVER]).groups["rover"]
    actor, critic = make_actor(rover), make_critic(rover)
    with pytest.raises(TypeError, match="make_actor takes .*" + message):
        make_actor(group)
    with pytest.raises(TypeError, match="make_critic takes .*" + message):
        make_critic(group)
    with pytest.raises(TypeError, match="MAPPOLoss takes .*" + message):
        MAPPOLoss(actor, critic, group=group)


@pytest.mark.parametrize("make", [make_q_actor, make_deterministic_actor, make_action_critic])
def test_off_policy_networks_of_anything_but_a_group_raise(make):
    with pytest.raises(TypeError, match=f"{make.__name__} takes .*found 'rover'"):
        make("rover")


def test_off_policy_losses_of_anything_but_a_group_raise():
    seeker = AgentSpec("seeker", 2, Unbounded((3,)), Categorical(4))
    q_actor = make_q_actor(TeamSpec([seeker]).groups["seeker"])
    with pytest.raises(TypeError, match="ValueDecompositionLoss takes .*found a TeamSpec"):
        ValueDecompositionLoss(q_actor, group=TeamSpec([seeker]))


def test_env_without_observations_raises():
    env = TransformedEnv(
        MatrixGame(2), RenameTransform([("agents", "observation")], [("agents", "seen")])
    )
    with pytest.raises(ValueError, match=r"no 'observation', found \['mask', 'seen'\]"):
        TeamSpec.from_env(env)


def test_groups_of_env_without_group_map():
    class Bare(MarlEnv):
        def __init__(self):
            super().__init__(2)
            self.register_agent(ROVER, "rovers")
            self.group_map = None

        def _reset(self, tensordict):
            return TensorDict({"rovers": {"observation": torch.zeros(2, 3, 9)}})

        _step = _reset

    group = TeamSpec.from_env(Bare()).groups["rovers"]
    assert group.agent_names == ("rovers_0", "rovers_1", "rovers_2")


def refused(message, make):
    with pytest.raises(ValueError, match=message):
        make()


def test_invalid_specs_raise():
    unbounded = Unbounded((1,))
    refused("n_agents is 0", lambda: AgentSpec("a", 0, unbounded, unbounded))
    refused("name is empty", lambda: AgentSpec("", 1, unbounded, unbounded))
    refused(
        "action_mask=True needs Categorical, OneHot, MultiCategorical or Hybrid actions, found Unb",
        lambda: AgentSpec("a", 1, unbounded, unbounded, action_mask=True),
    )
    refused("reserved key", lambda: TeamSpec({"next": [ROVER]}))
    refused("reserved key", lambda: TeamSpec([AgentSpec("state", 1, unbounded, unbounded)]))
    refused("no agents", lambda: TeamSpec({"empty": []}))
    refused("two kinds of agents have the same name", lambda: TeamSpec([ROVER, ROVER]))
    refused("all kinds of a group have an action_mask", lambda: TeamSpec({"a": [ROVER, DRONE]}))
    groups = TeamSpec([ROVER, DRONE]).groups
    refused("has discrete actions", lambda: groups["drone"].action_dim)
    refused("has continuous actions", lambda: groups["rover"].n_actions)


@pytest.mark.parametrize(
    ("leaf", "spec", "expected"),
    [
        ("mask", Unbounded((2, 2)), r"torch.float32 \(2,\), expected torch.bool \(2,\)"),
        (
            "mask",
            Categorical(2, shape=(2, 2, 1), dtype=torch.bool),
            r"torch.bool \(2, 1\), expected torch.bool \(2,\)",
        ),
        (
            "action_mask",
            Categorical(2, shape=(2, 2, 5), dtype=torch.bool),
            r"torch.bool \(2, 5\), expected torch.bool \(2, 2\)",
        ),
    ],
)
def test_mask_spec_of_wrong_shape_or_dtype_raises(leaf, spec, expected):
    env = MatrixGame(2, payoff="coordination")
    specs = env.full_observation_spec.clone()
    specs["agents", leaf] = spec
    env.full_observation_spec = specs
    refused(
        rf"group 'agents': the spec of \('agents', '{leaf}'\) is {expected}",
        lambda: TeamSpec.from_env(env),
    )


def test_group_without_members_raises():
    env = MatrixGame(2)
    env.group_map = {"agents": env.group_map["agents"], "nobody": []}
    refused("group 'nobody' of MatrixGame has no agents", lambda: TeamSpec.from_env(env))


# ------------------------------------------------------- kinds of one group, read from an env


class TwoKinds(MarlEnv):
    """Two kinds of equal observations under one name."""

    def __init__(self, first, second, **kwargs):
        super().__init__(8, seed=0, max_steps=5, **kwargs)
        for name, n, action in (("a", 2, first), ("b", 1, second)):
            self.register_agent(AgentSpec(name, n, Unbounded((3,)), action), "g")

    def _reset(self, tensordict):
        return {"g": {"observation": torch.randn(8, 3, 3)}}

    def _step(self, tensordict):
        return {"g": {"observation": torch.randn(8, 3, 3), "reward": torch.zeros(8, 3, 1)}}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("one_hot", [False, True])
def test_numbers_of_actions_in_a_dense_group_are_read(one_hot, padded):
    """TorchRL stacks such actions densely, with a mask in the spec."""
    kind = OneHot if one_hot else Categorical
    env = TwoKinds(kind(2), kind(4), check=True)
    env = TransformedEnv(env, PadAgents()) if padded else env
    group = TeamSpec.from_env(env).groups["g"]
    assert group.action_dims == (2, 2, 4)
    assert group.kinds == (0, 0, 1)
    assert group.action_padding.tolist() == [[True] * 2 + [False] * 2] * 2 + [[True] * 4]
    # The env would raise for an illegal action.
    env.rollout(30, make_actor(group), break_when_any_done=False)


def test_kinds_of_equal_shape_are_read():
    bounds = Bounded(-1, 1, (2,)), Bounded(-3, 3, (2,))
    for second in bounds:
        group = TeamSpec.from_env(TwoKinds(bounds[0], second)).groups["g"]
        assert group.kinds == (0, 0, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("2", Unbounded((1,)), Unbounded((1,))), "n_agents is '2', expected an int"),
        ((1, 3, Unbounded((1,))), "observation_spec is a int, expected a TensorSpec"),
        ((1, Unbounded((1,)), Bounded(-1, 1, ())), r"action_spec has shape \[\], expected \[A\]"),
        ((1, Unbounded((1,)), Categorical(3, shape=(1,))), r"has shape \[1\], expected \[\]"),
        (
            (1, Unbounded((1,)), Unbounded((1,)), Unbounded((2,))),
            r"reward_spec has shape \[2\], expected \[1\]",
        ),
    ],
)
def test_invalid_specs_of_an_agent_raise(arguments, message):
    refused(message, lambda: AgentSpec("a", *arguments))


def test_binary_mask_spec_raises():
    env = Arena(num_envs=2)
    env.set_spec_lock_(False)
    env.observation_spec["agents", "mask"] = Binary(4, shape=(2, 4), dtype=torch.bool)
    with pytest.raises(SpecError, match=r"as Categorical\(2, shape=\(\*B, N\), dtype=torch.bool"):
        TeamSpec.from_env(env)
    with pytest.raises(SpecError, match="not as Binary"):
        check_marl_env(env)
