"""One program: simulator, rollout and update as graphs, against TorchRL, BenchMARL and JaxMARL.

    python benchmarks/one_program.py --write

Sections (``--only`` selects some): a step of the simulator, a rollout with a policy, advantages,
an update, a whole iteration, eight groups against one, and simple_spread against JaxMARL. Every
section runs in a separate process for each number of threads, after a calibration of the machine
there. "of the limit" is the shortest time that the machine's memory and arithmetic allow for the
work, fully fused, as a share of the time taken.

BenchMARL and JaxMARL run in virtual environments, created if missing
(``--benchmarl-python`` and ``--jaxmarl-python`` name others; ``--without`` leaves them out).
``--results FOLDER`` keeps the measurements of each section and reuses existing ones, so that a long
run can be made in parts.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any

import calibrate
import foreign
import picture
import report
from sections import case
from sections.case import BENCHMARL, JAXMARL, Settings

SECTIONS = ("step", "rollout", "gae", "update", "iteration", "groups", "simple_spread")


def measure(name: str, settings: Settings) -> list[dict[str, Any]] | str:
    """The cases of a section, or how it failed; in a process of its own."""
    if settings.device == "cuda":
        import torch

        torch.cuda.init()
    try:
        section = importlib.import_module(f"sections.{name}")
        return case.to_json(section.measure(settings))
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def pythons(args: argparse.Namespace) -> dict[str, str]:
    """Name of another system -> the Python of its environment; those that are needed."""
    installs = foreign.JAXMARL if args.device == "cpu" else foreign.JAXMARL_GPU
    needed = {
        BENCHMARL: ("iteration", args.benchmarl_python, foreign.BENCHMARL),
        JAXMARL: ("simple_spread", args.jaxmarl_python, installs),
    }
    found = {}
    for name, (section, given_python, packages) in needed.items():
        if section not in args.only or name.lower() in args.without:
            continue
        folder = args.environments / name.lower()
        python = given_python or foreign.make_environment(folder, packages)
        found[name] = str(Path(python).absolute())
    return found


def measure_all(args: argparse.Namespace) -> tuple[dict[int, Any], dict[int, Any]]:
    """Number of threads -> the machine's rates, and -> section -> cases or a failure."""
    device, others = args.device, pythons(args)
    rates = report.for_each_number_of_threads(calibrate.measure, args.threads, device, args.quick)
    found: dict[int, dict[str, Any]] = {threads: {} for threads in args.threads}
    for name in args.only:
        for threads in args.threads:
            kept = _results_path(name, threads, args)
            if kept is not None and kept.is_file():
                text = json.loads(kept.read_text(encoding="utf-8"))
            else:
                settings = Settings(
                    device,
                    args.execution,
                    args.quick,
                    args.rounds,
                    args.seconds,
                    others,
                    rates[threads],
                )
                print(f"{name}:", file=sys.stderr)
                text = report.for_each_number_of_threads(measure, [threads], name, settings)
                text = text[threads]
                if kept is not None and not isinstance(text, str):
                    kept.parent.mkdir(parents=True, exist_ok=True)
                    kept.write_text(json.dumps(text) + "\n", encoding="utf-8")
            found[threads][name] = text if isinstance(text, str) else case.from_json(text)
    return rates, found


def _results_path(name: str, threads: int, args: argparse.Namespace) -> Path | None:
    if args.results is None:
        return None
    variant = f"{args.device}_{args.execution}{'_quick' if args.quick else ''}"
    return args.results / f"{name}_{variant}_{threads}.json"


def parse_args() -> argparse.Namespace:
    """Reads the command line."""
    parser = report.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--execution", choices=("eager", "compile", "cudagraph"))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit of a case")
    parser.add_argument("--without", nargs="+", default=[], choices=("benchmarl", "jaxmarl"))
    parser.add_argument("--benchmarl-python", type=Path)
    parser.add_argument("--jaxmarl-python", type=Path)
    parser.add_argument(
        "--environments",
        type=Path,
        default=foreign.environments(),
        help="folder of the virtual environments of BenchMARL and JaxMARL",
    )
    parser.add_argument("--results", type=Path, help="folder for the sections' measurements")
    parser.add_argument("--picture", type=Path, help="file of the picture, without --write")
    args = parser.parse_args()
    if args.execution is None:
        args.execution = "compile" if args.device == "cpu" else "cudagraph"
    if args.device == "cuda":
        args.threads = args.threads[:1]
    if args.quick:
        args.write = False
    return args


def main() -> None:
    """Measures, reports and draws."""
    args = parse_args()
    rates, found = measure_all(args)
    sections = []
    for threads in args.threads:
        counted = report.count_of(threads, "thread")
        table = report.markdown_table(["", "rate"], calibrate.rows(rates[threads]))
        sections.append((f"This machine, {counted}", table))
    for name in args.only:
        section = importlib.import_module(f"sections.{name}")
        parts = [" ".join(section.TEXT.replace("``", "`").split())]
        for threads in args.threads:
            cases = found[threads][name]
            text = f"failed: {cases}" if isinstance(cases, str) else case.table(cases)
            parts.append(f"{report.count_of(threads, 'thread').capitalize()}:\n\n{text}")
        sections.append((section.TITLE, "\n\n".join(parts)))
    report_name = (
        "one_program" if args.only == list(SECTIONS) else "_".join(["one_program", *args.only])
    )
    first = args.threads[0]
    plotted_sections = {name: x for name, x in found[first].items() if not isinstance(x, str)}
    path = report.file_name(report_name, "png", args.device) if args.write else args.picture
    if path is not None and any(name != "groups" for name in plotted_sections):
        where = report.count_of(first, "thread") if args.device == "cpu" else "GPU"
        picture.draw(plotted_sections, f"torchrl_marl, execution={args.execution!r}, {where}", path)
        if args.write:
            sections.insert(0, ("Times faster", f"![times faster]({path.name})"))
    others = {
        name: text
        for by_section in found.values()
        for cases in by_section.values()
        if not isinstance(cases, str)
        for one in cases
        for name, text in one.versions.items()
    }
    report.publish(
        report_name,
        "One program",
        sections,
        {
            "device": args.device,
            "execution": args.execution,
            "rounds": f"at most {args.rounds}",
            **others,
        },
        """Within a section all candidates are measured in one process, BenchMARL and JaxMARL in
        processes that wait for their turn, one after the other in random order every round; ms and
        frames/s are from medians over the rounds, "times" is the median (and the quartiles) of the
        rounds' ratios. Compiling is part of the warm-up, not of a measurement. A frame is a step
        of one env. "Of the limit" divides the least time for the bytes that a step, an action or
        an update must move and for its arithmetic, each at the rate measured in the same run, by
        the time taken; on a CPU small batches stay in its caches, which are faster than memory.
        Kernels and waits are counted in one step: operations that torch dispatches (views left
        out) and kernels of compiled graphs, and what makes a GPU's host wait.""",
        write=args.write,
        device=args.device,
    )


if __name__ == "__main__":
    main()
