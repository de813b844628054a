"""Module stacks of layers of unequal width: padding has no effect."""

import copy

import pytest
import torch
from test_stack import BATCH, assert_equals_loop, numel, perceptron
from torch import nn

from torchrl_marl.modules import stack

WIDTHS = [(4, 3, 8), (6, 2, 8), (5, 3, 8), (6, 1, 8)]
HIDDEN = [(4, 3, 8), (6, 2, 5), (5, 3, 16), (6, 1, 8)]


@pytest.mark.parametrize("widths", [WIDTHS, HIDDEN], ids=["equal hidden", "any hidden"])
@pytest.mark.parametrize("index", [[0, 1, 2, 3], [0, 0, 1, 2, 2, 3], [3, 1, 3, 0], [0, 0, 0]])
def test_padded_equals_the_loop(widths, index):
    modules = [perceptron(*w) for w in widths]
    agents = [modules[i] for i in index]
    stacked = stack(agents, pad=True)
    assert len(stacked.buckets) == 1
    assert_equals_loop(stacked, agents, [torch.randn(BATCH, m[0].in_features) for m in agents])
    width = max(m[0].in_features for m in agents)
    x = torch.full((BATCH, len(index), width), float("nan"))
    for i, module in enumerate(agents):
        x[:, i, : module[0].in_features] = torch.randn(BATCH, module[0].in_features)
    stacked.zero_grad()
    y = stacked(x)
    assert y.shape == (BATCH, len(index), max(m[2].out_features for m in agents))
    for i, module in enumerate(agents):
        out = module[2].out_features
        torch.testing.assert_close(y[:, i, :out], module(x[:, i, : module[0].in_features]))
        assert (y[:, i, out:] == 0).all()


def pads_of(stacked):
    """Masks of the padding of each parameter."""
    twin = copy.deepcopy(stacked)
    with torch.no_grad():
        for p in twin.parameters():
            p.fill_(1.0)
        for agent, member in enumerate(twin):
            zeros = member.detach()
            for p in zeros.parameters():
                p.zero_()
            twin.load(agent, zeros)
    return [p != 0 for p in twin.parameters()]


@pytest.mark.parametrize("activation", [nn.Tanh, nn.Sigmoid, nn.SiLU])
@pytest.mark.parametrize("widths", [WIDTHS, HIDDEN], ids=["equal hidden", "any hidden"])
def test_padding_has_no_effect(widths, activation):
    stacked = stack([perceptron(*w, activation) for w in widths], pad=True)
    x = torch.randn(BATCH, 4, 6)
    mask = torch.arange(6) < torch.tensor([w for w, _, _ in widths])[:, None]
    pads = pads_of(stacked)
    assert any(pad.any() for pad in pads)

    def run(x):
        stacked.zero_grad()
        y = stacked(x)
        y.square().sum().backward()
        return [y, *(p.grad for p in stacked.parameters())]

    clean = run(x)
    for gradient, pad in zip(clean[1:], pads):
        assert (gradient[pad] == 0).all() and (gradient != 0).any()
    for poison in (float("nan"), float("inf"), 1e9):
        for old, new in zip(clean, run(torch.where(mask, x, poison))):
            assert torch.equal(old, new)
    with torch.no_grad():  # as parameter noise or a redrawn critic does
        for p, pad in zip(stacked.parameters(), pads):
            p[pad] = 3.0
    x.requires_grad_()
    for old, new in zip(clean, run(x)):
        torch.testing.assert_close(old, new)
    assert (x.grad[:, ~mask] == 0).all() and (x.grad[:, mask] != 0).any()


def test_state_dict_holds_parameters_only():
    a, b = perceptron(4), perceptron(5, 2, 6)
    for stacked in (stack([a, b, a], pad=True), stack([a, b, a])):
        assert list(stacked.buffers()) == []
        assert list(stacked.state_dict()) == [name for name, _ in stacked.named_parameters()]
        assert all(name.startswith("buckets.") for name in stacked.state_dict())


def test_optimizer_steps_keep_padding_at_zero():
    stacked = stack([perceptron(*w, nn.Sigmoid) for w in HIDDEN], pad=True)
    pads = pads_of(stacked)
    optimizer = torch.optim.AdamW(stacked.parameters(), lr=0.1)
    for _ in range(3):
        stacked(torch.randn(BATCH, 4, 6)).square().sum().backward()
        optimizer.step()
    assert all((p[pad] == 0).all() for p, pad in zip(stacked.parameters(), pads))


def test_padding_with_tied_weights_and_other_executors():
    modules = [perceptron(width, width, width) for width in (4, 6)]
    inputs = [torch.randn(BATCH, width) for width in (4, 6)]
    for executor in ("vmap", "loop"):
        assert_equals_loop(stack(modules, pad=True, executor=executor), modules, inputs)
    for module in modules:
        module[2].weight = module[0].weight
    stacked = stack(modules, pad=True)
    assert numel(stacked) == sum(numel(module) for module in modules)
    assert_equals_loop(stacked, modules, inputs)


def test_only_perceptrons_of_one_kind_are_padded():
    norm = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    modules = [perceptron(4), norm, perceptron(6, 2), perceptron(5, activation=nn.ReLU)]
    stacked = stack(modules, pad=True)
    assert [bucket.n_members for bucket in stacked.buckets] == [2, 1, 1]
    inputs = [torch.randn(BATCH, w) for w in (4, 4, 6, 5)]
    assert_equals_loop(stacked, modules, inputs)
    x = torch.full((BATCH, 4, 6), float("nan"))
    for i, row in enumerate(inputs):
        x[:, i, : row.shape[-1]] = row
    y = stacked(x)
    for i, row in enumerate(stacked(inputs)):
        torch.testing.assert_close(y[:, i, : row.shape[-1]], row)
        assert (y[:, i, row.shape[-1] :] == 0).all()
    with pytest.raises(ValueError, match="agent 0 takes 6 features, found an input with 7"):
        stacked(torch.randn(BATCH, 4, 7))
