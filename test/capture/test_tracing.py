"""Functions that can be captured as graphs, and the errors of those that cannot."""

import pytest
import torch
import torch.utils._pytree as pytree
from torch.fx.experimental.proxy_tensor import make_fx

from torchrl_marl.capture import capture, trace
from torchrl_marl.capture.tracing import ValueNumbers
from torchrl_marl.errors import CaptureError


def record(function, *inputs):
    return capture(function, *inputs, name="a test", execution="trace")


def test_graph_mutates_its_inputs_like_the_function():
    def function(x):
        x += 1
        return x * 2

    program, x = record(function, torch.zeros(2)), torch.tensor([1.0, 2.0])
    assert torch.equal(program(x), torch.tensor([4.0, 6.0]))
    assert torch.equal(x, torch.tensor([2.0, 3.0]))


def test_constants_in_the_function_become_tensors():
    def function(x):
        zero = torch.tensor(0.0)
        pair = torch.tensor([1.0, 2.0])
        pair[0] = 5.0
        return torch.logaddexp(zero, x) + pair

    x = torch.randn(3, 2)
    assert torch.equal(record(function, torch.zeros(3, 2))(x), function(x))


def test_nested_outputs_and_non_tensors_are_kept():
    def function(inputs):
        return {"sum": inputs["a"] + inputs["b"], "name": "sum", "none": None}

    program = record(function, {"a": torch.ones(2), "b": torch.ones(2)})
    found = program({"a": torch.ones(2), "b": torch.zeros(2)})
    assert found["name"] == "sum" and found["none"] is None
    assert torch.equal(found["sum"], torch.ones(2))


def test_graphs_match_make_fx():
    weight, outer = torch.nn.Parameter(torch.randn(2, 2)), torch.randn(2, 2)

    def with_gradient(x):
        total, own = torch.tensor(1.0).add_(2), x.clone()
        own[0] += total
        values = torch.nn.functional.linear(x, weight)
        (gradient,) = torch.autograd.grad((values.tanh() * outer).sum(), [weight])
        noise = torch.rand_like(x) + torch.arange(2)
        many = torch.func.vmap(lambda row: (row @ weight.detach()).softmax(-1))(x[None])
        return [own, gradient, noise, many, *torch.sort(x, 0), x.split(1)[1], outer + 1, outer]

    def without(x):
        y = (x.t() @ weight.t()).double()
        return [y[1:], y.sum().long(), x[:, None].expand(2, 5, 2), x.matmul(outer), x.std(0)]

    for function, mode in ((with_gradient, torch.enable_grad), (without, torch.inference_mode)):
        x = torch.randn(2, 2)
        with mode():
            expected = make_fx(function, tracing_mode="real", _allow_non_fake_inputs=True)(x)
            found = trace(function, x).module
        assert nodes_of(found) == nodes_of(expected) and len(nodes_of(found)) > 10


def nodes_of(module):
    """Operations of a graph with their arguments, and the tensors that they return."""
    module.graph.eliminate_dead_code()
    nodes, places, found = module.graph.nodes, {}, []
    for node in nodes:
        if node.op in ("get_attr", "placeholder"):  # inputs, or uses of constants
            continue
        places[node] = len(places)
        given = [places.get(one, "outer") for one in node.all_input_nodes]
        plain = [str(one) for one in node.args if not isinstance(one, (torch.fx.Node, list))]
        values = pytree.tree_leaves(node.meta.get("val", []))
        described = [(x.shape, x.stride(), x.dtype, x.device, type(x)) for x in values]
        found.append((node.op, node.target, given, plain, described))
    return found


def test_random_numbers_match_eager_execution():
    def function(x):
        noise = torch.randn(4) + torch.rand_like(x)
        return x + noise + torch.empty(4).uniform_(-1, 1)

    program, x = record(function, torch.zeros(4)), torch.ones(4)
    torch.manual_seed(3)
    found = [program(x), program(x)]
    torch.manual_seed(3)
    assert all(torch.equal(y, function(x)) for y in found)
    assert not torch.equal(*found)


def asserts(x):
    assert (x >= 0).all(), "negative"
    return x.sqrt()


def raises(x):
    if torch.any(x < 0):
        raise ValueError("negative")
    return x.sqrt()


@pytest.mark.parametrize("function", [asserts, raises])
def test_failed_assertion_is_raised_later_with_its_line(function):
    program = record(function, torch.ones(2))
    assert torch.equal(program(torch.full((2,), 4.0)), torch.full((2,), 2.0))
    program.raise_failed()
    program(torch.tensor([1.0, -1.0]))
    program(torch.ones(2))
    line = function.__code__.co_firstlineno + 1
    with pytest.raises(CaptureError, match=f"this failed: .* .capture/test_tracing.py:{line}"):
        program.raise_failed()
    program.raise_failed()


