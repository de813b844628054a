"""Graphs that are rewritten for the CPU return the values of the recorded graph."""

import math

import pytest
import torch
from torch import nn

from torchrl_marl.capture import capture, trace
from torchrl_marl.capture.inductor import rational_tanh, rewrite_for_cpu

aten = torch.ops.aten
LARGEST_ERROR = 4.2e-7  # in the docstring


def targets(module):
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def rewritten(function, *inputs):
    """Outputs of the recorded graph and of the rewritten one, and the rewritten graph."""
    traced = trace(function, *inputs)
    module = rewrite_for_cpu(traced.module)
    return traced.module(*inputs), module(*inputs), module


def test_rational_tanh_is_within_a_few_ulp_of_tanh():
    # every 4001st float from 1e-30 to 20
    bits = torch.tensor([1e-30, 20.0]).view(torch.int32)
    x = torch.arange(int(bits[0]), int(bits[1]), 4001, dtype=torch.int32).view(torch.float32)
    expected = x.double().tanh()
    error = (rational_tanh(x).double() - expected).abs()
    assert error.max() < LARGEST_ERROR
    assert (error / expected).max() < LARGEST_ERROR


def test_rational_tanh_never_exceeds_one():
    bits = torch.tensor([6.0, 8.0]).view(torch.int32)
    x = torch.arange(int(bits[0]), int(bits[1]), dtype=torch.int32).view(torch.float32)
    assert rational_tanh(x).max() <= 1.0


def test_rational_tanh_of_special_values():
    x = torch.tensor([0.0, 1e-38, 1e-30, 20.0, 1e30, math.inf])
    expected = torch.tensor([0.0, 1e-38, 1e-30, 1.0, 1.0, 1.0])
    torch.testing.assert_close(rational_tanh(x), expected, rtol=LARGEST_ERROR, atol=1e-40)
    assert rational_tanh(torch.tensor([math.nan])).isnan().all()
    assert torch.signbit(rational_tanh(torch.tensor([-0.0]))).all()


def test_rational_tanh_is_odd():
    x = torch.cat([torch.randn(10_000) * 4, torch.tensor([math.inf])])
    assert torch.equal(rational_tanh(-x), -rational_tanh(x))


def test_compiled_tanh_and_its_gradient_are_within_tolerance():
    def value_and_slope(x):
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = x.tanh()
        return y.detach(), torch.autograd.grad(y.sum(), x)[0]

    x = torch.linspace(-9, 9, 4001)
    program = capture(value_and_slope, x, name="a tanh with its slope")
    value, slope = program(x)
    exact = x.double().tanh()
    assert (value.double() - exact).abs().max() < LARGEST_ERROR
    assert (slope.double() - (1 - exact**2)).abs().max() < 1e-6
    assert program.traced.module(x)[0].equal(x.tanh())  # the recorded graph is unchanged


def test_traced_execution_uses_tanh_of_torch():
    x = torch.randn(100)
    program = capture(torch.tanh, x, name="a tanh", execution="trace")
    assert program(x).equal(x.tanh())


def test_double_precision_tanh_is_not_rewritten():
    [expected], [found], module = rewritten(torch.tanh, torch.randn(10, dtype=torch.float64))
    assert aten.tanh.default in targets(module)
    assert found.equal(expected)


@pytest.mark.parametrize("shape", [(5,), (2, 5), (3, 2, 5)])
def test_linear_layer_is_split_into_product_and_bias(shape):
    torch.manual_seed(0)
    layer, x = nn.Linear(5, 4), torch.randn(*shape)
    traced = trace(lambda x: layer(x).detach(), x)
    module = rewrite_for_cpu(traced.module)
    assert aten.addmm.default not in targets(module)
    found = module(x, *traced.captured)[0]
    torch.testing.assert_close(found, layer(x).detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("n_rows", "n_summed", "n_columns", "turned"),
    [(64, 100, 14, 1), (64, 100, 64, 0), (64, 50, 14, 0)],
)
def test_narrow_product_with_long_sums_is_computed_transposed(n_rows, n_summed, n_columns, turned):
    torch.manual_seed(0)
    left, right = torch.randn(n_rows, n_summed), torch.randn(n_summed, n_columns)
    [expected], [found], module = rewritten(torch.mm, left, right)
    assert targets(module).count(aten.t.default) == 3 * turned
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    compiled = capture(torch.mm, left, right, name="a product")(left, right)
    torch.testing.assert_close(compiled, expected, rtol=1e-5, atol=1e-5)


