"""Saving and restoring of simulator states, on small simulators with awkward structures."""

import io
from collections import deque

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from torchrl_marl.errors import SimulatorStateError
from torchrl_marl.runtime.random_state import RandomState
from torchrl_marl.simulator.resets import ResetBank, RunningEnvs
from torchrl_marl.simulator.state import (
    SimulatorState,
    read_tensors,
    shared_storages,
    write_tensors,
)


class Thing:
    def __init__(self, **attributes):
        vars(self).update(attributes)


class World:
    """Shared tensors, views of one memory, odd keys, references that change, a cycle."""

    def __init__(self, n):
        self.n = n
        self.memory = torch.zeros(n, 4)
        self.left, self.right = self.memory[:, :2], self.memory[:, 2:]
        self.landmarks = [Thing(pos=torch.full((n, 2), float(i)), world=self) for i in range(3)]
        self.goal = self.landmarks[0]
        self.alias = self.landmarks[1].pos
        self.by_key = {1: torch.zeros(n), ("a", 2): torch.zeros(n), "b.c": torch.zeros(n)}
        self.by_object = {self.landmarks[0]: torch.zeros(n)}
        self.constant = torch.arange(7.0)
        self.level, self.name, self.nothing = 1, "w", None
        self.late = None
        self.viewer = Thing(pixels=torch.zeros(n, 9))

    def reset(self):
        self.memory.copy_(torch.rand(self.n, 4))
        for landmark in self.landmarks:
            landmark.pos = torch.rand(self.n, 2)
        self.alias = self.landmarks[1].pos
        self.goal = self.landmarks[int(torch.randint(3, ()))]
        for key in self.by_key:
            self.by_key[key] = torch.rand(self.n)
        self.late = torch.zeros(self.n)

    def step(self):
        self.left += 1
        self.goal.pos += 1
        self.late = self.late + self.level
        self.by_key[1] = self.by_key[1] + self.late


def warmed(n):
    world = World(n)
    world.reset()
    world.step()
    return world


@pytest.fixture
def state():
    return SimulatorState(warmed, exclude=["viewer"])


def leaves(world):
    return read_tensors(world, ["viewer"])


def assert_same(first, second):
    assert set(first) == set(second)
    for path, x in first.items():
        assert torch.equal(x, second[path]), path


def test_batch_dim_is_found_despite_other_dims_of_equal_size(state):
    batched = {".".join(path) for path in state.batched}
    assert "constant" not in batched
    assert {"memory", "left", "landmarks.2.pos", "#1", "late"} <= batched | {
        name.removeprefix("by_key.") for name in batched
    }
    assert not any("viewer" in name for name in batched)
    # An environment of 7 envs, like the constant's size.
    assert "constant" in state.read(warmed(7))["shared"].keys()


def test_restored_simulator_continues_like_the_saved_one(state):
    torch.manual_seed(0)
    world, other = warmed(5), warmed(5)
    world.level, world.goal = 3, world.landmarks[2]
    saved = state.read(world)
    world.step()
    expected = leaves(world)
    for target in (world, other):
        state.write(target, saved)
        target.step()
        assert_same(expected, leaves(target))
        assert target.level == 3
        assert target.goal is target.landmarks[2]
        assert target.alias is target.landmarks[1].pos
        assert target.left.data_ptr() == target.memory.data_ptr()


def test_state_is_a_copy_and_can_be_saved(state):
    world = warmed(5)
    saved = state.read(world)
    before = saved["batched", "memory"].clone()
    file = io.BytesIO()
    torch.save(saved.to_dict(), file)
    file.seek(0)
    world.step()
    assert torch.equal(saved["batched", "memory"], before)
    state.write(world, TensorDict(torch.load(file, weights_only=True)))
    assert torch.equal(world.memory, before)
    world.step()
    assert torch.equal(saved["batched", "memory"], before)


