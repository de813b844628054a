"""Trains a suite in one folder, with several runs in parallel (``torchrl-marl suite``)."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torchrl_marl.apps.console import number, silence_libraries, table
from torchrl_marl.apps.jobs.jobs import Jobs, Stopped
from torchrl_marl.apps.jobs.slurm import make_executor, parse_slurm
from torchrl_marl.apps.suites.board import (
    Board,
    Result,
    read_elapsed,
    read_result,
    read_rows,
    results_table,
    write_results,
)
from torchrl_marl.apps.suites.folder import (
    RECORD,
    check_folder,
    check_record,
    open_folder,
    read_selection,
    trains_populations,
)
from torchrl_marl.apps.suites.plan import (
    SELECTION_KEYS,
    Plan,
    SuiteRun,
    format_duration,
    make_plan,
    populations,
    read_suite,
    seeds_of,
    suite_names,
    with_run_folder,
)
from torchrl_marl.envs.config import EnvConfig
from torchrl_marl.envs.make import make_env
from torchrl_marl.envs.symmetries import WITH_SYMMETRIES, symmetries_of
from torchrl_marl.errors import ConfigError, UserError, nearest, quoted
from torchrl_marl.runtime.trust import trusting
from torchrl_marl.settings import merged, normalized, parse_overrides
from torchrl_marl.training.config import TrainConfig
from torchrl_marl.training.interruption import terminable

__all__ = [
    "check_symmetries",
    "plan_of",
    "refuse_unfinished",
    "run_suite",
    "suite_command",
    "suite_rows",
    "train_plan",
    "train_separately",
]


Gather = Callable[[Path, Sequence[SuiteRun]], list[tuple[TrainConfig, list[SuiteRun]]]]
"""Returns the settings of each training, and the runs that it trains; given folder and runs."""
LAUNCHERS = ("processes", "ray", "slurm")
"""Where the runs of a suite are trained."""


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
    launcher: str = "processes",
    slurm: Mapping[str, Any] = MappingProxyType({}),
    trust: bool = False,
    together: bool = False,
    log: Callable[[str], None] = print,
    **settings: Any,
) -> list[Result]:
    """Trains the runs of a suite, each in a folder such as ``out/task/algorithm/seed0``.

    A failed run is logged and does not stop the others. Ctrl-C and SIGTERM stop all runs after
    their current iteration. ``resume=True`` skips finished runs, resumes started ones from their
    checkpoints and retries failed ones. ``results.csv`` gets a row for each run. A suite with
    ``score: crossplay`` then plays the seeds of each task and algorithm with each other, and writes
    ``crossplay.csv``.

    Args:
        suite (str or Path): name of a suite, or path of a YAML file.

    Keyword Args:
        algorithms (list of str, optional): algorithms; default: the suite's ``default``.
        tasks (list of str, optional): tasks; default: all.
        seeds (int or list of int, optional): number of seeds from 0 on, or list of seeds;
            default: 5.
        frames (int, optional): frames of each run; default: as in the table.
        out (str or Path, optional): output folder; default: ``suite_NAME``.
        resume (bool): True to continue in that folder; omitted arguments are taken from it.
        trust (bool): True to run code and follow links of a folder that another user owns.
        together (bool): True to train all seeds of a task and algorithm as one population; with
            ``resume``, taken from the folder.
        jobs (int): number of concurrent runs, each in a process with one thread; 0: one by one
            in this process.
        launcher (str): ``processes`` of this machine, ``ray`` tasks, or ``slurm`` jobs.
        slurm (mapping): options for Slurm, such as ``{"timeout_min": 60}``.
        log (callable): called with a line for each run that has ended.
        **settings: settings of all runs, such as ``execution="compile"`` or
            ``**{"learner.lr": 1e-3}``.

    Returns:
        list of Result: result of each run, in the order of the plan.

    Raises:
        UserError: arguments or settings are invalid; this is checked before the first run starts.

    Examples:
        >>> import tempfile
        >>> (result,) = run_suite("toy", tasks="matrix_game", algorithms="mappo", seeds=1,
        ...                       frames=512, out=tempfile.mkdtemp(), jobs=0, log=lambda text: 0,
        ...                       evaluation={"both": False})
        >>> result.state, result.summary["frames"]
        ('finished', 512)
    """
    given = {"algorithms": algorithms, "tasks": tasks, "seeds": seeds, "frames": frames}
    with trusting(trust):
        plan, folder = plan_of(suite, out, resume, {**given, "settings": settings})
        options: dict[str, Any] = {"launcher": launcher, "slurm": slurm}
        if together or (resume and trains_populations(folder)):
            options |= {"gather": train_as_populations(populations(plan, folder)), "together": True}
        results = train_plan(plan, folder, resume=resume, jobs=jobs, log=log, **options)
        if plan.suite.score == "crossplay":
            from torchrl_marl.apps.suites.strangers import play_other_seeds

            play_other_seeds(results, folder, trust=trust, log=log)
        return results


def train_separately(
    out: Path, runs: Sequence[SuiteRun]
) -> list[tuple[TrainConfig, list[SuiteRun]]]:
    """Returns a training for each run.

    Args:
        out (Path): output folder.
        runs (sequence of SuiteRun): runs to train.
    """
    return [(with_run_folder([run], out), [run]) for run in runs]


def train_as_populations(units: Sequence[list[SuiteRun]]) -> Gather:
    """Returns a function that gathers the waiting runs into populations.

    Args:
        units (sequence of list of SuiteRun): members of each population.
    """

    def gather(out: Path, runs: Sequence[SuiteRun]) -> list[tuple[TrainConfig, list[SuiteRun]]]:
        waiting = {run.place for run in runs}
        chosen = [unit for unit in units if any(run.place in waiting for run in unit)]
        return [(with_run_folder(unit, out), unit) for unit in chosen]

    return gather


def train_plan(
    plan: Plan,
    folder: Path,
    *,
    resume: bool,
    jobs: int,
    log: Callable[[str], None],
    launcher: str = "processes",
    slurm: Mapping[str, Any] = MappingProxyType({}),
    gather: Gather = train_separately,
    together: bool = False,
) -> list[Result]:
    """Trains the runs of a plan in a folder.

    Args:
        plan (Plan): runs to train.
        folder (Path): output folder.

    Keyword Args:
        resume, jobs, launcher, slurm: as for :func:`run_suite`.
        gather (callable): which runs are trained together; default: each alone.
        together (bool): True to record that a resumed suite gathers its runs in the same way.

    Raises:
        UserError: the folder or the device cannot be used.
    """
    if isinstance(jobs, bool) or not isinstance(jobs, int) or jobs < 0:
        raise ConfigError(
            f"jobs is {quoted(jobs)}, expected a whole number, 0 or more; use jobs=1."
        )
    _check_launcher(launcher, slurm)
    where = launcher if jobs or launcher != "processes" else "here"
    _check_devices(plan)
    check_symmetries(plan)
    with open_folder(folder, plan, resume=resume, together=together):
        return _SuiteRunner(plan, folder, jobs, log, where, slurm, gather).run()


def _check_launcher(launcher: str, slurm: Mapping[str, Any]) -> None:
    """Raises an error before the folder is created if runs cannot be launched."""
    if launcher not in LAUNCHERS:
        raise ConfigError(
            f"launcher is {quoted(launcher)}, {nearest(launcher, LAUNCHERS)}expected one of "
            f"{', '.join(LAUNCHERS)}."
        )
    if slurm and launcher != "slurm":
        raise ConfigError(
            f"slurm has {', '.join(slurm)}, but launcher is {quoted(launcher)}; add --launcher "
            "slurm, or leave --slurm out."
        )
    if launcher == "slurm":
        with tempfile.TemporaryDirectory() as scratch:
            make_executor(Path(scratch), slurm)


def plan_of(
    suite: str | Path, out: str | Path | None, resume: bool, selection: Mapping[str, Any]
) -> tuple[Plan, Path]:
    """Returns the plan of the selected runs, and their folder.

    Args:
        suite (str or Path): name of a suite, or path of a YAML file.
        out (str or Path, optional): output folder.
        resume (bool): True to take omitted arguments from the folder.
        selection (dict): ``algorithms``, ``tasks``, ``seeds``, ``frames``, ``settings``.
    """
    table, chosen = read_suite(suite), selection
    folder = Path(f"suite_{table.name}" if out is None else out)
    if resume:
        before = read_selection(folder, table.name)
        given = {key: value for key, value in selection.items() if value is not None}
        settings = dict(before["settings"])
        if given.get("frames") is not None:
            settings.pop("total_frames", None)
        both = merged(*(normalized(TrainConfig, x) for x in (settings, selection["settings"])))
        selection = {**before, **given, "settings": both}
    plan = make_plan(table, **selection)
    if resume:
        own = {key: selection[key] for key in ("algorithms", "tasks", "seeds")}
        own |= {"frames": chosen["frames"], "settings": chosen["settings"]}
        check_record(folder / RECORD, plan, partial(make_plan, table, **own))
    return plan, folder


def check_symmetries(plan: Plan) -> None:
    """Refuses Other-Play in tasks without symmetries.

    The environment of each task with ``env.other_play`` is built once, with one env.

    Args:
        plan (Plan): runs to train.

    Raises:
        ConfigError: an environment has no symmetries; the message names all such tasks.
    """
    lacking: dict[str, str] = {}
    checked: dict[tuple[str, str], EnvConfig] = {}
    for run in plan.runs:
        env, key = run.config.env, (run.task, repr(run.config.env))
        if env.other_play and key not in checked:
            checked[key] = env
            if not _has_symmetries(env):
                lacking[run.task] = f"{run.task} ({env.library}/{env.name})"
    if lacking:
        have = [task for task, _ in checked if task not in lacking]
        fix = f"use tasks={','.join(have)}, or leave" if have else "leave"
        raise ConfigError(
            f"env.other_play is true, but these tasks have no symmetries: "
            f"{', '.join(lacking.values())}; {fix} env.other_play out; environments with "
            f"symmetries are {WITH_SYMMETRIES}."
        )


def _has_symmetries(env: EnvConfig) -> bool:
    library = env.record
    if library is not None and library.one_per_process:
        return False  # a simulator must not be started in the process of a suite
    built = make_env(dataclasses.replace(env, other_play=False, randomize={}), num_envs=1, seed=0)
    try:
        return bool(symmetries_of(built))
    finally:
        built.close()


def _check_devices(plan: Plan) -> None:
    from torchrl_marl.runs import check_device

    for config in {run.config.device: run.config for run in plan.runs}.values():
        check_device(config)


class _SuiteRunner:
    """Training of the runs of a plan, one by one or concurrently."""

    def __init__(
        self,
        plan: Plan,
        out: Path,
        jobs: int,
        log: Callable[[str], None],
        where: str,
        slurm: Mapping[str, Any],
        gather: Gather,
    ) -> None:
        self.out, self.jobs, self.where, self.slurm = out, jobs, where, slurm
        self.before, before = read_rows(out), read_elapsed(out)
        found = [read_result(out, run, before.get(run.place.as_posix(), 0.0)) for run in plan.runs]
        self.results = {one.run.place: one for one in found}
        self.waiting = gather(out, [one.run for one in found if not one.finished])
        self.board = Board(self.results, max(jobs, 1), log)

    def run(self) -> list[Result]:
        """Trains all runs and returns their results; writes the results even if interrupted."""
        try:
            self._write_results()
            self._train()
        finally:
            self.board.close()
            self._write_results()
        return list(self.results.values())

    def _write_results(self) -> None:
        write_results(self.out, self.results.values(), self.before)

    def _train(self) -> None:
        began: dict[int, float] = {}

        def begin(number: int) -> None:
            places = [run.place for run in self.waiting[number][1]]
            for place in places:
                self.results[place] = dataclasses.replace(self.results[place], state="begun")
            self._write_results()
            self.board.began(*places)
            began[number] = time.monotonic()

        jobs = Jobs(
            [config for config, _ in self.waiting],
            self.where,
            at_once=max(self.jobs, 1),
            slurm=self.slurm,
            folder=self.out,
            on_begin=begin,
            on_poll=lambda working: self.board.show(
                [run.place for i in working for run in self.waiting[i][1]]
            ),
            **{"logging.progress": False},
        )
        with terminable(), contextlib.closing(jobs.ended()) as ended:
            for number, outcome in ended:
                runs = self.waiting[number][1]
                for run in runs:
                    self._record_end(run, outcome, (time.monotonic() - began[number]) / len(runs))

    def _record_end(self, run: SuiteRun, outcome: object, seconds: float) -> None:
        elapsed = self.results[run.place].elapsed + seconds
        result = read_result(self.out, run, elapsed)
        if isinstance(outcome, Stopped):
            result = dataclasses.replace(result, state="stopped")
        elif isinstance(outcome, Exception):
            result = dataclasses.replace(result, state="failed", error=_error_text(outcome))
        self.results[run.place] = result
        self.board.ended(run.place)
        self._write_results()


def _error_text(error: Exception) -> str:
    """Returns the error of a failed run as text; prints the traceback of an unexpected one."""
    if isinstance(error, UserError):
        return " ".join(str(error).split())
    traceback.print_exception(error)
    return f"{type(error).__name__}: {error}"


def suite_command(
    texts: Sequence[str],
    *,
    out: Path | None,
    resume: bool,
    jobs: int,
    dry_run: bool,
    trust: bool = False,
    launcher: str = "processes",
    slurm: Sequence[str] = (),
    together: bool = False,
) -> None:
    """Trains a suite, or shows its plan.

    Args:
        texts (sequence of str): the suite, then ``algorithms=..``, ``tasks=..``, ``seeds=..``,
            ``frames=..`` and settings.

    Keyword Args:
        out (Path, optional): output folder.
        resume (bool): True to continue in that folder.
        jobs (int): number of concurrent runs.
        dry_run (bool): True to show the plan without training.
        launcher (str): ``processes``, ``ray`` or ``slurm``.
        slurm (sequence of str): options for Slurm, as ``key=value``.
        trust (bool): True to run the code that another user's folder names.
        together (bool): True to train all seeds of a task and algorithm as one population.

    Raises:
        UserError: arguments or settings are invalid, or a run failed.
    """
    if not texts or "=" in texts[0]:
        raise ConfigError(f"no suite is given; name one of {', '.join(suite_names())} first.")
    selection = _parse_selection(texts[1:])
    if dry_run:
        plan, folder = plan_of(texts[0], out, resume, selection)
        check_folder(folder, plan, resume=resume)
        with trusting(trust):
            check_symmetries(plan)
        if together or (resume and trains_populations(folder)):
            populations(plan, folder)
        print(plan_table(plan, folder, max(jobs, 1)))
        return
    silence_libraries()
    settings = selection.pop("settings")
    options: dict[str, Any] = {"out": out, "resume": resume, "jobs": jobs, "trust": trust}
    options |= {"launcher": launcher, "slurm": parse_slurm(slurm), "together": together}
    results = run_suite(texts[0], **options, **selection, **settings)
    print(results_table(results))
    print(results[0].folder.parents[2] / "results.csv")
    refuse_unfinished(results)


def refuse_unfinished(results: Sequence[Result]) -> None:
    """Raises an error that names the runs that did not finish, if there are any."""
    failed = [one for one in results if not one.finished]  # failed, or stopped by another process
    if failed:
        names = ", ".join(one.run.place.as_posix() for one in failed[:3])
        more = f" and {len(failed) - 3} more" if len(failed) > 3 else ""
        raise UserError(
            f"{len(failed)} of {len(results)} runs did not finish: {names}{more}; use the same "
            "command with --resume to continue them."
        )


def suite_rows() -> list[tuple[str, str]]:
    """Returns the rows for ``torchrl-marl list suites``, each a name and a description."""
    return [(name, read_suite(name).about) for name in suite_names()]


def plan_table(plan: Plan, out: Path, jobs: int = 1, variants: str = "algorithms") -> str:
    """Formats a plan: a row for each task, then totals and a forecast of the time."""
    rows = []
    for task in plan.selection["tasks"]:
        own = [run for run in plan.runs if run.task == task]
        env = own[0].config.env
        each = sorted({number(run.config.total_frames) for run in own})
        steps = f"at most {env.max_steps} steps, " if env.max_steps else ""
        rows.append((task, f"{env.library} {env.name}, {steps}{' or '.join(each)} frames"))
    before = read_elapsed(out)
    found = [read_result(out, run, before.get(run.place.as_posix(), 0.0)) for run in plan.runs]
    left = Board({one.run.place: one for one in found}, jobs, bar=False).seconds_left()
    forecast = (
        "unknown until a run has ended in " + repr(str(out))
        if left is None
        else format_duration(left)
    )
    many = len(plan.runs)
    return "\n".join(
        [
            f"{plan.suite.name}: {plan.suite.about}",
            table(rows),
            table(
                [
                    (variants, ", ".join(plan.selection["algorithms"])),
                    ("seeds", ", ".join(map(str, plan.selection["seeds"]))),
                    ("runs", f"{many}, of which {sum(one.finished for one in found)} are finished"),
                    ("frames", number(plan.frames)),
                    ("time to go", forecast),
                ]
            ),
        ]
    )


def _parse_selection(texts: Sequence[str]) -> dict[str, Any]:
    """Parses the arguments that select runs, and the settings of all runs."""
    found: dict[str, Any] = dict.fromkeys(SELECTION_KEYS)
    settings = []
    for text in texts:
        key, equals, value = text.partition("=")
        if key not in SELECTION_KEYS or not equals:
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
