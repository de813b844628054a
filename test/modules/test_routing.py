"""Routing of lazily stacked groups: modules of agents, order of calls, written entries."""

import random

import pytest
import torch
from routed import (
    ACTION,
    BATCHES,
    OBSERVATION,
    actions_one_by_one,
    assert_actions,
    list_actions,
    make_policy,
    random_dense_group,
    random_lazy_group,
)
from samples import assert_same
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from torchrl_marl.contrib import RoutedSequential


class Counted(nn.Module):
    def __init__(self, o, a):
        super().__init__()
        self.layer, self.shapes = nn.Linear(o, a), []

    def forward(self, x):
        self.shapes.append(tuple(x.shape))
        return self.layer(x)


# ------------------------------------------------------------------------- modules of agents


@pytest.mark.parametrize("batch", BATCHES)
def test_explicit_routes_equal_loop_over_agents(batch):
    drone, rover = make_policy(5, 4), make_policy(3, 2)
    td = random_lazy_group([5, 3, 5, 5, 3], *batch)
    policy = RoutedSequential((drone, [0, 2, 3]), (rover, [1, 4]))
    assert policy(td) is td
    assert_actions(td, actions_one_by_one(td, [drone, rover, drone, drone, rover]))


@pytest.mark.parametrize("batch", BATCHES)
def test_agents_are_matched_by_input_width(batch):
    drone, rover = make_policy(5, 2), make_policy(3, 2)
    td = random_lazy_group([5, 3, 5], *batch)
    RoutedSequential(rover, drone)(td)
    assert_actions(td, actions_one_by_one(td, [drone, rover, drone]))
    assert td[ACTION].shape == (*batch, 3, 2), "readable at once where the agents agree"


@pytest.mark.parametrize("batch", BATCHES)
def test_agents_are_matched_by_exclusive_keys(batch):
    drone, rover = make_policy(5, 4, "camera"), make_policy(5, 2, "lidar")
    td = random_lazy_group([5, 5, 5], *batch, leaves=["lidar", "camera", "lidar"])
    RoutedSequential(drone, rover)(td)
    rows = td["agents"].unbind(-1)
    wanted = [rover.module(rows[0]["lidar"]), drone.module(rows[1]["camera"])]
    assert_actions(td, [*wanted, rover.module(rows[2]["lidar"])])
    assert set(rows[1].keys()) == {"camera", "action"}


def test_each_module_is_called_once_with_a_dense_stack():
    nets = Counted(5, 2), Counted(3, 2)
    modules = [TensorDictModule(net, in_keys=[OBSERVATION], out_keys=[ACTION]) for net in nets]
    RoutedSequential(*modules)(random_lazy_group([5, 3, 5, 5], 7))
    assert [net.shapes for net in nets] == [[(7, 3, 5)], [(7, 1, 3)]]


def test_modules_with_several_inputs_and_a_root_key():
    class Both(nn.Module):
        def __init__(self, o):
            super().__init__()
            self.layer = nn.Linear(o + 4, 2)

        def forward(self, x, speed, state):
            x = torch.cat([x, speed], -1)
            return self.layer(torch.cat([x, state.unsqueeze(-2).expand(*x.shape[:-1], 2)], -1))

    def make(o):
        keys = [OBSERVATION, ("agents", "speed"), "state"]
        return TensorDictModule(Both(o), in_keys=keys, out_keys=[ACTION])

    drone, rover = make(5), make(3)
    td = random_lazy_group([5, 3, 5], 7)
    for row in td["agents"].tensordicts:
        row["speed"] = torch.randn(7, 2)
    td["state"] = torch.randn(7, 2)
    RoutedSequential((drone, [0, 2]), (rover, [1]))(td)
    for row, module in zip(td["agents"].tensordicts, [drone, rover, drone]):
        x = torch.cat([row["observation"], row["speed"], td["state"]], -1)
        torch.testing.assert_close(row["action"], module.module.layer(x))


def test_deeply_nested_groups_and_nested_leaves():
    path = ("world", "team")
    drone, rover = make_policy(5, 4, path=path), make_policy(3, 2, path=path)
    for group in (None, path):
        td = random_lazy_group([5, 3], 7, path=path)
        RoutedSequential(drone, rover, group=group)(td)
        assert [tuple(x.shape) for x in list_actions(td, (*path, "action"))] == [(7, 4), (7, 2)]
    leaf = ("observation", "camera")
    td = random_lazy_group([5, 3], 7, leaves=[leaf, leaf])
    camera = [
        TensorDictModule(nn.Linear(o, 2), in_keys=[("agents", *leaf)], out_keys=[ACTION])
        for o in (5, 3)
    ]
    RoutedSequential(*camera)(td)
    assert td[ACTION].shape == (7, 2, 2)


