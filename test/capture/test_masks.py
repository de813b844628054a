"""Masked reads and writes in graphs: equal to eager ones."""

import random

import pytest
import torch
from torch.nn.functional import relu

from torchrl_marl.capture import trace

E = 6


def add_to_rows(x, y, mask):
    x[mask] += 1
    return x


def rows_from_another(x, y, mask):
    x[mask] = y[mask]
    return x


def one_value(x, y, mask):
    x[mask] = 3.5
    return x


def one_row(x, y, mask):
    x[mask] = y.reshape(-1)[: x[0].numel()].reshape(x.shape[1:]) if mask.ndim == 1 else 2.0
    return x


def computed(x, y, mask):
    x[mask] = relu(0.5 * x[mask] - y[mask].abs()) + torch.sqrt(y[mask] ** 2 + 1)
    return x


def masked_twice(x, y, mask):
    x[mask & (mask == mask)] = x[mask & (mask == mask)] * 2
    return x


def negated_twice(x, y, mask):
    x[~mask] += (x - y)[~mask]
    return x


def in_place_on_rows(x, y, mask):
    rows = x[mask]
    rows *= 2
    rows.clamp_(-1, 1)
    y[mask] = rows
    return x, y


def read_then_write_mask(x, y, mask):
    other = mask.clone()
    rows = x[other] * 2
    x[other] = rows
    other[:] = False
    y[other] = 7.0
    return x, y


def any_and_all(x, y, mask):
    return (x[mask] > 0).any(), torch.all(y[mask] < 1), (x[mask] > 0).sum()


def written_in_rows(x, y, mask):
    x[mask].zero_()
    y[mask] = -1.0
    return x, y


ALIKE = [
    add_to_rows,
    rows_from_another,
    one_value,
    one_row,
    computed,
    masked_twice,
    negated_twice,
    in_place_on_rows,
    read_then_write_mask,
    any_and_all,
    written_in_rows,
]


def last_dim(x, y, mask):
    rows = x[mask]
    norm = rows.norm(dim=-1)
    direction = rows / norm[:, None]
    best = torch.stack([rows.sum(-1), rows.max(dim=1)[0], rows.amin(1)], dim=-1).mean(-1)
    y[mask] = direction * best.unsqueeze(-1) + torch.cat([rows[:, :1], rows[:, 1:]], dim=1)
    return y


def rows_of_rows(x, y, mask):
    rows = x[mask]
    norm = torch.linalg.vector_norm(rows, dim=-1)
    long = norm > 1
    rows[long] /= norm[long, None]
    x[mask] = rows
    return x, long.any()


def columns(x, y, mask):
    x[mask, 0] = y[mask, 1]
    x[mask, :1] += 1
    x[..., 0][mask] = y[..., 1][mask] * 2
    y[:, 0][mask] = 4.0
    return x, y


def mask_behind(x, y, mask):
    x.t()[:, mask] = 3.0
    y.t()[0, mask] += 1
    return x, y, x.t().clone()


def places(x, y, mask):
    where = torch.where(mask)[0]
    x[where] = y[where] + where[:, None]
    (again,) = mask.nonzero(as_tuple=True)
    y[again, 1] = 2.0
    return x, y


def no_effect(x, y, mask):
    x[mask][:, 0] = 100.0
    return x


def guarded(x, y, mask):
    if mask.any():
        x[mask] = y[mask] * 2
        y[mask, 0] += 1
    if torch.any(mask):
        x[mask] -= 1
    return x, y


WITH_COLUMNS = [
    last_dim,
    rows_of_rows,
    columns,
    mask_behind,
    places,
    no_effect,
    guarded,
]


def run(function, x, y, mask):
    return function(x.clone(), y.clone(), mask.clone())


def run_graph(traced, *inputs):
    return traced.unflatten(traced.module(*inputs, *traced.captured))


