"""Module stacks: recurrent cells, images, statistics, randomness, and modules without vmap."""

import copy
import pickle

import pytest
import torch
from test_stack import BATCH, IN, MEMBERS, OUT, SHARING, assert_equals_loop, perceptron
from torch import nn

from torchrl_marl.modules import expand, stack


@pytest.mark.parametrize("index", SHARING, ids=str)
def test_gru_cell(index):
    modules = [nn.GRUCell(IN, 4, bias=i != 0) for i in range(3)]
    agents = [modules[i] for i in index]
    x, h = torch.randn(BATCH, len(index), IN), torch.randn(BATCH, len(index), 4)
    assert {b.executor for b in stack(agents).buckets} == {"matmul"}
    assert_equals_loop(stack(agents), agents, x, h)
    torch.testing.assert_close(stack(agents)(x), stack(agents)(x, torch.zeros_like(h)))


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
@pytest.mark.parametrize("index", SHARING, ids=str)
def test_recurrent_sequences_use_the_loop_executor(kind, index):
    modules = [kind(IN, 4, batch_first=True) for _ in range(3)]
    agents = [modules[i] for i in index]
    stacked = stack(agents, event_dims=2)
    assert {bucket.executor for bucket in stacked.buckets} == {"loop"}
    assert_equals_loop(stacked, agents, torch.randn(BATCH, len(index), 7, IN), pick=lambda y: y[0])


def test_tuple_inputs():
    modules = [nn.LSTMCell(IN, 4) for _ in range(2)]
    x, h, c = torch.randn(BATCH, 2, IN), torch.randn(BATCH, 2, 4), torch.randn(BATCH, 2, 4)
    found = stack(modules)(x, (h, c))
    for i, module in enumerate(modules):
        wanted = module(x[:, i], (h[:, i], c[:, i]))
        torch.testing.assert_close(tuple(y[:, i] for y in found), wanted)


def test_images():
    modules = [nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(-3)) for _ in range(2)]
    agents = [modules[i] for i in (0, 1, 0)]
    assert_equals_loop(stack(agents, event_dims=3), agents, torch.randn(BATCH, 3, 2, 5, 5))


@pytest.mark.parametrize("index", [[0, 1], [0, 1, 0]])
def test_images_with_batch_norm(index):
    # In float64, since gradients of batch norm cancel; that of the bias vanishes.
    modules = [nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)).double() for _ in range(2)]
    agents = [modules[i] for i in index]
    x = torch.randn(BATCH, len(index), 2, 5, 5, dtype=torch.float64)
    assert_equals_loop(stack(agents, event_dims=3), agents, x)


@pytest.mark.parametrize(("index", "executor"), [([0, 1], "vmap"), ([0, 1, 0], "loop")])
def test_batch_norm_statistics(index, executor):
    modules = [MEMBERS["batch norm"]() for _ in range(2)]
    agents = [modules[i] for i in index]
    stacked = stack(agents)
    assert stacked.buckets[0].executor == executor
    for _ in range(3):
        assert_equals_loop(stacked, agents, torch.randn(BATCH, len(index), IN) * 2 + 1)
    for agent, module in enumerate(agents):
        assert module[1].num_batches_tracked > 0
        for (_, found), (_, wanted) in zip(
            stacked[agent].detach().named_buffers(), module.named_buffers()
        ):
            torch.testing.assert_close(found, wanted)
    for module in modules:
        module.eval()
    assert_equals_loop(stacked.eval(), agents, torch.randn(BATCH, len(index), IN))


