"""Cases of a test that belong to the second tier."""

import pytest


def second_tier_cases(part, *cases):
    """Returns cases of ``parametrize``, marked as a part of the second tier."""
    mark = getattr(pytest.mark, part)
    return [pytest.param(*(x if isinstance(x, tuple) else (x,)), marks=mark) for x in cases]


def first_tier_cases(names, cases, part):
    """Returns all cases, of which those not in ``names`` belong to a part of the second tier."""
    return [
        case
        for name in cases
        for case in ([name] if name in names else second_tier_cases(part, name))
    ]
