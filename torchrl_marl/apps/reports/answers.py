"""Sentences of a report: answers, notes and methods."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import Any

import numpy as np

from torchrl_marl.apps.reports.aggregates import Aggregate, TaskResult
from torchrl_marl.apps.reports.grouping import Numbers
from torchrl_marl.apps.reports.results import Report, environment_of
from torchrl_marl.training.statistics import (
    CONFIDENCE,
    Estimate,
    matters,
    needed,
    permutation_p_value,
    significant,
    smallest_p_value,
    too_few,
    undecided,
)

__all__ = [
    "answers",
    "counted",
    "duration",
    "figure",
    "format_estimate",
    "format_range",
    "listed",
    "methods",
    "notes",
    "read_asset",
    "share",
]


def figure(value: float | None) -> str:
    """Formats a number with about four significant digits; None and NaN become ``-``.

    Examples:
        >>> figure(1500000), figure(-8.7654), figure(0.00004), figure(None)
        ('1,500,000', '-8.765', '4e-05', '-')
    """
    if value is None or not math.isfinite(value):
        return "-"
    if abs(value) < 1e12 and (float(value).is_integer() or abs(value) >= 1000):
        return f"{value:,.0f}"
    return f"{value:.4g}"


def share(value: float | None) -> str:
    """Formats a normalized score or a probability with two decimals.

    Examples:
        >>> share(0.918), share(-0.001), share(None)
        ('0.92', '0.00', '-')
    """
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value + 0.0 if abs(value) >= 0.005 else 0.0:.2f}"


def format_estimate(estimate: Estimate, is_share: bool = False) -> str:
    """Formats an estimate and its interval; the interval's width decides the decimals.

    Examples:
        >>> format_estimate(Estimate(41.2345, 36.054, 44.87)), format_estimate(Estimate(0.5), True)
        ('41.2 [36.1, 44.9]', '0.50')
    """
    if not estimate.has_interval:
        return share(estimate.value) if is_share else figure(estimate.value)
    if is_share:
        value, low, high = (share(x) for x in (estimate.value, estimate.low, estimate.high))
    else:
        width = estimate.high - estimate.low
        digits = max(0, 1 - math.floor(math.log10(width))) if 0 < width < 1e12 else None
        value, low, high = (
            _rounded(x, digits) for x in (estimate.value, estimate.low, estimate.high)
        )
    return f"{value} [{low}, {high}]"


def _rounded(value: float, digits: int | None) -> str:
    return figure(value) if digits is None or digits > 6 else f"{value:,.{digits}f}"


def duration(seconds: float | None) -> str:
    """Formats a duration, given in seconds.

    Examples:
        >>> duration(8.25), duration(754), duration(9000)
        ('8.2 s', '12.6 min', '2.5 h')
    """
    if seconds is None or not math.isfinite(seconds):
        return "-"
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def counted(number: int, thing: str) -> str:
    """Formats a count with its noun, in the singular or plural.

    Examples:
        >>> counted(1, "run"), counted(3, "seed")
        ('1 run', '3 seeds')
    """
    return f"{number:,} {thing}{'s' * (number != 1)}"


def format_range(counts: Sequence[int], thing: str) -> str:
    """Formats the range of several counts with their noun.

    Examples:
        >>> format_range([5, 3], "seed"), format_range([1, 1], "seed")
        ('3 to 5 seeds', '1 seed')
    """
    low, high = min(counts), max(counts)
    return counted(high, thing) if low == high else f"{low} to {counted(high, thing)}"


def listed(names: Sequence[str], most: int = 6) -> str:
    """Joins names with commas and `and`; a long list is shortened.

    Examples:
        >>> listed(["a", "b", "c"]), listed(["a", "b", "c"], most=2)
        ('a, b and c', 'a, b and 1 more')
    """
    names = list(names)
    if len(names) > most:
        names = [*names[:most], f"{len(names) - most} more"]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


# Coverage of a 95 % interval by number of runs, for normally distributed returns; measured by
# `benchmarks/intervals.py`.
COVERAGE = {2: 0.50, 3: 0.75, 4: 0.87, 5: 0.90}
_MAX_PAIRS = 5  # most comparisons with the best algorithm that get a sentence each
_FEW_SEEDS = 20  # most seeds for which an interval is checked by the exact test


def answers(report: Report) -> list[str]:
    """Returns the main results, each as one sentence."""
    if report.aggregates and len(report.tasks) > 1:
        return [sentence for found in report.aggregates for sentence in _overall_answers(found)]
    return [sentence for task in report.tasks for sentence in _task_answers(task)]


def notes(report: Report) -> list[str]:
    """Returns the caveats of the results and the runs left out, each as one sentence."""
    return [
        *_aggregation_notes(report),
        *_environment_notes(report),
        *_evaluation_notes(report),
        *_frames_notes(report),
        *_total_frames_notes(report),
        *_seed_notes(report),
        *_normalization_notes(report),
        *_zero_sum_notes(report),
        *_action_notes(report),
        *_run_notes(report),
        *(f"Left out: {sentence}" for sentence in report.left_out),
    ]


def methods() -> list[str]:
    """Returns sentences that say how the numbers are computed."""
    confidence, level = (f"{x:.0%}".replace("%", " %") for x in (CONFIDENCE, 1 - CONFIDENCE))
    return read_asset("methods.txt").format(confidence=confidence, level=level).splitlines()


def read_asset(name: str) -> str:
    """Returns the text of a file in ``assets``."""
    assets = resources.files("torchrl_marl.apps.reports") / "assets"
    return (assets / name).read_text(encoding="utf-8")


def _overall_answers(found: Aggregate) -> Iterator[str]:
    first, *others = found.algorithms
    tasks = f"Over {counted(len(found.tasks), 'task')} ({listed(found.tasks)})"
    iqm = {name: format_estimate(found.estimates[name]["IQM"], True) for name in found.algorithms}
    each = format_range([n for runs in found.seeds.values() for n in runs], "seed")
    rest = "".join(f", {name} {iqm[name]}" for name in others)
    yield (f"{tasks}, {each} each, {first} reaches a normalized score (IQM) of {iqm[first]}{rest}.")
    for other in others[:_MAX_PAIRS]:
        pair = first, other
        yield _improvement_sentence(
            pair, found.improvements[pair], *(found.scores[name] for name in pair)
        )
    yield from _note_other_pairs(others)


def _task_answers(result: TaskResult) -> Iterator[str]:
    if (sentence := _zero_sum_warning(result)) is not None:
        yield sentence
        return
    teams = sorted(result.teams.values(), key=lambda team: -team.iqm.value)
    first, *others = teams
    rest = "".join(f", {team.algorithm} {format_estimate(team.iqm)}" for team in others)
    random = result.reference.random
    beside = f" (random policy: {figure(random)})" if random is not None else ""
    counts = [len(team.runs) for team in teams]
    seeds = "one run" if max(counts) == 1 else f"IQM of {format_range(counts, 'seed')}"
    yield (
        f"In {result.task.name}, after {figure(result.frames)} frames, {first.algorithm} earns "
        f"{format_estimate(first.iqm)}{rest}{beside}; {seeds}."
    )
    for other in others[:_MAX_PAIRS]:
        pair = first.algorithm, other.algorithm
        scores = ([np.array(result.teams[name].scores)] for name in pair)
        yield _improvement_sentence(pair, result.improvements[pair], *scores)
    yield from _note_other_pairs(others)


def _note_other_pairs(others: Sequence[object]) -> Iterator[str]:
    if len(others) > _MAX_PAIRS:
        yield "For all other pairs see the table P(row > column)."


def _zero_sum_warning(result: TaskResult) -> str | None:
    """Returns a warning that mean returns in a zero-sum task are always 0; None for other tasks."""
    runs = result.runs
    groups = [abs(x) for run in runs for x in run.groups.values()]
    nothing = 1e-6 * max([1.0, *groups])
    opposed = [run.record.run.settings.get("league.opponents", "none") != "none" for run in runs]
    if any((abs(run.record.measured.returns) > nothing).any() for run in runs):
        return None
    if not any(opposed) and max(groups, default=0.0) <= nothing:
        return None
    return (
        f"{result.task.name} is zero-sum: where one policy plays both sides the mean return is "
        "always 0 and cannot compare algorithms. Use `torchrl-marl crossplay RUN RUN ...` to "
        "play them against each other."
    )


def _improvement_sentence(
    pair: tuple[str, str], found: Estimate, scores: Sequence[Numbers], others: Sequence[Numbers]
) -> str:
    first, second = pair
    if not found.has_interval:
        return f"Single runs cannot show whether {first} or {second} is better."
    better = f"A run of {first} is better than one of {second} with probability"
    sentence = f"{better} {format_estimate(found, True)}"
    counts = [[len(task) for task in tasks] for tasks in (scores, others)]
    every = [count for own in counts for count in own]
    few = min(every) <= _FEW_SEEDS
    least = smallest_p_value(*counts) if few else 0.0
    if found.low <= 0.5 <= found.high:
        return f"{sentence}: {undecided('runs', needed('seeds', least))}."
    p_value = permutation_p_value(scores, others) if few else 0.0
    if p_value <= 1 - CONFIDENCE:
        return f"{sentence}, {significant('seeds')}."
    reason = too_few("seeds", every, p_value, least)
    return f"{better} {share(found.value)} among these, but {reason}."


def _aggregation_notes(report: Report) -> Iterator[str]:
    if len(report.tasks) > 1 and not report.aggregates:
        yield (
            "No figure over all tasks is given: no algorithm was trained in two tasks whose "
            "returns can be normalized, and returns of different tasks do not add up."
        )
    for found in report.aggregates[:1]:
        missing = [name for name in report.algorithms if name not in found.estimates]
        where = [w.task.name for w in report.tasks if w.task.name not in found.tasks]
        if missing or where:
            what = [f"{listed(missing)} (fewer tasks)"] * bool(missing)
            what += [f"the task{'s' * (len(where) > 1)} {listed(where)}"] * bool(where)
            yield f"The first aggregate over several tasks leaves out {listed(what)}."


def _environment_notes(report: Report) -> Iterator[str]:
    """Yields a note for each task that runs of different environments were joined to by name."""
    for result in report.tasks:
        known = {environment_of(run.record) for run in result.runs} - {""}
        if len(known) > 1:
            yield (
                f"{result.task.name} is a task of {listed(sorted(known))}: its runs are compared "
                "as if these were one environment."
            )


def _evaluation_notes(report: Report) -> Iterator[str]:
    """Yields a note if runs of a task were evaluated in different ways."""
    for result in report.tasks:
        which: dict[str, dict[str, list[str]]] = {}  # setting -> value -> folders
        for record in (run.record for run in result.runs if run.record.is_evaluated):
            for name, value in record.run.evaluated_with.items():
                which.setdefault(name, {}).setdefault(value, []).append(record.name)
        for name, folders in which.items():
            if len(folders) > 1:
                of = "; ".join(f"{value} in {listed(own, 3)}" for value, own in folders.items())
                yield (
                    f"Returns in {result.task.name} are of different evaluations: "
                    f"evaluation.{name} is {of}."
                )


def _frames_notes(report: Report) -> Iterator[str]:
    for result in report.tasks:
        ends = {run.record.measured.end for team in result.teams.values() for run in team.runs}
        apart = [
            f"{run.record.source} ({figure(run.record.measured.end)})"
            for team in result.teams.values()
            for run in team.runs
            if not run.at_equal_frames
        ]
        if apart:
            yield (
                f"In {result.task.name} runs are compared at {figure(result.frames)} frames. "
                f"These have no measurement near; their return is interpolated, or the nearest: "
                f"{listed(apart, 4)}."
            )
        elif max(ends) > 1.1 * result.frames:
            yield (
                f"In {result.task.name} algorithms were trained for {figure(min(ends))} to "
                f"{figure(max(ends))} frames; scores are those at {figure(result.frames)}."
            )


def _total_frames_notes(report: Report) -> Iterator[str]:
    """Yields a note for each algorithm if its seeds differ in ``total_frames``."""
    for result, team in report.teams:
        totals = sorted({run.record.total_frames for run in team.runs})
        if len(totals) > 1:
            yield (
                f"Seeds of {team.algorithm} in {result.task.name} have total_frames of "
                f"{listed([figure(total) for total in totals])}: schedules, such as a linear lr, "
                "differed at the frames compared."
            )


def _seed_notes(report: Report) -> Iterator[str]:
    single = [f"{t.algorithm} in {r.task.name}" for r, t in report.teams if len(t.runs) == 1]
    if single:
        yield f"One seed, and so no interval over seeds: {listed(single)}."
    fewest = min((len(team.runs) for _, team in report.teams if len(team.runs) > 1), default=5)
    if fewest < 5:
        yield (
            f"With {fewest} seeds the interval of one task is too narrow: for normally "
            f"distributed returns it covers the true IQM in {COVERAGE[fewest]:.0%} of the cases, "
            f"not {CONFIDENCE:.0%}; with 5 seeds in {COVERAGE[5]:.0%}.".replace("%", " %")
        )


def _normalization_notes(report: Report) -> Iterator[str]:
    for result in report.tasks:
        reference = result.reference
        if reference.why_none:
            yield f"Scores of {result.task.name} are not normalized: {reference.why_none}."


def _zero_sum_notes(report: Report) -> Iterator[str]:
    """Yields a note for each zero-sum task; answers over several tasks would not mention it."""
    if report.aggregates and len(report.tasks) > 1:
        yield from filter(None, map(_zero_sum_warning, report.tasks))


def _action_notes(report: Report) -> Iterator[str]:
    """Yields a note if the most likely actions and sampled actions earn different returns."""
    for result, team in report.teams:
        runs = [run.record.run.summary for run in team.runs]
        differ = [
            x for x in runs if isinstance(x.get("actions_differ"), str) and _difference_matters(x)
        ]
        one, other = (_mean_return(differ, kind) for kind in ("likeliest", "drawn"))
        if one is not None and other is not None:
            yield (
                f"In {result.task.name} the most likely actions of {team.algorithm} earn "
                f"{figure(one)} and sampled ones {figure(other)}, a significant difference in "
                f"{len(differ)} of {counted(len(runs), 'run')}; scores follow "
                "evaluation.deterministic."
            )


def _difference_matters(summary: Mapping[str, Any]) -> bool:
    """Returns whether both kinds of actions differ relevantly in return; True if unknown."""
    try:
        kinds = [summary["evaluation"][kind] for kind in ("likeliest", "drawn")]
        one, other = (float(kind["return_mean"]) for kind in kinds)
        spreads = [float(kind["return_std"]) for kind in kinds]
    except (KeyError, TypeError, ValueError):
        return True  # older summaries lack these figures
    return matters(one - other, float(np.sqrt(np.mean(np.square(spreads)))))


def _mean_return(summaries: Sequence[Mapping[str, Any]], kind: str) -> float | None:
    """Returns the mean return with one kind of actions; None if a run did not measure it."""
    try:
        found = [float(summary["evaluation"][kind]["return_mean"]) for summary in summaries]
    except (KeyError, TypeError, ValueError):
        return None
    return sum(found) / len(found) if found else None


def _run_notes(report: Report) -> Iterator[str]:
    for run in report.runs:
        for note in run.record.notes:
            yield f"{run.record.source} {note}."
    for result in report.tasks:
        groups = sorted({name for team in result.teams.values() for name in team.groups})
        if groups:
            yield (
                f"{result.task.name} has the groups {listed(groups)}; its return is the mean over "
                "all agents, and a table lists each group's return."
            )
        equal = {len(set(team.scores)) == 1 for team in result.teams.values() if len(team.runs) > 1}
        if equal == {True}:
            yield (
                f"In {result.task.name} all seeds of an algorithm have the same score, so "
                "intervals have zero width."
            )
