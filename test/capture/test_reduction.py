"""Reduced graphs return bitwise the results of the recorded ones."""

import math

import pytest
import torch
import torch.utils._pytree as pytree

from torchrl_marl.capture import reduction
from torchrl_marl.capture.batching import Groups, batch
from torchrl_marl.capture.chains import sum_chains
from torchrl_marl.capture.folding import fold_constants
from torchrl_marl.capture.reduction import (
    batching_may_pay,
    batching_pays,
    n_operations,
    reduce_graph,
)
from torchrl_marl.capture.simplify import simplify
from torchrl_marl.capture.tracing import trace
from torchrl_marl.capture.writes import without_writes
from torchrl_marl.errors import CaptureError

E = 5


def bits(x):
    """Integers with the bits of a tensor's values; all NaN get the same bits."""
    if not x.is_floating_point():
        return x
    x = torch.where(x.isnan(), torch.full_like(x, math.nan), x)
    return x.contiguous().view(torch.int32)


def targets(module):
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


def n_of(module, name):
    return sum(name in target for target in targets(module))


def smaller_graphs(function, *inputs):
    """The recorded graph and the four smaller ones."""
    module = trace(function, *inputs).module
    fold_constants(module)
    simplified = simplify(module)
    summed = sum_chains(simplified)
    batched = simplify(batch(Groups(summed), pytree.tree_leaves(inputs), E))
    return module, without_writes(module), simplified, summed, batched


def assert_same_bits(function, *inputs, states=(0, 1, 2)):
    """Runs all graphs on several inputs, and returns them."""
    module, *smaller = smaller_graphs(function, *inputs)
    for state in states:
        torch.manual_seed(state)
        leaves = [torch.randn_like(x) if x.is_floating_point() else x for x in inputs]
        leaves = [special(x, state) if x.is_floating_point() else x for x in leaves]
        expected = run(module, leaves)
        for graph in smaller:
            found = run(graph, leaves)
            for x, y in zip(expected, found, strict=True):
                assert x.dtype == y.dtype and x.stride() == y.stride()
                assert torch.equal(bits(x), bits(y))
    return module, *smaller


def special(x, state):
    return torch.where(x > 1.2, (math.nan, -0.0, math.inf)[state % 3], x)


def run(module, leaves):
    leaves = [x.clone() for x in leaves]
    torch.manual_seed(7)
    out = module(*leaves)
    return [x.clone(memory_format=torch.preserve_format) for x in out]


def pairwise(n):
    """Forces between all pairs of n agents, written as in a simulator."""

    def step(positions):
        agents = list(positions.unbind(0))
        forces = [torch.zeros(E, 2) for _ in range(n)]
        for i in range(n):
            for j in range(i + 1, n):
                delta = agents[i] - agents[j]
                distance = torch.linalg.vector_norm(delta, dim=-1)
                push = torch.where((distance < 1.0).unsqueeze(-1), delta * 0.1, torch.zeros(()))
                forces[i] += push
                forces[j] -= push
        return [torch.stack(agents) + torch.stack(forces), forces[0]]

    return step


@pytest.mark.parametrize("n", [3, 4, 5, 6])
def test_pairs_are_batched_into_one_operation(n):
    recorded, _, simplified, _, batched = assert_same_bits(pairwise(n), torch.zeros(n, E, 2))
    pairs = n * (n - 1) // 2
    assert n_of(recorded, "linalg_vector_norm") == n_of(simplified, "linalg_vector_norm") == pairs
    assert n_of(batched, "linalg_vector_norm") == n_of(batched, "lt.Scalar") == 1


def test_number_of_operations_is_independent_of_agents():
    def turn(headings):
        agents = [x.cos() * (0.5 + i) for i, x in enumerate(headings.unbind(0))]
        return [torch.stack(agents)]

    graphs = [smaller_graphs(turn, torch.zeros(n, E)) for n in (4, 8, 32)]
    assert len({n_operations(batched) for *_, batched in graphs}) == 1
    assert len({n_operations(recorded) for recorded, *_ in graphs}) == 3


