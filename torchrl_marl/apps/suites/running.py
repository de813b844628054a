"""Runs a suite, several runs at once, and keeps its folder; ``torchrl-marl suite``."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torchrl_marl.apps.console import number, silence_libraries, table
from torchrl_marl.apps.jobs.jobs import Jobs, Stopped
from torchrl_marl.apps.suites.board import (
    Board,
    Result,
    found_result,
    read_elapsed,
    results_table,
    write_results,
)
from torchrl_marl.apps.suites.plan import (
    WORDS,
    Plan,
    SuiteRun,
    clock,
    make_plan,
    read_suite,
    seeds_of,
    suite_names,
)
from torchrl_marl.errors import CheckpointError, ConfigError, TrustError, UserError, quoted
from torchrl_marl.runtime.trust import trusting
from torchrl_marl.settings import flatten, merged, normalized, parse_overrides, shown
from torchrl_marl.training.config import TrainConfig, read_run_config
from torchrl_marl.training.files import whole_file
from torchrl_marl.training.folder import RunFolder
from torchrl_marl.training.interruption import terminable
from torchrl_marl.training.origin import Named, named_by

__all__ = ["plan_of", "run_suite", "suite_command", "suite_rows"]


def run_suite(
    suite: str | Path,
    *,
    algorithms: Collection[str] | str | None = None,
    tasks: Collection[str] | str | None = None,
    seeds: int | Sequence[int] | None = None,
    frames: int | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    jobs: int = 1,
    trust: bool = False,
    said: Callable[[str], None] = print,
    **settings: Any,
) -> list[Result]:
    """Trains the runs of a suite, each in ``out/task/algorithm/seed0`` and so on.

    A run that fails is said and does not end the others. Ctrl-C and SIGTERM stop all after their
    iteration; ``resume=True`` goes on: finished runs are left alone, begun ones go on from their
    checkpoints, failed ones are tried again. ``results.csv`` has a row for each run.

    Args:
        suite (str or Path): a suite of the package, or the path of a YAML file.

    Keyword Args:
        algorithms (list of str, optional): by default those that the suite names as its default.
        tasks (list of str, optional): by default all.
        seeds (int or list of int, optional): how many, from 0 on, or which; by default 5.
        frames (int, optional): of each run, in place of the table's.
        out (str or Path, optional): the folder; by default ``suite_NAME`` in the current one.
        resume (bool): go on in that folder; what is not given is then as it was begun.
        trust (bool): run the code, and follow the links, of a folder of somebody else's.
        jobs (int): how many runs at once, each in a process of one thread; 0: in this process,
            one after the other.
        said (callable): told each run that has ended.
        **settings: of all runs, such as ``execution="compile"`` or ``**{"learner.lr": 1e-3}``.

    Returns:
        list of Result: of each run, in the order of the plan.

    Raises:
        UserError: what is asked for cannot be done, before the first run begins.

    Examples:
        >>> import tempfile
        >>> (result,) = run_suite("toy", tasks="matrix_game", algorithms="mappo", seeds=1,
        ...                       frames=512, out=tempfile.mkdtemp(), jobs=0, said=lambda text: 0,
        ...                       evaluation={"both": False})
        >>> result.state, result.summary["frames"]
        ('finished', 512)
    """
    if isinstance(jobs, bool) or not isinstance(jobs, int) or jobs < 0:
        raise ConfigError(
            f"jobs is {quoted(jobs)}, expected a whole number, 0 or more; use jobs=1."
        )
    given = {"algorithms": algorithms, "tasks": tasks, "seeds": seeds, "frames": frames}
    with trusting(trust):
        plan, folder = plan_of(suite, out, resume, {**given, "settings": settings})
        _check_devices(plan)
        with open_folder(folder, plan, resume=resume):
            return _Work(plan, folder, jobs, said).done()


def plan_of(
    suite: str | Path, out: str | Path | None, resume: bool, words: Mapping[str, Any]
) -> tuple[Plan, Path]:
    """Returns the runs that are meant, and their folder.

    Args:
        suite (str or Path): a name or a path.
        out (str or Path, optional): the folder.
        resume (bool): what is not given is as the folder has it.
        words (dict): ``algorithms``, ``tasks``, ``seeds``, ``frames``, ``settings``.
    """
    table, chosen = read_suite(suite), words
    folder = Path(f"suite_{table.name}" if out is None else out)
    if resume:
        before = read_words(folder, table.name)
        given = {key: value for key, value in words.items() if value is not None}
        settings = dict(before["settings"])
        if given.get("frames") is not None:
            settings.pop("total_frames", None)
        both = merged(*(normalized(TrainConfig, x) for x in (settings, words["settings"])))
        words = {**before, **given, "settings": both}
    plan = make_plan(table, **words)
    if resume:
        own = {key: words[key] for key in ("algorithms", "tasks", "seeds")}
        own |= {"frames": chosen["frames"], "settings": chosen["settings"]}
        check_record(folder / RECORD, plan, partial(make_plan, table, **own))
    return plan, folder


def _check_devices(plan: Plan) -> None:
    from torchrl_marl.runs import check_device

    for config in {run.config.device: run.config for run in plan.runs}.values():
        check_device(config)


class _Work:
    """The runs of a plan, trained one after the other or side by side."""

    def __init__(self, plan: Plan, out: Path, jobs: int, said: Callable[[str], None]) -> None:
        self.out, self.jobs = out, jobs
        before = read_elapsed(out)
        found = [found_result(out, run, before.get(run.place.as_posix(), 0.0)) for run in plan.runs]
        self.results = {one.run.place: one for one in found}
        self.waiting = [one.run for one in found if not one.finished]
        self.board = Board(self.results, max(jobs, 1), said)

    def done(self) -> list[Result]:
        """Trains all, and returns what they have come to; also writes it where it is stopped."""
        try:
            self._note()
            self._train()
        finally:
            self.board.close()
            self._note()
        return list(self.results.values())

    def _note(self) -> None:
        write_results(self.out, self.results.values())

    def _train(self) -> None:
        began: dict[int, float] = {}

        def begin(number: int) -> None:
            self.board.began(self.waiting[number].place)
            began[number] = time.monotonic()

        jobs = Jobs(
            [self._placed(run) for run in self.waiting],
            "processes" if self.jobs else "here",
            at_once=self.jobs,
            folder=self.out,
            began=begin,
            look=lambda working: self.board.show([self.waiting[i].place for i in working]),
            **{"logging.progress": False},
        )
        with terminable():
            for number, outcome in jobs.ended():
                self._end(self.waiting[number], outcome, time.monotonic() - began[number])

    def _placed(self, run: SuiteRun) -> TrainConfig:
        return dataclasses.replace(run.config, folder=str(self.out / run.place))

    def _end(self, run: SuiteRun, outcome: object, seconds: float) -> None:
        elapsed = self.results[run.place].elapsed + seconds
        result = found_result(self.out, run, elapsed)
        if isinstance(outcome, Stopped):
            result = dataclasses.replace(result, state="stopped")
        elif isinstance(outcome, Exception):
            result = dataclasses.replace(result, state="failed", error=_reason(outcome))
        self.results[run.place] = result
        self.board.ended(run.place)
        self._note()


def _reason(error: Exception) -> str:
    """Says why a run failed, which does not end the others."""
    if isinstance(error, UserError):
        return " ".join(str(error).split())
    traceback.print_exception(error)
    return f"{type(error).__name__}: {error}"


def check_record(record: Path, plan: Plan, without: Callable[[], Plan]) -> None:
    """Refuses environments, clusters and services that only the record of a stranger's folder
    names.

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
                # This user's, of what the settings of the runs name.
                signatures = sorted({one.signature for one in _named(plan)})
                record |= {"signatures": signatures} if signatures else {}
                file.write(json.dumps(record, indent=2) + "\n")
        yield
    finally:
        lock.release()


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


