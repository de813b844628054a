"""Geometry, commands and rewards of a formation, by hand; they need no simulator."""

import importlib.util
import math

import pytest
import torch

from torchrl_marl.envs import MjlabEnv, make_env
from torchrl_marl.envs.mjlab.drawing import draw_formation
from torchrl_marl.envs.mjlab.env import _rotation_matrices
from torchrl_marl.envs.mjlab.formation import (
    commands,
    moved,
    of_mates,
    places,
    relative,
    rotated,
    slots,
)
from torchrl_marl.envs.mjlab.rewards import FormationReward
from torchrl_marl.envs.mjlab.robots import FORMATIONS, ROBOTS
from torchrl_marl.errors import ConfigError, MissingExtraError

ROOT = math.sqrt(2)
NORTH = math.pi / 2
SLOTS = {
    "circle": [[1, 0], [0, 1], [-1, 0], [0, -1]],  # chords of sqrt(2): the radius is 1
    "column": [[1.5 * ROOT, 0], [0.5 * ROOT, 0], [-0.5 * ROOT, 0], [-1.5 * ROOT, 0]],
    "line": [[0, 1.5 * ROOT], [0, 0.5 * ROOT], [0, -0.5 * ROOT], [0, -1.5 * ROOT]],
    "wedge": [[1, -0.5], [0, 0.5], [0, -1.5], [-1, 1.5]],  # rows 0, 1, 1, 2; left, right, left
}


