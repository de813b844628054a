"""A VMAS environment without branches equals the stock one bit for bit."""

import pytest
import torch

from torchrl_marl.capture import capture
from torchrl_marl.envs.vmas.build import advance, build_simulator
from torchrl_marl.errors import CaptureError

pytest.importorskip("vmas")
from vmas.simulator.core import Box, Landmark, Line, Sphere, World  # noqa: E402

from torchrl_marl.envs.vmas.capture import without_branches  # noqa: E402

SHAPES = {
    "sphere": Sphere(0.1),
    "line": Line(0.5),
    "box": Box(0.4, 0.2),
    "hollow": Box(0.4, 0.2, hollow=True),
}
SLOTS = ("_pos", "_vel", "_rot", "_ang_vel")
PAIRS = [
    (a, b) for i, a in enumerate(SHAPES) for b in list(SHAPES)[i:] if {a, b} != {"box", "hollow"}
]


def entity(name, shape):
    return Landmark(name, shape=shape, movable=True, rotatable=True, collide=True)


def make_world(pair, num_envs):
    world = World(num_envs, torch.device("cpu"), substeps=2)
    for i, name in enumerate(pair):
        world.add_landmark(entity(f"{name} {i}", SHAPES[name]))
    return world


class Around:
    """The part of an environment that ``without_branches`` needs: its ``world``."""

    def __init__(self, world):
        self.world = world


def place(world, distance, angles):
    """Puts the second entity at a distance from the first, all rotated."""
    for e in world.landmarks:
        n = len(angles)
        e.state.pos, e.state.vel = torch.zeros(n, 2), torch.zeros(n, 2)
        e.state.rot, e.state.ang_vel = angles[:, None] * 3, torch.zeros(n, 1)
    away = torch.stack([angles.cos(), angles.sin()], -1) * distance
    world.landmarks[1].state.pos = away


def state_of(world):
    return [
        x for e in world.landmarks for x in (e.state.pos, e.state.vel, e.state.rot, e.state.ang_vel)
    ]


def reach_of(pair):
    return sum(SHAPES[name].circumscribed_radius() for name in pair)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_pairs_out_of_reach_do_not_collide_as_in_stock_vmas(pair):
    """Distances just out of reach, where a line or a box would still push, and just within."""
    torch.manual_seed(0)
    angles = torch.rand(8) * 7
    for off in (-0.05, -1e-4, 0.0, 1e-6, 1e-3, 5e-3, 0.02, 0.5):
        stock, own = make_world(pair, 8), make_world(pair, 8)
        for world in (stock, own):
            place(world, reach_of(pair) + off, angles)
        stock.step()
        with without_branches(Around(own)):
            own.step()
        for x, y in zip(state_of(stock), state_of(own)):
            assert torch.equal(x, y), off


@pytest.mark.parametrize("pair", [("line", "sphere"), ("box", "box")], ids="-".join)
def test_one_env_in_reach_enables_forces_in_all_envs(pair):
    """As in stock VMAS, the reach of a pair is tested for all envs together."""
    angles = torch.zeros(4)
    distance = torch.full((4, 1), reach_of(pair) + 5e-3)
    near = distance.clone()
    near[2] = 0.05
    pushed = []
    for at in (distance, near):
        stock, own = make_world(pair, 4), make_world(pair, 4)
        for world in (stock, own):
            place(world, at, angles)
        stock.step()
        with without_branches(Around(own)):
            own.step()
        assert all(map(torch.equal, state_of(stock), state_of(own)))
        pushed.append(bool(own.landmarks[1].state.vel[0].any()))
    assert not pushed[0]


def test_joints_do_not_depend_on_distance():
    from vmas.simulator.joints import Joint

    worlds = [make_world(("box", "sphere"), 3) for _ in range(2)]
    for world in worlds:
        world.add_joint(Joint(*world.landmarks, dist=0.3, rotate_a=True, rotate_b=True))
        for e in world.landmarks:
            e.state.rot, e.state.ang_vel = torch.zeros(3, 1), torch.zeros(3, 1)
            e.state.vel = torch.zeros(3, 2)
        world.landmarks[0].state.pos = torch.zeros(3, 2)
        world.landmarks[1].state.pos = torch.tensor([[2.0, 0.5]]).expand(3, 2).clone()
        for e in world.landmarks[2:]:
            e.state.pos = torch.tensor([[1.0, 0.2]]).expand(3, 2).clone()
    worlds[0].step()
    with without_branches(Around(worlds[1])):
        worlds[1].step()
    assert all(map(torch.equal, state_of(worlds[0]), state_of(worlds[1])))
    assert worlds[0].landmarks[0].state.vel.any()