def test_transposed_product_is_flattened_by_rows():
    torch.manual_seed(0)
    left, right = torch.randn(64, 100), torch.randn(100, 14)
    flat = lambda x, y: torch.mm(x, y).unsqueeze(0).view(1, -1)  # noqa: E731
    [expected], [found], _ = rewritten(flat, left, right)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    compiled = capture(flat, left, right, name="a flat product")(left, right)
    torch.testing.assert_close(compiled, expected, rtol=1e-5, atol=1e-5)


def test_gradient_after_rewritten_tanh_is_computed_transposed():
    torch.manual_seed(0)
    grow, x = nn.Linear(8, 40), torch.randn(100, 8)

    def gradient(x, weight):
        weight = weight.detach().requires_grad_()
        with torch.enable_grad():
            total = (x.tanh() @ weight.t()).tanh().sum()
        return torch.autograd.grad(total, weight)[0]

    [expected], [found], module = rewritten(gradient, x, grow.weight.detach())
    products = [node for node in module.graph.nodes if node.target is aten.mm.default]
    assert [tuple(module(x, grow.weight.detach())[0].shape), len(products)] == [(40, 8), 2]
    assert products[1].args[1].target is aten.t.default
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
@pytest.mark.parametrize(
    ("n_rows", "n_columns", "tall"), [(2048, 32, 1), (2047, 32, 0), (2048, 4, 0)]
)
def test_products_of_many_rows_are_computed_by_onednn(n_rows, n_columns, tall):
    torch.manual_seed(0)
    layer, x = nn.Linear(14, n_columns), torch.randn(n_rows, 14)
    leaves = layer.weight.detach(), layer.bias.detach(), torch.randn(n_columns, 14)

    def twice(x, weight, bias, second):
        y = nn.functional.linear(x, weight, bias).tanh()
        return y, (y @ second) @ second.t()

    expected, found, module = rewritten(twice, x, *leaves)
    product = torch.ops.torchrl_marl.tall_product.default
    assert targets(module).count(product) == 2 * tall
    compiled = capture(twice, x, *leaves, name="two layers")(x, *leaves)
    for one, other, third in zip(expected, found, compiled):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(third, one, rtol=1e-5, atol=1e-5)


def test_rows_of_several_inputs_are_gathered_by_one_operation():
    def pick(index, x, y):
        return x.index_select(0, index) * 2, y.index_select(0, index)

    inputs = torch.tensor([2, 0]), torch.arange(6.0).view(3, 2), torch.arange(3)
    expected, found, module = rewritten(pick, *inputs)
    assert all(map(torch.equal, expected, found))
    assert targets(module).count(torch.ops.torchrl_marl.rows.default) == 1
    assert aten.index_select.default not in targets(module)


@pytest.mark.parametrize(
    ("between", "gathered"),
    [
        (lambda x: x.clamp(0, 9) * 2, 0),  # the compiler reads agent 1 alone
        (lambda x: x.flip(1), 1),
        (lambda x: x + x.sum(), 1),
    ],
)
def test_rows_with_a_later_agent_selection_are_not_gathered(between, gathered):
    def pick(index, agent, x):
        return between(x.index_select(0, index)).index_select(1, agent)

    inputs = torch.tensor([2, 0]), torch.tensor([1]), torch.arange(24.0).view(3, 2, 4)
    [expected], [found], module = rewritten(pick, *inputs)
    assert expected.equal(found)
    assert expected.equal(capture(pick, *inputs, name="an agent's rows")(*inputs))
    assert targets(module).count(torch.ops.torchrl_marl.rows.default) == gathered


def test_rows_of_mutated_inputs_are_selected_in_order():
    def pick(index, x):
        before = x.index_select(0, index)
        x.add_(1)
        return before, x.index_select(0, index)

    index, x = torch.tensor([1]), torch.arange(2.0)
    module = rewrite_for_cpu(trace(pick, index, x.clone()).module)
    assert [y.tolist() for y in module(index, x.clone())] == [[1.0], [2.0]]


def test_foreach_norm_is_rewritten_with_equal_values():
    [expected], [found], module = rewritten(
        lambda x, y: torch.stack(torch._foreach_norm([x, y])), torch.ones(4), torch.ones(9, 1)
    )
    assert found.equal(expected) and found.tolist() == [2.0, 3.0]
    assert aten._foreach_norm.Scalar not in targets(module)