def test_in_place_writes_become_functional():
    def step(x):
        x = x.clone()
        x[:, 0] += 1
        x[1:3] *= 2
        x.t()[1].clamp_(max=0.5)
        x[0].fill_(-0.0)
        column = x.unsqueeze(0)[0].select(1, 1)
        x[3] = 9
        return [x, column + 1]

    _, functional, *_ = assert_same_bits(step, torch.zeros(E, 2))
    assert not any(target.split(".")[1].endswith("_") for target in targets(functional))


def test_view_reads_a_later_write():
    def step(x):
        x = x + 0
        row = x[0]
        x[0, 0] = 3.0
        return row + 1

    *_, simplified, _, _ = assert_same_bits(step, torch.zeros(2, E))
    assert simplified(torch.zeros(2, E))[0][0] == 4.0


def test_masked_writes():
    def step(x, y):
        x, y = x.clone(), y.clone()
        near = (x - y).abs().sum(-1) < 1
        x[near] = y[near] * 2
        y[~near] += 1
        x[near & (y[:, 0] > 0)] -= 1
        return [x, y]

    assert_same_bits(step, torch.zeros(E, 2), torch.zeros(E, 2))


def test_random_numbers_are_drawn_in_the_same_order_as_recorded():
    def step(x):
        first = [torch.rand(E) for _ in range(3)]
        unused = torch.rand(E)
        del unused
        return [x + first[0] - first[2], torch.randn(E) * first[1]]

    *_, simplified, _, batched = assert_same_bits(step, torch.zeros(E))
    assert n_of(simplified, "rand.") == n_of(batched, "rand.") == 4


def test_in_place_draws_are_simplified():
    def step(x):
        drawn = [torch.empty(E, 2).normal_(), torch.empty(E, 2).uniform_(), torch.empty(E, 2)]
        return [x + drawn[0] * drawn[1] + drawn[2].exponential_()]

    *_, simplified, _, batched = assert_same_bits(step, torch.zeros(E, 2))
    assert n_of(simplified, "normal") == n_of(batched, "normal") == 1


def test_mixed_shapes_and_constants_of_agents():
    def step(x, y):
        speeds = [torch.tensor(0.1 * i) for i in range(1, 5)]
        wide = [a * s for a, s in zip(x.unbind(0), speeds)]
        narrow = [a * s for a, s in zip(y.unbind(0), speeds)]
        return [torch.cat([torch.cat(wide, -1), torch.cat(narrow, -1)], -1), torch.stack(wide, 1)]

    *_, batched = assert_same_bits(step, torch.zeros(4, E, 2), torch.zeros(4, E, 3))
    assert n_of(batched, "mul") == 2


def test_reductions_and_lists():
    def step(x):
        parts = x.split([2, 2, 3], 1)
        least = [part.min(-1) for part in parts[:2]]
        return [*(value for value, _ in least), *(place for _, place in least), parts[2].mean(1)]

    *_, batched = assert_same_bits(step, torch.zeros(E, 7))
    assert n_of(batched, "min.dim") == 1


def test_outputs_do_not_share_memory():
    def step(x):
        return [x, x[0], x + 0, x + 0, torch.ones(2)]

    for graph in smaller_graphs(step, torch.zeros(2, E))[2:]:
        x = torch.zeros(2, E)
        out = graph(x)
        for y in out:
            y.fill_(5)
        assert x.sum() == 0 and graph(x)[4].sum() == 2
        assert len({y.data_ptr() for y in out}) == 5


def test_identities_keep_the_sign_of_zero():
    def step(x):
        return [x * 1.0, x / 1.0, x - 0.0, x + 0.0, (x + 0.0) + 0.0, torch.where(x > 0, x, x)]

    _, _, simplified, *_ = assert_same_bits(step, torch.zeros(E))
    assert n_of(simplified, "add") == 1 and n_operations(simplified) == 7
    assert simplified(torch.tensor([-0.0] * E))[2].signbit().all()
    assert not simplified(torch.tensor([-0.0] * E))[3].signbit().any()