def draw(shape, mask_dims, seed, broken=False):
    torch.manual_seed(seed)
    x, y = torch.randn(shape), torch.randn(shape)
    mask = torch.rand(shape[:mask_dims]) < (0.0, 0.5, 1.0)[seed % 3]
    if broken:  # masked-out values must have no effect
        x[~mask], y[~mask] = float("nan"), float("inf")
    return x, y, mask


def check(function, shape, mask_dims):
    traced = trace(lambda *inputs: run(function, *inputs), *draw(shape, mask_dims, seed=1))
    for seed in range(9):
        inputs = draw(shape, mask_dims, seed, broken=seed > 5)
        expected, found = run(function, *inputs), run_graph(traced, *inputs)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "shape, mask_dims", [((E,), 1), ((E, 2), 1), ((E, 3, 2), 1), ((E, 3), 2), ((E, 3, 2), 2)]
)
@pytest.mark.parametrize("function", ALIKE, ids=lambda f: f.__name__)
def test_traced_masked_operations_match_eager(function, shape, mask_dims):
    check(function, shape, mask_dims)


@pytest.mark.parametrize("columns", [2, 3])
@pytest.mark.parametrize("function", WITH_COLUMNS, ids=lambda f: f.__name__)
def test_traced_masked_operations_on_columns_match_eager(function, columns):
    check(function, (E, columns), 1)


def test_masked_rows_of_two_dims_keep_the_last_dim():
    def function(x, y, mask):
        rows = x[mask]
        y[mask] = rows / rows.norm(dim=-1, keepdim=True) + rows[..., :1]
        return y

    check(function, (E, 3, 2), 2)


def test_constant_mask_becomes_an_index():
    chosen = torch.tensor([True, False, True])

    def function(x):
        x = x.clone()
        x[chosen] = x[chosen].flip(0)
        return x[chosen].sum(0), x

    x = torch.randn(3, 2)
    traced = trace(function, torch.zeros(3, 2))
    torch.testing.assert_close(run_graph(traced, x), function(x))


def test_masked_write_is_visible_in_views():
    def function(x, mask):
        x = x.clone()
        view = x[:, 0]
        x[mask] = 1.0
        return view + 1

    traced = trace(function, torch.zeros(E, 2), torch.ones(E, dtype=torch.bool))
    x, mask = torch.randn(E, 2), torch.rand(E) < 0.5
    assert torch.equal(traced.module(x, mask)[0], function(x, mask))


def test_integer_sum_of_masked_rows_is_exact():
    def function(x, mask):
        return x[mask].sum(), (x[mask] > 1).all()

    traced = trace(function, torch.arange(E), torch.ones(E, dtype=torch.bool))
    for seed in range(4):
        x, mask = torch.arange(E) + seed, torch.rand(E) < 0.5
        assert run_graph(traced, x, mask) == function(x, mask)


STEPS = [
    lambda x, y, m, k: x.__setitem__(m, y[m]),
    lambda x, y, m, k: x.__setitem__((m, k), x[m, k] + y[m, 0]),
    lambda x, y, m, k: x.__setitem__(~m, x[~m] * 0.5 - y[~m].abs()),
    lambda x, y, m, k: y[:, k].__setitem__(m, x[m].norm(dim=-1)),
    lambda x, y, m, k: y.__setitem__(m & (x[:, k] > 0), float(k)),
    lambda x, y, m, k: x.__setitem__(y[:, 0] > 0, x[y[:, 0] > 0].clamp(-1, 1)),
    lambda x, y, m, k: m.__setitem__(x[:, k] > 0.5, k == 0),
    lambda x, y, m, k: m.copy_(m ^ (y.sum(-1) > 0)),
    lambda x, y, m, k: x[torch.where(m)[0]].add_(1),
    lambda x, y, m, k: x.add_(y[:, k : k + 1] * (x[m] > 0).any()),
]


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_match_eager(seed):
    draws = random.Random(seed)
    steps = [(draws.choice(STEPS), draws.randrange(3)) for _ in range(8)]

    def function(x, y, mask):
        for step, k in steps:
            step(x, y, mask, k)
        return x, y, mask

    check(function, (E, 3), 1)
