"""Module stacks: running a subset of agents."""

import copy

import pytest
import torch
from test_stack import BATCH, IN, MEMBERS, Gated, perceptron
from torch import nn
from torch.utils import _pytree as pytree

from torchrl_marl.capture import capture
from torchrl_marl.modules import stack
from torchrl_marl.modules.stacks.module_stack import run_only_agents

CHOICES = [[0], [2], [3, 1], [0, 1, 2, 3]]
KINDS = {**MEMBERS, "gated": Gated, "cell": lambda: nn.GRUCell(IN, 4)}


def inputs_of(kind, n=4):
    second = {"gated": 2, "cell": 4}.get(kind)
    return [torch.randn(BATCH, n, width) for width in (IN, second) if width is not None]


def run(stacked, inputs):
    """Outputs, and the gradients of the parameters."""
    stacked.zero_grad()
    outputs = pytree.tree_leaves(stacked(*inputs))
    sum(y.cos().sum() for y in outputs).backward()
    zero = torch.zeros(())
    return outputs, [zero if p.grad is None else p.grad.clone() for p in stacked.parameters()]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("executor", [None, "vmap", "loop"])
@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"batch norm"}))
def test_chosen_agents_are_unchanged_and_others_give_zero(kind, executor, choice):
    stacked, inputs = stack([KINDS[kind]() for _ in range(4)], executor=executor), inputs_of(kind)
    wanted, gradients = run(stacked, inputs)
    with run_only_agents(stacked, torch.tensor(choice)):
        found, own = run(stacked, inputs)
    rest = [i for i in range(4) if i not in choice]
    for x, y in zip(wanted, found, strict=True):
        torch.testing.assert_close(x[:, choice], y[:, choice])
        assert not y[:, rest].any()
    for x, y in zip(gradients, own, strict=True):
        torch.testing.assert_close(x[choice], y[choice])
        assert not y[rest].any()
    for x, y in zip(wanted, run(stacked, inputs)[0], strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_agents_of_different_widths(choice):
    agents = [
        perceptron(width, out, hidden=width) for width, out in ((6, 3), (4, 2), (5, 3), (6, 1))
    ]
    stacked, inputs = stack(agents, pad=True), inputs_of("perceptron")
    wanted, gradients = run(stacked, inputs)
    with run_only_agents(stacked, torch.tensor(choice)):
        found, own = run(stacked, inputs)
    torch.testing.assert_close(found[0][:, choice], wanted[0][:, choice])
    for x, y in zip(gradients, own, strict=True):
        torch.testing.assert_close(x[choice], y[choice])


@pytest.mark.parametrize(
    "stacked",
    [
        stack([perceptron()] * 2 + [perceptron()]),
        stack([perceptron(), nn.Sequential(nn.Linear(IN, 3), nn.ReLU()), perceptron()]),
        stack([MEMBERS["batch norm"]() for _ in range(3)]),
        stack([perceptron() for _ in range(4)])[1:],
    ],
    ids=["shared", "structures", "statistics", "view"],
)
def test_stacks_without_subset_support_run_all_agents(stacked):
    [x] = inputs_of("perceptron", 3)
    expected = copy.deepcopy(stacked)(x)
    with run_only_agents(stacked, torch.tensor([1])):
        assert torch.equal(stacked(x), expected)


def test_one_captured_graph_runs_any_subset():
    stacked, [x] = stack([perceptron() for _ in range(4)]), inputs_of("perceptron")

    def forward(chosen, x, *parameters):
        with run_only_agents(stacked, chosen):
            return stacked(x)

    leaves = [torch.tensor([0]), x, *stacked.parameters()]
    graph = capture(forward, *leaves, name="a stack", execution="trace")
    for agent in range(4):
        found = graph(torch.tensor([agent]), *leaves[1:])
        torch.testing.assert_close(found[:, agent], stacked(x)[:, agent])
        assert found.count_nonzero() == BATCH * 3


def test_error_resets_the_choice():
    stacked = stack([perceptron() for _ in range(3)])
    with pytest.raises(ValueError, match="3 agents"), run_only_agents(stacked, torch.tensor([1])):
        stacked(torch.zeros(BATCH, 2, IN))
    assert stacked(torch.ones(BATCH, 3, IN)).all(0).any(-1).all()