@pytest.mark.parametrize(
    "new",
    [lambda rew, y: rew - 1.0, lambda rew, y: rew + 0.1, lambda rew, y: rew - y],
    ids=["penalty", "bonus", "tensor"],
)
def test_masked_penalties_are_batched(new):
    """For example, a penalty for each pair of colliding agents."""

    def step(x, y):
        rew = y * 3.0
        for other in x.unbind(0):
            mask = other > 0
            rew[mask] = new(rew[mask], y[mask])
        return [rew]

    *_, simplified, _, batched = assert_same_bits(step, torch.zeros(6, E), torch.zeros(E))
    assert n_of(simplified, "where") == n_of(simplified, "sub") == 6
    assert n_of(batched, "where") == n_of(batched, "gt") == 1
    negative_zero = torch.full((E,), -0.0)
    assert batched(torch.zeros(6, E), negative_zero)[0].signbit().all()


def test_other_masked_differences_are_kept():
    def step(x, y):
        n = torch.arange(E)
        return [
            torch.where(x > 0, x - y, y),
            torch.where(x > 0, y - x, x),
            torch.where(x > 0, torch.sub(x, y, alpha=2), x),
            torch.where(x > 0, n - 1, n),
            torch.where((x > 0).unsqueeze(0), x - y, x),
            torch.where(x > 0, x - y.double(), x),
        ]

    _, _, simplified, *_ = assert_same_bits(step, torch.zeros(E), torch.zeros(E))
    assert n_of(simplified, "where") == 6


def test_constants_with_different_bits_are_not_merged():
    def step(x):
        return [x * torch.tensor(0.0), x * torch.tensor(-0.0)]

    assert_same_bits(step, torch.zeros(E))


def test_memory_layouts_of_outputs_are_kept():
    def step(x):
        return [x.t() + 1, x.permute(2, 0, 1) * 2 if x.ndim == 3 else x * 2]

    assert_same_bits(step, torch.zeros(3, E))
    assert_same_bits(lambda x: [x.permute(2, 0, 1) * 2], torch.zeros(2, 3, E))


def test_graph_that_writes_to_an_input_is_kept():
    def step(x):
        x += 1
        return [x * 2]

    module = trace(step, torch.zeros(E)).module
    with pytest.raises(CaptureError, match="which it did not make"):
        without_writes(module)
    assert reduce_graph(module, [torch.zeros(E)], E, lambda graph: True) is module


def test_write_without_a_rule_raises():
    def step(x):
        y = x + 0
        y.unfold(0, 2, 1)[0].add_(1)
        return [y]

    with pytest.raises(CaptureError, match="has no rule"):
        simplify(trace(step, torch.zeros(E)).module)


def test_recorded_graph_is_kept_if_results_differ():
    module = trace(pairwise(4), torch.zeros(4, E, 2)).module
    tried = []

    def differs(graph):
        tried.append(graph)
        return False

    assert reduce_graph(module, [torch.zeros(4, E, 2)], E, differs) is module
    assert len(tried) == 1


def test_views_of_several_stacks_are_not_joined():
    """For example, two masks of each pair, both with an extra dim."""

    def step(x):
        near = [(one < 0.5).unsqueeze(-1) for one in x.unbind(0)]
        far = [(one > 0.1).unsqueeze(-1) for one in x.unbind(0)]
        return [torch.stack([one & other for one, other in zip(near, far)])]

    *_, batched = assert_same_bits(step, torch.zeros(4, E))
    assert n_of(batched, "reshape") == 2 and n_of(batched, "cat") == n_of(batched, "select") == 0


def test_batching_pays_with_at_most_60_percent_of_operations():
    def graph(n):
        return trace(lambda x: [x + i for i in range(n)], torch.zeros(E)).module

    assert batching_pays(graph(10), graph(6)) and not batching_pays(graph(10), graph(7))


def test_operations_with_large_results_are_not_batched():
    """Their memory traffic would cost more than the saved operations."""

    def graph(n, size):
        return trace(lambda x: [x + i for i in range(n)], torch.zeros(size)).module

    assert batching_pays(graph(10, 10_000), graph(5, 10_000))
    assert not batching_pays(graph(10, 20_000), graph(5, 20_000))

    def each(x):
        return [one.sin().cos().tan() for one in x.unbind(0)]

    few, many = (trace(each, torch.zeros(9, size)).module for size in (E, 20_000))
    few, many = (simplify(module) for module in (few, many))
    assert batching_may_pay(few, Groups(few)) and not batching_may_pay(many, Groups(many))