def test_conditions_on_constants_are_evaluated():
    gravity = torch.zeros(2)

    def function(x):
        if not (gravity == 0).all():
            x = x + gravity
        return x * float(torch.tensor(2.0)) + int(torch.arange(3).sum())

    assert torch.equal(record(function, torch.zeros(2))(torch.ones(2)), torch.full((2,), 5.0))


def branch(x):
    if x.sum() > 0:
        return x
    return -x


def branch_on_chance(x):
    return x if torch.rand(()) > 0.5 else -x


def branch_on_what_was_written(x):
    flag = torch.zeros(1)
    flag += x[0]
    return x if flag > 0 else -x


def number(x):
    return x * x[0].item()


def loop(x):
    while (x < 1).any():
        x = x + 1
    return x


def caught(x):
    try:
        assert (x > 0).all()
    except AssertionError:
        return -x
    return x


def guarded_call(x):
    mask = x > 0
    if mask.any():
        x[mask] = torch.zeros(())
    return x


def guarded_with_else(x):
    mask = x > 0
    if mask.any():
        x[mask] = 0.0
    else:
        x = x + 1
    return x


def guarded_by_another(x):
    mask, other = x > 0, x < 0
    if mask.any():
        x[other] = 0.0
    return x


def guarded_dict(x):
    mask, written = x > 0, {}
    if mask.any():
        written[mask] = 1.0
    return x * len(written)


def list_of(x):
    return torch.tensor(x.tolist())


def places(x):
    return x.nonzero()


REFUSED = [
    branch,
    branch_on_chance,
    branch_on_what_was_written,
    number,
    loop,
    caught,
    guarded_call,
    guarded_with_else,
    guarded_by_another,
    guarded_dict,
    list_of,
    places,
]


@pytest.mark.parametrize("function", REFUSED, ids=lambda f: f.__name__)
def test_data_dependent_control_flow_raises_with_its_line(function):
    with pytest.raises(CaptureError, match=r"at capture/test_tracing.py:\d+: \S"):
        trace(lambda x: function(x.clone()), torch.randn(3))


def test_write_to_captured_tensor_raises():
    count = torch.zeros(2)

    def function(x):
        count.add_(x)
        return count

    with pytest.raises(CaptureError, match="not part of the state"):
        trace(function, torch.ones(2))


def test_indexing_by_input_tensors_is_captured():
    def function(x, places):
        x = x.clone()
        x[torch.arange(3), places] = x[torch.arange(3), places] + 1
        return x, x[:, places]

    program = record(function, torch.zeros(3, 4), torch.zeros(3, dtype=torch.long))
    x, places = torch.randn(3, 4), torch.tensor([3, 0, 1])
    for found, expected in zip(program(x, places), function(x, places)):
        assert torch.equal(found, expected)


class TestValueNumbers:
    """Equal numbers must mean equal values."""

    def numbers(self, function, *inputs):
        """Value numbers of the outputs of a traced function."""
        from torch.utils._python_dispatch import TorchDispatchMode

        values = ValueNumbers()

        class Record(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                result = func(*args, **(kwargs or {}))
                written = args[:1] if func._schema.is_mutable else []
                values.record(func, args, kwargs or {}, result, written)
                return result

        with Record():
            found = function(*inputs)
        return [values.of(x) for x in found]

    @pytest.mark.parametrize(
        "same",
        [
            lambda x, y: (x, x),
            lambda x, y: (x + y, x + y),
            lambda x, y: ((x[:, 0] < 1) & (y[:, 1] > 2), (x[:, 0] < 1) & (y[:, 1] > 2)),
            lambda x, y: (torch.stack([x, y]).norm(dim=-1), torch.stack([x, y]).norm(dim=-1)),
        ],
    )
    def test_equal_computations_have_equal_numbers(self, same):
        a, b = self.numbers(same, torch.randn(3, 2), torch.randn(3, 2))
        assert a == b

    @pytest.mark.parametrize(
        "different",
        [
            lambda x, y: (x, x.clone() + 0),
            lambda x, y: (x + y, x - y),
            lambda x, y: (x[0], x[1]),
            lambda x, y: (x * 0.0, x * -0.0),
            lambda x, y: (x.clone() + 1, x.clone() + 1.0 + y),
            lambda x, y: (torch.rand(2), torch.rand(2)),
            lambda x, y: (x > 0, x.add_(1) > 0),
            lambda x, y: (x[:, 0] > 0, x[:, 1].add_(1) > 0),
            lambda x, y: (x[0] > 0, (x.t().mul_(2), x[0] > 0)[1]),
            lambda x, y: (x.sum(0), x.sum(1)[:2]),
            lambda x, y: (torch.empty(2), torch.empty(2)),
        ],
    )
    def test_computations_that_may_differ_have_different_numbers(self, different):
        a, b = self.numbers(different, torch.randn(3, 2), torch.randn(3, 2))
        assert a != b
