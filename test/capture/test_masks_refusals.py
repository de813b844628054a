"""Masked reads and writes that cannot be captured raise with their name and line."""

import re

import pytest
import torch

from torchrl_marl.capture import trace
from torchrl_marl.errors import CaptureError

E = 6


def written_elsewhere(x, mask):
    x[~mask] = x[mask]


def of_another_tensor(x, mask):
    x[x[:, 0] > 0] = x[x[:, 1] > 0]


def mask_changed(x, mask):
    own = mask.clone()
    rows = x[own]
    own[0] = True
    x[own] = rows


def mask_changed_before_a_sum(x, mask):
    own = mask.clone()
    rows = x[own] > 0
    own[0] = True
    return rows.any()


def mask_changed_after_places(x, mask):
    own = mask.clone()
    places = torch.where(own)[0]
    own[0] = True
    x[places] = 0.0


def operand_changed(x, mask):
    rows = x[x[:, 0] > 0]
    x[:, 0] += 1
    x[x[:, 0] > 0] = rows


def drawn_twice(x, mask):
    x[torch.rand(E) < 0.5] = x[torch.rand(E) < 0.5]


def sum_of_rows(x, mask):
    return x[mask].sum()


def mean_over_rows(x, mask):
    return x[mask].mean(0)


def number_of_rows(x, mask):
    return x * len(x[mask])


def shape_of_rows(x, mask):
    return torch.zeros(x[mask].shape)


def first_row(x, mask):
    return x[mask][0]


def sorted_rows(x, mask):
    return x[mask].sort(0)[0]


def reshaped(x, mask):
    x[mask] = x[mask].reshape(-1, 2)


def with_all_rows(x, mask):
    return x[mask] + x


def added_to_all_rows(x, mask):
    x += x[mask]


def two_masks(x, mask):
    x[mask, x[0] > 0] = 1.0


def mask_and_tensor(x, mask):
    x[mask, torch.tensor([0])] = 1.0


def outer_mask_on_rows(x, mask):
    return x[mask][mask]


def rows_are_returned(x, mask):
    return x[mask]


def rows_in_a_loop(x, mask):
    return list(x[mask])


def places_are_counted(x, mask):
    return x[torch.where(mask)[0] - 1]


REFUSED = {
    written_elsewhere: "another mask",
    of_another_tensor: "another mask",
    mask_changed: "another mask",
    mask_changed_before_a_sum: "was changed",
    mask_changed_after_places: "was changed",
    operand_changed: "another mask",
    drawn_twice: "another mask",
    sum_of_rows: "sum of rows",
    mean_over_rows: "mean over the rows",
    number_of_rows: "__len__",
    shape_of_rows: "of rows chosen by a mask",
    first_row: "single rows of",
    sorted_rows: "sort of rows",
    reshaped: "reshape of rows",
    with_all_rows: "meet other rows",
    added_to_all_rows: "meet other rows",
    two_masks: "two masks",
    mask_and_tensor: "a mask and a tensor",
    outer_mask_on_rows: "another mask",
    rows_are_returned: "number matters",
    rows_in_a_loop: "of rows",
    places_are_counted: "are used as an index",
}


@pytest.mark.parametrize("function", REFUSED, ids=lambda f: f.__name__)
def test_operations_that_depend_on_the_number_of_rows_raise(function):
    def wrapped(x, mask):
        x = x.clone()
        found = function(x, mask)
        return x, found

    with pytest.raises(CaptureError, match=REFUSED[function]) as refusal:
        trace(wrapped, torch.randn(E, 2), torch.rand(E) < 0.5)
    if function is not rows_are_returned:
        line = int(re.search(r"at capture/test_masks_refusals.py:(\d+): ", str(refusal.value))[1])
        assert line in {own for *_, own in function.__code__.co_lines()}