def test_batching_is_not_tried_with_few_similar_operations(monkeypatch):
    """Each of six steps depends on the previous one, so that no two of them can be batched."""
    tried = []
    monkeypatch.setattr(reduction, "batch", lambda *given: tried.append(given) or given[0])

    def chain(x):
        for i in range(6):
            x = (x + i).sin()
        return [x]

    for function, inputs in ((chain, torch.rand(E, 2)), (pairwise(6), torch.rand(6, E, 2))):
        module = trace(function, inputs).module
        reduce_graph(module, [inputs], E, lambda graph: True)
        assert len(tried) == (function is not chain)


def test_large_graph_is_batched_only_if_results_are_equal():
    module = trace(pairwise(12), torch.zeros(12, E, 2)).module
    leaves = [torch.zeros(12, E, 2)]
    batched = reduce_graph(module, leaves, E, lambda graph: True)
    assert n_of(batched, "linalg_vector_norm") == 1
    answers = iter([True, False])
    simplified = reduce_graph(module, leaves, E, lambda graph: next(answers))
    assert n_of(simplified, "linalg_vector_norm") == 66


def test_failed_batching_keeps_the_simplified_graph(monkeypatch):
    def refuse(*given):
        raise RuntimeError("vmap: no batching rule")

    monkeypatch.setattr(reduction, "batch", refuse)
    module = trace(pairwise(12), torch.zeros(12, E, 2)).module
    graph = reduce_graph(module, [torch.zeros(12, E, 2)], E, lambda graph: True)
    assert n_of(graph, "linalg_vector_norm") == 66


def test_negative_zero_is_not_an_identity():
    def step(x):
        return [x - (-0.0), (x + (-0.0)) + 0.0, torch.add(x, 0, alpha=-1) + 0.0]

    *_, simplified, _, batched = assert_same_bits(step, torch.zeros(E))
    assert not simplified(torch.tensor([-0.0] * E))[0].signbit().any()


def test_draws_of_unequal_depth_keep_their_order():
    def step(x):
        drawn = [torch.bernoulli(y.sigmoid().clamp(0, 1).nan_to_num(0.5)) for y in x.unbind(0)]
        return [torch.where(x > -100, torch.rand(E) + torch.stack(drawn), x)]

    assert_same_bits(step, torch.zeros(3, E))


def test_comparisons_in_place_keep_the_dtype():
    def step(x):
        x, y = x.clone(), x.clone()
        x.gt_(0)
        y[0] = torch.arange(E) % 2
        return [x, x + 1, y]

    assert_same_bits(step, torch.zeros(2, E))


def test_cat_and_where_of_mixed_dtypes():
    def step(x, y):
        return [torch.cat([x, x + 1, y]), torch.where(y > 0, torch.tensor(2.0).double(), y)]

    assert_same_bits(step, torch.full((3, E), 2**24 + 1), torch.zeros(3, E), states=(0,))


def test_splits_along_the_envs():
    assert_same_bits(lambda x: [*x.split([2, 1, 2], 0)], torch.zeros(E, 7))


@pytest.mark.parametrize(
    "step",
    [
        lambda x: [(x + 0).pow_(2.0)],
        lambda x: torch._foreach_add(list((x + 0).unbind(0)), 1.0),
        lambda x: torch._foreach_add_([x[0] + 0, x[1] + 0], 1.0) or [x + 1],
        lambda x: [(x + 0).unsqueeze_(0) * 2],
        lambda x: [x.t().contiguous().as_strided((E,), (1,))],
        lambda x: [torch.zeros(3).to(torch.float8_e4m3fn).float()[0] + x],
        lambda x: [torch.stack([y + 1 for y in x[:, :0].unbind(0)])],
    ],
)
def test_operations_without_a_rule_do_not_fail(step):
    module = trace(step, torch.zeros(2, E)).module
    x = torch.randn(2, E)
    expected = [y.clone() for y in module(x)]
    graph = reduce_graph(module, [x], E, lambda graph: all(map(torch.equal, graph(x), expected)))
    assert all(map(torch.equal, graph(x), expected))
