"""Simulators stepped by graphs: packing of states, refused simulators, changes from outside."""

import pytest
import torch

from torchrl_marl.errors import CaptureError, GraphCheckError
from torchrl_marl.runtime.random_state import RandomState
from torchrl_marl.simulator.captured import CapturedSimulator
from torchrl_marl.simulator.packing import Packing
from torchrl_marl.simulator.state import SimulatorState

pytestmark = pytest.mark.compiled

E = 5


class Thing:
    def __init__(self, **attributes):
        vars(self).update(attributes)


class Billiards:
    """Balls on a table: one- to three-dimensional tensors of three dtypes, one tensor twice."""

    def __init__(self, n):
        self.n = n
        self.balls = [Thing(pos=torch.rand(n, 2), vel=torch.rand(n, 2)) for _ in range(2)]
        self.cue = self.balls[0]
        self.grid = torch.rand(n, 2, 3)
        self.hits = torch.zeros(n, dtype=torch.int64)
        self.fast = torch.zeros(n, dtype=torch.bool)
        self.friction = torch.tensor([0.9, 0.8])
        self.step()

    def step(self, push=None):
        for ball in self.balls:
            ball.pos = ball.pos + ball.vel
            ball.vel = ball.vel * self.friction
        if push is not None:
            self.cue.vel = self.cue.vel + push
        self.grid[:, 0] += 1
        self.fast = self.cue.vel.norm(dim=-1) > 0.5
        self.hits[self.fast] += 1
        self.last = self.cue.pos  # the same tensor in two slots
        return self.cue.pos.clone()


def captured(make=Billiards, **kwargs):
    torch.manual_seed(0)
    simulator = make(E)
    state = SimulatorState(make)
    return simulator, CapturedSimulator(simulator, state, simulator.step, RandomState(0), **kwargs)


def program_of(sim, simulator, example=None):
    push = torch.zeros(E, 2) if example is None else example
    return sim.capture(lambda x: [simulator.step(x)], push, name="a step", execution="trace")


def test_packing_and_unpacking_of_the_state():
    simulator, sim = captured()
    state = sim.state
    assert {x.dtype for x in state} == {torch.float32, torch.int64, torch.bool}
    # pos (the cue's in two slots), vel, grid: 2 * 4 + 6 numbers, and the friction of all envs.
    assert sorted(x.shape[0] for x in state if x.dtype == torch.float32) == [14]
    before = [ball.pos.clone() for ball in simulator.balls], simulator.grid.clone()
    sim.packing.write(simulator, [torch.zeros_like(x) for x in state])
    assert not simulator.grid.any() and not simulator.cue.pos.any()
    sim.packing.write(simulator, state)
    assert all(torch.equal(a, ball.pos) for a, ball in zip(before[0], simulator.balls))
    assert torch.equal(simulator.grid, before[1]) and simulator.grid.is_contiguous()


def test_graph_steps_equal_simulator_steps_bitwise():
    simulator, sim = captured()
    twin = captured()[0]
    run = program_of(sim, simulator)
    for _ in range(4):
        push = torch.randn(E, 2)
        n = len(sim.state)
        out = run.flat([*sim.state, push])
        sim.state = list(out[:n])
        assert torch.equal(out[n], twin.step(push))
    sim.release()
    assert torch.equal(simulator.hits, twin.hits) and torch.equal(simulator.grid, twin.grid)
    assert torch.equal(simulator.last, twin.last) and simulator.fast.dtype == torch.bool


def test_recording_keeps_simulator_and_random_state():
    simulator, sim = captured()
    values = {k: x.clone() for k, x in vars(simulator).items() if isinstance(x, torch.Tensor)}
    torch.manual_seed(3)
    before = torch.get_rng_state()
    program_of(sim, simulator)
    assert torch.equal(torch.get_rng_state(), before)
    for name, x in values.items():
        assert torch.equal(getattr(simulator, name), x), name


def test_changes_from_outside_reach_the_graph():
    simulator, sim = captured()
    run = program_of(sim, simulator)
    out = run.flat([*sim.state, torch.zeros(E, 2)])
    sim.state = list(out[: len(sim.state)])
    assert sim.ahead
    sim.release().cue.vel = torch.full((E, 2), 7.0)
    assert not sim.ahead
    n = len(sim.state)
    out = run.flat([*sim.state, torch.zeros(E, 2)])
    sim.state = list(out[:n])
    friction = torch.tensor([0.9, 0.8])
    assert torch.equal(sim.release().cue.vel, 7.0 * friction.expand(E, 2))


