"""Runs a suite, several runs at once; ``torchrl-marl suite``."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrl_marl.apps.console import number, silence_others, table
from torchrl_marl.apps.suites.board import (
    Board,
    Result,
    found_result,
    read_elapsed,
    results_table,
    write_results,
)
from torchrl_marl.apps.suites.folder import (
    RECORD,
    check_folder,
    check_record,
    open_folder,
    read_words,
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
from torchrl_marl.errors import ConfigError, UserError, quoted
from torchrl_marl.runtime.trust import is_trusting, trusting
from torchrl_marl.settings import merged, normalized, parse_overrides
from torchrl_marl.training.config import TrainConfig
from torchrl_marl.training.files import open_to_append
from torchrl_marl.training.process import Interruption, terminable

__all__ = ["plan_of", "run_suite", "suite_command", "suite_rows", "train_one"]


def train_one(settings: Mapping[str, Any], folder: Path, trust: bool = False) -> None:
    """Trains a run, or goes on with one that was begun.

    Args:
        settings (mapping): the run's.
        folder (Path): where it is kept.
        trust (bool): go on with one of somebody else's.

    Raises:
        UserError: what is asked for cannot be done; the message names the fix.
    """
    from torchrl_marl.runs import resume, train

    quiet = {"logging.progress": False}
    if (folder / "config.yaml").is_file():
        resume(folder, trust=trust, **quiet)
    else:
        train({**settings, "folder": str(folder)}, **quiet)


def _main() -> int:
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_input, daemon=True).start()
    from torchrl_marl.apps.console import silence_others, tell_error

    silence_others()
    try:
        train_one(request["settings"], Path(request["folder"]), request["trust"])
    except UserError as error:
        tell_error(error)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception:  # the suite reads the last line and goes on with the other runs
        traceback.print_exc()
        return 1
    return 0


def _end_with_input() -> None:
    while os.read(sys.stdin.fileno(), 1024):  # not by sys.stdin, whose lock Python's end wants
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(_main())


_LOOK = 0.5  # seconds between two looks at the processes
_STOPPED = tuple(code for n in (signal.SIGINT, signal.SIGTERM) for code in (-n, 128 + n))


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
        check_record(folder / RECORD, plan, lambda: make_plan(table, **own))
    return plan, folder


def _check_devices(plan: Plan) -> None:
    from torchrl_marl.runs import check_device

    for config in {run.config.device: run.config for run in plan.runs}.values():
        check_device(config)


class _Child:
    """A run that is trained in a process of its own."""

    def __init__(self, run: SuiteRun, out: Path, threads: bool) -> None:
        self.run, self.folder = run, out / run.place
        self.log = out / "logs" / f"{'_'.join(run.place.parts)}.log"
        self.log.parent.mkdir(exist_ok=True)
        request = {
            "settings": dataclasses.asdict(run.config),
            "folder": str(self.folder),
            "trust": is_trusting(),
        }
        with open_to_append(self.log) as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "torchrl_marl.apps.suites.running"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=_environment(threads),
                start_new_session=True,  # Ctrl-C is the suite's, which tells its runs
            )
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it says in its log why it ended so soon
            self.process.stdin.write((json.dumps(request) + "\n").encode())
            self.process.stdin.flush()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()

    def close(self) -> None:
        """Ends the process, at once if it has not ended yet."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def result(self) -> Result | None:
        """Returns how it ended, or None while it has not."""
        code = self.process.poll()
        if code is None:
            return None
        found = found_result(self.folder.parents[2], self.run)
        if code == 0 and found.finished:
            return found
        if code in _STOPPED:
            return dataclasses.replace(found, state="stopped")
        return dataclasses.replace(found, state="failed", error=self._reason(code))

    def _reason(self, code: int) -> str:
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n")
        except OSError:
            lines = []
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        text = last.removeprefix("torchrl-marl: error: ") or "it said nothing"
        return f"ended by signal {-code}" if code < 0 else text


def _environment(threads: bool) -> dict[str, str]:
    """Returns a child's variables: this package, and one thread where several run at once."""
    one = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)  # an empty one: the current folder
    paths = [str(Path(__file__).parents[2]), *filter(None, given)]
    own = {"PYTHONPATH": os.pathsep.join(paths)}
    return {**(dict.fromkeys(one, "1") if threads else {}), **os.environ, **own}


class _Work:
    """The runs of a plan, trained one after the other or side by side."""

    def __init__(self, plan: Plan, out: Path, jobs: int, said: Callable[[str], None]) -> None:
        self.out, self.jobs = out, jobs
        before = read_elapsed(out)
        found = [found_result(out, run, before.get(run.place.as_posix(), 0.0)) for run in plan.runs]
        self.results = {one.run.place: one for one in found}
        self.waiting = deque(one.run for one in found if not one.finished)
        self.board = Board(self.results, max(jobs, 1), said)

    def done(self) -> list[Result]:
        """Trains all, and returns what they have come to; also writes it where it is stopped."""
        try:
            self._note()
            if self.jobs:
                self._side_by_side()
            else:
                self._here()
        finally:
            self.board.close()
            self._note()
        return list(self.results.values())

    def _note(self) -> None:
        write_results(self.out, self.results.values())

    def _end(self, result: Result, seconds: float) -> None:
        place = result.run.place
        elapsed = self.results[place].elapsed + seconds
        self.results[place] = dataclasses.replace(result, elapsed=elapsed)
        self.board.ended(place)
        self._note()

    def _here(self) -> None:
        with terminable():
            for run in self.waiting:
                folder = self.out / run.place
                self.board.began(run.place)
                began = time.monotonic()
                with self._timed(run, began):
                    error = _attempt(run, folder)
                    found = found_result(self.out, run)
                    if error:
                        found = dataclasses.replace(found, state="failed", error=error)
                self._end(found, time.monotonic() - began)

    @contextlib.contextmanager
    def _timed(self, run: SuiteRun, began: float) -> Iterator[None]:
        """Counts the seconds of a run that is stopped, too."""
        try:
            yield
        except BaseException:
            self._end(
                dataclasses.replace(found_result(self.out, run), state="stopped"),
                time.monotonic() - began,
            )
            raise

    def _side_by_side(self) -> None:
        working: dict[_Child, float] = {}
        interruption = Interruption()
        try:
            with interruption:
                while working or (self.waiting and not interruption.asked):
                    self._fill(working, 0 if interruption.asked else self.jobs)
                    if interruption.asked:
                        for child in working:
                            child.stop()
                    for child in [one for one in working if self._ended(one, working)]:
                        del working[child]
                    self.board.show({one.run.place: one.folder for one in working})
                    time.sleep(_LOOK if working else 0)
        finally:
            for child in working:
                child.close()
        interruption.heed(self.out)

    def _fill(self, working: dict[_Child, float], places: int) -> None:
        while self.waiting and len(working) < places:
            run = self.waiting.popleft()
            self.board.began(run.place)
            working[_Child(run, self.out, self.jobs > 1)] = time.monotonic()

    def _ended(self, child: _Child, working: Mapping[_Child, float]) -> bool:
        result = child.result()
        if result is None:
            return False
        child.close()
        self._end(result, time.monotonic() - working[child])
        return True


def _attempt(run: SuiteRun, folder: Path) -> str:
    """Trains a run in this process; returns why it failed, or an empty text."""
    try:
        train_one(dataclasses.asdict(run.config), folder)
    except UserError as error:
        return " ".join(str(error).split())
    except Exception as error:  # a run that fails does not end the others
        traceback.print_exception(error)
        return f"{type(error).__name__}: {error}"
    return ""


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
    silence_others()
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
