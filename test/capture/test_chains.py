"""Chains of additions as sums, and joins of features as one gather: bitwise equal results."""

import math

import pytest
import torch
from test_reduction import E, assert_same_bits, n_of, smaller_graphs

from torchrl_marl.capture import inductor, trace
from torchrl_marl.capture.chains import sum_chains
from torchrl_marl.capture.inductor import ordered_sum, rewrite_for_cpu
from torchrl_marl.capture.simplify import simplify


def summed(function, *inputs):
    return sum_chains(simplify(trace(function, *inputs).module))


@pytest.mark.parametrize("n", [5, 17, 40])
def test_chain_of_additions_becomes_one_ordered_sum(n):
    """Torch's sum of 17 rows would round differently."""

    def rewards(x):
        total = x[0]
        for i in range(1, n):
            total = total + x[i] if i % 3 else total - x[i]
        return [total]

    *_, graph, batched = assert_same_bits(rewards, torch.zeros(n, E))
    assert n_of(graph, "ordered_sum") == n_of(batched, "ordered_sum") == 1
    assert n_of(graph, "add") == n_of(graph, "sub") == 0


def test_ordered_sum_matches_values_by_hand():
    tiny = torch.full((8,), 2.0**-24)
    one = torch.ones(1)
    assert ordered_sum(torch.cat([one, tiny]), 0).item() == 1  # each addition is rounded away
    assert ordered_sum(torch.cat([tiny, one]), 0).item() == 1 + 2.0**-21
    zeros = torch.full((3, 2), -0.0)
    assert ordered_sum(zeros, 0).signbit().all() and ordered_sum(zeros, 1).shape == (3,)
    assert ordered_sum(torch.tensor([1.0, math.inf, -math.inf]), 0).isnan()


def test_chains_of_all_agents_become_one_sum():
    def forces(x):
        total = [one * 2 for one in x.unbind(0)]
        for i in range(6):
            for j in range(i):
                push = (x[i] - x[j]).sin()
                total[i], total[j] = total[i] + push, total[j] - push
        return [torch.stack(total)]

    *_, batched = assert_same_bits(forces, torch.zeros(6, E, 2))
    # The last agent has a separate sum, as nothing is subtracted from its force.
    assert n_of(batched, "ordered_sum") == 2 and n_of(batched, "add") == 0


def test_chains_with_other_uses_or_dtypes_are_not_summed():
    def partial(x):
        total, found = x[0], []
        for i in range(1, 6):
            total = total + x[i]
            found.append(total)
        return found

    def whole_numbers(x):
        total = x[0].long()
        for i in range(1, 6):
            total = total + x[i].long()
        return [total]

    def broadcast(x):
        total = x[0, 0]
        for i in range(1, 6):
            total = total + x[i, :1, 0]
        return [total]

    def doubled(x):
        for _ in range(6):
            x = x + x
        return [x]

    for function in (partial, whole_numbers, broadcast, doubled):
        *_, graph, _ = assert_same_bits(function, torch.zeros(6, E, 3))
        assert n_of(graph, "ordered_sum") == 0, function


def test_ordered_sum_is_rewritten_for_the_compiler():
    def total(x):
        return [sum(x.unbind(0)[1:], x[0])]

    x = torch.randn(9, E)
    module = summed(total, x)
    compilable = rewrite_for_cpu(module)
    assert n_of(module, "ordered_sum") == 1 and n_of(compilable, "ordered_sum") == 0
    torch.testing.assert_close(compilable(x), module(x))


@pytest.mark.compiled
def test_compiled_sum_matches_the_chain_up_to_rounding():
    def total(x):
        return [sum((x[i].sin() for i in range(1, 40)), x[0])]

    x = torch.randn(40, 60)
    run, _ = inductor.compile_module(summed(total, x), [x])
    sines = x.sin()
    expected = x[0]
    for i in range(1, 40):
        expected = expected + sines[i]
    torch.testing.assert_close(run(x)[0], expected, rtol=1e-6, atol=1e-5)


def features(n, also=()):
    """A function that joins a row of features of each agent for each env, and its inputs."""

    def observe(x, y):
        found = []
        for i in range(n):
            position, speed = x[i] * 2, y[i].cos()
            found += [position, speed.unsqueeze(-1), *(torch.full((E, 2), one) for one in also)]
        return [torch.cat(found, -1)]

    return observe, (torch.zeros(n, E, 3), torch.zeros(n, E))


def test_features_of_all_agents_become_one_gather():
    counts = []
    for n in (4, 8):
        function, inputs = features(n)
        *_, batched = assert_same_bits(function, *inputs)
        counts.append(len([node for node in batched.graph.nodes if node.op == "call_function"]))
        assert n_of(batched, "_unsafe_index") == 1
    assert counts[0] == counts[1]


def test_features_with_constants_are_gathered():
    function, inputs = features(4, also=(-0.0, 3.0))
    assert_same_bits(function, *inputs)


def test_join_that_would_gather_unused_rows_is_kept():
    def observe(x, y):
        many = [(x[i] * 2, y[i].cos().unsqueeze(-1)) for i in range(12)]
        total = sum(one.sum() for one, _ in many)
        return [torch.cat([x for pair in many[:3] for x in pair], -1) + total]

    *_, batched = smaller_graphs(observe, torch.zeros(12, E, 3), torch.zeros(12, E))
    assert n_of(batched, "_unsafe_index") == 0


def test_joins_along_envs_or_with_more_dims_are_kept():
    def rows(x):
        return [torch.cat([x[0], x[1, :2], x[2], x[3, :2], x[4], x[5, :2]], 0)]

    def images(x):
        return [
            torch.cat([one[:, None, :k] for one, k in zip(x.unbind(0), (1, 2, 1, 2, 1, 2))], -1)
        ]

    for function in (rows, images):
        assert_same_bits(function, torch.zeros(6, E, 3))
