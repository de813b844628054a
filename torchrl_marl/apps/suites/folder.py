"""The folder of a suite: its record, its lock, and checks of the runs in it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torchrl_marl.apps.suites.plan import Plan
from torchrl_marl.errors import CheckpointError, ConfigError, TrustError
from torchrl_marl.settings import flatten, shown, unread
from torchrl_marl.training.config import TrainConfig, read_run_config
from torchrl_marl.training.files import open_atomically
from torchrl_marl.training.folder import RunFolder
from torchrl_marl.training.origin import ExternalReference, external_references

__all__ = [
    "RECORD",
    "check_folder",
    "check_record",
    "open_folder",
    "read_selection",
    "trains_populations",
]

RECORD = "suite.json"
"""File in a suite's folder that stores the selection of runs and their settings."""
# Settings that may differ between runs: how a run computes and what it logs.
_CHANGEABLE_SETTINGS = (
    "device",
    "execution",
    "threads",
    "folder",
    "recipe",
    "checkpoint.",
    "logging.",
)


def check_record(record: Path, plan: Plan, without: Callable[[], Plan]) -> None:
    """Raises an error if another user's ``suite.json`` would import code or open connections.

    Args:
        record (Path): ``suite.json`` of the folder.
        plan (Plan): plan with the settings in the file.
        without (callable): returns the plan with only the user's settings.

    Raises:
        TrustError: the file names an import or a connection that the user did not give.
    """
    try:
        given = json.loads(record.read_text(encoding="utf-8")).get("signatures", [])
        given = [one for one in given if isinstance(one, str)]
    except (OSError, ValueError, AttributeError, TypeError):
        given = []
    unsigned = [one for one in _named_code(plan) if not one.is_signed(given)]
    if not unsigned:
        return
    own = _named_code(without())
    for one in unsigned:
        if one not in own:
            raise TrustError(
                f"a run would {one.effect} because of {str(record)!r}, which you did not write on "
                "this machine; if you trust it, add --trust (in Python: trust=True)."
            )


def _named_code(plan: Plan) -> list[ExternalReference]:
    found = (one for run in plan.runs for one in external_references(run.config))
    return list(dict.fromkeys(found))


@contextlib.contextmanager
def open_folder(out: Path, plan: Plan, *, resume: bool, together: bool = False) -> Iterator[None]:
    """Creates and locks the folder of a suite, and writes ``suite.json``.

    The record of an existing folder gets the plan's new algorithms, tasks and seeds.

    Args:
        out (Path): output folder.
        plan (Plan): plan of the runs.

    Keyword Args:
        resume (bool): True to continue in an existing folder.
        together (bool): True if the seeds of a new suite are members of populations.

    Raises:
        ConfigError: the folder has other content, or runs in it have other settings.
        CheckpointError: another process is training a suite in the folder.
        WriteError: the folder cannot be written.
    """
    _check_new(out, resume)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"suite folder {str(out)!r} cannot be created ({error.strerror}); choose another --out."
        ) from None
    lock = RunFolder(out, "suite folder")
    try:
        check_folder(out, plan, resume=resume)
        before = _read_record(out)
        if not (out / RECORD).exists():
            _write_record(out, _new_record(plan, together))
        elif before and (grown := _extend_record(before, plan)) != before:
            _write_record(out, grown)
        yield
    finally:
        lock.release()


def _new_record(plan: Plan, together: bool) -> dict[str, Any]:
    record = {"suite": plan.suite.name, **plan.selection}
    record |= {"together": True} if together else {}
    # This user's signatures for the code and services that the settings name.
    signatures = sorted({one.signature for one in _named_code(plan)})
    return record | ({"signatures": signatures} if signatures else {})


