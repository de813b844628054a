"""Invalid routes: errors in the first call, or in the constructor where specs are given."""

import pytest
import torch
from routed import (
    ACTION,
    OBSERVATION,
    actions_one_by_one,
    assert_actions,
    list_actions,
    make_policy,
    random_lazy_group,
)
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.data import Categorical as CategoricalSpec

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.contrib import RoutedSequential

# ------------------------------------------------------------------------- errors in the first call

DRONE, ROVER = make_policy(5, 4), make_policy(3, 2)
REFUSED = {
    "left out": (lambda: [DRONE], [5, 3, 3], "no module .* agents 1, 2 of group 'agents'.*observ"),
    "left out by routes": (lambda: [(DRONE, [0])], [5, 5], "no module .* agent 1 of group"),
    "no action": (
        lambda: [DRONE, make_policy(3, 2, out_key="hidden")],
        [5, 3],
        "agent 1 of group 'agents' got hidden but no .'agents', 'action'.",
    ),
    "on nobody": (
        lambda: [DRONE, make_policy(4, 2, "camera")],
        [5, 5],
        "module 1 reads .*camera.*, which no agent .* has: .*observation",
    ),
    "both": (
        lambda: [DRONE, make_policy(5, 4)],
        [5, 5],
        "modules 0 and 1 both write .* agents 0, 1",
    ),
    "overlap": (
        lambda: [(DRONE, [0, 1]), (make_policy(5, 4), [1, 2])],
        [5, 5, 5],
        "modules 0 and 1 both write .* for agent 1 of",
    ),
    "no width": (
        lambda: [TensorDictModule(lambda x: x, in_keys=[OBSERVATION], out_keys=[ACTION])],
        [5, 3],
        r"module 0 .* different shapes, found .*\[5\] for agents \[0\] and \[3\] for agents \[1\]",
    ),
    "another width": (
        lambda: [make_policy(4, 2)],
        [5, 3],
        "its first layer takes 4 features.*give it a route",
    ),
    "shapes on a route": (lambda: [(DRONE, [0, 1])], [5, 3], "different shapes"),
    "lacking key": (
        lambda: [(make_policy(5, 4, "camera"), [0]), (ROVER, [1])],
        [5, 3],
        "module 0 reads .*camera.*, but agent 0 .* on its route: .* has observation",
    ),
    "beyond": (lambda: [(DRONE, [0, 2])], [5, 5], r"route to agents \[2\] .* expected 0 to 1"),
    "no group": (
        lambda: [(make_policy(5, 4, path=("team",)), [0])],
        [5],
        r"module 0 has a route, but no group: found \['agents'\]",
    ),
    "outside": (
        lambda: [
            (TensorDictModule(nn.Linear(5, 2), in_keys=[OBSERVATION], out_keys=["action"]), [0])
        ],
        [5, 5],
        "runs on agent 0 of group 'agents' only and writes 'action'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_routes_raise_in_first_call(case):
    make, widths, message = REFUSED[case]
    policy = RoutedSequential(*make())
    td = random_lazy_group(widths, 7)
    with pytest.raises(ValueError, match=message) as caught:
        policy(td)
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)
    written = {key for row in td["agents"].tensordicts for key in row.keys()}
    assert written == {"observation"} and set(td.keys()) == {"agents"}, "nothing is half done"


def test_errors_inside_a_module_name_module_and_agents():
    policy = RoutedSequential((make_policy(4, 2), [0, 1]), (ROVER, [2]))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        policy(random_lazy_group([5, 5, 3], 7))
    assert "In module 0, for agents 0, 1 of group 'agents'." in caught.value.__notes__


def test_outputs_without_one_row_per_agent_raise():
    total = TensorDictModule(lambda x: x.sum(1), in_keys=[OBSERVATION], out_keys=[ACTION])
    td = TensorDict({"agents": {"observation": torch.randn(7, 2, 5)}}, [7])
    with pytest.raises(
        ValueError, match=r"shape \[7, 5\] for agents 0, 1 .*expected 2 rows in dim 1"
    ):
        RoutedSequential((total, [0, 1]))(td)


def test_missing_key_raises_key_error():
    with pytest.raises(KeyError):
        RoutedSequential(make_policy(5, 2))(TensorDict({"other": torch.zeros(7)}, [7]))


@pytest.mark.parametrize("agents", [[], [0, 0], [-1]])
def test_invalid_agent_numbers_of_routes_raise(agents):
    with pytest.raises(ValueError, match="expected different agents from 0 to N - 1"):
        RoutedSequential((DRONE, agents))


def test_partial_tolerant_skips_agents_without_a_module():
    camera = make_policy(4, 2, "camera")
    td = random_lazy_group([5, 3], 7)
    RoutedSequential(DRONE, camera, partial_tolerant=True)(td)
    assert ["action" in row.keys() for row in td["agents"].tensordicts] == [True, False]


# ------------------------------------------------------------------------------------- specs


def team_of(exclusive=False):
    def seen(leaf, width):
        return Composite({leaf: Unbounded((width,))}) if exclusive else Unbounded((width,))

    drone = AgentSpec("drone", 2, seen("camera", 5), Bounded(-1, 1, (3,)))
    rover = AgentSpec("rover", 3, seen("lidar", 4), Bounded(-1, 1, (2,)))
    return TeamSpec({"agents": [drone, rover]})


def test_routes_by_agent_name():
    drone, rover = make_policy(5, 3), make_policy(4, 2)
    td = random_lazy_group([5, 5, 4, 4, 4], 7)
    for group in (team_of(), team_of().groups["agents"]):
        for routes in (
            ("drone_*", "rover_*"),
            (["drone_0", 1], ["rover_2", "rover_0", "rover_1"]),
            (None, "rover_*"),
            (None, None),
        ):
            policy = RoutedSequential((drone, routes[0]), (rover, routes[1]), group=group)
            found = policy(td.clone())
            assert_actions(found, actions_one_by_one(found, [drone] * 2 + [rover] * 3))
    assert RoutedSequential((drone, "*"), group=team_of(), partial_tolerant=True)


SPEC_REFUSED = {
    "unknown name": (
        lambda: [(make_policy(5, 3), "tank_0")],
        "expected agents of .*drone_0, drone_1",
    ),
    "beyond": (lambda: [(make_policy(5, 3), [7])], "expected different agents from 0 to 4"),
    "left out": (lambda: [make_policy(5, 3)], "agents rover_0, rover_1, rover_2 of group 'agents'"),
    "left out by a route": (
        lambda: [(make_policy(5, 3), "drone_*"), (make_policy(4, 2), ["rover_0"])],
        "no module .* agents rover_1, rover_2 of group 'agents'",
    ),
    "no action": (
        lambda: [make_policy(5, 3), make_policy(4, 2, out_key="hidden")],
        "agents rover_0, .* got hidden but no",
    ),
    "on nobody": (
        lambda: [make_policy(5, 3), make_policy(4, 2, "lidarr")],
        "module 1 reads .*lidarr.*which no agent of group 'agents' has: agent drone_0 .*observ",
    ),
    "both": (
        lambda: [make_policy(5, 3), make_policy(5, 3), make_policy(4, 2)],
        "modules 0 and 1 both write .* agents drone_0, drone_1",
    ),
    "other widths": (lambda: [make_policy(6, 3), make_policy(4, 2)], "takes 6 features"),
}


@pytest.mark.parametrize("case", SPEC_REFUSED)
def test_invalid_routes_raise_in_constructor_with_specs(case):
    make, message = SPEC_REFUSED[case]
    for group in (team_of(), team_of().groups["agents"]):
        with pytest.raises(ValueError, match=message):
            RoutedSequential(*make(), group=group)


def test_names_without_specs_and_wrong_agent_count_raise():
    with pytest.raises(ValueError, match="'drone_0', but only specs know names"):
        RoutedSequential((DRONE, "drone_0"))
    policy = RoutedSequential(make_policy(5, 3), make_policy(4, 2), group=team_of())
    with pytest.raises(ValueError, match="group 'agents' has 2 agents, but its specs 5"):
        policy(random_lazy_group([5, 4], 7))


def test_specs_are_checked_as_far_as_shapes_are_known():
    """Widths between modules are not known before the first call."""
    encoders = make_policy(5, 6, out_key="hidden"), make_policy(4, 7, out_key="hidden")
    heads = make_policy(6, 3, "hidden"), make_policy(7, 2, "hidden")
    policy = RoutedSequential(*encoders, *heads, group=team_of())
    td = policy(random_lazy_group([5, 5, 4, 4, 4], 7))
    assert [x.shape[-1] for x in list_actions(td)] == [3, 3, 2, 2, 2]
    same = AgentSpec("car", 2, Unbounded((5,)), CategoricalSpec(3))
    group = TeamSpec([same]).groups["car"]
    one = make_policy(5, 3, path=("car",))
    assert RoutedSequential(one, group=group)
    with pytest.raises(ValueError, match="agent car_1 of group 'car'"):
        RoutedSequential((one, [0]), group=group)
