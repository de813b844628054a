"""The parser of the command line, made of its commands."""

from __future__ import annotations

import argparse
import importlib.metadata
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torchrl_marl
from torchrl_marl.arguments.deploying import add_export, add_serve
from torchrl_marl.arguments.learning import add_suite, add_train, add_tune
from torchrl_marl.arguments.playing import add_compare, add_crossplay, add_evaluate, add_league
from torchrl_marl.arguments.showing import add_list, add_plot, add_report
from torchrl_marl.errors import ConfigError

__all__ = ["COMMANDS", "make_parser"]

_COMMANDS: dict[str, Callable[[Any], None]] = {
    "train": add_train,
    "tune": add_tune,
    "suite": add_suite,
    "evaluate": add_evaluate,
    "compare": add_compare,
    "crossplay": add_crossplay,
    "league": add_league,
    "export": add_export,
    "serve": add_serve,
    "plot": add_plot,
    "report": add_report,
    "list": add_list,
}
COMMANDS = tuple(_COMMANDS)
"""Their names."""


class _Parser(argparse.ArgumentParser):
    """Tells a wrong argument as every other error is told."""

    late_epilog: Callable[[], str] | None = None

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)  # `--seed` is not `--seeds`

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; `{self.prog} --help` shows how.")

    def format_help(self) -> str:
        if self.late_epilog is not None:
            self.epilog = self.late_epilog()
        return super().format_help()


def make_parser() -> argparse.ArgumentParser:
    """Builds the parser of the command line; ``rest`` names what takes further words."""
    parser = _Parser(
        prog="torchrl-marl",
        description="Multi-agent reinforcement learning on TorchRL.",
        epilog="first steps:\n"
        "  torchrl-marl train              train the default recipe\n"
        "  torchrl-marl list               see recipes, scenarios and algorithms\n"
        "  torchrl-marl train --help       see every setting",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    for add in _COMMANDS.values():
        add(commands)
    return parser


class _Version(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="show the versions and leave")

    def __call__(self, *_: Any) -> NoReturn:
        versions = [f"torchrl-marl {torchrl_marl.__version__}"]
        for package in ("torchrl", "torch"):
            try:
                versions.append(f"{package} {importlib.metadata.version(package)}")
            except importlib.metadata.PackageNotFoundError:
                versions.append(f"{package} is not installed")
        print(f"{versions[0]} ({', '.join(versions[1:])})")
        raise SystemExit(0)