def close(found, expected):
    torch.testing.assert_close(found, torch.as_tensor(expected).float(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("formation", FORMATIONS)
def test_slots_by_hand(formation):
    found = slots(formation, 4, ROOT)
    close(found, SLOTS[formation])
    close(found.mean(0), [0, 0])
    close(slots(formation, 1, ROOT), [[0, 0]])
    for n in (2, 3, 5):  # neighbors are so far apart
        gaps = torch.cdist(slots(formation, n, 0.7), slots(formation, n, 0.7))
        assert torch.where(gaps == 0, 9.0, gaps).min().item() == pytest.approx(0.7, abs=1e-5)


def test_formation_moves_along_an_arc():
    pose = torch.tensor([[0, 0, 0], [1.0, 2, NORTH], [0, 0, 0]])
    twist = torch.tensor([[NORTH, NORTH], [2.0, 0], [0, -1.0]])
    # A quarter of a circle of radius 1; straight to the north; on the spot.
    close(moved(pose, twist, 1.0), [[1, 1, NORTH], [1, 4, NORTH], [0, 0, -1]])
    halves = moved(moved(pose, twist, 0.5), twist, 0.5)
    close(halves, moved(pose, twist, 1.0).tolist())


def test_velocity_command_is_that_of_the_slot():
    """A ring of radius 1 moves forward at 1 m/s and turns left at 0.5 rad/s."""
    pose, twist = torch.tensor([[3.0, 4.0, NORTH]]), torch.tensor([[1.0, 0.5]])
    offsets = torch.tensor(SLOTS["circle"]).float()
    position = places(pose, offsets)
    close(position, [[[3, 5], [2, 4], [3, 3], [4, 4]]])
    found = commands(pose, twist, offsets, position, torch.full((1, 4, 1), NORTH))
    # Forward and left: the front goes left, too, and the right one is the fastest.
    close(found.velocity, [[[1, 0.5], [0.5, 0], [1, -0.5], [1.5, 0]]])
    close(found.turn_rate, torch.full((1, 4, 1), 0.5))
    close(found.place_error, torch.zeros(1, 4, 2))
    close(found.heading_error, torch.zeros(1, 4, 1))


def test_commands_correct_position_and_heading_errors():
    """The slot is at (1, 0), and the formation stands with heading 0."""
    pose, twist = torch.zeros(5, 3), torch.zeros(5, 2)
    offsets = torch.tensor([[1.0, 0.0]])
    position = torch.tensor([[1.0, 0], [0.8, 0], [-2.0, 0], [1, 0.3], [1, 0]]).unsqueeze(1)
    heading = torch.tensor([0, 0, 0, NORTH, 2 * math.pi - 0.2]).view(5, 1, 1)
    found = commands(pose, twist, offsets, position, heading)
    # 0.2 m behind; 3 m behind: at most 0.5 m/s; 0.3 m to the left while heading north: backward.
    close(found.velocity[:, 0], [[0, 0], [0.2, 0], [0.5, 0], [-0.3, 0], [0, 0]])
    close(found.place_error[:, 0], [[0, 0], [0.2, 0], [3, 0], [-0.3, 0], [0, 0]])
    close(found.heading_error[:, 0], [[0], [0], [0], [-NORTH], [0.2]])
    close(found.turn_rate[:, 0], [[0], [0], [0], [-0.5], [0.2]])


def test_teammate_positions_are_relative_and_in_cyclic_order():
    position = torch.tensor([[[0.0, 0], [2, 0], [0, 3]]])
    heading = torch.tensor([[[0.0], [NORTH], [math.pi]]])
    close(
        relative(position, heading)[0],
        # 0 sees 1 and 2; 1 looks north and sees 2 ahead and left, and 0 left; 2 looks west.
        [[[2, 0], [0, 3]], [[3, 2], [0, 2]], [[0, 3], [-2, 3]]],
    )
    assert of_mates(torch.arange(3.0).view(1, 3, 1)).view(3, 2).tolist() == [[1, 2], [2, 0], [0, 1]]
    assert relative(position[:, :1], heading[:, :1]).shape == (1, 1, 0, 2)


def test_rotations_by_hand():
    close(rotated(torch.tensor([[1.0, 0]]), torch.tensor([[NORTH]])), [[0, 1]])
    half = math.sqrt(0.5)
    yaw, roll = torch.tensor([half, 0, 0, half]), torch.tensor([2.0, 2.0, 0, 0])  # any length
    close(_rotation_matrices(yaw), [[0, -1, 0], [1, 0, 0], [0, 0, 1]])
    close(_rotation_matrices(roll), [[1, 0, 0], [0, 0, -1], [0, 1, 0]])
    close(-_rotation_matrices(roll)[2], [0, -1, 0])  # a robot that lies on its right side


def state(**changed):
    """A robot without any error."""
    zero = torch.zeros(1, 1, 3)
    at_rest = {"velocity_error": zero, "turn_rate_error": zero, "joint_error": zero}
    at_rest |= {"gravity": torch.tensor([[[0.0, 0, -1]]]), "place_error": torch.zeros(1, 1, 2)}
    at_rest |= {"action_change": zero, "force": torch.zeros(1, 1, 1)}
    return at_rest | {name: torch.tensor([[value]]) for name, value in changed.items()}


REWARDS = {
    "none": ({}, 7.0),
    "velocity": ({"velocity_error": [0.3, 0.0, 0.4]}, 5 + 2 * math.exp(-1)),
    "turn rate": ({"turn_rate_error": [0.0, 0.5, 0.5]}, 5 + 2 * math.exp(-1)),
    "tilt": ({"gravity": [0.6, 0.0, -0.8]}, 6 + math.exp(-1.8)),
    "posture": ({"joint_error": [1.0, 2.0, 2.0]}, 6 + math.exp(-3)),  # the mean is 3
    "place": ({"place_error": [0.3, 0.4]}, 6 + math.exp(-1)),
    "action": ({"action_change": [1.0, -2.0, 0.0]}, 7 - 0.5),
    "touch": ({"force": [0.9]}, 7.0),
    "bump": ({"force": [1.1]}, 6.0),
}


@pytest.mark.parametrize("changed, expected", REWARDS.values(), ids=REWARDS)
def test_rewards_by_hand(changed, expected):
    found = FormationReward().earned(**state(**changed))
    assert found.shape == (1, 1, 1) and found.item() == pytest.approx(expected, abs=1e-5)


def test_scene_is_centered_on_the_formation():
    middle, slot = torch.tensor([10.2, 5.0]), torch.tensor([[11.2, 5.0], [9.2, 5.0]])
    place, heading = torch.tensor([[11.2, 6.0], [9.2, 5.0]]), torch.tensor([0.0, NORTH])
    upright = torch.tensor([1.0, 0.0])
    shapes = {
        x.name: x for x in draw_formation(ROBOTS["go1"], middle, slot, place, heading, upright)
    }
    assert (shapes["slot 0"].x, shapes["slot 0"].y) == pytest.approx((1, 0))
    assert (shapes["robot 0"].x, shapes["robot 0"].y) == pytest.approx((1, 1))
    assert (shapes["nose 0"].x, shapes["nose 0"].y) == pytest.approx((1.3, 1))
    assert (shapes["nose 1"].x, shapes["nose 1"].y) == pytest.approx((-1, 0.3))
    assert min(shapes["robot 1"].color) > min(shapes["robot 0"].color)  # fallen, so pale
    assert shapes["mark"].x == pytest.approx(3.8)  # the last, at x = 14


REFUSED = {
    "task": ("mjlab/formations", {}, "did you mean 'formation'?"),
    "robot": ("mjlab/formation", {"robot": "go2"}, "expected one of g1, go1."),
    "formation": ("mjlab/formation", {"formation": "vee"}, "one of circle, column, line, wedge."),
    "cone": ("mjlab/formation", {"cone": "round"}, "expected one of elliptic, pyramidal."),
    "agents": ("mjlab/formation", {"n_agents": 0}, "n_agents is 0, expected 1 or more."),
    "speed": ("mjlab/formation", {"speed": -1.0}, "speed is -1.0, expected 0 or more."),
    "spacing": ("mjlab/formation", {"spacing": 0.0}, "spacing is 0.0 and action_scale is 2.0"),
    "unknown": ("mjlab/formation", {"n_agent": 3}, "did you mean 'n_agents'?"),
}


@pytest.mark.parametrize("name, kwargs, message", REFUSED.values(), ids=REFUSED)
def test_invalid_arguments_are_refused(name, kwargs, message):
    with pytest.raises(ConfigError) as caught:
        make_env(name, num_envs=2, **kwargs)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.skipif(bool(importlib.util.find_spec("mjlab")), reason="mjlab is installed")
def test_missing_mjlab_error_names_the_extra():
    with pytest.raises(MissingExtraError, match=r"^mjlab is not installed; run: pip .*\[mjlab\]"):
        MjlabEnv("formation", 2)
