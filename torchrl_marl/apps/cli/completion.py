"""Completion of commands, recipes and settings in a shell, by argcomplete."""

from __future__ import annotations

import argparse
import os
from typing import Any

__all__ = ["complete"]

_WITH_RECIPES = ("train", "tune", "sweep")


def complete(parser: argparse.ArgumentParser) -> None:
    """Answers a shell that asks for completions, and exits; otherwise does nothing.

    Args:
        parser (ArgumentParser): parser of the command line.
    """
    if "_ARGCOMPLETE" not in os.environ:
        return
    try:
        import argcomplete
    except ImportError:
        raise SystemExit(1) from None  # the shell then completes nothing
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                _add_completers(name, command)
    argcomplete.autocomplete(parser)


def _add_completers(name: str, command: argparse.ArgumentParser) -> None:
    for action in command._actions:
        if action.dest == "settings" and name in _WITH_RECIPES:
            action.completer = _complete_setting  # type: ignore[attr-defined]
        elif action.dest == "settings" and name == "evaluate":
            action.completer = _complete_environment  # type: ignore[attr-defined]
        elif action.dest == "settings" and name == "suite":
            action.completer = _complete_suite  # type: ignore[attr-defined]


def _complete_setting(prefix: str, **more: Any) -> list[str]:
    """Returns recipes and ``key=``, or ``key=value`` for a setting with named values."""
    from torchrl_marl.recipes import explain, recipe_names

    key, equals, _ = prefix.partition("=")
    if not equals:
        return [*recipe_names(), *(f"{setting.key}=" for setting in explain())]
    (words,) = [setting.words for setting in explain() if setting.key == key] or [{}]
    return [f"{key}={word}" for word in words]


def _complete_environment(prefix: str, **more: Any) -> list[str]:
    """Returns the settings of ``evaluate``, which are those of the environment."""
    return [word for word in _complete_setting(prefix) if word.startswith("env.")]


def _complete_suite(prefix: str, **more: Any) -> list[str]:
    from torchrl_marl.apps.suites.plan import suite_names

    return [*suite_names(), "algorithms=", "tasks=", "seeds=", "frames="]
