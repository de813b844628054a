"""The folder of a suite, and where it comes from."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torchrl_marl.apps.suites.plan import Plan
from torchrl_marl.errors import CheckpointError, ConfigError, TrustError
from torchrl_marl.settings import flatten, shown
from torchrl_marl.training.config import TrainConfig, read_run_config
from torchrl_marl.training.files import whole_file
from torchrl_marl.training.folder import RunFolder
from torchrl_marl.training.origin import Named, named_by

__all__ = [
    "RECORD",
    "check_folder",
    "check_record",
    "check_unchanged",
    "open_folder",
    "read_words",
    "signatures_of",
]


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


RECORD = "suite.json"
"""File of a suite's folder: the words that it was begun with."""
# Where and how a run computes and what it shows; nothing of this is compared between runs.
_FREE = ("device", "execution", "threads", "folder", "recipe", "checkpoint.", "logging.")


@contextlib.contextmanager
def open_folder(out: Path, plan: Plan, *, resume: bool) -> Iterator[None]:
    """Makes and locks the folder of a suite, and notes what is trained there.

    Args:
        out (Path): the folder.
        plan (Plan): the runs.

    Keyword Args:
        resume (bool): go on in a folder that is there.

    Raises:
        ConfigError: a folder with other content, or with runs of other settings.
        CheckpointError: another suite is trained there.
        WriteError: it cannot be written.
    """
    _check_fit(out, resume)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"suite folder {str(out)!r} cannot be made ({error.strerror}); choose another --out."
        ) from None
    lock = RunFolder(out, "suite folder")
    try:
        check_folder(out, plan, resume=resume)
        if not (out / RECORD).exists():
            with whole_file(out / RECORD) as file:
                record = {"suite": plan.suite.name, **plan.words}
                record |= {"signatures": own} if (own := signatures_of(plan)) else {}
                file.write(json.dumps(record, indent=2) + "\n")
        yield
    finally:
        lock.release()


def check_folder(out: Path, plan: Plan, *, resume: bool) -> None:
    """Refuses a folder that the runs are not to be trained in.

    Args:
        out (Path): the folder.
        plan (Plan): the runs.

    Keyword Args:
        resume (bool): go on in a folder that is there.

    Raises:
        ConfigError: a folder with other content, or with runs of other settings.
    """
    _check_fit(out, resume)
    check_unchanged(out, plan)


def read_words(out: Path, suite: str) -> dict[str, Any]:
    """Returns the words that a suite was begun with: algorithms, tasks, seeds and settings.

    Raises:
        ConfigError: no suite's folder, or another's.
    """
    try:
        record = json.loads((out / RECORD).read_text(encoding="utf-8"))
        words = {key: record[key] for key in ("algorithms", "tasks", "seeds", "settings")}
        lists = (words["algorithms"], words["tasks"], words["seeds"])
        if not (all(type(one) is list for one in lists) and type(words["settings"]) is dict):
            raise ValueError("it is no record of a suite")
    except FileNotFoundError:
        raise ConfigError(
            f"{str(out)!r} is no suite's folder, which --resume goes on with; leave --resume out, "
            "or name the folder by --out."
        ) from None
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{str(out / RECORD)!r} cannot be read; remove it and begin the suite with all its "
            "words and another --out."
        ) from None
    if record.get("suite") != suite:
        raise ConfigError(
            f"{str(out)!r} holds the suite {record.get('suite')!r}, but {suite!r} is given; name "
            "that one, or choose another --out."
        )
    return words


def check_unchanged(out: Path, plan: Plan) -> None:
    """Refuses to go on where runs were begun with settings that are others now.

    Raises:
        ConfigError: naming the run, the setting, and both values.
    """
    now: dict[tuple[str, str], dict[str, Any]] = {}
    for run in plan.runs:
        try:
            before = _compared(read_run_config(out / run.place))
        except CheckpointError:
            continue  # none yet; or a broken one, which fails by itself
        after = now.get(run.pair) or now.setdefault(run.pair, _compared(run.config))
        for key in sorted(before.keys() | after.keys()):
            old, new = before.get(key), after.get(key)
            if old != new:
                raise ConfigError(
                    f"{key} of {run.task} with {run.algorithm} is {shown(new)}, but "
                    f"{str(out / run.place)!r} was begun with {shown(old)}; give that, choose "
                    f"another --out, or remove {str(out / run.task / run.algorithm)!r} to train "
                    "it anew."
                )


def _compared(config: TrainConfig) -> dict[str, Any]:
    flat = flatten(dataclasses.asdict(config))
    return {
        key: value
        for key, value in flat.items()
        if key != "seed" and not key.startswith(_FREE) and not _found_by_the_run(key)
    }


def _found_by_the_run(key: str) -> bool:
    """Whether a setting is one that a run writes down when it begins: who is in which cluster."""
    return key.startswith("groups.") and key.endswith(".sharing_index")


def _check_fit(out: Path, resume: bool) -> None:
    """Refuses a folder that a suite is not to be begun, or gone on with, in."""
    if resume or not out.exists():
        return
    if (out / RECORD).is_file():
        raise ConfigError(
            f"suite folder {str(out)!r} exists; --resume goes on with it, or choose another --out."
        )
    if not out.is_dir() or any(path.name != ".lock" for path in out.iterdir()):
        raise ConfigError(f"{str(out)!r} exists and is no suite's folder; choose another --out.")
