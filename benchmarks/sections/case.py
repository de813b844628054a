"""What a section measures: cases, their table and their bars."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import report

if TYPE_CHECKING:
    from calibrate import Rates

DEFAULT, TUNED, BENCHMARL, JAXMARL = "TorchRL", "TorchRL, tuned", "BenchMARL", "JaxMARL"
EAGER, OURS = "torchrl_marl, eager", "torchrl_marl"


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the command line says to every section."""

    device: str = "cpu"
    execution: str = "compile"
    quick: bool = False
    rounds: int = 20
    seconds: float = 60.0
    """Longest, for the rounds of a case."""
    pythons: dict[str, str] = dataclasses.field(default_factory=dict)
    """Name of another system -> the Python of its environment."""
    rates: Rates | None = None

    def timings(self, candidates: dict[str, Any], **arguments: Any) -> report.Timings:
        """Times candidates in turn."""
        rounds = 2 if self.quick else self.rounds
        return report.alternate(candidates, rounds, seconds=self.seconds, **arguments)


@dataclasses.dataclass
class Case:
    """One size of a section, measured."""

    name: str
    timings: report.Timings
    frames: int
    """Env steps of a measured call."""
    calls: int = 1
    """Pieces of work of a measured call, whose time is shown."""
    least: float | None = None
    """Seconds that the machine must at least take."""
    baselines: dict[str, str] = dataclasses.field(
        default_factory=lambda: {DEFAULT: DEFAULT, TUNED: TUNED}
    )
    """What it is compared with -> the candidate."""
    ours: str = OURS
    """The candidate that is compared in the picture."""
    notes: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    """Another column -> candidate -> text."""
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    """Another system -> the versions in its environment."""
    in_picture: bool = True
    """Whether the picture has a place for it."""

    def bars(self) -> dict[str, float]:
        """How many times faster ours is than each baseline."""
        return {
            name: self.timings.ratio(self.ours, candidate)
            for name, candidate in self.baselines.items()
        }

    def rows(self, baselines: Iterable[str], notes: Iterable[str]) -> list[list[str]]:
        """A row for every candidate."""
        from calibrate import share

        rows = []
        for name in self.timings.seconds:
            seconds = self.timings.median(name)
            row = [self.name, name, _milliseconds(seconds / self.calls)]
            row.append(f"{self.frames / seconds:,.0f}")
            for baseline in baselines:
                other = self.baselines.get(baseline)
                row.append("" if other is None else self.timings.ratio_text(name, other))
            row += [self.notes.get(note, {}).get(name, "") for note in notes]
            row.append("" if self.least is None else share(self.least, seconds))
            rows.append([*row, str(self.timings.rounds())])
        return rows


def table(cases: list[Case]) -> str:
    """All cases of a section in one table."""
    baselines = list(dict.fromkeys(name for case in cases for name in case.baselines))
    notes = list(dict.fromkeys(name for case in cases for name in case.notes))
    header = ["", "", "ms", "frames/s", *(f"times {name}" for name in baselines), *notes]
    header += ["of the limit", "rounds"]
    return report.markdown_table(header, [x for case in cases for x in case.rows(baselines, notes)])


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}" if seconds < 0.01 else f"{1e3 * seconds:.1f}"


def to_json(cases: list[Case]) -> list[dict[str, Any]]:
    """What :func:`from_json` reads."""
    return [dataclasses.asdict(case) for case in cases]


def from_json(cases: list[dict[str, Any]]) -> list[Case]:
    """Cases that were written earlier."""
    return [Case(**{**case, "timings": report.Timings(**case["timings"])}) for case in cases]