def test_lazy_stack_may_be_the_input():
    one = TensorDictModule(nn.Linear(3, 2), in_keys=["key1"], out_keys=["embed"])
    other = TensorDictModule(nn.Linear(5, 2), in_keys=["key2"], out_keys=["embed"])
    for dim, batch in ((0, ()), (0, (4,)), (1, (4,))):
        td = random_lazy_group([3, 5, 3], *batch, leaves=["key1", "key2", "key1"], path=())
        td = lazy_stack(td.tensordicts, dim)
        RoutedSequential(one, other)(td)
        wanted = [
            one.module(td.tensordicts[0]["key1"]),
            other.module(td.tensordicts[1]["key2"]),
            one.module(td.tensordicts[2]["key1"]),
        ]
        torch.testing.assert_close(td["embed"], torch.stack(wanted, dim))


def test_empty_placeholders_are_ignored():
    """``torchrl.data.consolidate_spec`` gives every agent every key, some of size 0."""
    drone, rover = make_policy(5, 2, "camera"), make_policy(3, 2, "lidar")
    td = random_lazy_group([5, 3], 7, leaves=["camera", "lidar"])
    td["agents"].tensordicts[0]["lidar"] = torch.zeros(7, 0)
    td["agents"].tensordicts[1]["camera"] = torch.zeros(7, 0)
    assert RoutedSequential(drone, rover)(td)[ACTION].shape == (7, 2, 2)


@pytest.mark.parametrize("seed", range(20))
def test_random_teams_equal_loop_over_agents(seed):
    draw = random.Random(seed)
    widths = [draw.choice([3, 4, 5]) for _ in range(draw.randint(1, 7))]
    kinds = sorted(set(widths))
    players = {width: make_policy(width, draw.randint(1, 3)) for width in kinds}
    batch = tuple(draw.randint(1, 3) for _ in range(draw.randint(0, 2)))
    td = random_lazy_group(widths, *batch)
    entries = []
    for width in draw.sample(kinds, len(kinds)):
        agents = [i for i, other in enumerate(widths) if other == width]
        draw.shuffle(agents)
        entries.append((players[width], agents) if draw.random() < 0.5 else players[width])
    if draw.random() < 0.3 and batch:
        td = td.reshape(-1)  # TorchRL makes a lazy stack of lazy stacks of it
    RoutedSequential(*entries)(td)
    members = td["agents"].unbind(-1)
    for member, width in zip(members, widths):
        torch.testing.assert_close(member["action"], players[width].module(member["observation"]))


# --------------------------------------------------------------- order, gradients, written entries


def test_modules_run_in_order_on_earlier_outputs():
    camera, lidar = make_policy(5, 6, "camera", "hidden"), make_policy(3, 6, "lidar", "hidden")
    shared = make_policy(6, 2, "hidden")
    double = TensorDictModule(lambda x: 2 * x, in_keys=[ACTION], out_keys=[ACTION])
    td = random_lazy_group([5, 3, 5], 7, leaves=["camera", "lidar", "camera"])
    RoutedSequential(camera, lidar, shared, (double, [1, 2]))(td)
    rows = td["agents"].tensordicts
    wanted = [
        shared.module(camera.module(rows[0]["camera"])),
        2 * shared.module(lidar.module(rows[1]["lidar"])),
        2 * shared.module(camera.module(rows[2]["camera"])),
    ]
    assert_actions(td, wanted)
    torch.testing.assert_close(rows[1]["hidden"], lidar.module(rows[1]["lidar"]))


def test_head_of_one_agent_reads_output_of_shared_encoder():
    encoder = make_policy(5, 6, "camera", "hidden")
    heads = [(make_policy(6, a, "hidden"), [i]) for i, a in enumerate((2, 3, 2))]
    td = random_lazy_group([5, 5, 5], 7, leaves=["camera"] * 3)
    RoutedSequential(encoder, *heads)(td)
    for row, (head, _) in zip(td["agents"].tensordicts, heads):
        wanted = head.module(encoder.module(row["camera"]))
        torch.testing.assert_close(row["action"], wanted)