def test_restore_removes_added_tensors(state):
    world = warmed(5)
    saved = state.read(world)
    world.extra = torch.ones(5)
    state.write(world, saved)
    assert not hasattr(world, "extra")


def test_restore_adds_removed_tensors(state):
    world = warmed(5)
    saved = state.read(world)
    del world.late
    state.write(world, saved)
    assert world.late.shape == (5,)


def test_state_of_another_simulator_raises(state):
    world = warmed(5)
    with pytest.raises(SimulatorStateError, match="size|does not fit"):
        state.write(world, state.read(warmed(6)))
    saved = state.read(world)
    world.landmarks.pop()
    with pytest.raises(SimulatorStateError, match="landmarks.2.pos"):
        state.write(world, saved)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda n: Thing(x=torch.zeros(3, n)), "expected the envs in the first dim"),
        (lambda n: Thing(x=torch.zeros(n, n)), "expected the envs in the first dim"),
        (lambda n: Thing(x=torch.zeros(2 * n)), "expected the envs in the first dim"),
        (lambda n: Thing(x=deque([torch.zeros(n)])), "ring buffer"),
        (lambda n: Thing(x=torch.zeros(n)) if n == 7 else Thing(), "exists with 7 envs"),
    ],
)
def test_unreadable_states_raise(build, message):
    with pytest.raises(SimulatorStateError, match=message):
        SimulatorState(build)


def test_excluded_names_are_neither_read_nor_written():
    world = Thing(a=torch.zeros(2), inner=Thing(a=torch.ones(2), b=1), hidden=5)
    everywhere, one = SimulatorState(None, ["a", "hidden"]), SimulatorState(None, [("a",)])
    assert list(everywhere.read(world)["shared"].keys()) == []
    saved = one.read(world)
    assert list(saved["shared"].keys()) == ["inner.a"]
    hidden = everywhere.read(Thing(inner=Thing(b=2), hidden=6, x=torch.zeros(1)))
    world.x = torch.ones(1)
    everywhere.write(world, hidden)
    assert (world.hidden, world.inner.b) == (5, 2)


def test_tensors_of_matching_shape_are_written_back():
    world = warmed(3)
    saved = read_tensors(world, ["viewer"])
    world.step()
    world.constant = torch.zeros(2)
    write_tensors(world, saved, ["viewer"])
    assert torch.equal(world.memory, saved["memory",])
    assert world.right.data_ptr() == world.memory[:, 2:].data_ptr()
    assert world.constant.shape == (2,)


def test_shared_storages():
    x = torch.zeros(4, 4)
    assert shared_storages([x, x[:2]]) == {x.data_ptr()}
    assert shared_storages([x, x, torch.zeros(4)]) == set()
    assert shared_storages([x, x[:1].expand(3, 4)]) == set()


# ------------------------------------------------------------------------------------ start bank


def bank_of(world, state):
    twin = warmed(world.n)
    return ResetBank(state, world, twin, World.reset, world.n, "cpu", step=World.step)


def test_bank_writes_only_starting_rows(state):
    torch.manual_seed(0)
    world = warmed(6)
    bank = bank_of(world, state)
    goal, before = world.goal, leaves(world)
    envs = torch.tensor([True, False, False, True, False, False])
    bank.draw(envs)
    after = leaves(world)
    assert_same({p: x[~envs] for p, x in before.items() if p in state.batched},
                {p: x[~envs] for p, x in after.items() if p in state.batched})  # fmt: skip
    for name in ("memory", "alias", "late"):
        assert not torch.equal(before[name,][envs], after[name,][envs]), name
    assert world.goal is goal
    assert world.left.data_ptr() == world.memory.data_ptr()
    assert world.alias is world.landmarks[1].pos
    assert torch.equal(before["constant",], after["constant",])


