"""Names of foraging tasks, such as ``lbf-8x8-2p-2f-coop`` and ``rware-tiny-4ag``."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["SIZES", "TASKS", "read_task"]

TASKS = (
    "lbf-8x8-2p-2f-coop",
    "lbf-10x10-3p-3f",
    "lbf-15x15-3p-5f",
    "lbf-2s-8x8-2p-2f-coop",
    "rware-tiny-2ag",
    "rware-tiny-4ag",
    "rware-small-4ag",
    "rware-medium-6ag-hard",
)
"""Some of the tasks; sizes and numbers are free."""
SIZES = {"tiny": (1, 3), "small": (2, 3), "medium": (2, 5), "large": (3, 5)}
"""Rows and columns of shelves of the warehouses that have a name."""
_DIFFICULTIES = {"-easy": 2.0, None: 1.0, "-hard": 0.5}  # requests per agent
_REWARDS = {"indiv": "individual", "global": "global", "twostage": "two_stage"}
_LBF = re.compile(
    r"(lbf|Foraging)(-(?P<sight>\d+)s)?-(?P<rows>\d+)x(?P<columns>\d+)-(?P<players>\d+)p"
    r"-(?P<food>\d+)f(?P<coop>-coop)?(-v3)?"
)
_RWARE = re.compile(
    r"rware(-(?P<sight>\d+)s)?-"
    rf"((?P<size>{'|'.join(SIZES)})(-(?P<height>\d+)h)?-(?P<agents>\d+)ag(?P<hard>-easy|-hard)?"
    r"|(?P<rows>\d+)x(?P<columns>\d+)-(?P<tall>\d+)h-(?P<robots>\d+)ag-(?P<requests>\d+)req"
    rf"-(?P<reward>{'|'.join(_REWARDS)}))(-v2)?"
)


def read_task(name: str) -> tuple[str, dict[str, Any]] | None:
    """Returns the class and the arguments that a task's name means; None for other names.

    Args:
        name (str): ``lbf-[SIGHTs-]ROWSxCOLUMNS-PLAYERSp-FOODf[-coop]``,
            ``rware-[SIGHTs-]SIZE-[HEIGHTh-]AGENTSag[-easy|-hard]`` or
            ``rware-[SIGHTs-]ROWSxCOLUMNS-HEIGHTh-AGENTSag-REQUESTSreq-REWARD``. The names of the
            packages ``lbforaging`` and ``rware`` are also understood.

    Examples:
        >>> read_task("rware-tiny-4ag-hard")[1]["request_queue_size"]
        2
        >>> read_task("lbf-15x15-3p-5f")[1]["field_size"]
        (15, 15)
    """
    if found := _LBF.fullmatch(name):
        return "LevelBasedForaging", _foraging(found)
    if found := _RWARE.fullmatch(name):
        return "Warehouse", _warehouse(found)
    return None


def _foraging(found: re.Match[str]) -> dict[str, Any]:
    return {
        "players": int(found["players"]),
        "field_size": (int(found["rows"]), int(found["columns"])),
        "max_num_food": int(found["food"]),
        "sight": None if found["sight"] is None else int(found["sight"]),
        "force_coop": found["coop"] is not None,
    }


def _warehouse(found: re.Match[str]) -> dict[str, Any]:
    sensor_range = int(found["sight"] or 1)
    if found["size"] is None:
        names = {"shelf_rows": "rows", "shelf_columns": "columns", "column_height": "tall"}
        names |= {"n_agents": "robots", "request_queue_size": "requests"}
        numbers = {argument: int(found[part]) for argument, part in names.items()}
        return {**numbers, "sensor_range": sensor_range, "reward_type": _REWARDS[found["reward"]]}
    rows, columns = SIZES[found["size"]]
    n_agents = int(found["agents"])
    return {
        "n_agents": n_agents,
        "shelf_rows": rows,
        "shelf_columns": columns,
        "column_height": int(found["height"] or 8),
        "request_queue_size": int(n_agents * _DIFFICULTIES[found["hard"]]),
        "sensor_range": sensor_range,
    }