def check_folder(out: Path, plan: Plan, *, resume: bool) -> None:
    """Refuses a folder that the runs are not to be trained in.

    Args:
        out (Path): the folder.
        plan (Plan): the runs.

    Keyword Args:
        resume (bool): go on in a folder that is there.

    Raises:
        ConfigError: a folder with other content, or with runs that were begun with other settings:
            naming the run, the setting, and both values.
    """
    _check_fit(out, resume)
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


def suite_command(
    texts: Sequence[str],
    *,
    out: Path | None,
    resume: bool,
    jobs: int,
    dry_run: bool,
    trust: bool = False,
) -> None:
    """Trains a suite, or shows what would be trained.

    Args:
        texts (sequence of str): the suite, then ``algorithms=..``, ``tasks=..``, ``seeds=..``,
            ``frames=..`` and settings.

    Keyword Args:
        out (Path, optional): its folder.
        resume (bool): go on in that folder.
        jobs (int): how many runs at once.
        dry_run (bool): show the table alone.
        trust (bool): run the code that a folder of somebody else's names.

    Raises:
        UserError: what is asked for cannot be done, or runs that failed.
    """
    if not texts or "=" in texts[0]:
        raise ConfigError(f"no suite is named; give one of {', '.join(suite_names())} first.")
    words = _words(texts[1:])
    if dry_run:
        plan, folder = plan_of(texts[0], out, resume, words)
        check_folder(folder, plan, resume=resume)
        print(plan_table(plan, folder, max(jobs, 1)))
        return
    silence_libraries()
    settings = words.pop("settings")
    how: dict[str, Any] = {"out": out, "resume": resume, "jobs": jobs, "trust": trust}
    results = run_suite(texts[0], **how, **words, **settings)
    print(results_table(results))
    print(results[0].folder.parents[2] / "results.csv")
    failed = [one for one in results if not one.finished]  # or stopped, by somebody else
    if failed:
        names = ", ".join(one.run.place.as_posix() for one in failed[:3])
        more = f" and {len(failed) - 3} more" if len(failed) > 3 else ""
        raise UserError(
            f"{len(failed)} of {len(results)} runs did not finish: {names}{more}; the same command "
            "with --resume goes on with them."
        )