class Mean(nn.Module):
    """Subtracts a running mean. It assigns its buffers instead of writing to them."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(IN, OUT)
        self.register_buffer("mean", torch.zeros(IN))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        if self.training:
            self.count = self.count + 1
            self.mean = self.mean + (x.detach().mean(0) - self.mean) / self.count
        return self.linear(x - self.mean)


@pytest.mark.parametrize("executor", [None, "loop"])
@pytest.mark.parametrize("index", [[0], [0, 1, 2], [0, 1, 0]])
def test_assigned_buffers_are_kept(index, executor):
    modules = [Mean() for _ in range(3)]
    stacked = stack([modules[i] for i in index], executor=executor)
    steps = torch.randn(2, BATCH, len(index), IN) + 3
    for x in steps:
        stacked(x)
    for agent, member in enumerate(index):
        own = [i for i, other in enumerate(index) if other == member]
        found = stacked[agent].detach()
        assert found.count == 2 * len(own)
        torch.testing.assert_close(found.mean, steps[:, :, own].flatten(0, -2).mean(0))
    seen = stacked.eval()(steps[0])
    torch.testing.assert_close(stacked[0](steps[0][:, 0]), seen[:, 0])
    copied = stacked[0].detach().eval()
    torch.testing.assert_close(copied(steps[0][:, 0]), seen[:, 0])


def test_one_agent_keeps_its_assigned_buffers():
    stacked, x = stack([Mean(), Mean()]), torch.randn(BATCH, IN)
    stacked[1](x)
    assert [stacked[i].detach().count.item() for i in (0, 1)] == [0, 1]
    torch.testing.assert_close(stacked[1].detach().mean, x.mean(0))


def test_assigned_buffers_that_a_stack_cannot_keep_raise():
    with pytest.raises(ValueError, match="share a Mean, whose forward assigns its buffer"):
        expand(Mean(), 2, executor="vmap")(torch.randn(BATCH, 2, IN))
    wider = Mean()
    wider.mean = torch.zeros(1)  # the first forward makes it [IN]
    with pytest.raises(ValueError, match=r"\[6\] to the buffer 'mean', expected \[1\]"):
        stack([wider], executor="vmap")(torch.randn(BATCH, 1, IN))


def test_selected_agents_keep_their_statistics():
    stacked = stack([MEMBERS["batch norm"]() for _ in range(3)])
    stacked[[0, 2]](torch.randn(BATCH, 2, IN))  # not in a row: their parameters are copied
    stacked[1:](torch.randn(BATCH, 2, IN))
    counts = [stacked[i].detach()[1].num_batches_tracked.item() for i in range(3)]
    assert counts == [1, 1, 2]


class Noted(nn.Module):
    """Keeps its last result, as attention layers keep their weights."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(IN, OUT)
        self.last = None

    def forward(self, x):
        self.last = self.linear(x)
        self.all = [self.last]
        return self.last


def test_kept_results_do_not_prevent_copies():
    stacked, x = stack([Noted(), Noted()]), torch.randn(BATCH, 2, IN)
    wanted = stacked(x)
    member = stacked[1].detach()
    assert member.last is None
    assert not hasattr(member, "all")
    torch.testing.assert_close(member(x[:, 1]), wanted[:, 1])
    for copied in (copy.deepcopy(stacked), pickle.loads(pickle.dumps(stacked))):
        torch.testing.assert_close(copied(x), wanted)


def test_dropout_differs_by_agent_and_stops_in_eval_mode():
    stacked = stack([nn.Sequential(nn.Dropout(0.5)), nn.Sequential(nn.Dropout(0.5))] * 2)
    x = torch.ones(64, 4, 8)
    y = stacked(x)
    assert all(not torch.equal(y[:, 0], y[:, i]) for i in (1, 2, 3))
    assert not torch.equal(y[0], y[1])
    assert torch.equal(stacked.eval()(x), x)


class Branching(nn.Module):
    """Data-dependent control flow, which vmap refuses."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(IN, OUT)

    def forward(self, x):
        return self.linear(x) if x.sum() > 0 else -self.linear(x)


def test_modules_without_vmap_use_the_loop_executor():
    modules = [Branching() for _ in range(2)]
    stacked = stack(modules)
    assert stacked.buckets[0].executor == "loop"
    assert_equals_loop(stacked, modules, torch.randn(BATCH, 2, IN))


def test_hooks_are_called():
    modules, seen = [perceptron() for _ in range(2)], []
    for module in modules:
        module[1].register_forward_hook(lambda *args: seen.append(args[2].shape))
    stack(modules)(torch.randn(BATCH, 2, IN))
    assert seen == [(BATCH, 8)] * 2


@pytest.mark.parametrize("executor", ["vmap", "loop"])
def test_executors_give_equal_outputs(executor):
    modules = [perceptron() for _ in range(3)]
    agents = [modules[i] for i in (0, 1, 0, 2)]
    x = torch.randn(BATCH, 4, IN)
    other = stack(agents, executor=executor)
    assert {bucket.executor for bucket in other.buckets} == {executor}
    torch.testing.assert_close(other(x), stack(agents)(x))
    assert_equals_loop(other, agents, x)