def test_world_is_restored_after_an_error():
    world = make_world(("line", "sphere"), 2)
    world.collides = own = lambda a, b: False
    before = dict(vars(world))
    with pytest.raises(KeyError), without_branches(Around(world)):
        assert world.collides is not own
        raise KeyError
    assert vars(world) == before


@pytest.mark.parametrize("scenario", ["balance", "simple_world_comm", "reverse_transport"])
def test_traced_step_equals_stock_vmas(scenario):
    import torch.utils._pytree as pytree

    torch.manual_seed(0)
    arguments = {"terminated_truncated": True, "max_steps": 20}
    env = build_simulator(scenario, 4, torch.device("cpu"), arguments, True)
    entities = [(e.state, k) for e in env.world.entities for k in SLOTS]

    def step(values, actions):
        for (holder, key), x in zip(entities, values):
            setattr(holder, key, x.clone())
        env.steps = torch.zeros(4)
        advance(env, actions)
        read = env._get_from_scenario(True, False, False, False)
        return [getattr(holder, key) for holder, key in entities], read

    values = [getattr(holder, key).clone() for holder, key in entities]
    actions = env.get_random_actions()
    with without_branches(env):
        program = capture(step, values, actions, name="a step", execution="trace")
    assert "collides" not in vars(env.world)
    for _ in range(3):
        actions = env.get_random_actions()
        found = program(values, actions)
        expected = step(values, actions)
        assert all(map(torch.equal, pytree.tree_leaves(found), pytree.tree_leaves(expected)))
        values = [x.clone() for x in expected[0]]


def counts(world, a, b, counter):
    if world.collides(a, b):
        counter += 1
    return counter


def counts_contacts(world, a, b, counter):
    if world.collides(a, b):
        distance = world.get_distance(a, b)
        weight = 1.0
        if world is None:
            weight = 2.0
        counter[distance < 0.01] += weight
    return counter


def keeps_distance(world, a, b, counter):
    if world.collides(a, b):
        distance = world.get_distance(a, b)
        counter[distance < 0.01] += 1
        return distance
    return counter


def writes_far_away(world, a, b, counter):
    if world.collides(a, b):
        counter[world.get_distance(a, b) > 0.01] += 1
    return counter


@pytest.mark.parametrize("off", [-0.05, 0.005, 0.5])
def test_rewards_for_contact_are_captured(off):
    """Also out of reach, where the distance alone would still be rewarded."""
    pair = ("sphere", "sphere")
    world = make_world(pair, 3)
    place(world, reach_of(pair) + off, torch.zeros(3))
    expected = counts_contacts(world, *world.landmarks, torch.zeros(3))
    with without_branches(Around(world)):

        def function(at):
            world.landmarks[1].state.pos = at
            return counts_contacts(world, *world.landmarks, torch.zeros(3))

        here = world.landmarks[1].state.pos.clone()
        program = capture(function, torch.ones_like(here), name="a reward", execution="trace")
        world.landmarks[1].state.pos = here
        assert torch.equal(
            world.get_distance(*world.landmarks) < 0.01, torch.tensor([off < 0.01] * 3)
        )
    assert torch.equal(program(here), expected)
    assert torch.equal(expected, torch.full((3,), float(off < 0)))


@pytest.mark.parametrize(
    "function", [counts, keeps_distance, writes_far_away], ids=lambda f: f.__name__
)
def test_other_uses_of_collides_are_refused(function):
    world = make_world(("sphere", "sphere"), 3)
    place(world, 0.5, torch.zeros(3))

    def moved(at):
        world.landmarks[1].state.pos = at
        return function(world, *world.landmarks, torch.zeros(3))

    with (
        pytest.raises(CaptureError, match="if world.collides"),
        without_branches(Around(world)),
    ):
        capture(moved, torch.ones(3, 2), name="a reward", execution="trace")