def test_gradients_reach_the_routed_module_only():
    drone, rover = make_policy(5, 4), make_policy(3, 2)
    td = random_lazy_group([5, 3, 5, 3], 7)
    RoutedSequential((drone, [0, 2]), (rover, [1, 3]))(td)
    list_actions(td)[1].pow(2).sum().backward()
    assert all(p.grad is None for p in drone.parameters())
    found = [p.grad.clone() for p in rover.parameters()]
    rover.zero_grad()
    rover.module(td["agents"].tensordicts[1]["observation"]).pow(2).sum().backward()
    for one, p in zip(found, rover.parameters()):
        torch.testing.assert_close(one, p.grad)


def test_module_on_all_agents_may_write_to_the_root():
    mixer = TensorDictModule(lambda x: x.sum((-1, -2)), in_keys=[ACTION], out_keys=["total"])
    td = random_lazy_group([5, 3], 7)
    RoutedSequential(make_policy(5, 2), make_policy(3, 2), mixer)(td)
    torch.testing.assert_close(td["total"], td[ACTION].sum((-1, -2)))


def test_state_critic_beside_policies():
    state = TensorDictModule(nn.Linear(4, 1), in_keys=["state"], out_keys=["state_value"])
    everyone = TensorDictModule(
        lambda s: s.unsqueeze(-2).expand(7, 2, 4), in_keys=["state"], out_keys=[("agents", "all")]
    )
    td = random_lazy_group([5, 3], 7).set("state", torch.randn(7, 4))
    RoutedSequential(make_policy(5, 2), state, make_policy(3, 2), everyone)(td)
    assert td["state_value"].shape == (7, 1) and td["agents", "all"].shape == (7, 2, 4)


# ------------------------------------------------------------------------------ dense groups


def test_dense_group_without_routes_equals_torchrl():
    encoder, head = make_policy(5, 6, "observation", "hidden"), make_policy(6, 2, "hidden")
    td = random_dense_group(3, 5, 7)
    found = RoutedSequential(encoder, head)(td.clone())
    wanted = TensorDictSequential(encoder, head)(td.clone())
    assert (found == wanted).all() and found.keys() == wanted.keys()


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("routes", [([0, 1], [2, 3]), ([0, 2], [3, 1])])
def test_route_runs_on_slice_of_dense_group(batch, routes):
    one, other = make_policy(5, 2), make_policy(5, 2)
    td = random_dense_group(4, 5, *batch)
    RoutedSequential((one, routes[0]), (other, routes[1]))(td)
    assert not isinstance(td["agents"], LazyStackedTensorDict)
    x = td[OBSERVATION]
    wanted = [(one if i in routes[0] else other).module(x[..., i, :]) for i in range(4)]
    torch.testing.assert_close(td[ACTION], torch.stack(wanted, -2))


def test_dense_group_without_agent_batch_dim():
    one, other = make_policy(5, 2), make_policy(5, 3)
    td = TensorDict({"agents": {"observation": torch.randn(7, 2, 5)}}, [7])
    same = RoutedSequential((one, 0), (make_policy(5, 2), 1))(td.clone())
    assert same[ACTION].shape == (7, 2, 2)
    differ = RoutedSequential((one, 0), (other, 1))(td.clone())
    assert [tuple(x.shape) for x in list_actions(differ)] == [(7, 2), (7, 3)]
    assert_same(differ[OBSERVATION], td[OBSERVATION])


def test_dense_group_becomes_lazy_if_action_shapes_differ():
    one, other = make_policy(5, 2), make_policy(5, 3)
    td = random_dense_group(3, 5, 7)
    x = td[OBSERVATION]
    RoutedSequential((one, [0, 2]), (other, [1]))(td)
    wanted = [one.module(x[:, 0]), other.module(x[:, 1]), one.module(x[:, 2])]
    assert_actions(td, wanted)
    assert_same(td[OBSERVATION], x)


def test_entries_of_unrouted_agents_are_kept():
    td = random_dense_group(3, 5, 7)
    td[ACTION] = torch.randn(7, 3, 2)
    before = td[ACTION].clone()
    one = make_policy(5, 2)
    RoutedSequential((one, [1]), partial_tolerant=True)(td)
    torch.testing.assert_close(td[ACTION][:, 1], one.module(td[OBSERVATION][:, 1]))
    assert_same(td[ACTION][:, ::2], before[:, ::2])