class Counting(Billiards):
    """Counts in a Python number."""

    rounds = 0

    def step(self, push=None):
        self.rounds += 1
        return super().step(push)


class Branching(Billiards):
    def step(self, push=None):
        if push is not None and self.cue.pos.sum() > 0:
            push = 2 * push
        return super().step(push)


class Shared(Billiards):
    """A tensor that all envs share is written in a step."""

    def step(self, push=None):
        self.friction = self.friction * 0.99
        return super().step(push)


class Views(Billiards):
    """Two attributes share one tensor's memory."""

    def __init__(self, n):
        self.memory = torch.zeros(n, 4)
        self.left = self.memory[:, :2]
        super().__init__(n)

    def step(self, push=None):
        self.left += 1
        super().step(push)
        return self.memory.clone()


class Asserting(Billiards):
    def step(self, push=None):
        if push is not None:
            assert not push.isnan().any(), "no NaN"
        return super().step(push)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Counting, "a step changes rounds from"),
        (Branching, "test_captured_simulator.py:"),
        (Views, "memory of the graph differs from the simulator"),
    ],
)
def test_unsupported_simulators_raise(make, words):
    with pytest.raises(CaptureError, match=words):
        simulator, sim = captured(make)
        program_of(sim, simulator)


def test_shared_tensors_are_part_of_the_state():
    simulator, sim = captured(Shared)
    twin = captured(Shared)[0]
    run = program_of(sim, simulator)
    for _ in range(3):
        n = len(sim.state)
        out = run.flat([*sim.state, torch.ones(E, 2)])
        sim.state = list(out[:n])
        assert torch.equal(out[n], twin.step(torch.ones(E, 2)))
    assert torch.equal(sim.release().friction, twin.friction)


def test_failed_asserts_are_raised_later_with_their_location():
    simulator, sim = captured(Asserting)
    run = program_of(sim, simulator)
    run.flat([*sim.state, torch.zeros(E, 2)])
    run.raise_failed()
    run.flat([*sim.state, torch.full((E, 2), torch.nan)])
    run.flat([*sim.state, torch.zeros(E, 2)])
    with pytest.raises(GraphCheckError, match=r"assert not push.isnan.*_simulator.py:\d+"):
        run.raise_failed()
    run.raise_failed()  # once


def test_error_names_tensors_of_changed_shape():
    simulator, sim = captured()
    simulator.grid = torch.zeros(E, 4)
    with pytest.raises(CaptureError, match="grid"):
        sim.packing.read(simulator)
    del simulator.grid
    with pytest.raises(CaptureError, match="no tensor grid"):
        sim.packing.read(simulator)


def test_simulator_without_batched_tensors_raises():
    thing = Thing(x=torch.zeros(3))
    with pytest.raises(CaptureError, match="no tensor with the envs"):
        Packing(thing, SimulatorState(lambda n: Thing(x=torch.zeros(3))))


def test_signature_depends_on_references_and_numbers():
    simulator, sim = captured()
    before = sim.signature()
    simulator.step()
    assert sim.signature() == before
    simulator.cue = simulator.balls[1]
    after = sim.signature()
    assert after != before
    simulator.n += 1
    assert sim.signature() not in (before, after)


class Windy(Billiards):
    """Control flow that depends on a tensor shared by all envs."""

    def __init__(self, n):
        self.wind = torch.zeros(2)
        super().__init__(n)

    def step(self, push=None):
        if (self.wind == 0).all():
            return super().step(push)
        return super().step(push) + self.wind


def test_signature_depends_on_values_of_control_flow():
    simulator, sim = captured(Windy)
    program_of(sim, simulator)
    sim.read_assumed()
    calm, structure = sim.signature(), sim.structure()
    simulator.wind = torch.ones(2)
    sim.read_assumed()
    assert sim.signature() != calm and sim.structure() == structure
    simulator.wind = torch.zeros(2)
    sim.read_assumed()
    assert sim.signature() == calm