def suite_rows() -> list[tuple[str, str]]:
    """Returns rows for ``torchrl-marl list suites``: name, and what it trains."""
    return [(name, read_suite(name).about) for name in suite_names()]


def plan_table(plan: Plan, out: Path, jobs: int = 1) -> str:
    """Formats what would be trained: a row for each task, frames, and when it would end."""
    rows = []
    for task in plan.words["tasks"]:
        own = [run for run in plan.runs if run.task == task]
        env = own[0].config.env
        each = sorted({number(run.config.total_frames) for run in own})
        steps = f"at most {env.max_steps} steps, " if env.max_steps else ""
        rows.append((task, f"{env.library} {env.name}, {steps}{' or '.join(each)} frames"))
    before = read_elapsed(out)
    found = [found_result(out, run, before.get(run.place.as_posix(), 0.0)) for run in plan.runs]
    left = Board({one.run.place: one for one in found}, jobs, bar=False).seconds_left()
    forecast = "unknown until a run has ended in " + repr(str(out)) if left is None else clock(left)
    many = len(plan.runs)
    return "\n".join(
        [
            f"{plan.suite.name}: {plan.suite.about}",
            table(rows),
            table(
                [
                    ("algorithms", ", ".join(plan.words["algorithms"])),
                    ("seeds", ", ".join(map(str, plan.words["seeds"]))),
                    ("runs", f"{many}, of which {sum(one.finished for one in found)} are finished"),
                    ("frames", number(plan.frames)),
                    ("time to go", forecast),
                ]
            ),
        ]
    )


def _words(texts: Sequence[str]) -> dict[str, Any]:
    """Returns what says which runs, and the settings of all."""
    found: dict[str, Any] = dict.fromkeys(WORDS)
    settings = []
    for text in texts:
        key, equals, value = text.partition("=")
        if key not in WORDS or not equals:
            settings.append(text)
        elif found[key] is not None:
            raise ConfigError(f"{key} is given twice, expected once; leave one out.")
        else:
            found[key] = value
    if found["seeds"] is not None:
        found["seeds"] = seeds_of(found["seeds"])
    if found["frames"] is not None:
        found["frames"] = parse_overrides([f"frames={found['frames']}"])["frames"]
    return {**found, "settings": parse_overrides(settings)}