def _extend_record(record: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """Returns a record with the plan's new algorithms, tasks and seeds at the end of its lists."""
    lists = {
        key: [*record[key], *(one for one in plan.selection[key] if one not in record[key])]
        for key in ("algorithms", "tasks", "seeds")
        if isinstance(record.get(key), list)
    }
    return record | lists


def _write_record(out: Path, record: dict[str, Any]) -> None:
    with open_atomically(out / RECORD) as file:
        file.write(json.dumps(record, indent=2) + "\n")


def _read_record(out: Path) -> dict[str, Any]:
    """Returns the content of ``suite.json``; an empty dict if it cannot be read."""
    try:
        record = json.loads((out / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def trains_populations(out: Path) -> bool:
    """Returns whether the suite in a folder trains the seeds of a pair as one population."""
    return _read_record(out).get("together") is True


def read_selection(out: Path, suite: str) -> dict[str, Any]:
    """Reads the selection of a suite's folder: algorithms, tasks, seeds and settings.

    Raises:
        ConfigError: the folder is not a suite's, or belongs to another suite.
    """
    try:
        record = json.loads((out / RECORD).read_text(encoding="utf-8"))
        selection = {key: record[key] for key in ("algorithms", "tasks", "seeds", "settings")}
        lists = (selection["algorithms"], selection["tasks"], selection["seeds"])
        if not (all(type(one) is list for one in lists) and type(selection["settings"]) is dict):
            raise ValueError("it is not a record of a suite")
    except FileNotFoundError:
        raise ConfigError(
            f"{str(out)!r} is not a suite's folder, which --resume needs; leave --resume out, or "
            "name the folder by --out."
        ) from None
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{str(out / RECORD)!r} cannot be read; start the suite again with all its arguments "
            "and another --out."
        ) from None
    if record.get("suite") != suite:
        raise ConfigError(
            f"{str(out)!r} holds the suite {record.get('suite')!r}, but {suite!r} is given; use "
            "that suite, or choose another --out."
        )
    return selection


def check_folder(out: Path, plan: Plan, *, resume: bool) -> None:
    """Raises an error if the runs cannot be trained in the folder.

    Args:
        out (Path): output folder.
        plan (Plan): plan of the runs.

    Keyword Args:
        resume (bool): True to continue in an existing folder.

    Raises:
        ConfigError: the folder has other content, or a run in it has another seed or other
            settings. The message names the run, the setting, and its old and new value.
    """
    _check_new(out, resume)
    now: dict[tuple[str, str], dict[str, Any]] = {}
    for run in plan.runs:
        try:
            begun = read_run_config(out / run.place)
        except CheckpointError:
            continue  # no run yet, or a broken one, which raises when it is resumed
        if begun.seed != run.seed:
            raise ConfigError(
                f"{str(out / run.place)!r} has a run of seed {begun.seed}, expected seed "
                f"{run.seed}; move it away, or rename it to its seed."
            )
        before = _compared_settings(begun)
        after = now.get(run.pair) or now.setdefault(run.pair, _compared_settings(run.config))
        if (out / run.task / "config.yaml").is_file():  # callbacks are those of the population
            before["callbacks"] = after.get("callbacks")
        for key in sorted(before.keys() | after.keys()):
            old, new = before.get(key), after.get(key)
            if old == new or (key == "init_from" and _is_same_source(old, new)):
                continue
            if key not in _settings_without_effect(begun, run.config):
                raise ConfigError(
                    f"{key} of {run.task} with {run.algorithm} is {shown(new)}, but "
                    f"{str(out / run.place)!r} was started with {shown(old)}; use that value, "
                    f"choose another --out, or remove {str(out / run.task / run.algorithm)!r} to "
                    "train it again."
                )


def _compared_settings(config: TrainConfig) -> dict[str, Any]:
    placed = dataclasses.replace(config, data=config.data.absolute())  # as a run writes them
    flat = flatten(dataclasses.asdict(placed))
    return {
        key: value
        for key, value in flat.items()
        if key != "seed"
        and not key.startswith(_CHANGEABLE_SETTINGS)
        and not _is_assigned_by_run(key)
    }


def _settings_without_effect(*configs: TrainConfig) -> set[str]:
    """Returns the settings that have no effect in any of the configs."""
    return set.intersection(*(set(unread(config, defaults=True)) for config in configs))


def _is_assigned_by_run(key: str) -> bool:
    """Returns whether a run itself computes a setting when it starts, such as agents' clusters."""
    return key.startswith("groups.") and key.endswith(".sharing_index")


def _is_same_source(before: str | None, now: str | None) -> bool:
    """Returns whether a run has only added the frames, or the last stage, of its source."""
    path, at, _ = str(before).rpartition("@")
    return bool(at) and now in (path, str(Path(path).parent))


def _check_new(out: Path, resume: bool) -> None:
    """Raises an error if a new suite cannot start in the folder."""
    if resume or not out.exists():
        return
    if (out / RECORD).is_file():
        raise ConfigError(
            f"suite folder {str(out)!r} exists; add --resume to continue it, or choose another "
            "--out."
        )
    if not out.is_dir() or any(path.name != ".lock" for path in out.iterdir()):
        raise ConfigError(f"{str(out)!r} exists and is not a suite's folder; choose another --out.")