def test_rows_of_a_bank_are_used_once(state):
    torch.manual_seed(0)
    world = warmed(4)
    bank = bank_of(world, state)
    seen = []
    for envs in ([0], [1], [0], [2, 3], [1], [0, 1, 2, 3]):
        rows = torch.zeros(4, dtype=torch.bool)
        rows[envs] = True
        bank.draw(rows)
        seen += [tuple(row.tolist()) for row in world.memory[rows]]
    assert len(set(seen)) == len(seen) == 10


def test_bank_applies_changed_settings(state):
    world = warmed(4)
    bank = bank_of(world, state)
    world.level = 9
    bank.draw(torch.ones(4, dtype=torch.bool))
    assert bank._twin.level == 9


def test_bank_resumes_after_loading(state):
    torch.manual_seed(0)
    world = warmed(4)
    bank = bank_of(world, state)
    bank.draw(torch.tensor([True, False, False, False]))
    saved, world_saved = bank.state_dict(state), state.read(world)
    rng = torch.get_rng_state()
    rows = [torch.tensor([False, True, False, False]), torch.tensor([True, True, False, False])]

    def go_on(world, bank):
        torch.set_rng_state(rng)
        for envs in rows:
            bank.draw(envs)
        return leaves(world)

    expected = go_on(world, bank)
    other = warmed(4)
    state.write(other, world_saved)
    fresh = bank_of(other, state)
    fresh.load_state_dict(state, saved)
    assert_same(expected, go_on(other, fresh))


class Plain:
    """One tensor, which a reset draws."""

    def __init__(self, n):
        self.pos = torch.zeros(n, 2)

    def reset(self):
        self.pos = torch.rand(len(self.pos), 2)

    def step(self):
        self.pos = self.pos + 1


def test_saved_rows_of_a_bank_are_used_after_loading():
    state = SimulatorState(Plain)

    def bank_and_simulator():
        simulator = Plain(4)
        return simulator, ResetBank(
            state, simulator, Plain(4), Plain.reset, 4, "cpu", step=Plain.step
        )

    _, bank = bank_and_simulator()
    bank.draw(torch.tensor([True, False, False, False]))
    saved = bank.state_dict(state)
    simulator, fresh = bank_and_simulator()
    fresh.load_state_dict(state, saved)
    fresh.draw(torch.tensor([False, True, True, False]))
    assert torch.equal(simulator.pos[1:3], saved["twin"]["batched", "pos"][1:3])


def test_running_envs_are_restored():
    world = Thing(a=torch.ones(3), b=torch.ones(3, 2), constant=torch.ones(2))
    running = RunningEnvs(world, 3)
    world.a = torch.zeros(3)
    world.b.zero_()
    world.fresh = torch.zeros(3)
    b = world.b
    running.put_back(torch.tensor([True, False, True]))
    assert world.a.tolist() == [1, 0, 1]
    assert world.b.tolist() == [[1, 1], [0, 0], [1, 1]]
    assert world.b is b


# ---------------------------------------------------------------------------------- random state


def draw():
    import random

    return torch.rand(1).item(), np.random.rand(), random.gauss(0, 1), random.random()


def test_random_states_are_independent():
    first, second = RandomState(3), RandomState(3)
    outside = RandomState(0)
    with outside.active():
        expected = [draw() for _ in range(3)]
    outside.seed(0)
    found, pairs = [], []
    with outside.active():
        for _ in range(3):
            found.append(draw())
            with first.active():
                a = draw()
            with second.active():
                pairs.append((a, draw()))
    assert found == expected
    assert all(a == b for a, b in pairs)
    assert len(set(pairs)) == 3


def test_random_state_is_restored_after_an_error():
    state, before = RandomState(0), torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), state.active():
        torch.rand(1)
        raise ZeroDivisionError
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("n_draws", [0, 1, 2])
def test_random_state_is_saved_completely(n_draws):
    state, other = RandomState(1), RandomState(2)
    with state.active():
        for _ in range(n_draws):
            draw()
    file = io.BytesIO()
    torch.save(state.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    with state.active():
        expected = [draw() for _ in range(3)]
    with other.active():
        assert [draw() for _ in range(3)] == expected
