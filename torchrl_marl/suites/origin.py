"""Origin of a suite's folder: its record names another user's worlds, unless it is signed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from torchrl_marl.errors import TrustError
from torchrl_marl.suites.plan import Plan
from torchrl_marl.training.origin import Named, named_by

__all__ = ["check_record", "signatures_of"]


def signatures_of(plan: Plan) -> list[str]:
    """Returns this user's signatures of what the settings of a suite's runs name."""
    return sorted({one.signature for one in _named(plan)})


def check_record(record: Path, plan: Plan, without: Callable[[], Plan]) -> None:
    """Refuses worlds, clusters and services that only the record of a stranger's folder names.

    Args:
        record (Path): the folder's ``suite.json``.
        plan (Plan): the runs, with the settings of the record.
        without (callable): returns them with those that the user has given.

    Raises:
        TrustError: naming what would be imported or connected to.
    """
    try:
        given = json.loads(record.read_text(encoding="utf-8")).get("signatures", [])
        given = [one for one in given if isinstance(one, str)]
    except (OSError, ValueError, AttributeError, TypeError):
        given = []
    unsigned = [one for one in _named(plan) if not one.is_signed(given)]
    if not unsigned:
        return
    own = _named(without())
    for one in unsigned:
        if one not in own:
            raise TrustError(
                f"a run would {one.deed}, as {str(record)!r} says, which was not written by you on "
                "this machine; if you trust it, add --trust (in Python: trust=True)."
            )


def _named(plan: Plan) -> list[Named]:
    found = (one for run in plan.runs for one in named_by(run.config))
    return list(dict.fromkeys(found))
