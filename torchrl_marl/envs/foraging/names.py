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
_REQUESTS_PER_AGENT = {"-easy": 2.0, None: 1.0, "-hard": 0.5}
_REWARDS = {"indiv": "individual", "global": "global", "twostage": "two_stage"}
_LBF_NAME = re.compile(
    r"(lbf|Foraging)(-(?P<sight>\d+)s)?-(?P<rows>\d+)x(?P<columns>\d+)-(?P<players>\d+)p"
    r"-(?P<food>\d+)f(?P<coop>-coop)?(-v3)?"
)
_RWARE_NAME = re.compile(
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
    if match := _LBF_NAME.fullmatch(name):
        return "LevelBasedForaging", _foraging_arguments(match)
    if match := _RWARE_NAME.fullmatch(name):
        return "Warehouse", _warehouse_arguments(match)
    return None


def _foraging_arguments(match: re.Match[str]) -> dict[str, Any]:
    return {
        "players": int(match["players"]),
        "field_size": (int(match["rows"]), int(match["columns"])),
        "max_num_food": int(match["food"]),
        "sight": None if match["sight"] is None else int(match["sight"]),
        "force_coop": match["coop"] is not None,
    }


def _warehouse_arguments(match: re.Match[str]) -> dict[str, Any]:
    sensor_range = int(match["sight"] or 1)
    if match["size"] is None:
        names = {"shelf_rows": "rows", "shelf_columns": "columns", "column_height": "tall"}
        names |= {"n_agents": "robots", "request_queue_size": "requests"}
        numbers = {argument: int(match[field]) for argument, field in names.items()}
        return {**numbers, "sensor_range": sensor_range, "reward_type": _REWARDS[match["reward"]]}
    rows, columns = SIZES[match["size"]]
    n_agents = int(match["agents"])
    return {
        "n_agents": n_agents,
        "shelf_rows": rows,
        "shelf_columns": columns,
        "column_height": int(match["height"] or 8),
        "request_queue_size": int(n_agents * _REQUESTS_PER_AGENT[match["hard"]]),
        "sensor_range": sensor_range,
    }
